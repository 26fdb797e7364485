"""The mutations: one line of the package that keeps a rule, and the same line without it."""

from __future__ import annotations

from typing import Final, NamedTuple

SEEDS: Final = "seeds"
"""Random scenarios catch it, with seeds that were not chosen for it."""

_RENDEZVOUS: Final = "tests/rendezvous/"
_COORDINATOR: Final = _RENDEZVOUS + "test_coordinator.py::"
_MEMBER: Final = _RENDEZVOUS + "test_member.py::"
_ELECTION: Final = _RENDEZVOUS + "test_election.py::"
_DETECTOR: Final = _RENDEZVOUS + "test_failure_detector.py::"
_SUCCESSORS: Final = _RENDEZVOUS + "test_successors.py::"
_DISCOVERY: Final = "tests/discovery/"
_ENDS: Final = _DISCOVERY + "test_run_ends.py::"
_STORE: Final = "tests/store/"
_KEYSPACE: Final = _STORE + "test_keyspace.py::"


class Mutation(NamedTuple):
    """One defect.

    Attributes:
        name: short and unique.
        file: below `elastic_aio/`.
        old: text that is there exactly once.
        new: what replaces it.
        rule: what it breaks.
        caught_by: `SEEDS`, or the node id of a test.
    """

    name: str
    file: str
    old: str
    new: str
    rule: str
    caught_by: str = SEEDS


