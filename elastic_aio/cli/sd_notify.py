"""Notifies systemd about a job that is a service (`Type=notify`): sd_notify(3).

READY when all workers of this node run for the first time, STATUS at each event that is
printed, STOPPING when a signal stops the job and at its end, WATCHDOG while the event loop runs.
A node that waits for others extends the time that systemd gives a service to start: a round may
form much later.

The variables are removed from the environment, as sd_notify(3) does on request: a worker that
inherited them would speak for the service.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import MutableMapping
from typing import Final

from elastic_aio.events import Event, JobFinished, StopRequested
from elastic_aio.node_events import RendezvousStoreAwaited, RoundForming
from elastic_aio.status import Level, StatusTracker
from elastic_aio.text import counted, one_line, shown_bytes

_ADDRESS: Final = "NOTIFY_SOCKET"
_WATCHDOG: Final = "WATCHDOG_USEC"
_WATCHDOG_PID: Final = "WATCHDOG_PID"

_START_TIME_S: Final = 120
"""Seconds that each event of a wait adds to the time to start; such events are 15 s apart."""

_STATUS_MAX: Final = 512

_RETRY_S: Final = 0.1


class ServiceNotifier:
    """Sends datagrams to the service manager; a listener and context manager that never blocks."""

    def __init__(self, address: str, watchdog: float | None) -> None:
        """Prepare; in the block the manager gets a sign in half of `watchdog` seconds, if not None.

        `address` is the path of a socket; "@" begins an abstract name.
        """
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog = watchdog
        self._status = StatusTracker()
        self._has_been_ready = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._unsent: dict[str, str] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def __repr__(self) -> str:
        return f"<ServiceNotifier to {self._address!r}>"

    @classmethod
    def take(cls, env: MutableMapping[str, str], pid: int) -> ServiceNotifier | None:
        """Return a service's notifier, and remove its variables; None for another program.

        The variables of the watchdog may be for another process than `pid`.
        """
        address = env.pop(_ADDRESS, "")
        microseconds, owner = env.pop(_WATCHDOG, ""), env.pop(_WATCHDOG_PID, "")
        if not address.startswith(("/", "@")):  # another family: the manager of a virtual machine
            return None
        is_ours = microseconds.isdecimal() and owner in ("", str(pid))
        return cls(address, int(microseconds) / 1e6 if is_ours and int(microseconds) else None)

    def __enter__(self) -> ServiceNotifier:
        if self._watchdog is not None:
            self._feed_watchdog(self._watchdog / 2)
        return self

    def __call__(self, event: Event) -> None:
        self._status(event)
        text = one_line(event.sentence, _STATUS_MAX)
        fields = {"STATUS": text} if event.level >= Level.WARNING else {}
        match event:
            case RoundForming() | RendezvousStoreAwaited() if not self._has_been_ready:
                fields["EXTEND_TIMEOUT_USEC"] = str(_START_TIME_S * 1_000_000)
            case JobFinished():
                fields = {"STOPPING": "1", "STATUS": text}
            case StopRequested() if event.signal is not None and not event.child:
                fields["STOPPING"] = "1"
            case _ if self._status.is_ready and not self._has_been_ready:
                self._has_been_ready = True
                number = sum(len(leaf.workers) for leaf in self._status.leaves())
                workers = counted(number, "worker")
                fields |= {"READY": "1", "STATUS": f"running: {workers}"}
        self._send(fields)

    def __exit__(self, *_: object) -> None:
        """Send no more; on the event loop."""
        for timer in self._timers.values():
            timer.cancel()
        self._flush()
        self._socket.close()

    def _feed_watchdog(self, interval: float) -> None:
        # A timer: the sign is that the event loop runs, so it cannot depend on an event.
        loop = asyncio.get_running_loop()
        self._timers["watchdog"] = loop.call_later(interval, self._feed_watchdog, interval)
        self._send({"WATCHDOG": "1"})

    def _send(self, fields: dict[str, str]) -> None:
        if fields:
            self._unsent |= fields
            self._flush()

    def _flush(self) -> None:
        """Send what is due; later, if the manager does not read its socket."""
        if not self._unsent:
            return
        message = "\n".join(f"{name}={value}" for name, value in self._unsent.items())
        try:
            self._socket.sendto(shown_bytes(message), self._address)
        except BlockingIOError:
            loop = asyncio.get_running_loop()
            if "retry" not in self._timers:
                self._timers["retry"] = loop.call_later(_RETRY_S, self._retry)
            return
        except OSError:
            pass  # the manager is gone, or was never there: the job does not depend on it
        self._unsent.clear()

    def _retry(self) -> None:
        self._timers.pop("retry", None)
        self._flush()


def take_notifier() -> ServiceNotifier | None:
    """Return the notifier of this process if it is a service."""
    return ServiceNotifier.take(os.environ, os.getpid())
