"""`aio-elastic serve`: all jobs of this user on this host behind one port.

::

    aio-elastic serve [--http HOST:PORT]
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from elastic_aio.cli.local_jobs import command
from elastic_aio.cli.parser import OptionParser
from elastic_aio.errors import SpecError
from elastic_aio.http.server import AppServer
from elastic_aio.launcher import run_coroutine
from elastic_aio.signals import ReceivedSignals
from elastic_aio.spec.checks import invalid_value


@command("serve")
def main_serve(argv: Sequence[str]) -> int:
    parser = OptionParser(
        prog="aio-elastic serve",
        description="Show all jobs of this user on this host at one port: a list, and for each job"
        " what `aio-elastic run --http` shows. Read-only, without a password.",
        epilog="Exit codes: 0 a signal has stopped it, 2 invalid arguments, or the port is in use.",
    )
    parser.add_argument(
        "--http",
        default="localhost:9000",
        metavar="HOST:PORT",
        help="address to listen at; port 0 takes a free one (default localhost:9000)",
    )
    arguments = parser.parse_args(argv)
    try:
        return run_coroutine(lambda: _serve(arguments.http))
    except SpecError as error:
        raise invalid_value("--http", error.problem, error.value) from None


async def _serve(address: str) -> int:
    AppServer(address)  # checks the address and the extra
    from elastic_aio.http.jobs import JobsServer  # which needs the extra

    with ReceivedSignals([signal.SIGTERM, signal.SIGINT]) as signals:
        async with JobsServer(address) as server:
            print(f"serving the jobs of this host at http://{server.address}/", flush=True)
            await anext(signals)
    return 0