MUTATIONS: Final = (
    # ------------------------------------------------- rendezvous: the coordinator
    Mutation(
        "order-not-resent",
        "rendezvous/members.py",
        "record.checks in _RESENT_AT and",
        "not record.checks and",
        "an order without an acknowledgement is sent again",
        _RENDEZVOUS + "test_outbox.py::test_an_order_that_was_lost_is_sent_again",
    ),
    Mutation(
        "lost-starter-not-stopped",
        "rendezvous/members.py",
        "if isinstance(record.sent, StartRound):  # it must",
        "if not record.sent:  # it must",
        "a member that counts as lost must not start its round later",
        _RENDEZVOUS + "test_outbox.py::test_a_lost_member_does_not_follow_its_last_order_later",
    ),
    Mutation(
        "unsynchronized-is-stopped",
        "rendezvous/members.py",
        "return self.first_sent is not None and self.status.acked >= self.first_sent",
        "return True",
        "a member may still obey a predecessor until it has seen an order of this coordinator",
        _COORDINATOR + "test_a_round_waits_for_members_that_may_obey_a_predecessor",
    ),
    Mutation(
        "clock-offsets-ignored",
        "rendezvous/members.py",
        "least = min(one.offset_bound(now) for one in host)",
        "least = 0.0",
        "failures are ordered by the time at their own node",
        _RENDEZVOUS + "test_root_cause.py::test_a_status_that_is_late_does_not_change_the_order",
    ),
    Mutation(
        "no-fence-after-loss",
        "rendezvous/state.py",
        "self.fence(now + (settings.fence if is_lost else settings.heartbeat_timeout))",
        "pass",
        "no round begins while workers may live on a node that is gone",
        _COORDINATOR + "test_a_round_waits_for_the_workers_of_a_node_that_is_gone",
    ),
    Mutation(
        "open-round-is-stopped",
        "rendezvous/state.py",
        "is_open = is_placed and status.stopped_round < self.round.number",
        "is_open = False",
        "a member may start the workers of a round that it was just ordered to run",
    ),
    Mutation(
        "diverged-member-waited-for",
        "rendezvous/state.py",
        "if record.status.round >= self.round.number:\n            return True",
        "if record.status.round >= self.round.number:\n            return False",
        "a member in another round will never take its place in this one",
        _COORDINATOR + "test_a_diverged_member_is_taken_into_another_round",
    ),
    Mutation(
        "round-numbers-seen-ignored",
        "rendezvous/state.py",
        "return max(self.round.number, former, *seen) + 1",
        "return max(self.round.number, former) + 1",
        "numbers of rounds continue from the highest that a member has seen",
        _COORDINATOR + "test_a_diverged_member_is_taken_into_another_round",
    ),
    Mutation(
        "recorded-round-ignored",
        "rendezvous/state.py",
        "return max(self.round.number, former, *seen) + 1",
        "return max([self.round.number, *seen]) + 1",
        "numbers of rounds continue from the recorded one when all nodes are gone",
    ),
    Mutation(
        "round-not-recorded",
        "rendezvous/state.py",
        "if self._recorded != (self.round.number, is_open):",
        "if False:",
        "each round is recorded in the store",
    ),
    Mutation(
        "announced-restart-forgotten",
        "rendezvous/state.py",
        "return pending if is_next and self.has_placement(record) else None",
        "return None",
        "a restart that was announced is not decided again",
        _COORDINATOR + "test_an_announced_restart_is_not_decided_again",
    ),
    Mutation(
        "lost-member-not-charged",
        "rendezvous/state.py",
        "self.round.has_lost_member = self.round.has_lost_member or is_lost",
        "self.round.has_lost_member = False",
        "a round that loses a node counts against `node_losses`",
        _RENDEZVOUS + "test_node_losses.py",
    ),
    Mutation(
        "success-of-another-round",
        "rendezvous/state.py",
        "return record.status.phase is MemberPhase.SUCCEEDED and self.has_placement(record)",
        "return record.status.phase is MemberPhase.SUCCEEDED",
        "a success in a round that the others have replaced is none",
    ),
    Mutation(
        "admitted-without-check",
        "rendezvous/admission.py",
        "if (status.minimum, status.maximum) != (settings.minimum, settings.maximum):",
        "if False:",
        "nodes of one job have the same nnodes",
        _COORDINATOR + "test_a_node_with_other_nnodes_is_rejected",
    ),
    Mutation(
        "rank-holder-not-found",
        "rendezvous/admission.py",
        "        if holder is not record:\n",
        "        if False:\n",
        "one member holds a fixed rank",
        _COORDINATOR + "test_a_second_claimant_of_a_rank_is_refused",
    ),
    Mutation(
        "outcome-in-status-ignored",
        "rendezvous/formation.py",
        "(one.outcome for one in statuses if one.outcome is not None)",
        "(one.outcome for one in statuses if False)",
        "an outcome in any status wins over everything at recovery",
        _SUCCESSORS + "test_a_successor_does_not_decide_again_about_a_job_that_has_failed",
    ),
    Mutation(
        "oldest-round-recovered",
        "rendezvous/formation.py",
        "newest = max(one.round_id",
        "newest = min(one.round_id",
        "the newest round that a member reports is recovered",
        _SUCCESSORS + "test_the_newest_round_is_recovered",
    ),
    Mutation(
        "done-members-missing",
        "rendezvous/formation.py",
        "is_whole = len(held) + members_done >= size",
        "is_whole = len(held) >= size",
        "members that left after their success are not missing",
        _COORDINATOR + "test_a_successor_learns_how_many_members_are_done",
    ),
    Mutation(
        "missing-members-not-waited-for",
        "rendezvous/formation.py",
        "is_whole = len(held) + members_done >= size",
        "is_whole = True",
        "a round of which members are missing is not recovered as whole",
    ),
    Mutation(
        "fence-not-waited-for",
        "rendezvous/formation.py",
        "state.arm(max(state.fenced_until, _arrivals_until(state)))",
        "state.arm(_arrivals_until(state))",
        "a round begins when the fence is over",
        _COORDINATOR + "test_a_round_waits_for_the_workers_of_a_node_that_is_gone",
    ),
    Mutation(
        "arrivals-not-waited-for",
        "rendezvous/formation.py",
        "state.arm(max(state.fenced_until, _arrivals_until(state)))",
        "state.arm(state.fenced_until)",
        "members of a round of another store may come with their workers",
        _COORDINATOR + "test_a_round_waits_for_members_of_a_round_from_another_store",
    ),
    Mutation(
        "running-members-not-waited-for",
        "rendezvous/formation.py",
        "        if running or state.arm(",
        "        if state.arm(",
        "a round begins when all workers of the last one have stopped",
    ),
    Mutation(
        "attempts-begin-anew",
        "rendezvous/formation.py",
        "attempt = max(one.attempt for one in rounds) + 1",
        "attempt = state.round.attempt + 1",
        "numbers of attempts continue from the highest that there were",
    ),
    Mutation(
        "too-few-nodes",
        "rendezvous/formation.py",
        "if len(candidates) < settings.minimum:",
        "if not candidates:",
        "a round has the minimum of nodes",
    ),
    Mutation(
        "too-many-nodes",
        "rendezvous/formation.py",
        "candidates[: state.settings.maximum]",
        "candidates[:]",
        "a round has the maximum of nodes at most",
    ),
    Mutation(
        "ranks-not-kept",
        "rendezvous/formation.py",
        "if (current := state.round.placements.get(member)) is not None:",
        "if (current := state.round.placements.get('')) is not None:",
        "members of the last round keep their ranks",
    ),
    Mutation(
        "one-success-is-enough",
        "rendezvous/supervision.py",
        "elif succeeded == active:",
        "elif succeeded:",
        "the job has succeeded when all members have",
    ),
    Mutation(
        "failure-not-waited-for",
        "rendezvous/supervision.py",
        "    if not all(map(state.is_stopped, active)):\n        return\n",
        "",
        "the policy is consulted when all workers have stopped",
        _COORDINATOR + "test_the_policy_is_consulted_once_all_workers_are_stopped",
    ),
    Mutation(
        "done-members-forgotten",
        "rendezvous/supervision.py",
        "done = current.members_done + sum(map(state.has_succeeded, current.gone.values()))",
        "done = 0",
        "members learn how many have left after their success",
        _COORDINATOR + "test_a_successor_learns_how_many_members_are_done",
    ),
    Mutation(
        "returned-member-stays-done",
        "rendezvous/supervision.py",
        "            current.placements[record.member] = placement\n",
        "",
        "a member that was wrongly counted as done gets its placement back",
        _COORDINATOR + "test_a_returning_member_is_not_counted_as_done",
    ),
    Mutation(
        "joiner-without-probe",
        "rendezvous/supervision.py",
        "elif status.probed_round != number:",
        "elif False:",
        "a joiner probes the other nodes before it is taken in",
        _COORDINATOR + "test_joiners_probe_before_a_round_is_formed",
    ),
    Mutation(
        "joiner-after-success",
        "rendezvous/supervision.py",
        "is_closing=bool(succeeded or done)",
        "is_closing=False",
        "joiners stand by once a member has succeeded",
        _COORDINATOR + "test_joiners_stand_by_once_a_member_has_succeeded",
    ),
    Mutation(
        "lost-by-silence-is-kept",
        "rendezvous/coordinator.py",
        "        state.on_gone(record.member, now, is_lost=True, why=why)\n",
        "        pass\n",
        "a member that obeys no order counts as lost",
        _RENDEZVOUS + "test_outbox.py::test_a_member_that_acknowledges_nothing_is_lost",
    ),
    Mutation(
        "stop-not-ordered",
        "rendezvous/formation.py",
        "        if running:\n            _stop_previous(state, running, why)\n",
        "",
        "the members of the last round are ordered to stop",
    ),
    Mutation(
        "lost-budget",
        "rendezvous/supervision.py",
        "state.round.attempt + 1, state.budget.restarts + 1",
        "state.round.attempt + 1, state.budget.restarts",
        "a restart counts",
    ),
    Mutation(
        "end-for-the-placed-only",
        "rendezvous/state.py",
        "in self.admitted():\n            self.outbox.send(record, EndJob",
        "in self.active():\n            self.outbox.send(record, EndJob",
        "standby nodes get the outcome",
    ),
    Mutation(
        "outcomes-differ",
        "rendezvous/supervision.py",
        'JobOutcome(JobState.SUCCEEDED, "all workers have finished", 0)',
        'JobOutcome(JobState.FAILED, "all workers have finished", 1)',
        "a job whose workers have all succeeded has succeeded",
    ),
    Mutation(
        "failure-unnoticed",
        "rendezvous/supervision.py",
        "if failed is not None:",
        "if failed is not None and failed.rank_holder:",
        "a failure stops the round",
        _COORDINATOR + "test_a_failure_stops_the_round_and_is_followed_by_a_restart",
    ),
    Mutation(
        "change-unnoticed",
        "rendezvous/supervision.py",
        "if current.change_reasons or current.cause is not None:",
        "if current.cause is not None:",
        "a round that loses a member is replaced",
    ),
    Mutation(
        "status-without-lease",
        "rendezvous/session.py",
        "await lease.set(self._own_key, encode(status))",
        "await self._store.set(self._own_key, encode(status))",
        "the status of a member ends with its lease",
    ),
    Mutation(
        "no-stop-by-a-member",
        "rendezvous/member.py",
        "return [StopRound(self.status.round, why)]",
        "return []",
        "a member stops its workers when it is ordered to",
    ),
    # ------------------------------------------------------ rendezvous: a member
    Mutation(
        "deposed-leader-obeyed",
        "rendezvous/member.py",
        "order.term < self._term or",
        "False or",
        "orders of a former coordinator are dropped",
        _MEMBER + "test_orders_of_a_former_coordinator_are_dropped",
    ),
    Mutation(
        "older-round-started",
        "rendezvous/member.py",
        "if placement.round <= status.round or is_stale:",
        "if is_stale:",
        "a member takes newer rounds only",
        _MEMBER + "test_a_stale_start_order_is_acked_and_dropped",
    ),
    Mutation(
        "stale-port-started",
        "rendezvous/member.py",
        "if placement.round <= status.round or is_stale:",
        "if placement.round <= status.round:",
        "a placement with a port that is reserved no more is dropped",
        _MEMBER + "test_a_stale_start_order_is_acked_and_dropped",
    ),
    Mutation(
        "orders-compared-across-stores",
        "rendezvous/member.py",
        "if instance != self._instance:",
        "if not self._instance:",
        "each store counts its own terms",
    ),
    Mutation(
        "success-not-written",
        "rendezvous/member.py",
        "self._update(phase=MemberPhase.SUCCEEDED, stopped_round=stopped)",
        "self._update(stopped_round=stopped)",
        "a success is in the status",
    ),
    Mutation(
        "stop-of-an-earlier-round",
        "rendezvous/member.py",
        "if round < self.status.round:\n",
        "if False:\n",
        "an order to stop an earlier round does not stop this one",
        _MEMBER + "test_a_stop_of_an_earlier_round_is_dropped",
    ),
    Mutation(
        "workers-kept-without-store",
        "rendezvous/dynamic.py",
        "self._perform(self._member.isolate(why))",
        "pass",
        "a node without a store stops its workers before it is replaced",
    ),
    # --------------------------------- rendezvous: elections, records, detector
    Mutation(
        "term-not-counted",
        "rendezvous/election.py",
        'term = await self._located.store.add(f"{run_prefix(self._run_id)}/terms")',
        "term = 1",
        "a term is given once in the life of a store",
        _ELECTION + "test_terms_grow_and_are_given_once",
    ),
    Mutation(
        "former-record-is-a-leadership",
        "rendezvous/election.py",
        "self._member.name and present != self._record",
        "self._member.name and not present",
        "a member leads only by the record that it has written under its present lease",
        _ELECTION + "test_a_record_of_a_former_lease_is_replaced",
    ),
    Mutation(
        "deposed-leader-stays",
        "rendezvous/election.py",
        "            if present != self._record:\n",
        "            if present is None:\n",
        "a leader that is deposed ends",
        _SUCCESSORS + "test_a_leader_whose_record_is_replaced_leads_no_more",
    ),
    Mutation(
        "record-of-a-deposed-leader-wins",
        "rendezvous/coordinator_runner.py",
        "other.term < record.term",
        "other.term != record.term",
        "the record of a deposed leader never replaces that of a later term",
        _SUCCESSORS + "test_a_round_record_never_replaces_that_of_a_later_term",
    ),
    Mutation(
        "orders-of-the-departed-stay",
        "rendezvous/coordinator_runner.py",
        'deletes = [store.delete(f"o/{name}") for name in departed]',
        "deletes = []",
        "the orders for a member that has left are deleted",
    ),
    Mutation(
        "no-departure-is-a-loss",
        "rendezvous/coordinator_runner.py",
        "is_lost = change.kind is ChangeKind.EXPIRED or change.is_resync",
        "is_lost = False",
        "the end of a lease is a loss",
        _RENDEZVOUS + "test_dynamic.py::test_a_lost_node_is_replaced",
    ),
    Mutation(
        "silence-is-a-loss",
        "rendezvous/failure_detector.py",
        "        except OSError:  # a TimeoutError is one\n            return False\n",
        "        except OSError:  # a TimeoutError is one\n            return True\n",
        "a leader that does not answer has not gone",
        _SUCCESSORS + "test_a_leader_that_says_nothing_has_not_gone",
    ),
    Mutation(
        "deposed-detector-ends-leases",
        "rendezvous/failure_detector.py",
        "if await is_leader():",
        "if True:",
        "only the leader ends the leases of lost members",
        _DETECTOR + "test_a_connection_that_ends_without_a_word_is_a_loss",
    ),
    Mutation(
        "goodbye-is-a-loss",
        "rendezvous/failure_detector.py",
        "if change.kind == replies.CHANGE_EXPIRED:",
        "if change.kind != replies.CHANGE_SET:",
        "a member that goes to another leader is not lost",
        _DETECTOR + "test_a_member_that_goes_to_another_leader_is_no_loss",
    ),
    # -------------------------------------------------------------- discovery
    Mutation(
        "former-end-for-a-mover",
        "discovery/keys.py",
        "record.job == job or not (job or reuse)",
        "record.job == job or not reuse",
        "the end of a former job is not that of a node which takes part in another",
        _ENDS + "test_a_node_of_another_job_is_not_given_the_end_of_a_former_one",
    ),
    Mutation(
        "ended-run-begins-again",
        "discovery/keys.py",
        "record.job == job or not (job or reuse)",
        "record.job == job",
        "a late node reads the end of the run",
        _ENDS + "test_a_late_node_reads_the_end",
    ),
    Mutation(
        "unknown-endpoint-passed-over",
        "discovery/choice.py",
        "if EndpointState.UNKNOWN in rivals and elapsed < grace:",
        "if False:",
        "an endpoint of unknown state is waited for",
        _DISCOVERY + "test_choice.py",
    ),
    Mutation(
        "active-run-not-preferred",
        "discovery/choice.py",
        "best = _first(states, EndpointState.ACTIVE_RUN)",
        "best = None",
        "the store with the active run is used",
        _DISCOVERY + "test_choice.py",
    ),
    Mutation(
        "later-store-does-not-yield",
        "discovery/locator.py",
        "                if look.result():\n",
        "                if False:\n",
        "the host of a later store yields to an earlier one",
        _DISCOVERY + "test_locator.py::test_a_later_host_yields_to_an_earlier_one",
    ),
    Mutation(
        "host-yields-to-itself",
        "discovery/locator.py",
        "return handshake.has_run and is_other",
        "return handshake.has_run",
        "a host does not yield to its own store",
        _DISCOVERY + "test_locator.py::test_a_host_does_not_yield_to_itself",
    ),
    Mutation(
        "suspension-counts",
        "discovery/search.py",
        "self._uncounted += max(0.0, now - latest)",
        "pass",
        "a suspension does not count as a search",
        _DISCOVERY + "test_locator.py::test_a_suspended_host_serves_no_later_endpoint",
    ),
    # ------------------------------------------------------------------ the store
    Mutation(
        "former-connection-writes",
        "store/keyspace.py",
        "if lease.holder is not client:",
        "if False:",
        "a former connection of a lease writes nothing",
        _KEYSPACE + "test_a_former_connection_of_a_lease_writes_nothing",
    ),
    Mutation(
        "compare-set-always-stores",
        "store/keyspace.py",
        "return (expected if current is None else current), False",
        "pass",
        "a compare-and-set that does not match stores nothing",
    ),
    Mutation(
        "expired-is-deleted",
        "store/keyspace.py",
        "lambda key: self._remove(key, CHANGE_EXPIRED)",
        "lambda key: self._remove(key, CHANGE_DELETED)",
        "an expired key differs from a deleted one",
        _KEYSPACE + "test_a_lease_expires",
    ),
    Mutation(
        "resumed-lease-expires",
        "store/lease_table.py",
        "            if lease.deadline() > now:\n",
        "            if False:\n",
        "a lease lives while its holder sends",
    ),
    Mutation(
        "lease-never-expires",
        "store/lease_table.py",
        "else self.holder.last_received_at + self.ttl",
        "else self.holder.last_received_at + 1e9",
        "the lease of a silent holder ends",
    ),
    Mutation(
        "pause-expires-leases",
        "store/lease_table.py",
        "holder.last_received_at = min(now, holder.last_received_at + seconds)",
        "pass",
        "a store that was suspended expires no lease by that",
        _STORE + "test_liveness.py::test_a_pause_extends_leases_by_itself_only",
    ),
    Mutation(
        "lease-does-not-linger",
        "store/lease_table.py",
        "if lease.linger <= 0:",
        "if True:",
        "a lease lingers after its connection has ended",
        _KEYSPACE + "test_a_lease_that_lingers_can_be_resumed",
    ),
    Mutation(
        "watch-loses-a-change",
        "store/watch_table.py",
        "if change.revision <= last_revision:",
        "if change.revision <= last_revision + 1:",
        "a continued watch has every change",
        _KEYSPACE + "test_a_watch_continues_after_its_last_revision",
    ),
    Mutation(
        "watch-has-a-gap",
        "store/watch_table.py",
        "if not max(target.since, self._dropped_revision) <= last_revision <= self._revision:",
        "if not target.since <= last_revision <= self._revision:",
        "a watch beyond the history begins with a whole snapshot",
        _KEYSPACE + "test_a_watch_beyond_the_history_restarts",
    ),
    Mutation(
        "given-up-writes-arrive",
        "store/sockets.py",
        "sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)",
        "pass",
        "a write of a connection that was given up does not arrive",
        _STORE
        + "test_sockets.py::test_the_kernel_drops_what_a_connection_that_is_given_up_has_not_sent",
    ),
    Mutation(
        "gone-client-pops",
        "store/wait_table.py",
        "if waiter.mode == VALUES or waiter.client.is_gone:",
        "if waiter.mode == VALUES:",
        "a client that is gone takes no item",
        _KEYSPACE + "test_a_client_that_is_gone_takes_no_item",
    ),
)
