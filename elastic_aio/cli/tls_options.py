"""The options of certificates: `--tls-cert`, `--tls-key`, `--tls-ca` and the like."""

from __future__ import annotations

import argparse
from typing import Final

from elastic_aio.cli.parser import OptionParser
from elastic_aio.errors import SpecError
from elastic_aio.spec.checks import UsageError, parse_switch
from elastic_aio.spec.tls import TlsSpec

_FIELDS: Final = ("cert", "key", "ca", "client_auth", "server_name")


def add_client_tls_options(parser: OptionParser) -> None:
    """Add the options of a client to a sub-command."""
    _add(parser, "ca", "certificates of the CAs that verify the store; connects over TLS")
    _add(parser, "cert", "certificate of this client, if the store requires one")
    _add(parser, "key", "private key of --tls-cert")
    parser.add_argument(
        "--tls-server-name",
        metavar="NAME",
        help="name that the store's certificate must have (default: the host of the endpoint)",
    )


def add_server_tls_options(parser: OptionParser) -> None:
    """Add the options of a server to a sub-command."""
    _add(parser, "cert", "certificate of the store, which then serves TLS only")
    _add(parser, "key", "private key of --tls-cert")
    _add(parser, "ca", "certificates of the CAs that verify the certificates of clients")
    parser.add_argument(
        "--tls-client-auth",
        metavar="BOOL",
        type=lambda text: parse_switch("--tls-client-auth", text),
        help="whether clients must have a certificate of --tls-ca (default: true with --tls-ca)",
    )


def tls_of(arguments: argparse.Namespace, *, is_server: bool) -> TlsSpec | None:
    """Return the certificates that the options name, after a check; None without options.

    Raises:
        UsageError: they do not belong together, or a file cannot be used.
    """
    values = {name: getattr(arguments, f"tls_{name}", None) for name in _FIELDS}
    if all(value is None for value in values.values()):
        return None
    from elastic_aio.store.tls import check_tls  # OpenSSL is for TLS only

    try:
        tls = TlsSpec(**values)
        check_tls(tls, may_serve=is_server, may_connect=not is_server)
    except SpecError as error:
        option = f"--{error.field.replace('.', '-').replace('_', '-')}"
        raise UsageError(str(SpecError(option, error.value, error.problem))) from None
    return tls


def _add(parser: OptionParser, name: str, purpose: str) -> None:
    parser.add_argument(f"--tls-{name}", metavar="FILE", help=f"PEM file with the {purpose}")
