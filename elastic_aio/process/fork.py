"""Children by plain fork: they share what the supervisor has in memory.

Fast, and nothing need be picklable; but a fork copies one thread of a process that
may have several, so locks that others hold stay locked in the child, and most
accelerators' libraries do not survive it.  Python 3.12 and later warn of that; the
caller has asked for it by name, and is not warned again.

The child inherits all descriptors of the supervisor: queues among the arguments
need theirs, and there is no telling whose the others are.  Its environment in
`/proc` stays the supervisor's, without the job's marker: it is known by its
session and by its parents.  What it executes carries the marker.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import warnings
from typing import NoReturn

from elastic_aio.process.base import Child, ChildPlan, check_folder, spawn_error
from elastic_aio.process.reaped import ReapedChild
from elastic_aio.worker import forked

__all__ = ["restore_signals", "spawn_by_fork"]


async def spawn_by_fork(plan: ChildPlan) -> Child:
    """Fork a child that runs the plan's `call`.

    Raises:
        SpawnError: it could not be started.
    """
    check_folder(plan)
    _flush()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
    except OSError as error:
        raise spawn_error(error, plan) from error
    if pid == 0:
        _live(plan)
    try:
        return ReapedChild(pid)
    except OSError as error:  # no descriptor left for the pidfd
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)  # noqa: ASYNC222  # it has been killed: this returns at once
        raise spawn_error(error, plan) from error


def _live(plan: ChildPlan) -> NoReturn:
    """Be the child, to its end; nothing above us on the stack is ours to return to."""
    code = 1
    try:
        os.setsid()
        _forget_loop()
        restore_signals()
        forked.forget_parent()
        forked.take_streams(plan.stdin, plan.stdout, plan.stderr)
        if plan.cwd is not None:
            os.chdir(plan.cwd)
        os.environ.clear()
        os.environ.update(plan.env)
        forked.renew_streams()
        assert plan.call is not None, "a forked child has something to call"
        code = plan.call()
    except BaseException as error:  # noqa: BLE001  # there is nobody to raise it to
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        forked.leave(code)
    raise SystemExit(code)  # never reached


def restore_signals() -> None:
    """Give signals that somebody handles their default actions, as an exec does."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if number == signal.SIGINT and handler is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
        elif callable(handler):
            signal.signal(number, signal.SIG_DFL)


def _forget_loop() -> None:
    """Let the child make a loop of its own; the parent's is no longer running here.

    By a new policy: an old one would tell its child watcher of the change, and that
    one would undo in the kernel what the parent waits for.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        asyncio.set_event_loop_policy(None)


def _flush() -> None:
    """Write out what is buffered, or the child would write it too."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue  # closed, or nobody reads it
