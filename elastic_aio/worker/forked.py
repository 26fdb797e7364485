"""What a forked worker does at its begin and end, in place of an interpreter's own."""

from __future__ import annotations

import os
import sys
from typing import Any

__all__ = ["forget_parent", "leave", "renew_streams", "take_streams"]


def renew_streams() -> None:
    """Make new `sys.stdin`, `stdout` and `stderr` over descriptors 0, 1 and 2.

    The inherited objects may be anything (a notebook's, a test's capture), and hold
    text that their owner will write.  Unbuffered, as `python -u` has them.
    """
    import io

    sys.stdin = sys.__stdin__ = _text(io.BufferedReader(io.FileIO(0, "r", closefd=False)))  # type: ignore[misc]  # what renewing is
    sys.stdout = sys.__stdout__ = _text(io.FileIO(1, "w", closefd=False))  # type: ignore[misc]  # likewise
    sys.stderr = sys.__stderr__ = _text(io.FileIO(2, "w", closefd=False), "backslashreplace")  # type: ignore[misc]  # likewise


def _text(raw: Any, errors: str | None = None) -> Any:
    import io

    return io.TextIOWrapper(raw, errors=errors, write_through=True)


def forget_parent() -> None:
    """Leave to the parent what it would do at its own end: hooks, finalizers, children."""
    import atexit

    atexit._clear()
    if process := sys.modules.get("multiprocessing.process"):
        process._children = set()  # type: ignore[attr-defined]  # as multiprocessing does itself
    if util := sys.modules.get("multiprocessing.util"):
        util._finalizer_registry.clear()
        util._run_after_forkers()


def take_streams(*descriptors: int) -> None:
    """Make these descriptors 0, 1 and 2, whatever numbers they have now."""
    copies = [os.dup(one) for one in descriptors]
    for standard, copy in enumerate(copies):
        os.dup2(copy, standard)
    for copy in copies:
        if copy >= len(copies):
            os.close(copy)


def leave(code: int) -> None:
    """End a forked worker as an interpreter ends, but without touching what is the parent's.

    Threads are waited for, exit hooks run, queues flushed.
    """
    try:
        import threading

        threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does
        if util := sys.modules.get("multiprocessing.util"):
            util._exit_function()
        import atexit

        atexit._run_exitfuncs()
    except BaseException as error:  # noqa: BLE001  # a user's hook; the worker ends all the same
        sys.excepthook(type(error), error, error.__traceback__)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue  # closed, or nobody reads it
    os._exit(code)
