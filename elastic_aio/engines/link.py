"""Requests to the servers of an engine: which server, fail-over, delays, and the end.

One server is used until it fails, then the next one.  A request that no server answers is sent
again with growing, jittered delays, if it may be made twice.  After `lost_after` seconds without an
answer of any server the link is lost for good.
"""

from __future__ import annotations

import abc
import asyncio
import random
import ssl
from collections.abc import Callable
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

from msgspec import Struct

from elastic_aio.errors import StoreClosed, StoreError, StoreLost, StoreRefused, StoreTimeout
from elastic_aio.spec.checks import parse_host_port
from elastic_aio.spec.restart import Backoff
from elastic_aio.spec.tls import TlsSpec
from elastic_aio.store.link import client_context
from elastic_aio.text import error_reason

_RETRY: Final = Backoff(initial=0.05, factor=2.0, cap=1.0)


class NotDone(Exception):
    """The server has not carried out a request, and another one may; the message says why."""


class NotAnswered(Exception):
    """A server may have carried out a request; the message says why there is no reply."""


class EngineConnection(Protocol):
    """A connection to one server."""

    def abort(self) -> None:
        """Close it soon; pending requests fail."""

    async def aclose(self) -> None:
        """Close it, and wait until that is done."""


_C = TypeVar("_C", bound=EngineConnection)


class EngineAccess(Struct, frozen=True):
    """Where the servers are and how to connect; the fields are described at the stores."""

    endpoints: tuple[str, ...]
    user: str | None
    password: str | None
    tls: TlsSpec | None
    lost_after: float

    @property
    def attempt_timeout(self) -> float:
        """Seconds for one server to answer."""
        return min(3.0, max(1.0, self.lost_after / 3))


class EngineLink(abc.ABC, Generic[_C]):
    """Connections to the servers of an engine; used by any number of tasks."""

    engine: ClassVar[str]
    """Its name in messages."""

    def __init__(self, access: EngineAccess, on_end: Callable[[StoreError], None]) -> None:
        """Parse the endpoints and load the certificates, or raise `SpecError`.

        `on_end` is called once, when the link is lost or closed.
        """
        self._access = access
        self._members = [parse_host_port("endpoint", text) for text in access.endpoints]
        self._tls = client_context(access.tls)
        self._current = 0
        self._reasons: dict[int, str] = {}
        self._busy: dict[_C, int] = {}
        """The open connections that are waited for, each with its server."""
        self._on_end = on_end
        self.error: StoreError | None = None
        self.last_received_at = 0.0
        self.local_address = ""

    @property
    def endpoint(self) -> str:
        return self._access.endpoints[self._current]

    def explain(self) -> str:
        """Return why each server cannot be used."""
        return ", ".join(
            f"{endpoint}: {self._reasons.get(index, 'not tried')}"
            for index, endpoint in enumerate(self._access.endpoints)
        )

    def check(self) -> None:
        """Raise the error of a link that is lost or closed."""
        if self.error is not None:
            raise self.error

    def fail(self, error: StoreError) -> None:
        """End the link: every request raises `error` from now on."""
        if self.error is None:
            self.error = error
            for connection in self._busy:
                connection.abort()
            self._on_end(error)

    async def aclose(self) -> None:
        self.fail(StoreClosed("the store was closed"))
        await asyncio.gather(*(connection.aclose() for connection in self._connections()))

    @abc.abstractmethod
    def _connections(self) -> list[_C]:
        """Return all connections that are open."""

    @abc.abstractmethod
    async def _attempt(self, member: int, request: Any) -> Any:
        """Let a server carry out a request; NotDone or NotAnswered: another attempt may help."""

    async def repeat(
        self, request: Any, *, is_repeatable: bool = True, deadline: float | None = None
    ) -> tuple[Any, bool]:
        """Send a request until it is answered, until `deadline` (of the loop) if given.

        Return the result, and whether an earlier attempt may have been carried out too.

        Raises:
            StoreRefused: the engine refuses it; or, before the first answer, all servers and this
                client refuse each other's certificates.
            StoreLost: the link is lost, or the request must not be sent again.
            StoreTimeout: no server has answered until `deadline`.
        """
        began, is_repeat = asyncio.get_running_loop().time(), False
        attempts, refused_by = 0, set[int]()
        while True:
            self.check()
            member = self._current
            try:
                return await self._attempt(member, request), is_repeat
            except NotDone as error:
                reason, is_refusal = str(error), _is_tls_refusal(error)
            except NotAnswered as error:
                reason, is_refusal, is_repeat = str(error), _is_tls_refusal(error), True
                if not is_repeatable:
                    self.check()
                    self._fail_over(member, reason)
                    text = f"{reason}; the change may have been made or not"
                    raise StoreLost(text) from None
            if is_refusal and not self.last_received_at:
                # No server was ever reached; of one that was, the certificates may be exchanged.
                refused_by.add(member)
                if len(refused_by) == len(self._members):
                    self._fail_over(member, reason)
                    raise StoreRefused(self.explain())
            await self._back_off(member, reason, attempts, began, deadline)
            attempts += 1

    def _fail_over(self, member: int, reason: str) -> None:
        """Use the next server, and end all that still waits for this one."""
        self._reasons[member] = reason
        if self._current == member:
            self._current = (member + 1) % len(self._members)
            for connection, other in list(self._busy.items()):
                if other == member:
                    connection.abort()

    async def _back_off(
        self, member: int, reason: str, attempts: int, began: float, deadline: float | None = None
    ) -> None:
        """Wait before the next attempt.

        StoreLost: no server has answered for too long.  StoreTimeout: the deadline would pass.
        """
        self.check()
        self._fail_over(member, reason)
        # The other servers are tried at once.
        turn = attempts // len(self._members)
        is_last = (attempts + 1) % len(self._members) == 0
        delay = _RETRY.delay(turn, random.random) if is_last else 0.0
        now = asyncio.get_running_loop().time()
        if deadline is not None:
            if now + delay >= deadline:
                raise StoreTimeout(self.explain())
        elif now >= max(began, self.last_received_at) + self._access.lost_after:
            self.fail(StoreLost(f"{self.engine} does not answer: {self.explain()}"))
            self.check()
        # A poll: there is no notification of a server that begins to listen.
        await asyncio.sleep(delay)


def no_reply_reason(error: OSError) -> str:
    """Return why there is no reply, in a few words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS: {error.verify_message} (tls_ca, tls_server_name)"
    if isinstance(error, ssl.SSLError):
        from elastic_aio.store.tls import tls_reason

        setting = " (tls_cert, tls_key)" if _refuses_certificate(error) else ""
        return f"TLS: {tls_reason(error)}{setting}"
    if isinstance(error, TimeoutError):
        return "does not answer"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return error_reason(error)


def _is_tls_refusal(error: BaseException) -> bool:
    """Return whether an error comes from a certificate that one side does not accept."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError) or _refuses_certificate(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _refuses_certificate(error: BaseException) -> bool:
    """Return whether an error is the alert of a server that does not accept our certificate."""
    reason = (isinstance(error, ssl.SSLError) and error.reason) or ""
    return "_ALERT_" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason)
