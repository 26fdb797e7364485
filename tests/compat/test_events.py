"""torch's events over elastic_aio, and the translation of ours."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_aio import JobFailed, LaunchSpec, events, node_events, run
from elastic_aio.compat.torch import events as module
from elastic_aio.compat.torch.events import (
    Event,
    EventSource,
    NodeState,
    RdzvEvent,
    TorchEvents,
    construct_and_record_rdzv_event,
    event_listener,
    get_logging_handler,
    record,
    record_rdzv_event,
    register_handler,
    torch_events,
)
from elastic_aio.outcome import ExitStatus, Failure, JobState
from tests.support.children import shell


class ListHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture(name="handler")
def _handler() -> Iterator[ListHandler]:
    """A handler that is registered as "list" and "dynamic_rendezvous"."""
    handler = ListHandler()
    for destination in ("list", "dynamic_rendezvous"):
        register_handler(destination, handler)
    yield handler
    register_handler("dynamic_rendezvous", logging.NullHandler())


def test_an_event_is_a_line_of_json(
    handler: ListHandler, capsys: pytest.CaptureFixture[str]
) -> None:
    event = Event("n", EventSource.AGENT, 3, {"a": 1, "b": None})
    assert str(event) == event.serialize() == json.dumps(asdict(event))
    assert Event.deserialize(str(event)) == Event.deserialize(event) == event
    record(event, "list")
    record(event, "console")
    record(event)
    assert handler.lines == [str(event)]
    assert capsys.readouterr().err == f"{event}\n"
    with pytest.raises(KeyError):
        get_logging_handler("nowhere")
    with pytest.raises(KeyError):
        event_listener("nowhere")


def test_a_destination_of_torchs_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """`install` leaves that module alone, and programs know its handlers."""
    lines: list[str] = []

    def find(destination: str) -> None:
        if destination != "theirs":
            raise KeyError(destination)

    theirs = SimpleNamespace(
        get_logging_handler=find, record=lambda event, name: lines.append(event.serialize())
    )
    monkeypatch.setitem(sys.modules, "torch.distributed.elastic.events", theirs)
    with pytest.raises(KeyError):
        event_listener("nowhere")
    run(LaunchSpec(["true"], run_id="j"), listeners=[event_listener("theirs")])
    assert {Event.deserialize(line).metadata["run_id"] for line in lines} == {"j"}


def test_an_event_of_the_rendezvous(handler: ListHandler) -> None:
    """Its name is the caller's; a failure has its traceback."""
    event = RdzvEvent("n", "r", "m", "h", 1, NodeState.RUNNING, "e", 2, 3, "t")
    assert RdzvEvent.deserialize(str(event)) == RdzvEvent.deserialize(event) == event
    record_rdzv_event(event)
    construct_and_record_rdzv_event("r", "m", NodeState.INIT, rank=4)
    try:
        raise ValueError("boom")
    except ValueError:
        construct_and_record_rdzv_event("r", "m", NodeState.FAILED, name="n", hostname="h", pid=5)
    first, second, third = (RdzvEvent.deserialize(line) for line in handler.lines)
    assert first == event
    assert second.name == "test_events.py:test_an_event_of_the_rendezvous"
    assert (second.rank, second.error_trace, second.node_state) == (4, "", NodeState.INIT)
    assert (third.name, third.hostname, third.pid) == ("test_events.py:n", "h", 5)
    assert "ValueError: boom" in third.error_trace


def test_no_event_without_a_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "record_rdzv_event", pytest.fail)
    construct_and_record_rdzv_event("r", "m", NodeState.INIT)


def test_a_job_that_fails_and_is_restarted(handler: ListHandler) -> None:
    """Names, metadata and true times, as torch's consumers know them."""
    script = "sleep 0.05; [ $RANK = 1 ] && exit 3; sleep 99"
    began = time.time()
    spec = LaunchSpec(shell(script), nproc_per_node=2, max_restarts=1, role="trainer", run_id="j")
    with pytest.raises(JobFailed):
        run(spec, listeners=[event_listener("list")])
    lines = [json.loads(line) for line in handler.lines]
    names = [(line["source"], line["name"].rpartition(".")[2]) for line in lines]
    attempt = [
        ("AGENT", "RENDEZVOUS"),
        ("AGENT", "ASSIGN_WORKER_RANKS"),
        ("WORKER", "START"),
        ("WORKER", "START"),
    ]
    ends = [("WORKER", "TERMINATED"), ("WORKER", "FAILED"), ("AGENT", "SUCCEEDED")]
    assert names == [*attempt, *attempt, *ends]
    for line in lines:
        assert line["name"] == f"torchelastic.worker.status.{line['metadata']['state']}"
        assert began * 1000 - 1 <= line["timestamp"] <= time.time() * 1000
        assert line["metadata"]["run_id"] == "j"
        assert line["metadata"]["role"] == "trainer"
        assert line["metadata"]["rdzv_backend"] == "c10d"
        assert json.loads(line["metadata"]["metadata"])["entry_point"] == "bash"
    assert [line["metadata"]["agent_restarts"] for line in lines] == [0] * 4 + [1] * 7
    assert lines[0]["metadata"]["duration_ms"] == 0.0
    failed = lines[-2]["metadata"]
    assert (failed["global_rank"], failed["group_rank"]) == (1, 0)
    assert failed["worker_id"] == lines[-4 - 0]["metadata"]["worker_id"]
    assert json.loads(failed["raw_error"])["message"] == "<NONE>"
    assert json.loads(failed["metadata"]) == {
        "group_world_size": 1,
        "entry_point": "bash",
        "local_rank": [1],
        "role_rank": [1],
        "role_world_size": [2],
        "exit_code": [3],
        "worker_pid": [int(failed["worker_id"])],
    }
    assert lines[-1]["metadata"]["worker_id"] is None
    assert set(lines[-1]["metadata"]) == set(failed)


