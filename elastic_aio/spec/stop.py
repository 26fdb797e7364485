"""How workers are stopped, and what a launcher does with signals: `StopPlan`, `SignalSpec`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from elastic_aio.errors import SpecError
from elastic_aio.outcome import SIGKILL, SIGTERM, signal_name
from elastic_aio.spec import checks
from elastic_aio.spec.fields import Converted, SpecValue, field

STOP_SIGNALS: Final = frozenset({1, 2, 3, 15})
"""SIGHUP, SIGINT, SIGQUIT and SIGTERM: torchrun handles them, and passes them on."""
DEFAULT_GRACE: Final = 25.0
"""Seconds between SIGTERM and SIGKILL: Kubernetes and Slurm kill the launcher after 30."""
EOF: Final = -1
"""In place of the signal of a first step: standard input is closed, if it is a pipe."""

StopScope = Literal["leaders", "all"]
"""Whom a signal of a stop plan reaches first; SIGKILL reaches every process.  "leaders": the first
process of each worker; a process that it has started gets the signal when its parents have ended.
"all": every process at once."""


def _scope(name: str, value: object, what: str = "") -> Any:
    if value not in get_args(StopScope):
        raise SpecError(name, value, f"{what}must be one of {', '.join(get_args(StopScope))}")
    return value


class StopStep(SpecValue):
    """Send a signal, then wait before the next step for the processes to exit."""

    signal: Converted[int, int | str] = field(kw_only=False)
    """Number of the signal; also given as a name.  "EOF" (-1) closes standard input instead: only
    as the first step for a process of `open_process` that has a pipe there."""
    grace: float = field(kw_only=False)
    """Seconds."""
    target: StopScope | None = field(default=None, kw_only=False)
    """Whom the signal reaches first; None: what the `scope` of the plan says."""

    def _check(self) -> None:
        name = "stop.steps"
        checks.check_number(name, self.grace, at_least=0, what="grace ")
        if self.target is not None:
            _scope(name, self.target, "target ")
        number = EOF if self.signal in ("EOF", EOF) else checks.signal_number(name, self.signal)
        self._set(signal=number, grace=float(self.grace))

    if TYPE_CHECKING:

        def replace(  # type: ignore[override]
            self, *, signal: int | str = 0, grace: float = 0, target: StopScope | None = None
        ) -> StopStep: ...


def _steps(name: str, value: Any) -> tuple[StopStep, ...]:
    steps = []
    for step in checks.checked_items(name, value):
        if not isinstance(step, StopStep):
            if not (isinstance(step, (tuple, list)) and len(step) in (2, 3)):
                raise SpecError(name, value, "must be a list of pairs of a signal and a grace")
            step = StopStep(*step)
        steps.append(step)
    if any(step.signal == SIGKILL for step in steps[:-1]):
        raise SpecError(name, value, "no step may follow SIGKILL")
    if any(step.signal == EOF for step in steps[1:]):
        raise SpecError(name, value, "EOF must be the first step")
    return tuple(step for step in steps if step.signal != SIGKILL)


class StopPlan(SpecValue, prefix="stop."):
    """How workers are stopped: signals, each with a grace period, and finally SIGKILL."""

    steps: Converted[
        tuple[StopStep, ...],
        Iterable[StopStep | tuple[int | str, float] | tuple[int | str, float, StopScope]],
    ] = field(
        default=(StopStep(SIGTERM, DEFAULT_GRACE),),
        check=_steps,
        option="--shutdown-timeout SECONDS",
        help=f"seconds from the first signal to SIGKILL (default {DEFAULT_GRACE:g})",
        kw_only=False,
    )
    """Also given as pairs of a signal (number or name) and a grace in seconds, or with a target."""
    reap_timeout: float = field(default=10.0, check=checks.Seconds(above=0), kw_only=False)
    """Seconds to wait after SIGKILL for the processes to exit.  A process that remains then, in an
    uninterruptible system call for example, is reported with its state and left behind."""
    guardian_grace: float = field(default=0.5, check=checks.Seconds(at_least=0), kw_only=False)
    """Seconds between the first signal and SIGKILL when the launcher has been killed.  The guardian
    then ends the job; a first step with a shorter grace takes precedence.  With more than the
    default, workers can outlive their launcher for more than a second."""
    scope: StopScope = field(
        default="leaders",
        check=_scope,
        own_option="--stop-scope SCOPE",
        help="whom the signals of a stop reach first: 'leaders', the first process of each worker,"
        " and the others when it has ended; 'all', every process at once (default 'leaders')",
        has_variable=True,
    )
    """Whom the signals reach first, of steps without a `target`."""
    linger: float = field(
        default=0.0,
        check=checks.Seconds(at_least=0),
        own_option="--linger SECONDS",
        help="seconds for which processes that workers leave behind may run after a success"
        " (default 0)",
        has_variable=True,
    )
    """Seconds for which processes that workers leave behind may run on after a success; the rest is
    stopped then."""

    @classmethod
    def within(cls, grace: float, *, scope: StopScope = "leaders", linger: float = 0.0) -> StopPlan:
        """Return the plan SIGTERM, `grace` seconds, SIGKILL."""
        checks.check_number("stop.grace", grace, at_least=0)
        return cls(((SIGTERM, grace),), scope=scope, linger=linger)

    @property
    def closes_input(self) -> bool:
        """Whether the first step closes standard input."""
        return bool(self.steps) and self.steps[0].signal == EOF

    def checked_without_pipe(self) -> StopPlan:
        """Return this plan, or raise SpecError if it closes an input, which is no pipe here."""
        if self.closes_input:
            raise SpecError("stop.steps", str(self), "must not begin with EOF: stdin is no pipe")
        return self

    def reaches_all(self, step: StopStep) -> bool:
        """Return whether the signal of a step is sent to every process at once."""
        return step.signal != EOF and (step.target or self.scope) == "all"

    def starting_with(self, signal: int) -> StopPlan:
        """Return this plan with its first signal replaced by a requested one."""
        if signal == SIGKILL:
            return self.replace(steps=())
        if not self.steps:
            return self
        first, *rest = self.steps
        return self.replace(steps=(StopStep(signal, first.grace, first.target), *rest))

    def begun_by(self, signal: int) -> StopPlan:
        """Return the plan of a stop that a received signal begins: this one.

        The default plan passes on the signals that torchrun does, in place of SIGTERM.
        """
        is_default = self.steps == (StopStep(SIGTERM, DEFAULT_GRACE),)
        return self.starting_with(signal) if is_default and signal in STOP_SIGNALS else self

    def shortened(self, grace: float) -> StopPlan:
        """Return a plan of the first signal, `grace` seconds at most, and SIGKILL."""
        steps = [StopStep(one.signal, min(one.grace, grace), one.target) for one in self.steps[:1]]
        return self.replace(steps=steps)

    @property
    def grace(self) -> float:
        """Seconds until SIGKILL at the latest."""
        return sum(step.grace for step in self.steps)

    def __str__(self) -> str:
        named = [
            f"{'EOF' if step.signal == EOF else signal_name(step.signal)}"
            f"{' to all' * self.reaches_all(step)} {step.grace:g} s"
            for step in self.steps
        ]
        return ", ".join([*named, "SIGKILL"])


# SIGKILL and SIGSTOP cannot be handled, signal(7).  SIGILL, SIGBUS, SIGFPE and SIGSEGV are
# faults of this process; SIGCHLD belongs to the event loop, SIGCONT and SIGTSTP to job control.
_NOT_CATCHABLE = frozenset({9, 19, 4, 7, 8, 11, 17, 18, 20})


def _signals(name: str, value: object) -> frozenset[int]:
    numbers = frozenset(
        checks.signal_number(name, item) for item in checks.checked_items(name, value)
    )
    for number in numbers & _NOT_CATCHABLE:
        raise SpecError(name, signal_name(number), "must be a signal that can be handled")
    return numbers


def _signal(name: str, value: object) -> int:
    (number,) = _signals(name, [value])
    return number


class PreemptionSpec(SpecValue, prefix="preemption."):
    """How a job is given notice that its hosts are about to be taken away."""

    signal: Converted[int | None, int | str | None] = field(
        default=None,
        check=_signal,
        own_option="--preempt-signal NAME",
        help="signal to the launcher of any node that gives the workers of all nodes notice of a"
        " preemption, as in 'USR1'; none is restarted then (default: none)",
        has_variable=True,
    )
    """Signal to the launcher that is a notice; None for none.  A signal that also stops the job
    (`SignalSpec.stop`) does so when it comes again."""
    deadline: float = field(
        default=60.0,
        check=checks.Seconds(at_least=0),
        own_option="--preempt-deadline SECONDS",
        help="seconds from the notice until workers that still run are stopped (default 60)",
        has_variable=True,
    )
    """Seconds from the notice until workers that still run are stopped by the stop plan."""
    forward: Converted[int | None, int | str | None] = field(
        default=None,
        check=_signal,
        own_option="--preempt-forward NAME",
        help="signal of the notice to the workers that handle it, as in 'USR1' (default: none)",
        has_variable=True,
    )
    """Signal that the workers of this node get with the notice, if they handle it."""

    @property
    def signals(self) -> frozenset[int]:
        """The signal to the launcher, if there is one."""
        return frozenset() if self.signal is None else frozenset({self.signal})


class SignalSpec(SpecValue, prefix="signals."):
    """What a launcher does with the signals that it receives."""

    stop: Converted[frozenset[int], Iterable[int | str]] = field(
        default=STOP_SIGNALS,
        check=_signals,
        option="--signals-to-handle NAMES",
        help="signals that stop the job (default SIGTERM,SIGINT,SIGHUP,SIGQUIT);"
        " SIGUSR1 and SIGUSR2 are always forwarded to the workers",
    )
    """End the job by its stop plan.  The default is SIGHUP, SIGINT, SIGQUIT and SIGTERM, which take
    the place of SIGTERM in the default plan."""
    forward: Converted[frozenset[int], Iterable[int | str]] = field(
        default=frozenset({10, 12}), check=_signals, label="--signals-to-handle"
    )
    """Send to the leader of every worker; the job continues.  Default: SIGUSR1, SIGUSR2."""
    unhandled: Literal["skip", "kill"] = field(
        default="skip",
        check=checks.OneOf(("skip", "kill")),
        own_option="--signal-unhandled WHAT",
        help="workers without a handler for a forwarded signal: 'skip' them, or 'kill' them by it"
        " (default 'skip')",
    )
    """Leave out workers without a handler for a forwarded signal, or let it end them."""

    def _check(self) -> None:
        if both := self.stop & self.forward:
            names = [signal_name(number) for number in sorted(self.forward)]
            both_names = ", ".join(map(signal_name, sorted(both)))
            problem = f"must not hold signals of signals.stop: {both_names}"
            raise SpecError("signals.forward", names, problem)
