"""The state machine of a supervisor, row by row, and what it does for each strategy."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.agent.machine import (
    Finish,
    PreemptionReceived,
    Publish,
    RestartReceived,
    Start,
    StopReceived,
)
from elastic_aio.agent.supervisor import (
    SETTLED_AFTER_S,
    Arm,
    AskChild,
    ChildEnded,
    ChildPhase,
    ChildReady,
    ChildRequest,
    ChildRestartReceived,
    ChildStarted,
    ChildStopReceived,
    Disarm,
    LeafRestarted,
    PublishOf,
    ReloadReceived,
    ReportReady,
    ScaleReceived,
    StartChild,
    StopChild,
    SupervisorMachine,
    TimerElapsed,
)
from elastic_aio.errors import SpecError
from elastic_aio.outcome import SIGKILL, ExitStatus, Failure, JobOutcome, JobState
from elastic_aio.spec.group import READY_TIMEOUT_S, AnySpec, GroupSpec, outermost_group
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.liveness import LivenessSpec
from elastic_aio.spec.restart import Backoff, RestartPolicy
from elastic_aio.spec.stop import StopPlan

AT_ONCE: Any = {"backoff": None}


def leaf(max_restarts: int = 0, *, ready: Any = None, **policy: Any) -> LaunchSpec:
    """Return a leaf that is restarted at once, if it is."""
    policy = {**(AT_ONCE if max_restarts or policy.get("when") == "always" else {}), **policy}
    return LaunchSpec(
        ["x"], max_restarts=max_restarts, restart=RestartPolicy(**policy), ready=ready
    )


ALWAYS = leaf(when="always")
NEVER = leaf(when="never")
ALWAYS_READY: Any = {"when": "always"}


def group(children: Any, **fields: Any) -> GroupSpec:
    """Return a group without a window; a text names children, which never restart."""
    if isinstance(children, str):
        children = dict.fromkeys(children.split(), leaf())
    return GroupSpec(children, **{"window": None, **fields})


def env_of(start: StartChild) -> Any:
    assert isinstance(start.spec, LaunchSpec)
    return start.spec.env


class Play:
    """A supervisor; effects are shown as short texts, and what they say is kept."""

    def __init__(self, spec: AnySpec) -> None:
        self.machine = SupervisorMachine(spec, lambda: 0.5)
        self.now = 0.0
        self.tokens: dict[str, int] = {}
        self.outcome: JobOutcome | None = None
        self.effects: list[Any] = []

    def __call__(self, received: Any) -> str:
        """Hand in an input; return the effects, without what is published."""
        self.effects = self.machine.handle(received, self.now)
        texts = []
        for effect in self.effects:
            match effect:
                case Arm(name, token, delay):
                    self.tokens[name] = token
                    texts.append(f"arm {name} {delay:g}")
                case Disarm(name):
                    texts.append(f"disarm {name}")
                case Finish(outcome):
                    self.outcome = outcome
                    texts.append(f"finish {outcome.state} {outcome.exit_code}")
                case StartChild(name, generation):
                    texts.append(f"+{name}{generation or ''}")
                case StopChild(name, generation):
                    texts.append(f"-{name}{generation or ''}")
                case AskChild():
                    what = type(effect.request).__name__.removesuffix("Received").lower()
                    texts.append(f"{what} {effect.name}")
        return ", ".join(texts)

    @property
    def events(self) -> list[str]:
        """What the last input has published."""
        found = [(one.name, one.event) for one in self.effects if isinstance(one, PublishOf)]
        found += [("", one.event) for one in self.effects if isinstance(one, Publish)]
        return [f"{name} {type(event).__name__}: {event.sentence}".strip() for name, event in found]

    def start(self) -> str:
        """Start, and have each child start that is started."""
        return self.run(self(Start()))

    def run(self, effects: str) -> str:
        """Have the children start that are started, and what follows."""
        found, left = [effects], [*self.effects]
        while left:
            if isinstance(effect := left.pop(0), StartChild):
                found.append(self(ChildStarted(effect.name, effect.generation)))
                left += self.effects
        return ", ".join(filter(None, found))

    def end(
        self,
        name: str,
        code: int | None = 0,
        generation: int | None = None,
        *,
        ran: float = 0.0,
        **fields: Any,
    ) -> str:
        """End a child with an exit code; None: as it was stopped."""
        if generation is None:
            generation = self.machine.children[name].generation if name in self.children else 0
        failures: tuple[Failure, ...] = ()
        outcome = JobOutcome(JobState.SUCCEEDED, "all workers have finished", 0)
        if code is None:
            outcome = JobOutcome(JobState.STOPPED, "stopped", 143)
        elif code:
            failures = (failure(code),)
            outcome = JobOutcome(JobState.FAILED, "no restarts allowed", code)
        fields = {"outcome": outcome, "failures": failures, "ran_for": ran, **fields}
        return self(ChildEnded(name, generation, **fields))

    def stop(self, name: str, **fields: Any) -> str:
        return self(ChildStopReceived(name, "a request", **fields))

    def restart(self, name: str) -> str:
        return self(ChildRestartReceived(name, "a request"))

    def elapse(self, name: str) -> str:
        return self(TimerElapsed(name, self.tokens[name]))

    @property
    def children(self) -> dict[str, str]:
        """The phase of each child."""
        return {name: child.phase.value for name, child in self.machine.children.items()}


def failure(code: int) -> Failure:
    status = ExitStatus(code=code)
    return Failure(rank=0, local_rank=0, pid=9, host="h", status=status, time=0.0, order=0)


def started(spec: AnySpec) -> Play:
    play = Play(spec)
    play.start()
    return play


# ------------------------------------------------------------------------- order


def test_children_without_an_order_start_at_once() -> None:
    play = Play(group("a b"))
    assert play(Start()) == "+a, +b"
    assert play.children == {"a": "starting", "b": "starting"}
    play(ChildStarted("a", 0))
    assert play.children == {"a": "running", "b": "starting"}


def test_a_child_waits_until_those_before_it_have_started() -> None:
    play = Play(group("c b a", after={"c": ["a", "b"], "b": ["a"]}))
    assert play(Start()) == "+a"
    assert play(ChildStarted("a", 0)) == "+b"
    assert play(ChildStarted("b", 0)) == "+c"


def test_a_child_waits_until_those_before_it_are_ready() -> None:
    play = Play(group({"a": leaf(ready="notify"), "b": leaf()}, after={"b": ["a"]}))
    assert play(Start()) == "+a"
    assert play(ChildStarted("a", 0)) == ""
    assert play(ChildReady("a", 0)) == "+b"


def test_a_success_counts_as_ready() -> None:
    """As of an init container; a failure does only if the child is not essential."""
    children = {"a": leaf(), "b": leaf()}
    play = Play(group(children, after={"b": ["a"]}))
    assert play(Start()) == "+a"
    assert play.end("a") == "+b"
    children["a"] = leaf(ready="notify")
    play = started(group(children, after={"b": ["a"]}, essential=["b"]))
    assert play.end("a", 1) == "+b"
    play = started(group(children, after={"b": ["a"]}))
    assert play.end("a", 1) == "finish failed 1"


@pytest.mark.parametrize("policy", [{}, {"max_restarts": 1, "when": "on-failure"}, ALWAYS_READY])
def test_a_success_before_it_is_ready_is_a_failure_for_those_after_it(policy: Any) -> None:
    """What waits for it does not start; a child without those after it has succeeded."""
    child = leaf(**policy, ready="notify")
    children = {"x": leaf(), "a": child, "b": leaf()}
    play = started(group(children, after={"a": ["x"], "b": ["a"]}))
    for generation in range(3 if "when" in policy else 1):
        effects = play.end("a")
        if effects.startswith("finish") or "-x" in effects:
            break
        assert effects == f"+a{generation + 1}"
        assert play.events[0].endswith(": it has ended before it was ready")
    else:
        assert policy == ALWAYS_READY
        play(ChildReady("a", play.machine.children["a"].generation))
        assert play.children["b"] == "starting"
        return
    assert play.end("x", None) == "finish failed 1"
    assert play.outcome is not None
    assert "it has ended before it was ready" in play.outcome.why
    alone = started(group({"a": child.replace(restart=None), "b": leaf()}))
    alone.end("b")
    assert alone.end("a") == "finish succeeded 0"


def test_workers_that_were_never_ready_are_not_ready_in_the_end() -> None:
    play = started(workers(2, ready="notify"))
    play(ChildReady("0", 0))
    play.end("1")
    assert not any(isinstance(one, ReportReady) for one in play.effects)
    play = started(workers(2))
    assert play.machine.handle(ChildReady("0", 0), 0.0) == []


def test_a_stopped_child_holds_back_those_after_it() -> None:
    play = started(group({"a": leaf(ready="notify"), "b": leaf()}, after={"b": ["a"]}))
    assert play.stop("a") == "-a"
    assert play.end("a", None) == ""
    assert play.children == {"a": "stopped", "b": "waiting"}
    assert play.restart("a") == "+a1"
    play(ChildStarted("a", 1))
    assert play(ChildReady("a", 1)) == "+b"


def test_a_restart_waits_for_those_before_it_too() -> None:
    play = started(group({"a": ALWAYS, "b": ALWAYS}, after={"b": ["a"]}))
    assert play.end("a", 1) == "+a1"
    assert play.end("b", 1) == ""
    assert play(ChildStarted("a", 1)) == "+b1"


def test_a_failure_on_which_a_child_is_restarted_waits_for_those_before_it() -> None:
    """One without an order restarts itself."""
    play = started(group({"a": ALWAYS, "b": leaf(3)}, after={"b": ["a"]}))
    play.end("a", 1)
    assert play.end("b", 1) == ""
    assert play.children["b"] == "waiting"
    assert play(ChildStarted("a", 1)) == "+b1"
    play = started(group({"a": ALWAYS, "b": leaf(3)}))
    assert play.end("b", 1) == "-a"  # it had its restarts


def test_a_stop_is_in_the_reverse_order() -> None:
    play = started(group("a b c d", after={"b": ["a"], "c": ["b"]}))
    assert play(StopReceived("why")) == "-c, -d"
    assert play.end("d", None) == ""
    assert play.end("c", None) == "-b"
    assert play.end("b", None) == "-a"
    assert play.end("a", None) == "finish stopped 143"


def test_the_order_of_a_stop_reaches_over_a_child_that_has_ended() -> None:
    """The child in the middle has ended, and what is after it still runs."""
    play = started(group("a b c", after={"b": ["a"], "c": ["b"]}))
    play.end("b")
    assert play(StopReceived("why")) == "-c"
    assert play.end("c", None) == "-a"


def test_a_second_signal_reaches_all_at_once() -> None:
    play = started(group("a b c", after={"b": ["a"], "c": ["b"]}))
    assert play(StopReceived("why")) == "-c"
    assert play(StopReceived("at once", SIGKILL)) == "-a, -b, -c"
    play = started(group("a b", after={"b": ["a"]}))
    assert play(StopReceived("at once", SIGKILL)) == "-a, -b"


def test_a_stop_carries_its_plan() -> None:
    play = started(group("a"))
    plan = StopPlan.within(3)
    play(StopReceived("why", 2, plan))
    assert play.events == ["StopRequested: stopping the workers (SIGTERM 3 s, SIGKILL): why"]
    assert play.effects[1] == StopChild("a", 0, StopReceived("why", 2, plan))


def test_a_stop_before_the_start_ends_at_once() -> None:
    play = Play(group("a"))
    assert play(StopReceived("why", 15)) == "finish stopped 143"
    assert play(Start()) == ""


def test_a_stop_ends_what_waits() -> None:
    play = Play(group({"a": ALWAYS.replace(restart=RestartPolicy(when="always")), "b": leaf()}))
    play.start()
    play.end("a", 1)
    assert play.end("a", 1).startswith("arm a")
    assert play.children["a"] == "backing off"
    assert play(StopReceived("why")) == "disarm a, -b"
    assert play.children["a"] == "stopped"


# ---------------------------------------------------------------------- restarts


def test_a_gang_restarts_itself_if_it_is_restarted_alone() -> None:
    """With all of its policy; its failure is final."""
    spec = leaf(3)
    play = started(group({"a": spec, "b": leaf()}))
    assert play(Start()) == ""
    assert started(group({"a": spec, "b": leaf()})).end("a", 1) == "-b"
    play = Play(group({"a": spec}))
    play(Start())
    assert play.effects[0].spec == spec


def test_a_gang_is_restarted_by_its_supervisor_otherwise() -> None:
    """It gets no restarts of its own then."""
    play = Play(group({"a": leaf(2, never_on=[7]), "b": leaf()}, strategy="one_for_all"))
    play(Start())
    given = play.effects[0].spec
    assert (given.max_restarts, given.restart) == (0, RestartPolicy())
    play.run("")
    assert play.end("a", 1) == "-b"
    assert play.events == ["a ChildRestarting: restarting: restart 1 of 2 (max restarts)"]
    assert play.end("b", None) == "+a1, +b1"


@pytest.mark.parametrize(
    ("spec", "code", "is_restarted"),
    [
        (leaf(1), 1, True),
        (leaf(1), 0, False),
        (leaf(), 1, False),
        (leaf(1, never_on=[3]), 3, False),
        (leaf(1, restart_on=[3]), 1, False),
        (ALWAYS, 0, True),
        (ALWAYS, 1, True),
        (leaf(when="always", never_on=[3]), 3, False),
        (NEVER, 1, False),
        (NEVER, 0, False),
    ],
)
def test_who_is_restarted(spec: LaunchSpec, code: int, is_restarted: bool) -> None:
    play = started(group({"a": spec, "b": leaf()}, strategy="rest_for_one", essential=["b"]))
    effects = play.end("a", code)
    assert (effects == "-b") == is_restarted
    assert play.children["a"] == ("waiting" if is_restarted else "failed" if code else "succeeded")


@pytest.mark.parametrize("code", [0, 1])
def test_a_requested_stop_is_never_followed_by_a_restart(code: int) -> None:
    """Also if the child has ended by itself just then."""
    play = started(group({"a": ALWAYS, "b": leaf()}))
    play.stop("a")
    assert play.end("a", code) == ""
    assert play.children["a"] == ("stopped" if code else "succeeded")


def test_an_end_by_a_stop_of_others_is_a_requested_one() -> None:
    """As on another node of a leaf, or when the event loop shuts down."""
    play = started(group({"a": ALWAYS, "b": leaf()}))
    assert play.end("a", None) == ""
    assert play.children["a"] == "stopped"


def test_a_permanent_failure_is_never_restarted() -> None:
    play = started(group({"a": ALWAYS, "b": leaf()}, essential=["b"]))
    assert play.end("a", 127, is_permanent=True) == ""
    assert play.events == ["a ChildFinished: failed (exit code 127): no restarts allowed"]


def test_a_restart_waits_for_its_delay() -> None:
    slow = leaf(when="always", backoff=Backoff(initial=4, jitter=False))
    play = started(group({"a": slow, "b": leaf()}))
    assert play.end("a", 1) == "arm a 4"
    assert play.machine.children["a"].phase is ChildPhase.BACKING_OFF
    assert play(TimerElapsed("a", play.tokens["a"] + 1)) == ""  # another one
    assert play.elapse("a") == "+a1"
    assert play.end("a", 1) == "arm a 8"
    play.elapse("a")
    assert play.end("a", 1, ran=60) == "arm a 4", "it had settled"


def test_a_budget_is_used_up() -> None:
    play = started(group({"a": leaf(2), "b": leaf()}, strategy="rest_for_one"))
    for number in (1, 2):
        play.end("a", 1)
        assert play.end("b", None) == f"+a{number}"
        play.run("")
    assert play.end("a", 5) == "-b2"
    assert play.end("b", None) == "finish failed 5"
    assert play.outcome is not None
    assert play.outcome.why == "a: all 2 restarts are used up (max restarts)"
    assert play.outcome.restarts == 2
    assert play.outcome.failures == (failure(5),)


def test_attempts_without_progress_are_counted_over_generations() -> None:
    spec = leaf(5, max_attempts_without_progress=2)
    play = started(group({"a": spec}, strategy="one_for_all"))
    assert play.end("a", 1, has_progress=True) == "+a1"
    assert play.end("a", 1) == "+a2"
    assert play.end("a", 1) == "finish failed 1"


def test_a_start_knows_the_restarts_before() -> None:
    """Those that a leaf has made itself count too."""
    play = started(group({"a": ALWAYS}))
    play.end("a", 1)
    assert play.effects[-2] == StartChild("a", 1, play.effects[-2].spec, 1)
    play = started(group({"a": leaf(9)}))
    play(LeafRestarted("a", 0, 1, (failure(1),)))
    play(LeafRestarted("a", 0, 2, (failure(1),)))
    assert play.machine.children["a"].restarts == 2
    play.stop("a")
    assert play.outcome is None
    play = started(group({"a": leaf(9), "b": leaf()}))
    play(LeafRestarted("a", 0, 2, (failure(1),)))
    play.stop("a")
    play.end("a", None, outcome=JobOutcome(JobState.STOPPED, "", 143, restarts=2))
    play.restart("a")
    assert [one.restarts for one in play.effects if isinstance(one, StartChild)] == [2]


@pytest.mark.parametrize(
    ("strategy", "stops", "starts"),
    [
        ("one_for_one", "+b1", ""),
        ("rest_for_one", "-c", "+b1"),
        ("one_for_all", "-a, -c", "+a1, +b1, +c1"),
    ],
)
def test_a_strategy_says_who_restarts_with_a_child(strategy: Any, stops: str, starts: str) -> None:
    play = started(group({"a": leaf(1), "b": ALWAYS, "c": leaf(1)}, strategy=strategy))
    assert play.end("b", 1) == stops
    if strategy == "one_for_all":
        assert play.end("a", None) == ""
    if starts:
        assert play.end("c", None) == starts


def test_rest_for_one_starts_in_the_order_of_the_children() -> None:
    play = Play(
        group({"a": leaf(), "b": leaf(ready="notify"), "c": leaf()}, strategy="rest_for_one")
    )
    assert play(Start()) == "+a"
    assert play(ChildStarted("a", 0)) == "+b"
    assert play(ChildStarted("b", 0)) == ""
    assert play(ChildReady("b", 0)) == "+c"
    assert play(StopReceived("why")) == "-c"
    assert play.end("c", None) == "-b"


def test_after_refines_the_order_of_rest_for_one() -> None:
    spec = group("a b c", strategy="rest_for_one", after={"a": ["c"]})
    assert spec.order == ("b", "c", "a")
    assert Play(spec).start() == "+b, +c, +a"


def test_all_wait_for_every_delay() -> None:
    slow = leaf(5, backoff=Backoff(initial=4, jitter=False))
    play = started(group({"a": leaf(1), "b": slow}, strategy="one_for_all"))
    assert play.end("b", 1) == "arm b 4, -a"
    assert play.end("a", None) == ""
    assert play.elapse("b") == "+a1, +b1"


def test_a_failure_while_others_stop_is_no_further_restart() -> None:
    play = started(group({"a": leaf(1), "b": leaf(1)}, strategy="one_for_all"))
    assert play.end("a", 1) == "-b"
    assert play.end("b", 1) == "+a1, +b1"
    assert play.machine.restarts == 1


def test_a_restart_waits_for_a_child_that_is_being_stopped() -> None:
    """By request: it stays stopped, and what it holds is free then."""
    play = started(group({"a": leaf(1), "b": ALWAYS}, strategy="one_for_all"))
    assert play.stop("a") == "-a"
    assert play.end("b", 1) == ""
    assert play.end("a", None) == "+b1"


def test_a_success_is_repeated_with_the_others() -> None:
    """Unless it never restarts, or was stopped by request."""
    children = {"a": leaf(1), "b": NEVER, "c": leaf(1), "d": leaf(1)}
    play = started(group(children, strategy="one_for_all"))
    for name in "abc":
        play.end(name)
    play.stop("c")
    assert play.end("d", 1) == "+a1, +d1"


# ------------------------------------------------------------------------ the window


def test_a_restart_too_many_ends_the_group() -> None:
    play = started(group({"a": ALWAYS, "b": leaf()}, window=(2, 10)))
    for now in (0, 5):
        play.now = now
        assert play.end("a", 1).startswith("+a")
    play.now = 9.9
    assert play.end("a", 4) == "-b"
    assert play.end("b", None) == "finish failed 4"
    assert play.outcome is not None
    assert play.outcome.why == "a has ended after 2 restarts within 10 s (restart window)"


def test_the_window_moves() -> None:
    play = started(group({"a": ALWAYS, "b": leaf()}, window=(2, 10)))
    for now in (0, 5, 10, 15, 20):
        play.now = now
        assert play.end("a", 1).startswith("+a")


def test_the_window_counts_the_restarts_of_leaves() -> None:
    play = started(group({"a": leaf(9), "b": leaf(9)}, window=(2, 10)))
    assert play(LeafRestarted("a", 0, 1, (failure(1),))) == ""
    assert play(LeafRestarted("b", 0, 1, (failure(1),))) == ""
    assert play(LeafRestarted("b", 0, 1)) == "", "by request"
    assert play(LeafRestarted("b", 0, 2, (failure(6),))) == "-a, -b"
    play.end("a", None)
    assert play.end("b", None) == "finish failed 6"


def test_by_default_each_child_may_fail_once_and_five_more() -> None:
    """What they share has failed: of 64 children, and of the two that a scale has left."""
    play = started(GroupSpec.replicas(ALWAYS, 64))
    for number in range(64):
        assert play.end(f"{number}", 1) == f"+{number}1"
    for number in range(5):
        assert play.end("0", 1).startswith("+0"), number
    assert play.end("0", 7).startswith("-11, -21")
    play = started(GroupSpec.replicas(ALWAYS, 3))
    play(ScaleReceived("", 2))
    play.end("2", None)
    assert [play.end("0", 1)[:2] for _ in range(8)] == ["+0"] * 7 + ["-1"]


def test_restarts_of_a_child_that_is_not_essential_do_not_count() -> None:
    """They take none from the others, and end nothing."""
    children = {"a": leaf(5), "b": leaf(5), "c": ALWAYS}
    play = started(group(children, essential=["a"], window=(1, 10)))
    for generation in range(3):
        assert play.run(play.end("c", 1, generation)) == f"+c{generation + 1}"
        assert play(LeafRestarted("b", 0, generation + 1)) == ""
    assert play(LeafRestarted("a", 0, 1)) == ""
    assert play(LeafRestarted("a", 0, 2, (failure(7),))) == "-a, -b, -c3"


def test_restarts_with_another_child_count_once() -> None:
    play = started(group({"a": leaf(9), "b": leaf(9)}, strategy="one_for_all", window=(1, 10)))
    play.end("a", 1)
    assert play.end("b", None) == "+a1, +b1"


# --------------------------------------------------------------------------- the end


@pytest.mark.parametrize(("code", "end"), [(0, "succeeded 0"), (3, "failed 3")])
def test_a_child_may_end_the_group(code: int, end: str) -> None:
    play = started(group({"a": ALWAYS, "b": leaf()}, ends_with="b"))
    assert play.end("b", code) == "-a"
    assert play.end("a", 9) == f"finish {end}"


def test_the_first_of_several_ends_the_group() -> None:
    play = started(group("a b", ends_with=["a", "b"]))
    assert play.end("b", 4) == "-a"
    assert play.end("a", 0) == "finish failed 4"


def test_a_stop_by_request_of_that_child_stops_the_group() -> None:
    play = started(group("a b", ends_with="b"))
    assert play.stop("b") == "-b"
    assert play.end("b", None) == "-a"
    assert play.end("a", None) == "finish stopped 143"


def test_the_first_failure_of_an_essential_child_ends_the_group() -> None:
    play = started(group("a b c"))
    assert play.end("b", 3) == "-a, -c"
    assert play.end("a", 5) == ""
    assert play.end("c", None) == "finish failed 3"
    assert play.outcome is not None
    assert play.outcome.why == "b: no restarts allowed"


def test_the_end_of_another_child_is_reported_and_ends_nothing() -> None:
    play = started(group("a b", essential=["a"]))
    assert play.end("b", 3) == ""
    assert play.events == ["b ChildFinished: failed (exit code 3): no restarts allowed"]
    assert play.end("a") == "finish succeeded 0"


def test_other_children_are_stopped_when_the_essential_ones_have_ended() -> None:
    play = started(group("a b c", essential=["a", "b"]))
    assert play.end("a") == ""
    assert play.end("b") == "-c"
    assert play.end("c", None) == "finish succeeded 0"


def test_a_stopped_child_counts_as_ended() -> None:
    play = started(group("a b"))
    play.stop("a")
    play.end("a", None)
    assert play.end("b") == "finish succeeded 0"


@pytest.mark.parametrize("order", ["01", "10"])
def test_a_worker_that_was_stopped_has_not_succeeded(order: str) -> None:
    """The job of all workers is stopped; that of a replica is so too."""
    for spec in (workers(2), GroupSpec.replicas(leaf(), 2)):
        play = started(spec)
        stopped, other = order[0], order[1]
        play.stop(stopped)
        play.end(stopped, None)
        assert play.end(other) == "finish stopped 143"


def test_a_group_whose_children_were_all_stopped_is_stopped() -> None:
    play = started(group("a b"))
    for name in "ab":
        play.stop(name)
    play.end("a", None)
    assert play.end("b", None) == "finish stopped 143"


@pytest.mark.parametrize(
    ("codes", "end"), [([1, 0], "succeeded 0"), ([1, 3], "failed 3"), ([0, 0], "succeeded 0")]
)
def test_a_group_without_essential_children_ends_with_all(codes: list[int], end: str) -> None:
    """It fails if all have failed."""
    play = started(group("a b", essential=[]))
    assert play.end("a", codes[0]) == ""
    assert play.end("b", codes[1]) == f"finish {end}"


def test_a_child_with_the_notice_of_another_node_ends_the_group() -> None:
    play = started(group("a b"))
    preempted = JobOutcome(JobState.PREEMPTED, "a notice", 85)
    assert play.end("a", None, outcome=preempted) == "-b"
    assert play.end("b", None) == "finish preempted 85"


@pytest.mark.parametrize(
    ("ends", "since", "end"),
    [
        ([None, None], 1.0, "stopped 143"),
        ([0, None], 1.0, "stopped 143"),
        ([0, 0], 1.0, "succeeded 0"),
        ([0, 0], 0.0, "stopped 143"),
        ([None, 4], 1.0, "failed 4"),
        ([None, 4], 0.0, "stopped 143"),
    ],
)
def test_what_children_do_before_a_stop_counts(ends: list[Any], since: float, end: str) -> None:
    """As a job of one group; what they do after it is its effect, also if their turn comes late."""
    play = started(group("a b"))
    play(StopReceived("why"))
    play.end("a", ends[0], since=since)
    assert play.end("b", ends[1], since=since) == f"finish {end}"


def test_a_failure_that_would_be_repeated_does_not_fail_a_stop() -> None:
    play = started(group({"a": ALWAYS}))
    play(StopReceived("why"))
    assert play.end("a", 4) == "finish stopped 143"


def test_a_group_of_one_child_ends_with_its_reason() -> None:
    """A job that restarts as a whole is such a group, and its child has no name."""
    play = started(outermost_group(leaf(when="always", window=(1, 60))))
    assert play.end("", 1) == "+1"
    assert play.end("", 7) == "finish failed 7"
    assert play.outcome is not None
    assert play.outcome.why == "1 restart within 60 s (restart window)"


def test_a_failed_group_is_restarted_by_its_parent() -> None:
    inner = group("a", max_restarts=1)
    play = started(group({"g": inner, "b": leaf()}))
    assert play.end("g", 1) == "+g1"
    assert play.end("g", 1) == "-b"


def test_a_notice_reaches_all_children() -> None:
    play = started(group("a b c", after={"b": ["a"]}))
    play.stop("c")
    notice = PreemptionReceived("why", 9.0, 9.0, 9.0)
    assert play(notice) == "preemption a, preemption b"
    assert play.machine.notice is notice
    assert play(PreemptionReceived("another", 9.0, 9.0, 9.0)) == ""
    assert play(PreemptionReceived("earlier", 4.0, 4.0, 4.0)) == "preemption a, preemption b"
    assert play(PreemptionReceived("later", 6.0, 6.0, 6.0)) == ""
    assert play.end("a", 1) == ""
    assert play.end("c", None) == ""
    assert play.restart("a") == ""
    assert play.end("b") == "finish preempted 85"


@pytest.mark.parametrize("fields", [{"ends_with": "b"}, {"essential": ["b"]}])
def test_a_notice_ends_with_what_the_group_ends_with(fields: Any) -> None:
    """The others are stopped in the reverse order, and not only at the deadline."""
    children = {"a": ALWAYS, "b": leaf(2), "c": ALWAYS, "d": ALWAYS}
    play = started(group(children, after={"b": ["a"], "d": ["c"]}, **fields))
    notice = PreemptionReceived("why", 9.0, 9.0, 9.0)
    asked = ", ".join(f"preemption {name}" for name in "abcd")
    assert play(notice) == asked
    assert play.end("b", 0) == "-a, -d"
    assert play.end("d", None) == "-c"
    assert play.end("c", None) == ""
    assert play.end("a", None) == "finish preempted 85"


def test_a_notice_ends_at_once_what_waits_for_nothing_else() -> None:
    """The child that the group ends with is in a back-off, and not started any more."""
    child = LaunchSpec(["x"], restart=RestartPolicy(when="always", backoff=Backoff(initial=9)))
    play = started(group({"a": leaf(), "b": child}, ends_with="b"))
    play.end("b", 1)
    play.end("b", 1)
    effects = play(PreemptionReceived("why", 9.0, 9.0, 9.0))
    assert effects == "preemption a, disarm b, -a"


def test_a_stop_shortens_a_notice() -> None:
    play = started(group("a b", after={"b": ["a"]}))
    play(PreemptionReceived("why", 9.0, 9.0, 9.0))
    assert play(StopReceived("now")) == "-b"
    assert play(PreemptionReceived("earlier", 4.0, 4.0, 4.0)) == ""
    assert play.end("b", None) == "-a"
    assert play.end("a", None) == "finish preempted 85"


def test_no_child_is_started_after_a_notice() -> None:
    slow = leaf(when="always", backoff=Backoff(initial=4))
    served = leaf(ready="notify", when="always")
    play = started(group({"a": slow, "b": served, "c": leaf()}, after={"c": ["b"]}))
    play.end("a", 1)
    assert play(PreemptionReceived("why", 9.0, 9.0, 9.0)) == "disarm a, preemption b"
    assert play(ChildReady("b", 0)) == ""
    assert play.end("b", 1) == "finish preempted 85"


# -------------------------------------------------------------------------- requests


def test_a_child_is_stopped_until_its_restart_is_requested() -> None:
    play = started(group({"a": ALWAYS, "b": ALWAYS}, strategy="one_for_all"))
    assert play.stop("a", signal=2) == "-a"
    assert play.effects[0].stop.signal == 2
    assert play.end("a", None) == ""
    assert play.end("b", 1) == "+b1", "a stays stopped"
    assert play.restart("a") == "+a1"


def test_a_stop_ends_a_delay() -> None:
    slow = leaf(when="always", backoff=Backoff(initial=4))
    play = started(group({"a": slow, "b": leaf()}))
    play.end("a", 1)
    assert play.stop("a") == "disarm a"
    assert play.children["a"] == "stopped"
    assert play.elapse("a") == ""


def test_a_child_that_is_being_stopped_is_killed_by_request() -> None:
    """Also before those that are after it have ended."""
    play = started(group("a b", after={"b": ["a"]}))
    assert play.stop("b") == "-b"
    assert play.stop("b", signal=SIGKILL) == "-b"
    play = started(group("a b", strategy="rest_for_one"))
    assert play.restart("a") == "-b"
    assert play.stop("a") == ""
    assert play.stop("a", signal=SIGKILL) == "-a"


def test_a_stop_of_a_child_that_waits() -> None:
    play = started(group({"a": leaf(ready="notify"), "b": leaf()}, after={"b": ["a"]}))
    assert play.stop("b") == ""
    assert play(ChildReady("a", 0)) == ""


def test_a_restart_by_request_is_that_of_the_child_itself() -> None:
    play = started(group("a b"))
    assert play.restart("a") == "restart a"
    assert play(LeafRestarted("a", 0, 0)) == ""
    assert play.children["a"] == "starting"
    assert play.restart("none") == ""


def test_a_restart_by_request_takes_others_along() -> None:
    play = started(group({"a": leaf(), "b": leaf(), "c": leaf()}, strategy="rest_for_one"))
    assert play.restart("b") == "-c"
    assert play.end("c", None) == "-b"
    assert play.end("b", None) == "+b1"
    assert play.run("") == "+c1"
    assert play.machine.restarts == 0


def test_a_restart_by_request_ends_a_delay() -> None:
    slow = leaf(when="always", backoff=Backoff(initial=4))
    play = started(group({"a": slow, "b": leaf()}))
    play.end("a", 1)
    assert play.restart("a") == "disarm a, +a1"


def test_a_restart_by_request_gives_a_new_budget() -> None:
    play = started(group({"a": leaf(1), "b": leaf()}, strategy="rest_for_one", essential=["b"]))
    play.end("a", 1)
    play.end("b", None)
    play.run("")
    play.end("a", 1)
    assert play.children["a"] == "failed"
    assert play.restart("a") == "+a2"
    play.run("")
    assert play.end("a", 1) == "-b1"


def test_a_restart_of_a_child_that_is_being_stopped() -> None:
    play = started(group("a b"))
    play.stop("a")
    assert play.restart("a") == ""
    assert play.end("a", None) == "+a1"


@pytest.mark.parametrize("after", [{}, {"d": ["e"]}])
def test_a_restart_of_the_whole_group_starts_what_has_ended(after: Any) -> None:
    """But not what was stopped by request, or never restarts."""
    children = {"a": leaf(), "b": leaf(), "c": NEVER, "d": leaf(), "e": leaf()}
    play = started(group(children, essential=["e"], after=after))
    play.end("a")
    play.end("b", 1)
    play.end("c")
    play.stop("d")
    play.end("d", None)
    effects = play(RestartReceived("why"))
    if after:
        assert effects == "-e"
        assert play.end("e", None) == "+a1, +b1, +e1"
    else:
        assert effects == "restart e, +a1, +b1"
        assert play.events[0].startswith("a ChildRestarting: restarting: why")


def test_a_restart_of_the_whole_group() -> None:
    assert started(group("a b"))(RestartReceived("why")) == "restart a, restart b"
    play = started(group("a b", after={"b": ["a"]}))
    assert play(RestartReceived("why")) == "-b"
    assert play.end("b", None) == "-a"
    assert play.end("a", None) == "+a1"
    assert play.run("") == "+b1"


def test_results_of_former_generations_are_dropped() -> None:
    play = started(group({"a": ALWAYS, "b": leaf()}))
    play.end("a", 1)
    for late in (
        ChildEnded("a", 0, JobOutcome(JobState.FAILED, "", 1)),
        ChildStarted("a", 0),
        ChildReady("a", 0),
        LeafRestarted("a", 0, 5),
        ChildStarted("none", 0),
        TimerElapsed("none", 0),
    ):
        assert play(late) == ""
    assert play.children["a"] == "starting"
    assert play.machine.restarts == 1


def test_requests_that_no_child_can_fulfil_are_refused() -> None:
    machine = Play(group({"web": leaf(), "job": leaf()})).machine
    refused: list[tuple[ChildRequest, str]] = [
        (ChildStopReceived("wbe", ""), "child: must name a child; did you mean web? (got 'wbe')"),
        (ScaleReceived("web", 0), "number: must be a whole number of at least 1 (got 0)"),
        (ScaleReceived("", 2), "children: must be replicas, to be scaled (got ['web', 'job'])"),
        (
            ReloadReceived("", leaf()),
            "spec: must be a GroupSpec, as the running one (got 'LaunchSpec')",
        ),
    ]
    for request, message in refused:
        with pytest.raises(SpecError) as raised:
            machine.check(request)
        assert str(raised.value) == message
    machine.check(ReloadReceived("web", leaf()))


# ----------------------------------------------------------------- independent workers


def workers(number: int, scope: Any = "worker", **fields: Any) -> LaunchSpec:
    policy = fields.pop("policy", {})
    limit = fields.pop("max_restarts", 0)
    policy = {**(AT_ONCE if limit else {}), **policy}
    return LaunchSpec(
        ["x"],
        nproc_per_node=number,
        max_restarts=limit,
        restart=RestartPolicy(scope=scope, **policy),
        **fields,
    )


def test_independent_workers_are_gangs_of_one() -> None:
    play = Play(workers(2, max_restarts=3, policy={"window": (9, 60)}))
    assert play(Start()) == "+0, +1"
    first = play.effects[0]
    assert (first.rank, first.world_size) == (0, 2)
    assert (first.spec.restart, first.spec.max_restarts) == (RestartPolicy(backoff=None), 3)
    assert not first.spec.host_store


def test_a_worker_that_is_given_up_fails_the_job() -> None:
    play = started(workers(2))
    assert play.end("1", 5) == "-0"
    assert play.end("0", None) == "finish failed 5"
    assert play.outcome is not None
    assert play.outcome.why == "rank 1: no restarts allowed"


def test_the_rest_of_the_workers_restarts() -> None:
    play = started(workers(3, "rest", max_restarts=2))
    assert play.end("1", 1) == "-2"
    assert play.end("2", None) == "+11"
    assert play.run("") == "+21"


def test_workers_are_ready_when_all_are() -> None:
    play = Play(workers(2, ready="notify"))
    play.start()
    play(ChildReady("0", 0))
    assert ReportReady(True) not in play.effects
    play(ChildReady("1", 0))
    assert ReportReady(True) in play.effects
    play(ChildReady("1", 0, is_ready=False))
    assert ReportReady(False) in play.effects


def test_the_window_of_workers_is_that_of_all() -> None:
    play = started(workers(2, max_restarts=5, policy={"window": (2, 10)}))
    play(LeafRestarted("0", 0, 1))
    play(LeafRestarted("1", 0, 1))
    assert play(LeafRestarted("0", 0, 2)) == "-0, -1"


# ----------------------------------------------------------------------------- scale


def test_workers_are_added() -> None:
    play = started(workers(1))
    assert play(ScaleReceived("", 3)) == "+1, +2"
    assert play.events == ["Scaled: scaled from 1 to 3 workers"]
    assert [one.world_size for one in play.effects if isinstance(one, StartChild)] == [3, 3]
    assert play.machine.spec == workers(3)


def test_the_highest_workers_are_removed() -> None:
    play = started(workers(3))
    assert play(ScaleReceived("", 1)) == "-1, -2"
    assert [*play.children] == ["0"]
    assert play.end("2", None) == ""
    assert play.events == ["ChildRemoved: 2 is removed"]
    assert play.end("1", 5) == ""
    assert play.events == ["ChildRemoved: 1 is removed"]
    assert play.end("0") == "finish succeeded 0"


def test_a_worker_that_is_being_removed_may_be_added_again() -> None:
    play = started(workers(2))
    play(ScaleReceived("", 1))
    assert play(ScaleReceived("", 2)) == ""
    assert play.end("1", None, 0) == "+11"
    play(ScaleReceived("", 1))
    play.end("1", None, 1)
    assert play(ScaleReceived("", 2)) == "+12", "generations go on"


def test_replicas_are_scaled_too() -> None:
    play = started(GroupSpec.replicas(leaf(), 2))
    assert play(ScaleReceived("", 3)) == "+2"
    assert play.machine.spec == GroupSpec.replicas(leaf(), 3)


def test_a_scale_is_always_answered() -> None:
    play = started(workers(2))
    play(ScaleReceived("", 2))
    assert play.events == ["Scaled: scaled from 2 to 2 workers"]
    play = started(group({"w": workers(2), "b": leaf()}))
    play.stop("w")
    assert play(ScaleReceived("w", 3)) == ""
    assert play.events == ["w Scaled: scaled from 2 to 3 workers"]
    play.end("w", None)
    assert play.restart("w") == "+w1"
    assert play.effects[-1].spec == workers(3)


def test_a_child_is_scaled_by_its_kind() -> None:
    """A gang restarts; workers, and replicas, are scaled by their own supervisor."""
    children = {"gang": leaf(), "workers": workers(2), "replicas": GroupSpec.replicas(leaf(), 2)}
    play = started(group(children))
    assert play(ScaleReceived("workers", 3)) == "scale workers"
    assert play(ScaleReceived("replicas", 3)) == "scale replicas"
    assert play(ScaleReceived("gang", 3)) == "-gang"
    assert play.end("gang", None) == "+gang1"
    assert play.effects[-2 if len(play.effects) > 1 else 0].spec.nproc_per_node == 3


def test_a_run_of_several_nodes_is_not_started_again() -> None:
    """It ends for all nodes; while it runs, it restarts itself on all of them."""
    many = LaunchSpec(["x"], nnodes=2)
    children = {"many": many, "g": GroupSpec({"a": many, "b": leaf()}, after={"b": ["a"]})}
    play = started(group(children | {"two": GroupSpec.replicas(many, 2)}, essential=[]))
    assert play.restart("many") == "restart many"
    same, other = (
        ReloadReceived("g", GroupSpec({"a": many.replace(env=env)})) for env in ({}, {"X": "2"})
    )
    play.machine.check(same)
    refused: list[ChildRequest] = [ChildRestartReceived("g", "why"), ReloadReceived("two"), other]
    refused.append(ChildRestartReceived("", "why"))
    for name in ("many", "g", "two"):
        for request in refused:
            with pytest.raises(SpecError, match=r"several nodes|must be 1 for another spec"):
                play.machine.check(request)
        play.end(name)
        refused.append(ChildRestartReceived(name, "why"))
    waiting = Play(group({"a": leaf(), "many": many}, after={"many": ["a"]}))
    assert waiting.start() == "+a, +many"
    waiting = Play(group({"a": leaf(ready="notify"), "many": many}, after={"many": ["a"]}))
    assert waiting.start() == "+a"
    waiting.machine.check(ChildRestartReceived("many", "why"))


# ---------------------------------------------------------------------------- reload


NEW = workers(2, env={"VERSION": "2"})


def reloading(spec: LaunchSpec = NEW, number: int = 2) -> Play:
    play = started(workers(number, ready=spec.ready))
    for name in play.children:
        play(ChildReady(name, 0))
    assert play(ReloadReceived("", spec)) == f"+01, arm 0 {READY_TIMEOUT_S:g}"
    return play


def test_workers_are_replaced_one_after_the_other() -> None:
    play = reloading()
    start = next(one for one in play.effects if isinstance(one, StartChild))
    assert env_of(start) == NEW.env
    assert play(ChildStarted("0", 1)) == f"arm 0 {SETTLED_AFTER_S:g}"
    assert play.elapse("0") == "-0"
    assert play.end("0", None, 0) == f"+11, arm 1 {READY_TIMEOUT_S:g}"
    play(ChildStarted("1", 1))
    assert play.elapse("1") == "-1"
    assert play.machine.spec != NEW
    play.end("1", None, 0)
    assert play.events == ["ReloadFinished: reloaded, 2 workers replaced"]
    assert play.machine.spec == NEW
    assert play.children == {"0": "running", "1": "running"}


def test_a_replacement_has_to_be_ready() -> None:
    play = reloading(NEW.replace(ready="notify"))
    assert play(ChildStarted("0", 1)) == ""
    assert play(ChildReady("0", 1)) == "-0, disarm 0"


@pytest.mark.parametrize("kind", ["end", "restart", "timer"])
def test_the_old_worker_is_kept_if_the_new_one_fails(kind: str) -> None:
    play = reloading(NEW.replace(ready="notify"))
    if kind == "end":
        assert play.end("0", 1, 1) == "disarm 0"
    elif kind == "restart":
        assert play(LeafRestarted("0", 1, 1, (failure(1),))) == "-01, disarm 0"
    else:
        assert play.elapse("0") == "-01"
    (event,) = play.events
    assert event.startswith("0 ReloadFailed: the reload has failed: the new worker ")
    if kind != "end":
        assert play.end("0", None, 1) == ""
    assert play.machine.children["0"].generation == 0
    assert play.children == {"0": "running", "1": "running"}
    assert play.machine.spec != NEW
    assert play.end("0", 3, 0) == "-1", "it still counts"


def test_a_replacement_that_fails_after_others_keeps_those() -> None:
    play = reloading()
    play(ChildStarted("0", 1))
    play.elapse("0")
    play.end("0", None, 0)
    play.end("1", 1, 1)
    assert play.events == [
        "1 ReloadFailed: the reload has failed, after 1 worker: the new worker has failed:"
        " rank 0 (pid 9): exit code 1; the old worker is kept"
    ]
    specs = [child.spec for child in play.machine.children.values()]
    assert [getattr(spec, "env", None) for spec in specs] == [NEW.env, {}]


def test_a_replacement_takes_the_place_of_an_old_worker_that_ends() -> None:
    play = reloading()
    assert play.end("0", 1, 0) == ""
    assert play.machine.children["0"].generation == 1
    play(ChildStarted("0", 1))
    assert play.elapse("0") == f"+11, arm 1 {READY_TIMEOUT_S:g}"


def test_such_a_replacement_is_stopped_too_if_it_is_not_ready() -> None:
    play = reloading(NEW.replace(ready="notify"))
    play.end("0", 1, 0)
    assert play.elapse("0") == "-01"
    assert play.end("0", None, 1) == "+02"
    (start,) = (one for one in play.effects if isinstance(one, StartChild))
    assert env_of(start) == {}


def test_the_old_spec_stays_if_such_a_replacement_fails() -> None:
    play = started(workers(2, policy={"when": "always", **AT_ONCE}))
    new = workers(2, policy={"when": "always", **AT_ONCE}, env={"VERSION": "2"})
    play(ReloadReceived("", new))
    play.end("0", 1, 0)
    assert play.end("0", 1, 1) == "disarm 0, +02"
    (start,) = (one for one in play.effects if isinstance(one, StartChild))
    assert env_of(start) == {}


def test_workers_that_do_not_run_have_the_new_spec_in_the_end() -> None:
    slow = {"when": "always", "backoff": Backoff(initial=4)}
    play = started(workers(2, policy=slow))
    play.end("0", 1)
    new = workers(2, policy=slow, env={"VERSION": "2"})
    assert play(ReloadReceived("", new)).startswith("+11, arm 1")
    play(ChildStarted("1", 1))
    play.elapse("1")
    assert play.end("1", None, 0) == "disarm 0, +01"
    start = next(one for one in play.effects if isinstance(one, StartChild))
    assert env_of(start) == new.env


def test_a_stop_of_the_worker_that_is_being_replaced() -> None:
    play = reloading()
    assert play.stop("0") == f"-01, disarm 0, +11, arm 1 {READY_TIMEOUT_S:g}, -0"
    assert play.end("0", None, 1) == ""
    assert play.end("0", None, 0) == ""
    assert play.children["0"] == "stopped"


def test_a_restart_of_others_ends_a_reload() -> None:
    play = started(workers(2, "rest", max_restarts=1))
    play(ReloadReceived("", workers(2, "rest", max_restarts=1, env={"VERSION": "2"})))
    play(ChildStarted("0", 1))
    play.elapse("0")
    play.end("0", None, 0)
    assert play.end("0", 1, 1) == "-11, disarm 1, -1"
    assert any("ReloadFailed" in event for event in play.events)


def test_another_reload_begins_anew() -> None:
    play = reloading()
    assert play(ReloadReceived("", None)) == "-01, disarm 0"
    assert play.end("0", None, 1) == f"+02, arm 0 {READY_TIMEOUT_S:g}"


def test_a_reload_changes_the_number_of_workers_too() -> None:
    play = started(workers(1))
    play(ReloadReceived("", workers(2)))
    play(ChildStarted("0", 1))
    play.elapse("0")
    assert play.end("0", None, 0) == "+1"


def test_workers_that_a_reload_removes_are_not_replaced() -> None:
    play = started(workers(3))
    play(ReloadReceived("", workers(1, env={"VERSION": "2"})))
    play(ChildStarted("0", 1))
    play.elapse("0")
    assert play.end("0", None, 0) == "-1, -2"


def test_a_stop_ends_a_reload() -> None:
    play = reloading()
    assert play(StopReceived("why")) == "-01, disarm 0, -0, -1"


def test_the_time_of_a_replacement_is_that_of_its_spec() -> None:
    spec = NEW.replace(liveness=LivenessSpec(ready_timeout=7), ready="notify")
    play = started(workers(2, ready="notify"))
    assert play(ReloadReceived("", spec)) == "+01, arm 0 7"


def test_a_gang_is_stopped_and_started_by_its_new_spec() -> None:
    play = started(group("a b"))
    new = leaf().replace(env={"VERSION": "2"})
    assert play(ReloadReceived("a", new)) == "-a"
    assert play.end("a", None) == "+a1"
    assert next(one for one in play.effects if isinstance(one, StartChild)).spec == new
    assert play(ReloadReceived("a", None)) == "restart a"


def test_workers_and_groups_are_reloaded_by_their_supervisor() -> None:
    play = started(group({"w": workers(2), "g": group("x")}))
    assert play(ReloadReceived("w", workers(3))) == "reload w"
    assert play(ReloadReceived("g", None)) == "reload g"
    assert play(ReloadReceived("w", leaf())) == "-w", "it is another kind"


def test_a_child_starts_by_the_spec_that_it_ran_last() -> None:
    """A reload that has failed has changed nothing."""
    play = started(group({"w": workers(2), "b": leaf()}))
    play.stop("w")
    play.end("w", None, spec=workers(3))
    play.restart("w")
    assert play.effects[-1].spec == workers(3)


def test_a_reload_of_workers_that_do_not_run_has_ended_at_once() -> None:
    play = started(group({"w": workers(2), "b": leaf()}))
    play.stop("w")
    play.end("w", None)
    assert play(ReloadReceived("w", NEW)) == ""
    assert play.events == ["w ReloadFinished: reloaded, 0 workers replaced"]
    assert play.restart("w") == "+w1"
    assert play.effects[-1].spec == NEW


def test_a_group_changes_what_differs() -> None:
    play = started(group({"a": leaf(), "b": leaf(), "c": leaf()}))
    new = leaf().replace(env={"VERSION": "2"})
    assert play(ReloadReceived("", group({"a": leaf(), "b": new, "d": new}))) == "-c, -b, +d"
    assert play.end("b", None) == "+b1"
    assert play.end("c", None) == ""
    assert play.children == {"a": "running", "b": "starting", "d": "starting"}


def cannot_start(play: Play, name: str) -> str:
    """End a start of which no process has run."""
    outcome = JobOutcome(JobState.FAILED, "it cannot be started", 127)
    return play.end(name, 127, outcome=outcome, is_permanent=True)


@pytest.mark.parametrize("changes", [{"b": NEW.replace(restart=None)}, {"new": leaf()}])
def test_a_start_that_fails_in_a_reload_ends_no_group(changes: Any) -> None:
    """The next reload starts it, also if the description is the same; later failures count."""
    play = started(group({"a": leaf(), "b": leaf()}, ends_with="b"))
    spec = group({"a": leaf(), "b": leaf(), **changes}, ends_with="b")
    (name,) = changes
    effects = play(ReloadReceived("", spec))
    if effects == "-b":
        effects = play.end("b", None)
    assert effects in ("+b1", "+new")
    assert cannot_start(play, name) == ""
    assert play.children[name] == "failed"
    start = play(ReloadReceived("", group({**spec.children}, ends_with="b")))
    assert start in ("+b2", "+new1")
    play(ChildStarted(name, play.machine.children[name].generation))
    assert play(ReloadReceived("", spec)) == ""
    play.end(name, 3)
    play.end("b", None)
    assert play.end("a", None) == "finish failed 3"


def test_a_child_that_a_reload_could_not_start_fails_the_group_in_the_end() -> None:
    play = started(group("a"))
    play(ReloadReceived("", group("a b")))
    assert cannot_start(play, "b") == ""
    assert play.end("a") == "finish failed 127"


def test_a_reload_that_has_failed_is_repeated() -> None:
    """By the same description; one that has succeeded, or goes on, is not."""
    play = started(workers(2))
    assert play(ReloadReceived("", NEW, is_same=True)) == ""
    play(ReloadReceived("", NEW))
    assert play(ReloadReceived("", NEW, is_same=True)) == ""
    play.end("0", 1, 1)
    assert play.events[0].startswith("0 ReloadFailed: ")
    assert play.machine.has_failed_reload
    assert play(ReloadReceived("", NEW, is_same=True)) == f"+02, arm 0 {READY_TIMEOUT_S:g}"
    group_of_two = group({"w": workers(2), "a": leaf(), "g": group("x")})
    play = started(group_of_two)
    assert play(ReloadReceived("", group({**group_of_two.children}))) == "reload w, reload g"
    assert all(one.request.is_same for one in play.effects)


def test_a_child_that_is_removed_is_reported() -> None:
    play = started(group("a b"))
    assert play(ReloadReceived("", group("a"))) == "-b"
    assert play.end("b", None) == ""
    assert play.events == ["ChildRemoved: b is removed"]


def test_all_children_of_a_group_are_reloaded() -> None:
    play = started(group({"a": leaf(), "w": workers(2)}))
    assert play(ReloadReceived("", None)) == "restart a, reload w"


def test_a_reload_of_a_group_is_in_order() -> None:
    """What is after another child is stopped before it, and waits for its next start."""
    play = started(group({"a": leaf(ready="notify"), "b": leaf(), "c": leaf()}, after={"b": ["a"]}))
    play(ChildReady("a", 0))
    play(ChildStarted("b", 0))
    assert play(ReloadReceived("", None)) == "restart c, -b"
    assert play.end("b", None) == "-a"
    assert play.end("a", None) == "+a1"
    assert play(ChildStarted("a", 1)) == ""
    assert play(ChildReady("a", 1)) == "+b1"


def test_a_restart_of_a_child_with_an_order_waits_for_those_before_it() -> None:
    """One of them that was stopped by request would let it wait for ever: it is refused."""
    play = started(group({"a": ALWAYS, "b": leaf()}, after={"b": ["a"]}))
    play.end("a", 1)
    assert play.restart("b") == "-b"
    assert play.end("b", None) == ""
    assert play(ChildStarted("a", 1)) == "+b1"
    play.stop("a")
    play.end("a", None, 1)
    for name in ("b", ""):
        problem = r"^child: is after 'a', which was stopped: restart that first \(got 'b'\)$"
        with pytest.raises(SpecError, match=problem):
            play.machine.check(ChildRestartReceived(name, "why"))
    play.machine.check(ChildRestartReceived("a", "why"))


# ------------------------------------------------------------------------- properties

NAMES = st.sampled_from(["0", "1", "2", ""])
GENERATIONS = st.integers(0, 4)
STATES = st.sampled_from(JobState)
INPUTS = st.one_of(
    st.builds(ChildStarted, NAMES, GENERATIONS),
    st.builds(ChildReady, NAMES, GENERATIONS, st.booleans()),
    st.builds(LeafRestarted, NAMES, GENERATIONS, st.integers(0, 4)),
    st.builds(
        ChildEnded,
        NAMES,
        GENERATIONS,
        st.builds(JobOutcome, STATES, st.just("why"), st.integers(0, 3)),
        is_permanent=st.booleans(),
    ),
    st.builds(ChildStopReceived, NAMES, st.just(""), st.sampled_from([None, 15, SIGKILL])),
    st.builds(ChildRestartReceived, NAMES, st.just("")),
    st.builds(ReloadReceived, NAMES, st.none()),
    st.builds(ScaleReceived, NAMES, st.integers(1, 4)),
    st.builds(TimerElapsed, NAMES, st.integers(0, 6)),
    st.builds(StopReceived, st.just("why"), st.sampled_from([None, 15, SIGKILL])),
    st.builds(RestartReceived, st.just("why")),
    st.builds(PreemptionReceived, st.just("why"), st.just(1.0), st.just(1.0)),
)
SPECS = st.sampled_from(
    [
        workers(3, max_restarts=1),
        workers(2, "rest", max_restarts=1),
        workers(3, policy={"when": "always"}),
        GroupSpec.replicas(leaf(ready="notify"), 2),
        group({"0": leaf(), "1": ALWAYS, "2": workers(2)}, strategy="one_for_all"),
        group({"0": leaf(1), "1": NEVER}, strategy="rest_for_one", window=(1, 9)),
        group({"0": leaf(), "1": leaf()}, after={"1": ["0"]}, essential=["1"], ends_with="1"),
    ]
)


@given(SPECS, st.lists(INPUTS, max_size=60))
def test_no_order_of_inputs_is_impossible(spec: AnySpec, inputs: list[Any]) -> None:
    """Late results, unknown names and requests at any time too; a live start has one answer."""
    play = Play(spec)
    live: set[tuple[str, int]] = set()
    for received in [Start(), *inputs]:
        if isinstance(received, ChildRequest):
            try:
                play.machine.check(received)
            except SpecError:
                continue
        is_over = play.outcome is not None
        play.now += 1
        play(received)
        assert not (is_over and play.effects), "effects after the end"
        if isinstance(received, ChildEnded):
            live.discard((received.name, received.generation))
        for effect in play.effects:
            if isinstance(effect, StartChild):
                assert (effect.name, effect.generation) not in live
                live.add((effect.name, effect.generation))
            elif isinstance(effect, StopChild | AskChild):
                assert (effect.name, effect.generation) in live
        assert not (play.outcome and live), "over, and a child runs"
