"""How jobs are stopped and restarted, and what signals mean to them: frozen, checked values."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from elastic_aio.backoff import Backoff, RestartWindow
from elastic_aio.checks import (
    check_number,
    checked_integer,
    checked_items,
    checked_pair,
    listed,
    set_fields,
)
from elastic_aio.errors import SpecError
from elastic_aio.signames import SIGKILL, SIGTERM, signal_name, signal_number

if TYPE_CHECKING:
    from elastic_aio.outcome import Failure

__all__ = ["Action", "RestartPolicy", "SignalSpec", "StopPlan", "StopStep"]

DEFAULT_GRACE = 30.0


class Action(Enum):
    """What to do about a failure."""

    RESTART = "restart"
    """Restart, whatever the exit-code rules say; budgets still count."""
    GIVE_UP = "give up"
    """End the job now."""
    BY_POLICY = "by policy"
    """Do what the policy would do without the callback."""


Decide = Callable[["Failure"], "Action | Awaitable[Action]"]


@dataclass(frozen=True, slots=True)
class StopStep:
    """Send `signal`, then allow `grace` seconds before the next step."""

    signal: int
    grace: float


@dataclass(frozen=True, slots=True, init=False)
class StopPlan:
    """How workers are asked to stop: signals with graces, then always SIGKILL.

    Args:
        steps: pairs of a signal (number or name) and a grace in seconds, in order.
        reap_timeout: seconds to wait after SIGKILL for the kernel to let go of a
            worker; one that is still there then (in an uninterruptible system
            call, say) is reported with its state and left behind.
    """

    steps: tuple[StopStep, ...] = (StopStep(SIGTERM, DEFAULT_GRACE),)
    reap_timeout: float = 10.0

    def __init__(
        self,
        steps: Iterable[StopStep | tuple[int | str, float]] = ((SIGTERM, DEFAULT_GRACE),),
        reap_timeout: float = 10.0,
    ) -> None:
        """Check and keep the steps; see the class for their meaning."""
        checked = [_stop_step(step) for step in checked_items("stop.steps", steps)]
        if any(step.signal == SIGKILL for step in checked[:-1]):
            raise SpecError("stop.steps", steps, "nothing can follow SIGKILL")
        check_number("stop.reap_timeout", reap_timeout, above=0)
        set_fields(
            self,
            steps=tuple(step for step in checked if step.signal != SIGKILL),
            reap_timeout=reap_timeout,
        )

    @classmethod
    def within(cls, grace: float) -> StopPlan:
        """Make the default plan with another grace: SIGTERM, `grace` seconds, SIGKILL."""
        return cls(steps=(StopStep(SIGTERM, grace),))

    def starting_with(self, signal: int) -> StopPlan:
        """Return this plan with its first signal replaced by the one received."""
        if signal == SIGKILL:
            return StopPlan((), self.reap_timeout)
        if not self.steps:
            return self
        first, *rest = self.steps
        return StopPlan((StopStep(signal, first.grace), *rest), self.reap_timeout)

    @property
    def grace(self) -> float:
        """Seconds until SIGKILL at the latest."""
        return sum(step.grace for step in self.steps)

    def __str__(self) -> str:
        named = [f"{signal_name(step.signal)} {step.grace:g} s" for step in self.steps]
        return ", ".join([*named, "SIGKILL"])


def _stop_step(step: object) -> StopStep:
    signal, grace = (
        (step.signal, step.grace)
        if isinstance(step, StopStep)
        else checked_pair("stop.steps", step)
    )
    check_number("stop.steps", grace, at_least=0)
    return StopStep(signal_number("stop.steps", signal), float(grace))


@dataclass(frozen=True, slots=True, init=False)
class RestartPolicy:
    """When a failed attempt is followed by another one, and after which delay.

    Args:
        backoff: delays between restarts; None restarts at once, as torchrun does.
        healthy_after: an attempt that ran this many seconds resets the back-off.
        window: at most n restarts in T seconds, as `RestartWindow` or `(n, T)`.
        restart_on: exit codes that allow a restart (128 + n for a signal); None
            means all of them.
        never_on: exit codes that end the job at once.
        decide: called with the root cause of each failed attempt that `max_restarts`
            lets another one follow; it returns (or awaits) an `Action` that
            overrides the exit-code rules.
    """

    backoff: Backoff | None = None
    healthy_after: float | None = None
    window: RestartWindow | None = None
    restart_on: frozenset[int] | None = None
    never_on: frozenset[int] = frozenset()
    decide: Decide | None = None

    def __init__(
        self,
        *,
        backoff: Backoff | None = None,
        healthy_after: float | None = None,
        window: RestartWindow | tuple[int, float] | None = None,
        restart_on: Iterable[int] | None = None,
        never_on: Iterable[int] = (),
        decide: Decide | None = None,
    ) -> None:
        """Check and keep every setting; see the class for their meaning."""
        if backoff is not None:
            _check_backoff(backoff)
        if window is not None and not isinstance(window, RestartWindow):
            window = RestartWindow(*checked_pair("restart.window", window))
        set_fields(
            self,
            backoff=backoff,
            healthy_after=healthy_after,
            window=window,
            restart_on=None if restart_on is None else _codes("restart.restart_on", restart_on),
            never_on=_codes("restart.never_on", never_on),
            decide=decide,
        )
        self._check()

    def _check(self) -> None:
        if self.window is not None:
            checked_integer("restart.window", self.window.count, at_least=1)
            check_number("restart.window", self.window.seconds, above=0)
        if self.healthy_after is not None:
            check_number("restart.healthy_after", self.healthy_after, above=0)
            if self.backoff is None:
                raise SpecError(
                    "restart.healthy_after",
                    self.healthy_after,
                    "resets the back-off, so restart.backoff must be set too",
                )
        if both := (self.restart_on or frozenset()) & self.never_on:
            raise SpecError(
                "restart.never_on",
                sorted(self.never_on),
                f"must not share codes with restart.restart_on ({listed(both)})",
            )
        if self.restart_on == frozenset():
            raise SpecError(
                "restart.restart_on",
                [],
                "must name an exit code (set max_restarts=0 to never restart)",
            )
        if self.decide is not None and not callable(self.decide):
            raise SpecError("restart.decide", self.decide, "must be callable")
        if self.window and self.backoff:
            total = self.backoff.expected_total(self.window.count)
            if total >= self.window.seconds:
                raise SpecError(
                    "restart.window",
                    f"{self.window.count} in {self.window.seconds:g} s",
                    f"can never be reached with this back-off ({self.window.count} delays take"
                    f" {total:g} s); must be a longer window or a shorter back-off",
                )

    def check_with(self, max_restarts: int) -> None:
        """Refuse a policy that `max_restarts` makes meaningless."""
        if self.window and max_restarts < self.window.count:
            raise SpecError(
                "restart.window",
                f"{self.window.count} in {self.window.seconds:g} s",
                f"can never be reached with max_restarts={max_restarts};"
                " must allow no more restarts than max_restarts does",
            )
        named = {
            "restart.backoff": self.backoff,
            "restart.restart_on": self.restart_on,
            "restart.decide": self.decide,
        }
        for name, value in named.items():
            if value is not None and max_restarts == 0:
                raise SpecError(name, value, "has no effect unless max_restarts is at least 1")


@dataclass(frozen=True, slots=True, init=False)
class SignalSpec:
    """What a launcher does with the signals that it receives.

    Args:
        stop: end the job by its stop plan, which then starts with this signal.
        forward: pass to the leader of every worker; the job goes on.
    """

    stop: frozenset[int] = frozenset({1, 2, 3, 15})
    forward: frozenset[int] = frozenset({10, 12})

    def __init__(
        self,
        *,
        stop: Iterable[int | str] = (1, 2, 3, 15),
        forward: Iterable[int | str] = (10, 12),
    ) -> None:
        """Check and keep the signals, given as numbers or names."""
        set_fields(
            self, stop=_signals("signals.stop", stop), forward=_signals("signals.forward", forward)
        )
        if both := self.stop & self.forward:
            raise SpecError(
                "signals.forward",
                sorted(self.forward),
                f"must not share signals with signals.stop ({listed(both)})",
            )


# SIGKILL and SIGSTOP cannot be handled; the next four mean that this process
# itself is broken; SIGCHLD belongs to the event loop, SIGTSTP and SIGCONT to job
# control.
_NOT_CATCHABLE = frozenset({9, 19, 4, 7, 8, 11, 17, 18, 20})


def _signals(name: str, value: object) -> frozenset[int]:
    numbers = frozenset(signal_number(name, one) for one in checked_items(name, value))
    for number in numbers & _NOT_CATCHABLE:
        raise SpecError(name, signal_name(number), "must be a signal that can be handled")
    return numbers


def _codes(name: str, value: object) -> frozenset[int]:
    codes = checked_items(name, value)
    for code in codes:
        if isinstance(code, bool) or not isinstance(code, int) or not 1 <= code <= 255:
            raise SpecError(name, code, "must be exit codes from 1 to 255 (128 + n for a signal)")
    return frozenset(codes)


def _check_backoff(backoff: Backoff) -> None:
    if not isinstance(backoff, Backoff):
        raise SpecError("restart.backoff", backoff, "must be a Backoff")
    check_number("restart.backoff.initial", backoff.initial, at_least=0)
    check_number("restart.backoff.factor", backoff.factor, at_least=1)
    check_number("restart.backoff.cap", backoff.cap, at_least=0)
    if backoff.cap < backoff.initial:
        raise SpecError(
            "restart.backoff.cap", backoff.cap, f"must not be below initial ({backoff.initial:g})"
        )
