"""The end of a worker's interpreter: what ended its program, and what is done before it exits.

A worker that did not start as `python script.py` ends by `os._exit`, after the steps of an
interpreter's finalization that a program can notice.  The finalization itself would end each
foreign thread (torch's have no other end) that still needs the interpreter, inside of C++ code
that does not allow it: the process aborts.  And of a forked worker it would take apart the
parent's objects.

Nothing here is imported before it is needed, as in `bootstrap`.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, NoReturn

# Characters of a message and of a traceback that are passed on; stderr has all of them.
MESSAGE_MAX = 16 * 1024
TRACEBACK_MAX = 64 * 1024

_SIGINT = 2
_FLUSH_FAILED = 120  # CPython's exit code when the standard streams cannot be flushed
_PID = os.getpid()
_failed: list[object] = []  # files that could not be written out
_busy: list[object] = []  # buffers in which another thread stays
_BUSY_S = 1.0  # CPython waits as long for such a buffer at its end
_OWN = os.path.dirname(os.path.abspath(__file__))


# ------------------------------------------------------------------ what ended the program


def report_error(error: BaseException) -> int:
    """Report what ended a program, as the interpreter does.

    Returns:
        The exit code; -SIGINT if this signal shall be the exit status.
    """
    if isinstance(error, SystemExit):
        return exit_code_of(error)
    error.__traceback__ = without_own_frames(error.__traceback__)
    code = call_excepthook(error)
    return -_SIGINT if isinstance(error, KeyboardInterrupt) else code


def exit_code_of(error: SystemExit) -> int:
    """Return the exit code of an interpreter that `error` ends; print a text as it does."""
    if error.code is None or isinstance(error.code, int):
        code = error.code or 0
        # To the interpreter, a number that is no C long is -1.
        return (code if -(2**63) <= code < 2**63 else -1) & 0xFF
    try:
        print(error.code, file=sys.stderr)  # noqa: T201  # as the interpreter does
    except BaseException:  # noqa: BLE001  # a __str__ can do anything; stderr is closed
        pass
    return 1


def call_excepthook(error: BaseException) -> int:
    """Pass an error to `sys.excepthook`, and print both if that fails; return the exit code."""
    details = type(error), error, error.__traceback__
    # Exit hooks may look for them.
    sys.last_type, sys.last_value, sys.last_traceback = details
    sys.last_exc = error  # type: ignore[attr-defined]  # of Python 3.12 and later
    try:
        sys.excepthook(*details)
    except SystemExit as exit_error:
        return exit_code_of(exit_error)
    except BaseException as second:  # noqa: BLE001  # a user's hook can raise anything
        second.__traceback__ = without_own_frames(second.__traceback__)
        print_error("Error in sys.excepthook:\n")
        sys.__excepthook__(type(second), second, second.__traceback__)
        print_error("\nOriginal exception was:\n")
        sys.__excepthook__(*details)
    return 1


def print_error(text: str) -> None:
    """Write a text to `sys.stderr`, if there is one."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass  # stderr is closed


def without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames that lead to the user's code."""
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if os.path.dirname(path) != _OWN and path != "<frozen runpy>":
            break
        trace = trace.tb_next
    return trace


# ------------------------------------------------------------------------ the finalization


def finalize(code: int) -> NoReturn:
    """End this process like an interpreter: wait for threads, run exit hooks, write out files.

    Args:
        code: the exit code; -SIGINT to end by this signal.
    """
    try:
        if threading := sys.modules.get("threading"):
            _try(threading._shutdown)  # as the interpreter does
        _run_exit_hooks()
        if not _flush_standard_streams():
            code = _FLUSH_FAILED
        is_forked = os.getpid() != _PID  # with objects and buffers that are the parent's too
        if not is_forked:
            _try(_unfreeze)
        # A garbage collection may close a file before it finalizes the buffer above it.
        _write_out_files()
        _try(_release_main)
        _write_out_files()  # once more, for what `__del__` methods have written
        if not is_forked:
            _try(_flush_c_streams)
        if code == -_SIGINT:
            import signal

            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    finally:  # a signal may raise KeyboardInterrupt at any place
        os._exit(code if code >= 0 else 128 - code)


def _run_exit_hooks() -> None:
    import atexit

    atexit._run_exitfuncs()


def _try(function: Callable[..., object], *args: object) -> None:
    """Call a function, outside of exit hooks; an error goes to `sys.unraisablehook`, as theirs."""
    import atexit

    atexit.register(function, *args)
    _run_exit_hooks()


