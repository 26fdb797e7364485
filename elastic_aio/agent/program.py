"""What the workers of a job run, and the way they are spawned: commands and functions alike.

What only functions and the server that forks need is imported when they come: every
command's start would pay for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from elastic_aio.agent.surroundings import command_of
from elastic_aio.process.base import Child, ChildPlan, Spawner
from elastic_aio.process.results import Told, read_told
from elastic_aio.spec import Command, Function, LaunchSpec, Script

if TYPE_CHECKING:
    from elastic_aio.process.forkserver import ForkServer
    from elastic_aio.process.payload import Payload

__all__ = ["Crew", "Task", "Work"]


class Crew(Struct, frozen=True):
    """How the workers of a bare group differ from each other, by local rank.

    Such workers get no torch variables (`RANK` and the like).  With `with_index` a
    function is called with its local rank before the arguments.
    """

    args: tuple[tuple[Any, ...], ...]
    envs: tuple[Mapping[str, str], ...]
    is_quiet: bool = False
    is_daemon: bool = False
    with_index: bool = False


class Task(Struct, frozen=True):
    """The part of a child's plan that says what it runs (see `ChildPlan`)."""

    argv: tuple[str, ...]
    pass_fds: tuple[int, ...] = ()
    call: Callable[[], int] | None = None


class Work:
    """What one job's workers run; must be closed."""

    def __init__(self, spec: LaunchSpec, spawner: Spawner, crew: Crew | None = None) -> None:
        """Prepare.

        Args:
            spec: the job.
            spawner: starts commands.
            crew: differences between the workers; None when there are none.
        """
        self._spec = spec
        self._command_spawner = spawner
        self._crew = crew
        self._payloads: dict[int, Payload] = {}  # by identity of the arguments
        self._results: dict[int, int] = {}  # by local rank
        self._server: ForkServer | None = None

    @property
    def is_function(self) -> bool:
        """Whether workers are functions, whose values come back."""
        return isinstance(self._spec.entrypoint, Function)

    @property
    def is_served(self) -> bool:
        """Whether a server forks the workers, which then inherit its limits."""
        return self._server is not None

    @property
    def descriptors_each(self) -> int:
        """How many descriptors one worker takes here."""
        # Asyncio's pidfd and ours, two logs; a function's call and result.
        return 6 if self.is_function else 4

    @property
    def spawner(self) -> Spawner:
        """The way to start a worker."""
        if self._server is not None:
            return self._server
        if not self.is_function or self._spec.start_method != "fork":
            return self._command_spawner
        from elastic_aio.process.fork import spawn_by_fork

        return spawn_by_fork

    def check(self) -> None:
        """Pickle what has to be, before anything starts.

        Raises:
            SpecError: the function or an argument cannot be pickled.
            SurroundingsError: there is no descriptor left.
        """
        if not isinstance(self._spec.entrypoint, Function) or self._spec.start_method == "fork":
            return
        from elastic_aio.process.payload import make_payload

        crew = self._crew
        for args in [self._spec.args] if crew is None else crew.args:
            if id(args) not in self._payloads:
                self._payloads[id(args)] = make_payload(
                    self._spec.entrypoint.call,
                    args,
                    is_quiet=crew is not None and crew.is_quiet,
                    is_daemon=crew is not None and crew.is_daemon,
                    with_index=crew is not None and crew.with_index,
                )

    async def start(
        self,
        env: Mapping[str, str],
        streams: tuple[int, int, int],
        limited: Callable[[ChildPlan], ChildPlan],
        on_started: Callable[[int], None],
    ) -> None:
        """Start the server that forks the workers, if that is how they start.

        Args:
            env: its environment, with the job's marker.
            streams: its standard streams.
            limited: gives a plan the workers' limits.
            on_started: told the server's pid.

        Raises:
            SpawnError: it could not be started.
        """
        entrypoint = self._spec.entrypoint
        if self._spec.start_method != "forkserver" or isinstance(entrypoint, Command):
            return
        from elastic_aio.process.forkserver import ForkServer

        async def spawn(plan: ChildPlan) -> Child:
            return await self._command_spawner(limited(plan))

        beside = [os.path.dirname(entrypoint.path)] if isinstance(entrypoint, Script) else []
        path = [os.path.join(self._spec.cwd or os.getcwd(), one) for one in [*beside, *sys.path]]
        self._server = ForkServer(
            spawn,
            python=self._spec.python or sys.executable,
            path=path,
            preload=self._spec.preload,
            env=env,
            cwd=self._spec.cwd,
            streams=streams,
            on_started=on_started,
        )
        await self._server.start()

    def task(self, local_rank: int) -> Task:
        """Say what a worker of the present attempt runs; a function gets a place for its result.

        Raises:
            SurroundingsError: there is no descriptor left.
        """
        args = self._spec.args if self._crew is None else self._crew.args[local_rank]
        entrypoint = self._spec.entrypoint
        if not isinstance(entrypoint, Function):
            return Task(command_of(self._spec, local_rank, args))
        from elastic_aio.process.payload import argv_of, memory_file

        result = self._results[local_rank] = memory_file("result")
        if self._spec.start_method == "fork":
            return Task(
                (self._spec.name,), call=self._fork_call(entrypoint, args, local_rank, result)
            )
        payload = self._payloads[id(args)]
        return Task(
            argv_of(self._spec.python or sys.executable, payload, result, local_rank),
            pass_fds=(payload.descriptor, result, *payload.inherited),
        )

    def _fork_call(
        self, entrypoint: Function, args: tuple[Any, ...], local_rank: int, result: int
    ) -> Callable[[], int]:
        from elastic_aio.worker import bootstrap

        crew = self._crew
        given = (local_rank, *args) if crew is not None and crew.with_index else args

        def prepare() -> Any:
            if crew is not None and crew.is_daemon:
                bootstrap.become_daemon()
            return entrypoint.call, given

        is_quiet = crew is not None and crew.is_quiet
        return lambda: bootstrap.perform(prepare, result, is_quiet=is_quiet)

    async def told(self) -> dict[int, Told]:
        """Return, by local rank, how the calls of the present attempt have ended.

        May be repeated.  Nothing for commands.
        """
        return {rank: await read_told(result) for rank, result in self._results.items()}

    def forget_results(self) -> None:
        """Make room for another attempt."""
        for result in self._results.values():
            os.close(result)
        self._results = {}

    async def aclose(self) -> None:
        """Give everything back.  May be started over."""
        if self._server is not None:
            await self._server.aclose()
        self.forget_results()
        payloads, self._payloads = self._payloads, {}
        for payload in payloads.values():
            payload.close()
