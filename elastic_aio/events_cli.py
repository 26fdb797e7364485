"""`aio-elastic events`: what happens in a job of several nodes, told anywhere.

::

    aio-elastic events --rdzv-endpoint HOST:PORT[,...] --rdzv-id ID
                       [--token-file FILE] [--json] [--after N] [--timeout SECONDS]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from elastic_aio.errors import SpecError, StoreError, SurroundingsError
from elastic_aio.events import Event, event_to_json
from elastic_aio.options.grammar import UsageError, whole
from elastic_aio.options.tokenfile import read_token
from elastic_aio.rendezvous.following import follow_job
from elastic_aio.rendezvousspec import STATIC_PORT, RendezvousSpec
from elastic_aio.report import describe

__all__ = ["main_events"]

_OPTION_OF_ARGUMENT = {"endpoint": "--rdzv-endpoint", "run_id": "--rdzv-id"}


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main_events(argv: Sequence[str]) -> int:
    """Run `aio-elastic events` with these arguments; return the exit code.

    0: the job has finished.  1: no store answers, or none any more.  2: the arguments
    cannot be accepted.  130: Ctrl-C.
    """
    try:
        arguments = _parser().parse_args(argv)
        with asyncio.Runner() as runner:
            runner.run(_follow(arguments))
    except SpecError as error:
        option = _OPTION_OF_ARGUMENT.get(error.field, error.field)
        return _complain(str(SpecError(option, error.value, error.accepted)), 2)
    except (UsageError, SurroundingsError) as error:
        return _complain(str(error), 2)
    except StoreError as error:
        return _complain(str(error), 1)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader has seen enough.  What is still buffered would fail again at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return 0


def _parser() -> argparse.ArgumentParser:
    default = RendezvousSpec()
    parser = _Parser(
        prog="aio-elastic events",
        description="Tell what happens in a job of several nodes, from its beginning to its end:"
        " nodes that come and go, rounds, failures, restarts.",
        epilog="Exit codes: 0 the job has finished, 1 no store answers, 2 wrong arguments.",
    )
    parser.add_argument(
        "--rdzv-endpoint",
        "--rdzv_endpoint",
        default=default.endpoint,
        metavar="HOST:PORT[,...]",
        help=f"where the job's nodes meet (default {default.endpoint}); with the backend"
        f" 'static' its --master-addr and --master-port (there {STATIC_PORT})",
    )
    parser.add_argument(
        "--rdzv-id",
        "--rdzv_id",
        default="none",
        metavar="ID",
        help="name of the run (default 'none', as for a run)",
    )
    parser.add_argument("--token-file", metavar="FILE", help="file with the token of the store")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each event")
    parser.add_argument(
        "--after",
        type=_number,
        default=-1,
        metavar="N",
        help="go on after the event whose `seq` is N",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="seconds to look for a store, at the start and after a loss (default 30)",
    )
    return parser


def _number(text: str) -> int:
    number = whole(text)
    if number is None and text != "-1":
        raise argparse.ArgumentTypeError(f"must be the number of an event, not {text!r}")
    return -1 if number is None else number


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, not {text!r}")
    return seconds


async def _follow(arguments: argparse.Namespace) -> None:
    following = follow_job(
        arguments.rdzv_endpoint,
        arguments.rdzv_id,
        token=None if arguments.token_file is None else read_token(arguments.token_file),
        after=arguments.after,
        timeout=arguments.timeout,
    )
    async with following as events:
        if not events.has_begun:
            _complain(f"nothing is known of a run {arguments.rdzv_id!r} there yet: waiting", 0)
        # Our only work is to print: nobody else waits while a slow reader blocks us.
        async for event in events:
            print(event_to_json(event).decode() if arguments.json else _line(event), flush=True)


def _line(event: Event) -> str:
    _, text = describe(event)
    return f"{event.node}: {text}" if event.node else text


def _complain(text: str, code: int) -> int:
    print(f"aio-elastic events: {' '.join(text.split())}", file=sys.stderr, flush=True)
    return code
