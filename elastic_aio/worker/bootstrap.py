"""The first code of a function worker: reads the call, performs it, writes the result.

Run as `python -u bootstrap_main.py CALL RESULT INDEX`; the first two are descriptors of memory
files.  Forked workers enter at `perform` or `main`.

Call and result are in memory files and never in pipes: a worker does not wait until its result is
read, a large value costs two copies, and there is no end of file that a grandchild could hold back.
The header of a result is written last, so that a result cut short by a kill is not mistaken for a
complete one.

Everything here adds to the start of every worker: `io`, `marshal`, `os`, `sys` and `time` are
loaded by every interpreter, and nothing else is imported before it is needed.  Even the C part of
pickle costs a fifth of an interpreter's start, so a function of a module with plain arguments, or a
plain value, is not pickled.  The parent imports this module for the two formats, which have writer
and reader here.
"""

from __future__ import annotations

import io
import marshal
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType
    from typing import Any

if TYPE_CHECKING or __name__ != "bootstrap":
    from elastic_aio.worker import interpreter
else:  # the package itself need not be importable
    import interpreter

MAIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bootstrap_main.py")

# How a call ended: the first byte of its result.
NOTHING = 0  # no result: a signal, os._exit, a crash
VALUE = 1  # followed by the value
RAISED = 2  # an Exception: (message, traceback, Unix time)
RAISED_BASE = 3  # another BaseException: the same
UNPICKLABLE = 4  # a value that cannot be pickled: (message, traceback, Unix time)
EXITED = 5  # SystemExit: (text or "", None, Unix time)

_HEADER = 16
_MAIN_ALIAS = "__mp_main__"  # multiprocessing's name, so that both find each other's pickles

# Set while the parent's main script is being imported: a job that is started then would
# start again in each of its workers.
_importing_main = False
# Descriptors here by their numbers in the parent, where these differ.
_numbers: Mapping[int, int] = {}
# The process that performs a call: a fork of it may leave the function too, without a result.
_performer = 0


def is_importing_main() -> bool:
    """Return whether this process is a worker that imports its parent's main script."""
    process = sys.modules.get("multiprocessing.process")
    inherits = process and getattr(process.current_process(), "_inheriting", False)
    return _importing_main or bool(inherits)


class InheritedDescriptor:
    """A descriptor among a call's arguments, like multiprocessing's `DupFd`."""

    def __init__(self, number: int) -> None:
        """Store its number in the parent."""
        self.number = number

    def detach(self) -> int:
        """Return its number in this process; the caller closes it."""
        return _numbers.get(self.number, self.number)


# ------------------------------------------------------------------- the two formats


def format_call(header: Mapping[str, Any], body: object) -> list[bytes]:
    """Return the parts of a call's file.

    Args:
        header: `path` and `argv` for `sys`, the parent's `python`, and optionally `main` (name and
            path of the main script), `mp` (multiprocessing's settings), `is_quiet` and
            `may_interrupt` (see `perform`), `is_daemon` and `with_index`.
        body: the pickled pair of function and arguments; or a plain triple of a module, the
            function's name there, and the arguments.
    """
    rest = body if isinstance(body, bytes) else b""
    pair: Any = (dict(header), None if rest else body)
    head = marshal.dumps(pair, 4)
    return [len(head).to_bytes(8, "little"), head, rest]


def _read_call(descriptor: int) -> tuple[dict[str, Any], Callable[[], Any]]:
    """Return the header, and a function that returns the pair of function and arguments."""
    view = _map(descriptor)
    end = 8 + int.from_bytes(view[:8], "little")
    header, plain = marshal.loads(view[8:end])
    if plain is None:
        return header, lambda: _pickle_module().loads(view[end:])
    return header, lambda: _find(*plain)


def _find(module: str, name: str, args: tuple[Any, ...]) -> Any:
    __import__(module)
    function: Any = sys.modules[module]
    for part in name.split("."):
        function = getattr(function, part)
    return function, args


def _write_result(descriptor: int, kind: int, content: Any) -> None:
    if os.getpid() != _performer:
        return
    if plain := dump_plain(content):
        end = _HEADER + os.pwrite(descriptor, plain, _HEADER)
    else:
        with open(descriptor, "wb", buffering=1 << 16, closefd=False) as file:
            file.seek(_HEADER)
            _dump(content, file)
            end = file.tell()
    header = bytes([kind, bool(plain)]).ljust(8, b"\0") + (end - _HEADER).to_bytes(8, "little")
    os.pwrite(descriptor, header, 0)


