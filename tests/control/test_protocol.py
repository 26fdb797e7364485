"""Requests and replies: what is written can be read, and nothing else breaks the reader."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from elastic_aio.control.protocol import (
    VERSION,
    AcceptedReply,
    AwaitEnd,
    ControlRequest,
    DoneReply,
    DumpReply,
    DumpStacks,
    EndReply,
    ErrorReply,
    EventReply,
    GetEvents,
    GetStatus,
    Reply,
    RestartJob,
    SendSignal,
    StatusReply,
    StopJob,
    decode_reply,
    decode_request,
    encode,
)
from elastic_aio.errors import ControlError
from elastic_aio.event_json import event_from_fields, event_to_json
from elastic_aio.events import OutputLost
from elastic_aio.outcome import JobState, ResourceUsage
from elastic_aio.status import JobStatus, WorkerStatus

REQUESTS: list[ControlRequest] = [
    GetStatus(),
    GetEvents(after=7, follow=True),
    StopJob(signal=2, reason="enough", kill=True, wait=False),
    RestartJob(reason="new data"),
    SendSignal(signal=10, rank=3),
    DumpStacks(reason="slow"),
    AwaitEnd(acknowledge=True),
]
USAGE = ResourceUsage(1.0, 2.0, 3, 4, 5, 6, 7)
REPLIES: list[Reply] = [
    AcceptedReply(),
    StatusReply(JobStatus(run_id="r", workers=(WorkerStatus(0, 0, 7, usage=USAGE),))),
    EndReply(JobState.FAILED, "why", 3),
    DoneReply(is_done=False, pids=(1, 2), unhandled=(5,)),
    DumpReply("stacks", "/path"),
    ErrorReply("no"),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda one: type(one).__name__)
def test_requests_survive_the_way(request_: ControlRequest) -> None:
    line = encode(request_)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert decode_request(line) == request_


@pytest.mark.parametrize("reply", REPLIES, ids=lambda one: type(one).__name__)
def test_replies_survive_the_way(reply: Reply) -> None:
    line = encode(reply)
    assert line.count(b"\n") == 1
    assert decode_reply(line) == reply


def test_an_event_keeps_its_own_form() -> None:
    reply = decode_reply(encode(EventReply(Raw(b'{"schema":1}'))))
    assert isinstance(reply, EventReply)
    assert reply.event == {"schema": 1}


def test_the_form_of_a_request() -> None:
    """Programs in other languages may send it."""
    assert json.loads(encode(SendSignal(signal=10))) == {
        "command": "signal",
        "version": VERSION,
        "acknowledge": False,
        "child": "",
        "signal": 10,
        "rank": None,
    }
    assert decode_request(b'{"command": "status", "version": 1, "more": 2}') == GetStatus()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"", "request: is not valid: "),
        (b"\xff\xff", "request: is not valid: "),
        (b"[" * 5000, "request: is not valid: "),
        (b'{"command": "dance", "version": 1}', "request: is not valid: "),
        (b'{"command": "status"}', "request: is not valid: "),
        (b'{"command": "signal", "version": 1}', "request: is not valid: "),
        (b'{"command": "status", "version": 2}', "version: must be 1 (got 2)"),
    ],
)
def test_bad_requests_are_one_line(line: bytes, problem: str) -> None:
    with pytest.raises(ControlError) as caught:
        decode_request(line)
    assert str(caught.value).startswith(problem)
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(line: bytes) -> None:
    for decode in decode_request, decode_reply:
        try:
            decode(line)
        except ControlError:
            pass


def test_a_path_that_is_not_utf_8_stays_the_same() -> None:
    reply = decode_reply(encode(StatusReply(JobStatus(log_dir="/\udcff"))))
    assert reply == StatusReply(JobStatus(log_dir="/\udcff"))
    event = OutputLost(rank=0, local_rank=0, stream="stdout", path="/\udcff", why="x")
    reply = decode_reply(encode(EventReply(Raw(event_to_json(event)))))
    assert isinstance(reply, EventReply)
    assert event_from_fields(reply.event) == event
    assert decode_request(encode(StopJob(reason="\udcff"))) == StopJob(reason="\udcff")
