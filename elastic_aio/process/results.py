"""How the calls of function workers have ended, read after the workers are gone."""

from __future__ import annotations

import os
import sys
from typing import Any

from msgspec import Struct

from elastic_aio.aio import off_loop
from elastic_aio.outcome import WorkerError
from elastic_aio.worker import bootstrap

__all__ = ["Told", "read_told"]

# From this size on a result is read in a thread.
_LARGE = 1 << 20


class Told(Struct, frozen=True):
    """What a worker has said of its call; `kind` is one of `bootstrap`'s.

    `error` is set when it raised.  `problem` says why a value did not arrive.
    """

    kind: int
    value: Any = None
    error: WorkerError | None = None
    problem: str = ""

    @property
    def is_exception(self) -> bool:
        """Whether an Exception ended the call, and not another BaseException."""
        return self.kind == bootstrap.RAISED


async def read_told(descriptor: int) -> Told:
    """Read a worker's result; never fails, and may be repeated.

    Cancellation leaves the descriptor as it was.
    """
    if os.fstat(descriptor).st_size < _LARGE:
        return _read(descriptor)
    return await off_loop(lambda: _read(descriptor))


def _read(descriptor: int) -> Told:
    # What workers define in the main script, they know by multiprocessing's name.
    sys.modules.setdefault("__mp_main__", sys.modules["__main__"])
    try:
        return _told(*bootstrap.read_result(descriptor))
    except Exception as error:  # noqa: BLE001  # unpickling runs code of the user's
        name = type(error).__name__
        return Told(bootstrap.VALUE, problem=f"its value cannot be unpickled here: {name}: {error}")


def _told(kind: int, content: Any) -> Told:
    if kind == bootstrap.VALUE:
        return Told(kind, value=content)
    if kind in (bootstrap.RAISED, bootstrap.BROKE_OFF):
        message, story, at = content
        return Told(kind, error=WorkerError(message, story, at, ""))
    if kind in (bootstrap.UNPICKLABLE, bootstrap.EXITED):
        return Told(kind, problem=content[0])
    return Told(kind)
