"""Calls of functions in worker processes: how a call is passed and its `CallResult` is read.

A call is pickled into a memory file before anything starts.  Plain pickle keeps a worker's start
cheap; cloudpickle, if installed, takes what plain pickle cannot: closures, lambdas, and functions
of a main module that no other process can import (notebooks, `python -c`).  A worker imports the
parent's main script only if the call refers to it.

multiprocessing's queues, locks, events and shared memory may be arguments: pickling happens inside
its own "spawning" context, which collects the descriptors that the worker must inherit.

A worker writes its result into another memory file (format: `worker.bootstrap`), which is read
after the worker has ended.
"""

from __future__ import annotations

import asyncio
import copyreg
import io
import os
import subprocess
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

from elastic_aio.aio import run_in_thread
from elastic_aio.errors import HostError, SpecError
from elastic_aio.outcome import WorkerError
from elastic_aio.text import error_reason, one_line
from elastic_aio.worker import bootstrap, interpreter

_HINT = "install cloudpickle for closures, lambdas and functions of interactive sessions"
# From this size on, files are closed in a thread: about a millisecond.
_LARGE = 1 << 23
# How long a value may be unpickled: far longer than slow imports and slow memory need.
_PATIENCE_S = 120.0
_BYTES_PER_S = 50e6


class Payload(Struct, frozen=True):
    """A pickled call: the descriptors of its memory file and of what it refers to.

    All are our own: the program may close a connection that it has passed, or use its number again,
    before the workers are restarted.
    """

    descriptor: int
    inherited: tuple[int, ...]

    def close(self) -> None:
        """Close all descriptors; started workers hold them open themselves."""
        _close_all([self.descriptor, *self.inherited])


class CallResult(Struct, frozen=True):
    """How a worker's call ended: its `kind` (see `worker.bootstrap`), value and `error`.

    `error` is set when the call raised.  `problem` says why there is no value.
    """

    kind: int
    value: Any = None
    error: WorkerError | None = None
    problem: str = ""

    @property
    def is_exception(self) -> bool:
        return self.kind == bootstrap.RAISED


def import_path() -> list[str]:
    """Return `sys.path`, which a worker in another directory can use."""
    try:
        return [os.path.abspath(entry) for entry in sys.path]
    except FileNotFoundError:  # the working directory was deleted
        return [entry for entry in sys.path if os.path.isabs(entry)]


def memory_file(name: str) -> int:
    """Return the descriptor of a new, empty file in memory.

    Raises:
        HostError: the kernel has none, or no descriptor is left.
    """
    try:
        return os.memfd_create(f"elastic_aio-{name}", os.MFD_CLOEXEC)
    except OSError as error:
        raise HostError(f"cannot create an anonymous file: {error_reason(error)}") from error


def call_argv(python: str, payload: Payload, result: int, index: int) -> tuple[str, ...]:
    """Return the command of one worker; `result` is a descriptor of a memory file."""
    numbers = (str(payload.descriptor), str(result), str(index))
    return (python, *interpreter_flags(), "-u", bootstrap.MAIN, *numbers)


