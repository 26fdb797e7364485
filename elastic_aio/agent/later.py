"""What a running job may load later, and loads while it is idle.

Most jobs need none of it, and a start does without.  But a job runs for weeks: its package may be
upgraded or removed, and no descriptor may be left to open a file with.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module

from elastic_aio.process.guardian_process import keep_program

_IDLE_S = 0.5  # a shorter job needs none of it
LATER = {
    "elastic_aio.agent.liveness": """
        bz2 lzma shutil tempfile elastic_aio.watch.deadlines elastic_aio.stacks
        elastic_aio.watch.forensics elastic_aio.watch.timer_pipe elastic_aio.watch.watchdog
    """,
    "elastic_aio.control.server": """
        elastic_aio.control.protocol elastic_aio.node_events elastic_aio.event_json
        elastic_aio.control.session elastic_aio.logs.inotify elastic_aio.process.lost_jobs
    """,
    "elastic_aio.agent.worker_store": """
        elastic_aio.store.limits elastic_aio.store.wire elastic_aio.store.replies
        elastic_aio.store.keyspace elastic_aio.store.connection elastic_aio.store.server
    """,
    "elastic_aio.agent.logs": "elastic_aio.logs.reader elastic_aio.logs.trimmer",
    "elastic_aio.agent.multi_node_driver": """
        elastic_aio.store.link elastic_aio.store.client elastic_aio.rendezvous.job_list
    """,
    "elastic_aio.engines.link": "elastic_aio.store.tls",
    "elastic_aio.agent.driver": "elastic_aio.worker.membership",
    "elastic_aio.agent.failures": "elastic_aio.agent.core_file",
    "elastic_aio.cli.printer": "elastic_aio.rendezvous.base elastic_aio.cli.exit_codes",
    "elastic_aio.cli.run": "elastic_aio.worker.recorder elastic_aio.recorder",
    "elastic_aio.http.app": """
        aiofiles anyio.abc._streams anyio.streams.stapled anyio.streams.tls anyio.streams.memory
        anyio._backends._asyncio
    """,
}
"""Modules by the module that loads them inside a function; each takes a few milliseconds."""


def missing_modules() -> Iterator[str]:
    """Yield what the loaded modules may still load, the modules that others need first."""
    for user, names in LATER.items():
        if user in sys.modules:
            yield from (name for name in names.split() if name not in sys.modules)


async def load_later_modules() -> None:
    """Load them half a second later, and keep the program of a further guardian in memory.

    Cancellation: the others are loaded when they are needed.
    """
    await asyncio.sleep(_IDLE_S)  # no event reports that the processors are free
    keep_program()
    for name in [*missing_modules()]:
        await asyncio.sleep(0)  # the loop is not blocked for longer than a module takes
        with suppress(ImportError, OSError):  # the first use says why
            import_module(name)
