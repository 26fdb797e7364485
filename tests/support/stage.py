"""A coordinator and its members on one stage: what each says, the other hears at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from elastic_aio.events import Event
from elastic_aio.outcome import ExitStatus, Failure
from elastic_aio.policy import Action, RestartPolicy
from elastic_aio.rendezvous.base import (
    Begin,
    Conclude,
    Ended,
    Failing,
    Halt,
    NodeCard,
    Pause,
    Placement,
    Succeeded,
)
from elastic_aio.rendezvous.member import Member, Probe, Reaction
from elastic_aio.rendezvous.state import Ask, Coordinator, Phase, Publish, Raise, Rules, Send
from elastic_aio.rendezvous.tickets import (
    Body,
    Standing,
    Ticket,
    read_order,
    read_ticket,
    written,
)
from elastic_aio.restarts import RestartBook


def ticket(name: str, rules: Rules, **fields: object) -> Ticket:
    """Return the first ticket of a member on a host of the same name."""
    given: dict[str, object] = {
        "card": NodeCard(name, 1, 1, "default"),
        "minimum": rules.minimum,
        "maximum": rules.maximum,
        **fields,
    }
    return Ticket(serial=1, address=name, port=1, **given)  # type: ignore[arg-type]


def failure(code: int = 1, time: float = 0.0, **fields: object) -> Failure:
    """Return the failure of a worker."""
    given: dict[str, object] = {"host": "h", "order": 0, "status": ExitStatus(code=code), **fields}
    return Failure(rank=0, local_rank=0, pid=1, time=time, **given)  # type: ignore[arg-type]


class Stage:
    """Members by name, and the coordinator of the moment."""

    def __init__(
        self,
        rules: Rules,
        *names: str,
        max_restarts: int = 3,
        restart: RestartPolicy | None = None,
    ) -> None:
        """Begin with members that are there already."""
        self.rules = rules
        self.now = 0.0
        self.members: dict[str, Member] = {}
        self.done: dict[str, list[Reaction]] = {}
        """What each member had to do, in order."""
        self.sent: list[tuple[str, Body]] = []
        self.told: list[Event] = []
        self.asked: list[Ask] = []
        self.raised: list[int] = []
        self._book: Callable[[], RestartBook] = lambda: RestartBook(
            max_restarts, restart or RestartPolicy(), lambda: 1.0
        )
        self._epochs = itertools.count(1)
        self._deaf: set[str] = set()
        self.coordinator = self.elect("c")
        self.come(*names)

    def elect(self, name: str, epoch: int | None = None, **options: bool) -> Coordinator:
        """Let another coordinator begin, that knows nothing yet."""
        self.coordinator = Coordinator(
            self.rules,
            self._book(),
            name=name,
            epoch=next(self._epochs) if epoch is None else epoch,
            now=self.now,
            **options,
        )
        return self.coordinator

    def come(self, *names: str, **fields: object) -> None:
        """Let members come, and the coordinator decide when all are there."""
        for name in names:
            self.members[name] = Member(ticket(name, self.rules, **fields))
            self.done[name] = []
        self.go()

    def go(self, now: float | None = None) -> None:
        """Let everybody hear everything, until nobody has anything to say."""
        self.now = self.now if now is None else now
        for _ in range(100):
            self._write_tickets()
            commands = self.coordinator.decide(self.now)
            if not commands:
                return
            for command in commands:
                self._do(command)
        raise AssertionError("there is no end of it")

    def _write_tickets(self) -> None:
        for name, member in self.members.items():
            self.coordinator.ticket(name, read_ticket(written(member.ticket)))

    def _do(self, command: object) -> None:
        match command:
            case Send(member, order):
                self.sent.append((member, order.body))
                if member in self.members and member not in self._deaf:
                    order = read_order(written(order))
                    self.act(member, self.members[member].order(order))
            case Publish(event):
                self.told.append(event)
            case Ask():
                self.asked.append(command)
            case Raise(epoch):
                self.raised.append(epoch)

    def act(self, name: str, actions: Iterable[Reaction]) -> None:
        """Do what a member was told: workers start and stop in no time."""
        member = self.members[name]
        for action in actions:
            self.done[name].append(action)
            match action:
                case Begin(placement) if not placement.span.group_rank:
                    member.reserved(member.ticket.port + 1)
                case Halt(round) if member.ticket.standing is not Standing.FAILING:
                    member.report(Ended(round))
                case Probe(round):
                    member.probed(round, "")

    def go_deaf(self, *names: str) -> None:
        """Let orders not reach some members from now on."""
        self._deaf.update(names)

    def hear(self) -> None:
        """Let orders reach everybody again."""
        self._deaf.clear()

    # --------------------------------------------------------- what may happen

    def fail(self, name: str, *failures: Failure, **fields: object) -> None:
        """Let a worker fail, and its node stop the others."""
        member = self.members[name]
        member.report(Failing(member.ticket.round, "failed"))
        self.go()
        failures = failures or (failure(),)
        member.report(Ended(member.ticket.round, failures, **fields))  # type: ignore[arg-type]
        self.go()

    def succeed(self, *names: str) -> None:
        """Let all workers of some nodes succeed."""
        for name in names:
            self.members[name].report(Succeeded(self.members[name].ticket.round))
        self.go()

    def lose(self, *names: str, is_lost: bool = True) -> None:
        """Let members be gone."""
        for name in names:
            self.members.pop(name)
            self.coordinator.gone(name, is_lost=is_lost)
        self.go()

    def answer(self, answer: Action) -> None:
        """Let the user's callback answer the last question."""
        self.coordinator.decided(self.asked[-1].attempt, answer)
        self.go()

    # ------------------------------------------------------------- what is seen

    def is_in(self, phase: Phase) -> bool:
        """Whether the coordinator is in a phase now."""
        return self.coordinator.phase is phase

    @property
    def places(self) -> dict[str, Placement | None]:
        """What each member holds."""
        return {name: member.held for name, member in self.members.items()}

    @property
    def ranks(self) -> dict[str, int]:
        """The group ranks of those whose workers run, by name."""
        return {
            name: member.held.span.group_rank
            for name, member in self.members.items()
            if member.held is not None and member.ticket.is_busy
        }

    def last(self, name: str) -> Reaction:
        """Return what a member had to do last."""
        return self.done[name][-1]

    def concluded(self) -> dict[str, Conclude]:
        """Return the ends that members were told."""
        found = {}
        for name, actions in self.done.items():
            for action in actions:
                if isinstance(action, Conclude):
                    found[name] = action
        return found

    def paused(self) -> list[Pause]:
        """Return all pauses that anybody was told."""
        return [one for actions in self.done.values() for one in actions if isinstance(one, Pause)]

    def events(self, *kinds: type[Event]) -> list[Event]:
        """Return the job's events of some kinds."""
        return [event for event in self.told if isinstance(event, kinds)]
