"""A worker group without restarts whose workers differ by rank: what `multiprocessing` uses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from elastic_aio.agent.agent import Agent
from elastic_aio.agent.driver import Driver
from elastic_aio.agent.failures import WorkerRecord
from elastic_aio.agent.program import PerRankOverrides
from elastic_aio.agent.worker_group import WorkerGroup
from elastic_aio.aio import Notifier, wait_shielded
from elastic_aio.events import WorkerExited
from elastic_aio.logs.console import ConsoleTarget
from elastic_aio.outcome import Failure
from elastic_aio.process.base import Spawner
from elastic_aio.process.calls import CallResult
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.stop import StopPlan


class BareGroup:
    """The processes of one group, run by an `Agent`; must be stopped once it was started."""

    def __init__(
        self,
        spec: LaunchSpec,
        overrides: PerRankOverrides,
        *,
        console: ConsoleTarget | None = None,
        _spawner: Spawner | None = None,
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            spec: what all workers have in common.
            overrides: how they differ.
            console: where output is shown, see `ConsoleTarget`; None is this process's own
                stdout and stderr.
        """
        self.name = spec.role
        self.local_ranks: Sequence[int] = range(len(overrides.args))
        changed = self._changed = Notifier()
        listeners = self._exit_listeners = list[Callable[[WorkerExited], None]]()
        exited = self._exited = set[int]()

        def notify(change: object) -> None:
            # Without a reference to this object, which may be collected.
            changed.notify_all()
            if isinstance(change, WorkerExited):
                exited.add(change.local_rank)
                for listener in listeners:
                    listener(change)

        self._notify = notify
        self.agent = Agent(
            spec,
            console=console,
            listeners=[notify],
            _spawner=_spawner,
            _overrides=overrides,
        )

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
        await self.agent.__aenter__()
        self._driver.done.add_done_callback(self._notify)
        try:
            await self._wait_until(
                lambda: len(self.records) == len(self.local_ranks) or self._workers.start_error
            )
            if error := self._workers.start_error:
                raise error
        except BaseException:  # a cancellation too: started workers must not stay
            await self.agent.__aexit__(None, None, None)
            raise

    def on_exit(self, listener: Callable[[WorkerExited], None]) -> None:
        """Call `listener` for each worker that exits from now on."""
        self._exit_listeners.append(listener)

    def send_signal(self, local_rank: int, number: int) -> None:
        """Send a signal to one worker, if it runs."""
        self._driver.send(number, self.records[local_rank].pid)

    # --------------------------------------------------------------- questions

    @property
    def records(self) -> dict[int, WorkerRecord]:
        """The workers that have been started, by local rank."""
        driver = self.agent._driver
        return {} if driver is None or driver.group is None else driver.group.records

    def pids(self) -> dict[int, int]:
        """Return the process ids by local rank."""
        return {local_rank: record.pid for local_rank, record in self.records.items()}

    def exited(self) -> set[int]:
        """Return the local ranks of the workers whose exit has been published."""
        return {*self._exited}

    @property
    def is_over(self) -> bool:
        """Whether nothing of the group is left and everything is released."""
        return self.agent._driver is not None and self.agent._driver.done.done()

    @property
    def calls(self) -> Mapping[int, CallResult]:
        """How the calls of functions ended, by local rank, once the group is over."""
        return self._workers.calls

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The failures, the root cause first, once the group is over."""
        if self._driver.error is not None:
            raise self._driver.error
        return self._workers.failures

    # ------------------------------------------------------------------- waits

    async def wait_exited(self, count: int, timeout: float | None) -> None:
        """Wait until `count` workers have exited, for `timeout` seconds at most."""
        await self._wait_until(lambda: len(self.exited()) >= count or self.is_over, timeout)

    async def wait_over(self, timeout: float | None) -> None:
        """Wait until the group is over, for `timeout` seconds at most."""
        await self._wait_until(lambda: self.is_over, timeout)

    async def _wait_until(
        self, condition: Callable[[], object], timeout: float | None = None
    ) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while not condition():
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                await asyncio.sleep(0)  # exits that have happened may wait for a turn of the loop
                return
            await self._changed.wait(left)

    async def stop(self, plan: StopPlan | None = None) -> None:
        """Stop everything that is left by `plan`, or by the group's own, and release everything.

        Idempotent; does nothing in a fork of the process that started the group.
        Cancellation: raised after the group is over.
        """
        if self.agent._driver is not None and self.agent._driver.is_copy:
            return
        self._driver.is_left = True
        self._driver.request_stop("the group was stopped", plan=plan)
        await wait_shielded(self._driver.done)

    @property
    def _driver(self) -> Driver:
        return self.agent._started_driver

    @property
    def _workers(self) -> WorkerGroup:
        assert self._driver.group is not None, "the agent starts a group first"
        return self._driver.group
