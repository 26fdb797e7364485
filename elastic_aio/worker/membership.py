"""The change of the membership that a worker will be restarted for.

The launcher of a job of several nodes writes it into a file, whose path is in the environment, and
removes the file when the change is withdrawn or begins.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from elastic_aio.worker.context import PENDING_CHANGE

_SIZE_MAX = 16 * 1024


@dataclass(frozen=True, slots=True)
class PendingChange:
    """A change of the membership: when it begins, the workers of all nodes are restarted."""

    reason: str
    """Which nodes are about to take part."""
    deadline: float
    """Unix seconds, as of `time.time()`, at which the workers are stopped.

    A further joiner postpones that; if it fills the job, they are stopped at once.
    """


def pending_change() -> PendingChange | None:
    """Return the change of the membership that this worker will be restarted for.

    Call it in each step: without a change, it costs one system call that finds no file.  The
    workers of other nodes may see the change a moment earlier or later.

    A change has begun when this worker is asked to stop.  Some begin at once, and are never
    pending: the loss of a node, a node that is stopped, a failure, and joiners that fill the job.

    Returns:
        The reason and the deadline; None for no change, in a job of one node, in one without a
        directory (`log_dir` is `/dev/null`), and outside of a job.
    """
    path = os.environ.get(PENDING_CHANGE)
    if not path:
        return None
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        deadline, _, reason = os.read(file, _SIZE_MAX).decode(errors="replace").partition("\n")
    finally:
        os.close(file)
    return PendingChange(reason, float(deadline))


def write_pending_change(path: str, change: PendingChange | None) -> None:
    """Show a change in the file at `path`, in one step, or remove the file; none if it is empty.

    Raises:
        OSError: the file cannot be written.
    """
    if not path:
        return
    if change is None:
        with suppress(FileNotFoundError):
            os.unlink(path)
        return
    with open(f"{path}.new", "w", errors="replace") as file:
        file.write(f"{change.deadline!r}\n{change.reason}")
    os.replace(file.name, path)
