"""Invariants of the ends of jobs: a job that has ended stays so, and none becomes another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

from elastic_aio.discovery.jobs import FormerJob
from elastic_aio.discovery.keys import RunEnd
from elastic_aio.outcome import JobOutcome, JobState
from elastic_aio.testing.node import SimNode
from elastic_aio.testing.rounds import SimRound, brief
from elastic_aio.testing.store import SimStore
from elastic_aio.testing.trace import Trace


class _RecordedEnd(NamedTuple):
    """How a job has ended, when, and in which round of the store that has the record.

    None: it has had no round there, so that its nodes had come from another store.
    """

    end: RunEnd
    at: float
    round: SimRound | None = None

    def may_cover(self, round: SimRound) -> bool:
        """Return whether this may be the end of `round`, and not of the other half of the job."""
        own = self.round
        return own is None or own is round or not own.members.keys().isdisjoint(round.members)


class EndChecker:
    """Checks what is recorded and ordered after an end, at any store.

    Jobs are named by their `RunRecord`s. Two that are halves of one are joined by a
    `FormerJob`, before either has ended. The nodes of one job that come to two stores go on in
    two.
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
        self._ends: dict[str, list[_RecordedEnd]] = {}
        """How each job has ended: several times in a partition."""
        self._goes_on_in: defaultdict[str, set[str]] = defaultdict(set)

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
        last = [one for one in self._rounds.values() if (one.store, one.job) == (store, job)][-1:]
        self._ends.setdefault(job, []).append(_RecordedEnd(end, self._now(), *last))

    def on_former(self, former: FormerJob) -> None:
        """Check that a job which goes on in another one has not ended."""
        successors = self._goes_on_in[former.job]
        if former.end is not None or former.goes_on_in in successors:
            return
        if former.job in self._ends:
            self._trace.fail(f"{former.job} has ended and goes on in {former.goes_on_in}")
        successors.add(former.goes_on_in)

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
        for recorded in self._ends.get(former.job, []):
            # A partition may have left two coordinators, of which one had the success.
            ended_at = recorded.at
            is_new = round.store.first_led_at > ended_at and round.formed_at > ended_at
            is_success = recorded.end.state is JobState.SUCCEEDED
            if is_success and former.is_complete and is_new and recorded.may_cover(former):
                self._trace.fail(f"{node.name} has succeeded, and is sent {brief(round.placement)}")

    def on_end_ordered(self, node: SimNode, outcome: JobOutcome) -> None:
        """Check that the end that a node obeys is recorded, for its own job if it had a place."""
        jobs = set(self._ends)
        if node.placement is not None:
            jobs &= self._successors(self._rounds[node.placement.round_id].job)
        recorded = [one.end for job in jobs for one in self._ends[job]]
        if _values(outcome) not in map(_values, recorded):
            self._trace.fail(f"{node.name} is sent an end that is not recorded: {outcome}")

    def _successors(self, job: str) -> set[str]:
        """Return a job and those in which it goes on."""
        found, left = {job}, [job]
        while left:
            further = self._goes_on_in.get(left.pop(), set()) - found
            found |= further
            left += further
        return found


def _values(end: RunEnd | JobOutcome) -> tuple[JobState, int, int]:
    return end.state, end.exit_code, end.restarts
