"""`launch(spec)`: a whole job in one await, and `run(spec)` for programs without a loop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from elastic_aio.agent.agent import Agent
from elastic_aio.agent.chronicle import Listener
from elastic_aio.aio import outlast, owned_task
from elastic_aio.logs.sink import Console
from elastic_aio.outcome import LaunchResult
from elastic_aio.policy import SignalSpec
from elastic_aio.signals import ReceivedSignals
from elastic_aio.spec import LaunchSpec

__all__ = ["launch", "no_thread_per_child", "run", "run_coroutine"]

T = TypeVar("T")


async def launch(
    spec: LaunchSpec,
    *,
    signals: bool | SignalSpec = False,
    console: Console | None = None,
    listeners: Sequence[Listener] = (),
) -> LaunchResult:
    """Run a job to its end.

    Args:
        spec: the job.
        signals: whether this launch handles the process's signals: True for the
            defaults of `SignalSpec`.  SIGTERM, SIGINT, SIGHUP and SIGQUIT then stop
            the job by its plan (a second one at once), SIGUSR1 and SIGUSR2 go to
            the workers, SIGTSTP holds the job.  Needs the main thread; the former
            handlers return afterwards.
        console: where tee'd output goes; None is this process's own.
        listeners: called with every event as it happens; they must not block.

    Returns:
        The result, when every worker has exited with code 0.

    Raises:
        JobFailed: the workers failed and no restart is left.
        RendezvousFailed: the nodes of the job did not come together.
        JobStopped: a signal ended the job.
        SpecError: a setting does not fit this machine.
        SurroundingsError: the machine or this process lacks something.
        asyncio.CancelledError: the caller was cancelled; the stop plan has run and
            nothing of the job is left.
    """
    agent = Agent(spec, console=console, listeners=listeners)
    if not signals:
        async with agent:
            return await agent.wait()
    chosen = SignalSpec() if signals is True else signals
    with ReceivedSignals([*chosen.stop, *chosen.forward, signal.SIGTSTP]) as received:
        # What was meant for the workers ends with them.
        received.discard(chosen.forward)
        async with agent:
            reading = owned_task(_heed(received, chosen, agent), name="heed signals")
            try:
                return await agent.wait()
            finally:
                reading.cancel()
                await outlast(reading)


async def _heed(received: ReceivedSignals, chosen: SignalSpec, agent: Agent) -> None:
    """Do what each received signal asks for."""
    was_asked_to_stop = False
    async for number in received:
        if number == signal.SIGTSTP:
            try:
                await agent.pause_while(_hold_this_process, signal.SIGSTOP, signal.SIGCONT)
            except OSError:
                continue  # no descriptor left to find the workers by: the job goes on
        elif number in chosen.forward:
            agent.forward_signal(number)
        elif was_asked_to_stop:
            agent.kill()
        else:
            was_asked_to_stop = True
            received.discard(chosen.forward | chosen.stop)  # it has been heeded
            agent.stop(signal=number, reason=f"{signal.Signals(number).name} was received")


def _hold_this_process() -> None:
    # SIGSTOP and not SIGTSTP: our handler is in place, and the shell sees the same.
    os.kill(os.getpid(), signal.SIGSTOP)


def run(
    spec: LaunchSpec,
    *,
    signals: bool | SignalSpec = False,
    listeners: Sequence[Listener] = (),
) -> LaunchResult:
    """Run a job to its end in a program that has no event loop.

    Arguments and outcomes are those of `launch`.

    Raises:
        RuntimeError: an event loop runs in this thread; use `await launch(spec)`.
    """

    return run_coroutine(lambda: launch(spec, signals=signals, listeners=listeners))


def run_coroutine(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run what `make` returns on a new loop.

    Raises:
        RuntimeError: an event loop runs in this thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass  # none: as it should be
    else:
        raise RuntimeError("an event loop is running in this thread: use `await launch(spec)`")
    with asyncio.Runner() as runner:
        return runner.run(make())


@contextmanager
def no_thread_per_child() -> Iterator[None]:
    """Let asyncio wait for children by pidfd on Python 3.11, as later versions do.

    Its default there is a thread per child, which can even signal a recycled pid.
    The watcher belongs to the process, so only one that we own may change it: the
    command line.
    """
    if sys.version_info >= (3, 12):
        yield
        return
    former = asyncio.get_child_watcher()
    asyncio.set_child_watcher(asyncio.PidfdChildWatcher())
    try:
        yield
    finally:
        asyncio.set_child_watcher(former)
