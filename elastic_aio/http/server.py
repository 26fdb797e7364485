"""The HTTP server of a job: what a program or `--http` adds to a job as a listener for events."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Self

from msgspec.structs import replace

from elastic_aio.aio import EventHistory, EventReader, running_loop
from elastic_aio.discovery.network import is_loopback, resolve
from elastic_aio.errors import SpecError
from elastic_aio.events import Event, EventsMissed, JobFinished
from elastic_aio.sockets import bind_addresses
from elastic_aio.spec.checks import format_host_port, parse_host_port
from elastic_aio.status import JobStatus, StatusTracker
from elastic_aio.text import error_reason

if TYPE_CHECKING:
    from elastic_aio.agent.agent import Agent
    from elastic_aio.http.app import ASGIApp
    from elastic_aio.http.connections import AsgiConnections

_EVENTS_KEPT: Final = 10_000
"""As many as an agent keeps: they are the same objects."""


class AppServer:
    """Serves an app at an address, within limits: an async context manager."""

    def __init__(self, address: str, *, patience: float = 5.0, keep_alive: float = 15.0) -> None:
        self._given = address
        self._host, self._port = parse_host_port("address", address, at_least=0)
        if find_spec("starlette") is None or find_spec("hypercorn") is None:
            problem = "needs the extra http: pip install 'elastic_aio[http]'"
            raise SpecError("address", address, problem)
        self._patience = patience
        self._keep_alive = keep_alive
        self._connections: AsgiConnections | None = None

    def __repr__(self) -> str:
        count = 0 if self._connections is None else len(self._connections)
        return f"<{type(self).__name__} at {self.address}, {count} connections>"

    @property
    def address(self) -> str:
        """`HOST:PORT`, with the port that is bound."""
        return format_host_port(self._host, self._port)

    def _app(self) -> ASGIApp:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        """Listen at the address.

        Raises:
            SpecError: that is not possible; the port is in use, for example.

        Cancellation: nothing listens.
        """
        # Imported here: a program without the extra imports this module too.
        from elastic_aio.http.app import JOB_PAGE, LocalHostOnly
        from elastic_aio.http.connections import AsgiConnections

        running_loop()
        await JOB_PAGE.load()
        try:
            addresses = await resolve(self._host, self._port)
            sockets = bind_addresses(addresses, self._patience, is_listening=True)
        except OSError as error:
            reason = error_reason(error)
            raise SpecError("address", self._given, f"cannot listen: {reason}") from None
        self._port = sockets[0].getsockname()[1]
        app = self._app()
        is_local = all(is_loopback(sock.getsockname()[0]) for sock in sockets)
        self._connections = AsgiConnections(LocalHostOnly(app) if is_local else app, self._patience)
        self._connections.listen(sockets)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the port and all connections; the ends of streams still reach those that read."""
        if self._connections is not None:
            await self._connections.aclose()


class StatusServer(AppServer):
    """Serves the state of a job over HTTP: an async context manager, and a listener.

    ::

        async with StatusServer("127.0.0.1:9000") as status:
            await launch(spec, listeners=[status])

    The pages are `/` (for people), `/healthz` (200 while the job goes on, else 503), `/readyz`
    (200 while all workers of this node run, else 503), `/metrics` (OpenMetrics), `/status`
    (JSON), `/events` (server-sent events) and `/logs/RANK/stdout` or `stderr` (the end of a log).
    They are read-only and need no password: every client that reaches the port can read them.

    It needs the extra `http`.  `elastic_aio.http.status_app` has the same pages for another app.
    """

    def __init__(self, address: str, *, patience: float = 5.0, keep_alive: float = 15.0) -> None:
        """Prepare a server; the port is bound when the block is entered.

        Args:
            address: `HOST:PORT`; port 0 takes a free one.
            patience: seconds for a client to send its request and to take the answer, or a part
                of a stream of events.
            keep_alive: seconds without an event after which a stream has a comment.

        Raises:
            SpecError: `address` is something else, or the extra `http` is not installed.
        """
        super().__init__(address, patience=patience, keep_alive=keep_alive)
        self._job = ListenedJob()

    def use_agent(self, source: Callable[[], Agent | None]) -> None:
        """Take from the agent what no event says: what workers have used and reported."""
        self._job.source = source

    def __call__(self, event: Event) -> None:
        """Take in an event of the job."""
        self._job.add(event)

    def _app(self) -> ASGIApp:
        from elastic_aio.http.app import status_app

        return status_app(self._job, keep_alive=self._keep_alive)

    async def __aexit__(self, *_: object) -> None:
        self._job.close()
        await super().__aexit__()


class ListenedJob:
    """A job as its events show it, also before its agent starts and after the agent is gone."""

    def __init__(self) -> None:
        self.source: Callable[[], Agent | None] = lambda: None
        self._tracker = StatusTracker()
        self._events: EventHistory[Event] = EventHistory(_EVENTS_KEPT, _missed)

    def add(self, event: Event) -> None:
        self._tracker(event)
        self._events.append(event)
        if isinstance(event, JobFinished):
            self.close()

    def close(self) -> None:
        """End the streams: no event follows.  Idempotent."""
        self._events.close()

    def status(self, *, usage: bool = True) -> JobStatus:
        """Return what the job is doing; with `usage` what its workers have used and reported."""
        status = self._tracker.status(time.time())
        if usage and (agent := self.source()) is not None:
            known = agent.status()
            status = replace(status, workers=known.workers, children=known.children)
        return status

    def events(self, after: int = -1) -> EventReader[Event]:
        """Return an iterator over the events that follow the number `after`."""
        return self._events.read(after + 1)

    def make_log_files(self) -> None:
        """Make the files of captured streams now (see `Agent.make_log_files`)."""
        if (agent := self.source()) is not None:
            agent.make_log_files()


def _missed(count: int, following: int) -> Event:
    return EventsMissed(seq=following - 1, time=time.time(), count=count)
