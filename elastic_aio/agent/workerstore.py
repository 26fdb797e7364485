"""The store of one attempt's workers: a fresh one each time, bound before it is announced.

torch's workers find each other through it (MASTER_ADDR, MASTER_PORT, with
TORCHELASTIC_USE_AGENT_STORE=True).  A fresh one has no keys of an attempt that
failed, and a port that is bound cannot be taken by somebody else before a worker
gets there.  The server itself is imported and started when the first connection
waits: jobs without torch never pay for it.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from elastic_aio.aio import off_loop, owned_task
from elastic_aio.errors import SurroundingsError
from elastic_aio.store.listen import bind_listeners

if TYPE_CHECKING:
    from elastic_aio.store.server import StoreServer

__all__ = ["MASTER_ADDR", "WorkerStore", "bind_store"]

MASTER_ADDR = "127.0.0.1"
"""Where the workers of a job with one node meet: nobody else can reach it."""

_SILENCE_S = 60.0


class WorkerStore:
    """A listening socket that becomes a store when it is needed; must be closed."""

    def __init__(self, port: int, host: str | None = MASTER_ADDR) -> None:
        """Bind `port`, 0 for a free one, at an address of this machine.

        Args:
            port: the port.
            host: the address; None: every one, IPv4 and IPv6.

        Raises:
            SurroundingsError: the port cannot be had.
        """
        self._loop = asyncio.get_running_loop()
        self._sockets = bind_listeners(host, port, _SILENCE_S)
        self.port: int = self._sockets[0].getsockname()[1]
        self._server: StoreServer | None = None
        self._starting: asyncio.Task[None] | None = None
        self._listen()

    def __repr__(self) -> str:
        return f"<WorkerStore on port {self.port}: {self._server or 'nobody has come yet'}>"

    async def aclose(self) -> None:
        """End all connections and free the port; about a second at most."""
        if self._starting is None:
            for one in self._sockets:
                self._loop.remove_reader(one)
                one.close()
            return
        await asyncio.wait([self._starting])
        if self._server is not None:
            await self._server.aclose()

    def _listen(self) -> None:
        try:
            for one in self._sockets:
                one.listen(socket.SOMAXCONN)
        except OSError as error:  # somebody else was bound, and listened first
            for one in self._sockets:
                one.close()
            said = f"cannot listen on port {self.port}: {error.strerror}"
            raise SurroundingsError(said) from None
        for one in self._sockets:
            self._loop.add_reader(one, self._on_first_connection)

    def _on_first_connection(self) -> None:
        for one in self._sockets:
            self._loop.remove_reader(one)
        self._starting = owned_task(self._serve(), name=f"store on port {self.port}")

    async def _serve(self) -> None:
        from elastic_aio.store.server import StoreServer

        self._server = StoreServer(listening=self._sockets)
        await self._server.start()


async def bind_store(port: int, host: str | None = MASTER_ADDR) -> WorkerStore:
    """Return a store at `port`; when it cannot be had, find out who has it.

    Raises:
        SurroundingsError: one line, which names the process that has the port.
    """
    try:
        return WorkerStore(port, host)
    except SurroundingsError as error:
        from elastic_aio.store.portholder import port_holder

        holder = await off_loop(lambda: port_holder(port))
        if not holder:
            raise
        raise SurroundingsError(f"{error}; it is taken by {holder}") from None
