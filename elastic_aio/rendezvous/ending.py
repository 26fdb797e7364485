"""The end of a job: the same for everybody who took part."""

from __future__ import annotations

from msgspec.structs import replace

from elastic_aio.events import JobFinished
from elastic_aio.rendezvous.base import Conclude, Ending
from elastic_aio.rendezvous.job import Job, Phase
from elastic_aio.rendezvous.tickets import bounded

__all__ = ["end", "say_goodbye"]


def end(job: Job, ending: Ending) -> None:
    """End the job, for all that are here."""
    ending = replace(ending, restarts=job.book.restarts, failures=bounded(ending.failures))
    job.phase = Phase.ENDING
    job.ending = ending
    for entry in job.fit():
        entry.was_told_end = True
        job.desk.send(entry, Conclude(ending))
    job.desk.publish(
        JobFinished(
            attempt=max(0, job.attempt),
            state=ending.state,
            why=ending.why,
            exit_code=ending.exit_code,
            duration=job.clock.now - job.created_at,
            restarts=ending.restarts,
        )
    )


def say_goodbye(job: Job) -> None:
    """Tell those who took part and were away; whoever is new begins another job later."""
    if job.ending is None:
        return
    for entry in job.fit():
        took_part = entry.ticket.held is not None or entry.ticket.seen > (0, 0)
        if took_part and not entry.was_told_end:
            entry.was_told_end = True
            job.desk.send(entry, Conclude(job.ending))
