"""The members that are there, as the coordinator sees them, in the order they came."""

from __future__ import annotations

from collections.abc import Iterator

from elastic_aio.rendezvous.tickets import Body, Ticket

__all__ = ["Entry", "Roll"]


class Entry:
    """One member."""

    __slots__ = (
        "arrival",
        "begun",
        "is_refused_for_good",
        "member",
        "refused",
        "refused_at",
        "sent",
        "ticket",
        "was_told_end",
    )

    def __init__(self, member: str, arrival: int, ticket: Ticket) -> None:
        self.member = member
        self.arrival = arrival
        self.ticket = ticket
        self.sent: Body | None = None
        """The last order; what is the same is not sent again."""
        self.begun: tuple[int, int] | None = None
        """Epoch and serial of the last order that gave it a place."""
        self.refused = ""
        """Why it may not take part now; empty if it may."""
        self.refused_at = 0.0
        self.is_refused_for_good = False
        self.was_told_end = False

    @property
    def name(self) -> str:
        """The name of the member's host."""
        return self.ticket.card.name


class Roll:
    """All members that are there."""

    def __init__(self) -> None:
        """Begin with nobody."""
        self._entries: dict[str, Entry] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __contains__(self, member: str) -> bool:
        return member in self._entries

    def __getitem__(self, member: str) -> Entry:
        return self._entries[member]

    def get(self, member: str) -> Entry | None:
        """Return a member's entry, if it is there."""
        return self._entries.get(member)

    def add(self, member: str, ticket: Ticket) -> Entry:
        """Take in a member."""
        self._count += 1
        entry = self._entries[member] = Entry(member, self._count, ticket)
        return entry

    def remove(self, member: str) -> Entry | None:
        """Take out a member; return what was known of it."""
        return self._entries.pop(member, None)
