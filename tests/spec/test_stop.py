"""Stop plans, and what signals mean to a launcher."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from elastic_aio.errors import SpecError
from elastic_aio.spec.stop import SignalSpec, StopPlan, StopStep


def test_the_default_plan_is_sigterm_for_25_seconds() -> None:
    """SIGTERM, 25 s, SIGKILL: a scheduler's own SIGKILL comes after 30 s."""
    assert StopPlan().steps == (StopStep(15, 25.0),)
    assert str(StopPlan()) == "SIGTERM 25 s, SIGKILL"
    assert StopPlan().grace == 25.0
    assert StopPlan.within(2.5) == StopPlan(((15, 2.5),))
    assert StopPlan.within(1, scope="all", linger=3) == StopPlan(((15, 1),), scope="all", linger=3)
    with pytest.raises(SpecError, match=r"^stop\.grace: must be a number of at least 0 \(got -1"):
        StopPlan.within(-1)


@pytest.mark.parametrize(
    ("steps", "kept", "text", "grace"),
    [
        ([("SIGINT", 1), (15, 2.5)], [(2, 1.0), (15, 2.5)], "SIGINT 1 s, SIGTERM 2.5 s", 3.5),
        ([StopStep(10, 0)], [(10, 0.0)], "SIGUSR1 0 s", 0),
        ([("SIGTERM", 1), ("SIGKILL", 5)], [(15, 1.0)], "SIGTERM 1 s", 1),
        ([], [], "", 0),
        ([("SIGKILL", 0)], [], "", 0),
        ([(signal.SIGHUP, 1)], [(1, 1.0)], "SIGHUP 1 s", 1),
        ([(2, 1), (15, 2, "all")], [(2, 1.0), (15, 2.0)], "SIGINT 1 s, SIGTERM to all 2 s", 3),
    ],
)
def test_a_plan_is_made_of_pairs(
    steps: Any, kept: list[tuple[int, float]], text: str, grace: float
) -> None:
    """Names and numbers become steps; SIGKILL is always last and never a step."""
    plan = StopPlan(steps)
    assert [(step.signal, step.grace) for step in plan.steps] == kept
    assert str(plan) == (f"{text}, SIGKILL" if text else "SIGKILL")
    assert plan.grace == grace


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("SIGTERM", "stop.steps: must be a list (got 'SIGTERM')"),
        (5, "stop.steps: must be a list (got 5)"),
        (["SIGTERM"], "stop.steps: must be a list of pairs of a signal and a grace (got ['SIG"),
        (("SIGTERM", 3), "stop.steps: must be a list of pairs of a signal and a grace (got ('SIG"),
        ([("SIGTERM",)], "stop.steps: must be a list of pairs of a signal and a grace (got [('SI"),
        ([("SIGTERM", 1, 2)], "stop.steps: target must be one of leaders, all (got 2)"),
        ([("SIGTERM", 1, "al")], "stop.steps: target must be one of leaders, all (got 'al')"),
        ([("TERM", 1)], "stop.steps: must be a signal number or a name such as 'SIGTERM'"),
        ([(0, 1)], "stop.steps: must be a signal number"),
        ([("SIGTERM", -1)], "stop.steps: grace must be a number of at least 0 (got -1)"),
        ([("SIGTERM", "5")], "stop.steps: grace must be a number of at least 0 (got '5')"),
        ([("SIGTERM", float("nan"))], "stop.steps: grace must be a number of at least 0 (got nan)"),
        ([("SIGTERM", float("inf"))], "stop.steps: grace must be a number of at least 0 (got inf)"),
        ([("SIGTERM", True)], "stop.steps: grace must be a number of at least 0 (got True)"),
        ([("SIGKILL", 1), ("SIGTERM", 1)], "stop.steps: no step may follow SIGKILL"),
    ],
)
def test_an_invalid_plan_is_refused_in_one_line(steps: Any, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        StopPlan(steps)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("value", [0, -1, float("nan"), "1"])
def test_the_reap_timeout_must_be_positive(value: Any) -> None:
    """With 0 s each worker would be reported as unkillable."""
    with pytest.raises(SpecError, match=r"^stop\.reap_timeout: must be a number above 0"):
        StopPlan(reap_timeout=value)


def test_the_grace_of_the_guardian_must_not_be_negative() -> None:
    """With 0 s workers are killed as soon as their launcher is gone."""
    assert StopPlan(guardian_grace=0).guardian_grace == 0
    with pytest.raises(SpecError, match=r"^stop\.guardian_grace: must be a number of at least 0"):
        StopPlan(guardian_grace=-1)


def test_a_received_signal_replaces_the_first_one() -> None:
    """Graces, later steps and the other settings stay."""
    plan = StopPlan([("SIGTERM", 3), ("SIGQUIT", 4)], reap_timeout=7, guardian_grace=2)
    assert plan.starting_with(2) == StopPlan(((2, 3.0), (3, 4.0)), 7, 2)
    assert plan.starting_with(9) == StopPlan((), 7, 2)
    assert StopPlan(()).starting_with(2) == StopPlan(())


def test_signals_are_names_or_numbers() -> None:
    """They become numbers; the defaults are as documented."""
    assert SignalSpec() == SignalSpec(stop=frozenset({1, 2, 3, 15}), forward=frozenset({10, 12}))
    spec = SignalSpec(stop=["SIGTERM", signal.SIGINT], forward=[])
    assert spec.stop == frozenset({2, 15})
    assert spec.forward == frozenset()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop": "SIGTERM"}, "signals.stop: must be a list (got 'SIGTERM')"),
        ({"stop": ["SIGKILL"]}, "signals.stop: must be a signal that can be handled"),
        ({"stop": ["SIGSTOP"]}, "signals.stop: must be a signal that can be handled"),
        ({"forward": ["SIGSEGV"]}, "signals.forward: must be a signal that can be handled"),
        ({"forward": ["SIGCHLD"]}, "signals.forward: must be a signal that can be handled"),
        ({"forward": ["SIGTSTP"]}, "signals.forward: must be a signal that can be handled"),
        ({"forward": ["USR1"]}, "signals.forward: must be a signal number or a name"),
        ({"forward": [32]}, "signals.forward: must be a signal number or a name"),
        ({"unhandled": "end"}, "signals.unhandled: must be 'skip' or 'kill' (got 'end')"),
        (
            {"stop": ["SIGTERM"], "forward": ["SIGTERM"]},
            "signals.forward: must not hold signals of signals.stop: SIGTERM (got ['SIGTERM'])",
        ),
    ],
)
def test_invalid_signals_are_refused(settings: dict[str, Any], message: str) -> None:
    """Signals that cannot be handled, and signals in both sets."""
    with pytest.raises(SpecError) as caught:
        SignalSpec(**settings)
    assert str(caught.value).startswith(message)


def test_a_step_accepts_a_name() -> None:
    assert StopStep("SIGTERM", 2) == StopStep(15, 2.0)
    assert StopStep("SIGTERM", 2).signal == 15
    with pytest.raises(SpecError, match=r"^stop\.steps: must be a signal number or a name"):
        StopStep("TERM", 2)
