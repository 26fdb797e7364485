"""`aio-elastic jobs` and `aio-elastic gc`: list the jobs at a store, and remove what is over.

::

    aio-elastic jobs [--rdzv-endpoint HOST:PORT[,...]] [--rdzv-backend etcd]
                     [--rdzv-conf KEY=VALUE,...] [--token-file FILE] [--tls-ca FILE]
                     [--json] [--timeout SECONDS]
    aio-elastic gc   [the same] [--older-than SECONDS] [--lost] [--dry-run]
    aio-elastic gc   --host [--shutdown-timeout SECONDS] [--json] [--dry-run]
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Final

from elastic_aio.aio import PausableClock
from elastic_aio.cli.local_jobs import JobError, command
from elastic_aio.cli.parser import OptionParser, add_timeout_option
from elastic_aio.cli.run_options import as_option_error
from elastic_aio.cli.status_text import local_time, table
from elastic_aio.cli.store_options import add_store_options, store_spec
from elastic_aio.control.client import list_jobs
from elastic_aio.errors import HostError, SpecError, StoreError
from elastic_aio.launcher import run_coroutine
from elastic_aio.process.descendants import SessionList
from elastic_aio.process.lost_jobs import LostScanner
from elastic_aio.process.proc import is_foreign
from elastic_aio.process.tree import ProcessTree
from elastic_aio.rendezvous.job_list import JobList, ListedJob
from elastic_aio.spec.checks import UsageError, parse_seconds
from elastic_aio.spec.stop import DEFAULT_GRACE, StopPlan
from elastic_aio.text import counted, one_line
from elastic_aio.value import to_json

_OLDER_THAN: Final = 600.0
"""Seconds for which a job's end is kept by default: a node that comes late finds it."""

_OF_HOST: Final = {"host", "shutdown_timeout", "json", "dry_run"}
"""The options of `aio-elastic gc --host`."""
_EXIT_CODES: Final = "Exit codes: 0 success, 1 no store answers, 2 invalid arguments."


@command("jobs")
def main_jobs(argv: Sequence[str]) -> int:
    """Run `aio-elastic jobs`; return the exit code.

    0: the jobs have been listed.  1: no store answers, or the store was lost.  2: the arguments are
    invalid.  130: Ctrl-C.
    """
    with store_errors():
        arguments = _jobs_parser().parse_args(argv)
        run_coroutine(lambda: _list(arguments))
    return 0


