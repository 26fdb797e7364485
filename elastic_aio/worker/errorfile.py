"""torch's error file, by which a worker reports why it failed.

One line of JSON at the path in `TORCHELASTIC_ERROR_FILE`::

    {"message": {"message": "ValueError: x", "extraInfo":
        {"py_callstack": "Traceback ...", "timestamp": "1700000000"}}}

`message` may also be a plain string, with `timestamp` beside it.  torch reads these files, and its
files are read here.  Beside `message`, where torch does not look, `writer_pid` has the process that
wrote the file, since processes that a worker starts inherit the variable, and `writer_time` when:
torch's timestamp has whole seconds, and the clock of a network file system is another one.  With
an empty message, the writer has failed, and its standard error says why.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time
from typing import TYPE_CHECKING

from elastic_aio.text import abridge
from elastic_aio.worker.interpreter import MESSAGE_MAX, TRACEBACK_MAX
from elastic_aio.worker_error import WorkerError

if TYPE_CHECKING:  # a worker may run where nothing is installed
    from elastic_aio.outcome import Failure

ERROR_FILE_MAX = 1024 * 1024
"""Bytes; a larger one would block the loop, and ours have a tenth of that."""
WRITER = "writer_pid"
"""The key of the process that wrote a file."""
_TIME = "writer_time"

NEAR_S = 5.0
"""Seconds before its end in which an error may be the reason, whichever process has recorded it.
An interpreter with torch may take seconds to end; an error that a program has survived for longer,
it has handled."""

_SHOWN = 2000  # bytes of an overwritten file


def is_temporary(name: str) -> bool:
    """Return whether a file may be left by a worker that was killed in `write_error_file`."""
    return re.fullmatch(r"error(_[0-9]+)?\.json\.[0-9]+", name) is not None


def write_error_file(error: WorkerError, *, keeps_reason: bool = False) -> None:
    """Write the error file that `error` names, atomically.

    With `keeps_reason`, leave a file that says already why this process ends: its own, a recent one
    that does not name its process, and the file of a program whose failure is `error`.  OSError:
    the file cannot be written.
    """
    if not (keeps_reason and _has_reason(error)):
        _write(error.path, render_error_file(error))


def _write(path: str, content: bytes) -> None:
    document = {**json.loads(content), WRITER: os.getpid()}
    replace_file(path, json.dumps(document).encode("ascii"), suffix=f".{os.getpid()}")


def replace_file(path: str, content: bytes, *, suffix: str = ".new") -> None:
    """Write a file in one step: readers find the former content or the new one.

    No other writer may have an unfinished file of the same `suffix` at the same time.  OSError: the
    file cannot be written; no unfinished one is left.
    """
    temporary = f"{path}{suffix}"
    try:
        with open(temporary, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def parse_error_file(content: bytes, path: str) -> WorkerError | None:
    """Read an error file, with long texts abridged; None if it has no error or another format.

    No content is an error here: a worker may be killed while it writes, and any process may write
    there.  The timestamp is 0 if the file does not say when it was written.
    """
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return None
    value = document.get("message") if isinstance(document, dict) else None
    if value is None:
        return None
    pid, extra, stack = document.get(WRITER), document, None
    pid = pid if type(pid) is int else None
    if isinstance(value, dict):
        extra = value.get("extraInfo")
        extra = extra if isinstance(extra, dict) else {}
        stack, value = extra.get("py_callstack"), value.get("message")
    if not isinstance(value, str) or not (value or stack or pid):
        return None
    return WorkerError(
        abridge(value, MESSAGE_MAX),
        abridge(stack, TRACEBACK_MAX) if isinstance(stack, str) and stack else None,
        _time(document.get(_TIME)) or _time(extra.get("timestamp")),
        path,
        pid,
    )


def _time(value: object) -> float:
    try:
        stamp = float(value)  # type: ignore[arg-type]  # anything may stand there
    except (TypeError, ValueError, OverflowError):
        return 0.0
    # Infinite, NaN or in no century: not a time.
    return stamp if 0 <= stamp < 1e11 else 0.0


def is_of_program(message: str) -> bool:
    """Return whether an exception says only that a program has failed, and not why."""
    return message.partition(":")[0].rpartition(".")[2] == "CalledProcessError"


def _has_reason(new: WorkerError) -> bool:
    try:
        error = parse_error_file(_read_start(new.path, ERROR_FILE_MAX), new.path)
    except OSError:
        return False
    if error is None:
        return True  # its format is another one
    if not (error.message or error.traceback):
        return False
    is_near = not error.timestamp or time.time() - error.timestamp <= NEAR_S
    is_own = error.pid == os.getpid()
    return is_own or (is_near and (error.pid is None or is_of_program(new.message)))


def render_error_file(error: WorkerError) -> bytes:
    """Return an error file's content for `error`, whose own file may be on another host."""
    extra = {"py_callstack": error.traceback or "", "timestamp": str(int(error.timestamp))}
    message = {"message": error.message, "extraInfo": extra}
    return json.dumps({"message": message, _TIME: error.timestamp}).encode("ascii")


def with_exit_code(content: bytes, exit_code: int) -> bytes:
    """Return an error file with the exit code added, as torch does; ValueError: it is none."""
    try:
        document = json.loads(content)
        if isinstance(document, dict) and isinstance(document.get("message"), dict) and exit_code:
            document["message"]["errorCode"] = exit_code
        return json.dumps(document).encode("ascii")
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def pass_on_error_file(root: Failure, path: str) -> str | None:
    """Write the error file of a failed worker as its launcher's, for the launcher's parent.

    All content of the worker's file is kept, and the exit code is added.  `root.error` has a path,
    maybe on another host; `path` is the launcher's own error file.  Return a warning with the
    former content of `path` if there was any; else None.  OSError: the file cannot be written.
    """
    assert root.error is not None, "the caller checks that there is an error"
    content = render_error_file(root.error)
    try:
        own = _read_start(root.error.path, ERROR_FILE_MAX)
        read = parse_error_file(own, root.error.path)
        # On another host, this path may be another file.
        if read is not None and read.message == root.error.message:
            content = own
    except OSError:
        pass  # on another host, or removed
    try:
        former = _read_start(path, _SHOWN).decode("utf-8", "replace")
    except OSError:
        former = ""  # most likely there is none
    _write(path, with_exit_code(content, root.status.returncode or 0))
    if not former:
        return None
    return f"{path} exists already and is overwritten; it held: {former}"


def _read_start(path: str, size: int) -> bytes:
    """Return the first bytes of a regular file; OSError: it is no such file, or unreadable."""
    # O_NONBLOCK: the opening of a named pipe would wait for a writer.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return file.read(size)
