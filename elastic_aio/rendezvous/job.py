"""What a coordinator knows about its job; the phases read it and change it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from elastic_aio.events import NodeRefused
from elastic_aio.outcome import Failure
from elastic_aio.policy import Action
from elastic_aio.rendezvous.base import Begin, Cause, Ending, Placement
from elastic_aio.rendezvous.commands import Rules
from elastic_aio.rendezvous.desk import Desk
from elastic_aio.rendezvous.roll import Entry, Roll
from elastic_aio.rendezvous.tickets import Gathering, Standing
from elastic_aio.restarts import RestartBook

__all__ = ["NAMES_MAX", "Clock", "Job", "Phase", "Waiting"]

NAMES_MAX = 8
"""How many names are listed where any number of nodes could be."""


class Phase(Enum):
    """Where a coordinator is."""

    ADOPTING = "adopting"
    FORMING = "forming"
    RUNNING = "running"
    HALTING = "halting"
    ASKING = "asking"
    PAUSING = "pausing"
    ENDING = "ending"


class Clock:
    """The time as the coordinator was told last, and when it wants to be called."""

    def __init__(self, now: float) -> None:
        """Begin at `now`, monotonic seconds."""
        self.now = now
        self.deadline: float | None = None

    def wait_until(self, when: float) -> bool:
        """Tell whether `when` is still to come, and ask to be called then."""
        if self.now >= when:
            return False
        self.deadline = when if self.deadline is None else min(when, self.deadline)
        return True


class Waiting:
    """A wait for nodes: since when, and what those who wait were told."""

    def __init__(self, now: float) -> None:
        """Begin at `now`."""
        self.since = now
        self.enough_since: float | None = None
        self.told: Gathering | None = None
        self.told_at = now


class Job:
    """The state that the phases share.

    `round`, `origin`, `attempt` and `changes` are those of the last round, and `seats`
    who has a place in it; `names` is kept of those who are gone, `done` holds those who
    left after their workers had succeeded, and `departed` counts those who did so under
    another coordinator; `has_lost` tells that one of the others was lost. `whys` says
    why the round cannot stay as it is, and `cause` why another attempt follows, once
    that is decided; `halting_why` is what those hear who have to stop. `failures` are
    the last round's, the root cause first, `answer` what the user's callback said of it
    (text: why it failed itself), and `not_before` when the delay is over. `ready_since`
    is the time since which a newcomer could be taken in.
    """

    def __init__(
        self, rules: Rules, book: RestartBook, name: str, epoch: int, now: float, is_new_store: bool
    ) -> None:
        """Begin without members."""
        self.phase = Phase.ADOPTING
        self.rules = rules
        self.book = book
        self.name = name
        self.is_new_store = is_new_store
        self.created_at = now
        self.clock = Clock(now)
        self.desk = Desk(epoch)
        self.roll = Roll()
        self.round = -1
        self.origin = ""
        self.attempt = -1
        self.changes = 0
        self.seats: dict[str, Placement] = {}
        self.names: dict[str, str] = {}
        self.done: set[str] = set()
        self.departed = 0
        self.has_lost = False
        self.whys: dict[str, None] = {}  # without repetition, in order
        self.cause: Cause | None = None
        self.failures: tuple[Failure, ...] = ()
        self.halting_why = ""
        self.answer: Action | str | None = None
        self.not_before = now
        self.waiting = Waiting(now)
        self.ready_since: float | None = None
        self.ending: Ending | None = None

    # ------------------------------------------------------------------- members

    def fit(self) -> list[Entry]:
        """Return those who may take part."""
        return [entry for entry in self.roll if not entry.is_refused_for_good]

    def present(self) -> list[Entry]:
        """Return those who have a place in the round and are there."""
        return [self.roll[member] for member in self.seats if member in self.roll]

    def outsiders(self) -> list[Entry]:
        """Return those who may take part and have no place."""
        return [entry for entry in self.fit() if entry.member not in self.seats]

    # --------------------------------------------------------------- one member

    def is_quiet(self, entry: Entry) -> bool:
        """Whether nothing runs there, of the round or of an earlier one."""
        ticket = entry.ticket
        has_place = entry.member in self.seats
        return not ticket.is_busy and not (has_place and ticket.quiet < self.round)

    def holds(self, entry: Entry) -> bool:
        """Whether a member has taken its place in the round."""
        held = entry.ticket.held
        return held is not None and (held.round, held.origin) == (self.round, self.origin)

    def is_astray(self, entry: Entry) -> bool:
        """Whether a member will never take its place in the round.

        It has taken one in another round that is not older, which it was given by a
        coordinator that could not be heard here, or its reserved port had changed.
        """
        if self.holds(entry):
            return False
        if entry.ticket.round >= self.round:
            return True
        return entry.begun is not None and entry.ticket.seen >= entry.begun

    def is_on_its_way(self, entry: Entry) -> bool:
        """Whether a member was told last to take its place, and has not yet answered."""
        is_told = entry.member in self.seats and isinstance(entry.sent, Begin)
        return is_told and not self.holds(entry) and not self.is_astray(entry)

    def granted(self, entry: Entry) -> Cause | None:
        """Return the restart after this round that a former coordinator has granted."""
        granted = entry.ticket.granted
        is_next = granted is not None and granted.attempt == self.attempt + 1
        return granted if is_next and self.holds(entry) else None

    def has_failed(self, entry: Entry) -> bool:
        """Whether a worker of the round has failed on a member, or on one it has heard of."""
        ticket = entry.ticket
        if not self.holds(entry):
            return False
        if self.granted(entry) is not None:
            return True
        if ticket.standing is Standing.ENDED:
            return bool(ticket.failures) or ticket.is_final
        return ticket.standing is Standing.FAILING

    def has_succeeded(self, entry: Entry) -> bool:
        """Whether all workers of the round on a member have succeeded."""
        return entry.ticket.standing is Standing.SUCCEEDED and self.holds(entry)

    def has_ended(self, entry: Entry) -> bool:
        """Whether nothing of the round runs on a member any more."""
        return entry.ticket.standing is Standing.ENDED and self.holds(entry)

    # ----------------------------------------------------------------- numbers

    @property
    def next_round(self) -> int:
        """A number higher than that of any round that somebody here has heard of."""
        heard = (max(one.ticket.round, one.ticket.quiet) for one in self.roll)
        return max(self.round, *heard, -1) + 1

    def heed(self) -> None:
        """Let no number fall behind what a member has seen elsewhere, restarts included."""
        for entry in self.roll:
            if (held := entry.ticket.held) is not None:
                self.attempt = max(held.attempt, self.attempt)
                self.changes = max(held.changes, self.changes)
                self.resume(held.restarts)

    def resume(self, restarts: int) -> None:
        """Count at least that many restarts."""
        if restarts > self.book.restarts:
            self.book.resume(restarts)

    def count_restart(self, number: int) -> None:
        """Count a restart that is happening, the `number`-th of the job, from 1."""
        self.resume(number - 1)
        if self.book.restarts < number:
            self.book.count(self.clock.now)

    # ------------------------------------------------------------------ changes

    def take_seats(self, placed: Mapping[str, Placement]) -> None:
        """Let a round begin."""
        one = next(iter(placed.values()))
        self.round, self.origin = one.round, one.origin
        self.attempt, self.changes = one.attempt, one.changes
        self.seats = dict(placed)
        self.names = {member: self.roll[member].name for member in placed}
        self.done.clear()
        self.departed = 0
        self.has_lost = False
        self.whys.clear()
        self.cause = None
        self.failures = ()
        self.ready_since = None
        self.phase = Phase.RUNNING

    def wait_for_nodes(self) -> None:
        """Let another round be formed, as soon as there are enough nodes."""
        self.phase = Phase.FORMING
        self.waiting = Waiting(self.clock.now)

    def refuse(self, entry: Entry, why: str) -> None:
        """Say that a member may not take part, for the time being or at all."""
        entry.refused, entry.refused_at = why, self.clock.now
        self.desk.publish(NodeRefused(name=entry.name, member=entry.member, why=why))

    def note(self, why: str) -> None:
        """Remember why the round cannot stay as it is."""
        self.whys[why] = None

    def cause_of_next(self, why: str = "") -> Cause | None:
        """Say why there is another attempt; None for the first one."""
        if self.cause is not None or self.round < 0:
            return self.cause
        whys = [*self.whys, *([why] if why else [])]
        said = "; ".join(whys[:NAMES_MAX]) or "other nodes take part"
        return Cause(self.attempt + 1, said, self.book.restarts)
