"""What a coordinator has said so far, and what it is about to say."""

from __future__ import annotations

from collections.abc import Iterable

from elastic_aio.events import Event
from elastic_aio.rendezvous.base import Begin
from elastic_aio.rendezvous.commands import Ask, Command, Publish, Raise, Send
from elastic_aio.rendezvous.roll import Entry
from elastic_aio.rendezvous.tickets import Body, Order

__all__ = ["Desk"]


class Desk:
    """Numbers a coordinator's orders and collects them until they are taken away.

    An order says all that is wanted of its receiver, so only the last one for each
    member leaves the desk, and what a member was told last is not said again.
    """

    def __init__(self, epoch: int) -> None:
        """Begin with nothing said in `epoch`."""
        self.epoch = epoch
        self._serial = 0
        self._sends: dict[str, Send] = {}
        self._others: list[Command] = []

    def send(self, entry: Entry, body: Body) -> None:
        """Order something, unless it is what the member was told last."""
        if entry.sent != body:
            self.insist(entry, body)

    def insist(self, entry: Entry, body: Body) -> None:
        """Order something, though it may be the same as before."""
        self._serial += 1
        entry.sent = body
        if isinstance(body, Begin):
            entry.begun = (self.epoch, self._serial)
        # The order of the sends is that of the last change.
        self._sends.pop(entry.member, None)
        self._sends[entry.member] = Send(entry.member, Order(self.epoch, self._serial, body))

    def publish(self, event: Event) -> None:
        """Tell an event of the job to whoever follows it."""
        self._others.append(Publish(event))

    def ask(self, question: Ask) -> None:
        """Ask the user's callback."""
        self._others.append(question)

    def hear(self, entry: Entry) -> bool:
        """Take in which orders a member has seen; tell whether our epoch is too low for it."""
        epoch, serial = entry.ticket.seen
        if epoch == self.epoch:
            # Another coordinator's, at another store: ours have to be higher from now on.
            self._serial = max(serial, self._serial)
        return entry.ticket.epoch > self.epoch

    def raise_epoch(self, epoch: int, entries: Iterable[Entry]) -> None:
        """Go on under a higher epoch; all that was said is said again."""
        self.epoch = epoch
        self._others.append(Raise(epoch))
        for entry in entries:
            if entry.sent is not None:
                self.insist(entry, entry.sent)

    def forget(self, member: str) -> None:
        """Drop what was not yet taken away: the member has gone."""
        self._sends.pop(member, None)

    def take(self) -> list[Command]:
        """Return what is to be done, and begin anew."""
        out = [*self._others, *self._sends.values()]
        self._others, self._sends = [], {}
        return out
