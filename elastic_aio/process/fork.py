"""Children by plain fork: they share the supervisor's memory.

Fast, and nothing need be picklable; but a fork copies one thread of a process that may
have several, so locks that other threads hold stay locked in the child, and most
accelerators' libraries do not survive it.  Python 3.12 and later warn of that; the
warning is suppressed, because the caller has chosen "fork" by name.

The child inherits all descriptors of the supervisor: queues among the arguments need
theirs, and the owners of the others are unknown.  Its environment in /proc stays the
supervisor's, without the job's marker: it is found by its session and by its parents.
Programs that it executes have the marker.
"""

from __future__ import annotations

import asyncio
import os
import signal
import warnings

from elastic_aio.process.base import Child, ChildSpec, check_directory, spawn_error
from elastic_aio.process.exits import ReapedChild
from elastic_aio.worker import forked


async def spawn_by_fork(spec: ChildSpec) -> Child:
    """Fork a child that runs the `call` of `spec`.

    Raises:
        SpawnError: the child could not be started.
    """
    assert spec.call is not None, "a forked child needs a call"
    check_directory(spec)
    forked.flush_streams()  # or the child would write it again
    # Blocked until `_detach` has restored the default actions: the parent's handlers would
    # take a signal to the child for one to themselves.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            streams = (spec.stdin, spec.stdout, spec.stderr)
            forked.run_forked(_detach, streams, spec.cwd, spec.env, spec.call)
    except OSError as error:
        raise spawn_error(error, spec) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        return ReapedChild(pid)
    except OSError as error:  # no descriptor left for the pidfd
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)  # noqa: ASYNC222  # it was killed: this returns at once
        raise spawn_error(error, spec) from error


def _detach() -> None:
    """Detach the child from the parent's event loop, and reset its signals.

    A new policy detaches it, so that it can run a loop of its own: the old one would
    detach its child watcher, which would remove from the kernel's epoll set, shared with
    the parent, what the parent waits for.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        asyncio.set_event_loop_policy(None)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if number == signal.SIGINT and handler is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
        elif callable(handler):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
