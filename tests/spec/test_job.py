"""What a `LaunchSpec` accepts, and how it refuses the rest."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from elastic_aio.errors import SpecError
from elastic_aio.spec.job import Command, Function, LaunchSpec, Module, NodeRange, Script
from elastic_aio.spec.logs import LogSpec
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.spec.restart import RestartAction, RestartPolicy
from elastic_aio.spec.stop import StopPlan


def test_the_defaults_are_torchruns() -> None:
    """A script alone makes one worker, no restart, 30 s of grace."""
    spec = LaunchSpec("train.py")
    assert spec.entrypoint == Script("train.py")
    assert (spec.args, spec.nproc_per_node, spec.max_restarts) == ((), 1, 0)
    assert (spec.role, spec.run_id, spec.cwd, spec.stdin, spec.python) == (
        "default",
        None,
        None,
        "auto",
        None,
    )
    assert dict(spec.env) == {}
    assert (spec.logs, spec.restart, spec.stop) == (LogSpec(), RestartPolicy(), StopPlan())
    assert spec.nnodes == NodeRange(1, 1)
    assert spec.rendezvous == RendezvousSpec()
    assert spec.event_history == 10_000


@pytest.mark.parametrize(
    ("value", "entrypoint", "name"),
    [
        ("a/b.py", Script("a/b.py"), "a/b.py"),
        (Path("a/b.py"), Script("a/b.py"), "a/b.py"),
        (Script("x.py"), Script("x.py"), "x.py"),
        (Module("pkg.mod"), Module("pkg.mod"), "pkg.mod"),
        (Command(("sh", "-c", "true")), Command(("sh", "-c", "true")), "sh"),
        (["sleep", 5, 0.5, Path("/x")], Command(("sleep", "5", "0.5", "/x")), "sleep"),
        (("true",), Command(("true",)), "true"),
    ],
)
def test_an_entrypoint_has_one_meaning(value: Any, entrypoint: object, name: str) -> None:
    """A path is a script, a list is a command; numbers in it become text."""
    spec = LaunchSpec(value)
    assert spec.entrypoint == entrypoint
    assert spec.name == name


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["/usr/bin/python3.13t", "-u", "a/b.py", "x"], "a/b.py"),
        (["python", "-X", "dev", "-Wignore", "-m", "pkg.mod", "x"], "pkg.mod"),
        (["python", "-W", "ignore", "b.py"], "b.py"),
        (["python3", "-u", "-c", "pass", "x"], "python3"),
        (["python3", "-", "x"], "python3"),
        (["python3", "-m"], "python3"),
        (["pythonic", "-u", "b.py"], "pythonic"),
    ],
)
@pytest.mark.parametrize("split", [1, 2, 99])
def test_a_command_of_an_interpreter_has_the_name_of_its_program(
    argv: list[str], name: str, split: int
) -> None:
    """Wherever the arguments of all workers begin."""
    assert LaunchSpec(argv[:split], args=argv[split:]).name == name


@pytest.mark.parametrize("argv", ["true", b"true", 5, None])
def test_a_command_needs_a_list(argv: Any) -> None:
    """Any other iterable is refused, not unpacked."""
    with pytest.raises(SpecError, match=r"^entrypoint: "):
        LaunchSpec(Command(argv))


def test_a_function_is_an_entrypoint() -> None:
    """With any arguments; its name appears in messages."""
    marker = object()
    spec = LaunchSpec(len, args=[marker], start_method="fork")
    assert spec.entrypoint == Function(len)
    assert spec.args == (marker,)
    assert spec.name == "len"
    assert LaunchSpec(Function(len, "measure")).name == "measure"
    assert spec.replace(args=[1]).entrypoint == Function(len)


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (1, 1, 1, "1"),
        ("3", 3, 3, "3"),
        ("1:4", 1, 4, "1:4"),
        ((2, 5), 2, 5, "2:5"),
        ([2, 2], 2, 2, "2"),
        (NodeRange(1, 3), 1, 3, "1:3"),
    ],
)
def test_node_ranges_are_parsed_and_formatted(
    value: object, low: int, high: int, text: str
) -> None:
    """Each form gives the same pair, and its text parses to it."""
    nodes = NodeRange.parse(value)
    assert (nodes.minimum, nodes.maximum) == (low, high)
    assert str(nodes) == text
    assert NodeRange.parse(text) == nodes


@pytest.mark.parametrize(
    "value", ["", ":", "1:", ":1", "1:2:3", "a", "-1", "1.0", None, (1,) * 3, (), 1.0, "9" * 5000]
)
def test_other_node_ranges_are_refused(value: object) -> None:
    with pytest.raises(SpecError, match=r"^nnodes: must be N or MIN:MAX with 1 <= MIN <= MAX"):
        NodeRange.parse(value)


def test_a_spec_is_frozen() -> None:
    """Changing the mapping passed as `env` has no effect on it."""
    env = {"A": "1"}
    spec = LaunchSpec("x.py", env=env)
    env["A"] = "2"
    assert spec.env == {"A": "1"}
    with pytest.raises(TypeError):
        spec.env["A"] = "3"  # type: ignore[index]  # that is the point
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.role = "other"  # type: ignore[misc]  # that is the point


def test_replace_checks_again() -> None:
    spec = LaunchSpec(["true"], nproc_per_node=2, env={"A": "1"}, run_id="r", nnodes="1:1")
    assert spec.replace() == spec
    other = spec.replace(nproc_per_node=4, run_id=None)
    assert (other.nproc_per_node, other.run_id, other.env) == (4, None, {"A": "1"})
    assert spec.nproc_per_node == 2
    with pytest.raises(SpecError, match="nproc_per_node"):
        spec.replace(nproc_per_node=0)


@pytest.mark.parametrize(
    ("restart", "max_restarts", "message"),
    [
        (RestartPolicy(window=(3, 60.0)), 2, "restart.window: cannot be exhausted with"),
        (RestartPolicy(restart_on=frozenset({3})), 0, "restart.restart_on: has no effect unless"),
        (
            RestartPolicy(decide=lambda _: RestartAction.DEFAULT),
            0,
            "restart.decide: has no effect unless",
        ),
    ],
)
def test_a_restart_policy_without_effect_is_refused(
    restart: RestartPolicy, max_restarts: int, message: str
) -> None:
    """`max_restarts` decides whether it has one."""
    with pytest.raises(SpecError) as caught:
        LaunchSpec("x.py", restart=restart, max_restarts=max_restarts)
    assert str(caught.value).startswith(message)
