"""`aio-elastic events`: print the events of a job on this host, or of all its nodes.

::

    aio-elastic events [JOB] [--follow] [--json] [--after N]
    aio-elastic events --rdzv-endpoint HOST:PORT[,...] --rdzv-id ID
                       [--rdzv-backend etcd] [--rdzv-conf KEY=VALUE,...]
                       [--token-file FILE] [--tls-ca FILE] [--json] [--after N] [--timeout SECONDS]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Iterable, Sequence

from elastic_aio.cli import local_jobs
from elastic_aio.cli.options import print_error
from elastic_aio.cli.parser import OptionParser, add_timeout_option
from elastic_aio.cli.status_text import local_time
from elastic_aio.cli.store_jobs import store_errors
from elastic_aio.cli.store_options import add_store_options, store_spec
from elastic_aio.control.client import CommandClient, RunningJob, iterate_blocking
from elastic_aio.event_json import event_to_json
from elastic_aio.events import Event
from elastic_aio.launcher import run_coroutine
from elastic_aio.rendezvous.event_stream import follow_job
from elastic_aio.spec.checks import invalid_value, parse_int
from elastic_aio.spec.rendezvous import ENGINES
from elastic_aio.text import one_line

_NOTICE_S = 1.0
"""Seconds after which a search is reported."""


@local_jobs.command("events")
def main_events(argv: Sequence[str]) -> int:
    """Run `aio-elastic events`; return the exit code.

    0: the job has finished.  1: no store or agent answers, or it was lost.  2: the arguments are
    invalid.  130: Ctrl-C.
    """
    with store_errors():
        arguments = _parser().parse_args(argv)
        if _is_at_store(arguments):
            run_coroutine(lambda: _follow(arguments))
        else:
            _print_events(arguments)
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
        help="a job on this host, or a run that has ended: as for `aio-elastic status` (default:"
        " the only job that runs)",
    )
    local_jobs.add_child(parser)
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
    """Whether the options name a store; raise a UsageError if they also name a job of this host."""
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
    spec = store_spec(arguments, "events")
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
            _print_event(event, is_json=arguments.json)


def _print_events(arguments: argparse.Namespace) -> None:
    name, child = local_jobs.with_child(arguments.job, arguments.child)
    job = local_jobs.choose_run(name)
    local_jobs.check_child(job, child)
    if not isinstance(job, RunningJob):
        for event in local_jobs.events_below(local_jobs.recorded_events(job), child):
            if event.seq > arguments.after:
                _print_event(event, is_json=arguments.json)
        return
    client = CommandClient(job)
    events: Iterable[Event] = iterate_blocking(
        client.events(arguments.after, follow=arguments.follow)
    )
    if not arguments.follow:
        events = [*events]  # a pager may stop reading, the agent waits for no client
    for event in local_jobs.events_below(events, child):
        _print_event(event, is_json=arguments.json)


def _print_event(event: Event, *, is_json: bool) -> None:
    """Print an event as a line; the text begins with its time at this host."""
    if is_json:
        line = event_to_json(event).decode()
    else:
        node = f"{one_line(event.node)}: " if event.node else ""
        line = f"{local_time(event.time)}  {node}{event.sentence}"
    print(line, flush=True)
