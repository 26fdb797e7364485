"""The TLS contexts of servers and clients, from the files that a `TlsSpec` names.

Every mistake that the files show by themselves is found before a connection: a file that
is missing or is no PEM, a key of another certificate or with a passphrase, and, by a
handshake in memory, a certificate that has expired or that its own CA does not verify.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from elastic_aio.errors import SpecError
from elastic_aio.spec.tls import TlsSpec

_CERTIFICATE: Final = re.compile(rb"-----BEGIN (X509 |TRUSTED )?CERTIFICATE-----")
_KEY: Final = re.compile(rb"-----BEGIN ([A-Z0-9]+ )*PRIVATE KEY-----")
_ENCRYPTED: Final = re.compile(
    rb"-----BEGIN ENCRYPTED PRIVATE KEY-----|^Proc-Type: *4,", re.MULTILINE
)
_MISMATCH: Final = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH")


class TlsContext:
    """The context of one side of TLS connections; renewed when its files have changed."""

    def __init__(self, tls: TlsSpec, *, is_server: bool) -> None:
        """Load the files.

        Raises:
            SpecError: a file cannot be used.
        """
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


def check_tls(
    tls: TlsSpec, *, may_serve: bool, may_connect: bool, names: Sequence[str] = ()
) -> None:
    """Check the files of a server, a client, or a node that may be either.

    It takes a few milliseconds: the side makes handshakes with itself.

    Args:
        tls: the settings.
        may_serve: whether it is a server.
        may_connect: whether it is a client.
        names: of these hosts, the node serves at least one.

    Raises:
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
