"""Calls the user's `restart.decide`."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable
from functools import partial

from elastic_aio.aio import PausableClock, create_task, run_in_thread
from elastic_aio.outcome import Failure
from elastic_aio.spec.restart import DECIDE_TIMEOUT, Decide, RestartAction


async def call_decide(decide: Decide, failure: Failure) -> RestartAction | BaseException:
    """Return the decision of the user's `restart.decide`, or what it raised.

    A coroutine function runs on the event loop.  Any other callback runs in a thread: it may
    block, and the loop has heartbeats to send and perhaps the store of all nodes to serve.

    Cancellation: raised only if the caller's task was cancelled; a CancelledError of
    the callback's own is returned.  A thread goes on, but the program does not wait for it.
    """
    decision: RestartAction | Awaitable[RestartAction] | None
    try:
        if inspect.iscoroutinefunction(decide):
            decision = decide(failure)
        else:
            call = partial(contextvars.copy_context().run, decide, failure)
            decision, error = await run_in_thread(_result_of, call, daemon=True)
            if error is not None:
                raise error
        action = await decision if inspect.isawaitable(decision) else decision
        if not isinstance(action, RestartAction):
            raise TypeError(f"restart.decide must return a RestartAction (got {action!r})")
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return error
    except (SystemExit, KeyboardInterrupt):
        raise  # which ends the loop
    except BaseException as error:  # noqa: BLE001  # the user's code: handed to the user
        return error
    return action


def _result_of(
    call: Callable[[], RestartAction | Awaitable[RestartAction]],
) -> tuple[RestartAction | Awaitable[RestartAction] | None, BaseException | None]:
    """Return what `call` returns, and what it raises.

    A future cannot carry every exception: GeneratorExit closes the coroutines that await it.
    """
    try:
        return call(), None
    except BaseException as error:  # noqa: BLE001  # handed to the caller
        return None, error


async def decide_in_time(
    decide: Decide, failure: Failure, clock: PausableClock
) -> RestartAction | BaseException | None:
    """Do `call_decide`; return None if that takes more than `DECIDE_TIMEOUT` by `clock`.

    Cancellation: as for `call_decide`.
    """
    deciding = create_task(call_decide(decide, failure), name="restart.decide")
    try:
        await clock.wait_for(deciding, seconds=DECIDE_TIMEOUT)
    finally:
        deciding.cancel()  # not waited for: the callback is the user's
    return deciding.result() if deciding.done() else None
