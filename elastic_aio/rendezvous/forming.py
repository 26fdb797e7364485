"""Rounds are formed: who waits, for how long, and who gets which place."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from elastic_aio.outcome import JobState
from elastic_aio.ranks import NodeSize, assign_spans
from elastic_aio.rendezvous.base import RENDEZVOUS_FAILED, Begin, Cause, Ending, Halt, Placement
from elastic_aio.rendezvous.bulletin import follows, formed, forming
from elastic_aio.rendezvous.ending import end
from elastic_aio.rendezvous.job import NAMES_MAX, Job, Phase
from elastic_aio.rendezvous.roll import Entry
from elastic_aio.rendezvous.seats import Newcomer, assign_seats
from elastic_aio.rendezvous.tickets import Gathering, Stay

__all__ = ["form", "form_when_possible"]

_UPDATE_S = 1.0
"""How often, at most, those who wait are told who has come meanwhile."""
_REPEAT_S = 15.0
"""How often they are told although nothing has changed."""


def form_when_possible(job: Job) -> None:
    """Form a round as soon as there are enough, and full or no longer waited for."""
    here = job.fit()
    rules, waiting = job.rules, job.waiting
    if job.round < 0 and any(entry.ticket.held is not None for entry in here):
        job.phase = Phase.ADOPTING
        waiting.since = job.clock.now
        return
    if len(here) < rules.minimum:
        waiting.enough_since = None
        until = waiting.since + rules.join_timeout
        if job.clock.wait_until(until):
            _wait(job, here, until)
        else:
            _give_up(job)
        return
    if waiting.enough_since is None:
        waiting.enough_since = job.clock.now
    until = waiting.enough_since + rules.last_call_timeout
    if len(here) < rules.maximum and job.round < 0 and job.clock.wait_until(until):
        _wait(job, here, until)
        return
    form(job, here)


def form(job: Job, candidates: Iterable[Entry], why: str = "") -> None:
    """Give places to as many as may have one; those in their places come first.

    Nothing happens while the fresh port of the first node is not known: its ticket is
    on its way, and with it the next call.  Where all rounds share a store, the former
    one is ended first.
    """
    candidates = list(candidates)
    if job.rules.is_shared and not all(map(job.is_quiet, candidates)):
        _end_former(job, candidates, why)
        return
    here = sorted(candidates, key=lambda entry: _precedence(job, entry))[: job.rules.maximum]
    order = _seated(job, here)
    lead = order[0]
    former = job.seats.get(lead.member)
    if former is not None and not former.span.group_rank and job.is_on_its_way(lead):
        return
    job.heed()
    cause = job.cause_of_next(why)
    if cause is not None:
        if cause.root is not None:
            job.count_restart(cause.restarts)
        cause = replace(cause, attempt=job.attempt + 1, restarts=job.book.restarts)
    placed = _placed(job, order, cause)
    job.take_seats(placed)
    for entry in order:
        job.desk.send(entry, Begin(placed[entry.member], cause))
    first = placed[lead.member]
    if cause is not None:
        job.desk.publish(follows(cause, first))
    job.desk.publish(formed(first, group_rank=-1))


def _end_former(job: Job, here: list[Entry], why: str) -> None:
    """Stop what would write into the store beside the workers of the next round."""
    job.cause = job.cause_of_next(why)
    said = "another round is to begin" if job.cause is None else job.cause.why
    for entry in here:
        job.desk.send(entry, Halt(max(job.round, entry.ticket.round), said))
    if job.phase is not Phase.FORMING:
        job.wait_for_nodes()


def _precedence(job: Job, entry: Entry) -> tuple[bool, bool, int]:
    return (entry.member not in job.seats, not entry.ticket.is_host, entry.arrival)


def _seated(job: Job, here: list[Entry]) -> list[Entry]:
    """Return them by group rank."""
    incumbents = {
        one.member: job.seats[one.member].span.group_rank for one in here if one.member in job.seats
    }
    newcomers = [Newcomer(one.member, _wish(one)) for one in here if one.member not in incumbents]
    return [job.roll[member] for member in assign_seats(incumbents, newcomers)]


def _wish(entry: Entry) -> int | None:
    """Return what a newcomer asked for, or what it had when it was here before."""
    wish, held = entry.ticket.wish, entry.ticket.held
    return held.span.group_rank if wish is None and held is not None else wish


def _placed(job: Job, order: list[Entry], cause: Cause | None) -> dict[str, Placement]:
    lead = order[0].ticket
    spans = assign_spans([NodeSize(one.ticket.card.role, one.ticket.card.nproc) for one in order])
    number = job.next_round
    changes = job.changes + (cause is not None and cause.root is None)
    return {
        one.member: Placement(
            round=number,
            origin=f"{job.desk.epoch}.{job.name}",
            attempt=job.attempt + 1,
            restarts=job.book.restarts,
            changes=changes,
            span=span,
            master_addr=lead.address,
            master_port=lead.port,
        )
        for one, span in zip(order, spans, strict=True)
    }


# ------------------------------------------------------------------- waiting


def _wait(job: Job, here: list[Entry], until: float) -> None:
    """Let nobody run alone meanwhile, and tell those who wait who has come."""
    for entry in here:
        if entry.ticket.is_busy:
            has_place = entry.member in job.seats
            why = job.halting_why if has_place else "the nodes wait for others"
            job.desk.send(entry, Halt(entry.ticket.round, why))
    waiting, clock = job.waiting, job.clock
    gathering = _gathering(job, here)
    pause = _REPEAT_S if gathering == waiting.told else _UPDATE_S
    if clock.wait_until(waiting.told_at + pause):
        return
    waiting.told, waiting.told_at = gathering, clock.now
    clock.wait_until(clock.now + _REPEAT_S)
    shown = replace(gathering, time_left=round(until - clock.now, 1))
    for entry in here:
        if not entry.ticket.is_busy:
            job.desk.send(entry, Stay(shown))
    job.desk.publish(forming(shown))


def _gathering(job: Job, here: list[Entry]) -> Gathering:
    missing = [name for member, name in job.names.items() if member not in job.roll]
    if job.rules.is_ranked:
        taken = {entry.ticket.wish for entry in here}
        missing = [f"rank {rank}" for rank in range(job.rules.maximum) if rank not in taken]
    refused = [f"{one.name}: {one.refused}" for one in job.roll if one.refused]
    return Gathering(
        job.next_round,
        len(here),
        job.rules.minimum,
        job.rules.maximum,
        tuple(entry.name for entry in here[:NAMES_MAX]),
        tuple(missing[:NAMES_MAX]),
        tuple(refused[:NAMES_MAX]),
    )


def _give_up(job: Job) -> None:
    gathering = _gathering(job, job.fit())
    said = f"only {gathering.joined} of {job.rules.wanted} nodes came together"
    if gathering.present:
        said += f" ({', '.join(gathering.present)})"
    if gathering.missing:
        said += f"; missing: {', '.join(gathering.missing)}"
    if gathering.refused:
        said += f"; refused: {'; '.join(gathering.refused)}"
    said += f"; waited {job.rules.join_timeout:g} s (join_timeout)"
    end(job, Ending(JobState.FAILED, said, RENDEZVOUS_FAILED, is_rendezvous=True))
