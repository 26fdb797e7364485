"""Stop plans, restart policies and signals: checked when made."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from elastic_aio.backoff import Backoff, RestartWindow
from elastic_aio.errors import SpecError
from elastic_aio.policy import Action, RestartPolicy, SignalSpec, StopPlan, StopStep


def test_the_default_plan_is_sigterm_for_thirty_seconds() -> None:
    """SIGTERM, 30 s, SIGKILL."""
    assert StopPlan().steps == (StopStep(15, 30.0),)
    assert str(StopPlan()) == "SIGTERM 30 s, SIGKILL"
    assert StopPlan().grace == 30.0
    assert StopPlan.within(2.5) == StopPlan(((15, 2.5),))


@pytest.mark.parametrize(
    ("steps", "kept", "text", "grace"),
    [
        ([("SIGINT", 1), (15, 2.5)], [(2, 1.0), (15, 2.5)], "SIGINT 1 s, SIGTERM 2.5 s", 3.5),
        ([StopStep(10, 0)], [(10, 0.0)], "SIGUSR1 0 s", 0),
        ([("SIGTERM", 1), ("SIGKILL", 5)], [(15, 1.0)], "SIGTERM 1 s", 1),
        ([], [], "", 0),
        ([("SIGKILL", 0)], [], "", 0),
        ([(signal.SIGHUP, 1)], [(1, 1.0)], "SIGHUP 1 s", 1),
    ],
)
def test_a_plan_is_read_from_pairs(
    steps: Any, kept: list[tuple[int, float]], text: str, grace: float
) -> None:
    """Names and numbers become steps; SIGKILL is always the end and never a step."""
    plan = StopPlan(steps)
    assert [(step.signal, step.grace) for step in plan.steps] == kept
    assert str(plan) == (f"{text}, SIGKILL" if text else "SIGKILL")
    assert plan.grace == grace


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("SIGTERM", "stop.steps: must be a list, not 'SIGTERM'"),
        (5, "stop.steps: must be a list, not 5"),
        (["SIGTERM"], "stop.steps: must be a pair, not 'SIGTERM'"),
        ([("SIGTERM", 1, 2)], "stop.steps: must be a pair, not ('SIGTERM', 1, 2)"),
        ([("TERM", 1)], "stop.steps: must be a signal number or a name such as 'SIGTERM'"),
        ([(0, 1)], "stop.steps: must be a signal number"),
        ([("SIGTERM", -1)], "stop.steps: must be a number at least 0, not -1"),
        ([("SIGTERM", "5")], "stop.steps: must be a number at least 0, not '5'"),
        ([("SIGTERM", float("nan"))], "stop.steps: must be a number at least 0, not nan"),
        ([("SIGTERM", float("inf"))], "stop.steps: must be a number at least 0, not inf"),
        ([("SIGTERM", True)], "stop.steps: must be a number at least 0, not True"),
        ([("SIGKILL", 1), ("SIGTERM", 1)], "stop.steps: nothing can follow SIGKILL"),
    ],
)
def test_an_impossible_plan_is_refused(steps: Any, message: str) -> None:
    """Every wrong step is one line that names the field."""
    with pytest.raises(SpecError) as caught:
        StopPlan(steps)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("value", [0, -1, float("nan"), "1"])
def test_the_reap_timeout_must_be_positive(value: Any) -> None:
    """Zero seconds to reap would call every worker unkillable."""
    with pytest.raises(SpecError, match=r"^stop\.reap_timeout: must be a number above 0"):
        StopPlan(reap_timeout=value)


def test_a_received_signal_takes_the_first_place() -> None:
    """Graces, later steps and the reap timeout stay as they were."""
    plan = StopPlan([("SIGTERM", 3), ("SIGQUIT", 4)], reap_timeout=7)
    assert plan.starting_with(2) == StopPlan(((2, 3.0), (3, 4.0)), 7)
    assert StopPlan(()).starting_with(2) == StopPlan(())


def test_actions_are_the_three_documented() -> None:
    """RESTART, GIVE_UP and BY_POLICY are all there is."""
    assert [one.name for one in Action] == ["RESTART", "GIVE_UP", "BY_POLICY"]


def test_a_policy_is_read_from_plain_values() -> None:
    """A pair becomes a window, lists become frozen sets."""
    policy = RestartPolicy(window=(2, 60), restart_on=[3, 4], never_on={5})
    assert policy.window == RestartWindow(2, 60)
    assert policy.restart_on == frozenset({3, 4})
    assert policy.never_on == frozenset({5})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 3}, "restart.window: must be a pair, not 3"),
        ({"window": (0, 5)}, "restart.window: must be a whole number of at least 1, not 0"),
        ({"window": (1.5, 5)}, "restart.window: must be a whole number of at least 1, not 1.5"),
        ({"window": (1, 0)}, "restart.window: must be a number above 0, not 0"),
        ({"restart_on": 3}, "restart.restart_on: must be a list, not 3"),
        ({"restart_on": [0]}, "restart.restart_on: must be exit codes from 1 to 255"),
        ({"restart_on": [256]}, "restart.restart_on: must be exit codes from 1 to 255"),
        ({"restart_on": []}, "restart.restart_on: must name an exit code"),
        ({"never_on": ["1"]}, "restart.never_on: must be exit codes from 1 to 255"),
        ({"never_on": [True]}, "restart.never_on: must be exit codes from 1 to 255"),
        ({"restart_on": [3], "never_on": [3, 4]}, "restart.never_on: must not share codes with"),
        ({"backoff": 5}, "restart.backoff: must be a Backoff, not 5"),
        ({"backoff": Backoff(initial=-1)}, "restart.backoff.initial: must be a number at least 0"),
        ({"backoff": Backoff(factor=0.5)}, "restart.backoff.factor: must be a number at least 1"),
        ({"backoff": Backoff(cap=0.5)}, "restart.backoff.cap: must not be below initial (1)"),
        (
            {"backoff": Backoff(cap=float("inf"))},
            "restart.backoff.cap: must be a number at least 0, not inf",
        ),
        ({"healthy_after": 5}, "restart.healthy_after: resets the back-off, so"),
        (
            {"healthy_after": 0, "backoff": Backoff()},
            "restart.healthy_after: must be a number above 0, not 0",
        ),
        ({"decide": 5}, "restart.decide: must be callable, not 5"),
        (
            {"window": (3, 6), "backoff": Backoff(jitter=False)},
            "restart.window: can never be reached with this back-off (3 delays take 7 s)",
        ),
    ],
)
def test_an_impossible_policy_is_refused(settings: dict[str, Any], message: str) -> None:
    """Every wrong or contradicting setting is one line that names the field."""
    with pytest.raises(SpecError) as caught:
        RestartPolicy(**settings)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_codes_that_are_no_collection_of_numbers_are_refused() -> None:
    """Even values that no set can hold give a SpecError."""
    codes: Any = [[1]]
    with pytest.raises(SpecError, match=r"^restart\.never_on: must be exit codes"):
        RestartPolicy(never_on=codes)


def test_a_window_within_reach_is_accepted() -> None:
    """Delays shorter than the window leave it a meaning."""
    policy = RestartPolicy(window=(3, 8), backoff=Backoff(jitter=False), healthy_after=60)
    policy.check_with(3)
    with pytest.raises(SpecError, match=r"can never be reached with max_restarts=2"):
        policy.check_with(2)


@pytest.mark.parametrize(
    "policy",
    [
        RestartPolicy(backoff=Backoff()),
        RestartPolicy(restart_on=frozenset({1})),
        RestartPolicy(decide=lambda _: Action.GIVE_UP),
    ],
)
def test_a_policy_without_restarts_has_no_meaning(policy: RestartPolicy) -> None:
    """With max_restarts=0 a back-off, codes or a callback are refused."""
    with pytest.raises(SpecError, match=r"has no effect unless max_restarts is at least 1"):
        policy.check_with(0)
    policy.check_with(1)


def test_never_on_alone_is_harmless() -> None:
    """Codes that end the job at once need no restarts to be true."""
    RestartPolicy(never_on=frozenset({3})).check_with(0)


def test_signals_are_read_from_names() -> None:
    """Names and numbers become numbers; the defaults are documented."""
    assert SignalSpec() == SignalSpec(stop=frozenset({1, 2, 3, 15}), forward=frozenset({10, 12}))
    spec = SignalSpec(stop=["SIGTERM", signal.SIGINT], forward=[])
    assert spec.stop == frozenset({2, 15})
    assert spec.forward == frozenset()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop": "SIGTERM"}, "signals.stop: must be a list, not 'SIGTERM'"),
        ({"stop": ["SIGKILL"]}, "signals.stop: must be a signal that can be handled"),
        ({"stop": ["SIGSTOP"]}, "signals.stop: must be a signal that can be handled"),
        ({"forward": ["SIGSEGV"]}, "signals.forward: must be a signal that can be handled"),
        ({"forward": ["SIGCHLD"]}, "signals.forward: must be a signal that can be handled"),
        ({"forward": ["SIGTSTP"]}, "signals.forward: must be a signal that can be handled"),
        ({"forward": ["USR1"]}, "signals.forward: must be a signal number or a name"),
        ({"forward": [32]}, "signals.forward: must be a signal number or a name"),
        (
            {"stop": ["SIGTERM"], "forward": ["SIGTERM"]},
            "signals.forward: must not share signals with signals.stop (15), not [15]",
        ),
    ],
)
def test_impossible_signals_are_refused(settings: dict[str, Any], message: str) -> None:
    """What cannot be handled, and what would mean two things, is refused by name."""
    with pytest.raises(SpecError) as caught:
        SignalSpec(**settings)
    assert str(caught.value).startswith(message)
