"""What members and the coordinator write into the store, as JSON.

A member's ticket is its whole present state, and an order is all that the coordinator
wants of one member: each replaces the one before, so nothing is lost when some of
them are never seen.  Neither grows with the number of nodes.
"""

from __future__ import annotations

from dataclasses import replace as with_fields
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from elastic_aio.outcome import Failure
from elastic_aio.rendezvous.base import (
    Begin,
    Cause,
    Conclude,
    Ending,
    Halt,
    NodeCard,
    Pause,
    Placement,
)

__all__ = [
    "PROTOCOL",
    "Body",
    "Departed",
    "Gathering",
    "Order",
    "Prepare",
    "Refuse",
    "StandBy",
    "Standing",
    "Stay",
    "Ticket",
    "Unreadable",
    "bounded",
    "clean",
    "in_our_time",
    "read_order",
    "read_ticket",
    "sketched",
    "written",
]

PROTOCOL = 1
"""Version of both forms; members of another version are refused."""

_SIZE_MAX = 64 * 1024
_FAILURES_MAX = 8
_ROOT_MAX = 16 * 1024
_OTHER_MAX = 2 * 1024
_TEXTS_MAX = (8192, 4096, 2048, 1024, 512, 256, 128, 64, 32)
_TAIL_MAX = 20
_NAME_MAX = 255
# Numbers grow by one from what others say; beyond this JSON's readers disagree.
_NUMBER_MAX = 1 << 52


class Unreadable(ValueError):
    """Bytes from the store that are no ticket or order of ours; one line."""


class Standing(StrEnum):
    """What a member is doing."""

    JOINING = "joining"
    """It holds no place and runs nothing."""
    RUNNING = "running"
    """It runs, or is about to run, the workers of the round it holds a place in."""
    FAILING = "failing"
    """One of these has failed, and the others are being stopped."""
    ENDED = "ended"
    """Nothing of the round is left, and it was no success."""
    SUCCEEDED = "succeeded"
    """All of them have succeeded."""