def read_result(descriptor: int, *, is_foreign: bool = False) -> tuple[int, Any]:
    """Return the kind of a result and its content; `NOTHING` if it was cut short.

    Of a foreign worker, which runs as another user, the pickle is data only: it refers to no class
    and no function, whose call would be code of that user here.

    BaseException: any error of unpickling the value, or the worker has damaged it.
    """
    kind, plain, length = read_header(descriptor)
    if kind == NOTHING:
        return NOTHING, None
    if plain:
        size = min(length, _PLAIN_MAX + 1)
        return kind, load_plain(os.pread(descriptor, size, _HEADER))
    unpickler: Any = _pickle_module().Unpickler

    class DataUnpickler(unpickler):  # type: ignore[misc]  # the class is that of the interpreter
        def find_class(self, module: str, name: str) -> Any:
            problem = "a worker of another user (limits.user) returns plain values only"
            raise ValueError(f"{problem} (got {module}.{name})")

    return kind, (DataUnpickler if is_foreign else unpickler)(_Content(descriptor, length)).load()


def read_header(descriptor: int) -> tuple[int, bool, int]:
    """Return of a result: its kind, whether no pickle is used, and the length of its content."""
    header = os.pread(descriptor, _HEADER, 0)
    length = int.from_bytes(header[8:], "little")
    if len(header) < _HEADER or os.fstat(descriptor).st_size < _HEADER + length:
        return NOTHING, True, 0
    return header[0], bool(header[1]), length


class _Content(io.RawIOBase):
    """The pickle of a result as a file, read at a position of its own.

    The system call stores large values in place, while other threads run.
    """

    def __init__(self, descriptor: int, length: int) -> None:
        self._descriptor = descriptor
        self._position = _HEADER
        self._end = _HEADER + length

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        rest = memoryview(buffer)[: self._end - self._position]
        size = len(rest)
        # One call reads 2 GB at most.
        while rest and (count := os.preadv(self._descriptor, [rest], self._position)):
            self._position += count
            rest = rest[count:]
        return size - len(rest)


def _map(descriptor: int) -> memoryview:
    size = os.fstat(descriptor).st_size
    if size <= 1 << 16:
        return memoryview(os.pread(descriptor, size, 0))
    import mmap

    populate = getattr(mmap, "MAP_POPULATE", 0)
    return memoryview(mmap.mmap(descriptor, size, mmap.MAP_SHARED | populate, mmap.PROT_READ))


def _pickle_module() -> ModuleType:
    try:
        import _pickle
    except ImportError:
        import pickle as _pickle  # type: ignore[no-redef]  # another implementation of Python
    return _pickle


def _dump(value: object, file: Any) -> None:
    pickler: Any = _pickle_module().Pickler
    try:
        pickler(file, 5).dump(value)
    except Exception:  # a value's own __reduce__ may raise anything
        # Classes of a notebook were pickled by value; so must be their instances.
        cloudpickle = sys.modules.get("cloudpickle")
        if cloudpickle is None:
            raise
        file.seek(_HEADER)
        file.truncate()
        cloudpickle.Pickler(file, 5).dump(value)


# ------------------------------------------------------------------------ plain values

# Arguments and results that marshal keeps unchanged, so that no pickle is used.  The launcher
# reads results in its event loop, so their size is limited.  A worker that damages its result
# must not block the loop either: marshal makes a list as long as its form says before it looks
# for the items.  So a form is checked before it is loaded.

_PLAIN_MAX = 1 << 16  # bytes of the form of a value
_ITEMS_MAX = 1000
_DEPTH_MAX = 4
_TEXT_MAX = 4096
_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
# marshal's forms of these in version 2, which has neither references nor other names of them.
_VERSION = 2
_FIXED = {b"N": 0, b"F": 0, b"T": 0, b"i": 4, b"g": 8}


def is_plain(value: object) -> bool:
    """Return whether marshal keeps a value unchanged: scalars, small tuples and lists."""
    level: list[Any] = [value]
    count = 1
    for _ in range(_DEPTH_MAX + 1):
        inner: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is tuple or kind is list:
                count += len(item)
                if count > _ITEMS_MAX:
                    return False
                inner += item
            elif kind not in _SCALARS or (kind in (bytes, str) and len(item) >= _TEXT_MAX):
                return False
        if not inner:
            return True
        level = inner
    return False


def dump_plain(value: Any) -> bytes:
    """Return the form of a plain value; b"" if the value is not plain, or too large."""
    form = marshal.dumps(value, _VERSION) if is_plain(value) else b""
    return form if len(form) <= _PLAIN_MAX else b""


