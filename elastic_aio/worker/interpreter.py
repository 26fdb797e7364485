"""The end of a worker's interpreter: the error that ended its program, and the steps before exit.

And of its start: the stacks of its threads, for the launcher, and the signal that ends no worker.

A worker that did not start as `python script.py` ends by `os._exit`, after the steps of an
interpreter's finalization that a program can notice.  The finalization itself would end each
foreign thread (torch's have no other end) that still needs the interpreter, inside of C++ code that
does not allow it: the process aborts.  And it would take apart the parent's objects in a forked
worker.

Threads of the program run until the end, and may hold a lock that a `close` or a `__del__` waits
for, for ever.  So files of the standard library are written out first, then the others, whose code
is the program's; and a step of the end that takes too long is the last one.

Nothing here is imported before it is needed, as in `bootstrap`.
"""

from __future__ import annotations

import os
import sys
from _collections_abc import Coroutine  # os has loaded it

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, NoReturn

# Characters of a message and of a traceback that are passed on; stderr has all of them.
MESSAGE_MAX = 16 * 1024
TRACEBACK_MAX = 64 * 1024

# The signal on which a worker writes the stacks of its threads, SIGRTMAX-4: none of glibc's, and
# no common library's.
STACKS_SIGNAL = 60
# The file in memory into which it writes them; the launcher opens it through /proc.
STACKS_FILE = "elastic_aio_stacks"
_STACKS_DESCRIPTOR = 255  # a number that no program expects to be free, or gets by an open

_SIGINT = 2
_FLUSH_FAILED = 120  # CPython's exit code when the standard streams cannot be flushed
_PID = os.getpid()
_failed: list[object] = []  # files that could not be written out
_busy: list[object] = []  # buffers in which another thread stays
_BUSY_S = 1.0  # CPython waits as long for such a buffer at its end
_STEP_S = 10.0  # of one step, after which the process ends without the next ones
_OWN = os.path.dirname(os.path.abspath(__file__))


# ------------------------------------------------------------------------------ the start

_offered_by = 0  # the process that has offered its stacks


def offer_stacks() -> None:
    """Let the launcher read the stacks of all threads, however this process hangs.

    The handler of the signal is C code, and needs neither the GIL nor the main thread.  The file is
    in memory, and only its owner can open it.
    """
    global _offered_by
    if _offered_by == os.getpid() or "ELASTIC_AIO_NOTIFY_FD" not in os.environ:
        return
    _offered_by = os.getpid()
    import faulthandler

    try:
        faulthandler.register(STACKS_SIGNAL, _stacks_file(), all_threads=True)
    except (OSError, ValueError, AttributeError, RuntimeError):
        pass  # another implementation of Python, or no descriptor is left


def survive_notice() -> None:
    """Let the signal of a notice, which may go to all processes of the job, not end this one.

    faulthandler's handler restarts system calls, and a program that is executed has the default
    action again.  `signal.getsignal` does not see it: a library that looks installs its own.
    """
    if number := os.environ.pop("ELASTIC_AIO_NOTICE_SIGNAL", ""):
        import faulthandler

        try:  # no descriptor has this number: nothing is written
            faulthandler.register(int(number), 2**31 - 1, all_threads=False)
        except (OSError, ValueError, AttributeError, RuntimeError):
            pass  # another implementation of Python


def _stacks_file() -> int:
    """Return the file's descriptor, high enough that the program's own keep their numbers."""
    number = _STACKS_DESCRIPTOR
    try:
        link = os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        link = ""
    if link == f"/memfd:{STACKS_FILE} (deleted)":
        return number  # the start of this process has opened it
    descriptor = os.memfd_create(STACKS_FILE)
    if link:
        return descriptor  # the number is in use
    try:
        os.dup2(descriptor, number, inheritable=False)
    except OSError:
        return descriptor  # the limit is lower
    os.close(descriptor)
    return number


# ------------------------------------------------------------------ the end of the program


def report_error(error: BaseException) -> int:
    """Report the error that ended a program, as the interpreter does; return the exit code.

    The exit code is -SIGINT if this signal shall be the exit status.
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


def await_result(value: Any) -> Any:
    """Return the result of a coroutine, which asyncio runs; return another value as it is."""
    if not issubclass(type(value), Coroutine):
        return value
    import asyncio

    return asyncio.run(value)


def without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames that lead to the user's code."""
    own = {_OWN}
    if asyncio := sys.modules.get("asyncio"):  # it runs coroutine functions
        own.add(os.path.dirname(asyncio.__file__ or ""))
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if os.path.dirname(path) not in own and path != "<frozen runpy>":
            break
        trace = trace.tb_next
    return trace


# ------------------------------------------------------------------------ the finalization


def finalize(code: int) -> NoReturn:
    """End this process like an interpreter: wait for threads, run exit hooks, write out files.

    The exit code -SIGINT ends it by this signal.
    """
    try:
        import gc

        if threading := sys.modules.get("threading"):
            _try(threading._shutdown)  # as the interpreter does
        _run_exit_hooks()
        limit = _StepLimit(code)
        if not _flush_standard_streams(limit):
            code = limit.code = _FLUSH_FAILED
        is_forked = os.getpid() != _PID  # with objects and buffers that are the parent's too
        if not is_forked:
            limit.run(gc.unfreeze)  # frozen objects of the program may be files
        files = _open_files()
        _write_out_files([file for file in files if all(map(_is_standard, _layers(file)))], limit)
        if not is_forked:
            limit.run(_flush_c_streams)
        # A garbage collection may close a file before it finalizes the buffer above it, or an
        # object of the program that writes to it, such as an archive.
        _write_out_files(files, limit)
        limit.run(_release_main)
        del files
        limit.run(gc.collect)
        _write_out_files(_open_files(), limit)  # for what `__del__` methods have written
        if not is_forked:
            limit.run(_flush_c_streams)
        if code == -_SIGINT:
            import signal

            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    finally:  # a signal may raise KeyboardInterrupt at any place
        _exit(code)


