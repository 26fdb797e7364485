"""A rendezvous handler of another package under our agent, without torch.

Handlers share an object with the methods of a torch `Store`.  The real ones are tested with
the marker `torch`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import LaunchSpec, RestartAction, RestartPolicy
from elastic_aio.compat.torch.agent import LocalElasticAgent, RunResult, WorkerSpec, WorkerState
from elastic_aio.compat.torch.multiprocessing import DefaultLogsSpecs
from elastic_aio.compat.torch.rendezvous import (
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
)
from elastic_aio.compat.torch.rendezvous.bridge import HandlerRendezvous
from elastic_aio.outcome import Failure, JobState
from tests.support import functions
from tests.support.children import DEADLINE_S
from tests.support.fake_agent import FakeAgent


class MemoryStore:
    """The operations of a torch store that an agent uses."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self.values[key] = value.encode()
            self._changed.notify_all()

    def add(self, key: str, number: int) -> int:
        with self._changed:
            total = int(self.values.get(key, b"0")) + number
        self.set(key, str(total))
        return total

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self._changed:
            if not self._changed.wait_for(
                lambda: self.values.keys() >= {*keys}, timeout.total_seconds()
            ):
                raise TimeoutError(keys)

    def get(self, key: str) -> bytes:
        self.wait([key], timedelta(seconds=DEADLINE_S))
        return self.values[key]


class Meeting:
    """What the handlers of one job share: a barrier and a store for each round."""

    def __init__(self, nodes: int) -> None:
        self.barrier = threading.Barrier(nodes)
        self.nodes = nodes
        self.stores: list[MemoryStore] = []
        self.lock = threading.Lock()

    def join(self, round: int) -> MemoryStore:
        with self.lock:
            while len(self.stores) <= round:
                self.stores.append(MemoryStore())
        self.barrier.wait(DEADLINE_S)
        return self.stores[round]


class Handler(RendezvousHandler):
    """A handler of the given rank; `waiting` is asked for the number of waiting nodes."""

    use_agent_store = True

    def __init__(self, meeting: Meeting, rank: int = 0) -> None:
        self.meeting = meeting
        self.rank = rank
        self.rounds = 0
        self.threads: set[int] = set()
        self.waiting: Callable[[], int] = lambda: 0
        self.join_error: Exception | None = None

    def get_backend(self) -> str:
        return "fake"

    def next_rendezvous(self) -> RendezvousInfo:
        self.threads.add(threading.get_ident())
        if self.join_error is not None:
            raise self.join_error
        store = self.meeting.join(self.rounds)
        self.rounds += 1
        where = RendezvousStoreInfo("192.0.2.7", 1234)
        return RendezvousInfo(store, self.rank, self.meeting.nodes, where)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        raise NotImplementedError

    def num_nodes_waiting(self) -> int:
        self.threads.add(threading.get_ident())
        return self.waiting()

    def get_run_id(self) -> str:
        return "bridged"

    def shutdown(self) -> bool:
        return True


def run(
    handler: Any, entrypoint: Any, *args: Any, nproc: int = 1, barrier: float = 60, **settings: Any
) -> RunResult:
    spec = WorkerSpec(
        role=settings.pop("role", "trainer"),
        local_world_size=nproc,
        rdzv_handler=handler,
        entrypoint=entrypoint,
        args=args,
        max_restarts=settings.pop("max_restarts", 0),
        **settings,
    )
    logs = DefaultLogsSpecs(os.devnull)
    return LocalElasticAgent(spec, logs, exit_barrier_timeout=barrier).run()


def environment(*names: str) -> tuple[str, ...]:
    return tuple(os.environ[name] for name in names)


def run_all(handlers: list[Handler], work: Callable[[Handler], RunResult]) -> list[RunResult]:
    with ThreadPoolExecutor(len(handlers)) as pool:
        return list(pool.map(work, handlers))


@pytest.mark.slow
def test_ranks_follow_the_nodes_and_their_roles() -> None:
    """Nodes of different sizes, as torch's agents agree on them."""
    meeting = Meeting(3)
    handlers = [Handler(meeting, rank) for rank in range(3)]
    sizes, roles = [2, 1, 3], ["a", "b", "a"]
    names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")
    results = run_all(
        handlers,
        lambda one: run(one, environment, *names, nproc=sizes[one.rank], role=roles[one.rank]),
    )
    assert {key: value for one in results for key, value in one.return_values.items()} == {
        0: ("0", "6", "0", "0", "5"),
        1: ("1", "6", "0", "1", "5"),
        2: ("2", "6", "1", "0", "1"),
        3: ("3", "6", "2", "2", "5"),
        4: ("4", "6", "2", "3", "5"),
        5: ("5", "6", "2", "4", "5"),
    }
    keys = meeting.stores[0].values
    assert keys["torchelastic/role_info/1"] == b'{"role": "b", "rank": 1, "local_world_size": 1}'
    assert keys["torchelastic/assigned_ranks/2"] == b"[3, 6, 2, 5]"
    assert keys["torchelastic/agent/terminal_state/num_members"] == b"3"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shares", "settings", "expected"),
    [
        (True, {}, ("192.0.2.7", "1234", "True")),
        (False, {}, ("192.0.2.7", "1234", "False")),
        (False, {"master_addr": "h", "master_port": 5}, ("h", "5", "False")),
    ],
)
def test_the_workers_meet_where_the_handler_says(
    shares: bool, settings: dict[str, Any], expected: tuple[str, ...]
) -> None:
    """Unless the spec overrides it."""
    handler = Handler(Meeting(1))
    handler.use_agent_store = shares
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
    assert run(handler, environment, *names, **settings).return_values == {0: expected}


