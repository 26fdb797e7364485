"""`launch(spec)` runs a job in one await; `run(spec)` does so for programs without a loop."""

from __future__ import annotations

import asyncio
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from elastic_aio.agent.agent import Agent, driver_of
from elastic_aio.agent.event_log import EventListener
from elastic_aio.agent.machine import StopReceived
from elastic_aio.aio import check_select, create_task, running_loop, wait_shielded
from elastic_aio.errors import SpecError
from elastic_aio.logs.console import ConsoleTarget
from elastic_aio.outcome import LaunchResult, signal_name
from elastic_aio.signals import ReceivedSignals
from elastic_aio.spec.stop import SignalSpec

if TYPE_CHECKING:
    from elastic_aio.spec.group import AnySpec, GroupSpec
    from elastic_aio.spec.job import LaunchSpec

T = TypeVar("T")
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


async def launch(
    spec: LaunchSpec | GroupSpec,
    *,
    signals: bool | SignalSpec = False,
    console: ConsoleTarget | None = None,
    listeners: Sequence[EventListener] = (),
    adopt_orphans: bool = False,
    control: bool = False,
) -> LaunchResult:
    """Run a job, or a group of jobs, to its end, on any asyncio event loop.

    Args:
        signals: whether this launch handles the process's signals: True for the defaults of
            `SignalSpec`.  SIGTERM, SIGINT, SIGHUP and SIGQUIT then stop the job by its plan (Ctrl-C
            again, or the third signal, kills it), that of `spec.preemption` is a notice, SIGUSR1
            and SIGUSR2 are forwarded to the workers, SIGTSTP suspends the job.  Needs the main
            thread; the former handlers are restored afterwards.
        console, listeners, adopt_orphans, control: as for an `Agent`.

    Returns:
        The result, when every worker has exited with code 0.

    Raises:
        JobFailed: the workers failed and no restart is left.
        RendezvousFailed: the nodes of the job did not form a round.
        JobStopped: a signal ended the job; as `JobPreempted`, a preemption.
        SpecError: a setting does not fit this host.
        HostError: the host or this process lacks something that the job needs.
        RuntimeError: the running event loop is not asyncio's, but trio's for example.

    Cancellation: the stop plan runs to its end and no process of the job is left; then
    `asyncio.CancelledError` is raised.  Further cancellations do not shorten the plan.
    """
    running_loop()
    agent = Agent(
        spec, console=console, listeners=listeners, adopt_orphans=adopt_orphans, control=control
    )
    if not signals:
        async with agent:
            return await agent.wait()
    chosen = SignalSpec() if signals is True else signals
    if not isinstance(chosen, SignalSpec):
        raise SpecError("signals", signals, "must be True, False or a SignalSpec")
    with receive_signals(chosen, spec.preemption.signals) as received:
        return await supervise_agent(agent, chosen, received)


def receive_signals(chosen: SignalSpec, notices: frozenset[int]) -> ReceivedSignals:
    """Return the signals that `supervise` handles; signals for workers are never sent again.

    `notices`: the signal of the spec that gives notice of a preemption, if there is one, and the
    signal that reloads, likewise.
    """
    numbers = [*chosen.stop, *chosen.forward, *notices, signal.SIGTSTP]
    received = ReceivedSignals(numbers, chosen.stop)
    received.discard(chosen.forward | notices)
    return received


async def supervise(
    spec: AnySpec,
    chosen: SignalSpec,
    received: ReceivedSignals,
    on_hup: Callable[[Agent], object] | None = None,
    **settings: Any,
) -> LaunchResult:
    """Run a job as `supervise_agent` does; the settings are those of an `Agent`."""
    return await supervise_agent(Agent(spec, **settings), chosen, received, on_hup)


