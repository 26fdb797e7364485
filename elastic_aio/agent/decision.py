"""Calls the user's `restart.decide`."""

from __future__ import annotations

import asyncio
import inspect

from elastic_aio.outcome import Failure
from elastic_aio.spec.restart import Decide, RestartAction


async def call_decide(decide: Decide, failure: Failure) -> RestartAction | BaseException:
    """Return the decision of the user's `restart.decide`, or what it raised.

    Cancellation: raised only if the caller's task was cancelled; a CancelledError of
    the callback's own is returned.
    """
    try:
        decision = decide(failure)
        action = await decision if inspect.isawaitable(decision) else decision
        if not isinstance(action, RestartAction):
            raise TypeError(f"restart.decide must return a RestartAction (got {action!r})")
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return error
    except Exception as error:  # noqa: BLE001  # the user's code: handed to the user
        return error
    return action
