"""A member of a rendezvous: orders and reports in, its status and effects out.

Pure.  An order that is not newer than the last one is dropped.
"""

from __future__ import annotations

from msgspec.structs import replace

from elastic_aio.events import Event
from elastic_aio.node_events import (
    CoordinatorChanged,
    NodeExcluded,
    NodeStandby,
    StandbyPromoted,
)
from elastic_aio.outcome import EndCause, JobOutcome
from elastic_aio.rendezvous import base, messages

MemberEffect = base.Instruction | Event | messages.ProbePeers
"""A `ProbePeers` is answered by `probed`."""


class Member:
    """A member; `status` is the status that it should have in the store now."""

    def __init__(
        self, name: str, status: messages.MemberStatus, exclude_for: float | None = None
    ) -> None:
        """Begin with a first status; `name` is unique among all members ever.

        `exclude_for`: seconds for which it is excluded by default; None: for ever.
        """
        self.name = name
        self.status = status
        self.job = ""
        self._instance = b""
        self._term = 0
        self._acked = (0, 0)
        self._order: messages.OrderBody | None = None
        self._stopping = -1
        self.started_round = -1
        self.is_standing_by = False
        """Whether it waits for a vacant rank, without a place in the round."""
        self.is_excluded = False
        """Whether it waits for the end of its exclusion, and its workers have ended."""
        self._exclude_for = self._excluded_for = exclude_for
        self._refused_because = ""
        """The other node that holds the rank of this one; empty for none."""
        self.has_ended = False
        self.has_published_notice = False
        """Whether a status with its notice of a preemption was in a store."""

    def __repr__(self) -> str:
        return f"<Member {self.status.node.name}: {self.status.phase}, {self._acked}>"

    @property
    def has_succeeded(self) -> bool:
        """Whether all workers of the last round have succeeded here."""
        return self.status.phase is messages.MemberPhase.SUCCEEDED

    @property
    def is_committed(self) -> bool:
        """Whether it has had a place in a round of its job, or stands by."""
        return self.status.placement is not None or self.is_standing_by

    @property
    def has_seen_success(self) -> bool:
        """Whether it knows, without a place, that all members of the round have succeeded."""
        return self.status.placement is None and self.status.members_done > 0

    @property
    def is_lead(self) -> bool:
        """Whether it has group rank 0, and so the store of the round's workers."""
        placement = self.status.placement
        return placement is not None and placement.span.group_rank == 0

    # ------------------------------------------------------------------- inputs

    def set_address(self, address: str, *, is_host: bool) -> None:
        """Set where other nodes reach this member, and whether it hosts the store."""
        self._update(address=address, is_host=is_host)

    def set_port(self, port: int) -> None:
        """Set the port that is reserved for the next round's workers."""
        if port != self.status.port:
            self._update(port=port)

    def attend(self, instance: bytes, job: str = "", *, was_leased: bool = False) -> bool:
        """Take part in a `job` at the store `instance`, which may not have the status.

        Return whether this member had seen another job, in which it had no place.  `was_leased`:
        whether the lease at the former store cannot have ended until now.

        Each store counts its own terms.  So orders are compared with orders of the same store only,
        also after a reconnection.
        """
        if instance != self._instance:
            has_placement = self.status.placement is not None
            self._instance, self._term, self._acked, self._order = instance, 0, (0, 0), None
            self._update(moves=self.status.moves + has_placement, was_leased=was_leased)
        else:
            self._update()
        former, self.job = self.job, job
        return former not in ("", job) and self.status.placement is None

    def on_end(self, outcome: JobOutcome, *, is_late: bool = False) -> list[MemberEffect]:
        """Take the recorded end of the job; `is_late`: it has ended before this member came.

        The order to end says the same; the first of the two counts.
        """
        if self.has_ended:
            return []
        if self._refused_because:
            return self._refuse(self._refused_because)
        if self.status.placement is not None or not is_late:
            return self._end(base.EndJob(outcome))
        self.has_ended = True
        why, cause = f"the run has ended: {outcome.why}", EndCause.RUN_HAD_ENDED
        return [base.EndJob(replace(outcome, why=why, cause=cause, failures=()))]

    def on_coordinator(self, name: str, term: int) -> list[MemberEffect]:
        """Take the name of the coordinator; a term that is not newer changes nothing."""
        if term <= self._term:
            return []
        self._term = term
        return [CoordinatorChanged(name=name, term=term)]

    def on_order(self, order: messages.Order) -> list[MemberEffect]:
        """Take an order and return the effects to perform."""
        position = (order.term, order.serial)
        if position <= self._acked or order.term < self._term or self.has_ended:
            return []
        self._acked = position
        is_repeated, self._order = order.body == self._order, order.body
        if not isinstance(order.body, messages.WaitForNodes):
            self._update()  # acknowledges the order
        if is_repeated and not isinstance(order.body, (messages.ProbePeers, messages.WaitForNodes)):
            return []
        if self.has_seen_success and not isinstance(order.body, messages.MembersDone | base.EndJob):
            self._update(members_done=0)  # the job goes on after all
        match order.body:
            case base.StartRound() if self.status.preemption is not None or self.is_excluded:
                return []  # its acknowledgement has the notice, or the exclusion
            case base.StartRound():
                return self._start(order.body)
            case base.StopRound(round, why):
                return self._stop(round, why)
            case base.ChangePending(time_left=left, number=number, until=0):
                self._update(is_change_pending=left is not None, change=number)
                return [order.body]
            case base.ChangePending() | messages.ProbePeers():
                return [order.body]  # the agent reports a notice that counts
            case messages.WaitForNodes(forming):
                return [forming]
            case messages.StandBy(round, maximum, why):
                self._refused_because = why
                if self.is_standing_by:
                    return []
                self.is_standing_by = True
                return [NodeStandby(round=round, maximum=maximum, why=why)]
            case messages.Reject(why):
                return self._refuse(why)
            case base.EndJob() if self._refused_because:
                return self._refuse(self._refused_because)  # the job ended without this node
            case base.EndJob():
                return self._end(order.body)
            case base.RestartPending(cause):
                if cause == self.status.pending_restart:
                    return []  # of another coordinator
                self._update(pending_restart=cause)
                if cause.excludes == self.name and cause.root is not None:
                    self.exclude(f"restart.decide has excluded it: {cause.root.summary}")
                return [order.body, *self._begin_exclusion()]
            case messages.MembersDone(round, count):
                is_own = self.status.placement is None or round == self.status.round
                if is_own and count != self.status.members_done:
                    self._update(members_done=count)
                return self._note_peers(order.body)

    def fail(self, why: str, cause: EndCause | None = None) -> list[MemberEffect]:
        """End the job for this node alone: it cannot join the other nodes."""
        if self.has_ended:
            return []
        self.has_ended = True
        return [base.EndJob(base.rendezvous_failure(why, cause))]

    def _end(self, end: base.EndJob) -> list[MemberEffect]:
        self.has_ended = True
        # The next coordinator learns the outcome from this status.
        root = tuple(messages.truncate_failure(one) for one in end.outcome.failures[:1])
        self._update(outcome=replace(end.outcome, failures=root))
        return [end]

    def _refuse(self, why: str) -> list[MemberEffect]:
        return self.fail(f"the other nodes refused this one: {why}")

    def isolate(self, why: str, *, is_cut_off: bool = False) -> list[MemberEffect]:
        """Stop the workers: this node is about to be replaced, or is now (`is_cut_off`)."""
        if not self.status.is_busy:
            return []
        self._stopping = max(self.status.round, self._stopping)
        return [base.StopRound(self.status.round, why, is_cut_off)]

    def leave(self) -> None:
        """Take part no more; no worker of this node is left, or rounds may overlap."""
        self._update(is_leaving=True)

    def exclude(self, why: str, seconds: float | None = None) -> None:
        """Take part in no further round, because of `why`; `seconds` replaces `exclude_for`.

        Of several reasons the one for the longest time counts, and of equal ones the first.
        """
        wanted = self._exclude_for if seconds is None else seconds
        present = self._excluded_for
        is_longer = present is not None and (wanted is None or wanted > present)
        if is_longer or not self.status.exclusion:
            self._excluded_for, self.is_excluded = wanted, False  # it begins anew
            self._update(exclusion=messages.end_of(why))

    def extend_exclusion(self, why: str, seconds: float | None = None) -> NodeExcluded:
        """Take part in no round, because of `why`, until `readmit`; return the event of that."""
        self.is_excluded, self.is_standing_by = True, False
        self._update(exclusion=messages.end_of(why))
        node = self.status.node
        return NodeExcluded(name=node.name, member=self.name, why=why, seconds=seconds, is_own=True)

    def readmit(self) -> None:
        """Take part again: the time of an exclusion is over."""
        self.is_excluded = False
        self._update(exclusion="")

    def _begin_exclusion(self) -> list[MemberEffect]:
        """Return that this member is excluded, once its workers have ended."""
        why = self.status.exclusion
        if self.is_excluded or self.status.is_busy or not why:
            return []
        return [self.extend_exclusion(why, self._excluded_for)]

    def report(self, report: base.Report) -> list[MemberEffect]:
        """Take a report of the agent; one of another round is dropped.  Return the effects."""
        if isinstance(report, base.NodeDraining):
            self._update(drain_reason=messages.end_of(report.why))
        elif isinstance(report, base.PreemptionNoticed):
            notice = replace(report.change, why=messages.end_of(report.change.why))
            self._update(preemption=notice, change=notice.number)
        elif report.round == self.status.round:
            self._take(report)
        return self._begin_exclusion()

    def _take(self, report: base.Report) -> None:
        match report:
            case base.RoundStarted(round):
                self.started_round = round
            case base.RoundProgressed():
                self._update(has_progress=True)
            case base.RoundFailing():
                if self.status.phase is messages.MemberPhase.RUNNING:
                    self._update(phase=messages.MemberPhase.FAILING)
            case base.RoundStopped(round):
                reason = messages.end_of(report.permanent_reason)
                self._update(
                    phase=messages.MemberPhase.STOPPED,
                    stopped_round=max(round, self._stopping),
                    failures=messages.truncate_failures(report.failures) or self.status.failures,
                    is_permanent=report.is_permanent or self.status.is_permanent,
                    permanent_reason=reason or self.status.permanent_reason,
                    exit_code=report.exit_code,
                    runtime=report.runtime,
                    first_success=report.first_success or self.status.first_success,
                )
            case base.RoundSucceeded(round, first):
                stopped = max(round, self._stopping)
                succeeded = messages.MemberPhase.SUCCEEDED
                self._update(phase=succeeded, stopped_round=stopped, first_success=first)
                self._update(exclusion="")  # a node on which all workers succeed is fit
            case base.RestartRequested(why=why):
                self._update(restart_reason=messages.end_of(why))
            case base.ExclusionRequested(why=why, seconds=seconds):
                self.exclude(why, seconds)
            case base.ChangeAgreed(number=number):
                self._update(agreed_change=number)

    def probed(self, round: int, error: str) -> None:
        """Take the result of a probe; `error` is empty if it succeeded."""
        self._update(probed_round=round, probe_error=messages.end_of(error))

    # ------------------------------------------------------------------ changes

    def _start(self, order: base.StartRound) -> list[MemberEffect]:
        status, placement = self.status, order.placement
        if placement == status.placement:
            return []  # of another coordinator
        master = placement.master_addr, placement.master_port
        is_stale = placement.span.group_rank == 0 and master != (status.address, status.port)
        if placement.round <= status.round or is_stale:
            # The coordinator did not have the latest status of this member.  It sees by the
            # acknowledgement that the order was dropped.
            return []
        self._stopping = -1
        self._refused_because = ""
        self._update(
            phase=messages.MemberPhase.RUNNING,
            placement=placement,
            moves=0,
            probed_round=-1,
            probe_error="",
            failures=(),
            is_permanent=False,
            permanent_reason="",
            exit_code=1,
            runtime=0.0,
            first_success=None,
            has_progress=False,
            members_done=0,
            peers_finished=0,
            pending_restart=None,
            is_change_pending=False,
            change=-1,
            agreed_change=-1,
            restart_reason="",
        )
        if not self.is_standing_by:
            return [order]
        self.is_standing_by = False
        promoted = StandbyPromoted(round=placement.round, group_rank=placement.span.group_rank)
        return [promoted, order]

    def _note_peers(self, done: messages.MembersDone) -> list[MemberEffect]:
        if done.round != self.status.round or done.workers <= self.status.peers_finished:
            return []
        self._update(peers_finished=done.workers)
        return [base.PeersFinished(done.round, done.workers, done.ago)]

    def _stop(self, round: int, why: str) -> list[MemberEffect]:
        if round < self.status.round:
            return []
        self._stopping = max(round, self._stopping)
        if self.status.is_busy or self.has_succeeded:
            return [base.StopRound(self.status.round, why)]
        self._update(stopped_round=max(round, self.status.stopped_round))
        return []

    def _update(self, **changes: object) -> None:
        serial = self.status.serial + 1
        self.status = replace(self.status, serial=serial, acked=self._acked, **changes)
