"""Finds the job's store at one of its endpoints, or serves it there.

Who serves the store
====================

Every node has the same list of endpoints and must find the same store, but no node knows in advance
which node serves it: the same command line is used on all of them.  There is no second service to
ask; the network and the kernel are all there is.

* Whether an endpoint is this host's own is decided by trying to listen there.  Comparing names
  fails for aliases, for /etc/hosts entries, and for addresses behind a load balancer; bind(2)
  knows.  It also decides between two processes of one host: only one can bind the port.
* Trying to listen says nothing about the route: the address may belong to this host and yet be
  translated to another one.  So the server then connects to itself by the endpoint's address and
  compares the instance that answers with its own.
* Every node, the one that serves included, is a client of the store from then on.
* A store at which the run is active wins over an earlier endpoint without it, so that a node that
  joins late does not start a second job at the first endpoint.

Why turns
=========

With several endpoints two nodes could serve one each.  Therefore each endpoint has a turn: the
second is served 4 s after the start at the earliest, the third 1 s later, because hosts do not boot
all at once.  By then the node of the first endpoint has usually begun to listen, and the others
have connected.  After a loss the turns come at 0.3 s, 0.9 s, ..., because all nodes start searching
at once, and their leases last only some seconds.  A busy host begins to serve and is found within
0.6 s.

A node that was suspended may not know of another store, so it looks at the earlier endpoints once
more before its turn.  Turns are no guarantee nevertheless.  If there are two stores, the node that
serves the later one looks at the earlier ones every 5 s, or every `heartbeat_timeout` if that is
less (`wait_superseded`), and abandons its own once the run is active there.  It says so in its
store before, and looks again after that (`confirm_superseded`): the node that serves the other
store may have decided the same.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import copy
import errno
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct

from elastic_aio.aio import create_task, run_shielded
from elastic_aio.discovery import choice
from elastic_aio.discovery.network import (
    StoreNetwork,
    is_loopback,
    is_loopback_name,
    loopback_addresses,
    outbound_address,
    resolve,
    wildcard_addresses,
)
from elastic_aio.discovery.runs import OWNER_KEY, RunRecord, claim_store, job_to_join, owner_value
from elastic_aio.errors import ElasticAioError, StoreError, StoreRefused
from elastic_aio.sockets import Address, format_endpoint
from elastic_aio.spec.checks import parse_host_port
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.spec.restart import Backoff
from elastic_aio.spec.tls import TlsSpec
from elastic_aio.store import Dropped, RemoteStore, StoreServer, connect
from elastic_aio.store.base import wire_key
from elastic_aio.store.connection import PAUSE_RESOLUTION
from elastic_aio.store.engine import EngineStore
from elastic_aio.text import one_line

_CONNECT_TIMEOUT: Final = 2.0
"""Seconds for a connection: the kernel repeats a lost SYN after one second (tcp(7))."""

_REPLY_TIMEOUT: Final = 8.0
"""Seconds for the answers of a store that has accepted: thousands of nodes may arrive at once."""

_PING_SHARES: Final = (0.1, 0.2)
_PING_INTERVAL_MIN: Final = 2.0

SILENT: Final = "it accepts connections, but does not answer"

_ADDRESSES_MAX: Final = 16
_REASON_MAX: Final = 200
_REASONS: Final = {
    errno.ECONNREFUSED: "connection refused",
    errno.ENETUNREACH: "no route to it",
    errno.EHOSTUNREACH: "no route to it",
    errno.ENETDOWN: "no route to it",
    errno.EADDRNOTAVAIL: "no route to it",
    errno.ETIMEDOUT: "does not answer",
}


class Endpoint(Struct, frozen=True):
    """One endpoint of the list."""

    index: int
    text: str
    host: str
    port: int

    @classmethod
    def parse(cls, index: int, text: str) -> Endpoint:
        """Parse `HOST:PORT` or `[IPV6]:PORT`; a server may use port 0, a client not."""
        return cls(index, text, *parse_host_port("endpoint", text, at_least=0))


class StoreHandshake(Struct, frozen=True):
    """A connected store; `local_address` is this host's, and `job` the job to go to, if any."""

    store: RemoteStore
    local_address: str
    job: str


