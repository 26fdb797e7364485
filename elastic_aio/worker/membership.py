"""The change that a worker will be stopped for: of the membership, or a preemption of the job.

The launcher writes it into a file, whose path is in the environment, and removes the file when the
change is withdrawn or begins.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass

from elastic_aio.worker.context import PENDING_CHANGE
from elastic_aio.worker.errorfile import replace_file
from elastic_aio.worker.notify import PATIENCE_MS, send

_SIZE_MAX = 16 * 1024

PREEMPTION = "preemption"
"""The `reason` of the change that is a preemption."""


@dataclass(frozen=True, slots=True)
class PendingChange:
    """A change of the membership: when it begins, the workers of all nodes are restarted.

    Or a preemption of the job: they are stopped, and not restarted; it is never withdrawn.
    """

    reason: str
    """Which nodes are about to take part; "preemption" for a preemption."""
    deadline: float
    """Unix seconds, as of `time.time()`, at which the workers are stopped.  A further joiner
    postpones that; if it fills the job, they are stopped at once.  With `scale_up="checkpoint"`
    they are stopped earlier if all of them agree."""
    number: int = 0
    """The same until the change is withdrawn, also when a further joiner postpones it."""

    @property
    def is_preemption(self) -> bool:
        """Whether the job ends, as soon as all of its workers have ended, in any way."""
        return self.reason == PREEMPTION

    @property
    def time_left(self) -> float:
        """Seconds until the deadline; 0 after it."""
        return max(0.0, self.deadline - time.time())


def pending_change() -> PendingChange | None:
    """Return the change that this worker will be restarted for, or the preemption of the job.

    Call it in each step: without a change, it costs one system call that finds no file.  The
    workers of other nodes may see the change a moment earlier or later.

    A change has begun when this worker is asked to stop.  Some begin at once, and are never
    pending: the loss of a node, a node that is stopped, a failure, and joiners that fill the job.

    Returns:
        The reason and the deadline; None for no change, in a job without a directory (`log_dir` is
        `/dev/null`), and outside of a job.
    """
    path = os.environ.get(PENDING_CHANGE)
    if not path:
        return None
    try:
        with open(path, "rb", buffering=0) as file:
            content = file.read(_SIZE_MAX)
    except OSError:
        return None
    when, _, reason = content.decode(errors="replace").partition("\n")
    deadline, number = when.split()
    return PendingChange(reason, float(deadline), int(number))


def agree_to_change() -> bool:
    """Agree that this worker is stopped for the pending change: its checkpoint is saved.

    With a preemption the job ends when all workers that still run have agreed.  With
    `scale_up="checkpoint"` the restart follows when all workers of the job have agreed.  The worker
    may go on until then.  Another call for the same change has no effect.

    Returns:
        Whether the launcher gets the message; False without a pending change.
    """
    change = pending_change()
    return change is not None and send(f"CHANGE_AGREED={change.number}", patience_ms=PATIENCE_MS)


def write_pending_change(path: str, change: PendingChange | None) -> None:
    """Show a change in the file at `path`, in one step, or remove the file; none if it is empty.

    OSError: the file cannot be written.
    """
    if not path:
        return
    if change is None:
        with suppress(FileNotFoundError):
            os.unlink(path)
        return
    text = f"{change.deadline!r} {change.number}\n{change.reason}"
    replace_file(path, text.encode(errors="backslashreplace"))
    os.chmod(path, 0o644)  # whatever the umask: the workers may be another user's
