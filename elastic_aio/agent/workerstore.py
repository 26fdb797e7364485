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

from elastic_aio.aio import owned_task
from elastic_aio.store.listen import bind_listeners

if TYPE_CHECKING:
    from elastic_aio.store.server import StoreServer

__all__ = ["MASTER_ADDR", "WorkerStore"]

MASTER_ADDR = "127.0.0.1"
"""Where the workers of a job with one node meet: nobody else can reach it."""

_SILENCE_S = 60.0


class WorkerStore:
    """A listening socket that becomes a store when it is needed; must be closed."""

    def __init__(self, port: int) -> None:
        """Bind `port`, 0 for a free one.

        Raises:
            SurroundingsError: the port cannot be had.
        """
        self._loop = asyncio.get_running_loop()
        (self._socket,) = bind_listeners(MASTER_ADDR, port, _SILENCE_S)
        self._socket.listen(socket.SOMAXCONN)
        self.port: int = self._socket.getsockname()[1]
        self._server: StoreServer | None = None
        self._starting: asyncio.Task[None] | None = None
        self._loop.add_reader(self._socket, self._on_first_connection)

    def __repr__(self) -> str:
        return f"<WorkerStore on port {self.port}: {self._server or 'nobody has come yet'}>"

    async def aclose(self) -> None:
        """End all connections and free the port; about a second at most."""
        if self._starting is None:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            return
        await asyncio.wait([self._starting])
        if self._server is not None:
            await self._server.aclose()

    def _on_first_connection(self) -> None:
        self._loop.remove_reader(self._socket)
        self._starting = owned_task(self._serve(), name=f"store on port {self.port}")

    async def _serve(self) -> None:
        from elastic_aio.store.server import StoreServer

        self._server = StoreServer(listening=[self._socket])
        await self._server.start()
