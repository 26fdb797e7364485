"""The public surface, name by name."""

from __future__ import annotations

import importlib
import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest

import elastic_aio

PUBLIC = [
    "Agent",
    "AttemptFailed",
    "AttemptResult",
    "Backoff",
    "Command",
    "ConsoleLost",
    "ConsoleTarget",
    "ControlUnavailable",
    "CoordinatorChanged",
    "DeadlineMissed",
    "Decide",
    "ElasticAioError",
    "EndCause",
    "EngineSpec",
    "Event",
    "EventListener",
    "EventReader",
    "EventsMissed",
    "ExitStatus",
    "Failure",
    "Function",
    "Goodput",
    "GuardianLost",
    "GuardianRestarted",
    "HostError",
    "InternalError",
    "JobEnded",
    "JobEvents",
    "JobFailed",
    "JobFinished",
    "JobStarted",
    "JobState",
    "JobStatus",
    "JobStopped",
    "LaunchResult",
    "LaunchSpec",
    "LeftoversFound",
    "LivenessSpec",
    "LogDiskFull",
    "LogLine",
    "LogReader",
    "LogSpec",
    "LogsNotRemoved",
    "MembershipChanged",
    "MembershipPending",
    "Module",
    "NodeJoined",
    "NodeLeft",
    "NodeLosses",
    "NodeLost",
    "NodeRange",
    "NodeRefused",
    "NodeStandby",
    "NumaMode",
    "OutputLost",
    "RendezvousFailed",
    "RendezvousSpec",
    "RendezvousStoreAwaited",
    "RendezvousStoreLost",
    "RendezvousStoreRecovered",
    "ResourceUsage",
    "RestartAction",
    "RestartPolicy",
    "RestartWindow",
    "Restarting",
    "RoundFormed",
    "RoundForming",
    "RoundWaiting",
    "Script",
    "SignalForwarded",
    "SignalSpec",
    "SpawnError",
    "SpecError",
    "StackDump",
    "StackFrame",
    "StacksDumped",
    "StandbyPromoted",
    "StartMethod",
    "StatusServer",
    "Std",
    "StdMap",
    "StopEscalated",
    "StopPlan",
    "StopRequested",
    "StopScope",
    "StopStep",
    "StoreClosed",
    "StoreError",
    "StoreLost",
    "StoreRefused",
    "StoreTimeout",
    "TextOutput",
    "ThreadStack",
    "TimerExpired",
    "TimerRejected",
    "TlsSpec",
    "WorkerAbandoned",
    "WorkerActivity",
    "WorkerError",
    "WorkerExited",
    "WorkerReady",
    "WorkerResult",
    "WorkerStacks",
    "WorkerStarted",
    "WorkerStatus",
    "WorkerStoreRefused",
    "WorkersIdle",
    "WorkersUnfinished",
    "__version__",
    "event_from_json",
    "event_to_json",
    "follow_job",
    "format_failure",
    "launch",
    "run",
]


def test_the_public_names() -> None:
    assert vars(elastic_aio)["__all__"] == PUBLIC


ALIASES = {"ConsoleTarget", "Decide", "EventListener", "NumaMode", "StartMethod", "StopScope"}
ALIASES |= {"__version__"}


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in ALIASES])
def test_every_name_is_documented(name: str) -> None:
    value = getattr(elastic_aio, name)
    assert value.__name__ == name
    assert value.__module__.startswith("elastic_aio.")
    text = value.__doc__
    assert text
    assert not text.startswith(f"{name}("), "the docstring is the one that dataclass makes up"


def test_dir_lists_public_names() -> None:
    """Completion in a shell finds names that are not loaded yet."""
    printed = run_python("import elastic_aio; print(' '.join(dir(elastic_aio)))")
    assert set(PUBLIC) <= set(printed.stdout.split())


LAZY = ["elastic_aio", "elastic_aio.store", "elastic_aio.testing"]


@pytest.mark.parametrize("package", LAZY)
def test_type_checkers_see_the_names_that_are_loaded(package: str) -> None:
    """The imports `if TYPE_CHECKING:` name what `lazy_exports` does, from the same modules."""
    module = importlib.import_module(package)
    source = Path(module.__file__ or "").read_text()
    imported = re.findall(r"^ *from (\S+) import (\w+) as \2$", source, re.MULTILINE)
    assert sorted(name for _, name in imported) == module.__all__
    for home, name in imported:
        assert getattr(module, name) is getattr(importlib.import_module(home), name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'elastic_aio' has no attribute 'lunch'"):
        _ = elastic_aio.lunch  # type: ignore[attr-defined,unused-ignore]  # that is the point


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(elastic_aio.__file__).parent.parent,
    )


