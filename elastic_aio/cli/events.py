"""`aio-elastic events`: print the events of a multi-node job, on any host.

::

    aio-elastic events --rdzv-endpoint HOST:PORT[,...] --rdzv-id ID
                       [--rdzv-backend etcd] [--rdzv-conf KEY=VALUE,...]
                       [--token-file FILE] [--tls-ca FILE] [--json] [--after N] [--timeout SECONDS]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence

from elastic_aio.cli.local_events import main_local_events, print_event
from elastic_aio.cli.options import UsageError, invalid_value, parse_int, print_error
from elastic_aio.cli.parser import OptionParser, add_timeout_option
from elastic_aio.cli.store_options import add_store_options, store_spec
from elastic_aio.cli.torchrun import as_option_error
from elastic_aio.errors import HostError, SpecError, StoreError
from elastic_aio.launcher import run_coroutine
from elastic_aio.rendezvous.event_reader import follow_job
from elastic_aio.spec.rendezvous import ENGINES

_NOTICE_S = 1.0
"""Seconds of a search after which it is reported."""


def main_events(argv: Sequence[str]) -> int:
    """Run `aio-elastic events` with these arguments; return the exit code.

    0: the job has finished.  1: no store answers, or the store was lost.  2: the arguments
    are invalid.  130: Ctrl-C.
    """
    try:
        arguments = _parser().parse_args(argv)
        if not _is_at_store(arguments):
            return main_local_events(arguments)
        run_coroutine(lambda: _follow(arguments))
    except SpecError as error:
        return print_error("events", as_option_error(error), 2)
    except (UsageError, HostError) as error:
        return print_error("events", str(error), 2)
    except StoreError as error:
        return print_error("events", str(error), 1)
    except BrokenPipeError:
        # The reader of the pipe has exited.  The flush at interpreter exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return 0


def _parser() -> OptionParser:
    parser = OptionParser(
        prog="aio-elastic events",
        description="Print the events of a job: attempts, failures, restarts. With --rdzv-endpoint"
        " or --rdzv-id those of a multi-node job at its store, from its beginning to its end;"
        " without, those of one node of a job of this user on this host.",
        epilog="Exit codes: 0 success, 1 no store or agent answers, 2 invalid arguments.",
    )
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB",
        help="a job on this host: as for `aio-elastic status` (default: the only one)",
    )
    parser.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="go on until the end of the job, as is always done with a store",
    )
    add_store_options(parser)
    parser.add_argument(
        "--rdzv-id",
        "--rdzv_id",
        metavar="ID",
        help="id of the run (default 'none', as for a run)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print each event as a line of JSON (default: text)"
    )
    parser.add_argument(
        "--after",
        type=_event_number,
        default=-1,
        metavar="N",
        help="start after the event whose `seq` is N (default -1: at the first event)",
    )
    add_timeout_option(parser, 30, "seconds to search for a store, at the start and after a loss")
    return parser


def _is_at_store(arguments: argparse.Namespace) -> bool:
    """Whether the options name a store; it has the events of all nodes.

    Raises:
        UsageError: they name a job of this host too.
    """
    is_at_store = (
        arguments.rdzv_endpoint is not None
        or arguments.rdzv_id is not None
        or arguments.rdzv_backend in ENGINES
    )
    if is_at_store and arguments.job is not None:
        problem = "has no effect with --rdzv-endpoint, --rdzv-id and --rdzv-backend"
        raise invalid_value("JOB", problem, arguments.job)
    if arguments.rdzv_id is None:
        arguments.rdzv_id = "none"
    return is_at_store


def _event_number(text: str) -> int:
    if text == "-1":
        return -1
    if (number := parse_int(text)) is None:
        raise invalid_value("--after", "must be the number of an event", text)
    return number


async def _follow(arguments: argparse.Namespace) -> None:
    spec = store_spec(arguments)
    reader = follow_job(
        spec.endpoint,
        arguments.rdzv_id,
        token=spec.token,
        tls=spec.tls,
        backend=spec.backend,
        engine=spec.engine,
        after=arguments.after,
        timeout=arguments.timeout,
    )
    what = (
        f"no store answers yet at {spec.endpoint}, the search takes up to {arguments.timeout:g} s"
    )
    loop = asyncio.get_running_loop()
    notice = loop.call_later(_NOTICE_S, print_error, "events", f"{what} (--timeout)", 0)
    async with contextlib.AsyncExitStack() as stack:
        try:
            events = await stack.enter_async_context(reader)
        finally:
            notice.cancel()
        if not events.has_begun:
            print_error("events", f"no events of run {arguments.rdzv_id!r} yet: waiting", 0)
        # Printing is the only task of this process, so a slow reader may block the loop.
        async for event in events:
            print_event(event, is_json=arguments.json)
