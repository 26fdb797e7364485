"""What a function worker is to call, pickled into a memory file before anything starts.

Plain pickle where it suffices; it keeps a worker's start cheap.  cloudpickle, where
it is installed, takes what plain pickle cannot: closures, lambdas, and functions of
a main module that no other process can import (notebooks, interactive sessions,
`python -c`).

A worker imports the parent's main script only if the call refers to it: that is
what functions defined there need, and all others are spared its cost.

multiprocessing's queues, locks, events and shared memory may be arguments: pickling
happens inside its own "spawning" context, which hands us the descriptors that the
worker must inherit, as `multiprocessing.Process` does it.
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import subprocess
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

from elastic_aio.errors import SpecError, SurroundingsError
from elastic_aio.worker import bootstrap

__all__ = ["Payload", "argv_of", "interpreter_flags", "make_payload", "memory_file"]

_HINT = "install cloudpickle for closures, lambdas and functions of interactive sessions"


class Payload(Struct, frozen=True):
    """A call that is ready: the descriptor of its memory file, and those it needs."""

    descriptor: int
    inherited: tuple[int, ...]

    def close(self) -> None:
        """Give the memory file back; workers that run have their own."""
        os.close(self.descriptor)


def memory_file(name: str) -> int:
    """Return the descriptor of a new, empty file in memory.

    Raises:
        SurroundingsError: there is no descriptor left.
    """
    try:
        return os.memfd_create(f"elastic_aio-{name}", os.MFD_CLOEXEC)
    except OSError as error:
        raise SurroundingsError(f"cannot make an anonymous file: {error.strerror}") from error


def argv_of(python: str, payload: Payload, result: int, index: int) -> tuple[str, ...]:
    """Return the command of one worker, with the flags of this interpreter."""
    numbers = (str(payload.descriptor), str(result), str(index))
    return (python, *interpreter_flags(), "-u", bootstrap.MAIN, *numbers)


def interpreter_flags() -> list[str]:
    """Return the flags of this interpreter that its workers should have too."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # multiprocessing's too
    return flags


def make_payload(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    is_quiet: bool = False,
    is_daemon: bool = False,
    with_index: bool = False,
) -> Payload:
    """Pickle a call.

    Args:
        function: what workers call.
        args: its positional arguments.
        is_quiet: print no traceback, which the result carries anyway; drop values.
        is_daemon: mark the workers as daemons for multiprocessing.
        with_index: put the worker's index before the arguments.

    Raises:
        SpecError: it cannot be pickled; names what.
        SurroundingsError: there is no descriptor left.
    """
    inherited: list[int] = []
    plain = _plain_call(function, tuple(args))
    if plain is None:
        with _spawning(inherited):
            body = _pickled(function, tuple(args))
    else:
        body = b""
    header: dict[str, Any] = {
        "path": [one or os.getcwd() for one in sys.path],
        "argv": list(sys.argv),
        "python": sys.executable,
        "is_quiet": is_quiet,
        "is_daemon": is_daemon,
        "with_index": with_index,
    }
    if _refers_to_main(body):
        header["main"] = _main_script()
    if b"multiprocessing" in body:
        header["mp"] = _multiprocessing(inherited)
    descriptor = memory_file("call")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            for part in bootstrap.format_call(header, plain or body):
                file.write(part)
    except OSError as error:
        os.close(descriptor)
        raise SurroundingsError(f"cannot keep a call in memory: {error.strerror}") from error
    return Payload(descriptor, tuple(dict.fromkeys(inherited)))


def _plain_call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return what needs no pickle: module, name and plain arguments; else None."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or not bootstrap.is_plain(args):
        return None
    if module in ("__main__", "__mp_main__"):
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return (module, name, args) if found is function else None


def _pickled(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        body = _dumped(pickle.Pickler, (function, args))
        if not _refers_to_main(body) or _main_script() is not None:
            return body
        reason = "the main module of this session cannot be imported by a worker"
    except Exception as error:  # noqa: BLE001  # a user's __reduce__ can raise anything
        reason = _short(error)
    try:
        import cloudpickle
    except ImportError:
        raise _refused(function, args, f"{reason}; {_HINT}") from None
    try:
        return _dumped(cloudpickle.Pickler, (function, args))
    except Exception as error:
        raise _refused(function, args, _short(error)) from error


def _short(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _refused(function: Callable[..., Any], args: tuple[Any, ...], reason: str) -> SpecError:
    """Name the argument that cannot be pickled, or else the function."""
    for position, one in enumerate(args):
        try:
            _dumped(pickle.Pickler, one)
        except Exception as error:  # noqa: BLE001  # as above
            return SpecError(f"args[{position}]", one, f"must be picklable ({_short(error)})")
    return SpecError("entrypoint", function, f"must be picklable ({reason})")


def _dumped(kind: Any, value: object) -> bytes:
    buffer = io.BytesIO()
    pickler = kind(buffer, 5)
    # Connections, arrays in shared memory and torch's tensors tell multiprocessing
    # how they travel.
    if reduction := sys.modules.get("multiprocessing.reduction"):
        table = getattr(pickler, "dispatch_table", copyreg.dispatch_table)
        pickler.dispatch_table = ChainMap(reduction.ForkingPickler._extra_reducers, table)
    pickler.dump(value)
    return buffer.getvalue()


class _Spawning:
    """What multiprocessing's objects meet while they are pickled: collects descriptors."""

    DupFd = bootstrap.InheritedDescriptor

    def __init__(self, descriptors: list[int]) -> None:
        self._descriptors = descriptors

    def duplicate_for_child(self, descriptor: int) -> int:
        self._descriptors.append(descriptor)
        return descriptor


@contextmanager
def _spawning(descriptors: list[int]) -> Iterator[None]:
    context = sys.modules.get("multiprocessing.context")
    if context is None:
        yield
        return
    former = context.get_spawning_popen()
    context.set_spawning_popen(_Spawning(descriptors))
    try:
        yield
    finally:
        context.set_spawning_popen(former)


def _multiprocessing(inherited: list[int]) -> Mapping[str, Any]:
    from multiprocessing import resource_tracker
    from multiprocessing.process import current_process

    settings: dict[str, Any] = {"authkey": bytes(current_process().authkey)}
    tracker = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]  # as mp does
    if tracker is not None:
        inherited.append(tracker)
        settings["tracker"] = tracker
    return settings


def _refers_to_main(body: bytes) -> bool:
    return b"__main__" in body or b"__mp_main__" in body


def _main_script() -> tuple[str | None, str | None] | None:
    """Return the name or the path by which a worker can import our main module."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return str(spec.name), None
    path = getattr(main, "__file__", None)
    if not path or not os.path.exists(path) or "_pyrepl" in path:
        return None
    return None, os.path.abspath(path)
