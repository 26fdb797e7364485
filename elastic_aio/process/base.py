"""The interface of child processes: ChildSpec, Child, ChildExit, Spawner, spawn errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from elastic_aio.errors import SpawnError
from elastic_aio.outcome import ExitStatus, ResourceUsage
from elastic_aio.text import error_reason

if TYPE_CHECKING:
    import asyncio


class ChildSpec(Struct, frozen=True):
    """One child to start, and all that it inherits.

    `stdin`, `stdout` and `stderr` are descriptors that the child gets as 0, 1 and 2;
    the caller closes them.  `pass_fds` are inherited under their own numbers.  Every
    child leads a session of its own.  A forked child runs `call` in place of `argv`;
    it returns the exit code.  With `cpus` the child is bound to these before it runs.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str | None
    stdin: int
    stdout: int
    stderr: int
    pass_fds: tuple[int, ...] = ()
    call: Callable[[], int] | None = None
    cpus: frozenset[int] = frozenset()


class ChildExit(Struct, frozen=True):
    """How a child ended, and when: `at` is in seconds of `time.monotonic`.

    (The loop's time would not do: uvloop keeps it in whole milliseconds.)
    """

    status: ExitStatus
    at: float
    usage: ResourceUsage | None = None


class Child(Protocol):
    """A child process, running or ended."""

    @property
    def pid(self) -> int:
        """Its process id, which is also the id of its session."""

    @property
    def exited(self) -> asyncio.Future[ChildExit]:
        """Done when the process has ended and was reaped, or is about to be; never cancelled."""

    on_exit: Callable[[ChildExit], object]
    """Called at once when it has ended, before the callbacks of `exited`, which take an iteration
    of the loop.  Not called if it is set later."""

    def has_ended(self) -> bool:
        """Return whether the process has ended, reaped or not."""

    def send_signal(self, number: int) -> bool:
        """Send a signal to the process itself; return whether it still existed."""

    def release(self) -> None:
        """Let it run its program if it waits for that (see `fork`); it is on the session list."""


class Spawner(Protocol):
    """Starts children."""

    async def __call__(self, spec: ChildSpec, /) -> Child:
        """Start one child and return when it runs.

        Raises:
            SpawnError: the child could not be started.
        """


# Errors that another attempt cannot avoid, with a shell's exit code for each.
_PERMANENT = {
    errno.ENOENT: 127,
    errno.ENOTDIR: 127,
    errno.EACCES: 126,
    errno.EPERM: 126,
    errno.ENOEXEC: 126,
    errno.E2BIG: 126,
    errno.EISDIR: 126,
    errno.ELOOP: 126,
    errno.ENAMETOOLONG: 126,
    errno.ETXTBSY: 126,
}


def check_program(spec: ChildSpec) -> None:
    """Check that a program can be executed, if a wrapper is executed first.

    Raises:
        SpawnError: the same that a spawn without the wrapper raises.
    """
    path = program_path(spec)
    if not os.path.exists(path):
        raise spawn_error(FileNotFoundError(errno.ENOENT, "missing"), spec)
    if os.path.isdir(path) or not os.access(path, os.X_OK):
        raise spawn_error(PermissionError(errno.EACCES, os.strerror(errno.EACCES)), spec)
    try:
        with open(path, "rb") as file:
            first_line = file.read(256).partition(b"\n")[0]
    except PermissionError:
        return  # it may be executed, and not read: no script then
    interpreter = first_line[2:].split()[:1] if first_line.startswith(b"#!") else []
    if interpreter and not os.path.exists(interpreter[0]):
        raise spawn_error(FileNotFoundError(errno.ENOENT, "missing"), spec)


def program_path(spec: ChildSpec) -> str:
    """Return the path of a program, which need not exist.

    Raises:
        SpawnError: no directory in the PATH of the child has a file of its name.
    """
    program = spec.argv[0]
    if os.path.sep in program:
        return os.path.join(spec.cwd or "", program)
    # As in a shell, a file that cannot be executed does not hide a later one that can.
    path = _which(spec, os.F_OK | os.X_OK) or _which(spec, os.F_OK)
    if path is None:
        raise spawn_error(FileNotFoundError(errno.ENOENT, "missing"), spec)
    return path


def _which(spec: ChildSpec, mode: int) -> str | None:
    """Return the first file of the program's name in PATH that has a mode; no directories."""
    # As `shutil.which`, whose import takes as long as that of ten modules here.
    for directory in os.get_exec_path(spec.env) if spec.env.get("PATH") != "" else ():
        path = os.path.join(directory, spec.argv[0])
        if os.access(path, mode) and not os.path.isdir(path):
            return path
    return None


def check_directory(spec: ChildSpec) -> None:
    """Check that a forked child can enter its working directory.

    Raises:
        SpawnError: the same that a spawn raises.
    """
    if spec.cwd is not None and not (os.path.isdir(spec.cwd) and os.access(spec.cwd, os.X_OK)):
        raise spawn_error(OSError(errno.ENOENT, "no such directory"), spec)


def spawn_error(error: OSError, spec: ChildSpec) -> SpawnError:
    """Return a `SpawnError` with one line that says why a child could not be started."""
    program, code = spec.argv[0], error.errno or 0
    if code == errno.EACCES and os.path.sep not in program and not _which(spec, os.F_OK):
        code = errno.ENOENT  # a directory has this name
    path = os.path.join(spec.cwd or "", program)
    is_permanent, exit_code = True, 126
    if spec.cwd is not None and not os.path.isdir(spec.cwd):
        problem = "is not a directory" if os.path.exists(spec.cwd) else "does not exist"
        reason = f"its working directory {spec.cwd} {problem}"
    elif spec.cwd is not None and not os.access(spec.cwd, os.X_OK):
        reason = f"its working directory {spec.cwd} cannot be entered"
    elif code == errno.ENOENT and os.path.sep in program and os.path.exists(path):
        reason = "its interpreter (the first line, after #!) does not exist"
    elif code == errno.E2BIG:
        size = sum(len(part) + 1 for part in spec.argv)
        size += sum(len(name) + len(value) + 2 for name, value in spec.env.items())
        reason = f"its arguments and environment ({size} bytes) are too long"
    else:
        reason = "command not found" if code == errno.ENOENT else error_reason(error)
        is_permanent, exit_code = code in _PERMANENT, _PERMANENT.get(code, 1)
    message = f"cannot run {program}: {reason}"
    return SpawnError(message, permanent=is_permanent, exit_code=exit_code)