@command("gc")
def main_gc(argv: Sequence[str]) -> int:
    """Run `aio-elastic gc`; return the exit code, as for `main_jobs`.

    With `--host`, 1: processes are left, or none can be found.
    """
    parser = _gc_parser()
    with store_errors():
        arguments = parser.parse_args(argv)
        values = vars(arguments).items()
        given = {name for name, value in values if value != parser.get_default(name)}
        if arguments.host and given - _OF_HOST:
            problem = "asks no store: only --json, --dry-run and --shutdown-timeout may follow"
            raise UsageError(f"--host: {problem}")
        if "shutdown_timeout" in given and not arguments.host:
            raise UsageError("--shutdown-timeout: needs --host")
        run_coroutine(partial(_end_lost_jobs if arguments.host else _collect, arguments))
    return 0


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Turn the errors of a command that asks a store into errors of a command."""
    try:
        yield
    except SpecError as error:
        raise UsageError(as_option_error(error)) from None
    except HostError as error:
        raise UsageError(str(error)) from None
    except StoreError as error:
        raise JobError(str(error)) from None


def _jobs_parser() -> OptionParser:
    parser = OptionParser(
        prog="aio-elastic jobs",
        description="List the jobs at a store: their state, their nodes, and SINCE: when they"
        " ended, or else began. A job that is 'lost' has no node and no end: all its nodes were"
        " stopped or killed, or cannot reach the store.",
        epilog=_EXIT_CODES,
    )
    _add_options(parser)
    return parser


def _gc_parser() -> OptionParser:
    parser = OptionParser(
        prog="aio-elastic gc",
        description="Remove the keys of jobs that have ended from a store, and print each. A job"
        " with a node is never removed. A node that comes after the removal begins its job anew."
        " With --host: end the processes on this host that a killed launcher has left.",
        epilog="Exit codes: 0 success, 1 no store answers, or a process is left, 2 invalid"
        " arguments.",
    )
    _add_options(parser)
    parser.add_argument(
        "--older-than",
        type=lambda text: parse_seconds("--older-than", text),
        default=_OLDER_THAN,
        metavar="SECONDS",
        help="keep jobs that have ended, or begun if they have no end, less long ago"
        f" (default {_OLDER_THAN:g})",
    )
    parser.add_argument(
        "--lost",
        action="store_true",
        help="also remove jobs without an end that have no node; their workers may still run where"
        " the store cannot be reached (default: keep them)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="only print what would be removed (default: remove)"
    )
    parser.add_argument(
        "--host",
        action="store_true",
        help="ask no store: end the processes of this user on this host whose launcher was killed,"
        " and remove what it has left (default: remove keys from a store)",
    )
    parser.add_argument(
        "--shutdown-timeout",
        type=lambda text: parse_seconds("--shutdown-timeout", text),
        default=DEFAULT_GRACE,
        metavar="SECONDS",
        help=f"with --host: seconds from SIGTERM to SIGKILL (default {DEFAULT_GRACE:g})",
    )
    return parser


def _add_options(parser: OptionParser) -> None:
    add_store_options(parser)
    parser.add_argument(
        "--json", action="store_true", help="print each job as a line of JSON (default: a table)"
    )
    add_timeout_option(parser, 5, "seconds to search for a store")


async def _list(arguments: argparse.Namespace) -> None:
    async with JobList(store_spec(arguments, "jobs"), timeout=arguments.timeout) as jobs:
        found = await jobs.read()
    if arguments.json:
        for job in found:
            print(to_json(job).decode())
    elif found:
        print("\n".join(_table(found, time.time())))
    else:
        print("no job is at this store")
    sys.stdout.flush()


async def _collect(arguments: argparse.Namespace) -> None:
    removed = lost = recent = 0
    async with JobList(store_spec(arguments, "gc"), timeout=arguments.timeout) as jobs:
        now = time.time()
        for job in await jobs.read():
            if not job.is_over(also_lost=arguments.lost):
                lost += job.is_over(also_lost=True)
                continue
            if job.since > now - arguments.older_than:
                recent += 1
                continue
            if not arguments.dry_run and not await jobs.remove(job, also_lost=arguments.lost):
                continue  # a node has come
            removed += 1
            if arguments.json:
                print(to_json(job).decode(), flush=True)
            else:
                verb = "would remove" if arguments.dry_run else "removed"
                text = f"{verb} {_shown(job.run_id)}: {job.state}, {_age(now - job.since)} ago"
                print(text, flush=True)
    if not removed and not arguments.json:
        kept = [f"{counted(lost, 'lost job')} (--lost)"] if lost else []
        if recent:
            jobs_kept = counted(recent, "job")
            kept.append(f"{jobs_kept} of the last {arguments.older_than:g} s (--older-than)")
        print("nothing to remove" + (f"; kept: {', '.join(kept)}" if kept else ""), flush=True)


async def _end_lost_jobs(arguments: argparse.Namespace) -> None:
    if is_foreign():
        raise JobError("--host: /proc shows another pid namespace than that of this process")
    scanner = LostScanner()
    tree = ProcessTree("", PausableClock(), SessionList(), scanner=scanner)
    try:
        if await tree.descendants() is None:
            raise JobError("--host: /proc cannot be read")
        jobs, plan = scanner.jobs, StopPlan.within(arguments.shutdown_timeout)
        left = [] if arguments.dry_run else await tree.stop(plan, lambda *_: None)
    finally:
        await tree.aclose()
    if not arguments.dry_run:
        scanner.remove_files()
        await list_jobs()  # removes the sockets of launchers that were killed
    verb = "would end" if arguments.dry_run else "ended"
    for job in jobs:
        count, pids = counted(len(job.pids), "process", "processes"), ", ".join(map(str, job.pids))
        age = _age(time.time() - job.since)
        line = f"{verb} {_shown(job.run_id)}: {count} (pid {pids}), begun {age} ago"
        if arguments.json:
            line = to_json(job).decode()
        print(line, flush=True)
    if not jobs and not arguments.json:
        print("nothing to remove", flush=True)
    if left:
        pids = ", ".join(f"{one.pid} ({one.state})" for one in left)
        raise JobError(f"--host: SIGKILL has not ended pid {pids}")


def _table(jobs: Iterable[ListedJob], now: float) -> list[str]:
    rows = []
    for job in jobs:
        age = f"{local_time(job.since)} ({_age(now - job.since)} ago)" if job.since else "unknown"
        # Nodes that have left after the end are not known any more.
        nodes = "-" if job.ended_at is not None and not job.nodes else str(len(job.nodes))
        rows.append((_shown(job.run_id), job.state.value, nodes, age))
    return table(("RUN", "STATE", "NODES", "SINCE"), rows)


def _shown(run_id: str) -> str:
    return one_line(run_id, 60)


def _age(seconds: float) -> str:
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            return counted(int(seconds // size), unit)
    return counted(max(0, int(seconds)), "second")