async def supervise_agent(
    agent: Agent,
    chosen: SignalSpec,
    received: ReceivedSignals,
    on_hup: Callable[[Agent], object] | None = None,
) -> LaunchResult:
    """Run the job of an agent to its end, and handle signals that the caller receives.

    `on_hup` is called at SIGHUP, in place of a stop.
    """
    async with agent:

        def on_stop(number: int) -> None:  # this signal is handled
            received.discard(chosen.forward | chosen.stop | agent.spec.preemption.signals)

        handling = handle_signals(agent, chosen, received, on_stop, on_hup)
        handler = create_task(handling, name="handle signals")
        try:
            return await agent.wait()
        finally:
            handler.cancel()
            await wait_shielded(handler)


async def handle_signals(
    agent: Agent,
    chosen: SignalSpec,
    received: ReceivedSignals,
    on_stop: Callable[[int], object],
    on_hup: Callable[[Agent], object] | None = None,
) -> None:
    """Suspend, forward, stop or kill as a signal requires; `on_stop` gets the first that stops."""
    driver, notices, is_stopped = driver_of(agent), agent.spec.preemption.signals, False
    harmless = {*notices}  # a first one stops nothing: another node may have given the notice

    def handle(number: int) -> None:
        nonlocal is_stopped
        reason = f"{signal_name(number)} was received"
        if number == signal.SIGHUP and on_hup is not None:
            on_hup(agent)
        elif number in notices and (
            (not is_stopped and agent.preempt(reason=reason)) or number in harmless
        ):
            harmless.difference_update(chosen.stop)
        elif number in chosen.forward:
            driver.forward(number, is_for_all=chosen.unhandled == "kill")
        elif number == signal.SIGKILL:
            driver.kill("the stop signal was repeated")
        elif not is_stopped:
            is_stopped = True
            on_stop(number)
            driver.receive(StopReceived(reason, number, received=True))

    received.handle = handle
    try:
        async for number in received:
            if number != signal.SIGTSTP:
                handle(number)
                continue
            with suppress(OSError):  # no descriptor is left to scan /proc with: the job goes on
                await driver.suspend_while(partial(received.suspend_process, time.monotonic()))
    finally:
        received.handle = None


def run(
    spec: LaunchSpec | GroupSpec,
    *,
    signals: bool | SignalSpec = False,
    console: ConsoleTarget | None = None,
    listeners: Sequence[EventListener] = (),
    adopt_orphans: bool = False,
    control: bool = False,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> LaunchResult:
    """Run a job to its end in a program that has no event loop.

    Other arguments, results and errors are as for `launch`.

    Args:
        loop_factory: makes the event loop, as in `asyncio.Runner`; None is the default of the event
            loop policy, `uvloop.new_event_loop` gives uvloop.

    Raises:
        RuntimeError: an event loop is running in this thread; use `await launch(spec)`.
    """
    return run_coroutine(
        lambda: launch(
            spec,
            signals=signals,
            console=console,
            listeners=listeners,
            adopt_orphans=adopt_orphans,
            control=control,
        ),
        loop_factory=loop_factory,
    )


def run_coroutine(
    make: Callable[[], Coroutine[Any, Any, T]], *, loop_factory: LoopFactory | None = None
) -> T:
    """Run the coroutine that `make` returns on a new event loop; RuntimeError inside another."""
    # `make` is not called beside a running loop: nothing would await its coroutine.
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass  # no loop is running, as required
    else:
        raise RuntimeError("an event loop is running in this thread: use `await launch(spec)`")
    check_select()
    _check_descriptors()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(make())


def _check_descriptors() -> None:
    """Open and close as many files as a new event loop does, or raise OSError."""
    # asyncio prints a traceback for a loop that it could make only in part.
    with select.epoll():
        for end in socket.socketpair():
            end.close()


@contextmanager
def use_pidfd_child_watcher() -> Iterator[None]:
    """Make asyncio wait for children by pidfd on Python 3.11, as later versions do.

    The watcher is a setting of the process, so only a program that owns its process may change it:
    the command line.
    """
    # The default of 3.11 is a thread per child, which can even signal a recycled pid.
    if sys.version_info >= (3, 12):
        yield
        return
    former = asyncio.get_child_watcher()
    asyncio.set_child_watcher(asyncio.PidfdChildWatcher())
    try:
        yield
    finally:
        asyncio.set_child_watcher(former)
