"""First code of a function worker: learns what to call, calls it, and says how that ended.

Run as `python -u bootstrap_main.py CALL RESULT INDEX`; the first two are descriptors of
anonymous files in memory.  Forked workers enter at `perform` or `main`.

Call and result travel in memory files and never in pipes: a worker does not wait
until its result is read, a large value costs two copies, and no end of file exists
that a grandchild could hold back.  The header of a result is written last, so that
one cut short by a kill cannot be taken for a whole one.

Everything here counts against the start of every worker: nothing but `os`, `sys`
and `marshal` is imported before there is a need.  Even the C part of pickle costs a
fifth of an interpreter's start, so a function of a module with plain arguments, and
a plain value, do without: marshal takes exactly the types that `is_plain` names (it
would turn anything else that holds bytes into bytes).  The parent imports this
module for the two formats, of which writer and reader stand here together.
"""

from __future__ import annotations

import marshal
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType
    from typing import Any

__all__ = [
    "BROKE_OFF",
    "EXITED",
    "INTERRUPTED",
    "MAIN",
    "NOTHING",
    "RAISED",
    "UNPICKLABLE",
    "VALUE",
    "InheritedDescriptor",
    "become_daemon",
    "format_call",
    "is_importing_main",
    "is_plain",
    "main",
    "perform",
    "read_result",
]

MAIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bootstrap_main.py")

# How a call can have ended, as the first byte of its result.
NOTHING = 0  # the worker said nothing: a signal, os._exit, a crash
VALUE = 1  # followed by the pickled value
RAISED = 2  # an Exception: (message, traceback, Unix time)
BROKE_OFF = 3  # another BaseException, likewise
UNPICKLABLE = 4  # the value was of no use: (message, traceback, Unix time)
EXITED = 5  # SystemExit: (text or "", None, Unix time)
INTERRUPTED = 6  # KeyboardInterrupt: ends a worker in peace, as torch has it

_HEADER = 16
_MAIN_ALIAS = "__mp_main__"  # multiprocessing's name: what it pickles, we find, and back

# Set while the parent's main script is being imported: what starts a job then would
# start it again in each of its workers.
_importing_main = False
# The parent's descriptor numbers, where they are other ones here.
_numbers: Mapping[int, int] = {}


def is_importing_main() -> bool:
    """Tell whether this process is a worker that is importing its parent's main script."""
    process = sys.modules.get("multiprocessing.process")
    inherits = process and getattr(process.current_process(), "_inheriting", False)
    return _importing_main or bool(inherits)


class InheritedDescriptor:
    """A descriptor that travels with a call, as multiprocessing's `DupFd`."""

    def __init__(self, number: int) -> None:
        """Name it by its number in the parent."""
        self.number = number

    def detach(self) -> int:
        """Return its number in this process; it is the caller's from now on."""
        return _numbers.get(self.number, self.number)


# ------------------------------------------------------------------- the two formats


_SCALARS = frozenset({type(None), bool, int, float, str, bytes})


def is_plain(value: object, depth: int = 4) -> bool:
    """Tell whether marshal keeps a value as it is: scalars, and small tuples and lists."""
    kind = type(value)
    if kind is tuple or kind is list:
        items: Any = value
        return depth > 0 and len(items) < 100 and all(is_plain(one, depth - 1) for one in items)
    return kind in _SCALARS and (kind not in (bytes, str) or len(value) < 4096)  # type: ignore[arg-type]  # these have a length


def format_call(header: Mapping[str, Any], body: object) -> list[bytes]:
    """Return the parts of a call: how to prepare the interpreter, then what to call.

    Args:
        header: `path` and `argv` for `sys`, the parent's `python`, and optionally
            `main` (name and path of the main script), `mp` (what multiprocessing
            needs), `is_quiet` (see `perform`), `is_daemon` and `with_index`.
        body: the pickled pair of function and arguments; or a plain triple of a
            module, the function's name there, and the arguments.
    """
    rest = body if isinstance(body, bytes) else b""
    pair: Any = (dict(header), None if rest else body)
    head = marshal.dumps(pair, 4)
    return [len(head).to_bytes(8, "little"), head, rest]


def _read_call(descriptor: int) -> tuple[dict[str, Any], Callable[[], Any]]:
    """Return the header, and what makes the pair of function and arguments."""
    view = _mapped(descriptor)
    end = 8 + int.from_bytes(view[:8], "little")
    header, plain = marshal.loads(view[8:end])
    if plain is None:
        return header, lambda: _pickle_module().loads(view[end:])
    return header, lambda: _find(*plain)


def _find(module: str, name: str, args: tuple[Any, ...]) -> Any:
    __import__(module)
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    return found, args


def _write_result(descriptor: int, kind: int, content: Any) -> None:
    if plain := is_plain(content):
        end = _HEADER + os.pwrite(descriptor, marshal.dumps(content, 4), _HEADER)
    else:
        with open(descriptor, "wb", buffering=1 << 16, closefd=False) as file:
            file.seek(_HEADER)
            _dump(content, file)
            end = file.tell()
    header = bytes([kind, plain]).ljust(8, b"\0") + (end - _HEADER).to_bytes(8, "little")
    os.pwrite(descriptor, header, 0)


def read_result(descriptor: int) -> tuple[int, Any]:
    """Return the kind of a result and its content.

    What was cut short says `NOTHING`.

    Raises:
        Exception: whatever unpickling a value raises.
    """
    view = _mapped(descriptor)
    length = int.from_bytes(view[8:_HEADER], "little")
    if len(view) < _HEADER or view[0] == NOTHING or len(view) < _HEADER + length:
        return NOTHING, None
    content = view[_HEADER : _HEADER + length]
    return view[0], marshal.loads(content) if view[1] else _pickle_module().loads(content)


