"""What a `LaunchSpec` accepts, and how it refuses the rest."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

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
        "null",
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


def refused(message: str, **settings: Any) -> None:
    entrypoint = settings.pop("entrypoint", "x.py")
    with pytest.raises(SpecError) as caught:
        LaunchSpec(entrypoint, **settings)
    assert str(caught.value) == message
    assert "\n" not in message


ENTRYPOINT = "must be a script path, an argv list, a function, a Script, a Module or a Command"


@pytest.mark.parametrize(
    ("entrypoint", "message"),
    [
        ("", "entrypoint: must be a path (got '')"),
        ("a\0b", "entrypoint: must be a path (got 'a\\x00b')"),
        (5, f"entrypoint: {ENTRYPOINT} (got 5)"),
        (None, f"entrypoint: {ENTRYPOINT} (got None)"),
        (b"x.py", f"entrypoint: {ENTRYPOINT} (got b'x.py')"),
        ([], "entrypoint: must start with a program (got [])"),
        ([""], "entrypoint: must start with a program (got [''])"),
        (["a", None], "entrypoint: must be text, a path or a number (got None)"),
        (["a", True], "entrypoint: must be text, a path or a number (got True)"),
        (["a", "\0"], "entrypoint: must be text without NUL (got '\\x00')"),
        (Module("a-b"), "entrypoint: must be the dotted name of a module (got 'a-b')"),
        (Module("a..b"), "entrypoint: must be the dotted name of a module (got 'a..b')"),
        (Module(""), "entrypoint: must be the dotted name of a module (got '')"),
        (Script(""), "entrypoint: must be a path (got '')"),
        (Command(()), "entrypoint: must start with a program (got [])"),
    ],
)
def test_an_invalid_entrypoint_is_refused(entrypoint: object, message: str) -> None:
    refused(message, entrypoint=entrypoint)


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
    ("settings", "message"),
    [
        (
            {"start_method": "thread"},
            "start_method: must be 'spawn', 'fork' or 'forkserver' (got 'thread')",
        ),
        ({"preload": ["json", "os"]}, "preload: needs start method 'forkserver' (got 'json,os')"),
        (
            {"preload": ["a-b"], "start_method": "forkserver"},
            "preload: must be the dotted name of a module (got 'a-b')",
        ),
        ({"preload": "json", "start_method": "forkserver"}, "preload: must be a list (got 'json')"),
        ({"entrypoint": Function(cast("Any", 5))}, "entrypoint: must be callable (got 5)"),
        ({"entrypoint": len, "args": "ab"}, "args: must be a list (got 'ab')"),
    ],
)
def test_settings_of_functions_are_checked(settings: dict[str, Any], message: str) -> None:
    refused(message, **settings)


WHOLE = "must be a whole number of at least"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"args": "abc"}, "args: must be a list (got 'abc')"),
        ({"args": 5}, "args: must be a list (got 5)"),
        ({"args": [object]}, "args: must be text, a path or a number (got"),
        ({"nproc_per_node": 0}, "nproc_per_node: must be a number from 1 to 65536"),
        ({"nproc_per_node": -2}, "nproc_per_node: must be a number from 1 to 65536"),
        ({"nproc_per_node": True}, "nproc_per_node: must be a number from 1 to 65536"),
        ({"nproc_per_node": "TPU v5"}, "nproc_per_node: must be a number from 1 to 65536"),
        ({"nproc_per_node": 1.5}, "nproc_per_node: must be a number from 1 to 65536"),
        ({"nnodes": 0}, "nnodes: must be N or MIN:MAX with 1 <= MIN <= MAX (got 0)"),
        ({"nnodes": "2:1"}, "nnodes: must be N or MIN:MAX with 1 <= MIN <= MAX (got '2:1')"),
        ({"nnodes": True}, "nnodes: must be N or MIN:MAX"),
        ({"nnodes": (True, 2)}, "nnodes: must be N or MIN:MAX"),
        ({"max_restarts": -1}, f"max_restarts: {WHOLE} 0 (got -1)"),
        ({"max_restarts": True}, f"max_restarts: {WHOLE} 0 (got True)"),
        ({"max_restarts": "3"}, f"max_restarts: {WHOLE} 0 (got '3')"),
        ({"env": [("A", "b")]}, "env: must be a mapping of names to texts"),
        ({"env": {"A=": "b"}}, "env: must hold names without '=' or NUL (got 'A=')"),
        ({"env": {"": "b"}}, "env: must hold names without '=' or NUL (got '')"),
        ({"env": {1: "b"}}, "env: must be text without NUL (got 1)"),
        ({"env": {"A": 1}}, "env['A']: must be text without NUL (got 1)"),
        ({"env": {"A": "\0"}}, "env['A']: must be text without NUL (got '\\x00')"),
        ({"cwd": ""}, "cwd: must be a path (got '')"),
        ({"cwd": 5}, "cwd: must be a path (got 5)"),
        ({"role": None}, "role: must be text without NUL (got None)"),
        ({"logs": {}}, "logs: must be a LogSpec (got {})"),
        ({"restart": 3}, "restart: must be a RestartPolicy (got 3)"),
        ({"stop": 3}, "stop: must be a StopPlan, such as StopPlan.within(10) (got 3)"),
        ({"rendezvous": "c10d"}, "rendezvous: must be a RendezvousSpec (got 'c10d')"),
        ({"run_id": ""}, "run_id: must not be empty (got '')"),
        ({"run_id": 5}, "run_id: must be text without NUL (got 5)"),
        ({"stdin": "all"}, "stdin: must be 'null' or 'rank0' (got 'all')"),
        ({"python": ""}, "python: must be a path (got '')"),
        ({"event_history": 0}, f"event_history: {WHOLE} 1 (got 0)"),
    ],
)
def test_an_invalid_setting_is_one_line(settings: dict[str, Any], message: str) -> None:
    """Field, problem and value."""
    with pytest.raises(SpecError) as caught:
        LaunchSpec("x.py", **settings)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


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
