"""A round runs: it fails, succeeds, loses members, or takes in newcomers."""

from __future__ import annotations

from elastic_aio.errors import counted
from elastic_aio.outcome import JobState
from elastic_aio.rendezvous.base import Ending, Halt
from elastic_aio.rendezvous.ending import end
from elastic_aio.rendezvous.forming import form
from elastic_aio.rendezvous.job import NAMES_MAX, Job, Phase
from elastic_aio.rendezvous.judging import halt
from elastic_aio.rendezvous.roll import Entry
from elastic_aio.rendezvous.tickets import Departed, Prepare, StandBy

__all__ = ["watch"]

_BURST_S = 0.2
"""How long newcomers that are ready wait for others that came with them."""
_COOL_DOWN_S = 5.0
"""After how long a newcomer that could not reach the others may try again."""


def watch(job: Job) -> None:
    """Look what has become of the round."""
    _seat_again(job)
    present = job.present()
    culprit = next(filter(job.has_failed, present), None)
    if culprit is not None:
        job.halting_why = f"a worker on {culprit.name} has failed"
        job.phase = Phase.HALTING
        return
    for entry in present:
        if job.has_ended(entry):
            job.note(f"the workers of {entry.name} were stopped")
        elif job.is_astray(entry):
            job.note(f"{entry.name} did not take its place")
    succeeded = {entry.member for entry in present if job.has_succeeded(entry)} | job.done
    gone = job.departed + sum(member not in job.roll for member in job.done)
    for entry in filter(job.holds, present):
        if entry.ticket.departed != gone:
            job.desk.send(entry, Departed(job.round, gone))
    if job.whys:
        _mend(job, present)
    elif len(succeeded) == len(job.seats):
        end(job, Ending(JobState.SUCCEEDED, "all workers have finished", 0))
    else:
        _grow(job, present, is_closing=bool(succeeded or job.departed))


def _seat_again(job: Job) -> None:
    """Give those their places back who were only thought to have departed."""
    for entry in job.outsiders():
        held = entry.ticket.held
        if job.departed and held is not None and job.holds(entry):
            job.departed -= 1
            job.seats[entry.member] = held
            job.names[entry.member] = entry.name


def _mend(job: Job, present: list[Entry]) -> None:
    """Form another round of those who are left, or let them wait for others."""
    others = [one for one in job.outsiders() if not one.ticket.is_busy and not one.refused]
    if len(present) + len(others) >= job.rules.minimum:
        form(job, [*present, *others])
        return
    job.cause = job.cause_of_next()
    here = counted(len(present), "node")
    lost = "; ".join(list(job.whys)[:NAMES_MAX])
    job.halting_why = f"{lost}: only {here} of {job.rules.wanted} left"
    halt(job)
    job.wait_for_nodes()


# ------------------------------------------------------------------ newcomers


def _grow(job: Job, present: list[Entry], *, is_closing: bool) -> None:
    """Let newcomers prove that they reach the others, and take in those who do."""
    free = 0 if is_closing else job.rules.maximum - len(job.seats)
    ready = _prove(job, present, free)
    if not ready:
        job.ready_since = None
        return
    if job.ready_since is None:
        job.ready_since = job.clock.now
    if len(ready) < free and job.clock.wait_until(job.ready_since + _BURST_S):
        return
    names = ", ".join(entry.name for entry in ready[:NAMES_MAX])
    form(job, [*present, *ready], f"{names} joined")


def _prove(job: Job, present: list[Entry], free: int) -> list[Entry]:
    """Return the newcomers that reach the others; let as many as there is room for try."""
    lead = next((one for one in present if not job.seats[one.member].span.group_rank), None)
    number = job.next_round
    ready: list[Entry] = []
    trying = 0
    for entry in job.outsiders():
        if entry.ticket.is_busy:
            why = "the others have formed another round meanwhile"
            job.desk.send(entry, Halt(entry.ticket.round, why))
        elif lead is None or len(ready) + trying >= free:
            job.desk.send(entry, StandBy(job.round, job.rules.maximum))
        elif entry.ticket.reached != number:
            trying += 1
            job.desk.send(entry, Prepare(number, lead.ticket.address, lead.ticket.port))
        elif not entry.ticket.trouble:
            entry.refused = ""
            ready.append(entry)
        else:
            _cool_down(job, entry, Prepare(number, lead.ticket.address, lead.ticket.port))
    return ready


def _cool_down(job: Job, entry: Entry, prepare: Prepare) -> None:
    """Let a newcomer that does not reach the others try again, but not at once."""
    if not entry.refused:
        job.refuse(entry, f"it does not reach the others: {entry.ticket.trouble}")
    if not job.clock.wait_until(entry.refused_at + _COOL_DOWN_S):
        entry.refused_at = job.clock.now
        job.clock.wait_until(entry.refused_at + _COOL_DOWN_S)
        job.desk.insist(entry, prepare)
