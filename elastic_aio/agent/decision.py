"""Asking the user's `restart.decide`, which may answer, raise, or do anything else."""

from __future__ import annotations

import asyncio
import inspect

from elastic_aio.outcome import Failure
from elastic_aio.policy import Action, Decide

__all__ = ["ask_user"]


async def ask_user(decide: Decide, failure: Failure) -> Action | BaseException:
    """Return what the callback says about a failure, or what it raises.

    Raises:
        asyncio.CancelledError: we were cancelled, and not the callback by itself.
    """
    try:
        answer = decide(failure)
        action = await answer if inspect.isawaitable(answer) else answer
        if not isinstance(action, Action):
            raise TypeError(f"restart.decide must return an Action, not {action!r}")
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return error  # the callback's own
    except Exception as error:  # noqa: BLE001  # the user's code: handed to the user
        return error
    return action
