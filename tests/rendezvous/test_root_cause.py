"""Which failure of a round comes first, over clocks that differ and paths that are slow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.reasons import LOST_PEER
from elastic_aio.rendezvous.base import RoundFailing, RoundStopped, RoundSucceeded
from elastic_aio.rendezvous.state import RoundSettings
from tests.support.coordinator_harness import CoordinatorHarness, failure

HOUR = 3600.0


class Failing:
    """Two nodes that run a round; `b` fails first."""

    def __init__(self, *, error: float | None = None) -> None:
        """The wall clock of b's host is wrong by `error` seconds; None: it is a's host."""
        self.harness = CoordinatorHarness(RoundSettings(2, 2), max_restarts=0)
        booted = (0.0, 1e9) if error is None else (error, 1e9 + error - 77)
        self.harness.clocks = {"a": (0.0, 1e9), "b": booted}
        self.harness.latencies = dict.fromkeys("ab", 0.001)
        self.harness.join("a", "b")

    def fail(self, name: str, at: float, *, cause: str = "") -> None:
        """Let a worker fail, by the clock of its host; all others are stopped."""
        error, _ = self.harness.clocks[name]
        member, code = self.harness.members[name], ord(name)
        member.report(RoundFailing(0, "failed"))
        member.report(RoundStopped(0, (failure(code, time=at + error, host=name, cause=cause),)))

    def root_cause(self) -> str:
        """Return the node whose failure came first, as the coordinator sees it."""
        self.harness.settle()
        outcome = self.harness.coordinator.outcome
        assert outcome is not None
        assert [one.host for one in outcome.failures].count("b") == 1
        assert outcome.exit_code == ord(outcome.failures[0].host)
        return outcome.failures[0].host


@pytest.mark.parametrize("error", [None, 0.0, 2 * HOUR, -5 * HOUR])
@pytest.mark.parametrize("delay", [0.0, 0.3, 30.0])
def test_a_status_that_is_late_does_not_change_the_order(error: float | None, delay: float) -> None:
    """The culprit's failure took longer to be reported than the victim's."""
    failing = Failing(error=error)
    harness = failing.harness
    harness.now = 100.0
    harness.latencies["b"] = delay
    failing.fail("b", 100.0)
    failing.fail("a", 100.02)
    assert failing.root_cause() == "b"


def test_a_lost_peer_of_another_node_is_no_root_cause() -> None:
    """The cause of the loss was seen later, on a node that cleaned up first."""
    failing = Failing()
    failing.harness.now = 100.0
    failing.fail("a", 100.0, cause=LOST_PEER)
    failing.fail("b", 101.0)
    assert failing.root_cause() == "b"


@pytest.mark.parametrize("step", [HOUR, -HOUR, 0.2, -0.2])
def test_a_clock_that_is_set_does_not_change_the_order(step: float) -> None:
    """The difference that was known before is forgotten."""
    failing = Failing(error=7.0)
    harness = failing.harness
    harness.now = 50.0
    harness.clocks["b"] = (7.0 + step, 1e9 - 70 + step)
    harness.members["b"].set_port(9)
    harness.settle()
    harness.now = 100.0
    failing.fail("b", 100.0)
    failing.fail("a", 100.02)
    assert failing.root_cause() == "b"


def test_nodes_of_one_host_share_its_clock() -> None:
    """Even if every status of the culprit was late."""
    failing = Failing()
    failing.harness.latencies["b"] = 10.0
    harness = failing.harness
    harness.now = 100.0
    failing.fail("b", 100.0)
    failing.fail("a", 100.001)
    assert failing.root_cause() == "b"


def test_a_successor_knows_the_order_on_one_host() -> None:
    """It reads the statuses long after they were written."""
    failing = Failing()
    harness = failing.harness
    harness.now = 100.0
    failing.fail("b", 100.0)
    harness.drop_orders("a", "b")
    harness.settle()
    harness.now = 105.0
    failing.fail("a", 100.02)
    harness.restore_orders()
    harness.elect("d")
    harness.latencies["b"] = 40.0
    assert failing.root_cause() == "b"


@pytest.mark.parametrize("drift", [9e-5, -9e-5])
def test_clocks_that_drift_do_not_change_the_order(drift: float) -> None:
    """For an hour, without a status: an old difference says little."""
    failing = Failing(error=0.0)
    harness = failing.harness
    harness.now = 100.0 + HOUR
    harness.clocks["b"] = (HOUR * drift, 1e9 - 77)
    failing.fail("b", harness.now)
    failing.fail("a", harness.now + 0.02)
    assert failing.root_cause() == "b"


def test_a_drifting_clock_is_not_blamed() -> None:
    """It is slower, so that an old difference would date its failures too early."""
    failing = Failing(error=0.0)
    harness = failing.harness
    harness.now = 100.0 + HOUR
    harness.clocks["a"] = (HOUR * -9e-5, 1e9 + 50)
    failing.fail("b", harness.now)
    failing.fail("a", harness.now + 0.02)
    assert failing.root_cause() == "b"


LATENCY = st.floats(0.0, 0.009)


@given(
    error=st.floats(-10 * HOUR, 10 * HOUR),
    fast=st.tuples(LATENCY, LATENCY),
    slow=st.tuples(st.floats(0.0, 60.0), st.floats(0.0, 60.0)),
    lead=st.floats(0.03, 1.0),
)
def test_a_culprit_that_failed_30_ms_earlier_comes_first(
    error: float, fast: tuple[float, float], slow: tuple[float, float], lead: float
) -> None:
    """If one status of each node took less than 10 ms."""
    failing = Failing(error=error)
    harness = failing.harness
    harness.latencies = dict(zip("ab", fast, strict=True))
    for member in harness.members.values():
        member.set_port(9)
    harness.settle()
    harness.now = 100.0
    harness.latencies = dict(zip("ab", slow, strict=True))
    failing.fail("b", 100.0)
    failing.fail("a", 100.0 + lead)
    assert failing.root_cause() == "b"


# ------------------------------------------------------------- an early success


@pytest.mark.parametrize("error", [None, 0.0, 2 * HOUR, -5 * HOUR])
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_worker_of_another_node_that_exited_with_0_before_is_noted(
    error: float | None, is_gone: bool
) -> None:
    """By the clock of its host, also if its node has left meanwhile."""
    failing = Failing(error=error)
    harness = failing.harness
    harness.now = 100.0
    harness.members["b"].report(RoundSucceeded(0, (5, 100.0 + (error or 0.0))))
    harness.settle()
    if is_gone:
        harness.lose("b", is_lost=False)
    harness.now = 102.5
    member = harness.members["a"]
    member.report(RoundFailing(0, "failed"))
    failed = failure(9, time=102.5, host="a", notes=("stacks: unknown",))
    member.report(RoundStopped(0, (failed, failure(8, time=103.0, host="a"))))
    harness.settle()
    outcome = harness.outcome
    root, other = outcome.failures
    assert root.notes == ("rank 5 (on b) exited with 0, 2.5 s before", "stacks: unknown")
    assert not other.notes


@pytest.mark.parametrize(
    ("successes", "notes"),
    [
        ({"a": 99.0, "b": 98.0}, ["rank 1 (on b) exited with 0, 2 s before"]),
        ({"a": 98.0, "b": 99.0}, []),  # its own node has noted that
        ({"b": 100.5}, []),
        ({}, []),
    ],
)
def test_only_the_earliest_success_is_noted(successes: dict[str, float], notes: list[str]) -> None:
    """Of a worker beside others of its node, which run until they are stopped."""
    failing = Failing()
    harness = failing.harness
    harness.now = 100.0
    harness.stop_slowly("b")
    for name, first in (("a", 0), ("b", 1)):
        early = (first, successes[name]) if name in successes else None
        failures = (failure(9, time=100.0, host="a"),) if name == "a" else ()
        harness.members[name].report(RoundFailing(0, "failed"))
        harness.members[name].report(RoundStopped(0, failures, first_success=early))
    harness.settle()
    outcome = harness.outcome
    assert list(outcome.failures[0].notes) == notes
