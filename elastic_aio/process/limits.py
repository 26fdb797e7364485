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

__all__ = ["raise_descriptor_limit", "with_descriptor_limit"]

# What one worker takes at most: asyncio's pidfd and ours, two followed logs, and
# while it is being started its two log files.
_PER_WORKER = 6
_SPARE = 64


def raise_descriptor_limit(workers: int) -> int | None:
    """Make room for `workers` more; return the former soft limit, None if it sufficed.

    Without the right to raise it far enough it is raised as far as possible.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + workers * _PER_WORKER + _SPARE
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return None
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if wanted <= soft:
        return None
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return soft


def with_descriptor_limit(argv: tuple[str, ...], soft: int | None) -> tuple[str, ...]:
    """Return a command that sets the soft limit and then becomes `argv`."""
    if soft is None:
        return argv
    if prlimit := shutil.which("prlimit"):
        return (prlimit, f"--nofile={soft}:", "--", *argv)
    # A shell exports a PWD that nobody has set; then it is taken out again.
    forget = "" if "PWD" in os.environ else "unset PWD; "
    return ("/bin/sh", "-c", f'{forget}ulimit -S -n "$0" && exec "$@"', str(soft), *argv)
