"""Invariants of the ends of jobs: a job that has ended stays so, and none becomes another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from elastic_aio.discovery.jobs import FormerJob
from elastic_aio.discovery.keys import RunEnd
from elastic_aio.outcome import JobOutcome, JobState
from elastic_aio.testing.node import SimNode
from elastic_aio.testing.rounds import SimRound, brief
from elastic_aio.testing.store import SimStore
from elastic_aio.testing.trace import Trace


class EndChecker:
    """Checks what is recorded and ordered after an end, at any store.

    Jobs are named by their `RunRecord`s. Two that are halves of one are joined by a
    `FormerJob`, before either has ended.
    """

    def __init__(
        self,
        rounds: Mapping[tuple[int, str], SimRound],
        trace: Trace,
        now: Callable[[], float],
    ) -> None:
        """Begin without ends; `rounds` has all rounds that were ordered."""
        self._rounds = rounds
        self._trace = trace
        self._now = now
        self._ends: dict[str, list[tuple[RunEnd, float]]] = {}
        """How each job has ended, and when: several times in a partition."""
        self._goes_on_in: dict[str, str] = {}

    @property
    def has_any(self) -> bool:
        """Whether a job has ended."""
        return bool(self._ends)

    def on_recorded(self, store: SimStore, generation: str, end: RunEnd) -> None:
        """Check an end: a generation has one."""
        job = store.jobs.get(generation, "")
        former, _ = store.ends.get(generation, (end, 0.0))
        if _values(former) != _values(end):
            self._trace.fail(f"the end of {job} was {_values(former)} and is {_values(end)}")
        self._trace.note(store.host.name, f"the end of {job} is recorded: {end.state}")
        self._ends.setdefault(job, []).append((end, self._now()))

    def on_former(self, former: FormerJob) -> None:
        """Check that a job which goes on in another one has not ended."""
        if former.end is not None or former.job in self._goes_on_in:
            return
        if former.job in self._ends:
            self._trace.fail(f"{former.job} has ended and goes on in {former.goes_on_in}")
        self._goes_on_in[former.job] = former.goes_on_in

    def on_written(self, round: SimRound) -> None:
        """Check a new round: its generation has not ended, and its counters are its own."""
        _, ended_at = round.store.ends.get(round.generation, (None, self._now()))
        placement = round.placement
        if ended_at < round.formed_at:
            self._trace.fail(f"{brief(placement)} is ordered after the end of the job")
        halves = {one for one in self._goes_on_in if round.job in self._successors(one)}
        others = [one for one in self._rounds.values() if one is not round]
        if placement.restarts and not any(one.job in {round.job, *halves} for one in others):
            self._trace.fail(f"{brief(placement)} is the first one of {round.job}")

    def on_ordered(self, node: SimNode, round: SimRound) -> None:
        """Check what a node is sent after `node.placement`: its job has not ended."""
        if node.placement is None:
            return
        former = self._rounds[node.placement.round_id]
        if round.job not in self._successors(former.job):
            self._trace.fail(
                f"{node.name} was in {former.job}, and is sent {brief(round.placement)}"
            )
        for end, ended_at in self._ends.get(former.job, []):
            # A partition may have left two coordinators, of which one had the success.
            is_new = round.store.first_led_at > ended_at and round.formed_at > ended_at
            if end.state is JobState.SUCCEEDED and former.is_complete and is_new:
                self._trace.fail(f"{node.name} has succeeded, and is sent {brief(round.placement)}")

    def on_end_ordered(self, node: SimNode, outcome: JobOutcome) -> None:
        """Check that the end that a node obeys is recorded, for its own job if it had a place."""
        jobs = set(self._ends)
        if node.placement is not None:
            jobs &= set(self._successors(self._rounds[node.placement.round_id].job))
        if not any(_values(outcome) == _values(end) for one in jobs for end, _ in self._ends[one]):
            self._trace.fail(f"{node.name} is sent an end that is not recorded: {outcome}")

    def _successors(self, job: str) -> Iterator[str]:
        """Return a job and those in which it goes on."""
        seen: dict[str, None] = {}
        while job and job not in seen:
            seen[job] = None
            job = self._goes_on_in.get(job, "")
        return iter(seen)


def _values(end: RunEnd | JobOutcome) -> tuple[JobState, int, int]:
    return end.state, end.exit_code, end.restarts