class StoreNotFound(Exception):
    """There is no usable store; the message says why, in one line.

    `was_accepted`: a program accepted the connection.  `is_refusal`: it, or this node, refuses the
    other: by a token or a certificate, or it is no store.
    """

    def __init__(self, why: str, *, was_accepted: bool = False, is_refusal: bool = False) -> None:
        """Sanitize `why`: a part of it may come from the program that answered."""
        super().__init__(one_line(why, _REASON_MAX))
        self.was_accepted = was_accepted
        self.is_refusal = is_refusal


class Dialer:
    """Connects a node of a run to stores.

    With `is_exclusive` each store is made the run's own.  A store that belongs to another run is
    refused; the first node also refuses a store that another node serves.
    """

    def __init__(
        self,
        spec: RendezvousSpec,
        run_id: str,
        network: StoreNetwork,
        *,
        is_exclusive: bool = False,
    ) -> None:
        self.run_id = run_id
        self.network = network
        self._is_exclusive = is_exclusive
        self._job, self._with_round, self._any_end = "", False, True
        self._spec = spec
        self._has_choice = len(spec.endpoints) > 1

    def seeking(self, job: str, *, with_round: bool = False, any_end: bool = True) -> Dialer:
        """Return a dialer for a node of `job`; see `job_to_join`."""
        dialer = copy.copy(self)
        dialer._job, dialer._with_round, dialer._any_end = job, with_round, any_end
        return dialer

    @property
    def reply_timeout(self) -> float:
        """Seconds without an answer after which a connection is given up."""
        return self._spec.heartbeat_timeout - choice.RECONNECT_FOR - choice.FENCE

    @property
    def _ping_interval(self) -> float:
        """Seconds between two pings of an idle store.

        A node that hears nothing for half of `heartbeat_timeout` stops its workers.  The store may
        pause for the rest of that half: 1.5 s of 5, and 12 s of 30.
        """
        least, most = (share * self._spec.heartbeat_timeout for share in _PING_SHARES)
        return min(most, max(least, _PING_INTERVAL_MIN))

    async def dial(self, host: str, addresses: Sequence[Address]) -> StoreHandshake:
        """Return the first store that answers at one of the `addresses` of `host`.

        It has 2 s to accept a connection, and then 8 s, or `reply_timeout` if less.  All addresses
        are dialled at once, so that an address that drops packets delays no other.  The caller
        closes the store.

        Cancellation: leaves nothing open.

        Raises:
            StoreNotFound: no store answers.
        """
        if not addresses:
            raise StoreNotFound("its name has no address")
        # The certificate must have the name of the host.
        tls = None if self._spec.tls is None else self._spec.tls.for_host(host)
        if len(addresses) == 1:
            return await self._handshake(addresses[0], tls)
        tasks = [create_task(self._handshake(one, tls)) for one in addresses[:_ADDRESSES_MAX]]
        try:
            best = await _first_handshake(tasks)
            await run_shielded(lambda: _discard(tasks, best))
        except BaseException:  # a cancellation too: no connection stays open
            await run_shielded(lambda: _discard(tasks, None))
            raise
        return best

    async def _handshake(self, address: Address, tls: TlsSpec | None) -> StoreHandshake:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT):
                sock = await self.network.dial(address)
        except OSError as error:
            number = errno.ETIMEDOUT if isinstance(error, TimeoutError) else error.errno
            reason = _REASONS.get(number or 0) or error.strerror or str(error)
            raise StoreNotFound(reason) from None
        local_address = str(sock.getsockname()[0])
        store = connect(
            format_endpoint(address[1]),
            reply_timeout=self.reply_timeout,
            reconnect_for=choice.RECONNECT_FOR,
            peer_timeout=self._spec.heartbeat_timeout,
            token=self._spec.token,
            tls=tls,
            ping_interval=self._ping_interval,
            survive_server_restart=False,
        )
        try:
            async with asyncio.timeout(min(_REPLY_TIMEOUT, self.reply_timeout)):
                await store.connect_over(sock)
                if not store.has_extensions:
                    why = "it is a plain TCPStore, which has no leases"
                    raise StoreNotFound(why, was_accepted=True)
                job = ""
                if self._has_choice:
                    job = await job_to_join(
                        store,
                        self.run_id,
                        self._job,
                        with_round=self._with_round,
                        any_end=self._any_end,
                    )
                if self._is_exclusive:
                    is_first_node = bool(self._spec.is_host)
                    why = await claim_store(store, self.run_id, is_first_node=is_first_node)
                    if why:
                        raise StoreNotFound(why, was_accepted=True)
        except BaseException as error:  # a cancellation too: no connection stays open
            await store.aclose()
            if isinstance(error, TimeoutError):
                raise StoreNotFound(SILENT, was_accepted=True) from None
            if isinstance(error, StoreError):
                is_refusal = isinstance(error, StoreRefused)
                raise StoreNotFound(str(error), was_accepted=True, is_refusal=is_refusal) from None
            raise
        return StoreHandshake(store, local_address, job)


