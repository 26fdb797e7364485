"""Events and their JSON form."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import elastic_aio
from elastic_aio.event_json import SCHEMA, event_from_json, event_to_json
from elastic_aio.events import (
    AttemptFailed,
    ConsoleLost,
    ControlUnavailable,
    DeadlineMissed,
    Event,
    EventsMissed,
    GuardianLost,
    GuardianRestarted,
    JobFinished,
    JobStarted,
    LeftoversFound,
    LogDiskFull,
    LogsNotRemoved,
    OutputLost,
    Restarting,
    SignalForwarded,
    StacksDumped,
    StopEscalated,
    StopRequested,
    TimerExpired,
    TimerRejected,
    WorkerAbandoned,
    WorkerActivity,
    WorkerExited,
    WorkerReady,
    WorkersIdle,
    WorkerStarted,
    WorkerStoreRefused,
    WorkersUnfinished,
)
from elastic_aio.node_events import (
    CoordinatorChanged,
    MembershipChanged,
    MembershipPending,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeRefused,
    NodeStandby,
    RendezvousStoreAwaited,
    RendezvousStoreLost,
    RendezvousStoreRecovered,
    RoundFormed,
    RoundForming,
    RoundWaiting,
    StandbyPromoted,
)
from elastic_aio.outcome import ExitStatus, Failure, Goodput, JobState, ResourceUsage, WorkerError

integers = st.integers(-(2**31), 2**63 - 1)
counts = st.integers(0, 2**32)
floats = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(max_size=20)
maybe_text = st.none() | texts
names = st.lists(texts, max_size=3).map(tuple)
pids = st.lists(counts, max_size=3).map(tuple)
statuses = st.one_of(
    st.builds(ExitStatus, code=st.integers(0, 255)),
    st.builds(ExitStatus, signal=st.integers(1, 64)),
    st.just(ExitStatus()),
)
usages = st.builds(ResourceUsage, floats, floats, counts, counts, counts, counts, counts)
worker_errors = st.builds(WorkerError, texts, maybe_text, floats, texts)
failures = st.builds(
    Failure,
    rank=counts,
    local_rank=counts,
    pid=st.none() | counts,
    host=texts,
    status=statuses,
    time=floats,
    order=counts,
    is_victim=st.booleans(),
    error=st.none() | worker_errors,
    message=texts,
    stderr_tail=st.lists(texts, max_size=3).map(tuple),
    stderr_path=maybe_text,
    notes=st.lists(texts, max_size=2).map(tuple),
)
common: dict[str, st.SearchStrategy[Any]] = {
    "seq": integers,
    "time": floats,
    "run_id": texts,
    "attempt": counts,
    "node": texts,
}


def drawn(kind: type[Event], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Event]:
    return st.builds(kind, **common, **fields)


STRATEGIES: dict[type[Event], st.SearchStrategy[Event]] = {
    JobStarted: drawn(
        JobStarted,
        entrypoint=texts,
        nproc_per_node=counts,
        nnodes=texts,
        max_restarts=counts,
        agent_pid=counts,
        log_dir=maybe_text,
    ),
    WorkerStarted: drawn(WorkerStarted, rank=counts, local_rank=counts, pid=counts),
    WorkerExited: drawn(
        WorkerExited,
        rank=counts,
        local_rank=counts,
        pid=counts,
        status=statuses,
        duration=floats,
        is_victim=st.booleans(),
        usage=st.none() | usages,
    ),
    AttemptFailed: drawn(
        AttemptFailed, root=failures, failures=st.lists(failures, max_size=3).map(tuple)
    ),
    Restarting: drawn(Restarting, why=texts, delay=floats, restarts=counts),
    StopRequested: drawn(StopRequested, reason=texts, plan=texts, signal=st.none() | counts),
    LeftoversFound: drawn(LeftoversFound, pids=pids, programs=st.tuples(texts), linger=floats),
    StopEscalated: drawn(StopEscalated, signal=counts, pids=pids, reason=texts),
    WorkerAbandoned: drawn(WorkerAbandoned, pid=counts, state=texts),
    SignalForwarded: drawn(SignalForwarded, signal=counts, pids=pids, unhandled=pids),
    GuardianLost: drawn(GuardianLost, why=texts),
    TimerExpired: drawn(
        TimerExpired,
        rank=integers,
        local_rank=integers,
        pid=counts,
        scope=texts,
        age=floats,
        limit=floats,
        signal=counts,
    ),
    TimerRejected: drawn(TimerRejected, why=texts),
    WorkerReady: drawn(WorkerReady, rank=counts, local_rank=counts, pid=counts, duration=floats),
    DeadlineMissed: drawn(
        DeadlineMissed,
        rank=integers,
        local_rank=counts,
        pid=counts,
        deadline=texts,
        limit=floats,
        age=floats,
        why=texts,
        step=texts,
        phase=texts,
        status=texts,
    ),
    WorkersIdle: drawn(
        WorkersIdle,
        seconds=floats,
        workers=st.lists(
            st.builds(
                WorkerActivity, rank=counts, local_rank=counts, pid=counts, wchan=texts, state=texts
            ),
            max_size=2,
        ).map(tuple),
    ),
    WorkersUnfinished: drawn(
        WorkersUnfinished,
        seconds=floats,
        finished=counts,
        running=st.lists(counts, max_size=2).map(tuple),
        world_size=counts,
    ),
    StacksDumped: drawn(StacksDumped, why=texts, summary=texts, path=maybe_text),
    GuardianRestarted: drawn(GuardianRestarted, pid=counts),
    ConsoleLost: drawn(ConsoleLost, stream=texts, why=texts, unshown=st.none() | counts),
    LogDiskFull: drawn(LogDiskFull, mount_point=texts, is_shown=st.booleans(), why=texts),
    OutputLost: drawn(
        OutputLost,
        rank=counts,
        local_rank=counts,
        stream=texts,
        path=texts,
        why=texts,
        lost=st.none() | counts,
    ),
    NodeJoined: drawn(
        NodeJoined,
        name=texts,
        member=texts,
        address=texts,
        nproc=counts,
        role=texts,
        differs=st.lists(texts).map(tuple),
    ),
    NodeLeft: drawn(NodeLeft, name=texts, member=texts, why=texts),
    NodeLost: drawn(NodeLost, name=texts, member=texts, why=texts),
    NodeRefused: drawn(NodeRefused, name=texts, member=texts, why=texts),
    RoundForming: drawn(
        RoundForming,
        round=counts,
        joined=counts,
        minimum=counts,
        maximum=counts,
        present=names,
        missing=names,
        refused=names,
        time_left=st.none() | floats,
        others=names,
    ),
    RoundFormed: drawn(
        RoundFormed,
        round=counts,
        group_rank=counts,
        group_world_size=counts,
        world_size=counts,
        master_addr=texts,
        master_port=counts,
        changes=counts,
    ),
    RoundWaiting: drawn(RoundWaiting, phase=texts, what=texts, waited=floats, time_left=floats),
    MembershipChanged: drawn(MembershipChanged, why=texts, round=counts, nodes=counts),
    MembershipPending: drawn(
        MembershipPending, round=counts, why=texts, time_left=st.none() | floats
    ),
    NodeStandby: drawn(NodeStandby, round=counts, maximum=counts),
    StandbyPromoted: drawn(StandbyPromoted, round=counts, group_rank=counts),
    CoordinatorChanged: drawn(CoordinatorChanged, name=texts, term=counts),
    WorkerStoreRefused: drawn(WorkerStoreRefused, peer=texts, why=texts),
    RendezvousStoreAwaited: drawn(RendezvousStoreAwaited, why=texts, time_left=floats),
    RendezvousStoreLost: drawn(RendezvousStoreLost, endpoint=texts, why=texts),
    RendezvousStoreRecovered: drawn(
        RendezvousStoreRecovered, endpoint=texts, is_host=st.booleans()
    ),
    LogsNotRemoved: drawn(LogsNotRemoved, why=texts),
    ControlUnavailable: drawn(ControlUnavailable, why=texts),
    EventsMissed: drawn(EventsMissed, count=counts, why=texts),
    JobFinished: drawn(
        JobFinished,
        state=st.sampled_from(JobState),
        why=texts,
        exit_code=counts,
        duration=floats,
        restarts=counts,
        goodput=st.none() | st.builds(Goodput, floats, floats, floats),
    ),
}


def test_every_event_type_is_exported_and_decoded() -> None:
    """The decoder's types are the subclasses of `Event`."""
    assert set(Event.__subclasses__()) == set(STRATEGIES)
    assert {kind.__name__ for kind in STRATEGIES} <= set(vars(elastic_aio)["__all__"])


