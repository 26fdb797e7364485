"""The restarts and node losses of a job: what is counted, and what follows a failure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Struct

from elastic_aio.outcome import Failure
from elastic_aio.spec.restart import SETTLED_S, UNLIMITED, RestartAction, RestartPolicy
from elastic_aio.text import counted


class RestartDecision(Struct, frozen=True):
    """Whether another attempt follows."""

    restart: bool
    why: str
    """The rule that applies."""
    delay: float = 0.0
    """Seconds until the attempt."""


HistoryCount: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 51)]
"""A number in messages of nodes; what follows it can be sent too."""


class RestartHistory(Struct, frozen=True):
    """What a budget has counted, for the budget of another node; ages in seconds."""

    restarts: HistoryCount = 0
    losses: HistoryCount = 0
    """Rounds that have lost a node."""
    consecutive: HistoryCount = 0
    """Restarts since the back-off began anew."""
    restart_ages: tuple[float, ...] = ()
    """The latest, the oldest first."""
    loss_ages: tuple[float, ...] = ()
    returned: HistoryCount = 0
    """Restarts that a healthy attempt has returned to the budget."""


_AGES_MAX = 100
"""Ages in a history; each message to a node has one."""


class _Count:
    """How often something has happened, and when, as far as that is known and matters."""

    def __init__(self, kept: int) -> None:
        self.total = 0
        self.times: deque[float] = deque(maxlen=kept)

    def clear(self) -> None:
        self.total = 0
        self.times.clear()

    def record(self, now: float) -> None:
        self.total += 1
        self.times.append(now)

    def resume(self, total: int, ages: Sequence[float], now: float) -> bool:
        """Take what another node has counted; return False if it knows nothing more."""
        if (total, len(ages)) <= (self.total, len(self.times)):
            return False
        self.total = total
        if len(ages) >= len(self.times):
            self.times = deque((now - age for age in ages), self.times.maxlen)
        return True

    def ages(self, now: float) -> tuple[float, ...]:
        return tuple(round(now - time, 1) for time in [*self.times][-_AGES_MAX:])


class RestartBudget:
    """Counts the restarts of one job and decides about each failure."""

    def __init__(
        self, max_restarts: int, policy: RestartPolicy, random: Callable[[], float]
    ) -> None:
        """Start with no restart; `random` returns numbers from 0 to 1 for the jitter."""
        self._max_restarts = max_restarts
        self._policy = policy
        self._random = random
        # More times than a limit has room for decide nothing.
        self._restarts = _Count(policy.window.count if policy.window else 0)
        self._losses = _Count(policy.node_losses.count if policy.node_losses else 0)
        self._consecutive = 0
        self._returned = 0

    def __repr__(self) -> str:
        used = self.restarts - self._returned
        return f"<RestartBudget: {used} of {self._max_restarts} restarts used>"

    def clear(self) -> None:
        """Begin anew, for another job."""
        self._restarts.clear()
        self._losses.clear()
        self._consecutive = 0
        self._returned = 0

    @property
    def restarts(self) -> int:
        """Restarts so far."""
        return self._restarts.total

    @property
    def returned(self) -> int:
        """How many of them healthy attempts have returned."""
        return self._returned

    def is_exhausted(self, ran: float) -> bool:
        """Whether `max_restarts` allows no restart after an attempt of `ran` seconds."""
        used = 0 if self._is_healthy(ran) else self.restarts - self._returned
        return used >= self._max_restarts

    def decide(
        self, root: Failure, action: RestartAction, ran: float, now: float
    ) -> RestartDecision:
        """Decide about a failure; `record` counts the restart when it happens.

        The rules, in order: GIVE_UP of the callback, `max_restarts`, the exit codes
        unless the callback returned RESTART, the window.

        Args:
            root: the root cause.
            action: what the callback returned; DEFAULT without one.
            ran: seconds that the attempt ran.
            now: monotonic seconds.
        """
        policy, status = self._policy, root.status
        # A lost status has no code.
        code = None if status.returncode is None else status.shell_code
        if action is RestartAction.GIVE_UP:
            return RestartDecision(False, "restart.decide returned GIVE_UP")
        if self.is_exhausted(ran):
            if not self._max_restarts:
                return RestartDecision(False, "no restarts allowed (max restarts: 0)")
            count = self._max_restarts
            used = "the only restart is" if count == 1 else f"all {count} restarts are"
            return RestartDecision(False, f"{used} used up (max restarts)")
        if action is RestartAction.DEFAULT:
            if code in policy.never_on:
                return RestartDecision(False, f"exit code {code} is in the never-on list")
            if policy.restart_on is not None and code not in policy.restart_on:
                what = status if code is None else f"exit code {code}"
                return RestartDecision(False, f"{what} is not in the restart-on list")
        if policy.window and policy.window.is_exhausted(self._restarts.times, now):
            count, seconds = policy.window.count, policy.window.seconds
            why = f"{counted(count, 'restart')} within {seconds:g} s (restart window)"
            return RestartDecision(False, why)
        if self._is_healthy(ran):
            self._returned = self.restarts
        number = self.restarts - self._returned + 1
        why = f"restart {number} of {self._max_restarts} (max restarts)"
        if self._max_restarts == UNLIMITED:
            why = f"restart {number} (max restarts: unlimited)"
        if action is RestartAction.RESTART:
            why += ", restart.decide returned RESTART"
        return RestartDecision(True, why, self._delay(ran))

    def forbids(self, failure: Failure) -> bool:
        """Whether the exit code of a failure ends the job, whatever else has happened."""
        status = failure.status
        return status.returncode is not None and status.shell_code in self._policy.never_on

    def lose_node(self, now: float) -> RestartDecision:
        """Count a round that has lost a node, and decide whether another round follows.

        `now` is in monotonic seconds.
        """
        limit = self._policy.node_losses
        if limit is None:
            return RestartDecision(True, "")
        number = 1 + sum(now - time < limit.seconds for time in self._losses.times)
        self._losses.record(now)
        if number > limit.count:
            return RestartDecision(False, f"{number} node losses, at most {limit} are allowed")
        if number <= limit.backoff.at_once:
            return RestartDecision(True, "")
        delay = limit.backoff.delay(number - 1, self._random)
        return RestartDecision(True, f"node loss {number} of {limit}", delay)

    def resume(self, restarts: int) -> None:
        """Count at least so many restarts, the further ones at unknown times."""
        self._restarts.total = max(restarts, self._restarts.total)

    def record(self, now: float) -> None:
        """Count a restart; `now` is in monotonic seconds."""
        self._restarts.record(now)

    def history(self, now: float, granted: int = 0) -> RestartHistory | None:
        """Return what is counted, for the budgets of other nodes; None if nothing is.

        `granted` is the number of a restart that has not begun, and counts as if it had.
        """
        pending = max(0, granted - self._restarts.total)
        if not (pending or self._restarts.total or self._losses.total):
            return None
        return RestartHistory(
            self._restarts.total + pending,
            self._losses.total,
            self._consecutive,
            (*self._restarts.ages(now), *[0.0][:pending]),
            self._losses.ages(now),
            self._returned,
        )

    def follow(self, history: RestartHistory, now: float) -> None:
        """Take what the coordinator's budget has counted, to continue from there."""
        known = self._restarts.total
        self._restarts.resume(history.restarts, history.restart_ages, now)
        if history.restarts >= known:  # the series changes before its restart is counted
            self._consecutive = history.consecutive
            self._returned = history.returned
        self._losses.resume(history.losses, history.loss_ages, now)

    def _is_healthy(self, ran: float) -> bool:
        healthy_after = self._policy.healthy_after
        return healthy_after is not None and ran >= healthy_after

    def _delay(self, ran: float) -> float:
        backoff = self._policy.backoff
        if backoff is None:
            return 0.0
        if ran >= SETTLED_S or self._is_healthy(ran):
            self._consecutive = 0
        delay = backoff.delay(self._consecutive, self._random)
        self._consecutive += 1
        return delay
