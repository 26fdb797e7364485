"""What the rest of the house knows of a child: how it is asked for, and how it ends."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec import Struct

from elastic_aio.errors import SpawnError
from elastic_aio.outcome import ExitStatus, ResourceUsage

__all__ = ["Child", "ChildPlan", "Exit", "Spawner", "check_folder", "check_program", "spawn_error"]


class ChildPlan(Struct, frozen=True):
    """One child to start: everything it inherits is named here.

    `stdin`, `stdout` and `stderr` are descriptors that the child gets as 0, 1 and
    2; they stay the caller's to close.  `pass_fds` are inherited under their own
    numbers.  Every child leads a session of its own.  `call` is what a forked child
    runs in place of `argv`; it returns the exit code.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str | None
    stdin: int
    stdout: int
    stderr: int
    pass_fds: tuple[int, ...] = ()
    call: Callable[[], int] | None = None


class Exit(Struct, frozen=True):
    """How a child ended and when: `at` is in monotonic seconds
    (not the loop's time, which uvloop keeps in whole milliseconds)."""

    status: ExitStatus
    at: float
    usage: ResourceUsage | None = None


class Child(Protocol):
    """A running or ended child process."""

    @property
    def pid(self) -> int:
        """Its process id, which is also the number of its session."""
        ...

    @property
    def exited(self) -> asyncio.Future[Exit]:
        """Done when the process has ended and was reaped; never cancelled by us."""
        ...

    def has_ended(self) -> bool:
        """Tell whether the process is over, even if nobody has reaped it yet."""
        ...

    def send_signal(self, number: int) -> bool:
        """Send a signal to the process itself; false when it was gone already."""
        ...


class Spawner(Protocol):
    """Starts children."""

    async def __call__(self, plan: ChildPlan) -> Child:
        """Start one child and return when it runs.

        Raises:
            SpawnError: it could not be started.
        """
        ...


# What another attempt cannot mend, and what a shell's exit code for it is.
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


def check_program(plan: ChildPlan) -> None:
    """Look whether a program can be executed, where something else is executed first.

    Raises:
        SpawnError: as the spawn itself would.
    """
    program = plan.argv[0]
    if os.path.sep in program:
        found: str | None = os.path.join(plan.cwd or "", program)
    else:
        found = shutil.which(program, os.F_OK, plan.env.get("PATH"))
    if found is None or not os.path.exists(found):
        raise spawn_error(FileNotFoundError(errno.ENOENT, "missing"), plan)
    if os.path.isdir(found) or not os.access(found, os.X_OK):
        raise spawn_error(PermissionError(errno.EACCES, "not executable"), plan)
    with open(found, "rb") as file:
        first = file.read(256).partition(b"\n")[0]
    interpreter = first[2:].split()[:1] if first.startswith(b"#!") else []
    if interpreter and not os.path.exists(interpreter[0]):
        raise spawn_error(FileNotFoundError(errno.ENOENT, "missing"), plan)


def check_folder(plan: ChildPlan) -> None:
    """Look whether a child may begin in its folder, where that is a forked child's own doing.

    Raises:
        SpawnError: as a spawn would.
    """
    if plan.cwd is not None and not (os.path.isdir(plan.cwd) and os.access(plan.cwd, os.X_OK)):
        raise spawn_error(OSError(errno.ENOENT, "no folder"), plan)


def spawn_error(error: OSError, plan: ChildPlan) -> SpawnError:
    """Say in one line why a child could not be started."""
    program = plan.argv[0]
    code = error.errno or 0
    if plan.cwd is not None and not os.path.isdir(plan.cwd):
        reason = "is not a folder" if os.path.exists(plan.cwd) else "does not exist"
        return SpawnError(
            f"cannot run {program}: its working directory {plan.cwd} {reason}",
            permanent=True,
            exit_code=126,
        )
    if plan.cwd is not None and not os.access(plan.cwd, os.X_OK):
        return SpawnError(
            f"cannot run {program}: its working directory {plan.cwd} may not be entered",
            permanent=True,
            exit_code=126,
        )
    where = os.path.join(plan.cwd or "", program)
    if code == errno.ENOENT and os.path.sep in program and os.path.exists(where):
        return SpawnError(
            f"cannot run {program}: its interpreter (the first line, after #!) does not exist",
            permanent=True,
            exit_code=126,
        )
    if code == errno.E2BIG:
        size = sum(len(part) + 1 for part in plan.argv)
        size += sum(len(name) + len(value) + 2 for name, value in plan.env.items())
        return SpawnError(
            f"cannot run {program}: its arguments and environment ({size} bytes) are too long",
            permanent=True,
            exit_code=126,
        )
    said = "command not found" if code == errno.ENOENT else (os.strerror(code) or str(error))
    return SpawnError(
        f"cannot run {program}: {said[:1].lower() + said[1:]}",
        permanent=code in _PERMANENT,
        exit_code=_PERMANENT.get(code, 1),
    )