def load_plain(form: bytes) -> Any:
    """Return the value of a form; ValueError: the form is damaged."""
    if not _is_sound(form):
        raise ValueError("its bytes are damaged")
    return marshal.loads(form)


def _is_sound(form: bytes) -> bool:
    """Whether a form has as many items as it says, and few."""
    position, missing, count = 0, 1, 1
    while missing and position < len(form):
        kind = form[position : position + 1]
        position += 1
        missing -= 1
        if kind in _FIXED:
            position += _FIXED[kind]
            continue
        size = int.from_bytes(form[position : position + 4], "little", signed=True)
        position += 4
        if kind == b"l":  # the sign of the number
            position += 2 * abs(size)
        elif size < 0:
            return False
        elif kind in (b"s", b"u"):
            position += size
        elif kind in (b"(", b"["):
            missing += size
            count += size
        else:
            return False
        if count > _ITEMS_MAX:
            return False
    return not missing and position == len(form)


# ------------------------------------------------------------------------- a worker


def main(arguments: list[str], numbers: Mapping[int, int] | None = None) -> int:
    """Read the call, prepare the interpreter, perform the call; return the exit code.

    The arguments are descriptors of the call and of the result, and the index; `numbers` are
    descriptors here by their numbers in the parent, where these differ.
    """
    global _numbers
    _numbers = numbers or {}
    descriptors = [_numbers.get(number, number) for number in map(int, arguments[:2])]
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    call, result = descriptors
    header, load = _read_call(call)
    os.close(call)

    def prepare() -> Any:
        _prepare(header)
        function, args = load()
        return function, (int(arguments[2]), *args) if header.get("with_index") else args

    options = {name: bool(header.get(name)) for name in ("is_quiet", "may_interrupt")}
    return perform(prepare, result, **options)


def perform(
    prepare: Callable[[], Any], result: int, *, is_quiet: bool = False, may_interrupt: bool = False
) -> int:
    """Perform a call, write its result, and return the worker's exit code; raises nothing.

    Args:
        prepare: returns the pair of function and arguments.  A coroutine function is awaited.
        result: descriptor of the result's file.
        is_quiet: print no traceback of an Exception, and drop the value.
        may_interrupt: a KeyboardInterrupt of the function is a success, as in torch.

    The exit code is -SIGINT if this signal shall be the exit status.
    """
    global _performer
    _performer = os.getpid()
    enable_faulthandler()
    interpreter.offer_stacks()
    interpreter.survive_notice()
    is_called = False
    try:
        function, args = prepare()
        is_called = True
        return _returned(interpreter.await_result(function(*args)), result, is_quiet)
    except BaseException as raised:  # noqa: BLE001  # it is recorded, and ends the worker
        error = raised
    # Here it is not being handled any more: it is no context of an error of a hook.
    if is_called and isinstance(error, SystemExit):
        return _exited(error, result)
    if isinstance(error, KeyboardInterrupt) and not may_interrupt:
        return interpreter.report_error(error)  # as in a script
    if is_called and isinstance(error, KeyboardInterrupt):
        return 0
    return _raised(error, result, is_quiet)


