"""The coordinator of a job: who takes part in which round, and what follows its end.

Pure: it is told what the tickets of the members say, what time it is (monotonic
seconds of whoever asks), and answers with orders.  It may be replaced by another one
at any moment, so it keeps nothing to itself that the members could not tell its
successor.

Rules
=====

* A round is a set of members with consecutive group ranks.  One round at a time: the
  next one has a higher number, and a member that takes a place in it first stops what
  it runs of an earlier one.
* The first round is formed when all nodes of the maximum have come, or when there are
  enough and the last call is over.  Later rounds are formed at once.
* When a member of the round leaves or is lost before its workers have succeeded, the
  others form another round with whoever waits; too few stop their workers and wait.
* Newcomers below the maximum have to prove first that they reach the others, who run
  on meanwhile; one that dies or fails in this is no more than a line.  Above the
  maximum, and while members have already succeeded, they stand by.
* A failure on any member halts the round everywhere.  When nothing of it is left, the
  restart policy judges the earliest failure, once for all; changes of the membership
  cost no restart.  A round that has lost a member is not judged: the loss is what the
  workers of the others failed of, long before anybody could know of it.
* When all members of the round have succeeded, or the policy grants no further
  attempt, or nodes are missing for too long, the job ends, for all in the same way.

Another coordinator
===================

* It adopts the newest round that anybody holds a place in.  When all of its members
  have come, it runs on as if nothing had happened; else, after a while, it is mended.
* Its predecessor may have given out places that were under way: whoever took one is
  astray for the successor, and another round brings all together.
* A restart that was granted and told to a member that is still there is not judged
  again, but its delay begins anew.  A failure whose traces are all gone (the node that
  saw it, and every node that was told of the restart) costs none.
* Of two that cannot hear of each other each may have a round.  When they meet again,
  one round is adopted and the members of the other are halted and taken in; numbers of
  rounds, attempts and restarts go on from the highest that anybody has seen.
* How many members left after their success is told to those who stay; what the last of
  them did while nobody coordinated is taken for a loss.

::

    phase     what happens                               next
    --------  -----------------------------------------  --------
    ADOPTING  nobody claims a place                      FORMING
              all of the newest round have come, or
              the time for it is over                    RUNNING
              one of them was told the end               ENDING
    FORMING   enough, and full, re-forming or last call
              over                                       RUNNING
              too few for the join timeout               ENDING
              a place is claimed before the first round  ADOPTING
    RUNNING   a member's worker has failed               HALTING
              all have succeeded                         ENDING
              a member is gone, enough remain            RUNNING
              a member is gone, too few remain           FORMING
              newcomers are ready                        RUNNING
              another round is due, and it would meet
              at the same store as this one              FORMING
    HALTING   nothing of the round is left               ASKING, or at once:
    ASKING    the user's callback has answered           PAUSING or ENDING
    HALTING   ... and nobody is left who saw a failure   FORMING
    PAUSING   the delay is over                          FORMING
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from elastic_aio.events import NodeJoined, NodeLeft, NodeLost
from elastic_aio.policy import Action
from elastic_aio.rendezvous.adopting import adopt
from elastic_aio.rendezvous.base import Ending
from elastic_aio.rendezvous.commands import Ask, Command, Publish, Raise, Rules, Send
from elastic_aio.rendezvous.ending import say_goodbye
from elastic_aio.rendezvous.forming import form_when_possible
from elastic_aio.rendezvous.job import Job, Phase
from elastic_aio.rendezvous.judging import heed_answer, judge_when_quiet, wait_out_delay
from elastic_aio.rendezvous.roll import Entry
from elastic_aio.rendezvous.running import watch
from elastic_aio.rendezvous.tickets import PROTOCOL, Refuse, Ticket
from elastic_aio.restarts import RestartBook
from elastic_aio.spec import NodeRange

__all__ = ["Ask", "Command", "Coordinator", "Phase", "Publish", "Raise", "Rules", "Send"]


class Coordinator:
    """Decides about the rounds of one job; performs nothing.

    Tell it everything that is known by `ticket` and `gone`, then let it `decide`, and
    again at the latest when `deadline` is due.
    """

    def __init__(
        self,
        rules: Rules,
        book: RestartBook,
        *,
        name: str,
        epoch: int,
        now: float,
        is_new_store: bool = True,
    ) -> None:
        """Begin without members.

        Args:
            rules: what the job wants.
            book: judges failures; told how many restarts there were.
            name: of the member that coordinates.
            epoch: higher than that of any coordinator before.
            now: monotonic seconds.
            is_new_store: whether the members have come to another store.
        """
        self._job = Job(rules, book, name, epoch, now, is_new_store)
        self._fresh: list[Entry] = []
        self._heard_epoch = epoch

    def __repr__(self) -> str:
        job = self._job
        return (
            f"<Coordinator {job.name} of epoch {self.epoch}: {job.phase.value},"
            f" round {job.round}, {len(job.roll)} members>"
        )

    # ------------------------------------------------------------ what is asked

    @property
    def phase(self) -> Phase:
        """Where it is."""
        return self._job.phase

    @property
    def epoch(self) -> int:
        """The epoch under which it gives orders."""
        return self._job.desk.epoch

    @property
    def round(self) -> int:
        """Number of the last round, -1 before the first."""
        return self._job.round

    @property
    def attempt(self) -> int:
        """Number of the last attempt, -1 before the first."""
        return self._job.attempt

    @property
    def ending(self) -> Ending | None:
        """How the job has ended, if it has."""
        return self._job.ending

    @property
    def is_over(self) -> bool:
        """Whether the job has ended and everybody who took part has left."""
        job = self._job
        return job.phase is Phase.ENDING and not any(one.was_told_end for one in job.roll)

    @property
    def deadline(self) -> float | None:
        """When `decide` has to be called though nothing happens."""
        return self._job.clock.deadline

    # ------------------------------------------------------------ what it hears

    def ticket(self, member: str, ticket: Ticket) -> None:
        """Take in the present ticket of a member."""
        job = self._job
        entry = job.roll.get(member)
        if entry is None:
            entry = job.roll.add(member, ticket)
            self._fresh.append(entry)
        elif ticket.serial <= entry.ticket.serial:
            return
        entry.ticket = ticket
        if job.desk.hear(entry):
            self._heard_epoch = max(ticket.epoch, self._heard_epoch)

    def gone(self, member: str, *, is_lost: bool) -> None:
        """Take in that a member has left, or is lost."""
        job = self._job
        entry = job.roll.remove(member)
        if entry is None:
            return
        job.desk.forget(member)
        if member in job.seats and job.has_succeeded(entry):
            job.done.add(member)
        elif member in job.seats:
            job.note(f"{entry.name} {'is lost' if is_lost else 'has left'}")
            job.has_lost = job.has_lost or is_lost
        if job.phase is Phase.ENDING:
            return  # the end of the job was the last that was to be told
        if is_lost:
            why = "it is not heard of any more"
            job.desk.publish(NodeLost(name=entry.name, member=member, why=why))
        else:
            why = "it has left by itself"
            job.desk.publish(NodeLeft(name=entry.name, member=member, why=why))

    def decided(self, attempt: int, action: Action) -> None:
        """Take in what the user's callback has answered."""
        self._answered(attempt, action)

    def decide_failed(self, attempt: int, why: str) -> None:
        """Take in that the user's callback has failed itself."""
        self._answered(attempt, why)

    def _answered(self, attempt: int, answer: Action | str) -> None:
        if self._job.phase is Phase.ASKING and attempt == self._job.attempt:
            self._job.answer = answer

    # --------------------------------------------------------- what it decides

    def decide(self, now: float) -> list[Command]:
        """Return what is to be done: at most one order for each member."""
        job = self._job
        job.clock.now = now
        if self._heard_epoch > job.desk.epoch:
            self._heard_epoch += 1
            job.desk.raise_epoch(self._heard_epoch, job.roll)
        self._welcome()
        while True:
            before = job.phase, job.round
            job.clock.deadline = None
            self._STEPS[job.phase](job)
            if before == (job.phase, job.round):
                return job.desk.take()

    def _welcome(self) -> None:
        """Announce those who have come, and refuse whoever can never take part."""
        job = self._job
        if job.phase is Phase.ADOPTING:
            # What the job wants is known when it is known whether it runs already.
            adopt(job)
        if job.phase in (Phase.ADOPTING, Phase.ENDING):
            return
        fresh, self._fresh = self._fresh, []
        for entry in fresh:
            if job.roll.get(entry.member) is not entry:
                continue
            card = entry.ticket.card
            job.desk.publish(
                NodeJoined(
                    name=card.name,
                    member=entry.member,
                    address=entry.ticket.address,
                    nproc=card.nproc,
                    role=card.role,
                )
            )
            if why := self._misfit(entry):
                entry.is_refused_for_good = True
                job.refuse(entry, why)
                job.desk.send(entry, Refuse(why))

    def _misfit(self, entry: Entry) -> str:
        """Say why a member can never take part; nothing if it can."""
        ticket, rules = entry.ticket, self._job.rules
        if ticket.protocol != PROTOCOL:
            return f"it speaks version {ticket.protocol} of the protocol, not {PROTOCOL}"
        if (ticket.minimum, ticket.maximum) != (rules.minimum, rules.maximum):
            theirs = NodeRange(ticket.minimum, ticket.maximum)
            return f"it was started with --nnodes {theirs}, the job with {rules.wanted}"
        if not rules.is_ranked or ticket.wish is None:
            return ""
        if not 0 <= ticket.wish < rules.maximum:
            return f"node rank {ticket.wish} is not below {rules.maximum}"
        for other in self._job.fit():
            if other.arrival < entry.arrival and other.ticket.wish == ticket.wish:
                return f"node rank {ticket.wish} is taken by {other.name}"
        return ""

    _STEPS: ClassVar[dict[Phase, Callable[[Job], None]]] = {
        Phase.ADOPTING: adopt,
        Phase.FORMING: form_when_possible,
        Phase.RUNNING: watch,
        Phase.HALTING: judge_when_quiet,
        Phase.ASKING: heed_answer,
        Phase.PAUSING: wait_out_delay,
        Phase.ENDING: say_goodbye,
    }