def interpreter_flags() -> list[str]:
    """Return the flags of this interpreter that its workers should have too."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # multiprocessing's too
    return flags


# ------------------------------------------------------------------------ the call


def make_payload(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    is_quiet: bool = False,
    may_interrupt: bool = False,
    is_daemon: bool = False,
    with_index: bool = False,
) -> Payload:
    """Pickle a call of a function.

    Args:
        is_quiet: print no traceback, which the result has anyway; drop values.
        may_interrupt: take a KeyboardInterrupt for a success.
        is_daemon: mark the workers as daemons for multiprocessing.
        with_index: put the worker's index before the arguments.

    Raises:
        SpecError: the named function or argument cannot be pickled.
        HostError: no descriptor is left.
    """
    inherited: list[int] = []
    try:
        plain = _plain_call(function, tuple(args))
        body = b"" if plain else _pickle_call(function, tuple(args), inherited)
        header: dict[str, Any] = {
            "path": import_path(),
            "argv": list(sys.argv),
            "python": sys.executable,
            "is_quiet": is_quiet,
            "may_interrupt": may_interrupt,
            "is_daemon": is_daemon,
            "with_index": with_index,
        }
        if _refers_to_main(body):
            header["main"] = _main_script()
        if b"multiprocessing" in body:
            header["mp"] = _multiprocessing_settings(inherited)
        inherited.append(memory_file("call"))
        with open(inherited[-1], "wb", closefd=False) as file:
            for part in bootstrap.format_call(header, plain or body):
                file.write(part)
    except BaseException as error:  # a pickle runs code of the user's
        _close_all(inherited)
        if isinstance(error, OSError):
            raise HostError(f"cannot keep a call in memory: {error_reason(error)}") from error
        raise
    return Payload(inherited.pop(), tuple(inherited))


def _plain_call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return module, name and arguments of a call that needs no pickle; else None."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or not bootstrap.is_plain(args):
        return None
    if module in ("__main__", "__mp_main__"):
        return None
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return (module, name, args) if value is function else None


def _pickle_call(
    function: Callable[..., Any], args: tuple[Any, ...], inherited: list[int]
) -> bytes:
    try:
        with _spawning(inherited):
            body = _pickle((function, args))
        if not _refers_to_main(body) or _main_script() is not None:
            return body
        reason = f"the main module of this session cannot be imported by a worker; {_HINT}"
    except HostError:
        raise
    except Exception as error:  # noqa: BLE001  # a user's __reduce__ can raise anything
        reason = _reason(error)
    _close_all(inherited)
    try:
        import cloudpickle
    except ImportError:
        raise _unpicklable(function, args, reason) from None
    try:
        with _spawning(inherited):
            return _pickle((function, args), cloudpickle.Pickler)
    except HostError:
        raise
    except Exception as error:
        raise _unpicklable(function, args, one_line(str(error)) or type(error).__name__) from error


def _unpicklable(function: Callable[..., Any], args: tuple[Any, ...], reason: str) -> SpecError:
    """Return an error that names the unpicklable argument, or else the function."""
    for position, argument in enumerate(args):
        inherited: list[int] = []
        try:
            with _spawning(inherited):
                _pickle(argument)
        except Exception as error:  # noqa: BLE001  # as above
            return SpecError(f"args[{position}]", argument, f"cannot be pickled: {_reason(error)}")
        finally:
            _close_all(inherited)
    return SpecError("entrypoint", function, f"cannot be pickled: {reason}")


def _reason(error: Exception) -> str:
    import pickle

    reason = one_line(str(error)) or type(error).__name__
    # Lambdas, local functions and classes; an open file or a lock is a TypeError.
    is_by_name = isinstance(error, (AttributeError, pickle.PicklingError))
    return f"{reason}; {_HINT}" if is_by_name and not _has_cloudpickle() else reason


def _has_cloudpickle() -> bool:
    try:
        import cloudpickle  # noqa: F401  # whether it is there
    except ImportError:
        return False
    return True


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def _pickle(value: object, pickler_type: Any = None) -> bytes:
    if pickler_type is None:
        import pickle  # here: jobs that run commands need none

        pickler_type = pickle.Pickler
    buffer = io.BytesIO()
    pickler = pickler_type(buffer, 5)
    # Connections, arrays in shared memory and torch's tensors register their reducers
    # with multiprocessing.
    if reduction := sys.modules.get("multiprocessing.reduction"):
        table = getattr(pickler, "dispatch_table", copyreg.dispatch_table)
        reducers = ChainMap(reduction.ForkingPickler._extra_reducers, table)
        # Of the class: cloudpickle's has one, which hides an attribute of the instance.
        pickler = type("_Pickler", (pickler_type,), {"dispatch_table": reducers})(buffer, 5)
    pickler.dump(value)
    return buffer.getvalue()


class _SpawningPopen:
    """Stands for multiprocessing's Popen while its objects are pickled: collects descriptors."""

    DupFd = bootstrap.InheritedDescriptor

    def __init__(self, descriptors: list[int]) -> None:
        self._descriptors = descriptors

    def duplicate_for_child(self, descriptor: int) -> int:
        try:
            own = os.dup(descriptor)
        except OSError as error:
            raise HostError(f"cannot pass descriptor {descriptor}: {error.strerror}") from error
        self._descriptors.append(own)
        return own


