"""`record`, which writes torch's error file when a worker's main function raises."""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from elastic_aio.errors import JobFailed
from elastic_aio.text import abridge
from elastic_aio.worker.bootstrap import describe_error, enable_faulthandler, format_error
from elastic_aio.worker.context import ERROR_FILE
from elastic_aio.worker.errorfile import pass_on_error_file, write_error_file
from elastic_aio.worker.interpreter import MESSAGE_MAX, TRACEBACK_MAX, offer_stacks
from elastic_aio.worker_error import WorkerError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

Function = TypeVar("Function", bound=Callable[..., Any])


def record(function: Function) -> Function:
    """Decorate a worker's main function, so that it records why it failed.

    Compatible with torch's `record`.  An Exception is written to the file that
    `TORCHELASTIC_ERROR_FILE` names, and raised again; of a `JobFailed`, where the function is
    itself a launcher, the error file of the root cause is passed on.  `SystemExit(0)` becomes a
    normal return; other exits and KeyboardInterrupt are not recorded.  The function may be `async
    def`.
    """
    return called_within(_Recording(), function)


def called_within(recording: AbstractContextManager[object], function: Function) -> Function:
    """Wrap a function, also an `async def`, so that each call of it is within `recording`."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def record_async(*args: Any, **kwargs: Any) -> Any:
            with recording:
                return await function(*args, **kwargs)

        return cast("Function", record_async)

    @functools.wraps(function)
    def record_sync(*args: Any, **kwargs: Any) -> Any:
        with recording:
            return function(*args, **kwargs)

    return cast("Function", record_sync)


class _Recording:
    """Records an Exception, and suppresses `SystemExit(0)`.

    A class, since a generator of contextlib would be a frame of each recorded traceback.
    """

    def __enter__(self) -> None:
        enable_faulthandler()
        offer_stacks()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        path = os.environ.get(ERROR_FILE)
        if path and isinstance(error, Exception):
            try:
                _record(error, path)
            except Exception:  # noqa: BLE001  # as for a full disk
                pass  # no other exception may replace the one that is being raised
        return isinstance(error, SystemExit) and error.code == 0


def _record(error: Exception, path: str) -> None:
    root = error.root_cause if isinstance(error, JobFailed) else None
    if root is None or root.error is None or not root.error.path:
        write_error_file(worker_error(error, path))
    elif warning := pass_on_error_file(root, path):
        import logging  # here: most workers have no use for it

        logging.getLogger(__name__).warning("%s", warning)


def record_end(error: Exception, path: str) -> None:
    """Write the error file of an error that ended a script, unless it may say why already.

    OSError: the file cannot be written.
    """
    write_error_file(worker_error(error, path), keeps_reason=True)


def worker_error(error: BaseException, path: str) -> WorkerError:
    """Return an exception, raised now, as the content of the error file at `path`."""
    message = abridge(describe_error(error), MESSAGE_MAX)
    stack = abridge(format_error(error), TRACEBACK_MAX)
    return WorkerError(message, stack, time.time(), path)
