"""The reports of a worker to its launcher: that it is ready, alive, and how far its work is.

A message is one datagram with lines of the form `KEY=value`, sd_notify(3)'s and a few more (the
launcher's reader is `watch.deadlines`).  It goes to the socket that the worker has inherited as
`ELASTIC_AIO_NOTIFY_FD`; a process that has not inherited it, but the variable, sends to the address
in `NOTIFY_SOCKET`.  Without either, nothing is sent: a script also runs by itself.  The launcher
drops messages of other processes than the worker unless `LivenessSpec.notify_access` is "all".

The sockets do not block: a message that the kernel does not take is dropped.  Only the begin and
the end of a phase, an agreement and an exclusion wait, for a second at most: they change what
follows.
"""

from __future__ import annotations

import math
import os
import select
import stat

from elastic_aio.worker import interpreter
from elastic_aio.worker.context import NOTIFY_FD, NOTIFY_SOCKET

PATIENCE_MS = 1000
"""Milliseconds for which a message waits that must not be lost."""
_TEXT_MAX = 1000


def ready(status: str = "") -> bool:
    """Report that this worker has started up (`READY=1`), with a `status` for people.

    Returns:
        Whether the launcher gets the message; False outside of a job.
    """
    return send("READY=1", *_status(status))


def heartbeat(status: str = "") -> bool:
    """Report that this worker is alive (`WATCHDOG=1`), with a `status` for people.

    The other messages say so too.  Returns as `ready`.
    """
    return send("WATCHDOG=1", *_status(status))


def progress(step: int | str, *, total: int | None = None, status: str = "") -> bool:
    """Report the present step of this worker (`PROGRESS=step`); returns as `ready`.

    Call it in each step: it takes some microseconds, and never waits.

    Args:
        step: the number of the step, or another text that changes with it.
        total: how many steps there are, for people.
        status: what it does now, for people.
    """
    text = _line(step) if total is None else f"{_line(step)}/{total}"
    return send(f"PROGRESS={text}", *_status(status))


def exclude_node(reason: str) -> bool:
    """Exclude the node of this worker from all further rounds of the job (`EXCLUDE=reason`).

    The present round goes on: a worker that cannot work here exits with a failure then.  Returns
    as `ready`.  Waits for a second at most for a launcher that does not read.
    """
    return send(f"EXCLUDE={_line(reason)}", patience_ms=PATIENCE_MS)


class phase:  # used like a function, as `contextlib.suppress`
    """A part of this worker's work, such as a checkpoint; a context manager.

    With a `timeout`, the part has to end within that time, in which the other deadlines of the
    worker do not count.
    """

    def __init__(self, name: str, timeout: float | None = None) -> None:
        """Prepare; the block begins the phase.

        Args:
            name: of the phase, for people.
            timeout: seconds that it may take; None changes no deadline.

        Raises:
            ValueError: the timeout is not a number above 0.
        """
        if timeout is not None and not (0 < timeout < math.inf):
            raise ValueError(f"timeout: must be a number above 0 (got {timeout!r})")
        self.name = name
        self.timeout = timeout

    def __repr__(self) -> str:
        return f"<phase {self.name!r}>"

    def __enter__(self) -> phase:
        lines = [f"PHASE={_line(self.name)}"]
        if self.timeout is not None:
            lines.append(f"PHASE_TIMEOUT_USEC={max(1, int(self.timeout * 1e6))}")
        send(*lines, patience_ms=PATIENCE_MS)
        return self

    def __exit__(self, *_: object) -> None:
        send(f"PHASE_END={_line(self.name)}", patience_ms=PATIENCE_MS)


def _status(text: str) -> list[str]:
    return [f"STATUS={_line(text)}"] if text else []


def _line(value: object) -> str:
    return str(value).replace("\n", " ")[:_TEXT_MAX]


def send(*lines: str, patience_ms: int = 0) -> bool:
    """Send a message to the launcher; return whether it gets it."""
    interpreter.offer_stacks()  # to a launcher that ends a worker that is silent
    message = "\n".join(lines).encode("utf-8", "backslashreplace")
    try:
        descriptor = _inherited()
        if descriptor is not None:
            return _write(descriptor, message, patience_ms)
        address = os.environ.get(NOTIFY_SOCKET)
        return bool(address) and _send_to(str(address), message)
    except OSError:
        return False  # the launcher is gone, or reads too slowly


def _write(descriptor: int, message: bytes, patience_ms: int) -> bool:
    try:
        os.write(descriptor, message)
    except BlockingIOError:
        poller = select.poll()
        poller.register(descriptor, select.POLLOUT)
        if not poller.poll(patience_ms):
            return False
        os.write(descriptor, message)
    return True


_checked = ("", -1, -1)  # the variable, device and inode of the socket that was found last


def _inherited() -> int | None:
    """Return the inherited socket; None if this process has none.

    A child may have the variable without the socket, and another file under its number.
    """
    global _checked
    text = os.environ.get(NOTIFY_FD, "")
    if not (text.isascii() and text.isdecimal() and len(text) < 8):
        return None
    number = int(text)
    try:
        status = os.fstat(number)
    except OSError:
        return None
    key = text, status.st_dev, status.st_ino
    if key != _checked:
        if not (stat.S_ISSOCK(status.st_mode) and _is_unnamed_datagram(number)):
            return None
        _checked = key
    return number


def _is_unnamed_datagram(number: int) -> bool:
    """Return whether a socket is one end of a pair of datagram sockets."""
    import _socket

    sock = _socket.socket(fileno=number)
    try:
        is_datagram = sock.family == _socket.AF_UNIX and sock.type == _socket.SOCK_DGRAM
        return is_datagram and sock.getpeername() in ("", b"") and sock.getsockname() in ("", b"")
    except OSError:
        return False
    finally:
        sock.detach()


def _send_to(address: str, message: bytes) -> bool:
    import _socket

    path = f"\0{address[1:]}" if address.startswith("@") else address
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC)
    try:
        sock.setblocking(False)
        sock.sendto(message, path)
    finally:
        sock.close()
    return True
