"""The soft limit of open descriptors: enough for us, unchanged for the workers.

The limit is raised only when a job needs more than it allows, and then each worker
is started through util-linux's `prlimit`, or `sh` where there is none: it puts the old
limit back before it becomes the worker (same pid).  Setting it from outside after the
spawn would race with the worker's first instructions, and lowering it in this process
around each spawn would hit whatever other threads open meanwhile.
"""

from __future__ import annotations

import os
import resource
import shutil

from msgspec.structs import replace

from elastic_aio.errors import SurroundingsError
from elastic_aio.process.base import ChildPlan, check_program

__all__ = ["raise_descriptor_limit", "with_descriptor_limit"]

# What one worker takes: asyncio's pidfd and ours, and two logs that are followed.
_PER_WORKER = 4
# What the agent itself takes: the guardian, the roster, inotify, the console, and for
# a moment the log files of the worker that is being spawned and the spawn itself.
_BASE = 16
# Left to others in this process where the limit allows it.
_SPARE = 64


def raise_descriptor_limit(workers: int, each: int = _PER_WORKER) -> int | None:
    """Make room for `workers` more; return the former soft limit, None if it sufficed.

    Args:
        workers: how many there will be.
        each: descriptors that one of them takes.

    Raises:
        SurroundingsError: the hard limit is too low.  A supervisor that runs out of
            descriptors half-way could not even see what it has to stop.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:
        used = soft  # not even one is left
    needed = used + workers * each + _BASE
    if needed + _SPARE <= soft:
        return None
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise SurroundingsError(
            f"too few descriptors: this job takes about {needed} and the limit is {hard}"
            " (raise it with ulimit -n)"
        )
    wanted = needed + _SPARE
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if wanted <= soft:
        return None
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return soft


def with_descriptor_limit(plan: ChildPlan, soft: int) -> ChildPlan:
    """Return a plan whose program sets the soft limit and then becomes the planned one.

    A forked worker sets it itself, first of all.

    Raises:
        SpawnError: the planned program cannot be executed.
    """
    if (call := plan.call) is not None:

        def limited() -> int:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, _hard_limit()))
            return call()

        return replace(plan, call=limited)
    check_program(plan)
    return replace(plan, argv=_limited(plan.argv, soft))


def _hard_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def _limited(argv: tuple[str, ...], soft: int) -> tuple[str, ...]:
    if prlimit := shutil.which("prlimit"):
        return (prlimit, f"--nofile={soft}:", "--", *argv)
    # A shell exports a PWD that nobody has set; then it is taken out again.
    forget = "" if "PWD" in os.environ else "unset PWD; "
    return ("/bin/sh", "-c", f'{forget}ulimit -S -n "$0" && exec "$@"', str(soft), *argv)
