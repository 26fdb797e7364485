"""TLS of the store: contexts from the files of a `TlsSpec`, and the layer of a connection.

Every mistake that the files show by themselves is found before a connection: a file that is missing
or is no PEM, a key of another certificate or with a passphrase, and, by a handshake in memory, a
certificate that has expired or that its own CA does not verify.

`TlsTransport` replaces the loops' own TLS: asyncio (3.11 to 3.13) and uvloop close without the
alert of a failed handshake.  A client without a certificate, whose handshake is over by then in TLS
1.3, sees `connection_lost(None)` and tries again for `timeout` seconds; a server whose certificate
is refused sees a reset.  With the alert, each says why.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
from collections.abc import Sequence
from typing import Any, Final, NoReturn, Protocol, cast

from elastic_aio.errors import SpecError
from elastic_aio.spec.tls import TlsSpec
from elastic_aio.store.wire import TLS_ALERT

_CERTIFICATE: Final = re.compile(rb"-----BEGIN (X509 |TRUSTED )?CERTIFICATE-----")
_KEY: Final = re.compile(rb"-----BEGIN ([A-Z0-9]+ )*PRIVATE KEY-----")
_ENCRYPTED: Final = re.compile(
    rb"-----BEGIN ENCRYPTED PRIVATE KEY-----|^Proc-Type: *4,", re.MULTILINE
)
_MISMATCH: Final = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH")


class TlsContext:
    """The context of one side of TLS connections; renewed when its files have changed."""

    def __init__(self, tls: TlsSpec, *, is_server: bool) -> None:
        """Load the files; SpecError: a file cannot be used."""
        (tls.check_server if is_server else tls.check_client)()
        self.spec = tls
        self._is_server = is_server
        self._stamps = _stamps(tls)
        self._context = _context(tls, is_server=is_server)

    def current(self) -> ssl.SSLContext:
        """Return the context of the files as they are now; of the former ones if unusable.

        Files that are being replaced do not belong together for a moment.
        """
        stamps = _stamps(self.spec)
        if stamps != self._stamps:
            try:
                self._context = _context(self.spec, is_server=self._is_server)
            except SpecError:
                return self._context
            self._stamps = stamps
        return self._context

    def layer(self, user: TlsUser, server_name: str | None = None) -> TlsTransport:
        """Return the TLS of one connection, as `TlsTransport` takes the arguments."""
        return TlsTransport(user, self.current(), server_name)


def check_tls(
    tls: TlsSpec, *, may_serve: bool, may_connect: bool, names: Sequence[str] = ()
) -> None:
    """Check the files of a server, a client, or a node that may be either, in a few milliseconds.

    The side makes handshakes with itself.  The node serves at least one of the hosts `names`.
    SpecError: a file cannot be used, or the certificate would be refused.
    """
    server = TlsContext(tls, is_server=True).current() if may_serve else None
    client = TlsContext(tls, is_server=False).current() if may_connect else None
    if tls.cert is None:
        return
    if server is not None and client is not None:
        client.check_hostname = False
        problem = f"is not accepted by {tls.ca}"
    else:
        # The CA of the other side may be another one: only the certificate itself is checked.
        server, client = _context(tls, is_server=True), _context(tls, is_server=False)
        client.check_hostname = False
        verifier, other = (client, server) if may_serve else (server, client)
        verifier.verify_mode, other.verify_mode = ssl.CERT_REQUIRED, ssl.CERT_NONE
        verifier.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        verifier.load_verify_locations(tls.cert)
        problem = "cannot be used"
    if why := _refusal(server, client):
        raise SpecError("tls.cert", tls.cert, f"{problem}: {why}")
    client.check_hostname = True
    names = names if tls.server_name is None else [tls.server_name]
    if may_serve and names and all(_refusal(server, client, name) for name in names):
        raise SpecError("tls.cert", tls.cert, f"is not for {' or '.join(names)}")


def _refusal(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None = None) -> str:
    """Return why a handshake between the two fails; empty if it does not."""
    try:
        _shake_hands(server, client, name)
    except ssl.SSLCertVerificationError as error:
        return str(error.verify_message)
    except ssl.SSLError as error:
        return tls_reason(error)
    return ""


def tls_reason(error: ssl.SSLError) -> str:
    """Return the reason of an error of OpenSSL as text."""
    return (error.reason or error.strerror or type(error).__name__).lower().replace("_", " ")


def _context(tls: TlsSpec, *, is_server: bool) -> ssl.SSLContext:
    # Both sides are of this package, so they have TLS 1.3.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if tls.cert is not None:
        _load_certificate(context, str(tls.cert), str(tls.key))
    if tls.ca is not None:
        _load_ca(context, str(tls.ca))
    if is_server:
        context.num_tickets = 0  # a session is never resumed
        context.verify_mode = ssl.CERT_REQUIRED if tls.requires_client_cert else ssl.CERT_NONE
    return context


def _load_certificate(context: ssl.SSLContext, cert: str, key: str) -> None:
    if not _CERTIFICATE.search(_read("cert", cert)):
        raise SpecError("tls.cert", cert, "must hold a certificate in PEM format")
    content = _read("key", key)
    if _ENCRYPTED.search(content):
        raise SpecError("tls.key", key, "must not be encrypted: nothing can enter its passphrase")
    if not _KEY.search(content):
        raise SpecError("tls.key", key, "must hold a private key in PEM format")
    try:
        # OpenSSL would ask the terminal for a passphrase otherwise.
        context.load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        if error.reason in _MISMATCH:
            raise SpecError(
                "tls.key", key, f"must be the key of the certificate in {cert}"
            ) from None
        _raise_unusable("cert" if _is_broken(cert) else "key", {"cert": cert, "key": key}, error)


def _load_ca(context: ssl.SSLContext, ca: str) -> None:
    if not _CERTIFICATE.search(_read("ca", ca)):
        raise SpecError("tls.ca", ca, "must hold certificates in PEM format")
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        _raise_unusable("ca", {"ca": ca}, error)


def _raise_unusable(name: str, paths: dict[str, str], error: ssl.SSLError) -> NoReturn:
    raise SpecError(f"tls.{name}", paths[name], f"cannot be used: {tls_reason(error)}") from None


def _is_broken(cert: str) -> bool:
    """Return whether a file has no certificate that OpenSSL can read."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cert)
    except ssl.SSLError:
        return True
    return False


