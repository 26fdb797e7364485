"""torch's `error.json`: how a worker tells its supervisor why it failed.

One line of JSON at the path in `TORCHELASTIC_ERROR_FILE`::

    {"message": {"message": "ValueError: x", "extraInfo":
        {"py_callstack": "Traceback ...", "timestamp": "1700000000"}}}

`message` may also be a plain string, with `timestamp` beside it.  Reader and
writer are both here; torch reads what we write and the other way round.
"""

from __future__ import annotations

import faulthandler
import functools
import inspect
import json
import os
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar, cast

from elastic_aio.outcome import WorkerError
from elastic_aio.worker.context import ERROR_FILE

__all__ = [
    "parse_error_file",
    "record",
    "render_error_file",
    "with_exit_code",
    "write_error_file",
]

Function = TypeVar("Function", bound=Callable[..., Any])


def write_error_file(error: BaseException, path: str) -> None:
    """Write what `error` says to `path`, in one step: readers see all of it or nothing.

    Raises:
        OSError: the file cannot be written.
    """
    said = {
        "message": _message(error),
        "extraInfo": {
            "py_callstack": "".join(traceback.format_exception(error)),
            "timestamp": str(int(time.time())),
        },
    }
    unfinished = f"{path}.{os.getpid()}"
    try:
        with open(unfinished, "w", encoding="ascii") as file:
            json.dump({"message": said}, file)
        os.replace(unfinished, path)
    except OSError:
        if os.path.exists(unfinished):
            os.unlink(unfinished)
        raise


def _message(error: BaseException) -> str:
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception:  # noqa: BLE001  # a user's __str__ can do anything
        return f"{name}: <its text cannot be made>"


def parse_error_file(content: bytes, path: str, written_at: float) -> WorkerError | None:
    """Read an error file; None when it says nothing or is not one.

    A worker may be killed in the middle of writing and anyone may write there, so
    no content is an error here.

    Args:
        content: the bytes of the file.
        path: where they come from, for the report.
        written_at: modification time of the file in Unix seconds.  torch's own
            timestamp has whole seconds; the file's time orders failures within
            one, and is taken when the two agree.
    """
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return None
    said = document.get("message") if isinstance(document, dict) else None
    if isinstance(said, str) and said:
        return WorkerError(said, None, _time(document.get("timestamp"), written_at), path)
    if not isinstance(said, dict):
        return None
    extra = said.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    stack = extra.get("py_callstack")
    message = said.get("message")
    if not isinstance(message, str) or not (message or stack):
        return None
    return WorkerError(
        message,
        stack if isinstance(stack, str) and stack else None,
        _time(extra.get("timestamp"), written_at),
        path,
    )


def _time(value: object, written_at: float) -> float:
    try:
        stamp = float(value)  # type: ignore[arg-type]  # anything may stand there
    except (TypeError, ValueError, OverflowError):
        return written_at
    # Far from any clock, infinite or NaN: not a time.
    if not 0 <= stamp < 1e11:
        return written_at
    return stamp if abs(stamp - written_at) > 2 else written_at


def render_error_file(error: WorkerError) -> bytes:
    """Return the error file that says what `error` does; its own may be on another host."""
    extra = {"py_callstack": error.traceback or "", "timestamp": str(int(error.timestamp))}
    said = {"message": error.message, "extraInfo": extra}
    return json.dumps({"message": said}).encode("ascii")


def with_exit_code(content: bytes, exit_code: int) -> bytes:
    """Return an error file with the exit code added, as torch's launcher passes it on.

    Raises:
        ValueError: the content is not an error file.
    """
    try:
        document = json.loads(content)
        if isinstance(document, dict) and isinstance(document.get("message"), dict) and exit_code:
            document["message"]["errorCode"] = exit_code
        return json.dumps(document).encode("ascii")
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def record(function: Function) -> Function:
    """Make a worker's main function record why it failed, as torch's `record` does.

    On an exception the error file named by `TORCHELASTIC_ERROR_FILE` is written
    and the exception goes on.  `SystemExit(0)` becomes a normal return; other
    exits and KeyboardInterrupt leave no file.  Works for `async def` too.
    """
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def record_async(*args: Any, **kwargs: Any) -> Any:
            _enable_faulthandler()
            try:
                return await function(*args, **kwargs)
            except SystemExit as error:
                return _exit_or_none(error)
            except Exception as error:
                _write_where_asked(error)
                raise

        return cast("Function", record_async)

    @functools.wraps(function)
    def record_sync(*args: Any, **kwargs: Any) -> Any:
        _enable_faulthandler()
        try:
            return function(*args, **kwargs)
        except SystemExit as error:
            return _exit_or_none(error)
        except Exception as error:
            _write_where_asked(error)
            raise

    return cast("Function", record_sync)


def _exit_or_none(error: SystemExit) -> None:
    if error.code != 0:
        raise error


def _enable_faulthandler() -> None:
    try:
        faulthandler.enable(all_threads=True)
    except (OSError, ValueError, AttributeError, RuntimeError):
        pass  # stderr is closed or is no file: crashes go without a stack


def _write_where_asked(error: BaseException) -> None:
    if path := os.environ.get(ERROR_FILE):
        try:
            write_error_file(error, path)
        except OSError:
            pass  # a full disk must not replace the error that is on its way