async def _first_handshake(tasks: Sequence[asyncio.Task[StoreHandshake]]) -> StoreHandshake:
    errors: list[StoreNotFound] = []
    for finished in asyncio.as_completed(tasks):
        try:
            return await finished
        except StoreNotFound as error:
            errors.append(error)
    # Prefer the error of an address that accepted the connection.
    raise max(errors, key=lambda one: (one.was_accepted, one.is_refusal))


async def _discard(
    tasks: Sequence[asyncio.Task[StoreHandshake]], kept: StoreHandshake | None
) -> None:
    """Cancel unfinished handshakes, and close all stores but `kept`."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if task.cancelled() or task.exception() is not None or task.result() is kept:
            continue
        await task.result().store.aclose()


# --------------------------------------------------------------------------- x

_RESOLVE_TIMEOUT: Final = 1.0

_ADDRESS_AGE_MAX: Final = 1.0
"""Seconds for which resolved addresses are used again."""

_RETRY: Final = Backoff(initial=0.05, factor=1.3, cap=1.0)

_RETRY_REFUSED: Final = Backoff(initial=1.0, factor=1.5, cap=5.0)
"""Before a store is dialled again that refuses this node: another job's, or of another token."""

_RETRY_BIND: Final = Backoff(initial=0.2, factor=1.3, cap=1.0, jitter=False)
_RETRY_BIND_REFUSED: Final = Backoff(initial=2.5, jitter=False, cap=2.5)
"""Before another attempt to listen at a port: for any program, and for a store that refuses us."""

_STEP_MIN: Final = 0.001
_STEP_MAX: Final = 0.1
"""Bounds, in seconds, of a wait for a turn, after which a suspension is noticed.

The least is more than the clock resolves, so that each wait is progress.
"""

_NOTICE: Final = 5.0
_NOTICE_REFUSED: Final = 1.0
"""Seconds of a search after which its node reports it: in general, and if a store refuses it."""