def _mapped(descriptor: int) -> memoryview:
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
        # Classes of a notebook came by value, and can go back only so.
        cloudpickle = sys.modules.get("cloudpickle")
        if cloudpickle is None:
            raise
        file.seek(_HEADER)
        file.truncate()
        cloudpickle.Pickler(file, 5).dump(value)


# ------------------------------------------------------------------ a worker's course


def main(arguments: list[str], numbers: Mapping[int, int] | None = None) -> int:
    """Read the call, prepare the interpreter, perform the call; return the exit code.

    Args:
        arguments: descriptor of the call, descriptor for the result, and the index.
        numbers: what the parent's descriptors are called here, if not the same.
    """
    global _numbers
    _numbers = numbers or {}
    descriptors = [_numbers.get(one, one) for one in map(int, arguments[:2])]
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    call, result = descriptors
    header, make = _read_call(call)
    os.close(call)

    def prepared() -> Any:
        _prepare(header)
        function, args = make()
        return function, (int(arguments[2]), *args) if header.get("with_index") else args

    return perform(prepared, result, is_quiet=bool(header.get("is_quiet")))


def perform(prepare: Callable[[], Any], result: int, *, is_quiet: bool = False) -> int:
    """Call what `prepare` returns, a pair of function and arguments; return the exit code.

    Every way to end is written to `result`; whatever is raised ends here.  A quiet
    call prints no traceback of an Exception and drops its value.
    """
    _enable_faulthandler()
    try:
        function, args = prepare()
        value = function(*args)
    except SystemExit as error:
        return _exited(error, result)
    except KeyboardInterrupt:
        _say(result, INTERRUPTED, None)
        return 0
    except BaseException as error:  # noqa: BLE001  # it is told, and ends the worker
        return _raised(error, result, is_quiet)
    try:
        _write_result(result, VALUE, None if is_quiet else value)
    except Exception as error:  # noqa: BLE001  # a user's __reduce__ can raise anything
        return _unpicklable(value, error, result)
    return 0


def _exited(error: SystemExit, result: int) -> int:
    if error.code is None or isinstance(error.code, int):
        _say(result, EXITED, ("", None, _now()))
        return (error.code or 0) & 0xFF
    text = str(error.code)
    _say(result, EXITED, (text, None, _now()))
    print(text, file=sys.stderr)  # noqa: T201  # as the interpreter does
    return 1


def _raised(error: BaseException, result: int, is_quiet: bool) -> int:
    import traceback

    # Without our own frame, which tells users nothing.
    error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
    story = "".join(traceback.format_exception(error))
    try:
        message = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  # a user's __str__ can do anything
        message = f"{type(error).__name__}: <its text cannot be made>"
    is_exception = isinstance(error, Exception)
    if is_exception:
        _write_error_file(error)
    _say(result, RAISED if is_exception else BROKE_OFF, (message, story, _now()))
    if not (is_quiet and is_exception):
        _print_error(story)
    return 1


def _unpicklable(value: object, error: Exception, result: int) -> int:
    import traceback

    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    rank = os.environ.get("RANK")
    who = "the function" if rank is None else f"the function of rank {rank}"
    message = f"{who} returned a {name}, which cannot be pickled: {error}"
    story = "".join(traceback.format_exception(error))
    # Over whatever of the value was written.
    os.ftruncate(result, 0)
    _say(result, UNPICKLABLE, (message, story, _now()))
    _print_error(f"{message}\n")
    return 1


def _say(result: int, kind: int, content: object) -> None:
    try:
        _write_result(result, kind, content)
    except (OSError, MemoryError):
        pass  # no memory left: the exit code still tells


def _print_error(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass  # stderr is closed or gone


def _write_error_file(error: BaseException) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    try:
        from elastic_aio.worker.errorfile import write_error_file

        write_error_file(error, path)
    except (ImportError, OSError):
        pass  # the result tells the same


def _enable_faulthandler() -> None:
    import faulthandler

    try:
        faulthandler.enable(all_threads=True)
    except (OSError, ValueError, AttributeError, RuntimeError):
        pass  # stderr is closed or is no file: crashes go without a stack


def _now() -> float:
    import time

    return time.time()


# -------------------------------------------------------------------- the preparation


def _prepare(header: Mapping[str, Any]) -> None:
    if header["python"] == sys.executable:
        sys.path[:] = header["path"]
    else:  # another interpreter's own library goes first
        ours = os.path.dirname(MAIN)
        own = [one for one in sys.path if one != ours]
        sys.path[:] = [*own, *(one for one in header["path"] if one not in own)]
    sys.argv[:] = header["argv"]
    if header.get("is_daemon"):
        become_daemon()
    if mp := header.get("mp"):
        _prepare_multiprocessing(mp)
    if found := header.get("main"):
        _import_main(*found)


def become_daemon() -> None:
    """Be a daemon for multiprocessing, which may have no children of its kind."""
    from multiprocessing.process import current_process

    current_process()._config["daemon"] = True  # type: ignore[attr-defined]  # as mp does


def _prepare_multiprocessing(settings: Mapping[str, Any]) -> None:
    from multiprocessing.process import current_process

    current_process().authkey = settings["authkey"]
    if (tracker := settings.get("tracker")) is not None:
        from multiprocessing import resource_tracker

        # The parent's, or else what we open would be removed when we end.
        resource_tracker._resource_tracker._fd = _numbers.get(tracker, tracker)  # type: ignore[attr-defined]  # as mp does


def _import_main(name: str | None, path: str | None) -> None:
    """Import the parent's main script, so that its functions and classes can be found."""
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
