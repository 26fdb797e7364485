"""Text of the operating system that is not UTF-8 is the same on the other side of every format."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

import elastic_aio
from elastic_aio.control import protocol
from elastic_aio.discovery import runs
from elastic_aio.event_json import event_from_fields, event_from_json, event_to_json, read_events
from elastic_aio.events import AttemptFailed, JobStarted
from elastic_aio.http.openmetrics import format_metrics
from elastic_aio.logs.paths import NodeRecord
from elastic_aio.outcome import ExitStatus, Failure, JobOutcome, JobState
from elastic_aio.record import JobRecord
from elastic_aio.rendezvous import base, messages
from elastic_aio.rendezvous.event_stream import EventStreamWriter, decode_event
from elastic_aio.status import JobStatus, StatusTracker
from elastic_aio.store import wire
from elastic_aio.store.base import user_key, wire_key, wire_value
from elastic_aio.store.memory import MemoryStore
from elastic_aio.value import from_json, to_json
from elastic_aio.worker.errorfile import parse_error_file, render_error_file
from elastic_aio.worker_error import WorkerError

ODD = os.fsdecode(b"/caf\xe9/\xff \\udcff \xf0\x9f\x98\x80.py")
FAILURE = Failure(
    rank=0,
    local_rank=0,
    pid=7,
    host=ODD,
    status=ExitStatus(code=1),
    time=1.0,
    order=0,
    error=WorkerError(ODD, ODD, 1.5, ODD),
    stderr_tail=(ODD,),
    stderr_path=ODD,
    notes=(ODD,),
    reason=ODD,
)
STARTED = JobStarted(
    run_id=ODD,
    node=ODD,
    entrypoint=ODD,
    nproc_per_node=1,
    nnodes="1",
    max_restarts=0,
    agent_pid=1,
    log_dir=ODD,
)
FAILED = AttemptFailed(attempt=0, root=FAILURE, failures=(FAILURE,))
MEMBER = messages.MemberStatus(
    serial=1,
    node=base.NodeInfo(ODD, 1, 1, ODD),
    address="h",
    port=1,
    program=ODD,
    failures=(FAILURE,),
    drain_reason=ODD,
    policy={"restart": ODD},
)
END = runs.RunEnd(JobState.FAILED, ODD, 1, 0, 1.0, (FAILURE,))
ORDER = messages.Order(1, 1, base.EndJob(JobOutcome(JobState.FAILED, ODD, 1, 0, (FAILURE,))))


def of_kind(kind: Any) -> Callable[[bytes], Any]:
    return lambda content: from_json(content, kind)


def event_reply(line: bytes) -> Any:
    reply = protocol.decode_reply(line)
    assert isinstance(reply, protocol.EventReply)
    return event_from_fields(reply.event)


EDGES: dict[str, tuple[Any, Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    "an event": (FAILED, event_to_json, event_from_json),
    "a file of events": (
        STARTED,
        lambda event: event_to_json(event) + b"\n",
        lambda content: read_events([content])[0],
    ),
    "an event of a control socket": (
        FAILED,
        lambda event: protocol.encode(protocol.EventReply(Raw(event_to_json(event)))),
        event_reply,
    ),
    "a request": (protocol.StopJob(reason=ODD), protocol.encode, protocol.decode_request),
    "a status": (
        protocol.StatusReply(JobStatus(run_id=ODD, log_dir=ODD)),
        protocol.encode,
        protocol.decode_reply,
    ),
    "run.json": (JobRecord(run_id=ODD, command=(ODD,)), JobRecord.encode, JobRecord.decode),
    "node.json": (
        NodeRecord(run_id=ODD, host=ODD, pid=1, started_at=1.0),
        NodeRecord.encode,
        NodeRecord.decode,
    ),
    "a member": (MEMBER, messages.encode, messages.decode_status),
    "an order": (ORDER, messages.encode, messages.decode_order),
    "a leader": (
        messages.LeaderRecord(1, "m", ODD),
        messages.encode,
        messages.LeaderRecord.decode,
    ),
    "a run": (runs.RunRecord(0, "j", program=ODD), to_json, runs.decode_run),
    "the end of a run": (END, to_json, runs.decode_end),
    "former jobs": ([runs.FormerJob("j", 1.0, END)], to_json, runs.decode_former_jobs),
    "a key": (
        f"{runs.run_prefix(ODD)}/run",
        lambda key: wire_key(key, "p/"),
        lambda key: user_key(key, "p/"),
    ),
    "the name of a run": (
        ODD,
        lambda run_id: wire_key(runs.run_key(run_id), ""),
        lambda key: runs.run_id_of(runs.run_names([user_key(key)])[0]),
    ),
    "a value": (ODD, wire_value, os.fsdecode),
    "an error file": (
        WorkerError(ODD, ODD, 1.5, "/e"),
        render_error_file,
        lambda content: parse_error_file(content, "/e"),
    ),
    "an outcome": (
        JobOutcome(JobState.FAILED, ODD, 1, 0, (FAILURE,)),
        to_json,
        of_kind(JobOutcome),
    ),
}


@pytest.mark.parametrize("edge", EDGES)
def test_text_is_the_same_on_the_other_side(edge: str) -> None:
    value, write, read = EDGES[edge]
    assert read(write(value)) == value


def test_the_texts_that_nodes_send_each_other_are_not_changed_by_truncation() -> None:
    assert messages.truncate_failure(FAILURE) == FAILURE


async def test_an_event_of_the_stream_of_a_job() -> None:
    async with MemoryStore() as store:
        await EventStreamWriter(store).write([STARTED])
        read = decode_event(await store.get(f"events/{0:012d}"))
    assert isinstance(read, JobStarted)
    assert (read.run_id, read.log_dir) == (ODD, ODD)


async def test_a_run_claims_and_releases_a_store() -> None:
    async with MemoryStore() as store:
        assert not await runs.claim_store(store, ODD, is_first_node=True)
        other = await runs.claim_store(store, "r", is_first_node=True)
        assert other.startswith(f"it belongs to the run {ODD!r}")
        await runs.release_claim(store, ODD)
        assert not await runs.claim_store(store, "r", is_first_node=True)


def test_a_token_proves_itself() -> None:
    proof = wire.token_proof(ODD, b"client", b"t")
    assert wire.is_proof(proof, ODD, b"client", b"t")


def test_metrics_are_valid() -> None:
    """A backslash in a label is one that OpenMetrics knows."""
    tracker = StatusTracker()
    tracker(STARTED)
    text = format_metrics([({}, tracker.status(2.0))], 2.0)
    text.encode("utf-8")
    labels = re.findall(r'="((?:[^"\\\n]|\\[\\"n])*)"[,}]', text)
    shown = ODD.encode("utf-8", "backslashreplace").decode()
    assert shown.replace("\\", r"\\") in labels


HOMES = {
    r"msgspec\.json|import json|from json": {
        "value.py": "the codec",
        "engines/etcd/wire.py": "of etcd: bytes in base64, and names that are UTF-8",
        "stacks.py": "of py-spy, and only read",
        "torch_events.py": "for torch, and only written",
        "watch/timer_pipe.py": "of `worker/timers.py`",
        "worker/errorfile.py": "of torch, by Python's `json`; workers do without msgspec",
        "worker/timers.py": "likewise",
    },
    r'surrogate(escape|pass)"|"backslashreplace"': {
        "text.py": "the codec",
        "agent/core_file.py": "a file",
        "cli/__init__.py": "a stream",
        "process/cgroups.py": "a file",
        "process/exec_main.py": "starts without this package",
        "watch/watchdog.py": "a file",
        "worker/forked.py": "a stream",
        "worker/membership.py": "workers load little",
        "worker/notify.py": "likewise",
    },
}


@pytest.mark.parametrize("pattern", HOMES)
def test_a_codec_has_one_home(pattern: str) -> None:
    """Each other module that writes or reads by itself has its reason."""
    package = Path(elastic_aio.__file__).parent
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if "compat" not in path.parts and re.search(pattern, path.read_text())
    }
    assert found == HOMES[pattern].keys()
