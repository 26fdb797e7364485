"""Where the control sockets of a user's agents are: one directory, one socket for each agent.

The directory is `$XDG_RUNTIME_DIR/elastic_aio`, else `/tmp/elastic_aio-UID`.  A shell that was
opened by `docker exec` has another environment than the job: so a client looks into all directories
that an agent may have used.  `$ELASTIC_AIO_CONTROL_DIR` takes the place of both.

Other users can write to /tmp: a directory there counts only if it belongs to this user, and no
other user can enter it.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import struct
import time
from collections.abc import Iterable
from contextlib import suppress

from elastic_aio.process import proc

DIRECTORY_MODE = 0o700
_OWN = "run"  # in the name of a socket; no hexadecimal number begins so
SOCKET_SUFFIX = ".sock"

CONTROL_DIR = "ELASTIC_AIO_CONTROL_DIR"
"""The variable that names the directory."""

# The path of a socket has at most 107 bytes (unix(7)); so much is left for the rest of it.
_LENGTH_MAX = 60

_SO_PEERPIDFD = 77  # since Linux 6.5: a pidfd of the peer
_CLOCK_S = 2.0  # how far the clocks of a file system and of /proc may be apart


def make_directory() -> str:
    """Return the directory for the socket of a new agent; make it if need be.

    Raises:
        OSError: it cannot be made, or is not this user's alone.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if own := os.environ.get(CONTROL_DIR):
        path = own
    elif os.path.isabs(runtime) and len(runtime) <= _LENGTH_MAX and _is_ours(runtime):
        path = os.path.join(runtime, "elastic_aio")
    else:
        path = _fallback()
    try:
        os.mkdir(path, DIRECTORY_MODE)
    except FileExistsError:
        if not _is_ours(path):
            problem = (
                f"is not a directory of this user alone: its mode must be {DIRECTORY_MODE:04o}"
            )
            if os.path.islink(path):
                problem = "is a link, not a directory of this user alone"
            raise PermissionError(f"{path} {problem}") from None
    return path


def directories(*, makes: bool = False) -> list[str]:
    """Return the directories that may have sockets of this user's agents.

    With `makes`, those that do not exist are made, as far as that is possible.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    candidates = [f"/run/user/{os.geteuid()}/elastic_aio", _fallback()]
    if os.path.isabs(runtime):
        candidates.insert(0, os.path.join(runtime, "elastic_aio"))
    if own := os.environ.get(CONTROL_DIR):
        candidates = [own]
    for path in candidates if makes else ():
        # sudo may have kept the variable: what root makes there, its owner could not use.
        if path in (own, _fallback()) or _is_ours(os.path.dirname(path)):
            with suppress(OSError):
                os.mkdir(path, DIRECTORY_MODE)
    return [path for path in dict.fromkeys(candidates) if _is_ours(path)]


def socket_paths(among: Iterable[str]) -> list[str]:
    """Return the paths of the sockets of agents in some directories."""
    paths: list[str] = []
    for directory in among:
        with suppress(OSError):
            found = (os.path.join(directory, name) for name in sorted(os.listdir(directory)))
            paths += [path for path in found if has_agent_name(path)]
    return paths


def socket_name(*, is_own: bool) -> str:
    """Return a name that was never used; `is_own`: this process serves only the one job."""
    return f"{os.getpid()}-{_OWN if is_own else ''}{os.urandom(4).hex()}{SOCKET_SUFFIX}"


def is_of_own_process(path: str) -> bool:
    """Whether the name of a socket says that its process serves only this job."""
    return os.path.basename(path).partition("-")[2].startswith(_OWN)


def named_pid(path: str) -> int:
    """Return the pid in the name of an agent's socket, in the agent's pid namespace; 0: none."""
    pid = os.path.basename(path).partition("-")[0]
    return int(pid) if pid.isdecimal() else 0


def has_agent_name(path: str) -> bool:
    """Whether a socket has the name that an agent gives: other programs may use the directory."""
    rest = os.path.basename(path).partition("-")[2]
    number = rest.removesuffix(SOCKET_SUFFIX)
    return named_pid(path) > 0 and number.isalnum() and number != rest


def _fallback() -> str:
    return f"/tmp/elastic_aio-{os.geteuid()}"


def _is_ours(path: str) -> bool:
    """Whether a path is a directory that only this user can enter."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    is_private = not stat.S_IMODE(found.st_mode) & 0o077
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and is_private


def is_peer_allowed(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket is this user's, or root's."""
    return peer_of(connection)[1] in (os.geteuid(), 0)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return pid and user of the process at the other end of a Unix socket.

    For a listening socket, it is the process that called listen(2).  The pid is 0 for a process of
    another pid namespace.
    """
    credentials = struct.Struct("3i")
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    pid, uid, _ = credentials.unpack(packed)
    return pid, uid


def open_peer(connection: socket.socket, path: str) -> int:
    """Return a pidfd of the process that listens at the socket `path`; -1 if it cannot be had.

    Raises:
        ConnectionRefusedError: it has ended, but its forks hold the socket open.
    """
    try:
        descriptor = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        descriptor = _open_by_pid(peer_of(connection)[0], path)
    if has_ended(descriptor):
        os.close(descriptor)
        raise ConnectionRefusedError("the launcher has ended")
    return descriptor


def _open_by_pid(pid: int, path: str) -> int:
    """Return what `open_peer` does, of a process whose pid may have been used again."""
    if not pid or proc.is_foreign():
        return -1
    if (process := proc.read_process(pid)) is not None:
        age = proc.seconds_since(process.start)
        is_younger = age + _CLOCK_S < time.time() - os.lstat(path).st_mtime
        if not is_younger and (pidfd := proc.open_pidfd(process)) is not None:
            return pidfd
    raise ConnectionRefusedError("the launcher has ended")


def has_ended(pidfd: int) -> bool:
    """Whether the process of a pidfd is known to have ended."""
    return pidfd >= 0 and has_event(pidfd, select.POLLIN)


def has_event(descriptor: int, events: int = 0) -> bool:
    """Whether a descriptor has one of some events of poll(2) now, of which a hang-up is always."""
    poll = select.poll()
    poll.register(descriptor, events)
    return bool(poll.poll(0))


def describe_peer(connection: socket.socket) -> str:
    """Return program, pid and user id of the process at the other end of a Unix socket.

    The user's name may be at a server that does not answer.
    """
    pid, uid = peer_of(connection)
    if not pid:
        return f"a process outside the container (uid {uid})"
    return f"{proc.name_of(pid)} (pid {pid}, uid {uid})"
