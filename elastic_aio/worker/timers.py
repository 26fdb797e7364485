"""`expires`: a deadline for a block of a worker's code, kept by the launcher.

The launcher makes a named pipe, whose path is in `TORCHELASTIC_TIMER_FILE`.  A worker acquires and
releases timers by lines of JSON, torch's (`FileTimerClient`)::

    {"version": 1, "pid": 7, "scope_id": "step", "expiration_time": 1700000060.0, "signal": 9}

A negative time releases the timer.  `acquired`, which torch does not send, is the time of the
request: with it the launcher knows the age of a timer however late it reads.  The pipe is opened
and closed for each message, which is written whole: it has at most PIPE_BUF bytes.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time

from elastic_aio.errors import HostError
from elastic_aio.text import error_reason
from elastic_aio.worker import interpreter
from elastic_aio.worker.context import TIMER_FILE

# A name for a person; so many characters fit into PIPE_BUF bytes, however they are escaped.
_SCOPE_MAX = 300
_PATIENCE_MS = 10_000


class Timer:
    """A block that has to end in time (see `expires`)."""

    def __init__(self, path: str, scope: str, seconds: float) -> None:
        """Use `expires` to get one."""
        self._path = path
        self.scope = scope
        self.seconds = seconds

    def __repr__(self) -> str:
        return f"<Timer {self.scope!r} of {self.seconds:g} s>"

    def __enter__(self) -> Timer:
        """Start the timer.

        Raises:
            HostError: the launcher does not listen.
        """
        interpreter.offer_stacks()  # before it is killed, the launcher reads what it does
        try:
            self._send(time.time() + self.seconds, signal.SIGKILL)
        except OSError as error:
            reason = error_reason(error)
            raise HostError(f"the launcher does not listen at {self._path}: {reason}") from error
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._send(-1.0, 0)
        except OSError:
            pass  # the launcher is gone, and with it the timer

    def _send(self, expiration_time: float, number: int) -> None:
        request = {
            "version": 1,
            "pid": os.getpid(),
            "scope_id": self.scope,
            "expiration_time": expiration_time,
            "signal": int(number),
            "acquired": time.time(),
        }
        content = json.dumps(request).encode("ascii") + b"\n"
        # Without O_NONBLOCK the call would wait for a launcher that is gone.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            poller = select.poll()
            poller.register(descriptor, select.POLLOUT)
            if not poller.poll(_PATIENCE_MS):
                raise TimeoutError("the launcher does not read")
            os.write(descriptor, content)
        finally:
            os.close(descriptor)


def expires(seconds: float, scope: str | None = None) -> Timer:
    """Return a context manager for a block that has to end within `seconds`.

    If it does not, the launcher kills this process, by SIGKILL.  That is a failure of the worker,
    so the restart policy applies; its message names the timer.  A block inside with the same scope
    restarts the timer, and its end releases it.  `scope` is the name of the timer, by default the
    file and the line of the caller.

    The launcher must have been started with `LaunchSpec(timers=True)`, or with
    `TORCHELASTIC_ENABLE_FILE_TIMER=1` on the command line.

    Raises:
        HostError: the launcher keeps no timers, or does not listen.
    """
    path = os.environ.get(TIMER_FILE)
    if not path:
        raise HostError(
            f"the launcher keeps no timers ({TIMER_FILE} is not set): start the job with"
            " timers=True, or with TORCHELASTIC_ENABLE_FILE_TIMER=1"
        )
    if scope is None:
        caller = sys._getframe(1)
        scope = f"{caller.f_code.co_filename}#{caller.f_lineno}"[-_SCOPE_MAX:]
    return Timer(path, scope[:_SCOPE_MAX], float(seconds))
