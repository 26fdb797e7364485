"""Children by plain fork: they share the supervisor's memory.

Fast, and nothing need be picklable; but a fork copies one thread of a process that may have
several, so locks that other threads hold stay locked in the child, and most accelerators' libraries
do not survive it.  Python 3.12 and later warn of that; the warning is suppressed, because the
caller has chosen "fork" by name.

The child inherits all descriptors of the supervisor: queues among the arguments need theirs, and
the owners of the others are unknown.  Its environment in /proc stays the supervisor's, without the
job's marker: it is found by its session and by its parents.

So the guardian cannot find a child that is not on the session list yet.  Each child therefore waits
for a byte in a pipe, which comes when it is listed (`Child.release`), and exits if the supervisor
ends before.  A pipe alone would not do: other forks of the program hold its end for writing open,
so the child waits on a pidfd of the supervisor too.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

from elastic_aio.process.children import Child, ChildSpec, ReapedChild, check_directory, spawn_error
from elastic_aio.worker import forked


async def spawn_by_fork(spec: ChildSpec) -> Child:
    """Fork a child that runs the `call` of `spec` once it is released, or raise a SpawnError."""
    check_directory(spec)
    forked.flush_streams()  # or the child would write it again
    with ExitStack() as opened:
        try:
            supervisor = os.pidfd_open(os.getpid())
            opened.callback(os.close, supervisor)
            reader, writer = os.pipe()
            opened.callback(os.close, reader)
        except OSError as error:
            raise spawn_error(error, spec) from error
        try:
            detach = partial(_detach, supervisor, reader, writer, spec.cpus)
            return _WaitingChild(_fork(spec, detach), writer)
        except OSError as error:
            os.close(writer)
            raise spawn_error(error, spec) from error


def _fork(spec: ChildSpec, detach: Callable[[], None]) -> int:
    assert spec.call is not None, "a forked child needs a call"
    # Blocked until `_detach` has restored the default actions: the parent's handlers would
    # take a signal to the child for one to themselves.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            streams = (spec.stdin, spec.stdout, spec.stderr)
            forked.run_forked(detach, streams, spec.cwd, spec.env, spec.call)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class _WaitingChild(ReapedChild):
    """A forked child that waits until it is released."""

    def __init__(self, pid: int, gate: int) -> None:
        super().__init__(pid)
        self._gate = gate
        self.exited.add_done_callback(lambda _: self._close_gate())

    def release(self) -> None:
        if self._gate >= 0:
            with suppress(OSError):  # it has been killed
                os.write(self._gate, b"1")
            self._close_gate()

    def _close_gate(self) -> None:
        if self._gate >= 0:
            os.close(self._gate)
            self._gate = -1


def _wait_until_released(supervisor: int, reader: int, writer: int) -> None:
    """Wait for the supervisor's byte; exit if the supervisor ends before."""
    os.close(writer)
    poller = select.poll()
    poller.register(supervisor, select.POLLIN)
    poller.register(reader, select.POLLIN)
    is_released = reader in dict(poller.poll()) and os.read(reader, 1)
    if not is_released:
        os._exit(1)
    os.close(supervisor)
    os.close(reader)


def _detach(supervisor: int, reader: int, writer: int, cpus: frozenset[int]) -> None:
    """Detach the child from the parent's event loop, bind it, and reset its signals.

    A new policy detaches it, so that it can run a loop of its own: the old one would
    detach its child watcher, which would remove from the kernel's epoll set, shared with
    the parent, what the parent waits for.
    """
    _wait_until_released(supervisor, reader, writer)
    if cpus:
        os.sched_setaffinity(0, cpus)
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
