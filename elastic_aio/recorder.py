"""RunRecorder: records a run while it goes on.  An idle job costs it nothing."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from msgspec.structs import asdict, replace

from elastic_aio._version import __version__
from elastic_aio.agent.agent import Agent, driver_of
from elastic_aio.aio import EventReader, cancel_and_wait, create_task, run_in_thread, run_shielded
from elastic_aio.events import AttemptFailed, Event, JobFinished
from elastic_aio.outcome import JobState, LaunchResult
from elastic_aio.record import JobRecord, RecordFiles, without_secrets
from elastic_aio.report import format_failure

_FAILURES_MAX: Final = 20
_WORDS_MAX: Final = 1_000
_BATCH_MAX: Final = 1_000
_BATCH_DELAYS: Final = 5  # of a job that is restarted again and again
_FIRST_DELAY: Final = 0.1  # part of the delay: a launcher that is killed early has a record too


class RunRecorder:
    """Records runs for `aio-elastic why` and others: a context manager, and a listener.

    ::

        async with RunRecorder() as recorder:
            await launch(spec, listeners=[recorder])

    The record is in the run's directory below `LogSpec.log_dir`; without one it is among the last
    50 runs in `$XDG_STATE_HOME/elastic_aio/runs`.  Events are written in a thread once none has
    come for a while (at first a tenth of it), or some have waited for five times as long.  If they
    cannot be written, or a file system blocks, the job goes on.
    """

    def __init__(self, *, delay: float = 1.0, patience: float = 2.0) -> None:
        """Prepare; nothing is written before the job has begun.

        Args:
            delay: seconds without an event after which events are written.
            patience: seconds for the last files, once the job is over.
        """
        self.problem = ""
        """Why the record in the run's own directory is not complete; empty if it is."""
        self._delay = delay
        self._patience = patience
        self._runs: list[_Run] = []

    def __repr__(self) -> str:
        return f"<RunRecorder: {self._runs}>"

    def use_agent(self, source: Callable[[], Agent | None]) -> None:
        """Record the run of an agent, from its first event on."""
        if source() is not None:
            self._runs = [run for run in self._runs if not run.recording.done()]
            self._runs.append(_Run(source, self._delay, self._note_problem))

    def _note_problem(self, problem: str) -> None:
        self.problem = problem or self.problem

    def __call__(self, event: Event) -> None:
        """Keep the agent of a job that is over; the events come from the agent itself."""
        if isinstance(event, JobFinished):
            for run in self._runs:
                run.keep_ended()

    async def __aenter__(self) -> RunRecorder:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Wait until the record is complete, for `patience` seconds at most."""
        if recordings := [run.recording for run in self._runs]:
            await run_shielded(partial(self._close, recordings))

    async def _close(self, recordings: list[asyncio.Task[None]]) -> None:
        _, pending = await asyncio.wait(recordings, timeout=self._patience)
        if pending:
            self.problem = f"it takes more than {self._patience:g} s"
        await cancel_and_wait(recordings)


class _Run:
    """A run that is recorded; `recording` ends when its record is complete."""

    def __init__(
        self, source: Callable[[], Agent | None], delay: float, on_problem: Callable[[str], None]
    ) -> None:
        self._source = source
        self._delay = delay
        self._on_problem = on_problem
        self._failures: deque[str] = deque(maxlen=_FAILURES_MAX)
        agent = source()
        assert agent is not None, "the caller has it"
        own = agent.status(usage=False).log_dir if agent.spec.logs.log_dir else None
        work = self._record(agent.events(), RecordFiles(own))
        self.recording = create_task(work, name="record a run")

    def keep_ended(self) -> None:
        """Keep the agent, if its job is over: its last status is to be written."""
        agent = self._source()
        if agent is not None and agent.status(usage=False).has_ended:
            self._source = lambda: agent

    async def _record(self, events: EventReader[Event], files: RecordFiles) -> None:
        loop, delay = asyncio.get_running_loop(), self._delay * _FIRST_DELAY
        async for event in events:
            added, last = [event], loop.time() + _BATCH_DELAYS * delay
            with suppress(TimeoutError, StopAsyncIteration):
                while len(added) < _BATCH_MAX and not isinstance(added[-1], JobFinished):
                    async with asyncio.timeout_at(min(loop.time() + delay, last)):
                        added.append(await anext(events))
            delay = self._delay
            self._failures.extend(one.sentence for one in added if isinstance(one, AttemptFailed))
            if (agent := self._source()) is None:
                return
            record, result = self._status(agent, added[-1]), driver_of(agent).result
            write = partial(_write, files, record, added, result, agent.spec.name)
            del agent  # while nothing happens: an agent that is dropped ends its job
            await run_in_thread(write, daemon=True)
            self._on_problem(files.problem)

    def _status(self, agent: Agent, last: Event) -> JobRecord:
        end = last if isinstance(last, JobFinished) else None
        variables = [f"{name}={os.environ[name]}" for name in os.environ if name[:4] == "PET_"]
        cwd = ""
        with suppress(OSError):  # it was removed
            cwd = os.getcwd()
        return JobRecord(
            **asdict(agent.status(usage=False)),
            version=__version__,
            command=without_secrets([*variables, *sys.orig_argv[:_WORDS_MAX]]),
            cwd=cwd,
            written_at=time.time(),
            ended_at=None if end is None else end.time,
            exit_code=None if end is None else end.exit_code,
            failures=tuple(self._failures),
        )


def _write(
    files: RecordFiles,
    record: JobRecord,
    added: list[Event],
    result: LaunchResult | None,
    name: str,
) -> None:
    """Write the record, and after the end of the job the report that the command prints."""
    report = ""
    if result is not None:
        record = replace(record, log_dir=result.log_dir)
        has_failed = result.state is JobState.FAILED  # not stopped before its restart
        if has_failed and result.failures and result.failures[0].pid is not None:
            report = f"{format_failure(result, name)}\n"
    files.write(record, added, report)
