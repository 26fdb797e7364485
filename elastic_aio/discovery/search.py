"""One search for the job's store, over all endpoints at once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Final

from elastic_aio.aio import create_task, run_shielded
from elastic_aio.discovery.addresses import (
    is_loopback,
    is_loopback_name,
    resolve,
    wildcard_addresses,
)
from elastic_aio.discovery.choice import (
    Choice,
    EndpointState,
    choose_endpoint,
    endpoint_turn,
    search_grace,
)
from elastic_aio.discovery.dialer import SILENT, Dialer, Endpoint, StoreHandshake, StoreNotFound
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.spec.restart import Backoff
from elastic_aio.store.sockets import Address

_SILENT_AFTER: Final = 2.0
"""Seconds of an attempt after which an endpoint counts as one without a store."""

_RESOLVE_TIMEOUT: Final = 1.0
"""Seconds for the addresses of a host."""

_ADDRESS_AGE_MAX: Final = 1.0
"""Seconds for which resolved addresses are used again."""

_RETRY: Final = Backoff(initial=0.05, factor=1.3, cap=1.0)
"""Before an endpoint is dialled again."""

_RETRY_REFUSED: Final = Backoff(initial=1.0, factor=1.5, cap=5.0)
"""The same for a store that refuses this node: another job's, or one with another token."""

_RETRY_BIND: Final = Backoff(initial=0.2, factor=1.3, cap=1.0, jitter=False)
_RETRY_BIND_REFUSED: Final = Backoff(initial=2.5, jitter=False, cap=2.5)
"""Before another attempt to listen at a port: for any program, and for a store that refuses us."""

_STEP_MIN: Final = 0.001
_STEP_MAX: Final = 0.1
"""Seconds of a wait for a turn, after which it checks whether this process was suspended.

The least is more than the clock resolves, so that each wait is progress.
"""

_NOTICE: Final = 5.0
_NOTICE_REFUSED: Final = 1.0
"""Seconds of a search after which its node reports it: in general, and if a store refuses it."""


class EndpointMonitor:
    """Dials one endpoint repeatedly until there is a store.

    Must be closed.
    """

    def __init__(self, endpoint: Endpoint, dialer: Dialer, on_change: Callable[[], None]) -> None:
        """Begin; `on_change` is called when `state` has changed."""
        self.endpoint = endpoint
        self.addresses: tuple[Address, ...] = ()
        self.own_addresses: tuple[Address, ...] = ()
        """Those of `addresses` that belong to this host."""
        self.state = EndpointState.UNKNOWN
        self.reason = "does not answer"
        """Why there is no store."""
        self.turn = math.inf
        """Seconds of a search after which this node may serve it."""
        self.bind_error = ""
        """Why this node could not serve it when it tried last."""
        self._handshake: StoreHandshake | None = None
        self._dialer = dialer
        self._on_change = on_change
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
        """Stop, and close the store that was not taken.

        Idempotent; safe to call again after cancellation.
        """
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
                is_refused = self.state is EndpointState.REFUSED
                retry = _RETRY_REFUSED if is_refused else _RETRY
                async with asyncio.timeout(retry.delay(attempt, random.random)):
                    await self._retry.wait()

    async def _dial(self) -> None:
        # The attempt goes on: its answer may be on the way.
        silent = asyncio.get_running_loop().call_later(_SILENT_AFTER, self._set_no_store, SILENT)
        try:
            self._handshake = await self._dialer.dial(self.endpoint.host, self.addresses)
        except StoreNotFound as error:
            no_store = EndpointState.REFUSED if error.is_refusal else EndpointState.NO_STORE
            self._set_no_store(str(error), no_store)
            return
        finally:
            silent.cancel()
        has_job = bool(self._handshake.job)
        self.state = EndpointState.ACTIVE_RUN if has_job else EndpointState.STORE
        self._on_change()
        why = await self._handshake.store.wait_lost()
        self._handshake = None
        self._set_no_store(why)

    def _set_no_store(self, why: str, state: EndpointState = EndpointState.NO_STORE) -> None:
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
    """Monitors of all endpoints, and when this node may serve each of them.

    Must be closed.
    """

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
        self._grace = search_grace(is_first=is_first, timeout=timeout)
        self._deferrals = 0
        self._noticed: set[bool] = set()
        self.monitors = [EndpointMonitor(one, dialer, self._changed.set) for one in endpoints]
        for index, monitor in enumerate(self.monitors):
            monitor.turn = endpoint_turn(index, is_first=is_first, timeout=timeout)

    @property
    def time_left(self) -> float:
        """Seconds until the timeout."""
        return self._timeout - self._elapsed

    @property
    def is_over(self) -> bool:
        """Whether the timeout has passed."""
        return self.time_left <= 0

    def choice(self) -> Choice:
        """Return what to do now."""
        for monitor in self.monitors:
            monitor.check()
        states = [monitor.state for monitor in self.monitors]
        turns = [one.turn if self.addresses_to_bind(one) else math.inf for one in self.monitors]
        return choose_endpoint(states, turns, self._elapsed, self._grace)

    async def wait_changed(self, until: float) -> None:
        """Wait until a state changes, or the search has taken `until` seconds.

        Returns early too.  While a process is suspended it cannot learn that another node
        serves an earlier endpoint.  So when it continues, there is some time left before the
        next turn, or before the end of the search: the grace period, if as much was left before.
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
        is_refused = monitor.state is EndpointState.REFUSED
        retry = _RETRY_BIND_REFUSED if is_refused else _RETRY_BIND
        monitor.turn = self._elapsed + retry.ceiling(self._deferrals) * (1 + random.random())
        self._deferrals += 1
        if not is_refused:
            monitor.retry_now()

    def is_notice_due(self) -> bool:
        """Return whether the search has taken so long that it must be reported.

        That is once, and once more for a refusal that comes later.
        """
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
        return any(one.state is EndpointState.REFUSED for one in self.monitors)

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
        """Stop all monitors, and close the connections that were not taken.

        Idempotent; safe to call again after cancellation.
        """
        if not all(monitor.is_closed for monitor in self.monitors):
            await run_shielded(self._close)

    async def _close(self) -> None:
        for monitor in self.monitors:
            await monitor.aclose()


def _reachable_addresses(endpoint: Endpoint, own: Sequence[Address]) -> Sequence[Address]:
    """Return where to listen, so that other hosts reach this one by the endpoint's name.

    Many systems list a host's own name with a loopback address (127.0.1.1), by which
    no other host can reach it.
    """
    is_literal = any(address[0] == endpoint.host for _, address in own)
    is_public = any(not is_loopback(str(address[0])) for _, address in own)
    if is_literal or is_public or is_loopback_name(endpoint.host):
        return own
    return wildcard_addresses(endpoint.port)
