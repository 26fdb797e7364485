"""What can be asked for, and how what cannot is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest

from elastic_aio.errors import SpecError
from elastic_aio.policy import RestartPolicy, StopPlan
from elastic_aio.rendezvousspec import RendezvousSpec
from elastic_aio.spec import (
    Command,
    Function,
    LaunchSpec,
    LogSpec,
    Module,
    NodeRange,
    Script,
)
from elastic_aio.std import Std, StdMap


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
    assert spec.events_kept == 10_000


@pytest.mark.parametrize(
    ("given", "kept", "name"),
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
def test_an_entrypoint_has_one_meaning(given: Any, kept: object, name: str) -> None:
    """A path is a script, a list is a command, numbers in it become text."""
    spec = LaunchSpec(given)
    assert spec.entrypoint == kept
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
        ("", "entrypoint: must be a path, not ''"),
        ("a\0b", "entrypoint: must be a path, not 'a\\x00b'"),
        (5, f"entrypoint: {ENTRYPOINT}, not 5"),
        (None, f"entrypoint: {ENTRYPOINT}, not None"),
        (b"x.py", f"entrypoint: {ENTRYPOINT}, not b'x.py'"),
        ([], "entrypoint: an argv list must start with a program, not []"),
        ([""], "entrypoint: an argv list must start with a program, not ['']"),
        (["a", None], "entrypoint: an argument must be text, a path or a number, not None"),
        (["a", True], "entrypoint: an argument must be text, a path or a number, not True"),
        (["a", "\0"], "entrypoint: must be text without NUL, not '\\x00'"),
        (Module("a-b"), "entrypoint: a module must have a dotted name, not 'a-b'"),
        (Module("a..b"), "entrypoint: a module must have a dotted name, not 'a..b'"),
        (Module(""), "entrypoint: a module must have a dotted name, not ''"),
        (Script(""), "entrypoint: must be a path, not ''"),
        (Command(()), "entrypoint: an argv list must start with a program, not []"),
    ],
)
def test_an_impossible_entrypoint_is_refused(entrypoint: object, message: str) -> None:
    """Each wrong entry point gives one line that says what is accepted."""
    refused(message, entrypoint=entrypoint)


@pytest.mark.parametrize("argv", ["true", b"true", 5, None])
def test_a_command_needs_a_list(argv: Any) -> None:
    """A `Command` made of something else than a list is refused, not taken apart."""
    with pytest.raises(SpecError, match=r"^entrypoint: "):
        LaunchSpec(Command(argv))


def test_a_function_is_an_entrypoint() -> None:
    """A callable is taken as it is, with whatever arguments; it has a name for messages."""
    marker = object()
    spec = LaunchSpec(len, args=[marker], start_method="fork")
    assert spec.entrypoint == Function(len)
    assert spec.args == (marker,)
    assert spec.name == "len"
    assert LaunchSpec(Function(len, "measure")).name == "measure"
    assert spec.replaced(args=[1]).entrypoint == Function(len)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"start_method": "thread"},
            "start_method: must be 'spawn', 'fork' or 'forkserver', not 'thread'",
        ),
        ({"preload": ["json"]}, "preload: needs start_method='forkserver', not ('json',)"),
        (
            {"preload": ["a-b"], "start_method": "forkserver"},
            "preload: a module must have a dotted name, not 'a-b'",
        ),
        ({"preload": "json", "start_method": "forkserver"}, "preload: must be a list, not 'json'"),
        (
            {"entrypoint": Function(cast("Any", 5))},
            "entrypoint: a function must be callable, not 5",
        ),
        ({"entrypoint": len, "args": "ab"}, "args: must be a list, not 'ab'"),
    ],
)
def test_settings_of_functions_are_checked(settings: dict[str, Any], message: str) -> None:
    """What cannot be meant is refused in one line."""
    refused(message, **settings)


WHOLE = "must be a whole number of at least"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"args": "abc"}, "args: must be a list, not 'abc'"),
        ({"args": 5}, "args: must be a list, not 5"),
        ({"args": [object]}, "args: an argument must be text, a path or a number, not"),
        ({"nproc_per_node": 0}, "nproc_per_node: must be a number from 1 to 65536"),
        ({"nproc_per_node": -2}, "nproc_per_node: must be a number from 1 to 65536"),
        ({"nproc_per_node": True}, "nproc_per_node: must be a number from 1 to 65536"),
        ({"nproc_per_node": "tpu"}, "nproc_per_node: must be a number from 1 to 65536"),
        ({"nproc_per_node": 1.5}, "nproc_per_node: must be a number from 1 to 65536"),
        ({"nnodes": 0}, "nnodes: must be N or MIN:MAX with 1 <= MIN <= MAX, not 0"),
        ({"nnodes": "2:1"}, "nnodes: must be N or MIN:MAX with 1 <= MIN <= MAX, not '2:1'"),
        ({"nnodes": True}, "nnodes: must be N or MIN:MAX"),
        ({"nnodes": (True, 2)}, "nnodes: must be N or MIN:MAX"),
        ({"max_restarts": -1}, f"max_restarts: {WHOLE} 0, not -1"),
        ({"max_restarts": True}, f"max_restarts: {WHOLE} 0, not True"),
        ({"max_restarts": "3"}, f"max_restarts: {WHOLE} 0, not '3'"),
        ({"env": [("A", "b")]}, "env: must be a mapping of names to texts"),
        ({"env": {"A=": "b"}}, "env: a name must be text without '=' or NUL, not 'A='"),
        ({"env": {"": "b"}}, "env: a name must be text without '=' or NUL, not ''"),
        ({"env": {1: "b"}}, "env: a name must be text without '=' or NUL, not 1"),
        ({"env": {"A": 1}}, "env['A']: must be text without NUL, not 1"),
        ({"env": {"A": "\0"}}, "env['A']: must be text without NUL, not '\\x00'"),
        ({"cwd": ""}, "cwd: must be a path, not ''"),
        ({"cwd": 5}, "cwd: must be a path, not 5"),
        ({"role": None}, "role: must be text without NUL, not None"),
        ({"logs": {}}, "logs: must be a LogSpec, not {}"),
        ({"restart": 3}, "restart: must be a RestartPolicy, not 3"),
        ({"stop": 3}, "stop: must be a StopPlan, not 3"),
        ({"rendezvous": "c10d"}, "rendezvous: must be a RendezvousSpec, not 'c10d'"),
        ({"run_id": ""}, "run_id: must not be empty, not ''"),
        ({"run_id": 5}, "run_id: must be text without NUL, not 5"),
        ({"stdin": "all"}, "stdin: must be 'null' or 'rank0', not 'all'"),
        ({"python": ""}, "python: must be a path, not ''"),
        ({"events_kept": 0}, f"events_kept: {WHOLE} 1, not 0"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(settings: dict[str, Any], message: str) -> None:
    """Field, value and what is accepted stand in one line."""
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
def test_node_ranges_are_read_and_written(value: object, low: int, high: int, text: str) -> None:
    """Each accepted form gives the same pair, and its text can be read again."""
    nodes = NodeRange.parse(value)
    assert (nodes.minimum, nodes.maximum) == (low, high)
    assert str(nodes) == text
    assert NodeRange.parse(text) == nodes


@pytest.mark.parametrize(
    "value", ["", ":", "1:", ":1", "1:2:3", "a", "-1", "1.0", None, (1,) * 3, (), 1.0, "9" * 5000]
)
def test_other_node_ranges_are_refused(value: object) -> None:
    """What is no N and no MIN:MAX is a SpecError."""
    with pytest.raises(SpecError, match=r"^nnodes: must be N or MIN:MAX with 1 <= MIN <= MAX"):
        NodeRange.parse(value)


def test_a_frozen_spec_cannot_be_changed_from_outside() -> None:
    """Fields are frozen, and the mapping that was given can change freely."""
    given = {"A": "1"}
    spec = LaunchSpec("x.py", env=given)
    given["A"] = "2"
    assert spec.env == {"A": "1"}
    with pytest.raises(TypeError):
        spec.env["A"] = "3"  # type: ignore[index]  # that is the point
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.role = "other"  # type: ignore[misc]  # that is the point


def test_a_copy_is_checked_again() -> None:
    """`replaced` changes some settings, keeps the rest and refuses what does not fit."""
    spec = LaunchSpec(["true"], nproc_per_node=2, env={"A": "1"}, run_id="r", nnodes="1:1")
    assert spec.replaced() == spec
    other = spec.replaced(nproc_per_node=4, run_id=None)
    assert (other.nproc_per_node, other.run_id, other.env) == (4, None, {"A": "1"})
    assert spec.nproc_per_node == 2
    with pytest.raises(SpecError, match="nproc_per_node"):
        spec.replaced(nproc_per_node=0)


def test_log_settings_are_parsed_when_made() -> None:
    """Texts and mappings become maps, ranks a frozen set, a path a text."""
    logs = LogSpec(
        log_dir=Path("/tmp/x"),
        redirects="0-1:3",
        tee={1: 1},
        local_ranks_filter=[1, 0],
        prefix="${rank}|",
    )
    assert logs.log_dir == "/tmp/x"
    assert logs.redirects.of(1) is Std.ALL
    assert logs.tee == StdMap(by_rank=((1, Std.OUT),))
    assert logs.local_ranks_filter == frozenset({0, 1})
    assert not logs.is_off
    assert LogSpec(log_dir="/dev/null").is_off


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"log_dir": ""}, "logs.log_dir: must be a path, not ''"),
        ({"redirects": "x"}, "logs.redirects: must be a mask 0-3"),
        ({"tee": 9}, "logs.tee: must be a mask 0-3"),
        ({"local_ranks_filter": "0"}, "logs.local_ranks_filter: must be a list, not '0'"),
        ({"local_ranks_filter": [-1]}, f"logs.local_ranks_filter: {WHOLE} 0, not -1"),
        ({"prefix": "a\nb"}, "logs.prefix: must be a single line, not 'a\\nb'"),
        ({"prefix": 5}, "logs.prefix: must be text without NUL, not 5"),
    ],
)
def test_a_wrong_log_setting_is_refused(settings: dict[str, Any], message: str) -> None:
    """Each names its field as the user wrote it."""
    with pytest.raises(SpecError) as caught:
        LogSpec(**settings)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"redirects": {2: 1}}, "logs.redirects: local ranks must be from 0 to 1, not 2"),
        ({"tee": "10:1"}, "logs.tee: local ranks must be from 0 to 1, not 10"),
        ({"local_ranks_filter": {5}}, "logs.local_ranks_filter: local ranks must be from 0 to 1"),
    ],
)
def test_logs_of_a_rank_that_does_not_exist_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    """The ranks of the logs are checked against the number of workers, once it is known."""
    with pytest.raises(SpecError) as caught:
        LaunchSpec("x.py", nproc_per_node=2, logs=LogSpec(**settings))
    assert str(caught.value).startswith(message)
    LaunchSpec("x.py", nproc_per_node="auto", logs=LogSpec(**settings))


@pytest.mark.parametrize(
    ("restart", "max_restarts", "message"),
    [
        (RestartPolicy(window=(3, 60.0)), 2, "restart.window: can never be reached with"),
        (RestartPolicy(restart_on=frozenset({3})), 0, "restart.restart_on: has no effect unless"),
        (RestartPolicy(decide=lambda _: None), 0, "restart.decide: has no effect unless"),  # type: ignore[arg-type,return-value]  # never called
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    restart: RestartPolicy, max_restarts: int, message: str
) -> None:
    """A restart policy that `max_restarts` makes meaningless is refused at once."""
    with pytest.raises(SpecError) as caught:
        LaunchSpec("x.py", restart=restart, max_restarts=max_restarts)
    assert str(caught.value).startswith(message)
