"""`aio-elastic store`: a standalone store server, and a probe for a store.

::

    aio-elastic store [--host HOST] [--port PORT] [--max-mib N] [--token-file FILE]
                      [--tls-cert FILE --tls-key FILE [--tls-ca FILE]]
    aio-elastic store ping ENDPOINT [--timeout SECONDS] [--token-file FILE] [--tls-ca FILE]

A store without a token serves elastic_aio's and torch's clients.  A store with a token or TLS
serves only elastic_aio's clients: torch's protocol has neither.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from functools import partial
from typing import Final

from elastic_aio.cli.options import choose_loop, print_error
from elastic_aio.cli.parser import (
    OptionParser,
    add_client_tls_options,
    add_server_tls_options,
    add_timeout_option,
    add_token_option,
    tls_of,
)
from elastic_aio.errors import HostError, SpecError, StoreError
from elastic_aio.launcher import run_coroutine
from elastic_aio.logs.console import LineWriter, open_sink
from elastic_aio.signals import ReceivedSignals
from elastic_aio.spec.checks import UsageError, parse_number
from elastic_aio.spec.rendezvous import DEFAULT_PORT
from elastic_aio.spec.tls import TlsSpec
from elastic_aio.store import Dropped, KeyspaceLimits, ServerLimits, StoreServer, connect
from elastic_aio.text import one_line

_UNPRINTED: Final = 64 << 10
"""Bytes of lines that wait until stderr is read."""

_LAST_LINES_S: Final = 0.2


def main_store(argv: Sequence[str]) -> int:
    """Run `aio-elastic store`; return the exit code.

    0: a signal stopped the server, or the probe reached a store.  1: the probe reached none.  2:
    the arguments are invalid, or the server cannot start; one line says why.
    """
    is_ping = list(argv[:1]) == ["ping"]
    command = "store ping" if is_ping else "store"
    try:
        loop_factory = choose_loop("auto", serves_store=True)
        if is_ping:
            arguments = _ping_parser().parse_args(argv[1:])
            return run_coroutine(lambda: _ping(arguments), loop_factory=loop_factory)
        arguments = _serve_parser().parse_args(argv)
        return run_coroutine(lambda: _serve(arguments), loop_factory=loop_factory)
    except (UsageError, SpecError, HostError) as error:
        return print_error(command, str(error), 2)
    except StoreError as error:
        return print_error(command, str(error), 1)


def _serve_parser() -> OptionParser:
    parser = OptionParser(
        prog="aio-elastic store",
        description="Serve a key-value store that speaks the protocol of torch's TCPStore.",
        epilog="`aio-elastic store ping HOST:PORT` checks whether a store answers.",
    )
    parser.add_argument(
        "--host",
        default="localhost",
        help="address to listen on; '*' is every interface (default localhost)",
    )
    parser.add_argument(
        "--port",
        type=partial(parse_number, "--port", most=65535, unit="a port"),
        default=DEFAULT_PORT,
        help=f"TCP port to listen on; 0 takes a free one (default {DEFAULT_PORT})",
    )
    parser.add_argument(
        "--max-mib",
        type=partial(parse_number, "--max-mib", least=1, most=1 << 20, unit="a number of MiB"),
        default=KeyspaceLimits().stored >> 20,
        metavar="N",
        help="MiB that all keys and values may occupy (default 1024)",
    )
    add_token_option(
        parser, "file with the token that clients must present, which excludes torch's clients"
    )
    add_server_tls_options(parser)
    return parser


def _ping_parser() -> OptionParser:
    parser = OptionParser(
        prog="aio-elastic store ping",
        description="Check whether a store answers, and print its round-trip time.",
    )
    parser.add_argument("endpoint", help="HOST:PORT or [IPV6]:PORT of the store")
    add_timeout_option(parser, 5, "seconds to keep trying")
    add_token_option(parser, "file with the store's token")
    add_client_tls_options(parser)
    return parser


async def _serve(arguments: argparse.Namespace) -> int:
    host = None if arguments.host == "*" else arguments.host
    tls = tls_of(arguments, is_server=True)
    log = _DropLog()
    server = StoreServer(
        host,
        arguments.port,
        token=arguments.token,
        tls=tls,
        limits=ServerLimits(keyspace=KeyspaceLimits(stored=arguments.max_mib << 20)),
        on_drop=log.put,
    )
    try:
        with ReceivedSignals([signal.SIGTERM, signal.SIGINT]) as signals:
            async with server:
                access = _access(tls, arguments.token)
                print(f"store listening on {server.endpoint} ({access})", flush=True)
                await anext(signals)
    finally:
        await log.aclose()
    return 0


def _access(tls: TlsSpec | None, token: str | None) -> str:
    """Return what a client must have to be served."""
    needs = ["TLS"] if tls else []
    if tls and tls.requires_client_cert:
        needs.append("a client certificate")
    if token:
        needs.append("a token")
    return (
        f"with {', '.join(needs[:-1])}{' and ' if needs[1:] else ''}{needs[-1]}"
        if needs
        else "open"
    )


class _DropLog:
    """Prints dropped connections to stderr, and leaves some out while stderr is not read."""

    def __init__(self) -> None:
        self._sink = open_sink("stderr", 2)
        self._writer = LineWriter(self._sink)
        self._size = self._sink.written
        self._missed = 0

    def put(self, dropped: Dropped) -> None:
        """Print a connection; never blocks."""
        if self._size - self._sink.written > _UNPRINTED or self._writer.lost:
            self._missed += 1
            return
        if self._missed:
            self._print(f"{self._missed} dropped connections are not listed here")
            self._missed = 0
        self._print(str(dropped))

    def _print(self, text: str) -> None:
        line = f"aio-elastic store: {one_line(text)}\n".encode()
        self._size += len(line)
        self._writer.put(line)

    async def aclose(self) -> None:
        await self._writer.drain(_LAST_LINES_S)
        self._sink.close()


async def _ping(arguments: argparse.Namespace) -> int:
    async with connect(
        arguments.endpoint,
        timeout=arguments.timeout,
        reply_timeout=arguments.timeout,
        reconnect_for=0,
        token=arguments.token,
        tls=tls_of(arguments, is_server=False),
    ) as store:
        seconds = await store.ping()
        kind = "elastic_aio" if store.has_extensions else "plain TCPStore"
        print(f"{arguments.endpoint} answers in {seconds * 1000:.2f} ms ({kind})")
    return 0