class EndpointMonitor:
    """Dials one endpoint repeatedly until there is a store; must be closed."""

    def __init__(
        self,
        endpoint: Endpoint,
        dialer: Dialer,
        on_change: Callable[[], None],
        *,
        silent_after: float = 2.0,
    ) -> None:
        """Begin; `on_change` is called when `state` has changed.

        After `silent_after` seconds of an attempt the endpoint counts as without a store.
        """
        self.endpoint = endpoint
        self.addresses: tuple[Address, ...] = ()
        self.own_addresses: tuple[Address, ...] = ()
        self.state = choice.EndpointState.UNKNOWN
        self.reason = "does not answer"
        self.turn = math.inf
        """Seconds of a search after which this node may serve it."""
        self.bind_error = ""
        """Why this node could not serve it when it tried last."""
        self._handshake: StoreHandshake | None = None
        self._dialer = dialer
        self._on_change = on_change
        self._silent_after = silent_after
        self._retry = asyncio.Event()
        self._resolved_at = 0.0
        self._task = create_task(self._run(), f"monitor of {endpoint.text}")
        self._task.add_done_callback(lambda _: on_change())

    def __repr__(self) -> str:
        return f"<EndpointMonitor {self.endpoint.text}: {self.state.name}, {self.reason}>"

    def check(self) -> None:
        """Raise the error of the monitor's task, which only a defect of this package causes."""
        if self._task.done() and not self._task.cancelled():
            self._task.result()

    def retry_now(self) -> None:
        """Dial now instead of after the back-off."""
        self._retry.set()

    async def take(self) -> StoreHandshake:
        """Stop, and hand over the store; the caller closes it."""
        await self._stop()
        handshake, self._handshake = self._handshake, None
        assert handshake is not None, self
        return handshake

    @property
    def is_closed(self) -> bool:
        """Whether it has stopped, and has no store that was not taken."""
        return self._task.done() and self._handshake is None

    async def aclose(self) -> None:
        """Stop, and close the store that was not taken.  Idempotent; safe after cancellation."""
        await self._stop()
        if self._handshake is not None:
            await self._handshake.store.aclose()

    async def _stop(self) -> None:
        self._task.cancel()
        if not self._task.done():
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        for attempt in itertools.count():
            self._retry.clear()
            await self._resolve()
            if self.endpoint.port == 0:
                self._set_no_store("port 0 is known only to the node that serves it")
                return
            if self.addresses:
                await self._dial()
            # There is no notification of a server that begins to listen.
            with contextlib.suppress(TimeoutError):
                is_refused = self.state is choice.EndpointState.REFUSED
                retry = _RETRY_REFUSED if is_refused else _RETRY
                async with asyncio.timeout(retry.delay(attempt, random.random)):
                    await self._retry.wait()

    async def _dial(self) -> None:
        # The attempt goes on: its answer may be on the way.
        call_later = asyncio.get_running_loop().call_later
        silent = call_later(self._silent_after, self._set_no_store, SILENT)
        try:
            self._handshake = await self._dialer.dial(self.endpoint.host, self.addresses)
        except StoreNotFound as error:
            no_store = (
                choice.EndpointState.REFUSED if error.is_refusal else choice.EndpointState.NO_STORE
            )
            self._set_no_store(str(error), no_store)
            return
        finally:
            silent.cancel()
        has_job = bool(self._handshake.job)
        self.state = choice.EndpointState.ACTIVE_RUN if has_job else choice.EndpointState.STORE
        self._on_change()
        why = await self._handshake.store.wait_lost()
        self._handshake = None
        self._set_no_store(why)

    def _set_no_store(
        self, why: str, state: choice.EndpointState = choice.EndpointState.NO_STORE
    ) -> None:
        self.state, self.reason = state, why
        self._on_change()

    async def _resolve(self) -> None:
        """Resolve the host's name, unless that was done just now."""
        loop = asyncio.get_running_loop()
        if self.addresses and loop.time() - self._resolved_at < _ADDRESS_AGE_MAX:
            return
        why = "its name is still being resolved"
        late = loop.call_later(_RESOLVE_TIMEOUT, self._set_no_store, why)
        try:
            self.addresses = await resolve(self.endpoint.host, self.endpoint.port)
        except OSError as error:
            # The previous addresses may still be valid.
            self._set_no_store(f"its name is unknown: {error.strerror or error}")
        finally:
            late.cancel()
        self.own_addresses = tuple(filter(self._dialer.network.is_local, self.addresses))
        self._resolved_at = loop.time()


