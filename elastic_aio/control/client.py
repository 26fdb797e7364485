"""The client of control sockets: blocking, for commands that do nothing else."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from elastic_aio.control.protocol import (
    ControlError,
    ControlRequest,
    EventReply,
    GetStatus,
    Reply,
    StatusReply,
    decode_reply,
    encode,
)
from elastic_aio.control.sockets import SOCKET_SUFFIX, directories, is_peer_allowed, peer_of
from elastic_aio.status import JobStatus

_LINE_MAX: Final = 64 << 20
_CHUNK: Final = 1 << 18


class RunningJob(Struct, frozen=True):
    """A job of this user on this host: its agent's socket and process, and its status.

    `status` is None if the agent does not answer: it is suspended, or very busy.  `is_local`: the
    processes of the job have the same pids here as for the agent.
    """

    path: str
    pid: int
    status: JobStatus | None
    is_local: bool = True


class ControlClient:
    def __init__(self, path: str, timeout: float = 2.0) -> None:
        """Connect within `timeout` seconds; raise an OSError without an agent of this user."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._received = bytearray()
        try:
            self._socket.settimeout(timeout)
            self._socket.connect(path)
            if not is_peer_allowed(self._socket):
                raise PermissionError(f"{path} is another user's")
        except BaseException:  # Ctrl-C too: no descriptor stays open
            self._socket.close()
            raise

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    @property
    def pid(self) -> int:
        """Process id of the agent; 0 in another pid namespace."""
        return peer_of(self._socket)[0]

    def send(self, request: ControlRequest) -> None:
        """Send the request.  An agent that has refused the connection has said so already."""
        with contextlib.suppress(BrokenPipeError):
            self._socket.sendall(encode(request))

    def receive(self, timeout: float | None = None) -> Reply | None:
        """Return the next reply; None after the last reply.

        Args:
            timeout: seconds; None waits without a limit.

        Raises:
            TimeoutError: there is none in time.
            OSError: the connection is lost.
            ControlError: the agent sends something else.
        """
        while (end := self._received.find(b"\n")) < 0:
            self._socket.settimeout(None if timeout is None else max(timeout, 1e-3))
            chunk = self._socket.recv(_CHUNK)
            if not chunk:
                if self._received:
                    raise ControlError("the answer has no end")
                return None
            self._received += chunk
            if len(self._received) > _LINE_MAX:
                raise ControlError("the answer is too long")
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return decode_reply(line)

    def replies(self, request: ControlRequest) -> Iterator[Reply]:
        """Send a request, and yield all replies as they come.

        The last reply is no event.  The end of the connection is not waited for: a forked worker
        may have a copy of the agent's side.
        """
        self.send(request)
        while (reply := self.receive()) is not None:
            yield reply
            if not isinstance(reply, EventReply):
                break


def ask(path: str, request: ControlRequest, timeout: float | None = None) -> Reply:
    """Return the only reply to a request.

    Raises:
        OSError: there is no agent, it does not answer in time, or the connection is lost.
        ControlError: the agent sends something else, or nothing.
    """
    with ControlClient(path) as client:
        client.send(request)
        reply = client.receive(timeout)
    if reply is None:
        raise ControlError("the agent has closed the connection")
    return reply


def find_jobs(patience: float = 2.0) -> list[RunningJob]:
    """Return the jobs of this user on this host, by the time of their start.

    Sockets of launchers that were killed are removed.  All agents together have `patience`
    seconds to answer: one may be suspended.
    """
    clients: list[tuple[str, ControlClient | None]] = []
    for path in _paths():
        try:
            client = ControlClient(path, patience)
        except ConnectionRefusedError:
            _remove(path)
            continue
        except (BlockingIOError, TimeoutError):
            clients.append((path, None))  # more clients wait for it than it has room for
            continue
        except OSError:
            continue  # just closed, or another user's
        with contextlib.suppress(OSError):
            client.send(GetStatus())
        clients.append((path, client))
    deadline = time.monotonic() + patience
    jobs = [_read_job(path, client, deadline) for path, client in clients]
    found = [job for job in jobs if job is not None]
    return sorted(found, key=lambda job: (job.status and job.status.started_at) or 0.0)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _is_gone(pid: int) -> bool:
    """Whether a launcher is gone whose forks hold its socket open."""
    try:
        if pid:
            os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _paths() -> list[str]:
    paths = []
    for directory in directories():
        with contextlib.suppress(OSError):
            names = os.listdir(directory)
            paths += [
                os.path.join(directory, name)
                for name in sorted(names)
                if name.endswith(SOCKET_SUFFIX) and not name.startswith(".")
            ]
    return paths


def _read_job(path: str, client: ControlClient | None, deadline: float) -> RunningJob | None:
    """Return the job behind a socket; None if it has ended."""
    named = int(number) if (number := os.path.basename(path).partition("-")[0]).isdigit() else 0
    if client is None:
        return RunningJob(path, named, None)
    with client:
        try:
            reply = client.receive(deadline - time.monotonic())
        except (OSError, ControlError):
            if _is_gone(client.pid):
                _remove(path)
                return None
            return RunningJob(path, client.pid or named, None)
        if not isinstance(reply, StatusReply):
            return None
        agent = reply.status.agent_pid or named
        return RunningJob(path, agent, reply.status, is_local=client.pid == agent)
