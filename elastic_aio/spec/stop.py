"""How workers are stopped, and what a launcher does with signals: `StopPlan`, `SignalSpec`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from elastic_aio.errors import SpecError
from elastic_aio.outcome import SIGKILL, SIGTERM, signal_name
from elastic_aio.spec.checks import (
    check_number,
    checked_items,
    set_fields,
    signal_number,
)

DEFAULT_GRACE: Final = 25.0
"""Seconds between SIGTERM and SIGKILL: Kubernetes and Slurm kill the launcher after 30."""


StopScope = Literal["leaders", "all"]
"""Whom a signal of a stop plan reaches first; SIGKILL reaches every process.

"leaders": the first process of each worker.  A process that it has started gets the signal
when its parents have ended.  "all": every process at once.
"""


@dataclass(frozen=True, slots=True, init=False)
class StopStep:
    """Send a signal, then wait before the next step for the processes to exit."""

    signal: int
    """Number of the signal; also given as a name."""
    grace: float
    """Seconds."""
    target: StopScope | None
    """Whom the signal reaches first; None: what the `scope` of the plan says."""

    def __init__(self, signal: int | str, grace: float, target: StopScope | None = None) -> None:
        check_number("stop.steps", grace, at_least=0, what="grace ")
        if target is not None:
            _check_scope("stop.steps", target, "target ")
        number = signal_number("stop.steps", signal)
        set_fields(self, signal=number, grace=float(grace), target=target)


def _check_scope(name: str, value: object, what: str = "") -> None:
    if value not in get_args(StopScope):
        raise SpecError(name, value, f"{what}must be one of {', '.join(get_args(StopScope))}")


@dataclass(frozen=True, slots=True, init=False)
class StopPlan:
    """How workers are stopped: signals, each with a grace period, and finally SIGKILL."""

    steps: tuple[StopStep, ...] = (StopStep(SIGTERM, DEFAULT_GRACE),)
    """Also given as pairs of a signal (number or name) and a grace in seconds, or with a target."""
    reap_timeout: float = 10.0
    """Seconds to wait after SIGKILL for the processes to exit.

    One that remains then, in an uninterruptible system call for example, is reported with
    its state and left behind.
    """
    guardian_grace: float = 0.5
    """Seconds between the first signal and SIGKILL when the launcher has been killed.

    The guardian then ends the job; a first step with a shorter grace takes precedence.  With
    more than the default, workers can outlive their launcher for more than a second.
    """
    scope: StopScope = "leaders"
    """Whom the signals reach first, of steps without a `target`."""
    linger: float = 0.0
    """Seconds for which processes that workers leave behind may run on after a success.

    Those that remain then are stopped.
    """

    def __init__(
        self,
        steps: Iterable[StopStep | tuple[int | str, float] | tuple[int | str, float, StopScope]] = (
            (SIGTERM, DEFAULT_GRACE),
        ),
        reap_timeout: float = 10.0,
        guardian_grace: float = 0.5,
        *,
        scope: StopScope = "leaders",
        linger: float = 0.0,
    ) -> None:
        """Check and keep the steps; the fields say what they mean."""
        items = checked_items("stop.steps", steps)
        for step in items:
            is_plain = isinstance(step, (tuple, list)) and len(step) in (2, 3)
            if not (is_plain or isinstance(step, StopStep)):
                problem = "must be a list of pairs of a signal and a grace"
                raise SpecError("stop.steps", steps, problem)
        checked = [step if isinstance(step, StopStep) else StopStep(*step) for step in items]
        if any(step.signal == SIGKILL for step in checked[:-1]):
            raise SpecError("stop.steps", steps, "no step may follow SIGKILL")
        check_number("stop.reap_timeout", reap_timeout, above=0)
        check_number("stop.guardian_grace", guardian_grace, at_least=0)
        check_number("stop.linger", linger, at_least=0)
        _check_scope("stop.scope", scope)
        set_fields(
            self,
            steps=tuple(step for step in checked if step.signal != SIGKILL),
            reap_timeout=reap_timeout,
            guardian_grace=guardian_grace,
            scope=scope,
            linger=float(linger),
        )

    @classmethod
    def within(cls, grace: float, *, scope: StopScope = "leaders", linger: float = 0.0) -> StopPlan:
        """Return the plan SIGTERM, `grace` seconds, SIGKILL."""
        check_number("stop.grace", grace, at_least=0)
        return cls(((SIGTERM, grace),), scope=scope, linger=linger)

    def reaches_all(self, step: StopStep) -> bool:
        """Return whether the signal of a step is sent to every process at once."""
        return (step.target or self.scope) == "all"

    def starting_with(self, signal: int) -> StopPlan:
        """Return this plan with its first signal replaced by a received one."""
        if signal == SIGKILL:
            return self._with_steps()
        if not self.steps:
            return self
        first, *rest = self.steps
        return self._with_steps(StopStep(signal, first.grace, first.target), *rest)

    def shortened(self, grace: float) -> StopPlan:
        """Return a plan of the first signal, `grace` seconds at most, and SIGKILL."""
        return self._with_steps(
            *(StopStep(one.signal, min(one.grace, grace), one.target) for one in self.steps[:1])
        )

    def _with_steps(self, *steps: StopStep) -> StopPlan:
        return replace(self, steps=steps)

    @property
    def grace(self) -> float:
        """Seconds until SIGKILL at the latest."""
        return sum(step.grace for step in self.steps)

    def __str__(self) -> str:
        named = [
            f"{signal_name(step.signal)}{' to all' * self.reaches_all(step)} {step.grace:g} s"
            for step in self.steps
        ]
        return ", ".join([*named, "SIGKILL"])


@dataclass(frozen=True, slots=True, init=False)
class SignalSpec:
    """What a launcher does with the signals that it receives."""

    stop: frozenset[int] = frozenset({1, 2, 3, 15})
    """End the job by its stop plan, which then starts with the received signal.

    The default is SIGHUP, SIGINT, SIGQUIT and SIGTERM.
    """
    forward: frozenset[int] = frozenset({10, 12})
    """Send to the leader of every worker; the job continues.  Default: SIGUSR1, SIGUSR2."""
    unhandled: Literal["skip", "kill"] = "skip"
    """Leave out workers without a handler for a forwarded signal, or let it end them."""

    def __init__(
        self,
        *,
        stop: Iterable[int | str] = (1, 2, 3, 15),
        forward: Iterable[int | str] = (10, 12),
        unhandled: Literal["skip", "kill"] = "skip",
    ) -> None:
        """Check and keep the signals, given as numbers or names."""
        if unhandled not in ("skip", "kill"):
            raise SpecError("signals.unhandled", unhandled, "must be 'skip' or 'kill'")
        set_fields(
            self,
            stop=_signals("signals.stop", stop),
            forward=_signals("signals.forward", forward),
            unhandled=unhandled,
        )
        if both := self.stop & self.forward:
            names = [signal_name(number) for number in sorted(self.forward)]
            both_names = ", ".join(map(signal_name, sorted(both)))
            problem = f"must not hold signals of signals.stop: {both_names}"
            raise SpecError("signals.forward", names, problem)


# SIGKILL and SIGSTOP cannot be handled, signal(7).  SIGILL, SIGBUS, SIGFPE and SIGSEGV are
# faults of this process; SIGCHLD belongs to the event loop, SIGCONT and SIGTSTP to job control.
_NOT_CATCHABLE = frozenset({9, 19, 4, 7, 8, 11, 17, 18, 20})


def _signals(name: str, value: object) -> frozenset[int]:
    numbers = frozenset(signal_number(name, item) for item in checked_items(name, value))
    for number in numbers & _NOT_CATCHABLE:
        raise SpecError(name, signal_name(number), "must be a signal that can be handled")
    return numbers
