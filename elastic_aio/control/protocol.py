"""What a client asks of a job, and what the agent answers: one JSON object per line.

Pure.  A connection carries one request: a line with its `command` and the `version` of the
protocol.  Every line of the answer has a `reply`; the last line is no `event`, and not `accepted`.
Readers ignore unknown fields, and the version grows when a field changes its meaning.
"""

from __future__ import annotations

from typing import Any, Final, cast

from msgspec import Struct

from elastic_aio.errors import ControlError
from elastic_aio.outcome import JobState
from elastic_aio.status import JobStatus
from elastic_aio.value import from_json, to_json

VERSION: Final = 1

REQUEST_MAX: Final = 64 * 1024
"""Bytes of a request."""


class _ControlMessage(Struct, frozen=True, kw_only=True, tag_field="command"):
    version: int = VERSION
    acknowledge: bool = False
    """Whether the answer begins with an `AcceptedReply`: it may take as long as the job."""
    child: str = ""
    """The path of the child that the request is about; empty for the job itself."""


class GetStatus(_ControlMessage, frozen=True, kw_only=True, tag="status"):
    """Answer with a `StatusReply`; `makes_files`: the log files are about to be read.

    Then each captured stream has its file from now on, also an empty stream.
    """

    makes_files: bool = False


class GetEvents(_ControlMessage, frozen=True, kw_only=True, tag="events"):
    """Answer with an `EventReply` for each event after the number `after`, then `DoneReply`.

    With `follow` this goes on until the end of the job.
    """

    after: int = -1
    follow: bool = False


class StopJob(_ControlMessage, frozen=True, kw_only=True, tag="stop"):
    """Stop the job by its plan, with `signal` first; `kill`: at once.

    Answer: as `AwaitEnd`, of a child `DoneReply`; without `wait`: `DoneReply` at once.
    """

    reason: str = ""
    signal: int | None = None
    kill: bool = False
    wait: bool = True


class RestartJob(_ControlMessage, frozen=True, kw_only=True, tag="restart"):
    """Replace the present attempt.  Answer: `DoneReply`, once another one runs."""

    reason: str = ""


class PreemptJob(_ControlMessage, frozen=True, kw_only=True, tag="preempt"):
    """Give notice of a preemption in so many `seconds`; None: those of the job's spec.

    Answer: `DoneReply`; it is done unless a stop, or a notice before, leaves no more time.
    """

    reason: str = ""
    seconds: float | None = None


class ReloadJob(_ControlMessage, frozen=True, kw_only=True, tag="reload"):
    """Start the workers of the child anew, one after the other where that is possible.

    Answer: `DoneReply`; it is done if all were replaced.
    """


class ScaleJob(_ControlMessage, frozen=True, kw_only=True, tag="scale"):
    """Change the number of workers of the child, or of equal children.  Answer: `DoneReply`."""

    number: int


class SendSignal(_ControlMessage, frozen=True, kw_only=True, tag="signal"):
    """Send a signal to the worker `rank`, or to each worker of the node.  Answer: `DoneReply`."""

    signal: int
    rank: int | None = None


class DumpStacks(_ControlMessage, frozen=True, kw_only=True, tag="dump"):
    """Answer with a `DumpReply`: what all workers of the node are doing."""

    reason: str = ""


class AwaitEnd(_ControlMessage, frozen=True, kw_only=True, tag="wait"):
    """Answer with an `EndReply` when the job is over."""


ControlRequest = (
    GetStatus
    | GetEvents
    | StopJob
    | RestartJob
    | PreemptJob
    | ReloadJob
    | ScaleJob
    | SendSignal
    | DumpStacks
    | AwaitEnd
)


class AcceptedReply(Struct, frozen=True, tag_field="reply", tag="accepted"):
    """The agent has read the request, which it now performs; the answer follows."""


class StatusReply(Struct, frozen=True, tag_field="reply", tag="status"):
    """What the job is doing."""

    status: JobStatus
    version: int = VERSION


class EventReply(Struct, frozen=True, tag_field="reply", tag="event"):
    """One event, in its own JSON form: `Raw` where it is written, the object where it is read."""

    event: Any


class EndReply(Struct, frozen=True, tag_field="reply", tag="end"):
    """How the job has ended."""

    state: JobState
    why: str
    exit_code: int


class DoneReply(Struct, frozen=True, tag_field="reply", tag="done"):
    """A request was performed; `is_done`: and has had its effect."""

    is_done: bool = True
    pids: tuple[int, ...] = ()
    """The processes that got a signal."""
    unhandled: tuple[int, ...] = ()
    """The ranks of the processes without a handler for the signal, which it ends."""


class DumpReply(Struct, frozen=True, tag_field="reply", tag="dump"):
    """The stacks of the workers as text, and the file with it, or None."""

    text: str
    path: str | None = None


class ErrorReply(Struct, frozen=True, tag_field="reply", tag="error"):
    """A request was refused, because of the `problem`."""

    problem: str


Reply = AcceptedReply | StatusReply | EventReply | EndReply | DoneReply | DumpReply | ErrorReply
_REQUEST: Final = cast("type[ControlRequest]", ControlRequest)
_REPLY: Final = cast("type[Reply]", Reply)


class _RequestHead(Struct):
    version: int


def encode(message: ControlRequest | Reply) -> bytes:
    """Return a request or a reply as a line of JSON."""
    return to_json(message) + b"\n"


def decode_request(line: bytes) -> ControlRequest:
    """Read a request; raise a ControlError if it is none, or of another version."""
    try:
        if (version := from_json(line, _RequestHead).version) != VERSION:
            problem = f"must be {VERSION} (got {version}): the client is of another release"
            raise ControlError(f"version: {problem}")
        return from_json(line, _REQUEST)
    except ValueError as error:
        raise ControlError(f"request: is not valid: {error}") from None


def decode_reply(line: bytes) -> Reply:
    """Read a reply; raise a ControlError if it is none."""
    try:
        return from_json(line, _REPLY)
    except ValueError as error:
        raise ControlError(f"the answer is not valid: {error}") from None
