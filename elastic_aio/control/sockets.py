"""Where the control sockets of a user's agents are: one directory, one socket for each agent.

The directory is `$XDG_RUNTIME_DIR/elastic_aio`, else `/tmp/elastic_aio-UID`.  A shell that was
opened by `docker exec` has another environment than the job: so a client looks into all directories
that an agent may have used.  `$ELASTIC_AIO_CONTROL_DIR` takes the place of both.

Other users can write to /tmp: a directory there counts only if it belongs to this user, and no
other user can enter it.
"""

from __future__ import annotations

import os
import socket
import stat
import struct

from elastic_aio.process.proc import name_of

DIRECTORY_MODE = 0o700
SOCKET_SUFFIX = ".sock"

CONTROL_DIR = "ELASTIC_AIO_CONTROL_DIR"
"""The variable that names the directory."""

# The path of a socket has at most 107 bytes (unix(7)); so much is left for the rest of it.
_LENGTH_MAX = 60


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
            raise PermissionError(f"{path} {problem}") from None
    return path


def directories() -> list[str]:
    """Return the directories that may have sockets of this user's agents."""
    if own := os.environ.get(CONTROL_DIR):
        return [own] if _is_ours(own) else []
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    candidates = [f"/run/user/{os.geteuid()}/elastic_aio", _fallback()]
    if os.path.isabs(runtime):
        candidates.insert(0, os.path.join(runtime, "elastic_aio"))
    return [path for path in dict.fromkeys(candidates) if _is_ours(path)]


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


def describe_peer(connection: socket.socket) -> str:
    """Return program, pid and user id of the process at the other end of a Unix socket.

    The user's name may be at a server that does not answer.
    """
    pid, uid = peer_of(connection)
    if not pid:
        return f"a process outside the container (uid {uid})"
    return f"{name_of(pid)} (pid {pid}, uid {uid})"
