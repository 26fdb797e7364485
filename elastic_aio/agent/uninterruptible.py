"""Workers in an uninterruptible system call (state D of proc_pid_status(5)) for too long.

Such a call waits for a device or a file server, and no signal ends it.  The worker holds
what another attempt would need, so the job fails.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from elastic_aio.agent.failures import WorkerRecord
from elastic_aio.aio import cancel_and_wait, create_task
from elastic_aio.outcome import ExitStatus, Failure
from elastic_aio.process.proc import read_status

_LOOKS: Final = 8
"""How often a worker is looked at within the time that it may hang."""


class StuckWatch:
    """Finds the first worker that hangs; must be closed.

    Attributes:
        failure: the failure of that worker; None if none hangs.
    """

    def __init__(
        self,
        host: str,
        on_stuck: Callable[[Failure], None],
        examine: Callable[[str], Awaitable[object]],
    ) -> None:
        """Prepare.

        Args:
            host: name of this host.
            on_stuck: called once with the failure.
            examine: awaited before that, with the reason; may add notes to the worker.
        """
        self.failure: Failure | None = None
        self._host = host
        self._on_stuck = on_stuck
        self._examine = examine
        self._task: asyncio.Task[None] | None = None

    def start(self, records: Mapping[int, WorkerRecord], timeout: float) -> None:
        """Watch the workers that have been started, for calls of `timeout` seconds."""
        self._task = create_task(self._run(records, timeout), name="watch for state D")

    async def aclose(self) -> None:
        """End the watch.  Idempotent; safe to call again after cancellation."""
        if self._task is not None:
            await cancel_and_wait([self._task])

    async def _run(self, records: Mapping[int, WorkerRecord], timeout: float) -> None:
        waits: dict[int, tuple[float, list[bytes]]] = {}
        while True:
            now = time.monotonic()
            for record in [*records.values()]:
                wait = None if record.exit is not None else _uninterruptible_wait(record.pid)
                since, former = waits.get(record.pid, (now, None))
                if wait is None:
                    waits.pop(record.pid, None)
                elif wait != former:  # many short calls are no long one
                    waits[record.pid] = now, wait
                elif now - since >= timeout:
                    why = f"process {record.pid} is in an uninterruptible system call"
                    await self._examine(why)
                    self.failure = self._make_failure(record, timeout)
                    self._on_stuck(self.failure)
                    return
            # The kernel reports no such state to other processes.
            await asyncio.sleep(timeout / _LOOKS)

    def _make_failure(self, record: WorkerRecord, timeout: float) -> Failure:
        why = f"in an uninterruptible system call (state D) for {timeout:g} s"
        return Failure(
            rank=record.ranks.rank,
            local_rank=record.ranks.local_rank,
            pid=record.pid,
            host=self._host,
            status=ExitStatus(code=1),
            time=time.time(),
            order=-1,
            message=f"process {record.pid} has been {why}",
            notes=record.notes,
        )


def _uninterruptible_wait(pid: int) -> list[bytes] | None:
    """Return what is the same while the main thread is in one wait; None: in no state D.

    These are its counts of context switches, by which the kernel finds hung tasks too.
    """
    try:
        status = read_status(pid)
    except OSError:
        return None
    if not status.get(b"State", b"").startswith(b"D"):
        return None
    return [value for name, value in status.items() if name.endswith(b"voluntary_ctxt_switches")]