def _run_exit_hooks() -> None:
    import atexit

    atexit._run_exitfuncs()


def _try(function: Callable[..., object], *args: object) -> None:
    """Call a function, outside of exit hooks; an error goes to `sys.unraisablehook`, as theirs."""
    import atexit

    atexit.register(function, *args)
    _run_exit_hooks()


class _StepLimit:
    """Runs the steps of the end, and ends the process if one of them takes too long."""

    def __init__(self, code: int) -> None:
        """Begin to watch; `code` is the exit code in that case."""
        import _thread

        self.code = code
        self._step_has_ended = _thread.allocate_lock()
        self._step_has_ended.acquire()
        try:
            _thread.start_new_thread(self._watch, ())
        except RuntimeError:
            pass  # no thread is left: the end has no limit

    def _watch(self) -> None:
        while self._step_has_ended.acquire(timeout=_STEP_S):
            pass
        _exit(self.code)

    def run(self, function: Callable[..., object], *args: object) -> None:
        _try(function, *args)
        if self._step_has_ended.locked():
            self._step_has_ended.release()


def _exit(code: int) -> NoReturn:
    os._exit(code if code >= 0 else 128 - code)


def _flush_standard_streams(limit: _StepLimit) -> bool:
    """Write out the text that they hold; return whether that was possible."""
    streams = [item for item in (sys.stdout, sys.stderr) if item is not None]
    _find_busy([layer for stream in streams for layer in _layers(stream)])
    for stream in streams:
        if not getattr(stream, "closed", False) and not _is_busy(stream):
            limit.run(_flush, stream)
    return not _failed


def _flush(file: Any) -> None:
    """Write out the buffer of a file, but once only if that fails."""
    if any(file is other for other in _failed):
        return
    try:
        file.flush()
    except BaseException:  # a stream of the program can raise anything; passed on
        _failed.append(file)
        raise


def _release_main() -> None:
    """Drop the main module with all that only it holds: files, temporary ones, `__del__`."""
    import gc

    for name in ("exc", "type", "value", "traceback"):
        sys.__dict__.pop(f"last_{name}", None)
    main = sys.modules.get("__main__")
    # Another than the parent's, whose objects are the parent's too.
    if any(item is main for item in gc.get_objects()):
        del main, sys.modules["__main__"]
        sys.modules.pop("__mp_main__", None)
    gc.collect()


def _open_files() -> list[Any]:
    """Return the files that the program has left open, and the layers above them."""
    import gc
    from _io import _IOBase

    return [item for item in gc.get_objects() if issubclass(type(item), _IOBase)]


def _write_out_files(files: list[Any], limit: _StepLimit) -> None:
    """Write out files; these themselves need not be closed: the process ends."""
    _find_busy(files)
    for file in sorted(files, key=_order):
        if not _is_busy(file):
            limit.run(_write_out, file)


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
        is_buffer = issubclass(type(file), (BufferedWriter, BufferedRandom))
        if not is_buffer or any(file is one for one in _busy) or _is_regular(file):
            continue
        is_free = _thread.allocate_lock()
        is_free.acquire()
        try:
            _thread.start_new_thread(probe, (file, is_free))
        except RuntimeError:
            break  # no thread is left
        probes.append((file, is_free))
    deadline = time.monotonic() + _BUSY_S
    for file, is_free in probes:
        if not is_free.acquire(timeout=max(0, deadline - time.monotonic())):
            _busy.append(file)


def _is_busy(file: object) -> bool:
    return bool(_busy) and any(layer is one for layer in _layers(file) for one in _busy)


def _is_standard(file: object) -> bool:
    return str(type(file).__module__).partition(".")[0] in sys.stdlib_module_names


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


def _order(file: Any) -> tuple[bool, int]:
    """Return a file's place: pipes come last, and text, Python code, buffers, others in turn."""
    import _io

    if isinstance(file, _io._TextIOBase):
        layer = 0
    elif not isinstance(file, _io._BufferedIOBase):
        layer = 3
    else:
        layer = 2 if type(file).__module__ == "_io" else 1
    return _is_regular(file) is False, layer


def _write_out(file: Any) -> None:
    try:
        if file.closed or any(file is one for one in (sys.stdin, sys.stdout, sys.stderr)):
            return
    except ValueError:
        return  # its buffer is detached
    if type(file).__module__ != "_io":
        file.close()  # it may add an end, as gzip does
    else:
        _flush(file)


def _is_regular(file: Any) -> bool | None:
    """Whether a write soon returns, although nothing reads; None if the file has no descriptor."""
    import stat

    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except Exception:  # noqa: BLE001  # in memory, or above Python code
        return None


def _flush_c_streams() -> None:
    """Write out the output of C code, which `os._exit` does not."""
    standard_library = os.path.dirname(os.__file__)
    # Not `module.__file__`: a module may make its attributes.
    names = (getattr(module, "__dict__", {}) for module in [*sys.modules.values()])
    paths = (str(name.get("__file__")) for name in names)
    # The import of ctypes is long for a worker that runs no foreign code.
    if any(".so" in path and not path.startswith(f"{standard_library}/lib-") for path in paths):
        import ctypes

        ctypes.CDLL(None).fflush(None)
