"""What follows a failure: the round is halted, judged, and tried again or given up."""

from __future__ import annotations

from elastic_aio.events import AttemptFailed
from elastic_aio.outcome import JobState, root_cause_first
from elastic_aio.policy import Action
from elastic_aio.rendezvous.base import Cause, Ending, Halt, Pause
from elastic_aio.rendezvous.commands import Ask
from elastic_aio.rendezvous.ending import end
from elastic_aio.rendezvous.job import Job, Phase
from elastic_aio.rendezvous.tickets import sketched

__all__ = ["halt", "heed_answer", "judge_when_quiet", "wait_out_delay"]


def halt(job: Job) -> None:
    """Let all of the round stop, and what runs of another one in its place."""
    for entry in job.present():
        job.desk.send(entry, Halt(max(job.round, entry.ticket.round), job.halting_why))


def judge_when_quiet(job: Job) -> None:
    """Judge the round's failures once nothing of it is left."""
    halt(job)
    present = job.present()
    if not all(map(job.is_quiet, present)):
        return
    took_part = [one for one in present if job.holds(one)]
    job.failures = root_cause_first(failure for one in took_part for failure in one.ticket.failures)
    if job.failures:
        root = job.failures[0]
        job.desk.publish(AttemptFailed(attempt=job.attempt, root=root, failures=job.failures))
    final = next((one.ticket for one in took_part if one.ticket.is_final), None)
    granted = next(filter(None, map(job.granted, took_part)), None)
    if final is not None:
        _fail(job, final.final_why, final.exit_code)
    elif granted is not None:
        _restart(job, granted)
    elif job.has_lost or not job.failures:
        # Connections to a dead node's workers end before its lease does.
        if not job.whys:
            job.note("a node has failed and is gone")
        job.cause = job.cause_of_next()
        job.wait_for_nodes()
    elif job.rules.asks and not job.book.is_used_up:
        job.answer = None
        job.phase = Phase.ASKING
        job.desk.ask(Ask(job.attempt, job.failures[0]))
    else:
        _judge(job, Action.BY_POLICY)


def heed_answer(job: Job) -> None:
    """Do what the user's callback has answered, if it has."""
    match job.answer:
        case Action():
            _judge(job, job.answer)
        case str():
            _fail(job, job.answer)


def wait_out_delay(job: Job) -> None:
    """Let another round be formed once the delay is over."""
    if not job.clock.wait_until(job.not_before):
        job.wait_for_nodes()


def _judge(job: Job, action: Action) -> None:
    now = job.clock.now
    ran = max((one.ticket.ran for one in job.present() if job.holds(one)), default=0.0)
    verdict = job.book.judge(job.failures[0], action, ran, now)
    if not verdict.restart:
        _fail(job, verdict.why)
        return
    root = sketched(job.failures[0])
    _restart(job, Cause(job.attempt + 1, verdict.why, job.book.restarts + 1, verdict.delay, root))


def _restart(job: Job, cause: Cause) -> None:
    """Restart after the delay; who hears of it makes it known to a next coordinator.

    It is counted when it happens, so that a restart of which nobody has heard can be
    judged again.
    """
    job.cause = cause
    job.not_before = job.clock.now + cause.delay
    job.phase = Phase.PAUSING
    for entry in job.fit():
        job.desk.send(entry, Pause(cause))


def _fail(job: Job, why: str, exit_code: int | None = None) -> None:
    if exit_code is None:
        exit_code = job.failures[0].status.shell_code or 1
    end(job, Ending(JobState.FAILED, why, exit_code, failures=job.failures))