class Ticket(Struct, frozen=True, kw_only=True):
    """A member's whole state.

    Attributes:
        protocol: version of the form.
        serial: grows with each ticket of the member.
        card: who it is.
        address: where the others reach it.
        port: the port reserved there for the workers of the next round.
        wish: the group rank it would like to have.
        is_host: whether it serves the store.
        minimum: fewest nodes of the job, as it was told.
        maximum: most nodes of the job, as it was told.
        epoch: the highest epoch of a coordinator that it has heard of.
        standing: what it is doing.
        held: the last place it took.
        quiet: nothing of this round or an earlier one runs there any more.
        reached: the round for which it has tried to reach the others (see `Prepare`).
        trouble: why it could not.
        failures: those of the held round, the root cause first.
        is_final: another attempt would be of no use, because of `final_why`.
        exit_code: of such a failure.
        ran: seconds that the workers of the held round lived.
        seen: epoch and serial of the last order that had been seen by then.
        departed: nodes of the held round that have left after their success.
        granted: a restart that is going to follow the held round's failure.
        ending: how the job has ended, if that was heard.
        sent_at: Unix seconds at the member, when it wrote this.
    """

    protocol: int = PROTOCOL
    serial: int
    card: NodeCard
    address: str
    port: int
    wish: int | None = None
    is_host: bool = False
    minimum: int = 1
    maximum: int = 1
    epoch: int = 0
    standing: Standing = Standing.JOINING
    held: Placement | None = None
    quiet: int = -1
    reached: int = -1
    trouble: str = ""
    failures: tuple[Failure, ...] = ()
    is_final: bool = False
    final_why: str = ""
    exit_code: int = 1
    ran: float = 0.0
    seen: tuple[int, int] = (0, 0)
    departed: int = 0
    granted: Cause | None = None
    ending: Ending | None = None
    sent_at: float = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether workers run there, or are about to."""
        return self.standing in (Standing.RUNNING, Standing.FAILING)

    @property
    def round(self) -> int:
        """The last round in which it took a place; -1 for none."""
        return -1 if self.held is None else self.held.round


class Gathering(Struct, frozen=True):
    """Who waits for a round, by some of their names, and how many are wanted."""

    round: int
    joined: int
    minimum: int
    maximum: int
    present: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    time_left: float | None = None


class Stay(Struct, frozen=True, tag=True):
    """Wait: there are not enough nodes yet."""

    gathering: Gathering


class StandBy(Struct, frozen=True, tag=True):
    """Wait: there are enough nodes without you."""

    round: int
    maximum: int


class Prepare(Struct, frozen=True, tag=True):
    """Find out whether you reach those that run, for the sake of `round`."""

    round: int
    address: str
    port: int


class Refuse(Struct, frozen=True, tag=True):
    """You can never take part."""

    why: str


class Departed(Struct, frozen=True, tag=True):
    """Know that so many nodes of your round have left after their success.

    Another coordinator cannot learn it from them any more.
    """

    round: int
    count: int


Body = Begin | Halt | Pause | Conclude | Stay | StandBy | Prepare | Refuse | Departed


class Order(Struct, frozen=True):
    """What the coordinator of `epoch` wants of one member; `serial` grows with each."""

    epoch: int
    serial: int
    body: Body


_encoder = msgspec.json.Encoder()
_tickets = msgspec.json.Decoder(Ticket)
_orders = msgspec.json.Decoder(Order)


class _Head(Struct):
    protocol: int = PROTOCOL


def written(value: Ticket | Order) -> bytes:
    """Return the JSON of a ticket or an order."""
    return _encoder.encode(value)


def read_ticket(text: bytes) -> Ticket:
    """Read a ticket.

    Raises:
        Unreadable: it is none, is too large, or says what no member of ours could.
    """
    try:
        ticket: Ticket = _read(_tickets, text)
    except Unreadable as error:
        raise Unreadable(_version_trouble(text) or str(error)) from None
    if trouble := _nonsense(ticket):
        raise Unreadable(trouble)
    return ticket


def read_order(text: bytes) -> Order:
    """Read an order.

    Raises:
        Unreadable: it is none, or too large.
    """
    order: Order = _read(_orders, text)
    return order


def _read(decoder: msgspec.json.Decoder[Ticket] | msgspec.json.Decoder[Order], text: bytes) -> Any:
    if len(text) > _SIZE_MAX:
        raise Unreadable(f"{len(text)} bytes are more than {_SIZE_MAX}")
    try:
        return decoder.decode(text)
    # Not all that is no UTF-8 is called a DecodeError, and depth is a RecursionError.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Unreadable(str(error)) from None


def _version_trouble(text: bytes) -> str:
    """Say what may be wrong with a ticket that another version of ours has written."""
    try:
        head = msgspec.json.decode(text[:_SIZE_MAX], type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    if head.protocol == PROTOCOL:
        return ""
    return f"it speaks version {head.protocol} of the protocol, not {PROTOCOL}"


def _nonsense(ticket: Ticket) -> str:
    """Say what no member of ours would write; nothing if all is well."""
    card, held = ticket.card, ticket.held
    if card.nproc < 1:
        return f"nproc is {card.nproc}"
    if max(map(len, (card.name, card.role, ticket.address))) > _NAME_MAX:
        return f"a name has more than {_NAME_MAX} characters"
    numbers = [card.nproc, ticket.serial, ticket.epoch, ticket.quiet, ticket.reached, *ticket.seen]
    numbers.append(ticket.departed)
    if held is not None:
        numbers += [held.round, held.attempt, held.restarts, held.changes]
        if not 0 <= held.span.group_rank < held.span.group_world_size:
            return f"group rank {held.span.group_rank} of {held.span.group_world_size}"
    if ticket.granted is not None:
        numbers += [ticket.granted.attempt, ticket.granted.restarts]
    if max(map(abs, numbers)) > _NUMBER_MAX:
        return "a number is too large"
    return ""


def in_our_time(ticket: Ticket, now: float) -> Ticket:
    """Return a ticket that has just come, its failures in the time of our clock.

    The clocks of two hosts may be hours apart; what can be compared is how long
    before its sending a failure was seen.

    Args:
        ticket: as it was read.
        now: Unix seconds here.
    """
    if not ticket.failures:
        return ticket
    offset = now - ticket.sent_at
    failures = tuple(with_fields(one, time=one.time + offset) for one in ticket.failures)
    return replace(ticket, failures=failures)


# ------------------------------------------------------------ texts that fit


def bounded(failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
    """Return the first failures with their texts cut, so that any number of them fits.

    The first one, the root cause, may be the largest.
    """
    return tuple(
        _within(_OTHER_MAX if index else _ROOT_MAX, one)
        for index, one in enumerate(failures[:_FAILURES_MAX])
    )


def sketched(failure: Failure) -> Failure:
    """Return a failure with little text: what is told to all nodes at each restart."""
    return _within(_OTHER_MAX, failure)


def clean(text: str) -> str:
    """Return the end of a text, without lone surrogates, which JSON cannot carry."""
    return _clean(text, _TEXTS_MAX[3])


def _within(room: int, failure: Failure) -> Failure:
    """Return a failure with as much of its texts as `room` bytes of JSON can hold."""
    cut = failure
    for limit in _TEXTS_MAX:
        cut = _cut(failure, limit)
        if len(_encoder.encode(cut)) <= room:
            break
    return cut


def _cut(failure: Failure, limit: int) -> Failure:
    error = failure.error
    if error is not None:
        trace = error.traceback
        # The end of a traceback says what happened.
        error = with_fields(
            error,
            message=_clean(error.message, limit),
            traceback=None if trace is None else _clean(trace, limit),
            path=_clean(error.path, limit),
        )
    path = failure.stderr_path
    lines = min(_TAIL_MAX, limit // 64)
    return with_fields(
        failure,
        host=_clean(failure.host, min(limit, _NAME_MAX)),
        error=error,
        message=_clean(failure.message, limit),
        stderr_tail=tuple(_clean(line, limit) for line in _last(failure.stderr_tail, lines)),
        stderr_path=None if path is None else _clean(path, limit),
        notes=tuple(_clean(note, limit) for note in failure.notes[: min(lines, _FAILURES_MAX)]),
    )


def _last(lines: tuple[str, ...], count: int) -> tuple[str, ...]:
    return lines[max(0, len(lines) - count) :]


def _clean(text: str, limit: int) -> str:
    return text[-limit:].encode("utf-8", "backslashreplace").decode()[-limit:]