def _returned(value: object, result: int, is_quiet: bool) -> int:
    try:
        _write_result(result, VALUE, None if is_quiet else value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  # a user's __reduce__ can raise anything
        return _unpicklable(value, error, result)
    return 0


def _exited(error: SystemExit, result: int) -> int:
    is_number = error.code is None or isinstance(error.code, int)
    text = "" if is_number else _abridge(_text_of(error.code), interpreter.MESSAGE_MAX)
    _write_end(result, EXITED, (text, None, time.time()))
    return interpreter.exit_code_of(error)


def _raised(error: BaseException, result: int, is_quiet: bool) -> int:
    trace = interpreter.without_own_frames(error.__traceback__)
    # If all frames are of this package, they tell where it happened; a SyntaxError does itself.
    if trace is not None or isinstance(error, SyntaxError):
        error.__traceback__ = trace
    stack = format_error(error)
    is_exception = isinstance(error, Exception)
    message = _abridge(describe_error(error), interpreter.MESSAGE_MAX)
    content = (message, _abridge(stack, interpreter.TRACEBACK_MAX), time.time())
    if is_exception:
        _write_error_file(*content)
    kind = RAISED if is_exception else RAISED_BASE
    _write_end(result, kind, content)
    if not (is_quiet and is_exception):
        interpreter.call_excepthook(error)
    return 1


def _unpicklable(value: object, error: BaseException, result: int) -> int:
    # "<class 'module.name'>"; not the attributes, which a metaclass may define.
    name = type.__repr__(type(value))[len("<class '") : -len("'>")]
    rank = os.environ.get("RANK")
    function = "the function" if rank is None else f"the function of rank {rank}"
    reason = _text_of(error) if isinstance(error, Exception) else describe_error(error)
    message = f"{function} returned a {name}, which cannot be pickled: {reason}"
    message = _abridge(message, interpreter.MESSAGE_MAX)
    stack = _abridge(format_error(error), interpreter.TRACEBACK_MAX)
    # A part of the value may have been written.
    os.ftruncate(result, 0)
    _write_end(result, UNPICKLABLE, (message, stack, time.time()))
    interpreter.print_error(f"{message}\n")
    return 1


def _write_end(result: int, kind: int, content: object) -> None:
    try:
        _write_result(result, kind, content)
    except (OSError, MemoryError):
        pass  # no memory left: the exit code still reports the failure


def _write_error_file(message: str, stack: str, timestamp: float) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    try:
        from elastic_aio.worker.errorfile import write_error_file
        from elastic_aio.worker_error import WorkerError

        write_error_file(WorkerError(message, stack, timestamp, path))
    except (ImportError, OSError):
        pass  # the result has the same error


def describe_error(error: BaseException) -> str:
    """Return the type and the text of an error."""
    # Not the attribute, which a metaclass may define.
    name = type.__dict__["__name__"].__get__(type(error))
    return f"{name}: {_text_of(error)}"


def format_error(error: BaseException) -> str:
    """Return the traceback of an error; without notes and causes if these cannot be formatted."""
    import traceback

    try:
        return "".join(traceback.format_exception(error))
    except BaseException:  # noqa: BLE001  # a user's properties can do anything
        frames = "".join(traceback.format_tb(error.__traceback__))
        return f"Traceback (most recent call last):\n{frames}{describe_error(error)}\n"


def _abridge(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    try:
        from elastic_aio.text import abridge
    except ImportError:  # another interpreter, without the package
        return text[:limit]
    return abridge(text, limit)


def _text_of(value: object) -> str:
    try:
        return str(value)
    except BaseException:  # noqa: BLE001  # a user's __str__ can do anything
        return "<str() failed>"


def enable_faulthandler() -> None:
    import faulthandler

    try:
        faulthandler.enable(all_threads=True)
    except (OSError, ValueError, AttributeError, RuntimeError):
        pass  # stderr is closed or is no file: crashes have no stack


# -------------------------------------------------------------------- the preparation


def _prepare(header: Mapping[str, Any]) -> None:
    if header["python"] == sys.executable:
        sys.path[:] = header["path"]
    else:  # another interpreter: its own library goes first
        script_directory = os.path.dirname(MAIN)
        own = [path for path in sys.path if path != script_directory]
        sys.path[:] = [*own, *(path for path in header["path"] if path not in own)]
    sys.argv[:] = header["argv"]
    if header.get("is_daemon"):
        become_daemon()
    if mp := header.get("mp"):
        _prepare_multiprocessing(mp)
    if main_script := header.get("main"):
        _import_main(*main_script)


def become_daemon() -> None:
    """Make this process a daemon of multiprocessing, which may not start children by it."""
    from multiprocessing.process import current_process

    current_process()._config["daemon"] = True  # type: ignore[attr-defined]  # as mp does


def _prepare_multiprocessing(settings: Mapping[str, Any]) -> None:
    from multiprocessing.process import current_process

    current_process().authkey = settings["authkey"]
    if (tracker := settings.get("tracker")) is not None:
        from multiprocessing import resource_tracker

        # The parent's: a tracker of our own would unlink shared memory when this ends.
        resource_tracker._resource_tracker._fd = _numbers.get(tracker, tracker)  # type: ignore[attr-defined]  # as mp does


def _import_main(name: str | None, path: str | None) -> None:
    """Import the parent's main script, which defines functions and classes of the call."""
    global _importing_main
    module: Any = type(sys)(_MAIN_ALIAS)
    _importing_main = True
    try:
        if name is None and path is not None and os.path.isfile(path):
            module.__file__ = path
            sys.modules["__main__"] = sys.modules[_MAIN_ALIAS] = module
            with open(path, "rb") as file:
                code = compile(file.read(), path, "exec", dont_inherit=True)
            exec(code, module.__dict__)
        else:
            import runpy

            if name is not None:
                content = runpy.run_module(name, run_name=_MAIN_ALIAS, alter_sys=True)
            else:
                content = runpy.run_path(str(path), run_name=_MAIN_ALIAS)
            module.__dict__.update(content)
            sys.modules["__main__"] = sys.modules[_MAIN_ALIAS] = module
    finally:
        _importing_main = False
