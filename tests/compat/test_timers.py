"""torch's clients and servers of timers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import JobFailed, LaunchSpec, run
from elastic_aio.compat.torch.timers import (
    FileTimerClient,
    FileTimerRequest,
    FileTimerServer,
    LocalTimerClient,
    LocalTimerServer,
    MultiprocessingRequestQueue,
    RequestQueue,
    TimerClient,
    TimerRequest,
    TimerServer,
    configure,
    expires,
)
from tests.support.children import until_sync

context = multiprocessing.get_context("spawn")


@pytest.fixture(scope="module", autouse=True)
def _tracker() -> Iterator[None]:
    """Run multiprocessing's resource tracker, a child of this process, for these tests only."""
    resource_tracker.ensure_running()
    yield
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]  # there is no public way


class NotingClient(TimerClient):
    def __init__(self) -> None:
        self.notes: list[tuple[str, float]] = []

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self.notes.append((scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        self.notes.append((scope_id, -1.0))


def test_expires() -> None:
    """The default scope is the caller's line; a client may be configured or given."""
    client = NotingClient()
    configure(client)
    now = time.time()
    line = sys._getframe().f_lineno + 1
    with expires(60):
        pass
    (scope, expiration), released = client.notes
    assert scope.endswith(f"test_timers.py#{line}")
    assert now + 60 <= expiration < now + 90
    assert released == (scope, -1.0)
    configure(None)
    with pytest.raises(RuntimeError, match="Configure timer client"):
        expires(1).__enter__()
    with expires(1, scope="s", client=client):
        pass
    assert client.notes[-1] == ("s", -1.0)


def stuck(client: TimerClient) -> None:
    with expires(0.05, "stuck", client):
        time.sleep(99)


def stuck_by_path(path: str) -> None:
    stuck(FileTimerClient(path))


def stuck_by_queue(queue: Any) -> None:
    stuck(LocalTimerClient(queue))


def acquired(server: TimerServer) -> list[tuple[int, str]]:
    """Return the processes and names of all timers."""
    timers = server.get_expired_timers(float("inf"))
    return [(pid, timer.scope_id) for pid, found in timers.items() for timer in found]


@pytest.fixture(name="file_server")
def _file_server(tmp_path: Path) -> Iterator[tuple[FileTimerServer, str, list[str]]]:
    events: list[str] = []
    path = str(tmp_path / "pipe")
    Path(path).write_text("in the way")
    server = FileTimerServer(path, "run", 0.01, log_event=lambda name, _: events.append(name))
    server.start()
    yield server, path, events
    server.stop()
    assert not os.path.exists(path)
    assert events[-1] == "watchdog stopped"


def ended(target: Callable[..., None], argument: Any) -> int | None:
    process = context.Process(target=target, args=(argument,))
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.slow
def test_a_server_by_a_pipe(file_server: tuple[FileTimerServer, str, list[str]]) -> None:
    """It kills the process, and not its own."""
    server, path, events = file_server
    assert ended(stuck_by_path, path) == -signal.SIGKILL
    until_sync(lambda: "kill worker process" in events)
    assert events == ["watchdog started", "timer expired", "kill worker process"]
    with open(path, "wb") as pipe:
        pipe.write(b"x\n{}\n")
    client = FileTimerClient(path)
    with expires(60, "s", client):
        until_sync(lambda: acquired(server) == [(os.getpid(), "s")])
    until_sync(lambda: not acquired(server))
    assert server.get_last_progress_time() <= time.time()


def test_a_server_that_runs_once(tmp_path: Path) -> None:
    """It handles what waits; timers of processes that have ended are dropped."""
    server = FileTimerServer(str(tmp_path / "pipe"), "run", 60)
    server.start()
    client = FileTimerClient(str(tmp_path / "pipe"), signal=0)
    client.acquire("late", time.time() + 60)
    with open(tmp_path / "pipe", "w") as pipe:
        pipe.write(FileTimerRequest(1 << 22, "ended", time.time() + 60, 9).to_json() + "\n")
    server.run_once()
    assert acquired(server) == [(os.getpid(), "late")]
    server.stop()


class CountingServer(FileTimerServer):
    """Notes the runs of the watchdog, with the scopes of the requests in each."""

    def __init__(self, path: Path) -> None:
        self.runs: list[list[str]] = []
        self.events: list[str] = []
        super().__init__(str(path), "run", 60, log_event=lambda name, _: self.events.append(name))

    def _run_watchdog(self) -> None:
        self.runs.append([])
        super()._run_watchdog()

    def register_timers(self, timer_requests: Any) -> None:
        self.runs[-1] += [request.scope_id for request in timer_requests]
        super().register_timers(timer_requests)


def test_the_requests_of_an_interval_are_one_step(tmp_path: Path) -> None:
    """As torch's server reads them: a timer released in it is none.  A stop ends the interval."""
    server = CountingServer(tmp_path / "pipe")
    server.start()
    until_sync(lambda: server.runs)
    client = FileTimerClient(str(tmp_path / "pipe"))
    with expires(-1, "late", client):
        pass
    client.release("never acquired")
    server.stop()
    assert server.runs == [["late", "late", "never acquired"]]
    assert server.events == ["watchdog started", "watchdog stopped"]
    server.stop()
    server.run_once()


def test_a_client_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[float] = []
    monkeypatch.setattr(time, "sleep", tries.append)
    client = FileTimerClient(str(tmp_path / "missing"))
    with pytest.raises(BrokenPipeError, match="FileTimerServer is not available"):
        client.acquire("s", 1)
    assert len(tries) == 9
    with pytest.raises(RuntimeError, match="larger than 4096 bytes"):
        client.acquire("s" * 5000, 1)


@pytest.mark.slow
def test_a_server_by_a_queue() -> None:
    queue = context.Queue()
    server = LocalTimerServer(queue, max_interval=0.01)
    server.start()
    assert ended(stuck_by_queue, queue) == -signal.SIGKILL
    with expires(60, "s", LocalTimerClient(queue)):
        until_sync(lambda: (os.getpid(), "s") in acquired(server))
    until_sync(lambda: (os.getpid(), "s") not in acquired(server))
    (thread,) = (one for one in threading.enumerate() if one.name == "timer server")
    server.stop()
    thread.join()  # `stop` waits for `max_interval` at most
    queue.close()
    queue.join_thread()


def test_a_queue_of_requests() -> None:
    queue = context.Queue()
    requests = MultiprocessingRequestQueue(queue)
    assert requests.get(1, 0.01) == []
    queue.put(TimerRequest(1, "a", 0))
    queue.put(TimerRequest(2, "b", 0))
    assert requests.get(1, 30) == [TimerRequest(1, "a", 0)]
    assert requests.get(1, 30) == [TimerRequest(2, "b", 0)]
    assert requests.size() == 0
    assert TimerRequest(1, "a", 0) != TimerRequest(1, "a", 1)
    assert FileTimerRequest(1, "a", 0) != FileTimerRequest(1, "a", 0, 9)
    queue.close()
    queue.join_thread()


class Requests(RequestQueue):
    def size(self) -> int:
        return 2

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        return [TimerRequest(number, "s", 0) for number in range(size)]


class Server(TimerServer):
    """Ends worker 1 with an error, 2 well, and 3 not at all."""

    def __init__(self) -> None:
        super().__init__(Requests(), 1)
        self.registered = 0
        self.cleared: set[int] = set()

    def register_timers(self, timer_requests: Any) -> None:
        self.registered += len(timer_requests)

    def clear_timers(self, worker_ids: set[Any]) -> None:
        self.cleared = worker_ids

    def get_expired_timers(self, deadline: float) -> dict[Any, list[Any]]:
        return {worker: [TimerRequest(worker, "s", 0)] for worker in (1, 2, 3)}

    def _reap_worker(self, worker_id: Any) -> bool:
        if worker_id == 1:
            raise ValueError
        return bool(worker_id == 2)


def test_a_server_of_the_users() -> None:
    """Timers stay only of a worker that is to be ended again."""
    server = Server()
    server._run_watchdog()
    assert server.registered == 2
    assert server.cleared == {1, 2}
    server.start()
    assert threading.active_count() > 1
    server.stop()


OURS = "elastic_aio.compat.torch.timers"
THEIRS = "torch.distributed.elastic.timer"
SCRIPT = """
import os, sys, time
from {module} import FileTimerClient, configure, expires
configure(FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
with expires(after=60): pass
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    with expires(after=0.1, scope="collective"): time.sleep(99)
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", [OURS, pytest.param(THEIRS, marks=pytest.mark.torch)])
def test_a_client_at_the_launcher(module: str) -> None:
    """torch's own too: the worker is ended, and restarted if the policy allows."""
    if module == THEIRS:
        pytest.importorskip("torch")
    argv = [sys.executable, "-c", SCRIPT.format(module=module)]
    assert run(LaunchSpec(argv, timers=True, max_restarts=1)).restarts == 1
    with pytest.raises(JobFailed, match="timer 'collective' expired after"):
        run(LaunchSpec(argv, timers=True))
