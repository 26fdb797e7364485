"""The commands or functions that the workers of a job run, and how they are spawned.

Modules that only functions and the fork server need are imported on first use, so that the start of
commands does not pay for them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from elastic_aio.agent.preflight import check_preload, worker_argv
from elastic_aio.errors import HostError
from elastic_aio.process.children import Child, Spawner
from elastic_aio.spec.job import Command, Function, LaunchSpec

if TYPE_CHECKING:
    from elastic_aio.process.calls import CallResult, Payload
    from elastic_aio.process.forkserver import ForkServer


class BareOptions(Struct, frozen=True):
    """How the workers of a bare group differ from those of a job.

    They get no torch variables (`RANK` and the like), and KeyboardInterrupt is a success of
    them, as in torch.  With `with_index` a function gets its local rank before the arguments.  With
    `waits_for_stop` a failure does not end the group: its owner stops it.
    """

    is_quiet: bool = False
    is_daemon: bool = False
    with_index: bool = False
    waits_for_stop: bool = False


class ChildCommand(Struct, frozen=True):
    """The part of a `ChildSpec` that says what the child runs."""

    argv: tuple[str, ...]
    pass_fds: tuple[int, ...] = ()
    call: Callable[[], int] | None = None


class Entrypoint:
    """The entry point of one job's workers; must be closed."""

    def __init__(self, spec: LaunchSpec, spawner: Spawner, bare: BareOptions | None = None) -> None:
        self._spec = spec
        self.command_spawner = spawner
        self.bare = bare
        self._options = bare or BareOptions()
        self._own_args = tuple(spec.args + own for own in spec.worker_args)  # by local rank
        self._payloads: dict[int, Payload] = {}  # by identity of the arguments
        self._has_given = False
        self._results: dict[int, int] = {}  # by local rank
        self._server: ForkServer | None = None

    @property
    def is_function(self) -> bool:
        """Whether workers are functions, whose return values are kept."""
        return isinstance(self._spec.entrypoint, Function)

    @property
    def uses_forkserver(self) -> bool:
        """Whether the fork server starts the workers, and sets their limits."""
        return self._server is not None

    @property
    def is_importing(self) -> bool:
        """Whether a worker that is being spawned waits for the imports of the fork server."""
        return self._server is not None and self._server.is_importing

    @property
    def descriptors_each(self) -> int:
        """How many descriptors of this process one worker takes."""
        # Asyncio's pidfd and ours, two logs, the socket of its messages; two pipes; a function's
        # call and result; a question of a probe: pidfds and a pipe, or a connection.
        pipes = 2 if self._spec.logs.on_full == "console" else int(self._spec.logs.capture)
        probe = 4 if (self._spec.ready, self._spec.alive) != (None, None) else 0
        return 5 + pipes + probe + (2 if self.is_function else 0)

    @property
    def spawner(self) -> Spawner:
        if self._server is not None:
            return self._server
        if not self.is_function or self._spec.start_method != "fork":
            return self.command_spawner
        from elastic_aio.process.fork import spawn_by_fork

        return spawn_by_fork

    def check(self) -> None:
        """Pickle the function and its arguments, before anything starts.

        Raises SpecError if that fails, or the module to be preloaded is missing; HostError if no
        descriptor is left.
        """
        check_preload(self._spec)
        if not isinstance(self._spec.entrypoint, Function) or self._spec.start_method == "fork":
            return
        from elastic_aio.process.calls import make_payload

        for args in self._own_args or [self._spec.args]:
            if id(args) not in self._payloads:
                self._payloads[id(args)] = make_payload(
                    self._spec.entrypoint.call,
                    args,
                    is_quiet=self._options.is_quiet,
                    may_interrupt=self.bare is not None,
                    is_daemon=self._options.is_daemon,
                    with_index=self._options.with_index,
                )

    async def start(
        self,
        env: Mapping[str, str],
        streams: tuple[int, int, int],
        on_started: Callable[[Child], None],
    ) -> None:
        """Start the fork server, if the job uses one, or raise SpawnError.

        `on_started` is called with each server when it runs.
        """
        entrypoint = self._spec.entrypoint
        if self._spec.start_method != "forkserver" or isinstance(entrypoint, Command):
            return
        from elastic_aio.process.forkserver import ForkServer

        # Without the interpreter and its option -u.
        program = () if self.is_function else worker_argv(self._spec, 0, ())[2:]
        self._server = ForkServer(
            self.command_spawner,
            python=self._spec.python or sys.executable,
            program=program,
            preload=self._spec.preload,
            env=env,
            cwd=self._spec.cwd,
            streams=streams,
            on_started=on_started,
        )
        await self._server.start()

    def command(self, local_rank: int) -> ChildCommand:
        """Return what a worker runs, with a file for a function's result, or raise HostError."""
        args = self._own_args[local_rank] if self._own_args else self._spec.args
        entrypoint = self._spec.entrypoint
        if not isinstance(entrypoint, Function):
            return ChildCommand(worker_argv(self._spec, local_rank, args))
        from elastic_aio.process.calls import call_argv, memory_file

        result = self._results[local_rank] = memory_file("result")
        if self._spec.start_method == "fork":
            return ChildCommand(
                (self._spec.name,), call=self._fork_call(entrypoint, args, local_rank, result)
            )
        self.check_further()
        payload = self._payloads[id(args)]
        return ChildCommand(
            call_argv(self._spec.python or sys.executable, payload, result, local_rank),
            pass_fds=(payload.descriptor, result, *payload.inherited),
        )

    def _fork_call(
        self, entrypoint: Function, args: tuple[Any, ...], local_rank: int, result: int
    ) -> Callable[[], int]:
        from elastic_aio.worker import bootstrap

        options = self._options
        if options.with_index:
            args = (local_rank, *args)

        def prepare() -> Any:
            if options.is_daemon:
                bootstrap.become_daemon()
            return entrypoint.call, args

        may_interrupt = self.bare is not None
        return lambda: bootstrap.perform(
            prepare, result, is_quiet=options.is_quiet, may_interrupt=may_interrupt
        )

    async def results(self) -> dict[int, CallResult]:
        """Return, by local rank, how functions of the current attempt ended; empty for commands."""
        if not self._results:
            return {}
        from elastic_aio.process.calls import read_call_result

        limits = self._spec.limits
        is_foreign = limits is not None and limits.user is not None
        return {
            rank: await read_call_result(result, is_foreign=is_foreign)
            for rank, result in self._results.items()
        }

    async def forget_results(self) -> None:
        results, self._results = [*self._results.values()], {}
        if results:
            from elastic_aio.process.calls import close_results

            await close_results(results)

    def on_group_started(self) -> None:
        """Close calls with descriptors if only a request can make another attempt follow."""
        # They are then the workers' alone, so that the other end of a connection sees its end of
        # file.  Other calls stay: `Agent.restart` does not count against `max_restarts`.
        if not self._spec.max_restarts and self._spec.nnodes.maximum == 1:
            given = [key for key, payload in self._payloads.items() if payload.inherited]
            self._has_given = bool(given)
            self._close_payloads(given)

    def check_further(self) -> None:
        """Raise a HostError if no further attempt can have the arguments."""
        if self._has_given:
            problem = "its arguments have descriptors, which were closed here (max_restarts is 0)"
            raise HostError(f"{self._spec.name} cannot be called again: {problem}")

    def _close_payloads(self, keys: Iterable[int]) -> None:
        for key in [*keys]:
            self._payloads.pop(key).close()

    async def aclose(self) -> None:
        """Stop the fork server and close all files.  Idempotent."""
        if self._server is not None:
            await self._server.aclose()
        await self.forget_results()
        self._close_payloads(self._payloads)
