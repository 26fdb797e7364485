"""Finds the job's store at one of its endpoints, or serves it there.

Who serves the store
====================

Every node has the same list of endpoints and must find the same store, but no node
knows in advance which node serves it: the same command line is used on all of them.
There is no second service to ask; the network and the kernel are all there is.

* Whether an endpoint is this host's own is decided by trying to listen there.  Comparing
  names fails for aliases, for /etc/hosts entries, and for addresses behind a load
  balancer; bind(2) knows.  It also decides between two processes of one host, because
  only one can bind the port.
* Trying to listen says nothing about the route, so the server then connects to itself
  by the endpoint's address and compares the instance that answers with its own.  The
  address may belong to this host and yet be translated to another one.
* Every node, the one that serves included, is a client of the store from then on.
* A store at which the run is active wins over an earlier endpoint without it, so that a
  node that joins late does not start a second job at the first endpoint.

Why turns
=========

With several endpoints two nodes could serve one each.  Therefore each endpoint has a
turn: the second is served 4 s after the start at the earliest, the third 1 s later, because
hosts do not boot all at once.  By then the node of the first endpoint has usually begun to
listen, and the others have connected.  After a loss they come at 0.3 s, 0.9 s, ..., because
all nodes start searching at once, and their leases last only some seconds.  0.6 s is the time
in which a busy host begins to serve and is found.

A node that was suspended looks at the earlier endpoints once more before its turn: it could
not learn of another store meanwhile.  Turns are no guarantee nevertheless.  If there are two
stores, the node that serves the later one looks at the earlier ones every 5 s, or every
`heartbeat_timeout` if that is less (`wait_superseded`), and abandons its own once the run is
active there.  It says so in its store before, and looks again after that (`confirm_superseded`):
the node that serves the other store may have decided the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Protocol

from msgspec import Struct

from elastic_aio.aio import run_shielded, wait_forever
from elastic_aio.discovery.addresses import (
    is_loopback,
    is_loopback_name,
    loopback_addresses,
    outbound_address,
    resolve,
)
from elastic_aio.discovery.choice import EndpointState, ServeStore, UseStore, WaitUntil
from elastic_aio.discovery.dialer import (
    Dialer,
    Endpoint,
    StoreHandshake,
    StoreNotFound,
)
from elastic_aio.discovery.keys import OWNER_KEY, RunRecord, owner_value
from elastic_aio.discovery.network import StoreNetwork
from elastic_aio.discovery.search import EndpointMonitor, EndpointSearch
from elastic_aio.errors import ElasticAioError
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.spec.tls import TlsSpec
from elastic_aio.store import Dropped, RemoteStore, StoreServer
from elastic_aio.store.engine import EngineStore
from elastic_aio.store.handles import wire_key
from elastic_aio.store.server import PAUSE_RESOLUTION

_KEEPALIVE_TIMEOUT: Final = 60.0
"""Seconds without a TCP acknowledgement after which the server drops a client."""

_OTHER_INTERVAL_MAX: Final = 5.0
"""Seconds between two looks at the earlier endpoints while this node serves a later one."""

_OTHER_TIMEOUT: Final = 5.0
"""Seconds for another endpoint to answer while this node serves one."""


_LATE_LOOK_S: Final = 0.25
"""Seconds after which the answer of another endpoint may be that of a suspended process."""

_SECOND_LOOK_S: Final = 0.5
"""Seconds in which a node that has decided to yield looks again, and takes that back."""


class DiscoveryError(ElasticAioError):
    """No endpoint can be used; the message is one line with the reason for each."""


class ActiveElsewhere(Struct, frozen=True):
    """Another endpoint at which the run is active.

    Attributes:
        endpoint: where that is.
        job: which one it is there.
        was_suspended: whether this process was, so that the other nodes may have moved there.
    """

    endpoint: Endpoint
    job: str
    was_suspended: bool


async def _wait_for_ever(
    run: RunRecord, is_committed: Callable[[], bool], *, at_once: bool
) -> ActiveElsewhere:
    return await wait_forever()


async def _refuse(run: RunRecord, other: ActiveElsewhere) -> bool:
    return False


_ConfirmSuperseded = Callable[[RunRecord, ActiveElsewhere], Coroutine[Any, Any, bool]]


async def _is_not_known(job: str) -> bool:
    return False


class _WaitSuperseded(Protocol):
    def __call__(
        self, run: RunRecord, is_committed: Callable[[], bool], *, at_once: bool
    ) -> Coroutine[Any, Any, ActiveElsewhere]: ...


class LocatedStore(Struct, frozen=True):
    """The job's store.

    Attributes:
        store: connected; lost for good once its server does not answer for too long.
        instance: identifies the server; a restarted server has another one.
        endpoint: as in the list; for port 0, with the port that was chosen.
        index: its position in the list.
        is_host: whether this process serves it.
        local_address: the address of this host on that connection.
        is_engine: whether no node serves it, and the keys of a job expire some time after its end.
        wait_superseded: waits until this run is active at another endpoint.
        confirm_superseded: whether it still is, after this store has the claim of a move.
        is_known_elsewhere: whether another endpoint has the job of a node that came from there.
    """

    store: RemoteStore | EngineStore
    instance: bytes
    endpoint: str
    index: int
    is_host: bool
    local_address: str
    is_engine: bool = False
    wait_superseded: _WaitSuperseded = _wait_for_ever
    confirm_superseded: _ConfirmSuperseded = _refuse
    is_known_elsewhere: Callable[[str], Coroutine[Any, Any, bool]] = _is_not_known


class StoreLocator:
    """Locates the store of a job for one of its nodes.

    Has one store at a time, and closes it: call `aclose` in the end.
    """

    def __init__(
        self,
        spec: RendezvousSpec,
        run_id: str,
        network: StoreNetwork | None = None,
        *,
        on_wait: Callable[[str, float], None] = lambda why, time_left: None,
        on_drop: Callable[[Dropped], None] | None = None,
    ) -> None:
        """Prepare; nothing is connected yet.  None: the network of this host.

        `on_wait` is called in a search that takes long, with the reason for each endpoint and
        the seconds until it ends; `on_drop` is that of the `StoreServer`.

        Raises:
            SpecError: a certificate cannot be used.
        """
        self._spec = spec
        self._endpoints = [Endpoint.parse(index, text) for index, text in enumerate(spec.endpoints)]
        # The workers use it too; so the first node must serve it, or find one that none serves.
        is_exclusive = spec.backend == "static"
        self._dialer = Dialer(spec, run_id, network or StoreNetwork(), is_exclusive=is_exclusive)
        if spec.tls is not None:
            self._check_certificates(spec.tls)
        self._on_wait, self._on_drop = on_wait, on_drop
        self._store: RemoteStore | None = None
        self._server: StoreServer | None = None
        self._was_suspended = asyncio.Event()
        self._is_superseded = False

    def __repr__(self) -> str:
        state = self._server or self._store or "not connected"
        return f"<StoreLocator {self._spec.endpoint}: {state}>"

    async def locate(
        self, *, is_first: bool, job: str = "", may_serve: Callable[[], bool] = lambda: True
    ) -> LocatedStore:
        """Connect to the job's store; serve it if there is none.

        Closes the store that was located before.

        Cancellation: leaves nothing open.

        Args:
            is_first: whether the job starts here; otherwise its store was lost.
            job: that in which this node took part last.
            may_serve: whether this node may serve a store now.

        Raises:
            DiscoveryError: no endpoint could be used within `read_timeout`; or this
                node must serve the store, and another program has the port.
        """
        await self.aclose()
        # While the run is active elsewhere, there is no hurry to serve another store.
        is_first = is_first or self._is_superseded
        dialer = self._dialer.seeking(job)
        search = EndpointSearch(
            self._endpoints, dialer, self._spec, is_first=is_first, may_serve=may_serve
        )
        try:
            try:
                return await self._search(search)
            finally:
                await search.aclose()
        except BaseException:  # a cancellation too: no store stays open
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Close the connection, and the server if this process has it; 3 s at most.

        Idempotent; safe to call again after cancellation.

        Cancellation: raised after everything is closed.
        """
        if self._store is not None or self._server is not None:
            await run_shielded(self._close)

    def _check_certificates(self, tls: TlsSpec) -> None:
        from elastic_aio.store.tls import check_tls  # OpenSSL is for TLS only

        is_host = self._spec.is_host
        # Other nodes need not serve.
        names = [endpoint.host for endpoint in self._endpoints] if is_host else []
        check_tls(tls, may_serve=is_host is not False, may_connect=True, names=names)

    # ----------------------------------------------------------------- locating

    async def _search(self, search: EndpointSearch) -> LocatedStore:
        while True:
            if search.is_notice_due() and not search.is_over:
                self._on_wait(await search.explain(), search.time_left)
            match search.choice():
                case UseStore(index):
                    monitor = search.monitors[index]
                    return self._located(monitor, await monitor.take())
                case _ if search.is_over:
                    raise DiscoveryError(
                        f"no store could be reached within {self._spec.read_timeout:g} s: "
                        f"{await search.explain()}"
                    )
                case ServeStore(index):
                    located = await self._serve(search, search.monitors[index])
                    if located is not None:
                        return located
                case WaitUntil(until):
                    await search.wait_changed(until)

    def _located(self, monitor: EndpointMonitor, handshake: StoreHandshake) -> LocatedStore:
        self._store, self._is_superseded = handshake.store, False
        endpoint, server = monitor.endpoint, self._server
        text = endpoint.text
        if not endpoint.port and server is not None:
            text = f"{text.rpartition(':')[0]}:{server.port}"
        address = _public_address(monitor, handshake.local_address)
        store = handshake.store
        return LocatedStore(
            store,
            store.instance,
            text,
            endpoint.index,
            is_host=server is not None,
            local_address=address,
            wait_superseded=functools.partial(self._wait_superseded, endpoint.index),
            confirm_superseded=functools.partial(self._confirm_superseded, endpoint.index),
            is_known_elsewhere=functools.partial(self._is_known_elsewhere, endpoint.index),
        )

    async def _serve(self, search: EndpointSearch, monitor: EndpointMonitor) -> LocatedStore | None:
        """Serve the store; None if that is impossible now."""
        addresses = search.addresses_to_bind(monitor)
        try:
            sockets = self._dialer.network.listen(addresses, _KEEPALIVE_TIMEOUT)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and self._spec.is_host:
                handshake = await self._dial_port_owner(monitor)
                if handshake is not None:
                    return self._located(monitor, handshake)
            search.defer(monitor, f"cannot listen there: {error.strerror}")
            return None
        self._was_suspended.clear()
        self._server = server = StoreServer(
            listening=sockets,
            token=self._spec.token,
            tls=self._spec.tls,
            on_drop=self._on_drop,
            on_pause=self._on_pause,
        )
        owner = owner_value(self._dialer.run_id, is_node=True)
        server.keyspace.set(wire_key(OWNER_KEY, ""), owner)
        await server.start()
        is_wildcard = addresses != monitor.own_addresses
        try:
            handshake = await self._dial_own(server, monitor, is_wildcard=is_wildcard)
        except StoreNotFound as error:
            # Binding succeeded, but the endpoint routes elsewhere (e.g. a NAT address),
            # another process bound it first, or the certificate is for another host.
            self._server = None
            await server.aclose()
            search.defer(monitor, f"listening there, this node does not reach itself: {error}")
            return None
        return self._located(monitor, handshake)

    async def _dial_own(
        self, server: StoreServer, monitor: EndpointMonitor, *, is_wildcard: bool
    ) -> StoreHandshake:
        """Connect to this node's server as other nodes do.

        Raises:
            StoreNotFound: that leads elsewhere, or the server is not accepted.
        """
        port, host = server.port, monitor.endpoint.host
        addresses = [(family, (name[0], port, *name[2:])) for family, name in monitor.addresses]
        # An address of another host that has not even refused a connection drops the packets.
        if is_wildcard and monitor.state is EndpointState.UNKNOWN:
            addresses = []
        dialer = Dialer(self._spec, self._dialer.run_id, self._dialer.network)
        try:
            handshake = await dialer.dial(host, addresses)
        except StoreNotFound:
            if not is_wildcard:
                raise
            # Others reach it by a translated address, which may not work from this host.
            handshake = await dialer.dial(host, loopback_addresses(port))
        if handshake.store.instance != server.instance:
            await handshake.store.aclose()
            raise StoreNotFound("another store answers there", was_accepted=True)
        return handshake

    async def _dial_port_owner(self, monitor: EndpointMonitor) -> StoreHandshake | None:
        """Connect to the store of this host that has the port; None if none answers.

        Raises:
            DiscoveryError: another program has the port.
        """
        port = monitor.endpoint.port
        try:
            addresses = (*monitor.addresses, *loopback_addresses(port))
            return await self._dialer.dial(monitor.endpoint.host, addresses)
        except StoreNotFound as error:
            if not error.was_accepted:
                return None
            owner = await self._dialer.network.port_owner(port) or "another program"
            raise DiscoveryError(
                f"cannot serve the store at {monitor.endpoint.text}: port {port} is in use by "
                f"{owner}, which this job cannot use: {error}"
            ) from None

    # ------------------------------------------------ while the store is in use

    async def _wait_superseded(
        self, index: int, run: RunRecord, is_committed: Callable[[], bool], *, at_once: bool
    ) -> ActiveElsewhere:
        """Wait until the run is active at another endpoint than that of `index`; return it.

        The process that serves the store, or leads there, yields to an earlier endpoint at any
        time; to a later one only in three cases:

        * it was suspended for so long that the other nodes may have moved there;
        * it has just come from another store, and looks whether its job goes on there;
        * its own job has had no round, and that at the other endpoint has.

        Args:
            index: of the endpoint of this store.
            run: the generation there.
            is_committed: whether this node is committed to its job.
            at_once: whether this is the first wait at this store, and begins with a look.
        """
        if len(self._endpoints) == 1:
            await wait_forever()
        looks_at_all = at_once and run.is_continued
        is_due = at_once and (index or looks_at_all)
        while True:
            # The first endpoint yields to a later one before its first round alone.
            interval = None
            if index or not is_committed():
                interval = min(self._spec.heartbeat_timeout, _OTHER_INTERVAL_MAX)
            if is_due:
                interval = 0.0
            with contextlib.suppress(TimeoutError):
                # There is no notification of a server that begins to listen: poll.
                async with asyncio.timeout(interval):
                    await self._was_suspended.wait()
            was_suspended = self._was_suspended.is_set()
            self._was_suspended.clear()
            looks_at_all = looks_at_all or was_suspended or not is_committed()
            others = [
                one
                for one in self._endpoints
                if one.index < index or (one.index > index and looks_at_all)
            ]
            began = asyncio.get_running_loop().time()
            jobs = await self._jobs_at(index, run, others)
            if any(jobs) and asyncio.get_running_loop().time() - began > _LATE_LOOK_S:
                # A process that was suspended has answered now, and is about to yield itself.
                await asyncio.sleep(_SECOND_LOOK_S)
                jobs = await self._jobs_at(index, run, others)
            for endpoint, job in zip(others, jobs, strict=True):
                if job:
                    return ActiveElsewhere(endpoint, job, was_suspended)
            looks_at_all = is_due = False

    async def _confirm_superseded(self, index: int, run: RunRecord, other: ActiveElsewhere) -> bool:
        """Return whether the run is active elsewhere, and has not moved away from there.

        Two nodes that decide at the same time both find the claim of a move at the other store.
        Both stay then, and the one that was suspended looks again.
        """
        self._is_superseded = await self._job_at(index, run, other.endpoint) == other.job
        if other.was_suspended and not self._is_superseded:
            await asyncio.sleep(_SECOND_LOOK_S)
            self._was_suspended.set()
        return self._is_superseded

    async def _is_known_elsewhere(self, index: int, job: str) -> bool:
        """Return whether another endpoint has `job`, or its success."""
        others = [one for one in self._endpoints if one.index != index]
        run = RunRecord(0, job, is_continued=True)
        self._is_superseded = job in await self._jobs_at(index, run, others)
        return self._is_superseded

    async def _jobs_at(
        self, index: int, run: RunRecord, endpoints: Sequence[Endpoint]
    ) -> list[str]:
        async with asyncio.TaskGroup() as group:
            looks = [group.create_task(self._job_at(index, run, one)) for one in endpoints]
        return [look.result() for look in looks]

    def _on_pause(self, seconds: float) -> None:
        # The suspension is known only roughly; the others give up after an exact time.
        if seconds + PAUSE_RESOLUTION >= self._dialer.reply_timeout:
            self._was_suspended.set()

    async def _job_at(self, index: int, run: RunRecord, endpoint: Endpoint) -> str:
        """Return the job to go to at an endpoint, in a store of another process; or nothing."""
        with_round = run.is_continued or endpoint.index > index
        dialer = self._dialer.seeking(run.job, with_round=with_round, any_end=False)
        try:
            async with asyncio.timeout(_OTHER_TIMEOUT):
                addresses = await resolve(endpoint.host, endpoint.port)
                handshake = await dialer.dial(endpoint.host, addresses)
        except (StoreNotFound, OSError):  # a TimeoutError is an OSError
            return ""
        instance = handshake.store.instance
        await handshake.store.aclose()
        is_other = self._server is None or self._server.instance != instance
        return handshake.job if is_other else ""

    async def _close(self) -> None:
        if self._store is not None:
            await self._store.aclose()
        if self._server is not None:
            await self._server.aclose()
        self._store = self._server = None


def _public_address(monitor: EndpointMonitor, local_address: str) -> str:
    """Return the address by which other hosts reach this one.

    It is that of the connection, unless this host resolves its own name to a loopback
    address, or reaches itself only by one.
    """
    host = monitor.endpoint.host
    if not is_loopback(local_address) or is_loopback(host) or is_loopback_name(host):
        return local_address
    return outbound_address(monitor.addresses) or outbound_address() or local_address