class EndpointSearch:
    """Monitors of all endpoints, and when this node may serve each of them; must be closed."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        dialer: Dialer,
        spec: RendezvousSpec,
        *,
        is_first: bool,
        may_serve: Callable[[], bool] = lambda: True,
    ) -> None:
        """Begin; see `StoreLocator.locate` for the arguments."""
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._uncounted = 0.0
        """Seconds of a suspension that do not count."""
        self._changed = asyncio.Event()
        self._is_host = spec.is_host
        self._may_serve = may_serve
        self._timeout = timeout = spec.read_timeout
        self._network = dialer.network
        self._grace = choice.search_grace(is_first=is_first, timeout=timeout)
        self._deferrals = 0
        self._noticed: set[bool] = set()
        self.monitors = [EndpointMonitor(one, dialer, self._changed.set) for one in endpoints]
        for index, monitor in enumerate(self.monitors):
            monitor.turn = choice.endpoint_turn(index, is_first=is_first, timeout=timeout)

    @property
    def time_left(self) -> float:
        """Seconds until the timeout."""
        return self._timeout - self._elapsed

    @property
    def is_over(self) -> bool:
        """Whether the timeout has passed."""
        return self.time_left <= 0

    def choice(self) -> choice.Choice:
        """Return the present step."""
        for monitor in self.monitors:
            monitor.check()
        states = [monitor.state for monitor in self.monitors]
        turns = [one.turn if self.addresses_to_bind(one) else math.inf for one in self.monitors]
        return choice.choose_endpoint(states, turns, self._elapsed, self._grace)

    async def wait_changed(self, until: float) -> None:
        """Wait until a state changes, or the search has taken `until` seconds.

        Returns early too.  While a process is suspended it cannot learn that another node serves an
        earlier endpoint.  So when it continues, there is some time left before the next turn, or
        before the end of the search: the grace period, if as much was left before.
        """
        began, elapsed = self._loop.time(), self._elapsed
        left = min(until, self._timeout, self._notice_at) - elapsed
        if until < math.inf and self._is_host is not False:
            left = min(left, _STEP_MAX)
        due = began + max(left, _STEP_MIN)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(due):
                await self._changed.wait()
        self._changed.clear()
        now = self._loop.time()
        latest = max(due, began + min(until, self._timeout) - elapsed - self._grace)
        self._uncounted += max(0.0, now - latest)

    def addresses_to_bind(self, monitor: EndpointMonitor) -> Sequence[Address]:
        """Return where this node would listen to serve an endpoint; empty: nowhere."""
        if self._is_host is False or not self._may_serve():
            return ()
        if monitor.own_addresses:
            return _reachable_addresses(monitor.endpoint, monitor.own_addresses)
        has_none = not any(one.own_addresses for one in self.monitors)
        is_behind_nat = self._is_host and monitor is self.monitors[0] and has_none
        return wildcard_addresses(monitor.endpoint.port) if is_behind_nat else ()

    def defer(self, monitor: EndpointMonitor, why: str) -> None:
        """Let some time pass before this node tries again to serve an endpoint."""
        monitor.bind_error = why
        # The kernel does not notify us when a port becomes free.
        is_refused = monitor.state is choice.EndpointState.REFUSED
        retry = _RETRY_BIND_REFUSED if is_refused else _RETRY_BIND
        monitor.turn = self._elapsed + retry.ceiling(self._deferrals) * (1 + random.random())
        self._deferrals += 1
        if not is_refused:
            monitor.retry_now()

    def is_notice_due(self) -> bool:
        """Return whether to report a long search: once, and once more for a later refusal."""
        is_due = self._elapsed >= self._notice_at
        if is_due:
            self._noticed |= {False, self._is_refused}
        return is_due

    @property
    def _elapsed(self) -> float:
        return self._loop.time() - self._began - self._uncounted

    @property
    def _notice_at(self) -> float:
        if self._is_refused in self._noticed:
            return math.inf
        return _NOTICE_REFUSED if self._is_refused else _NOTICE

    @property
    def _is_refused(self) -> bool:
        return any(one.state is choice.EndpointState.REFUSED for one in self.monitors)

    async def explain(self) -> str:
        """Return in one line why no endpoint can be used."""
        return "; ".join([await self._explain(monitor) for monitor in self.monitors])

    async def _explain(self, monitor: EndpointMonitor) -> str:
        endpoint = monitor.endpoint
        parts = [monitor.reason]
        if monitor.bind_error:
            parts.append(monitor.bind_error)
        if monitor.own_addresses and endpoint.port:
            owner = await self._network.port_owner(endpoint.port)
            if owner is not None:
                parts.append(f"port {endpoint.port} is in use by {owner}")
        return f"{endpoint.text}: {', '.join(parts)}"

    async def aclose(self) -> None:
        """Stop all monitors, and close the stores that were not taken.  Idempotent."""
        if not all(monitor.is_closed for monitor in self.monitors):
            await run_shielded(self._close)

    async def _close(self) -> None:
        for monitor in self.monitors:
            await monitor.aclose()


def _reachable_addresses(endpoint: Endpoint, own: Sequence[Address]) -> Sequence[Address]:
    """Return where to listen, so that other hosts reach this one by the endpoint's name.

    Many systems list a host's own name with a loopback address (127.0.1.1), by which no other host
    can reach it.
    """
    is_literal = any(address[0] == endpoint.host for _, address in own)
    is_public = any(not is_loopback(str(address[0])) for _, address in own)
    if is_literal or is_public or is_loopback_name(endpoint.host):
        return own
    return wildcard_addresses(endpoint.port)


_KEEPALIVE_TIMEOUT: Final = 60.0
"""Seconds without a TCP acknowledgement after which the server drops a client."""

_OTHER_INTERVAL_MAX: Final = 5.0
"""Seconds between two looks at the earlier endpoints while this node serves a later endpoint."""

_OTHER_TIMEOUT: Final = 5.0
"""Seconds for another endpoint to answer while this node serves a store."""

_LATE_LOOK_S: Final = 0.25
"""Seconds after which another endpoint's answer may come from a suspended process."""

