"""`aio-elastic store`: a store of its own, and a probe for it.

::

    aio-elastic store [--host HOST] [--port PORT] [--token-file FILE]
    aio-elastic store ping ENDPOINT [--timeout SECONDS] [--token-file FILE]

An open store serves torch's clients and ours.  One with a token serves only our own
clients that have it, since torch's have no way to show one.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import Any, NoReturn

from elastic_aio.errors import SpecError, StoreError, SurroundingsError
from elastic_aio.options.tokenfile import read_token
from elastic_aio.rendezvousspec import DEFAULT_PORT
from elastic_aio.signals import ReceivedSignals
from elastic_aio.store import Dropped, StoreServer, connect

__all__ = ["main_store"]


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        raise SpecError(self.prog, " ".join(sys.argv[1:]), message)


def main_store(argv: Sequence[str]) -> int:
    """Run `aio-elastic store` with these arguments; return the exit code.

    0: the server was asked to end, or the probe found a store.  1: the probe found
    none.  2: the arguments or the surroundings do not allow to begin; one line says why.
    """
    is_ping = list(argv[:1]) == ["ping"]
    try:
        if is_ping:
            return _run(_ping(_ping_parser().parse_args(argv[1:])))
        return _run(_serve(_serve_parser().parse_args(argv)))
    except (SpecError, SurroundingsError) as error:
        print(f"aio-elastic store: {_one_line(error)}", file=sys.stderr)
        return 2
    except StoreError as error:
        print(f"aio-elastic store: {_one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        # Before the handlers were there, or during a probe.
        return 128 + signal.SIGINT


def _one_line(error: Exception) -> str:
    if isinstance(error, SpecError) and error.field.startswith("aio-elastic"):
        return error.accepted
    return " ".join(str(error).split())


def _serve_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="aio-elastic store",
        description="Serve a key-value store that speaks the protocol of torch's TCPStore.",
        epilog="`aio-elastic store ping HOST:PORT` tells whether one answers.",
    )
    parser.add_argument(
        "--host", default="localhost", help="address to listen on; * is every interface"
    )
    parser.add_argument(
        "--port", type=_port, default=DEFAULT_PORT, help="port to listen on; 0 takes a free one"
    )
    _add_token(parser)
    return parser


def _ping_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="aio-elastic store ping", description="Tell whether a store answers, and how fast."
    )
    parser.add_argument("endpoint", help="HOST:PORT or [IPV6]:PORT")
    parser.add_argument("--timeout", type=_seconds, default=5.0, help="seconds to try")
    _add_token(parser)
    return parser


def _add_token(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--token-file",
        help="file with the token that clients must share; shuts torch's own clients out",
    )


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and int(text) < 65536):
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 65535, not {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, not {text!r}")
    return seconds


def _token(path: str | None) -> str | None:
    return None if path is None else read_token(path)


async def _serve(arguments: argparse.Namespace) -> int:
    host = None if arguments.host == "*" else arguments.host
    token = _token(arguments.token_file)
    server = StoreServer(host, arguments.port, token=token, on_drop=_tell)
    with ReceivedSignals([signal.SIGTERM, signal.SIGINT]) as signals:
        async with server:
            kind = "with a token" if token else "open"
            print(f"store listening on {server.endpoint} ({kind})", flush=True)
            await anext(signals)
    return 0


def _tell(dropped: Dropped) -> None:
    print(f"aio-elastic store: {dropped}", file=sys.stderr, flush=True)


async def _ping(arguments: argparse.Namespace) -> int:
    token = _token(arguments.token_file)
    timeout = arguments.timeout
    async with connect(
        arguments.endpoint, timeout=timeout, reply_timeout=timeout, reconnect_for=0, token=token
    ) as store:
        seconds = await store.ping()
        kind = "elastic_aio" if store.has_extensions else "plain TCPStore"
        print(f"{arguments.endpoint} answers in {seconds * 1000:.2f} ms ({kind})")
    return 0


def _run(work: Coroutine[Any, Any, int]) -> int:
    try:
        import uvloop
    except ImportError:  # an alternative Python: the stock loop serves as well
        with asyncio.Runner() as runner:
            return runner.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)
