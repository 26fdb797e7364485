"""Removes the logs of earlier attempts and runs, beyond those that the job keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from elastic_aio.aio import run_in_thread
from elastic_aio.events import Event, LogsNotRemoved
from elastic_aio.logs.files import RunDirectory
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.text import error_reason

_RUNS_S: Final = 10.0
"""Seconds for which the end of a job waits for their removal: a file server may be gone."""


async def remove_old_attempts(spec: LaunchSpec, directory: RunDirectory, attempt: int) -> None:
    """Remove the directories of the attempts that are not kept, before one begins."""
    if (kept := spec.logs.keep_attempts) is not None:
        await run_in_thread(directory.remove_attempts, attempt - kept)


async def remove_old_runs(
    spec: LaunchSpec, directory: RunDirectory, publish: Callable[[Event], None]
) -> None:
    """Remove the directories of the runs that are not kept, when this one ends.

    A node that has not met the others does not know which of them are this run's: it removes none.

    Cancellation: leaves the thread that removes them running; it ends with the program.
    """
    kept = spec.logs.keep_runs
    if kept is None or not (directory.job or spec.nnodes.maximum == 1):
        return
    try:
        async with asyncio.timeout(_RUNS_S):
            await run_in_thread(directory.remove_old_runs, kept, daemon=True)
    except TimeoutError:
        publish(LogsNotRemoved(why=f"it has taken more than {_RUNS_S:g} s"))
    except OSError as error:
        publish(LogsNotRemoved(why=error_reason(error)))