def _read(name: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        problem = f"must be a file that can be read: {reason}"
        raise SpecError(f"tls.{name}", path, problem) from None


def _stamps(tls: TlsSpec) -> tuple[Any, ...]:
    """Return values that are others once a file has been replaced or written."""
    return tuple(_stamp(path) for path in (tls.cert, tls.key, tls.ca) if path is not None)


def _stamp(path: Any) -> object:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None) -> None:
    """Make a handshake in memory, each flight of which is one round of the loop."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server, server_side=False, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(3):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass


_RECORD_TYPES: Final = range(20, 24)
"""First bytes of a TLS record (RFC 8446, 5.1)."""

_NO_ISSUER: Final = (2, 18, 19, 20, 21)
_OTHER_NAME: Final = (62, 64)
"""Codes of OpenSSL (X509_V_ERR_...): self-signed or without its CA; another host or address."""

_RECORD: Final = 16 << 10
_EOF: Final = "the peer closed the connection in the TLS handshake: it may not speak TLS"

_CLIENT_REASONS: Final = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the store requires a client certificate (give tls_cert"
    " and tls_key)",
    "TLSV1_ALERT_UNKNOWN_CA": "tls_cert: is not signed by a CA of the store",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "tls_cert: has expired, says the store",
    "SSLV3_ALERT_BAD_CERTIFICATE": "tls_cert: is refused by the store",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "tls_cert: is not for clients, says the store",
}
_SERVER_REASONS: Final = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "presented no certificate",
    "TLSV1_ALERT_UNKNOWN_CA": "does not know the CA of this store's certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "refuses this store's certificate, which has expired",
    "SSLV3_ALERT_BAD_CERTIFICATE": "refuses this store's certificate, whose name is another",
}


def _client_reason(error: ssl.SSLCertVerificationError) -> str:
    """Return why the certificate of a server is refused, and which setting decides it."""
    message = error.verify_message.rstrip(".")
    if error.verify_code in _NO_ISSUER:
        return f"tls_ca does not verify it: {message}"
    if error.verify_code in _OTHER_NAME:
        return f"{message} (tls_server_name sets another name)"
    return message


class TlsUser(Protocol):
    """An `asyncio.Protocol` that may be run over TLS.

    `tls_failed` closes the connection: it cannot be encrypted, or a side is not accepted.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None: ...
    def connection_lost(self, error: Exception | None) -> None: ...
    def data_received(self, data: bytes) -> None: ...
    def eof_received(self) -> bool | None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...
    def tls_failed(self, reason: str) -> None: ...