@given(st.one_of(list(STRATEGIES.values())))
def test_an_event_is_decoded_to_itself(event: Event) -> None:
    """Every type, as bytes and as text, from one line."""
    line = event_to_json(event)
    assert b"\n" not in line
    assert event_from_json(line) == event
    assert event_from_json(line.decode("utf-8")) == event
    assert type(event_from_json(line)) is type(event)


@given(st.one_of(list(STRATEGIES.values())))
def test_unknown_fields_are_ignored(event: Event) -> None:
    """A later version may add some."""
    document = json.loads(event_to_json(event))
    document["added_later"] = {"x": [1, None]}
    assert event_from_json(json.dumps(document)) == event


@pytest.mark.parametrize("kind", STRATEGIES, ids=lambda kind: str(kind.__name__))
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
def test_lone_surrogates_are_escaped(text: str) -> None:
    """A path or message that is not UTF-8 must not stop the event file."""
    started = JobStarted(
        entrypoint=text,
        nproc_per_node=1,
        nnodes="1",
        max_restarts=0,
        agent_pid=1,
        log_dir=text,
    )
    line = event_to_json(started)
    line.decode("utf-8")
    assert isinstance(event_from_json(line), JobStarted)


def test_the_decoder_checks_types() -> None:
    event = WorkerExited(rank=0, local_rank=0, pid=1, status=ExitStatus(code=0), duration=0.0)
    document = json.loads(event_to_json(event))
    document["status"]["code"] = "zero"
    with pytest.raises(msgspec.ValidationError, match=r"status\.code"):
        event_from_json(json.dumps(document))