def test_one_thread_calls_the_handler() -> None:
    """Handlers of torch are not safe for several."""
    handler = Handler(Meeting(1))
    handler.waiting = lambda: int(handler.rounds == 1)
    run(handler, "sh", "-c", "test $TORCHELASTIC_RUN_ID != bridged || exec sleep 0.5")
    assert handler.rounds == 2
    assert len(handler.threads) == 1
    assert threading.get_ident() not in handler.threads


def test_a_failure_is_followed_by_another_round() -> None:
    code = "import os; exit(os.environ['TORCHELASTIC_RESTART_COUNT'] != '2')"
    handler = Handler(Meeting(1))
    result = run(handler, sys.executable, "-c", code, max_restarts=3)
    assert result.state is WorkerState.SUCCEEDED
    assert handler.rounds == 3


def test_failures_end_the_job_once_restarts_are_used_up() -> None:
    handler = Handler(Meeting(1))
    result = run(handler, "false", max_restarts=1)
    assert result.is_failed()
    assert [one.exitcode for one in result.failures.values()] == [1]
    assert handler.rounds == 2


def test_waiting_nodes_bring_another_round(tmp_path: Path) -> None:
    """Which is no restart after a failure."""
    handler = Handler(Meeting(1))
    marker = tmp_path / "second"
    handler.waiting = lambda: int(not marker.exists() and not marker.touch())  # type: ignore[func-returns-value]
    code = f"""
import os, signal, sys
if not os.path.exists({str(marker)!r}):
    signal.pause()
sys.exit(int(os.environ['TORCHELASTIC_RESTART_COUNT']))
"""
    assert run(handler, sys.executable, "-c", code).state is WorkerState.SUCCEEDED
    assert handler.rounds == 2


def test_an_error_of_the_handler_is_raised() -> None:
    handler = Handler(Meeting(1))
    handler.join_error = RendezvousStateError("corrupt")
    with pytest.raises(RendezvousStateError, match="corrupt") as raised:
        run(handler, functions.give)
    assert raised.value is handler.join_error


def test_an_error_while_workers_run_stops_them() -> None:
    handler = Handler(Meeting(1))

    def fail() -> int:
        raise RendezvousStateError("lost")

    handler.waiting = fail
    with pytest.raises(RendezvousStateError, match="lost"):
        run(handler, "sleep", "99")


def test_a_node_that_is_not_needed_succeeds() -> None:
    """torch's own agent ends with an AttributeError then."""
    handler = Handler(Meeting(1))
    handler.join_error = RendezvousGracefulExitError("full")
    assert run(handler, functions.give) == RunResult(WorkerState.SUCCEEDED)


def test_a_node_does_not_wait_for_others_for_ever() -> None:
    meeting = Meeting(2)
    first, second = Handler(meeting, 0), Handler(meeting, 1)
    results = run_all(
        [first, second], lambda one: run(one, "true" if one.rank == 0 else "false", barrier=0.1)
    )
    assert [one.state for one in results] == [WorkerState.SUCCEEDED, WorkerState.FAILED]


async def test_a_decision_that_never_comes_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the callback ignores its cancellation."""
    restart = RestartPolicy(decide=lambda failure: RestartAction.DEFAULT)
    spec = LaunchSpec(["true"], nnodes="1:2", max_restarts=1, restart=restart)
    agent = FakeAgent(
        "n",
        spec,
        make=lambda spec, node, run_id, agent: HandlerRendezvous(
            Handler(Meeting(1)), spec, node, agent, decide_timeout=0.1
        ),
    )
    deciding: list[asyncio.Task[Any]] = []
    is_over = False

    async def decide(failure: Failure) -> RestartAction:
        deciding.append(asyncio.current_task())  # type: ignore[arg-type]
        while not is_over:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        return RestartAction.DEFAULT

    monkeypatch.setattr(agent, "decide", decide)
    await agent.rendezvous.open()
    try:
        await agent.wait_until(lambda: agent.started)
        agent.fail(code=3)
        await agent.wait_until(lambda: agent.outcome)
    finally:
        await agent.rendezvous.leave("")
    assert agent.outcome is not None
    assert (agent.outcome.state, agent.outcome.exit_code) == (JobState.FAILED, 3)
    assert agent.outcome.why == "restart.decide has not returned within 0.1 s"
    is_over = True
    (task,) = deciding
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("error", [StopIteration("x"), GeneratorExit("x"), BaseException("x")])
def test_an_unusual_error_of_the_handler_is_reported(error: BaseException) -> None:
    """No coroutine can pass it on as it is."""
    handler = Handler(Meeting(1))
    handler.join_error = error  # type: ignore[assignment]
    with pytest.raises(RuntimeError) as raised:
        run(handler, functions.give)
    assert str(raised.value) == f"the rendezvous handler raised {error!r}"
