"""A new coordinator finds out whether a round ran before its time."""

from __future__ import annotations

from msgspec.structs import replace

from elastic_aio.errors import counted
from elastic_aio.rendezvous.ending import end
from elastic_aio.rendezvous.job import Job

__all__ = ["adopt"]


def adopt(job: Job) -> None:
    """Go on with the newest round that somebody here holds a place in, if there is one."""
    held = {entry.member: one for entry in job.fit() if (one := entry.ticket.held) is not None}
    if not held:
        job.wait_for_nodes()
        return
    newest = max((one.round, one.origin) for one in held.values())
    held = {member: one for member, one in held.items() if (one.round, one.origin) == newest}
    size = next(iter(held.values())).span.group_world_size
    tickets = [job.roll[member].ticket for member in held]
    ending = next((one.ending for one in tickets if one.ending is not None), None)
    departed = max(one.departed for one in tickets)
    is_whole = len(held) + departed >= size
    if not is_whole and ending is None:
        adoption = job.waiting.since + job.rules.adoption
        if job.clock.wait_until(adoption):
            return
    # The job is as those who run it were told, even if this node was told otherwise.
    job.rules = replace(job.rules, minimum=tickets[0].minimum, maximum=tickets[0].maximum)
    job.take_seats(held)
    job.departed = departed
    job.resume(max(one.restarts for one in held.values()))
    if ending is not None:
        end(job, ending)
    elif not is_whole:
        job.has_lost = True
        job.note(f"{counted(size - len(held) - departed, 'node')} did not come back")
    elif job.is_new_store and not job.rules.keeps_workers:
        job.note("the nodes meet at another store")
