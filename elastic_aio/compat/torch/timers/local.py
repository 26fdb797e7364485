"""Timers of processes by a queue of multiprocessing: `LocalTimerClient` and its server."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Sequence
from queue import Empty
from typing import Any

from elastic_aio.compat.torch.timers.api import (
    RequestQueue,
    TimerClient,
    TimerRequest,
    TimerServer,
)

__all__ = ["LocalTimerClient", "LocalTimerServer", "MultiprocessingRequestQueue"]

logger = logging.getLogger(__name__)


class LocalTimerClient(TimerClient):
    """Acquires timers for this process by a queue of multiprocessing."""

    def __init__(self, mp_queue: Any) -> None:
        """Use the queue of a `LocalTimerServer`."""
        self._mp_queue = mp_queue

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Acquire a timer until a time in Unix seconds."""
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        """Release a timer."""
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, -1))


class MultiprocessingRequestQueue(RequestQueue):
    """The requests in a queue of multiprocessing."""

    def __init__(self, mp_queue: Any) -> None:
        """Use the queue."""
        self._mp_queue = mp_queue

    def size(self) -> int:
        """Return how many requests wait."""
        return int(self._mp_queue.qsize())

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Return at most `size` requests, after at most `timeout` seconds."""
        end = time.monotonic() + timeout
        requests: list[TimerRequest] = []
        while len(requests) < size:
            left = end - time.monotonic()
            if requests and left <= 0:
                break
            try:
                requests.append(self._mp_queue.get(timeout=max(left, 0)))
            except Empty:
                break
        return requests


class ProcessTimerServer(TimerServer):
    """The timers of processes, by process id and scope."""

    def __init__(
        self, request_queue: RequestQueue, max_interval: float, daemon: bool = True
    ) -> None:
        """Begin without timers (see `TimerServer`)."""
        super().__init__(request_queue, max_interval, daemon)
        self._timers: dict[tuple[Any, str], Any] = {}

    def register_timers(self, timer_requests: Sequence[Any]) -> None:
        """Acquire and release timers."""
        for request in timer_requests:
            key = request.worker_id, request.scope_id
            if request.expiration_time < 0:
                self._timers.pop(key, None)
            else:
                self._timers[key] = request

    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Remove the timers of processes."""
        for key in [key for key in self._timers if key[0] in worker_ids]:
            del self._timers[key]

    def get_expired_timers(self, deadline: float) -> dict[Any, list[Any]]:
        """Return the timers that expire until `deadline`, by process."""
        expired: dict[Any, list[Any]] = {}
        for (worker, _), request in self._timers.items():
            if request.expiration_time <= deadline:
                expired.setdefault(worker, []).append(request)
        return expired


class LocalTimerServer(ProcessTimerServer):
    """Kills the processes whose timers expire."""

    def __init__(self, mp_queue: Any, max_interval: float = 60, daemon: bool = True) -> None:
        """Prepare (see `TimerServer`); `mp_queue` is a queue of multiprocessing."""
        super().__init__(MultiprocessingRequestQueue(mp_queue), max_interval, daemon)

    def _reap_worker(self, worker_id: int) -> bool:
        return send_signal(worker_id, signal.SIGKILL)


def send_signal(pid: int, number: int) -> bool:
    """Send a signal to a process; return False if that is not possible."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        logger.info("Process with pid=%s does not exist. Skipping", pid)
    except Exception:  # a pid of any type and size: logged, and tried again, as torch does
        logger.exception("Error terminating pid=%s", pid)
        return False
    return True
