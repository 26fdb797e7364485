"""How the members at an engine notice the loss of each other at once.

An engine ends the lease of a node that was killed only when its time to live has passed.  Therefore
the leader serves a small store of its own, and its `LeaderRecord` says where.  Each other member
connects to it, and holds a key there: the id of its lease on the engine.  Each side notices that
the kernel has closed the other's end.  Neither heartbeats nor keepalive probes are sent: a router
or a firewall that has forgotten an idle connection would answer them as the kernel answers for a
process that has gone.

* The leader ends the lease of a member on the engine when the connection of the member has ended
  and was not resumed within `LEASE_LINGER`.  A member that goes to another leader, or that closes
  its session for any other reason, deletes its key before.
* A member ends the lease of the leader when their connection has ended, could not be
  re-established, and the leader's port then refuses a connection.  A partition or a suspended host
  does not refuse.  The leader listens as long as its agent takes part, also while it has no session
  at the engine: only the end of its process closes the port.

Both end a lease by its id, which no other session has, and the engine tells all observers.  A node
whose lease was ended by mistake finds out, and registers anew.  A silent connection decides
nothing: for silence there is the lease on the engine, which a partition between two nodes does not
end.  So a port that cannot be reached costs only the early notice.

The token of the port is random, and only the engine's users can read it.  The port has no TLS: a
node on an engine has certificates of a client only, and nothing secret is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final, Never

from elastic_aio.aio import Notifier, random_bytes, wait_forever
from elastic_aio.discovery.choice import RECONNECT_FOR
from elastic_aio.discovery.network import StoreNetwork, resolve, wildcard_addresses
from elastic_aio.errors import HostError, StoreError
from elastic_aio.rendezvous.messages import LEASE_LINGER, DetectorPort
from elastic_aio.spec.checks import format_host_port
from elastic_aio.store import Lease, StoreServer, connect, replies
from elastic_aio.store.base import user_key
from elastic_aio.store.engine import EngineStore
from elastic_aio.store.keyspace import Client

_FOR_EVER: Final = 1e8
"""Seconds to live of a lease at the leader, and of a connection without a packet."""

_GOODBYE_TIMEOUT: Final = 0.05


class CoordinatorLink:
    """One node's part in it; must be closed.

    `end_lost` and `watch_leader` raise `StoreError` when the engine is lost, or the leader has
    ended the lease.
    """

    def __init__(
        self,
        network: StoreNetwork | None = None,
        *,
        connect_timeout: float = 60.0,
        port_timeout: float = 1.0,
    ) -> None:
        """Prepare; nothing is bound yet.  `network` None: the network of this host.

        A member takes `connect_timeout` seconds to connect to its leader; a resolver, and a port
        that may refuse a connection, have `port_timeout`.
        """
        self._network = network or StoreNetwork()
        self._connect_timeout = connect_timeout
        self._port_timeout = port_timeout
        self.server: StoreServer | None = None
        self._address = ""
        self._token = ""
        self._lost = _LostMembers()

    def __repr__(self) -> str:
        return f"<CoordinatorLink {self.server or 'not serving'}>"

    async def serve(self, address: str, lease: Lease) -> DetectorPort | None:
        """Serve the leader's port at `address`, if not done yet; None if no port can be bound."""
        if self.server is None or self._address != address:
            await self.aclose()
            try:
                async with asyncio.timeout(self._port_timeout):  # of a resolver
                    await self._listen(address)
            except (OSError, HostError):  # a TimeoutError is an OSError
                return None
        assert self.server is not None
        return DetectorPort(address, self.server.port, self._token, lease.lease_id.decode())

    async def _listen(self, address: str) -> None:
        addresses = await resolve(address, 0)
        own = [one for one in addresses if self._network.is_local(one)]
        # The other nodes reach a translated address that is not this host's own.
        sockets = self._network.listen(own or wildcard_addresses(0), _FOR_EVER)
        self._token = random_bytes(16).hex()
        server = StoreServer(listening=sockets, token=self._token)
        await server.start()
        self._lost = _LostMembers()
        server.keyspace.watch(self._lost, None, b"/", -1, is_prefix=True)
        self.server, self._address = server, address

    async def end_lost(
        self, engine: EngineStore, is_leader: Callable[[], Awaitable[bool]]
    ) -> Never:
        """End the leases of lost members on the engine.

        `is_leader` asks the engine whether this member still leads: after a suspension, the
        connections that have ended may belong to its successor's members.
        """
        lost = self._lost
        lost.ended.clear()
        while True:
            while not lost.ended:
                await lost.changed.wait()
            ended, lost.ended = lost.ended, []
            if await is_leader():
                await asyncio.gather(*(engine.end_lease(one.encode()) for one in ended))

    async def watch_leader(self, leader: DetectorPort, engine: EngineStore, lease: Lease) -> Never:
        """Let the leader notice the end of this process, and end its lease if it has gone.

        Cancellation: is no loss to the leader.
        """
        key = lease.lease_id.decode()
        while await self.stay_connected(leader, key):
            if await self.is_refused(leader):
                await engine.end_lease(leader.lease_id.encode())
                break
            # The leader may take this member for lost: then a write is refused.
            await asyncio.sleep(2 * LEASE_LINGER)
            await lease.set(f"d/{key}", b"")
        await wait_forever()

    async def stay_connected(self, leader: DetectorPort, key: str) -> bool:
        """Connect to the leader until that is lost; return whether there was a connection."""
        store = connect(
            format_host_port(leader.address, leader.port),
            timeout=self._connect_timeout,
            reconnect_for=RECONNECT_FOR,
            peer_timeout=_FOR_EVER,
            token=leader.token,
            survive_server_restart=False,
        )
        try:
            async with store:
                try:
                    # Not released: the reply may be long in coming.  The lease ends without keys.
                    lease = await store.lease(_FOR_EVER, linger=LEASE_LINGER).__aenter__()
                    await lease.set(key, b"")
                    await store.wait_lost()
                finally:
                    with contextlib.suppress(StoreError, TimeoutError):
                        async with asyncio.timeout(_GOODBYE_TIMEOUT):
                            await store.delete(key)
        except StoreError:
            return False  # a firewall between the nodes, for example
        return True

    async def is_refused(self, leader: DetectorPort) -> bool:
        """Return whether all addresses of the leader refuse a connection."""
        try:
            async with asyncio.timeout(self._port_timeout):
                for address in await resolve(leader.address, leader.port):
                    try:
                        (await self._network.dial(address)).close()
                    except ConnectionRefusedError:
                        continue
                    return False
        except OSError:  # a TimeoutError is one
            return False
        return True

    async def aclose(self) -> None:
        """Close the port: the other members take this process for lost if its lease lives."""
        server, self.server = self.server, None
        if server is not None:
            await server.aclose()


class _LostMembers(Client):
    """A client of this node's own server; `ended` are the keys that have expired there."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[str] = []
        self.changed = Notifier()

    def on_change(self, tag: Any, change: replies.RawChange) -> None:
        if change.kind in (replies.CHANGE_EXPIRED, replies.CHANGE_CLOSED):
            self.ended.append(user_key(change.key))
            self.changed.notify_all()