START = events.JobStarted(
    entrypoint="t.py",
    nproc_per_node=1,
    nnodes="2",
    max_restarts=0,
    agent_pid=1,
    time=100.0,
    run_id="j",
    node="h",
    rdzv_backend="c10d",
)
ROUND = node_events.RoundFormed(
    round=0,
    group_rank=1,
    group_world_size=2,
    world_size=2,
    master_addr="h",
    master_port=1,
    time=102.5,
)
WORKER = events.WorkerStarted(rank=1, local_rank=0, pid=7, time=103.0)


def finished(state: JobState, why: str = "because") -> events.JobFinished:
    return events.JobFinished(
        state=state, why=why, exit_code=0, duration=9.0, restarts=0, time=109.0
    )


def test_a_job_of_several_nodes() -> None:
    """The rendezvous has its duration, a worker its rank."""
    translate = TorchEvents()
    assert translate(START) == translate(ROUND) == []
    joined, assigned, started = translate(WORKER)
    assert joined["metadata"]["duration_ms"] == 2500.0
    assert joined["metadata"]["group_rank"] == 1
    assert assigned["metadata"]["state"] == "ASSIGN_WORKER_RANKS"
    details = json.loads(started["metadata"]["metadata"])
    assert (details["group_world_size"], details["role_world_size"]) == (2, [2])
    assert (details["role_rank"], details["exit_code"]) == ([1], [None])
    translate(
        events.WorkerExited(
            rank=1, local_rank=0, pid=7, status=ExitStatus(0), duration=1.0, time=105.0
        )
    )
    ended, agent = translate(finished(JobState.SUCCEEDED))
    assert (ended["metadata"]["state"], ended["timestamp"]) == ("SUCCEEDED", 105_000)
    assert ended["metadata"]["total_run_time"] == 5
    assert (agent["metadata"]["state"], agent["timestamp"]) == ("SUCCEEDED", 109_000)


@pytest.mark.parametrize("state", [JobState.STOPPED, JobState.FAILED])
def test_an_end_that_is_no_workers_fault(state: JobState) -> None:
    """The agent has failed: a signal, or the rendezvous."""
    translate = TorchEvents()
    translate(START)
    translate(WORKER)
    worker, agent = translate(finished(state, "SIGTERM was received"))
    assert worker["metadata"]["state"] == "TERMINATED"
    assert agent["metadata"]["state"] == "FAILED"
    assert agent["metadata"]["raw_error"] == "SIGTERM was received"


def test_a_signal_has_no_traits() -> None:
    translate = TorchEvents()
    translate(START)
    translate(WORKER)
    failure = Failure(1, 0, 7, "h", ExitStatus(signal=9), 104.0, 0)
    translate(events.AttemptFailed(root=failure, failures=(failure,)))
    worker, _ = translate(finished(JobState.FAILED))
    assert json.loads(worker["metadata"]["raw_error"]) == {"message": "<NONE>"}
    assert json.loads(worker["metadata"]["metadata"])["exit_code"] == [-9]


def test_the_watchdog_of_timers(handler: ListHandler) -> None:
    """It is started and stopped with each attempt, as in torch."""
    script = "[ $TORCHELASTIC_RESTART_COUNT = 1 ]"
    spec = LaunchSpec(shell(script), nproc_per_node=2, max_restarts=1, timers=True)
    run(spec, listeners=[event_listener("list")])
    lines = [json.loads(line) for line in handler.lines]
    watchdog = [line for line in lines if "watchdog" in line["name"]]
    assert [line["name"] for line in watchdog] == 2 * ["watchdog started", "watchdog stopped"]
    assert [line["metadata"]["agent_restarts"] for line in watchdog] == [0, 0, 1, 1]
    assert {line["metadata"]["metadata"] for line in watchdog} == {
        json.dumps({"watchdog_event": name}) for name in ("watchdog started", "watchdog stopped")
    }
    assert lines[3]["name"] == "torchelastic.worker.status.START"


def test_a_timer() -> None:
    """Without a signal nothing is killed."""
    lines_of = torch_events()
    lines_of(START)
    settings: dict[str, Any] = {"rank": 0, "local_rank": 0, "pid": 7, "scope": "s", "age": 6.0}
    timer = events.TimerExpired(**settings, limit=5.0, signal=9, time=110.0)
    expired, killed = map(json.loads, lines_of(timer))
    assert (expired["name"], killed["name"]) == ("timer expired", "kill worker process")
    assert expired["metadata"]["state"] == "RUNNING"
    assert json.loads(killed["metadata"]["metadata"]) == {
        "watchdog_event": "kill worker process",
        "worker_pid": "7",
        "scope_id": "s",
        "expiration_time": "109.0",
        "signal": "9",
    }
    assert "duration_ms" not in killed["metadata"]
    mute = events.TimerExpired(**settings, limit=5.0, signal=0)
    assert len(lines_of(mute)) == 1
