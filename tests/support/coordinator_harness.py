"""A harness that connects a coordinator and its members without a store."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from msgspec.structs import replace

from elastic_aio.events import Event
from elastic_aio.outcome import PREEMPTION_SLACK, ExitStatus, Failure, JobOutcome
from elastic_aio.rendezvous.base import (
    ChangePending,
    EndJob,
    ExclusionRequested,
    NodeInfo,
    Placement,
    PreemptionNoticed,
    RestartPending,
    RoundFailing,
    RoundStopped,
    RoundSucceeded,
    StartRound,
    StopRound,
)
from elastic_aio.rendezvous.coordinator import decide
from elastic_aio.rendezvous.member import Member, MemberEffect
from elastic_aio.rendezvous.messages import (
    MemberPhase,
    MemberStatus,
    Order,
    OrderBody,
    ProbePeers,
    RoundRecord,
    decode_order,
    decode_status,
    encode,
)
from elastic_aio.rendezvous.state import (
    CoordinatorPhase,
    CoordinatorState,
    RequestDecision,
    RoundSettings,
    SendOrder,
)
from elastic_aio.spec.restart import RestartAction, RestartBudget, RestartPolicy
from tests.support.restarts import AT_ONCE

E = TypeVar("E", bound=Event)


def status(name: str, settings: RoundSettings, **fields: object) -> MemberStatus:
    """Return the first status of a member on a host of the same name."""
    given: dict[str, object] = {
        "node": NodeInfo(name, 1, 1, "default"),
        "minimum": settings.minimum,
        "maximum": settings.maximum,
        "program": settings.program,
        "uid": settings.uid,
        **fields,
    }
    return MemberStatus(serial=1, address=name, port=1, **given)  # type: ignore[arg-type]


def failure(
    code: int = 1, time: float = 0.0, *, rank: int = 0, host: str = "h", **fields: Any
) -> Failure:
    """Return the failure of a worker."""
    fields = {"order": 0, "status": ExitStatus(code=code), **fields}
    return Failure(rank=rank, local_rank=0, pid=1, host=host, time=time, **fields)


class CoordinatorHarness:
    """Members by name, and the present coordinator."""

    def __init__(
        self,
        settings: RoundSettings,
        *names: str,
        max_restarts: int = 3,
        restart: RestartPolicy | None = None,
        store: bytes = b"store",
    ) -> None:
        """Begin with members that have joined already."""
        self.settings = settings
        self.now = 0.0
        self.members: dict[str, Member] = {}
        self.done: dict[str, list[MemberEffect]] = {}
        """The effects of each member, in order."""
        self.sent: list[tuple[str, OrderBody]] = []
        self.published: list[Event] = []
        self.decision_requests: list[Failure] = []
        self.recorded: RoundRecord | None = None
        """The last round, as it was recorded."""
        self._budget: Callable[[], RestartBudget] = lambda: RestartBudget(
            max_restarts, restart or AT_ONCE, lambda: 1.0
        )
        self.budgets: dict[str, RestartBudget] = {}
        """By member, and by other names of coordinators."""
        self._store = store
        self._terms = itertools.count(1)
        self._dropping: set[str] = set()
        self._slow: set[str] = set()
        self._unprobed: set[str] = set()
        self.dropped: dict[str, Order] = {}
        """The last order for each member whose orders are dropped."""
        self._written: dict[str, int] = {}
        self.clocks: dict[str, tuple[float, float]] = {}
        """By member: the error of its wall clock, and the time of its boot by that clock."""
        self.latencies: dict[str, float] = {}
        """By member: seconds that its statuses take to arrive."""
        self.coordinator = self.elect("c")
        self.join(*names)

    def elect(
        self,
        name: str,
        *,
        store: bytes | None = None,
        former: RoundRecord | None = None,
        was_leased: bool = True,
    ) -> CoordinatorState:
        """Replace the coordinator by a new one.

        `store` is another one to move to, before or after the leases at the former one have
        ended, and `former` the last round as it was recorded then.
        """
        if store is not None:
            self._store, self._terms = store, itertools.count(1)
            for member in self.members.values():
                member.attend(store, was_leased=was_leased)
        term = next(self._terms)
        self._written.clear()
        budget = self.budgets.setdefault(name, self._budget())
        if former is not None and former.history is not None:
            budget.follow(former.history, former.written_at)
        self.coordinator = CoordinatorState(
            self.settings,
            budget,
            name=f"{name}@{self._store.decode()}",
            term=term,
            now=self.now,
            former=former,
        )
        return self.coordinator

    def lose_all(self, name: str) -> None:
        """Lose the coordinator and all members, and elect a new one."""
        assert self.recorded is not None
        self.members.clear()
        self.elect(name, former=RoundRecord.decode(encode(self.recorded)))

    def join(self, *names: str, **fields: Any) -> None:
        """Add members, then let the coordinator decide."""
        for name in names:
            self.add(name, **fields)
        self.settle()

    def add(self, name: str, settings: RoundSettings | None = None, **fields: object) -> None:
        """Add a member, which may have other settings."""
        member = Member(name, status(name, settings or self.settings, **fields))
        member.attend(self._store)
        self.members[name], self.done[name] = member, []

    def settle(self, now: float | None = None) -> None:
        """Deliver statuses and orders until there are no more effects."""
        self.now = self.now if now is None else now
        for _ in range(100):
            self.write_statuses()
            effects = decide(self.coordinator, self.now)
            if not effects:
                return
            for effect in effects:
                self._perform(effect)
        raise AssertionError("the effects do not end")

    def write_statuses(self) -> None:
        """Deliver each new status once; a new coordinator, and one that saw it go, reads all."""
        self._written = {name: one for name, one in self._written.items() if name in self.members}
        for name, member in self.members.items():
            if self._written.get(name) != member.status.serial:
                self._written[name] = member.status.serial
                error, clock = self.clocks.get(name, (0.0, 0.0))
                text = encode(replace(member.status, sent_at=self.now + error, clock=clock))
                arrived_at = self.now + self.latencies.get(name, 0.0)
                self.coordinator.on_status(name, decode_status(text), arrived_at)

    def _perform(self, effect: object) -> None:
        match effect:
            case SendOrder(member, order):
                self.sent.append((member, order.body))
                if member in self._dropping:
                    self.dropped[member] = order
                elif member in self.members:
                    order = decode_order(encode(order))
                    if order.history is not None:
                        budget = self.budgets.setdefault(member, self._budget())
                        budget.follow(order.history, self.now)
                    self.perform(member, self.members[member].on_order(order))
            case RequestDecision(failure):
                self.decision_requests.append(failure)
            case RoundRecord():
                self.recorded = replace(effect, written_at=self.now)
            case Event():
                self.published.append(effect)

    def perform(self, name: str, actions: Iterable[MemberEffect]) -> None:
        """Perform the effects of a member; workers start and stop at once."""
        member = self.members[name]
        for action in actions:
            self.done[name].append(action)
            match action:
                case StartRound(placement) if not placement.span.group_rank:
                    member.set_port(member.status.port + 1)
                case StopRound(round) if (
                    member.status.phase is not MemberPhase.FAILING and name not in self._slow
                ):
                    self.perform(name, member.report(RoundStopped(round)))
                case ChangePending(until=until) if until:
                    former = member.status.preemption
                    if former is None or until < former.until - PREEMPTION_SLACK:
                        self.perform(name, member.report(PreemptionNoticed(action)))
                case ProbePeers(round) if name not in self._unprobed:
                    member.probed(round, "")

    def drop_orders(self, *names: str) -> None:
        """Drop the orders for some members from now on."""
        self._dropping.update(names)

    def restore_orders(self) -> None:
        """Deliver orders to all members again."""
        self._dropping.clear()

    def stop_slowly(self, *names: str) -> None:
        """Let some members report no stop by themselves."""
        self._slow.update(names)

    def answer_no_probes(self, *names: str) -> None:
        """Let the probes of some members go on for ever."""
        self._unprobed.update(names)

    # --------------------------------------------------------- what may happen

    def fail(self, name: str, *failures: Failure, **fields: object) -> None:
        """Let a worker fail, and its node stop the others."""
        member = self.members[name]
        member.report(RoundFailing(member.status.round, "failed"))
        self.settle()
        failures = failures or (failure(),)
        stopped = RoundStopped(member.status.round, failures, **fields)  # type: ignore[arg-type]
        self.perform(name, member.report(stopped))
        self.settle()

    def exclude(self, name: str, why: str = "rank 1: bad", seconds: float | None = 60.0) -> None:
        """Let a worker exclude its node."""
        member = self.members[name]
        self.perform(name, member.report(ExclusionRequested(member.status.round, why, seconds)))
        self.settle()

    def succeed(self, *names: str) -> None:
        """Let all workers of some nodes succeed."""
        for name in names:
            self.members[name].report(RoundSucceeded(self.members[name].status.round))
        self.settle()

    def lose(self, *names: str, is_lost: bool = True, is_dead: bool = False) -> None:
        """Remove members: lost, or left by themselves."""
        for name in names:
            self.members.pop(name)
            self.coordinator.on_gone(name, self.now, is_lost=is_lost, is_dead=is_dead)
        self.settle()

    def answer(self, answer: RestartAction) -> None:
        """Let the user's callback answer the last question."""
        self.coordinator.on_decision(answer)
        self.settle()

    # ------------------------------------------------------------- what is seen

    def is_in(self, phase: CoordinatorPhase) -> bool:
        """Whether the coordinator is in a phase now."""
        return self.coordinator.phase is phase

    @property
    def outcome(self) -> JobOutcome:
        """How the job has ended."""
        assert self.coordinator.outcome is not None, self.coordinator
        return self.coordinator.outcome

    @property
    def deadline(self) -> float:
        """When the next decision is due even if nothing happens."""
        assert self.coordinator.deadline is not None, self.coordinator
        return self.coordinator.deadline

    def numbers(self, name: str) -> tuple[int, int, int, int]:
        """Return round, attempt, restarts and changes of a member's placement."""
        place = self.place(name)
        return place.round, place.attempt, place.restarts, place.changes

    def place(self, name: str) -> Placement:
        """Return the placement of a member."""
        placement = self.members[name].status.placement
        assert placement is not None, name
        return placement

    @property
    def ranks(self) -> dict[str, int]:
        """The group ranks of the members whose workers run, by name."""
        return {
            name: member.status.placement.span.group_rank
            for name, member in self.members.items()
            if member.status.placement is not None and member.status.is_busy
        }

    def last(self, name: str) -> MemberEffect:
        """Return the last effect of a member."""
        return self.done[name][-1]

    def end_of(self, name: str) -> JobOutcome:
        """Return how the job has just ended for a member."""
        end = self.last(name)
        assert isinstance(end, EndJob), end
        return end.outcome

    def end_orders(self) -> dict[str, EndJob]:
        """Return the last `EndJob` of each member that has one."""
        found = {}
        for name, actions in self.done.items():
            for action in actions:
                if isinstance(action, EndJob):
                    found[name] = action
        return found

    def pending_restarts(self) -> list[RestartPending]:
        """Return all `RestartPending` instructions of all members."""
        return [
            one
            for actions in self.done.values()
            for one in actions
            if isinstance(one, RestartPending)
        ]

    def events(self, kind: type[E]) -> list[E]:
        """Return the job's events of a kind."""
        return [event for event in self.published if isinstance(event, kind)]
