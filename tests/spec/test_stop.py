"""Stop plans, and what signals mean to a launcher."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from elastic_aio.errors import SpecError
from elastic_aio.spec.job import LaunchSpec
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


def test_the_grace_of_the_guardian_must_not_be_negative() -> None:
    """With 0 s workers are killed as soon as their launcher is gone."""
    assert StopPlan(guardian_grace=0).guardian_grace == 0
    with pytest.raises(SpecError, match=r"^stop\.guardian_grace: must be a number of at least 0"):
        StopPlan(guardian_grace=-1)


def test_a_received_signal_begins_the_plan() -> None:
    """Only in the default plan, a signal that torchrun passes on takes the place of SIGTERM."""
    for number in (1, 2, 3, 15):
        assert StopPlan().begun_by(number) == StopPlan().starting_with(number)
        assert StopPlan(linger=5).begun_by(number).steps[0].signal == number
        assert StopPlan.within(10).begun_by(number) == StopPlan.within(10)
        assert StopPlan([("SIGQUIT", 25)]).begun_by(number) == StopPlan([("SIGQUIT", 25)])
    assert StopPlan().begun_by(10) == StopPlan()
    assert StopPlan(()).begun_by(2) == StopPlan(())


def test_a_requested_signal_replaces_the_first_one() -> None:
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


def test_a_first_step_may_close_the_input() -> None:
    """Its text is `EOF`; it reaches no process as a signal does."""
    plan = StopPlan([("EOF", 2), ("SIGTERM", 1)], scope="all")
    assert str(plan) == "EOF 2 s, SIGTERM to all 1 s, SIGKILL"
    assert (plan.closes_input, plan.grace) == (True, 3)
    assert plan.replace(reap_timeout=5).closes_input
    assert not StopPlan(()).closes_input
    with pytest.raises(SpecError, match=r"^stop\.steps: EOF must be the first step \(got"):
        StopPlan([("SIGTERM", 1), ("EOF", 2)])
    with pytest.raises(SpecError, match=r"^stop\.steps: must not begin with EOF: stdin is"):
        LaunchSpec("x.py", stop=plan)


def test_a_step_accepts_a_name() -> None:
    assert StopStep("SIGTERM", 2) == StopStep(15, 2.0)
    assert StopStep("SIGTERM", 2).signal == StopStep("TERM", 2).signal == 15
    assert str(StopPlan([("SIGRTMIN+3", 5)])) == "SIGRTMIN+3 5 s, SIGKILL"
    with pytest.raises(SpecError, match=r"^stop\.steps: must be a signal number or a name"):
        StopStep("TERMS", 2)