_SECOND_LOOK_S: Final = 0.5
"""Seconds in which a node that has decided to yield looks again, and takes that back."""


# ------------------------------------------------------------------ locating


class DiscoveryError(ElasticAioError):
    """No endpoint can be used; the message is one line with the reason for each."""


class ActiveElsewhere(Struct, frozen=True):
    """Another endpoint at which the run is active.

    Attributes:
        job: the job to go to there.
        was_suspended: whether this process was, so that the other nodes may have moved there.
    """

    endpoint: Endpoint
    job: str
    was_suspended: bool


class OtherEndpoints:
    """The other endpoints of a job, for a node that uses the store at one of them."""

    def __init__(
        self,
        index: int,
        endpoints: Sequence[Endpoint],
        dialer: Dialer,
        was_suspended: asyncio.Event,
        own: StoreServer | None,
        interval: float,
    ) -> None:
        """Prepare for the store at the endpoint of `index`; `own` serves it, if this node does.

        `was_suspended` is set after a suspension in which the other nodes may have gone elsewhere.
        `interval`: seconds between two looks.
        """
        self.is_superseded = False
        """Whether the run was active elsewhere at the last look."""
        self._index = index
        self._endpoints = [one for one in endpoints if one.index != index]
        self._dialer = dialer
        self._was_suspended = was_suspended
        self._own = own
        self._interval = interval

    async def wait_superseded(
        self, run: RunRecord, is_committed: Callable[[], bool], *, at_once: bool
    ) -> ActiveElsewhere:
        """Wait until the run is active at another endpoint; return it.

        The process that serves the store, or leads there, yields to an earlier endpoint at any
        time; to a later one only in three cases:

        * it was suspended for so long that the other nodes may have moved there;
        * it has just come from another store, and looks whether its job goes on there;
        * its own job has had no round, and the job at the other endpoint has.

        Args:
            run: the generation at this store.
            is_committed: whether this node is committed to its job.
            at_once: whether this is the first wait at this store, and begins with a look.
        """
        index = self._index
        looks_at_all = at_once and run.is_continued
        is_due = at_once and (index or looks_at_all)
        while True:
            # The first endpoint yields to a later one before its first round alone.
            interval = self._interval if index or not is_committed() else None
            with contextlib.suppress(TimeoutError):
                # There is no notification of a server that begins to listen: poll.
                async with asyncio.timeout(0.0 if is_due else interval):
                    await self._was_suspended.wait()
            was_suspended = self._was_suspended.is_set()
            self._was_suspended.clear()
            looks_at_all = looks_at_all or was_suspended or not is_committed()
            others = [one for one in self._endpoints if one.index < index or looks_at_all]
            began = asyncio.get_running_loop().time()
            jobs = await self._jobs_at(run, others)
            if any(jobs) and asyncio.get_running_loop().time() - began > _LATE_LOOK_S:
                # A process that was suspended has answered now, and is about to yield itself.
                await asyncio.sleep(_SECOND_LOOK_S)
                jobs = await self._jobs_at(run, others)
            for endpoint, job in zip(others, jobs, strict=True):
                if job:
                    return ActiveElsewhere(endpoint, job, was_suspended)
            looks_at_all = is_due = False

    async def confirm_superseded(self, run: RunRecord, other: ActiveElsewhere) -> bool:
        """Return whether the run is active elsewhere, and has not moved away from there.

        Called once this store has the claim of a move.  Two nodes that decide at the same time both
        find the claim of a move at the other store.  Then both stay, and the node that was
        suspended looks again.
        """
        self.is_superseded = await self._job_at(run, other.endpoint) == other.job
        if other.was_suspended and not self.is_superseded:
            await asyncio.sleep(_SECOND_LOOK_S)
            self._was_suspended.set()
        return self.is_superseded

    async def have(self, job: str) -> bool:
        """Return whether one of the endpoints has `job`, or its success."""
        run = RunRecord(0, job, is_continued=True)
        self.is_superseded = job in await self._jobs_at(run, self._endpoints)
        return self.is_superseded

    async def _jobs_at(self, run: RunRecord, endpoints: Sequence[Endpoint]) -> list[str]:
        async with asyncio.TaskGroup() as group:
            looks = [group.create_task(self._job_at(run, one)) for one in endpoints]
        return [look.result() for look in looks]

    async def _job_at(self, run: RunRecord, endpoint: Endpoint) -> str:
        """Return the job to go to at an endpoint, in a store of another process; or nothing."""
        with_round = run.is_continued or endpoint.index > self._index
        dialer = self._dialer.seeking(run.job, with_round=with_round, any_end=False)
        try:
            async with asyncio.timeout(_OTHER_TIMEOUT):
                addresses = await resolve(endpoint.host, endpoint.port)
                handshake = await dialer.dial(endpoint.host, addresses)
        except (StoreNotFound, OSError):  # a TimeoutError is an OSError
            return ""
        instance = handshake.store.instance
        await handshake.store.aclose()
        is_other = self._own is None or self._own.instance != instance
        return handshake.job if is_other else ""


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
        others: the other endpoints of the list; None if there are none.
    """

    store: RemoteStore | EngineStore
    instance: bytes
    endpoint: str
    index: int
    is_host: bool
    local_address: str
    is_engine: bool = False
    others: OtherEndpoints | None = None


class Locator(abc.ABC):
    """Locates the stores of a job for one of its nodes, one at a time; must be closed."""

    @abc.abstractmethod
    async def locate(
        self, *, is_first: bool, job: str = "", may_serve: Callable[[], bool] = lambda: True
    ) -> LocatedStore:
        """Connect to the job's store, after closing the store that was located before.

        Cancellation: leaves nothing open.

        Args:
            is_first: whether the job starts here; otherwise its store was lost.
            job: in which this node took part last, where there is a choice of stores.
            may_serve: whether this node may serve a store now, where nodes do.

        Raises:
            DiscoveryError: there is no store that this node can use.
        """

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Close the connections, and the server if this process has it; 3 s at most.

        Idempotent; safe to call again after cancellation, which is raised once all is closed.
        """


