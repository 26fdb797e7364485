"""The sessions of a job's workers, and the list of them: an agent writes it, its guardian reads it.

The list is an anonymous file in memory: writing wakes no process, and the file outlives
the agent for as long as the guardian holds it open.

One line a session: its number, the ticks at which its leader started, and those at which
it was reaped (`-` until then), padded, and a checksum.  A SIGKILL of the agent can cut a
write short.  A line of 64 bytes lies within one page of the file, which the kernel copies
at once; should it be torn even so, the checksum tells, and only this entry is lost: its
processes are then found by the marker, as before they were listed (see `proc`).

A row with the number 0 (`STARTING`) that is not closed says that children are being started
since these ticks.  A child has neither a session nor the marker before its exec, which a file
system can delay.

The guardian runs this file in a bare interpreter, so it imports little.
"""

from __future__ import annotations

import binascii
import os

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` alone would double the guardian's memory
    from collections.abc import Iterable

STARTING = 0
"""The number of the row of the children that are being started."""
_LINE = 64
_BODY = _LINE - 9


class WorkerSession:
    """A worker's session: its number is the worker's pid.

    The kernel does not use the number again while the leader is not reaped, nor while
    any member lives.  A process with this session id is therefore certainly a member if
    it started before the leader was reaped (`closed`, in ticks; None until then).  A
    later process is a member only if such a process still exists.
    """

    __slots__ = ("closed", "number", "opened")

    def __init__(self, number: int, opened: int, closed: int | None = None) -> None:
        """`opened`: the ticks at which the leader started."""
        self.number = number
        self.opened = opened
        self.closed = closed

    def is_certain(self, pid: int, start: int) -> bool:
        """Return whether a process with this session id is certainly a member."""
        if pid == self.number and start != self.opened:
            return False
        return self.closed is None or start <= self.closed


def list_size(workers: int) -> int:
    """Return the bytes of a list with these workers, the fork server, and one that is starting."""
    return (workers + 2) * _LINE


def write_session(descriptor: int, row: int, session: WorkerSession) -> None:
    """Write one line of a session list."""
    closed = b"-" if session.closed is None else b"%x" % session.closed
    body = b"%x %x %s" % (session.number, session.opened, closed)
    body = body.ljust(_BODY)
    os.pwrite(descriptor, b"%s%08x\n" % (body, binascii.crc32(body)), row * _LINE)


def write_session_list(descriptor: int, sessions: Iterable[WorkerSession]) -> None:
    """Replace a session list by some of its sessions, in the same order.

    The lines that stay move forward one by one, so that each is in the file at any
    moment; stale lines are cut off last.
    """
    row = 0
    for row, session in enumerate(sessions, 1):
        write_session(descriptor, row - 1, session)
    os.ftruncate(descriptor, row * _LINE)


class SessionList:
    """The sessions of a job's workers by number, as `sessions`, and the list of them."""

    def __init__(self, descriptor: int) -> None:
        """Begin without sessions; the caller closes `descriptor`, after `detach`."""
        self.sessions: dict[int, WorkerSession] = {}
        self._starting: list[WorkerSession] = []  # one at most
        self._rows: dict[int, int] = {}  # by number
        self._descriptor = descriptor

    def add(self, session: WorkerSession) -> None:
        """List a session."""
        self.sessions[session.number] = session
        self._write(session)

    def close(self, session: WorkerSession, ticks: int) -> None:
        """Note when the leader was reaped."""
        session.closed = ticks
        if self.sessions.get(session.number) is session:
            self._write(session)

    def remove(self, numbers: Iterable[int]) -> None:
        """Remove some sessions."""
        for number in numbers:
            del self.sessions[number]
        if self._descriptor >= 0:
            rows = [*self._starting, *self.sessions.values()]
            # As they are in the file: each moves forward.
            rows.sort(key=lambda session: self._rows[session.number])
            write_session_list(self._descriptor, rows)
            self._rows = {session.number: row for row, session in enumerate(rows)}

    def set_starting(self, since: int | None) -> None:
        """Note that children are being started since these ticks; None: not any more."""
        self._starting = [] if since is None else [WorkerSession(STARTING, since)]
        self._write(self._starting[0] if self._starting else WorkerSession(STARTING, 0, 0))

    def detach(self) -> None:
        """Write no more."""
        self._descriptor = -1

    def _write(self, session: WorkerSession) -> None:
        if self._descriptor >= 0:  # else a process that could not be killed has ended after all
            row = self._rows.setdefault(session.number, len(self._rows))
            write_session(self._descriptor, row, session)


def read_session_list(descriptor: int) -> dict[int, WorkerSession]:
    """Return the sessions by number; torn lines are left out.

    `STARTING` is among them only while children are being started.
    """
    content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    sessions = {}
    for start in range(0, len(content), _LINE):
        body, checksum = content[start : start + _BODY], content[start + _BODY : start + _LINE]
        if checksum == b"%08x\n" % binascii.crc32(body):
            number, opened, closed = body.split()
            end = None if closed == b"-" else int(closed, 16)
            sessions[int(number, 16)] = WorkerSession(int(number, 16), int(opened, 16), end)
    if STARTING in sessions and sessions[STARTING].closed is not None:
        del sessions[STARTING]
    return sessions