def test_another_platform_is_one_sentence() -> None:
    """Raised before an import that fails there."""
    ended = run_python("import sys; sys.platform = 'darwin'; import elastic_aio")
    message = "ImportError: elastic_aio needs Linux 5.3 or newer (this is darwin)"
    assert ended.stderr.splitlines()[-1] == message


@pytest.mark.parametrize(
    "start",
    [
        "elastic_aio.launch(spec)",
        "elastic_aio.launch(spec, signals=True)",
        "elastic_aio.Agent(spec).__aenter__()",
        "elastic_aio.follow_job('localhost:1', 'r').__aenter__()",
        "store.connect('localhost:1').__aenter__()",
        "store.StoreServer('localhost').__aenter__()",
        "multiprocessing.spawn(print)",
        "multiprocessing.start_processes('g', 'true', {0: ()}, {0: {}}).__aenter__()",
    ],
)
def test_another_loop_is_one_sentence(start: str) -> None:
    """Trio runs coroutines without asyncio, as `send` does."""
    names = {
        "elastic_aio": elastic_aio,
        "multiprocessing": importlib.import_module("elastic_aio.multiprocessing"),
        "store": importlib.import_module("elastic_aio.store"),
        "spec": elastic_aio.LaunchSpec(["true"]),
    }
    with pytest.raises(RuntimeError, match=r"^elastic_aio runs on asyncio only$"):
        eval(start, names).send(None)


def test_all_names_can_be_imported_at_once() -> None:
    """In a fresh interpreter; tests/typing/star.py is the half of a type checker."""
    code = (
        "import elastic_aio; from elastic_aio import *; print(set(elastic_aio.__all__) - {*dir()})"
    )
    assert run_python(code).stdout == "set()\n"


def test_help_lists_the_public_modules() -> None:
    text = elastic_aio.__doc__ or ""
    named = re.findall(r"^(elastic_aio[.\w]*)  +\S", text, re.MULTILINE)
    assert len(named) == 7
    for name in named:
        assert importlib.import_module(name).__all__


def test_help_shows_the_fields() -> None:
    """With their defaults and docstrings, which Python itself does not keep."""
    text = inspect.getdoc(elastic_aio.RestartPolicy) or ""
    assert text.startswith("Which failures are followed by another attempt")
    assert "\n    healthy_after: float | None = None\n        An attempt that ran" in text
    assert "Fields" in (elastic_aio.StopEscalated.__doc__ or "")
    assert "Fields" not in (elastic_aio.Agent.__doc__ or "")


MODULES = re.findall(r"^(elastic_aio[.\w]*)  ", elastic_aio.__doc__ or "", re.MULTILINE)
CLASSES = [
    pytest.param(value, id=f"{module}.{name}")
    for module in MODULES
    for name in importlib.import_module(module).__all__
    if isinstance(value := getattr(importlib.import_module(module), name), type)
]


@pytest.mark.slow
@pytest.mark.parametrize("owner", CLASSES)
def test_help_shows_every_class(owner: type) -> None:
    """Classes whose metaclass has a docstring of its own among them: `Enum`, `Struct`, `ABC`."""
    text = pydoc.getdoc(owner)
    summary = text.partition("\n")[0]
    assert summary
    assert text == inspect.getdoc(owner)
    assert summary in pydoc.plain(pydoc.render_doc(owner))
    assert not ("Fields:" in text and re.search("^(Args|Attributes):$", text, re.MULTILINE))
    names = [*getattr(owner, "__struct_fields__", getattr(owner, "__dataclass_fields__", ()))]
    for name in names:
        if not name.startswith("_"):
            pattern = rf"`{name}[`.\[]|^    {name}: .*" + r"\n {8}" * ("Fields:" in text)
            assert re.search(pattern, text, re.MULTILINE), name


def test_the_version_is_valid() -> None:
    """Packaging tools accept it."""
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?", elastic_aio.__version__)


def test_the_package_is_typed() -> None:
    assert (Path(elastic_aio.__file__).parent / "py.typed").is_file()


def test_workers_get_few_names() -> None:
    worker = importlib.import_module("elastic_aio.worker")
    assert worker.__all__ == [
        "PendingChange",
        "Timer",
        "WorkerContext",
        "agree_to_change",
        "expires",
        "heartbeat",
        "pending_change",
        "phase",
        "progress",
        "ready",
        "record",
    ]
    assert all(getattr(worker, name).__doc__ for name in worker.__all__)