def _flush_standard_streams() -> bool:
    """Write out the text that they hold; return whether that was possible."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not getattr(stream, "closed", False):
            _try(_flush, stream)
    return not _failed


def _flush(file: Any) -> None:
    """Write out what a file holds, but once only if that fails."""
    if any(file is other for other in _failed):
        return
    try:
        file.flush()
    except BaseException:  # a stream of the program can raise anything; passed on
        _failed.append(file)
        raise


def _unfreeze() -> None:
    import gc

    gc.unfreeze()  # what the program has frozen may be files


def _release_main() -> None:
    """Drop the main module and what only it refers to: files, temporary ones, `__del__`."""
    import gc

    for name in ("exc", "type", "value", "traceback"):
        sys.__dict__.pop(f"last_{name}", None)
    main = sys.modules.get("__main__")
    # Another than the parent's, whose objects are the parent's too.
    if any(item is main for item in gc.get_objects()):
        del main, sys.modules["__main__"]
        sys.modules.pop("__mp_main__", None)
    gc.collect()


def _write_out_files() -> None:
    """Write out the files that the program has left open, and the layers above them.

    The files themselves need not be closed: the process ends.
    """
    import gc
    from _io import _IOBase

    files: list[Any] = [item for item in gc.get_objects() if issubclass(type(item), _IOBase)]
    if len(sys._current_frames()) > 1:
        _find_busy(files)
    # From the outermost layer to the innermost one.
    for file in sorted(files, key=_layer):
        if not (_busy and any(layer is one for layer in _layers(file) for one in _busy)):
            _try(_write_out, file)


def _find_busy(files: list[Any]) -> None:
    """Find the buffers whose lock another thread holds: to wait for it could last for ever."""
    import _thread
    import time
    from _io import BufferedRandom, BufferedWriter

    def probe(file: Any, is_free: _thread.LockType) -> None:
        kind = BufferedWriter if isinstance(file, BufferedWriter) else BufferedRandom
        try:
            kind.write(file, b"")  # takes the lock, and writes nothing
        except BaseException:  # noqa: BLE001  # it is closed; a user's `closed` can do anything
            pass
        is_free.release()

    probes: list[tuple[Any, _thread.LockType]] = []
    for file in files:
        is_buffer = isinstance(file, (BufferedWriter, BufferedRandom))
        if not is_buffer or any(file is one for one in _busy) or _is_regular(file):
            continue
        probes.append((file, _thread.allocate_lock()))
        probes[-1][1].acquire()
        _thread.start_new_thread(probe, probes[-1])
    deadline = time.monotonic() + _BUSY_S
    for file, is_free in probes:
        if not is_free.acquire(timeout=max(0, deadline - time.monotonic())):
            _busy.append(file)


def _layers(file: object) -> list[object]:
    """Return a file and the files that it writes to."""
    import gc
    from _io import _IOBase

    found = [file]
    for layer in found:
        referents = gc.get_referents(layer)
        for item in [*referents, *gc.get_referents(*(r for r in referents if type(r) is dict))]:
            if issubclass(type(item), _IOBase) and not any(item is one for one in found):
                found.append(item)
    return found


def _layer(file: Any) -> int:
    """Return the position of a file's layer: text, a layer of Python code, buffer, others."""
    import _io

    if isinstance(file, _io._TextIOBase):
        return 0
    if not isinstance(file, _io._BufferedIOBase):
        return 3
    return 2 if type(file).__module__ == "_io" else 1


def _write_out(file: Any) -> None:
    try:
        if file.closed or any(file is one for one in (sys.stdin, sys.stdout, sys.stderr)):
            return
    except ValueError:
        return  # its buffer is detached
    if type(file).__module__ != "_io":
        file.close()  # it may add an end, as gzip does
    elif len(sys._current_frames()) == 1 or _is_regular(file) is not False:
        _flush(file)


def _is_regular(file: Any) -> bool | None:
    """Whether a write soon returns, although nothing reads; None if the file has no descriptor."""
    import stat

    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except Exception:  # noqa: BLE001  # in memory, or above Python code
        return None


def _flush_c_streams() -> None:
    """Write out what C code has printed; `os._exit` does not."""
    standard_library = os.path.dirname(os.__file__)
    # Not `module.__file__`: a module may make its attributes.
    names = (getattr(module, "__dict__", {}) for module in [*sys.modules.values()])
    paths = (str(name.get("__file__")) for name in names)
    # The import of ctypes is long for a worker that runs no foreign code.
    if any(".so" in path and not path.startswith(f"{standard_library}/lib-") for path in paths):
        import ctypes

        ctypes.CDLL(None).fflush(None)
