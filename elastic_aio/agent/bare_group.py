"""A worker group without a restart policy: one attempt, stopped when its owner says so.

`multiprocessing` is built on it.  It has no state machine and publishes no events.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence

from elastic_aio.agent.failures import WorkerRecord
from elastic_aio.agent.preflight import check_main_guard, check_sigchld, hostname
from elastic_aio.agent.program import PerRankOverrides
from elastic_aio.agent.runtime import LocalRuntime
from elastic_aio.agent.worker_group import WorkerGroup
from elastic_aio.aio import Notifier, run_shielded
from elastic_aio.outcome import Failure
from elastic_aio.process.base import Spawner
from elastic_aio.process.calls import CallResult
from elastic_aio.process.command import command_spawner
from elastic_aio.ranks import NodeSize, assign_node_ranks
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.stop import StopPlan


class BareGroup:
    """The processes of one group; must be closed once it has been started."""

    def __init__(
        self,
        spec: LaunchSpec,
        overrides: PerRankOverrides,
        *,
        console: tuple[int, int] | None = None,
        _spawner: Spawner | None = None,
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            spec: what all workers have in common.
            overrides: how they differ.
            console: descriptors for the shown stdout and stderr; None is 1 and 2.
        """
        self.name = spec.role
        self.local_ranks: Sequence[int] = range(len(overrides.args))
        self._spec = spec
        self._overrides = overrides
        self._console = console
        self._spawner = _spawner
        self._changed = Notifier()
        self._runtime: LocalRuntime | None = None
        self._group: WorkerGroup | None = None
        self._is_stop_requested = False

    def __repr__(self) -> str:
        exited, count = len(self.exited()), len(self.records)
        return f"<BareGroup {self.name}: {exited} of {count} have exited>"

    async def start(self) -> None:
        """Start every worker.

        Cancellation: all are stopped, also the one that is being started.

        Raises:
            SpecError: a setting does not fit, or something cannot be pickled.
            SpawnError: a worker could not be started; none is left.
            HostError: this host lacks something.
        """
        check_main_guard()
        check_sigchld()
        count = len(self.local_ranks)
        runtime = LocalRuntime(
            self._spec,
            run_id=self._spec.run_id or os.urandom(8).hex(),
            host=hostname(),
            nproc=count,
            spawner=self._spawner or command_spawner(asyncio.get_running_loop()),
            publish=lambda event: None,
            console=self._console,
            overrides=self._overrides,
        )
        await runtime.open()
        self._runtime = runtime
        (node,) = assign_node_ranks([NodeSize(self.name, count)])
        self._group = WorkerGroup(
            runtime,
            node.worker_ranks(count),
            on_exit=lambda local_rank, ended: self._changed.notify_all(),
        )
        try:
            await self._group.start()
        except BaseException:  # a cancellation too: started workers must not stay
            await run_shielded(self._abort)
            raise

    async def _abort(self) -> None:
        await self._started_group.stop_processes(StopPlan())
        await self.close()

    # --------------------------------------------------------------- questions

    @property
    def records(self) -> dict[int, WorkerRecord]:
        """The workers that have been started, by local rank."""
        return {} if self._group is None else self._group.records

    def pids(self) -> dict[int, int]:
        """Return the process ids by local rank."""
        return {local_rank: record.pid for local_rank, record in self.records.items()}

    def exited(self) -> set[int]:
        """Return the local ranks of the workers that have exited."""
        return {local_rank for local_rank, record in self.records.items() if record.exit}

    # ------------------------------------------------------------------- waits

    async def wait_exited(self, count: int, timeout: float | None) -> None:
        """Wait until `count` workers have exited, for `timeout` seconds at most."""
        await self._wait_until(lambda: len(self.exited()) >= count, timeout)

    async def wait_exited_or_failed(self) -> None:
        """Wait until all workers have exited, one has failed, or `request_stop` was called."""
        await self._wait_until(self._is_over, None)

    def _is_over(self) -> bool:
        exits = [record.exit for record in self.records.values()]
        has_failed = any(ended and not ended.status.is_success for ended in exits)
        return self._is_stop_requested or has_failed or all(exits)

    async def _wait_until(self, condition: Callable[[], bool], timeout: float | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while not condition():
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                # Exits that have happened by now may wait for a turn of the loop.
                await asyncio.sleep(0)
                return
            await self._changed.wait(left)

    def request_stop(self) -> None:
        """Let `wait_exited_or_failed` return."""
        self._is_stop_requested = True
        self._changed.notify_all()

    # ----------------------------------------------------------------- the end

    async def stop(self, plan: StopPlan) -> None:
        """Stop everything that is left, by `plan`.

        Idempotent; safe to call again after cancellation.
        """
        has_exited = len(self.exited()) == len(self.local_ranks)
        await self._started_group.stop(plan, leftovers_only=has_exited)

    async def results(self) -> dict[int, CallResult]:
        """Return how the calls of functions ended, by local rank; call it after `stop`."""
        return await self._started_group.results()

    async def failures(self) -> tuple[Failure, ...]:
        """Return the failures, the root cause first; call it after `stop`."""
        return await self._started_group.failures()

    async def close(self) -> None:
        """Release everything, after showing what the workers wrote.  Idempotent."""
        if self._runtime is not None:
            await self._started_group.close()
            await self._runtime.close()
            self._runtime = None

    @property
    def _started_group(self) -> WorkerGroup:
        assert self._group is not None, "start() comes first"
        return self._group
