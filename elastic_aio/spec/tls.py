"""The certificates of a store and its clients: `TlsSpec`, frozen and checked when made."""

from __future__ import annotations

from os import PathLike

from elastic_aio.errors import SpecError
from elastic_aio.spec.checks import checked_name, checked_path
from elastic_aio.spec.fields import ConfKey, Converted, SpecValue, field


def checked_tls(value: object, name: str = "tls") -> TlsSpec | None:
    """Return the TLS settings of a server, client or node."""
    if value is not None and not isinstance(value, TlsSpec):
        raise SpecError(name, value, "must be a TlsSpec or None")
    return value


def _client_auth(name: str, value: object) -> object:
    if not isinstance(value, bool):
        raise SpecError(name, value, "must be True, False or None")
    return value


class TlsSpec(SpecValue, prefix="tls."):
    """The files with which a store and its clients prove who they are, all in PEM format.

    A server needs `cert` and `key`, a client `ca`, and a node that may be either all three.  The
    files are read when a server or client is made, and again when they have changed.
    """

    cert: Converted[str | None, str | PathLike[str] | None] = field(
        default=None, check=checked_path, key=ConfKey()
    )
    """File with the certificate of this side, and then the certificates of intermediate CAs."""
    key: Converted[str | None, str | PathLike[str] | None] = field(
        default=None, check=checked_path, key=ConfKey()
    )
    """File with the private key of `cert`, not encrypted; the same file may hold both."""
    ca: Converted[str | None, str | PathLike[str] | None] = field(
        default=None, check=checked_path, key=ConfKey()
    )
    """File with the certificates of the CAs that the other side's certificate is verified by."""
    client_auth: bool | None = field(default=None, check=_client_auth, key=ConfKey())
    """Whether a server requires a certificate of `ca` from its clients; None: if it has a `ca`."""
    server_name: str | None = field(default=None, check=checked_name, key=ConfKey())
    """Name or address that the server's certificate must have; None: the host of the endpoint."""

    def _check(self) -> None:
        # The problems name no field: it is an option or a key of --rdzv-conf for some callers.
        if self.key is None and self.cert is not None:
            raise SpecError("tls.key", None, "is needed with a certificate")
        if self.cert is None and self.key is not None:
            raise SpecError("tls.cert", None, "is needed with a private key")
        if self.client_auth and self.ca is None:
            raise SpecError("tls.ca", None, "is needed to verify the certificates of clients")

    @property
    def requires_client_cert(self) -> bool:
        """Whether a server with these settings requires certificates of its clients."""
        return self.ca is not None if self.client_auth is None else self.client_auth

    def for_host(self, host: str) -> TlsSpec:
        """Return the same settings for a server at `host`, unless `server_name` is set."""
        return self if self.server_name is not None else self.replace(server_name=host)

    def check_server(self) -> None:
        """Raise `SpecError` if a server lacks something."""
        if self.cert is None:
            raise SpecError("tls.cert", None, "is needed to serve a store, with its private key")

    def check_client(self) -> None:
        """Raise `SpecError` if a client lacks something."""
        if self.ca is None:
            raise SpecError("tls.ca", None, "is needed to verify the store's certificate")