class TlsTransport(asyncio.Transport, asyncio.Protocol):
    """The transport of a protocol, and the protocol of the connection below.

    The protocol's `connection_made` comes with the connection, which so counts, and has its
    deadline, from its first byte.  What it writes before the end of the handshake is sent after it.
    The layer has neither buffer nor flow control: data is decrypted and delivered, or encrypted and
    passed on, at once.
    """

    def __init__(
        self, user: TlsUser, context: ssl.SSLContext, server_name: str | None = None
    ) -> None:
        """Prepare the layer of one connection.

        `server_name` is the name or address that the certificate of the server must have; None:
        this side is the server.  ValueError: it cannot be a name.
        """
        super().__init__()
        self._user = user
        self._is_server = server_name is None
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=self._is_server,
            server_hostname=server_name,
        )
        self._is_open = self._has_received = self._has_failed = False
        self._unsent: list[bytes] = []
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait_open(self) -> None:
        """Wait until the handshake is complete.

        Cancellation: leaves the connection open.  ConnectionError: it has ended; the protocol knows
        why.
        """
        await asyncio.shield(self._opened)

    # The protocol of the connection.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self._raw = cast("asyncio.Transport", transport)
        self._user.connection_made(self)
        if not self._is_server:
            self._advance()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._opened.done():
            self._opened.set_exception(ConnectionError(_EOF))
            self._opened.exception()  # mark it as retrieved: the waiter may have been cancelled
            if not isinstance(error, TimeoutError):
                error = ConnectionError(_EOF)
        self._user.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if not self._has_received:
            self._has_received = True
            if data[0] not in _RECORD_TYPES:
                self._refuse_plain()
                return
        self._incoming.write(data)
        if self._is_open or self._advance():
            self._read()

    def eof_received(self) -> None:
        self._user.eof_received()

    def pause_writing(self) -> None:
        self._user.pause_writing()

    def resume_writing(self) -> None:
        self._user.resume_writing()

    def _advance(self) -> bool:
        """Continue the handshake; return whether it is complete."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        except ssl.SSLError as error:
            self._fail(error)
            return False
        self._is_open = True
        self._flush()
        unsent, self._unsent = self._unsent, []
        for data in unsent:
            self.write(data)
        if not self._opened.done():
            self._opened.set_result(None)
        return True

    def _read(self) -> None:
        received: list[bytes] = []
        failure: ssl.SSLError | None = None
        is_over = False
        try:
            while not is_over and (self._incoming.pending or self._tls.pending()):
                received.append(self._tls.read(_RECORD))
                is_over = not received[-1]
        except ssl.SSLWantReadError:
            pass  # the rest of a record is to come
        except ssl.SSLError as error:
            failure = error
        self._flush()  # the peer may have asked for new keys
        if failure is not None:
            self._has_failed = True  # OpenSSL takes no answer to what came before the alert
        if data := b"".join(received):
            self._user.data_received(data)
        if is_over:
            self.close()
        elif failure is not None:
            self._fail(failure)

    def _fail(self, error: ssl.SSLError) -> None:
        self._flush()  # the alert
        if isinstance(error, ssl.SSLCertVerificationError):
            if self._is_server:
                reason = f"presented a certificate that is refused: {error.verify_message}"
            else:
                reason = f"the certificate of the store is refused: {_client_reason(error)}"
        else:
            reasons = _SERVER_REASONS if self._is_server else _CLIENT_REASONS
            reason = reasons.get(error.reason, f"failed in TLS: {tls_reason(error)}")
        self._end(reason)

    def _refuse_plain(self) -> None:
        if self._is_server:
            self._raw.write(TLS_ALERT)
            self._end("does not speak TLS, which this store requires")
        else:
            self._end("the store does not speak TLS (remove tls_ca)")

    def _end(self, reason: str) -> None:
        self._has_failed = True
        self._user.tls_failed(reason)

    def _flush(self) -> None:
        if self._outgoing.pending and not self._raw.is_closing():
            self._raw.write(self._outgoing.read())

    # The transport of the protocol.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt and send; before the end of the handshake, keep; after a failure, drop."""
        if not self._is_open:
            self._unsent.append(bytes(data))
            return
        if self._has_failed or self._raw.is_closing():
            return
        try:
            with memoryview(data) as view:
                sent = 0
                while sent < len(view):
                    sent += self._tls.write(view[sent:])
        except ssl.SSLError as error:
            self._has_failed = True
            # Later: the protocol is about to register what it has written.
            asyncio.get_running_loop().call_soon(self._fail, error)
            return
        self._flush()

    def close(self) -> None:
        """Send what was written, and the end of the stream; close the connection."""
        if self._is_open and not self._raw.is_closing():
            try:
                self._tls.unwrap()
            except ssl.SSLError:
                pass  # the peer's end of the stream is not waited for
            self._flush()
        self._raw.close()

    def abort(self) -> None:
        """Close the connection now; after an alert, once that is sent."""
        if self._has_failed:
            self._raw.close()
        else:
            self._raw.abort()

    def is_closing(self) -> bool:
        return self._raw.is_closing()

    def pause_reading(self) -> None:
        self._raw.pause_reading()

    def resume_reading(self) -> None:
        self._raw.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._user = cast("TlsUser", protocol)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the information of the connection, or the `ssl_object`."""
        return self._tls if name == "ssl_object" else self._raw.get_extra_info(name, default)
