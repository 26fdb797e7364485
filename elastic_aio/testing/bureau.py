"""The simulated shell of the coordinator: tickets in, decisions, orders out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from elastic_aio.rendezvous.state import Ask, Coordinator, Publish, Raise, Send
from elastic_aio.rendezvous.tickets import Unreadable, in_our_time, read_ticket, written

if TYPE_CHECKING:
    from elastic_aio.testing.attendance import Attendance

__all__ = ["Bureau"]


class Bureau:
    """Coordinates at one store, on the node that was elected there."""

    def __init__(self, attendance: Attendance, epoch: int, *, is_new_store: bool) -> None:
        """Begin; nothing is known before `take_all`."""
        node = attendance.node
        self.is_closed = False
        self._attendance = attendance
        self._node = node
        settings = node.settings
        self.coordinator = Coordinator(
            settings.rules,
            node.book,
            name=node.name,
            epoch=epoch,
            now=node.machine.now,
            is_new_store=is_new_store,
        )
        self._known: set[bytes] = set()
        self._is_ready = False
        self._is_due = False
        self._armed: float | None = None
        node.story(f"coordinates in epoch {epoch} at {attendance.place.endpoint}")

    def knows(self, member: str) -> bool:
        """Whether a member is here, as far as the coordinator has heard."""
        return f"t/{member}".encode() in self._known

    def take_all(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        """Take in all tickets that are there, and that others are not."""
        present = dict(pairs)
        for key in self._known - present.keys():
            self.miss(key, is_lost=True)
        is_fresh = self._is_ready
        self._is_ready = True
        for key, text in present.items():
            self.take(key, text, is_fresh=is_fresh)
        self._soon()

    def take(self, key: bytes, text: bytes, *, is_fresh: bool) -> None:
        """Take in a ticket."""
        self._known.add(key)
        try:
            ticket = read_ticket(text)
        except Unreadable:
            return
        if is_fresh:
            ticket = in_our_time(ticket, self._node.machine.calendar)
        self.coordinator.ticket(_member(key), ticket)
        self._soon()

    def miss(self, key: bytes, *, is_lost: bool) -> None:
        """Take in that a ticket is gone."""
        self._known.discard(key)
        self.coordinator.gone(_member(key), is_lost=is_lost)
        self._soon()

    def _soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._node.machine.after(0.0, self._decide)

    def _wake(self, when: float) -> None:
        if self._armed == when:
            self._armed = None
            self._decide()

    def _decide(self) -> None:
        self._is_due = False
        if self.is_closed or not self._is_ready:
            return
        commands = self.coordinator.decide(self._node.machine.now)
        self._node.witness.decided(self._node, self.coordinator, commands)
        for command in commands:
            match command:
                case Send(member, order):
                    self._attendance.leased_set(f"o/{member}".encode(), written(order))
                case Raise(epoch):
                    self._attendance.announce(epoch)
                case Publish(event):
                    self._node.witness.told(self._node, event)
                case Ask():
                    self._ask(command)
        due = self.coordinator.deadline
        if due is not None and due != self._armed:
            self._armed = due
            self._node.machine.after(max(0.0, due - self._node.machine.now), self._wake, due)

    def _ask(self, question: Ask) -> None:
        self._node.machine.after(self._node.settings.deciding, self._answer, question)

    def _answer(self, question: Ask) -> None:
        if self.is_closed:
            return
        decide = self._node.settings.decide
        try:
            action = decide(question.failure)
        except Exception as error:  # noqa: BLE001  # the user's code
            why = f"restart.decide raised {error!r}"
            self.coordinator.decide_failed(question.attempt, why)
        else:
            self.coordinator.decided(question.attempt, action)
        self._soon()


def _member(key: bytes) -> str:
    return key.decode().partition("/")[2]
