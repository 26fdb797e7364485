"""torch's agent as a blocking call: values, states, and what cannot be extended."""

from __future__ import annotations

import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from elastic_aio.compat.torch.agent import (
    ElasticAgent,
    LocalElasticAgent,
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from elastic_aio.compat.torch.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs
from elastic_aio.compat.torch.rendezvous import RendezvousParameters, get_rendezvous_handler
from tests.support import functions
from tests.support.sockets import free_port


def spec(entrypoint: Any = functions.give_rank, nproc: int = 2, **settings: Any) -> WorkerSpec:
    parameters = RendezvousParameters("c10d", "localhost:0", "run", 1, 1)
    return WorkerSpec(
        **{
            "role": "trainer",
            "local_world_size": nproc,
            "rdzv_handler": get_rendezvous_handler(parameters),
            "entrypoint": entrypoint,
            "max_restarts": 0,
            **settings,
        }
    )


def agent(*args: Any, **settings: Any) -> LocalElasticAgent:
    return LocalElasticAgent(spec(*args, **settings), DefaultLogsSpecs(os.devnull))


def test_a_run_returns_the_values() -> None:
    made = agent()
    assert made.get_worker_group().state is WorkerState.INIT
    result = made.run()
    assert result == RunResult(WorkerState.SUCCEEDED, return_values={0: 0, 1: 1})
    assert not result.is_failed()
    assert isinstance(made, SimpleElasticAgent)
    assert isinstance(made, ElasticAgent)


def test_the_worker_group_knows_ranks_and_processes() -> None:
    made = agent(os.getpid)
    pids = made.run().return_values
    group = made.get_worker_group()
    assert group.state is WorkerState.SUCCEEDED
    assert {worker.global_rank: worker.id for worker in group.workers} == pids
    first = group.workers[0]
    assert (first.local_rank, first.world_size, first.role_rank) == (0, 2, 0)
    assert (group.group_rank, group.group_world_size) == (0, 1)


def where() -> str:
    """Return where the workers are to meet."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_an_address_in_place_of_the_handlers(backend: str) -> None:
    """Each node tells its own workers, as in torch."""
    endpoint = f"localhost:{free_port()}"

    def run(rank: int) -> tuple[WorkerGroup, RunResult]:
        parameters = RendezvousParameters(backend, endpoint, "run", 2, 2, rank=rank)
        handler = get_rendezvous_handler(parameters)
        address = f"127.0.0.{rank + 2}"
        made = agent(where, nproc=rank + 1, rdzv_handler=handler, master_addr=address)
        return made.get_worker_group(), made.run()

    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(run, range(2)))
    for rank, (group, result) in enumerate(groups):
        address = f"127.0.0.{rank + 2}"
        assert group.master_addr == address
        assert {value.partition(":")[0] for value in result.return_values.values()} == {address}
    workers = [worker for group, _ in groups for worker in group.workers]
    assert {worker.role_world_size for worker in workers} == {3}
    assert sorted(worker.role_rank for worker in workers) == [0, 1, 2]


def test_an_address_without_other_nodes() -> None:
    port = free_port()
    made = agent(where, nproc=1, master_addr="127.0.0.9", master_port=port)
    assert made.run().return_values == {0: f"127.0.0.9:{port}"}


def test_a_failed_run_has_failures_by_rank() -> None:
    """All of the last attempt, with those that the agent stopped, the root cause first."""
    code = "import os, time; time.sleep(99 * int(os.environ['RANK'])); exit(7)"
    made = agent(sys.executable, args=("-c", code))
    result = made.run()
    assert result.is_failed()
    assert made.get_worker_group().state is WorkerState.FAILED
    assert [(rank, one.exitcode) for rank, one in result.failures.items()] == [(0, 7), (1, -15)]


def test_a_run_happens_once_per_handler_but_a_handler_serves_many() -> None:
    """torch's tests use one handler for several agents."""
    shared = spec()
    logs = DefaultLogsSpecs(os.devnull)
    for _ in range(2):
        assert not LocalElasticAgent(shared, logs).run().is_failed()


def test_a_health_server_runs_around_the_job() -> None:
    class Server:
        def start(self) -> None:
            calls.append("start")

        def stop(self) -> None:
            calls.append("stop")

    calls: list[str] = []
    made = LocalElasticAgent(
        spec("true"), DefaultLogsSpecs(os.devnull), health_check_server=Server()
    )
    made.run()
    assert calls == ["start", "stop"]


def test_a_log_plug_in_lays_out_each_attempt_once(tmp_path: Path) -> None:
    """It learns of its workers what torch's learns, and its paths are used."""

    class Flat(LogsSpecs):
        @property
        def root_log_dir(self) -> str:
            return str(tmp_path)

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            seen.append(envs)
            names = {rank: str(tmp_path / f"{len(seen)}-{rank}") for rank in envs}
            return LogsDest(
                stdouts={rank: f"{name}.out" for rank, name in names.items()},
                stderrs={0: "", 1: os.devnull},
                error_files={rank: f"{name}.json" for rank, name in names.items()},
            )

    seen: list[dict[int, dict[str, str]]] = []
    script = 'echo "r$RANK $TORCHELASTIC_ERROR_FILE"; exit $((1 - ELASTIC_AIO_ATTEMPT))'
    made = LocalElasticAgent(spec("bash", args=("-c", script), max_restarts=1), Flat())
    assert not made.run().is_failed()
    common = {
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_MAX_RESTARTS": "1",
        "ROLE_NAME": "trainer",
        "LOCAL_WORLD_SIZE": "2",
    }
    assert seen == [
        {
            rank: {**common, "LOCAL_RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": attempt}
            for rank in (0, 1)
        }
        for attempt in ("0", "1")
    ]
    assert (tmp_path / "2-1.out").read_text() == f"r1 {tmp_path}/2-1.json\n"


def test_the_older_name_of_the_entrypoint() -> None:
    with pytest.warns(DeprecationWarning, match="use WorkerSpec.entrypoint"):
        made = spec(None, fn=functions.give)
    assert made.entrypoint is functions.give
    assert made.get_entrypoint_name() == "give"
    assert spec("/bin/true").get_entrypoint_name() == "true"


def test_a_subclass_of_the_base_is_refused_with_the_seam() -> None:
    with pytest.raises(
        TypeError, match=r"Mine: SimpleElasticAgent cannot be extended: .*listeners"
    ):

        class Mine(SimpleElasticAgent):
            pass


def test_a_subclass_may_not_override_private_methods() -> None:
    with pytest.raises(TypeError, match=r"Mine\._start_workers: cannot be overridden"):

        class Mine(LocalElasticAgent):
            def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
                return {}

    class Yours(LocalElasticAgent):
        def run(self, role: str = "default") -> RunResult:
            return super().run(role)

    assert Yours(spec("true"), DefaultLogsSpecs(os.devnull)).run().return_values == {
        0: None,
        1: None,
    }


def test_values_print_themselves() -> None:
    worker = Worker(0, global_rank=3, world_size=4)
    assert str(worker) == (
        "local_rank=0,global_rank=3,role_rank=-1,world_size=4,role_world_size=-1"
    )
    assert str(WorkerState.FAILED) == "WorkerState.FAILED"
    assert WorkerState.FAILED == "FAILED"
    assert WorkerState.is_running(WorkerState.HEALTHY)
    assert not WorkerState.is_running(WorkerState.STOPPED)


def ask_health(port: int) -> bytes:
    """Ask the health check of the agent that has started this worker."""
    with urlopen(f"http://127.0.0.1:{port}/healthz", timeout=30) as answer:
        return bytes(answer.read())


def test_the_health_check_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", str(port))
    result = agent(partial(ask_health, port), nproc=1).run()
    assert result.return_values == {0: b"running\n"}


@pytest.mark.parametrize(
    ("port", "warning"),
    [
        ("none", "must be a port"),
        ("8080", "needs the extra http: pip install"),
        ("taken", "cannot listen: address already in use (got '127.0.0.1:"),
    ],
)
def test_a_job_goes_on_without_its_health_check(
    port: str, warning: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in torch; a second agent of the host may have the port."""
    if port == "8080":
        monkeypatch.setitem(sys.modules, "starlette", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        text = str(taken.getsockname()[1]) if port == "taken" else port
        monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", text)
        assert not agent(nproc=1).run().is_failed()
    (shown,) = (one.message for one in caplog.records if "HEALTH_CHECK" in one.message)
    assert f"TORCHELASTIC_HEALTH_CHECK_PORT: {warning}" in shown
