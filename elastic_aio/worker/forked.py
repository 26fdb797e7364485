"""The start and the end of a forked worker, in place of the interpreter's own."""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from elastic_aio.worker import interpreter, lines

# Encoding and error handler of 0, 1 and 2 as the interpreter has chosen them, by the locale and
# PYTHONIOENCODING; a module that is imported later may replace the streams.  Output has the error
# handler of input; a command has set another one for its own output.
_ENCODINGS = [
    (getattr(stream, "encoding", None), getattr(like, "errors", None) or "backslashreplace")
    for stream, like in (
        (sys.__stdin__, sys.__stdin__),
        (sys.__stdout__, sys.__stdin__),
        (sys.__stderr__, sys.__stderr__),
    )
]


def run_forked(
    detach: Callable[[], object],
    streams: Sequence[int],
    cwd: str | None,
    env: Mapping[str, str],
    call: Callable[[], int],
) -> NoReturn:
    """Run a forked worker to its end, in `cwd` (None: the parent's) and with `env`.

    The caller's frames belong to the parent: `detach` drops what the worker has of the parent's
    own.  `streams` are descriptors that become 0, 1 and 2; the parent's numbers stay open.  `call`
    returns the exit code.
    """
    code = 1
    try:
        os.setsid()
        gc.freeze()  # so that the parent's objects are known, and their pages stay shared
        detach()
        _forget_parent()
        _take_streams(streams)
        if cwd is not None:
            os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        _renew_streams()
        code = call()
    except BaseException as error:  # noqa: BLE001  # the frames above are the parent's
        code = interpreter.report_error(error)
    finally:
        interpreter.finalize(code)


def _forget_parent() -> None:
    """Drop the parent's exit hooks, finalizers and children; keep the hooks of their modules."""
    import atexit

    atexit._clear()
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        # A daemonic child of multiprocessing may have no children.  Managers know the parent's key.
        me = process.current_process()
        me._config.pop("daemon", None)
        me._identity, me.name, me._parent_pid = (), "MainProcess", None
        process._children, process._process_counter = set(), itertools.count(1)
        process._parent_process = None
    if util := sys.modules.get("multiprocessing.util"):
        util._finalizer_registry.clear()
        util._run_after_forkers()
        atexit.register(util._exit_function)
    if weakref := sys.modules.get("weakref"):
        for finalizer in [*weakref.finalize._registry]:
            finalizer.atexit = False
        weakref.finalize._registered_with_atexit = False  # so that the next one registers
    if logging := sys.modules.get("logging"):
        logging._handlerList.clear()
        atexit.register(logging.shutdown)


def _take_streams(descriptors: Sequence[int]) -> None:
    """Duplicate these descriptors as 0, 1 and 2; they may have such numbers already."""
    copies = [os.dup(descriptor) for descriptor in descriptors]
    for number, copy in enumerate(copies):
        os.dup2(copy, number)
    for copy in copies:
        if copy >= len(copies):
            os.close(copy)


def _renew_streams() -> None:
    """Set new `sys.stdin`, `stdout` and `stderr` on descriptors 0, 1 and 2.

    The inherited objects may be of any type (a notebook's, a test's capture), and hold text that
    the parent will write.
    """
    import io

    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        mode, newline = ("w", "\n") if descriptor else ("r", None)
        raw: Any = io.FileIO(descriptor, mode, closefd=False)
        raw.name = f"<{name}>"
        buffer = raw if descriptor else io.BufferedReader(raw)
        encoding, errors = _ENCODINGS[descriptor]
        text: Any = io.TextIOWrapper(buffer, encoding, errors, newline, write_through=True)
        text.mode = mode
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    lines.write_lines()


def flush_streams() -> None:
    """Write out the text that `sys.stdout` and `sys.stderr` hold."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue  # closed, or its reader is gone