class StoreLocator(Locator):
    """Locates the store that a node serves, at one of the endpoints; or serves it.

    The search ends after `read_timeout`, or when this node must serve the store, and another
    program has the port.
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
        """Prepare; nothing is connected yet.  `network` None: the network of this host.

        `on_wait` is called in a search that takes long, with the reason for each endpoint and the
        seconds until it ends; `on_drop`: see `StoreServer`.

        Raises:
            SpecError: a certificate cannot be used.
        """
        self._spec = spec
        self._endpoints = [Endpoint.parse(index, text) for index, text in enumerate(spec.endpoints)]
        # The workers use it too; so the first node must serve it, or find a store without a node.
        is_exclusive = spec.backend == "static"
        self._dialer = Dialer(spec, run_id, network or StoreNetwork(), is_exclusive=is_exclusive)
        if spec.tls is not None:
            self._check_certificates(spec.tls)
        self._on_wait, self._on_drop = on_wait, on_drop
        self._store: RemoteStore | None = None
        self._server: StoreServer | None = None
        self._others: OtherEndpoints | None = None
        """Of the last store; None if there is one endpoint."""
        self._was_suspended = asyncio.Event()

    def __repr__(self) -> str:
        state = self._server or self._store or "not connected"
        return f"<StoreLocator {self._spec.endpoint}: {state}>"

    async def locate(
        self, *, is_first: bool, job: str = "", may_serve: Callable[[], bool] = lambda: True
    ) -> LocatedStore:
        await self.aclose()
        # While the run is active elsewhere, there is no hurry to serve another store.
        is_first = is_first or (self._others is not None and self._others.is_superseded)
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
                case choice.UseStore(index):
                    monitor = search.monitors[index]
                    return self._located(monitor, await monitor.take())
                case _ if search.is_over:
                    raise DiscoveryError(
                        f"no store could be reached within {self._spec.read_timeout:g} s: "
                        f"{await search.explain()}"
                    )
                case choice.ServeStore(index):
                    located = await self._serve(search, search.monitors[index])
                    if located is not None:
                        return located
                case choice.WaitUntil(until):
                    await search.wait_changed(until)

    def _located(self, monitor: EndpointMonitor, handshake: StoreHandshake) -> LocatedStore:
        self._store = store = handshake.store
        endpoint, server = monitor.endpoint, self._server
        if len(self._endpoints) > 1:
            interval = min(self._spec.heartbeat_timeout, _OTHER_INTERVAL_MAX)
            self._others = OtherEndpoints(
                endpoint.index,
                self._endpoints,
                self._dialer,
                self._was_suspended,
                server,
                interval,
            )
        text = endpoint.text
        if not endpoint.port and server is not None:
            text = f"{text.rpartition(':')[0]}:{server.port}"
        address = _public_address(monitor, handshake.local_address)
        return LocatedStore(
            store,
            store.instance,
            text,
            endpoint.index,
            is_host=server is not None,
            local_address=address,
            others=self._others,
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
        """Connect to this node's server as others do; raise `StoreNotFound` if that fails."""
        port, host = server.port, monitor.endpoint.host
        addresses = [(family, (name[0], port, *name[2:])) for family, name in monitor.addresses]
        # An address of another host that has not even refused a connection drops the packets.
        if is_wildcard and monitor.state is choice.EndpointState.UNKNOWN:
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

        Raises `DiscoveryError` if another program has the port.
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

    def _on_pause(self, seconds: float) -> None:
        # The suspension is known only roughly; the others give up after an exact time.
        if seconds + PAUSE_RESOLUTION >= self._dialer.reply_timeout:
            self._was_suspended.set()

    async def _close(self) -> None:
        if self._store is not None:
            await self._store.aclose()
        if self._server is not None:
            await self._server.aclose()
        self._store = self._server = None


def _public_address(monitor: EndpointMonitor, local_address: str) -> str:
    """Return the address by which other hosts reach this one.

    It is the connection's, unless this host resolves its own name to a loopback address, or reaches
    itself only by one.
    """
    host = monitor.endpoint.host
    if not is_loopback(local_address) or is_loopback(host) or is_loopback_name(host):
        return local_address
    return outbound_address(monitor.addresses) or outbound_address() or local_address