@contextmanager
def _spawning(descriptors: list[int]) -> Iterator[None]:
    context = sys.modules.get("multiprocessing.context")
    if context is None:
        yield
        return
    previous = context.get_spawning_popen()
    context.set_spawning_popen(_SpawningPopen(descriptors))
    try:
        yield
    finally:
        context.set_spawning_popen(previous)


def _multiprocessing_settings(inherited: list[int]) -> Mapping[str, Any]:
    from multiprocessing import resource_tracker
    from multiprocessing.process import current_process

    settings: dict[str, Any] = {"authkey": bytes(current_process().authkey)}
    tracker = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]  # as mp does
    if tracker is not None:
        settings["tracker"] = os.dup(tracker)
        inherited.append(settings["tracker"])
    return settings


def _refers_to_main(body: bytes) -> bool:
    return b"__main__" in body or b"__mp_main__" in body


def _main_script() -> tuple[str | None, str | None] | None:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return str(spec.name), None
    path = getattr(main, "__file__", None)
    if not path or not os.path.exists(path) or "_pyrepl" in path:
        return None
    return None, os.path.abspath(path)


# ---------------------------------------------------------------------- the result


async def read_call_result(descriptor: int, *, is_foreign: bool = False) -> CallResult:
    """Read a worker's result; never fails.

    A pickle imports modules and runs the user's code, so a thread reads one result at a time. If
    the code blocks for ever or exits, there is no value, but a `problem`. That of a foreign worker,
    which runs as another user, is read as data only.

    Cancellation: leaves the thread running and the descriptor as it was.  Idempotent.
    """
    # Workers pickle the main script's classes under multiprocessing's name for it.
    sys.modules.setdefault("__mp_main__", sys.modules["__main__"])
    _, is_plain, length = bootstrap.read_header(descriptor)
    if is_plain:
        return _read(descriptor, is_foreign)
    try:
        own = os.dup(descriptor)  # the caller may close its own while the thread still reads
    except OSError:
        return _read(descriptor, is_foreign)
    seconds = _PATIENCE_S + length / _BYTES_PER_S
    try:
        async with asyncio.timeout(seconds):
            return await run_in_thread(_read_and_close, own, is_foreign, daemon=True)
    except TimeoutError:
        problem = f"its value is not unpickled within {seconds:.3g} s"
        return CallResult(bootstrap.VALUE, problem=problem)


async def close_results(descriptors: Sequence[int]) -> None:
    """Close files of results in a thread: the kernel takes 100 ms to free a gigabyte.

    Cancellation: the thread closes them nevertheless.
    """
    if sum(os.fstat(descriptor).st_size for descriptor in descriptors) < _LARGE:
        _close_all(list(descriptors))
    else:
        await run_in_thread(_close_all, list(descriptors))


def _read_and_close(descriptor: int, is_foreign: bool) -> CallResult:
    try:
        return _read(descriptor, is_foreign)
    finally:
        os.close(descriptor)


def _read(descriptor: int, is_foreign: bool) -> CallResult:
    try:
        return _call_result(*bootstrap.read_result(descriptor, is_foreign=is_foreign))
    except BaseException as error:  # noqa: BLE001  # unpickling runs code of the user's
        reason = one_line(bootstrap.describe_error(error)[: interpreter.MESSAGE_MAX])
        return CallResult(bootstrap.VALUE, problem=f"its value cannot be unpickled here: {reason}")


def _call_result(kind: int, content: Any) -> CallResult:
    if kind == bootstrap.VALUE:
        return CallResult(kind, value=content)
    if kind in (bootstrap.RAISED, bootstrap.RAISED_BASE):
        message, traceback, timestamp = _typed(content, str, str, float)
        return CallResult(kind, error=WorkerError(message, traceback, timestamp, ""))
    if kind in (bootstrap.UNPICKLABLE, bootstrap.EXITED):
        (problem, *_) = _typed(content[:1], str)
        return CallResult(kind, problem=problem)
    return CallResult(kind)


def _typed(content: Sequence[Any], *kinds: type) -> tuple[Any, ...]:
    """Return what a worker has written, or raise ValueError: it has damaged it."""
    parts = tuple(content)
    if len(parts) != len(kinds) or not all(map(isinstance, parts, kinds)):
        raise ValueError("its bytes are damaged")
    return parts
