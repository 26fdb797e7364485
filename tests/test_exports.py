"""The public surface, name by name."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import elastic_aio

PUBLIC = [
    "Action",
    "Agent",
    "AttemptFailed",
    "AttemptResult",
    "Backoff",
    "Command",
    "ConsoleLost",
    "CoordinatorChanged",
    "ElasticAioError",
    "Event",
    "EventsMissed",
    "ExitStatus",
    "Failure",
    "Function",
    "GuardianReplaced",
    "InternalError",
    "JobEnded",
    "JobFailed",
    "JobFinished",
    "JobStarted",
    "JobState",
    "JobStopped",
    "LaunchResult",
    "LaunchSpec",
    "LogSpec",
    "MembershipChanged",
    "Module",
    "NodeJoined",
    "NodeLeft",
    "NodeLost",
    "NodeRange",
    "NodeRefused",
    "Promoted",
    "RendezvousFailed",
    "RendezvousSpec",
    "RendezvousStoreLost",
    "RendezvousStoreRegained",
    "ResourceUsage",
    "RestartPolicy",
    "RestartWindow",
    "Restarting",
    "RoundFormed",
    "RoundForming",
    "Script",
    "SignalForwarded",
    "SignalSpec",
    "SpawnError",
    "SpecError",
    "StandingBy",
    "Std",
    "StdMap",
    "StopEscalated",
    "StopPlan",
    "StopRequested",
    "StopStep",
    "StoreClosed",
    "StoreError",
    "StoreLost",
    "StoreRefused",
    "StoreTimeout",
    "SurroundingsError",
    "WorkerAbandoned",
    "WorkerError",
    "WorkerExited",
    "WorkerResult",
    "WorkerStarted",
    "__version__",
    "event_from_json",
    "event_to_json",
    "follow_job",
    "format_failure",
    "launch",
    "run",
]


def test_the_public_names_are_these() -> None:
    """A name is added or removed here first."""
    assert sorted(elastic_aio.__all__) == PUBLIC
    assert len(set(elastic_aio.__all__)) == len(elastic_aio.__all__)


@pytest.mark.parametrize("name", [name for name in PUBLIC if not name.startswith("__")])
def test_every_name_can_be_imported_and_explains_itself(name: str) -> None:
    """Each is there, has a docstring, and is listed by the module it comes from."""
    value = getattr(elastic_aio, name)
    assert value.__name__ == name
    assert value.__module__.startswith("elastic_aio.")
    text = value.__doc__
    assert text
    assert not text.startswith(f"{name}("), "the docstring is the one that dataclass makes up"
    assert name in importlib.import_module(value.__module__).__all__


def test_dir_lists_what_is_public() -> None:
    """Completion in a shell finds names that are not loaded yet."""
    code = "import elastic_aio; print(' '.join(dir(elastic_aio)))"
    printed = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=Path(elastic_aio.__file__).parent.parent,
    )
    assert set(PUBLIC) <= set(printed.stdout.split())


def test_an_unknown_name_is_an_attribute_error() -> None:
    """Lazy loading does not turn a typo into something else."""
    with pytest.raises(AttributeError, match=r"module 'elastic_aio' has no attribute 'lunch'"):
        _ = elastic_aio.lunch  # type: ignore[attr-defined,unused-ignore]  # that is the point


def test_the_version_is_one() -> None:
    """The version is text that packaging tools accept."""
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?", elastic_aio.__version__)


def test_the_package_is_typed() -> None:
    """Type checkers of users are told that annotations are there."""
    assert (Path(elastic_aio.__file__).parent / "py.typed").is_file()


def test_workers_get_two_names() -> None:
    """`elastic_aio.worker` has its own small surface."""
    worker = importlib.import_module("elastic_aio.worker")
    assert worker.__all__ == ["WorkerContext", "record"]
    assert all(getattr(worker, name).__doc__ for name in worker.__all__)
