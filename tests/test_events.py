"""Events and their JSON form."""

from __future__ import annotations

import dataclasses
import json
import types
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio import events
from elastic_aio.event_json import SCHEMA, event_from_json, event_to_json
from elastic_aio.events import AttemptFailed, Event, JobFinished, JobStarted, WorkerExited
from elastic_aio.outcome import ExitStatus, Failure, Goodput, JobState, WorkerError

SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=20),
    int: st.integers(-(2**31), 2**63 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    types.NoneType: st.none(),
}


def drawn(kind: Any) -> st.SearchStrategy[Any]:
    """Return values of a type that a field of an event may have: all of its own fields too."""
    if kind in SIMPLE:
        return SIMPLE[kind]
    if isinstance(kind, types.UnionType):
        return st.one_of([*map(drawn, get_args(kind))])
    if get_origin(kind) is tuple:
        return st.lists(drawn(get_args(kind)[0]), max_size=3).map(tuple)
    if issubclass(kind, Enum):
        return st.sampled_from(kind)
    names = getattr(kind, "__struct_fields__", None) or [
        field.name for field in dataclasses.fields(kind)
    ]
    hints = get_type_hints(kind)
    return st.builds(kind, **{name: drawn(hints[name]) for name in names})


KINDS = Event.__subclasses__()
EVENTS = st.one_of([*map(drawn, KINDS)])


def test_every_event_type_is_exported() -> None:
    """Those of nodes too, whose module is loaded when the first of them is used."""
    namespace: dict[str, object] = {}
    exec("from elastic_aio.events import *", namespace)
    assert {kind.__name__ for kind in KINDS} <= namespace.keys() & set(dir(events))


@given(EVENTS)
def test_an_event_is_decoded_to_itself(event: Event) -> None:
    """Every type, as bytes and as text, from one line."""
    line = event_to_json(event)
    assert b"\n" not in line
    assert event_from_json(line) == event
    assert event_from_json(line.decode("utf-8")) == event
    assert type(event_from_json(line)) is type(event)


@given(EVENTS)
def test_unknown_fields_are_ignored(event: Event) -> None:
    """A later version may add some."""
    document = json.loads(event_to_json(event))
    document["added_later"] = {"x": [1, None]}
    assert event_from_json(json.dumps(document)) == event


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))
def test_an_event_is_frozen(kind: type[Event]) -> None:
    """All readers share the same value."""
    assert kind.__struct_config__.frozen
    assert kind.__doc__


def test_the_json_of_a_nested_event() -> None:
    culprit = Failure(
        rank=1,
        local_rank=1,
        pid=42,
        host="here",
        status=ExitStatus(signal=9),
        time=1.5,
        order=0,
        error=WorkerError("ValueError: x", None, 1.5, "/logs/error.json"),
        stderr_tail=("a", "b"),
    )
    event = AttemptFailed(
        seq=3, time=2.0, run_id="r", attempt=0, node="here", root=culprit, failures=(culprit,)
    )
    failure = (
        '{"rank":1,"local_rank":1,"pid":42,"host":"here","status":{"code":null,"signal":9},'
        '"time":1.5,"order":0,"is_victim":false,"error":{"message":"ValueError: x",'
        '"traceback":null,"timestamp":1.5,"path":"/logs/error.json","pid":null},'
        '"message":"",'
        '"stderr_tail":["a","b"],"stderr_path":null,"notes":[],"reason":"","cause":""}'
    )
    assert event_to_json(event).decode() == (
        '{"schema":1,"event":"AttemptFailed","seq":3,"time":2.0,"run_id":"r","attempt":0,'
        f'"node":"here","root":{failure},"failures":[{failure}]}}'
    )


def test_the_json_of_the_last_event() -> None:
    """Scripts may rely on the names of these fields."""
    event = JobFinished(
        seq=9,
        time=1.0,
        run_id="r",
        node="n",
        state=JobState.SUCCEEDED,
        why="all workers have finished",
        exit_code=0,
        duration=2.5,
        restarts=1,
        goodput=Goodput(2.0, 0.25, 0.125),
    )
    assert json.loads(event_to_json(event)) == {
        "schema": 1,
        "event": "JobFinished",
        "seq": 9,
        "time": 1.0,
        "run_id": "r",
        "attempt": 0,
        "node": "n",
        "state": "succeeded",
        "why": "all workers have finished",
        "exit_code": 0,
        "duration": 2.5,
        "restarts": 1,
        "goodput": {"productive": 2.0, "restarting": 0.25, "waiting": 0.125},
    }


@pytest.mark.parametrize("schema", [SCHEMA + 1, 999])
def test_a_newer_schema_is_refused(schema: int) -> None:
    """Its fields may have another meaning."""
    line = json.dumps({"schema": schema, "event": "EventsMissed", "count": 1})
    with pytest.raises(ValueError, match=rf"schema {schema} are newer than this reader \(1\)"):
        event_from_json(line)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"schema":1}',
        '{"schema":1,"event":"Nothing"}',
        '{"schema":1,"event":"EventsMissed"}',
        '{"schema":1,"event":"EventsMissed","count":"1"}',
        '{"schema":"1","event":"EventsMissed","count":1}',
        b"\xff",
    ],
)
def test_other_texts_are_a_value_error(line: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        event_from_json(line)


@pytest.mark.parametrize("text", ["\ud800", "caf\udce9", "/logs/\udcff/x"])
def test_an_event_with_any_text_is_read_again(text: str) -> None:
    """A path that is not UTF-8 is the same path, so that it can be opened."""
    started = JobStarted(
        entrypoint=text,
        nproc_per_node=1,
        nnodes="1",
        max_restarts=0,
        agent_pid=1,
        log_dir=text,
    )
    line = event_to_json(started)
    read = event_from_json(line)
    assert event_from_json(line.decode("utf-8")) == read
    assert isinstance(read, JobStarted)
    assert read.log_dir == (text if text != "\ud800" else r"\ud800")
    assert read.sentence == started.sentence
    assert read.sentence.isprintable()


def test_the_decoder_checks_types() -> None:
    event = WorkerExited(rank=0, local_rank=0, pid=1, status=ExitStatus(code=0), duration=0.0)
    document = json.loads(event_to_json(event))
    document["status"]["code"] = "zero"
    with pytest.raises(msgspec.ValidationError, match=r"status\.code"):
        event_from_json(json.dumps(document))
