"""When a failed attempt is repeated: `RestartPolicy`, and `RestartBudget`, which applies it."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from enum import Enum
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Struct

from elastic_aio.errors import SpecError
from elastic_aio.outcome import Failure
from elastic_aio.spec import checks
from elastic_aio.spec.fields import Converted, SpecValue, field
from elastic_aio.text import counted
from elastic_aio.value import Value


class Backoff(Value, frozen=True, kw_only=True):
    """Exponential delays between restarts.

    The n-th consecutive restart after the first `at_once`, from 0, is delayed by
    `min(cap, initial * factor**n)`.
    """

    initial: float = 1.0
    """Seconds."""
    factor: float = 2.0
    """Growth from one delay to the next."""
    cap: float = 60.0
    """Seconds."""
    jitter: bool = True
    """Take a uniformly random part of each delay ("full jitter"), so that jobs that failed together
    do not restart together."""
    at_once: int = 0
    """How many consecutive restarts have no delay before those that have one."""

    def ceiling(self, consecutive: int) -> float:
        """Return the longest delay in seconds of the n-th consecutive restart, from 0."""
        if not self.initial or consecutive < self.at_once:
            return 0.0
        try:
            return min(self.cap, self.initial * self.factor ** (consecutive - self.at_once))
        except OverflowError:
            return self.cap

    def delay(self, consecutive: int, random: Callable[[], float]) -> float:
        """Return a delay in seconds; `random` returns a number from 0 to 1."""
        ceiling = self.ceiling(consecutive)
        return ceiling * random() if self.jitter else ceiling

    def expected_total(self, restarts: int) -> float:
        """Return the expected sum in seconds of the first `restarts` delays."""
        share = 0.5 if self.jitter else 1.0
        total = 0.0
        for count in range(restarts):
            ceiling = self.ceiling(count)
            if count >= self.at_once and ceiling in (self.cap, self.ceiling(count + 1)):
                return share * (total + ceiling * (restarts - count))
            total += ceiling
        return share * total


RestartScope = Literal["group", "worker", "rest"]
"""Which workers are restarted together: all of a group; the worker itself; it and those after."""

RestartWhen = Literal["on-failure", "always", "never"]
"""The ends that are followed by a restart, in Docker's and systemd's words."""

RESTART_WHEN: Final = ("on-failure", "always", "never")

UNLIMITED: Final = checks.MAX_NUMBER
"""The `max_restarts` of a job without a limit."""

DEFAULT_BACKOFF: Final = Backoff(jitter=False, at_once=1)

SETTLED_S: Final = 60.0
"""Seconds that end a series of failures: an attempt that ran so long has no delay of theirs."""


def restarts_text(number: int) -> str:
    """Return a `max_restarts` with its noun: `1 restart`, `unlimited restarts`."""
    return "unlimited restarts" if number == UNLIMITED else counted(number, "restart")


class RestartWindow(Value, frozen=True):
    """At most `count` restarts within any `seconds`; a further one ends the job."""

    count: int
    seconds: float

    def is_exhausted(self, restarts_at: Sequence[float], now: float) -> bool:
        """Return whether a restart at `now` would exceed the limit.

        `restarts_at` holds the monotonic times of the restarts so far.
        """
        return sum(1 for time in restarts_at if now - time < self.seconds) >= self.count

    def __str__(self) -> str:
        return f"{self.count} within {self.seconds:g} s"


class NodeLosses(Value, frozen=True, kw_only=True):
    """How many rounds of a job of several nodes may lose a node.

    A node is lost when its agent ends without leaving: a crash of the host, SIGKILL, a network that
    is down.  Nodes that are lost in one round count once.  A round follows after the delay of
    `backoff`, by default at once after the first two losses within `seconds`: two hosts that fail
    together are no crash loop.
    """

    count: int = 10
    """At most so many within any `seconds`; a further one ends the job."""
    seconds: float = 60.0
    backoff: Backoff = Backoff(initial=0.25, factor=2.0, cap=1.0, jitter=False, at_once=2)

    def __str__(self) -> str:
        return f"{self.count} within {self.seconds:g} s"


class RestartAction(Enum):
    """The action after a failure, as `RestartPolicy.decide` returns it."""

    RESTART = "restart"
    """Restart in spite of the exit-code rules; `max_restarts` and the window still apply."""
    GIVE_UP = "give up"
    """End the job now."""
    DEFAULT = "default"
    """Apply the exit-code rules, as without the callback."""
    EXCLUDE = "exclude"
    """As RESTART, but without the node of the failure, which is excluded for `exclude_for`."""


Decide: TypeAlias = Callable[[Failure], RestartAction | Awaitable[RestartAction]]
"""A `RestartPolicy.decide`: a plain function, which runs in a thread, or an async one."""

DECIDE_TIMEOUT = 600.0
"""Seconds after which a job ends whose `restart.decide` does not return."""


def why_undecided(cause: BaseException | float) -> str:
    """Return why a job ends: the error of `restart.decide`, or the seconds that it took."""
    if isinstance(cause, BaseException):
        return f"restart.decide raised {type(cause).__name__}"
    return f"restart.decide has not returned within {cause:g} s"


CAUSE_S = 2.0
"""Seconds in which a failure that is only the loss of a peer waits for its cause."""


def _codes(name: str, value: object) -> frozenset[int]:
    codes = checks.checked_items(name, value)
    for code in codes:
        if not checks.is_integer(code) or not 1 <= code <= 255:
            raise SpecError(name, code, "must hold exit codes from 1 to 255, 128 + n for a signal")
    return frozenset(codes)


def checked_window(name: str, value: object) -> RestartWindow:
    window = (
        value
        if isinstance(value, RestartWindow)
        else RestartWindow(*checks.checked_pair(name, value))
    )
    checks.checked_integer(name, window.count, at_least=1)
    checks.check_number(name, window.seconds, above=0)
    return window


def _callable(name: str, value: object) -> object:
    if not callable(value):
        raise SpecError(name, value, "must be callable")
    return value


def _checked_backoff(name: str, backoff: object) -> Backoff:
    if not isinstance(backoff, Backoff):
        raise SpecError(name, backoff, "must be a Backoff")
    checks.check_number(f"{name}.initial", backoff.initial, at_least=0)
    checks.check_number(f"{name}.factor", backoff.factor, at_least=1)
    checks.check_number(f"{name}.cap", backoff.cap, at_least=0)
    if backoff.cap < backoff.initial:
        problem = f"must be at least initial={backoff.initial:g}"
        raise SpecError(f"{name}.cap", backoff.cap, problem)
    if not isinstance(backoff.jitter, bool):
        raise SpecError(f"{name}.jitter", backoff.jitter, "must be True or False")
    checks.checked_integer(f"{name}.at_once", backoff.at_once, at_least=0)
    return backoff


def _checked_losses(name: str, losses: object) -> NodeLosses:
    if not isinstance(losses, NodeLosses):
        raise SpecError(name, losses, "must be a NodeLosses, or None for no limit")
    checks.checked_integer(f"{name}.count", losses.count, at_least=0)
    checks.check_number(f"{name}.seconds", losses.seconds, above=0)
    _checked_backoff(f"{name}.backoff", losses.backoff)
    total = losses.backoff.expected_total(losses.count)
    if total >= losses.seconds:
        problem = f"cannot be exhausted, as its delays take {total:g} s; use a longer window"
        raise SpecError(name, str(losses), problem)
    return losses


class RestartPolicy(SpecValue, prefix="restart.", alike=True):
    """Which failures are followed by another attempt, and after which delay."""

    scope: RestartScope = field(
        default="group",
        check=checks.OneOf(("group", "worker", "rest")),
        own_option="--restart-scope SCOPE",
        help="workers that a restart starts again: 'group', all; 'worker', the worker that failed;"
        " 'rest', that and those with higher ranks; the latter two need one node (default 'group')",
    )
    """Which workers are restarted with a worker that fails: "group", all; "worker", no other;
    "rest", those with higher ranks.  In the latter two cases the workers are independent: each has
    its own attempts and restarts, and none has a store."""
    when: RestartWhen = field(
        default="on-failure",
        check=checks.OneOf(RESTART_WHEN),
        own_option="--restart WHEN",
        help="ends that are followed by a restart: 'on-failure' (up to --max-restarts), 'always'"
        " (successes too, without that limit) or 'never' (default 'on-failure')",
    )
    """Which ends are followed by a restart: "on-failure", failures, up to `max_restarts`; "always",
    each that was not requested, whatever `max_restarts` says; "never", none."""
    backoff: Backoff | None = field(
        default=DEFAULT_BACKOFF,
        check=checks.optional(_checked_backoff),
        own_option="--restart-delay SECONDS",
        help="seconds before each restart; with FIRST:LONGEST the time doubles from one restart to"
        " the next, and a random part of it is waited (default 0 before the first restart,"
        " then 1, 2, 4 and up to 60; so again after an attempt of a minute)",
    )
    """Delays between restarts; None restarts at once, as torchrun does.  By default the first
    restart is at once, and the next ones wait 1, 2, 4 and up to 60 s.  Delays begin anew after an
    attempt that ran for a minute, or for `healthy_after`."""
    healthy_after: float | None = field(
        default=None,
        check=checks.Seconds(above=0),
        own_option="--healthy-after SECONDS",
        help="an attempt that ran for so long returns all restarts used so far (default: never)",
    )
    """An attempt that ran this many seconds returns the restarts used so far; None never does."""
    window: Converted[RestartWindow | None, RestartWindow | tuple[int, float] | None] = field(
        default=None,
        check=checked_window,
        own_option="--restart-window N:SECONDS",
        help="at most N restarts within any SECONDS; a further failure ends the job (default: no"
        " limit)",
    )
    """At most `count` restarts in `seconds`, as a `RestartWindow` or a pair."""
    restart_on: Converted[frozenset[int] | None, Iterable[int] | None] = field(
        default=None,
        check=_codes,
        own_option="--restart-on CODES",
        help="exit codes, or signals such as SIGKILL, that allow a restart, as in '1,75,SIGSEGV'"
        " (default: all)",
    )
    """Exit codes that allow a restart, 128 + n for a signal; None allows all."""
    never_on: Converted[frozenset[int], Iterable[int]] = field(
        default=frozenset(),
        check=_codes,
        own_option="--never-on CODES",
        help="exit codes, or signals, that end the job at once (default: none)",
    )
    """Exit codes that end the job at once."""
    decide: Decide | None = field(default=None, check=_callable)
    """Called with the root cause of each failed attempt while `max_restarts` allows another.

    Returns within 10 minutes a `RestartAction`, or an awaitable of one, that overrides the
    exit-code rules.  A plain function runs in a thread; a coroutine function must not block.
    """
    node_losses: NodeLosses | None = field(
        default=NodeLosses(), check=checks.optional(_checked_losses)
    )
    """Limit of lost nodes, which cost no restart; None for no limit."""
    max_attempts_without_progress: int | None = field(
        default=None,
        check=checks.Whole(at_least=1),
        own_option="--max-attempts-without-progress N",
        help="the job ends when N attempts in a row have failed in which no worker has sent"
        " PROGRESS, whatever --max-restarts allows (default: no limit)",
    )
    """So many failed attempts in a row without a `PROGRESS` of any worker end the job; None for no
    limit.  An attempt with progress begins the count anew."""
    exclude_for: float | None = field(
        default=None,
        check=checks.Seconds(above=0),
        own_option="--exclude-for SECONDS",
        help="a node that a worker has excluded (EXCLUDE=reason) takes part again after so long"
        " (default: not before its launcher is started again)",
    )
    """Seconds for which an excluded node takes part in no round, once its workers have stopped;
    None: as long as its launcher runs.  On one node, no attempt follows an exclusion."""

    def _check(self) -> None:
        if both := (self.restart_on or frozenset()) & self.never_on:
            codes = ", ".join(map(str, sorted(both)))
            problem = f"must not hold codes of the restart-on list: {codes}"
            raise SpecError("restart.never_on", sorted(self.never_on), problem)
        if self.restart_on == frozenset():
            problem = "must name an exit code; max_restarts=0 never restarts"
            raise SpecError("restart.restart_on", [], problem)
        if self.window and self.backoff and self.scope == "group":
            total = self.backoff.expected_total(self.window.count)
            if total >= self.window.seconds:
                problem = (
                    f"cannot be exhausted, as {self.window.count} delays of the back-off take"
                    f" {total:g} s; use a longer window or shorter delays"
                )
                raise SpecError("restart.window", self.window, problem)

    def check_with(self, max_restarts: int) -> None:
        """Raise `SpecError` for settings without an effect under `max_restarts`."""
        if self.when == "never" and max_restarts:
            raise SpecError("max_restarts", max_restarts, "must be 0 with restart 'never'")
        if self.when == "always":
            max_restarts = UNLIMITED
            if self.restart_on is not None:
                problem = "has no effect with restart 'always'"
                raise SpecError("restart.restart_on", sorted(self.restart_on), problem)
        if self.decide is not None and (self.when == "always" or self.scope == "rest"):
            which = "restart 'always'" if self.when == "always" else "scope 'rest'"
            raise SpecError("restart.decide", self.decide, f"has no effect with {which}")
        # Of independent workers, the window limits the restarts of all, and `max_restarts` of each.
        is_shared = self.scope != "group" and max_restarts > 0
        if self.window and not is_shared and max_restarts < self.window.count:
            problem = (
                f"cannot be exhausted with max_restarts={max_restarts};"
                " its count must be at most max_restarts"
            )
            raise SpecError("restart.window", self.window, problem)
        if (limit := self.max_attempts_without_progress) and limit > max_restarts:
            problem = f"is never reached with max_restarts={max_restarts}; must be at most that"
            raise SpecError("restart.max_attempts_without_progress", limit, problem)
        settings = {
            "restart.backoff": None if self.backoff == DEFAULT_BACKOFF else self.backoff,
            "restart.healthy_after": self.healthy_after,
            "restart.restart_on": self.restart_on,
            "restart.decide": self.decide,
        }
        for name, value in settings.items():
            if value is not None and max_restarts == 0:
                raise SpecError(name, value, "has no effect unless max_restarts is at least 1")


class RestartDecision(Struct, frozen=True):
    """Whether another attempt follows."""

    restart: bool
    why: str
    """The rule that applies."""
    delay: float = 0.0
    """Seconds until the attempt."""


HistoryCount: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 51)]
"""A number in messages of nodes, so small that the numbers after it can be sent too."""


class RestartHistory(Struct, frozen=True):
    """The counts of a budget, for the budget of another node; ages in seconds."""

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
    without_progress: HistoryCount = 0
    """Failed attempts since the last progress."""


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
        """Take the count of another node; return False if it knows nothing more."""
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
        self._left_out = 0.0  # seconds
        self._consecutive = 0
        self._returned = 0
        self._without_progress = 0
        self.has_progress = False
        """Whether a worker has reported a step in the present attempt."""

    def __repr__(self) -> str:
        used = self.restarts - self._returned
        return f"<RestartBudget: {used} of {self._max_restarts} restarts used>"

    def clear(self) -> None:
        """Begin anew, for another job."""
        self._restarts.clear()
        self._losses.clear()
        self._consecutive = 0
        self._returned = 0
        self._without_progress = 0

    def leave_out(self, seconds: float) -> None:
        """Leave the time of a stop out of the window: a failure is followed by what it takes."""
        self._left_out += seconds

    @property
    def restarts(self) -> int:
        """Restarts so far."""
        return self._restarts.total

    @property
    def returned(self) -> int:
        """How many of them healthy attempts have returned."""
        return self._returned

    def is_exhausted(self, ran: float) -> bool:
        """Whether no restart is left after an attempt of `ran` seconds."""
        return self._is_used_up(ran) or self._lacks_progress

    def _is_used_up(self, ran: float) -> bool:
        used = 0 if self._is_healthy(ran) else self.restarts - self._returned
        return used >= self._max_restarts

    @property
    def _lacks_progress(self) -> bool:
        limit = self._policy.max_attempts_without_progress
        return limit is not None and not self.has_progress and self._without_progress + 1 >= limit

    def begin_attempt(self) -> None:
        """Note that another attempt begins, whatever has ended one with progress."""
        if self.has_progress:
            self._without_progress = 0
        self.has_progress = False

    def decide(
        self, root: Failure | None, action: RestartAction, ran: float, now: float
    ) -> RestartDecision:
        """Decide about a failure; `record` counts the restart when it happens.

        The rules, in order: GIVE_UP of the callback, `max_restarts`, the attempts without progress,
        the exit codes unless the callback returned RESTART, the window.  `action` is the result of
        the callback, DEFAULT without one; the attempt `ran` so many seconds, and `now` is in
        monotonic seconds.  `root` is None if it has succeeded, or no worker has failed.
        """
        policy = self._policy
        status = None if root is None else root.status
        # A lost status has no code.
        code = None if status is None or status.returncode is None else status.shell_code
        if action is RestartAction.GIVE_UP:
            return RestartDecision(False, "restart.decide returned GIVE_UP")
        if self._is_used_up(ran):
            if not self._max_restarts:
                return RestartDecision(False, "no restarts allowed (max restarts: 0)")
            count = self._max_restarts
            used = "the only restart is" if count == 1 else f"all {count} restarts are"
            return RestartDecision(False, f"{used} used up (max restarts)")
        limit = policy.max_attempts_without_progress
        if self._lacks_progress:
            which = "attempt has" if limit == 1 else f"{limit} attempts have"
            why = f"the last {which} made no progress (max attempts without progress)"
            return RestartDecision(False, why)
        if action is RestartAction.DEFAULT and status is not None:
            if code in policy.never_on:
                return RestartDecision(False, f"exit code {code} is in the never-on list")
            if policy.restart_on is not None and code not in policy.restart_on:
                what = status if code is None else f"exit code {code}"
                return RestartDecision(False, f"{what} is not in the restart-on list")
        if policy.window and policy.window.is_exhausted(self._restarts.times, now - self._left_out):
            count, seconds = policy.window.count, policy.window.seconds
            why = f"{counted(count, 'restart')} within {seconds:g} s (restart window)"
            return RestartDecision(False, why)
        if self._is_healthy(ran):
            self._returned = self.restarts
        number = self.restarts - self._returned + 1
        why = f"restart {number} of {self._max_restarts} (max restarts)"
        if self._max_restarts == UNLIMITED:
            why = f"restart {number} (max restarts: unlimited)"
        if action in (RestartAction.RESTART, RestartAction.EXCLUDE):
            why += f", restart.decide returned {action.name}"
        self._without_progress = 0 if self.has_progress else self._without_progress + 1
        if limit is not None and self._without_progress:
            why += f", {counted(self._without_progress, 'attempt')} of {limit} without progress"
        return RestartDecision(True, why, self._delay(ran))

    def forbids(self, failure: Failure) -> bool:
        """Whether the exit code of a failure ends the job, whatever else has happened."""
        status = failure.status
        return status.returncode is not None and status.shell_code in self._policy.never_on

    def lose_node(self, now: float) -> RestartDecision:
        """Count a lost node at `now` (monotonic seconds); decide whether another round follows."""
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
        self._restarts.record(now - self._left_out)

    def history(self, now: float, granted: int = 0) -> RestartHistory | None:
        """Return all counts, for the budgets of other nodes; None if nothing was counted.

        `granted` is the number of a restart that has not begun, and counts as if it had.
        """
        pending = max(0, granted - self._restarts.total)
        if not (pending or self._restarts.total or self._losses.total):
            return None
        return RestartHistory(
            self._restarts.total + pending,
            self._losses.total,
            self._consecutive,
            (*self._restarts.ages(now - self._left_out), *[0.0][:pending]),
            self._losses.ages(now),
            self._returned,
            self._without_progress,
        )

    def follow(self, history: RestartHistory, now: float) -> None:
        """Take the counts of the coordinator's budget, to continue from there."""
        known = self._restarts.total
        self._restarts.resume(history.restarts, history.restart_ages, now - self._left_out)
        if history.restarts >= known:  # the series changes before its restart is counted
            self._consecutive = history.consecutive
            self._returned = history.returned
            self._without_progress = history.without_progress
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
