"""The cgroup (v2) of the workers of a job, below the one that is delegated to this launcher.

A cgroup with processes cannot divide its resources among cgroups below it (cgroups(7)).  So where
the kernel refuses that, this process and its children move to the cgroup `launcher` beside those of
the workers, and stay there.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from typing import Final

from elastic_aio.aio import run_in_thread
from elastic_aio.errors import HostError
from elastic_aio.process import proc
from elastic_aio.text import error_reason

LAUNCHER: Final = "launcher"
PREFIX: Final = "elastic_aio-"
"""The names of cgroups of workers begin with it; the pid of their launcher and a number follow."""
_DELEGATED: Final = ("user.delegate", "trusted.delegate")
"""Attributes by which systemd marks what it has delegated."""
_HINT: Final = (
    "; limits need a delegated cgroup, such as of systemd-run --user --scope -p Delegate=yes"
)
_REMOVALS: Final = 20
_REMOVAL_S: Final = 0.02
_numbers = count()


class Cgroup:
    """A cgroup of workers; must be closed."""

    def __init__(self, path: str) -> None:
        """Take an existing directory, which `aclose` removes."""
        self.path = path

    def __repr__(self) -> str:
        return f"<Cgroup {self.path}>"

    @classmethod
    def make(cls, files: Mapping[str, str]) -> Cgroup:
        """Make a cgroup with such limits: the content of its files by their names.

        Raises:
            HostError: it cannot be made; the message names the file that cannot be written.
        """
        fields = {name: f"limits.{name.replace('.', '_')}" for name in files}
        controllers = {name.partition(".")[0]: field for name, field in fields.items()}
        base = _enable(own_directory(), controllers)
        _remove_old(base)
        path = os.path.join(base, f"{PREFIX}{os.getpid()}-{next(_numbers)}")
        with _refusing("limits", path, "make"):
            os.mkdir(path)
        try:
            for name, text in files.items():
                file = os.path.join(path, name)
                with _refusing(fields[name], file):
                    _write(file, text)
        except HostError:
            with suppress(OSError):
                os.rmdir(path)
            raise
        return cls(path)

    def kill(self) -> None:
        """Kill all of its processes, also those that are being forked.

        A kernel before 5.14 cannot; a stop kills them one by one then.
        """
        with suppress(OSError):
            _write(os.path.join(self.path, "cgroup.kill"), "1")

    async def aclose(self) -> None:
        """Kill what is left in it, and remove it with the cgroups in it.  Idempotent.

        It stays if a process in it could not be killed; another launcher removes it then.
        """
        self.kill()
        for _ in range(_REMOVALS):
            if await run_in_thread(_remove, self.path, daemon=True):
                return
            # What has been killed and reaped leaves the cgroup a little later.
            await asyncio.sleep(_REMOVAL_S)


def own_directory() -> str:
    """Return the directory of the cgroup of this process, or raise HostError."""
    own = next((text[3:] for text in _lines("/proc/self/cgroup") if text.startswith("0::")), None)
    for line in _lines("/proc/self/mountinfo"):
        fields, _, kind = line.partition(" - ")
        if own is not None and kind.startswith("cgroup2 "):
            root, mounted = fields.split()[3:5]
            below = os.path.relpath(own, root)
            if not below.startswith(".."):
                return os.path.normpath(os.path.join(mounted, below))
    raise HostError(f"limits: this host shows no cgroup v2 to this process{_HINT}")


def _enable(base: str, controllers: Mapping[str, str]) -> str:
    """Let the cgroups below `base`, or beside it, have controllers; return the one above them."""
    above = os.path.dirname(base)
    is_ours = os.path.basename(base) == LAUNCHER or any(
        _is_marked(above, one) for one in _DELEGATED
    )
    if is_ours and controllers.keys() <= _words(above, "cgroup.subtree_control"):
        return above
    available, enabled = _words(base, "cgroup.controllers"), _words(base, "cgroup.subtree_control")
    for name, field in controllers.items():
        if name not in available | enabled:
            path = os.path.join(base, "cgroup.controllers")
            raise HostError(f"{field}: the controller {name!r} is not in {path}{_HINT}")
    if missing := controllers.keys() - enabled:
        path, field = os.path.join(base, "cgroup.subtree_control"), controllers[min(missing)]
        text = " ".join(f"+{name}" for name in sorted(missing))
        with _refusing(field, path):
            try:
                _write(path, text)
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                _move_aside(os.path.join(base, LAUNCHER), field)
                _write(path, text)
    return base


def _move_aside(aside: str, field: str) -> None:
    """Move this process and its children to a cgroup of their own."""
    path = os.path.join(aside, "cgroup.procs")
    with _refusing(field, path):
        with suppress(FileExistsError):
            os.mkdir(aside)
        children = [process.pid for process in proc.iter_descendants(os.getpid())]
        for pid in (*children, os.getpid()):
            with suppress(ProcessLookupError):
                _write(path, str(pid))


def _remove_old(base: str) -> None:
    """Remove the cgroups that killed launchers have left."""
    with suppress(OSError):
        for name in os.listdir(base):
            pid = name.removeprefix(PREFIX).partition("-")[0]
            if name.startswith(PREFIX) and pid.isdecimal() and not os.path.exists(f"/proc/{pid}"):
                _remove(os.path.join(base, name))


def _remove(path: str) -> bool:
    """Remove a cgroup with those below it; return whether it is gone."""
    for directory, _, _ in os.walk(path, topdown=False):
        with suppress(OSError):
            os.rmdir(directory)
    return not os.path.exists(path)


@contextmanager
def _refusing(field: str, path: str, what: str = "write") -> Iterator[None]:
    """Raise the HostError of an OSError."""
    try:
        yield
    except OSError as error:
        raise HostError(f"{field}: cannot {what} {path}: {error_reason(error)}{_HINT}") from error


def _is_marked(path: str, attribute: str) -> bool:
    try:
        return os.getxattr(path, attribute) == b"1"
    except OSError:
        return False


def _words(directory: str, name: str) -> set[str]:
    return {word for line in _lines(os.path.join(directory, name)) for word in line.split()}


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read().splitlines()
    except OSError:
        return []


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
