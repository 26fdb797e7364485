"""The decisions that led to the present state of a job, read from its events.

Pure.  Each has its rule (the setting or the request that decided) and its evidence (what had
happened).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from elastic_aio import child_events, events, node_events
from elastic_aio.events import Event
from elastic_aio.outcome import Failure
from elastic_aio.status import Level
from elastic_aio.text import counted, printable

_TAIL_LINES: Final = 3


class Step(Struct, frozen=True):
    """A decision, or what happened without a decision: `rule` is empty then."""

    time: float
    """Unix seconds."""
    text: str
    rule: str = ""
    evidence: tuple[str, ...] = ()


def explain(history: Iterable[Event]) -> list[Step]:
    """Return the steps that led from the start of a job to its present state."""
    steps: list[Step] = []
    waiting: Step | None = None
    for event in history:
        if isinstance(event, WAITS):
            waiting = Step(event.time, event.sentence)  # only the last one still holds
            continue
        if isinstance(event, _ENDS_WAIT):
            waiting = None
        if (step := step_of(event)) is not None:
            steps.append(step)
    return steps if waiting is None else [*steps, waiting]


_ENDS_WAIT: Final = (
    node_events.RoundFormed,
    events.WorkerStarted,
    events.StopRequested,
    events.JobFinished,
)
"""Events after which no round is waited for."""

_SHOWN: Final = (
    node_events.NodeJoined,
    node_events.NodeLeft,
    node_events.CoordinatorChanged,
    node_events.StandbyPromoted,
    node_events.RoundFormed,
)
"""Events that are steps although they are no warnings."""

WAITS: Final = (node_events.RoundForming, node_events.RoundWaiting)
"""Steps of which only the last one holds, until something else happens."""


def step_of(event: Event) -> Step | None:
    """Return the step that an event is, in printable words; None if it explains nothing."""
    if (step := _decision(event)) is not None:
        text = f"{event.child}: {step.text}" if event.child else step.text
        evidence = tuple(map(printable, step.evidence))
        return replace(step, text=printable(text), rule=printable(step.rule), evidence=evidence)
    is_shown = event.level >= Level.WARNING or isinstance(event, _SHOWN)
    return Step(event.time, event.sentence) if is_shown else None


def _decision(event: Event) -> Step | None:
    """Return the step of an event that a rule has decided; None for other events."""
    match event:
        case events.AttemptFailed():
            others = sum(not failure.is_victim for failure in event.failures[1:])
            more = (f"{counted(others, 'other worker')} failed too",) if others else ()
            evidence = (*_evidence(event.root), *more)
            return Step(event.time, f"attempt {event.attempt} failed", evidence=evidence)
        case events.Restarting():
            after = f" after {event.delay:.3g} s" if event.delay else ""
            what = f"attempt {event.attempt} follows{after}"
            so_far = f"{counted(event.restarts, 'restart')} so far"
            return Step(event.time, what, event.why, (so_far,))
        case node_events.MembershipChanged():
            what = f"attempt {event.attempt} follows with {counted(event.nodes, 'node')}"
            return Step(event.time, what, "the membership changed: no restart counts", (event.why,))
        case child_events.ChildRestarting():
            after = f" after {event.delay:.3g} s" if event.delay else ""
            so_far = f"{counted(event.restarts, 'restart')} so far"
            return Step(event.time, f"it is started again{after}", event.why, (so_far,))
        case child_events.ChildFinished():
            kind = "" if event.is_essential else ", and is not essential"
            what = f"it has {event.state.value}, exit code {event.exit_code}{kind}"
            return Step(event.time, what, event.why)
        case events.StopRequested():
            return Step(event.time, f"the workers are stopped ({event.plan})", event.reason)
        case events.StopEscalated():
            rule = event.reason or "the grace period of the stop plan"
            return Step(event.time, event.sentence, rule)
        case events.JobFinished():
            what = f"the job ended: {event.state.value}, exit code {event.exit_code}"
            return Step(event.time, what, event.why)
    return None


def _evidence(root: Failure) -> tuple[str, ...]:
    found = [f"{root.summary} (on {root.host})", *root.notes]
    if root.error is None:
        found += [f"stderr: {line}" for line in root.stderr_tail[-_TAIL_LINES:]]
    elif root.error.path:
        found.append(f"error file {root.error.path}")
    if root.stderr_path and root.stderr_tail:  # an empty captured file is removed
        found.append(f"stderr in {root.stderr_path}")
    return tuple(found)
