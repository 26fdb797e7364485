"""The state of a job, and its pages, from events alone."""

from __future__ import annotations

import asyncio
import json

import httpx
import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from elastic_aio.aio import EventReader
from elastic_aio.events import (
    AttemptFailed,
    Event,
    JobFinished,
    JobStarted,
    Restarting,
    StopRequested,
    WorkerExited,
    WorkerStarted,
)
from elastic_aio.http.app import status_app
from elastic_aio.http.openmetrics import format_metrics
from elastic_aio.node_events import (
    MembershipChanged,
    NodeExcluded,
    NodeStandby,
    RoundFormed,
    RoundForming,
)
from elastic_aio.outcome import ExitStatus, Failure, Goodput, JobState, ResourceUsage
from elastic_aio.status import PHASES, JobStatus, StatusTracker, WorkerStatus

FORMING = RoundForming(round=0, joined=1, minimum=2, maximum=3)
FORMED = RoundFormed(
    time=2.0,
    round=4,
    group_rank=1,
    group_world_size=2,
    world_size=4,
    master_addr="10.0.0.1",
    master_port=29500,
    changes=3,
)


def job_started(**settings: object) -> JobStarted:
    fields = {"entrypoint": "train.py", "nproc_per_node": 2, "nnodes": "1", "max_restarts": 3}
    return JobStarted(time=1.0, run_id="run", node="host", **(fields | {"agent_pid": 7} | settings))  # type: ignore[arg-type]


def worker_started(rank: int, time: float, attempt: int = 0) -> WorkerStarted:
    return WorkerStarted(
        time=time, attempt=attempt, rank=rank, local_rank=rank, pid=100 * (attempt + 1) + rank
    )


def worker_exited(rank: int, code: int, *, is_victim: bool = False) -> WorkerExited:
    return WorkerExited(
        rank=rank,
        local_rank=rank,
        pid=100 + rank,
        status=ExitStatus(code=code),
        duration=1.0,
        is_victim=is_victim,
    )


def failed(time: float) -> AttemptFailed:
    root = Failure(
        rank=1, local_rank=1, pid=101, host="host", status=ExitStatus(code=3), time=time, order=0
    )
    return AttemptFailed(time=time, root=root, failures=(root,))


def status_after(*events: Event) -> StatusTracker:
    status = StatusTracker()
    for event in events:
        status(event)
    return status


def states_in(status: StatusTracker) -> list[str]:
    return [worker.state for worker in status.status(0.0).workers]


class Shown:
    """A job whose status is always the same."""

    def __init__(self, status: JobStatus) -> None:
        self._status = status

    def status(self, *, usage: bool = True) -> JobStatus:
        return self._status

    def events(self, after: int = -1) -> EventReader[Event]:
        raise NotImplementedError

    def make_log_files(self) -> None:
        raise NotImplementedError


def get(status: StatusTracker, path: str, now: float = 10.0) -> tuple[int, str]:
    """Return the code and the body of an answer."""
    transport = httpx.ASGITransport(status_app(Shown(status.status(now))))

    async def ask() -> tuple[int, str]:
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            answer = await client.get(path)
            return answer.status_code, answer.text

    return asyncio.run(ask())


RUNNING = (job_started(), worker_started(0, 2.0), worker_started(1, 3.0))


@pytest.mark.parametrize(
    ("events", "phase"),
    [
        ((), "starting"),
        ((job_started(),), "starting"),
        ((job_started(), FORMING), "forming"),
        ((job_started(), NodeStandby(round=1, maximum=2)), "standby"),
        ((job_started(), FORMING, FORMED), "starting"),
        ((job_started(), worker_started(0, 2.0)), "starting"),
        (RUNNING, "running"),
        ((*RUNNING, FORMING), "running"),
        ((*RUNNING, worker_exited(0, 0)), "running"),
        ((*RUNNING, StopRequested(reason="a", plan="b")), "stopping"),
        ((*RUNNING, failed(5.0)), "stopping"),
        ((*RUNNING, failed(5.0), Restarting(why="a", delay=1.0, restarts=1)), "restarting"),
        ((*RUNNING, MembershipChanged(why="a", round=1, nodes=3)), "restarting"),
        ((job_started(), NodeStandby(round=1, maximum=2), failed(5.0),
          Restarting(why="a", delay=1.0, restarts=1)), "standby"),
        ((*RUNNING, NodeExcluded(name="a", member="a", why="b", is_own=True), failed(5.0),
          Restarting(why="a", delay=1.0, restarts=1)), "excluded"),
        ((*RUNNING, NodeExcluded(name="c", member="c", why="b")), "running"),
        ((*RUNNING, finished := JobFinished(
            state=JobState.SUCCEEDED, why="", exit_code=0, duration=1.0, restarts=0)), "succeeded"),
    ],
)  # fmt: skip
def test_phases(events: tuple[Event, ...], phase: str) -> None:
    status = status_after(*events)
    assert status.phase == phase
    assert phase in PHASES
    assert get(status, "/readyz") == (200 if phase == "running" else 503, f"{phase}\n")
    assert get(status, "/healthz") == (200, f"{phase}\n")


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.STOPPED])
def test_a_job_that_has_ended_badly_is_not_alive(state: JobState) -> None:
    end = JobFinished(state=state, why="no", exit_code=1, duration=1.0, restarts=0)
    assert get(status_after(*RUNNING, end), "/healthz")[0] == 503


def test_the_phases_end_with_the_states_of_jobs() -> None:
    assert PHASES[-4:] == tuple(state.value for state in JobState)


def test_goodput_leaves_out_the_time_without_all_workers() -> None:
    """Two seconds of the first attempt, and all since the second one has started."""
    status = status_after(
        *RUNNING,
        failed(5.0),
        Restarting(time=5.5, attempt=1, why="again", delay=1.0, restarts=1),
        worker_started(0, 8.0, attempt=1),
        worker_started(1, 9.0, attempt=1),
    )
    assert status.goodput(now=12.0) == Goodput(2.0 + 3.0, restarting=4.0, waiting=2.0)
    assert status.goodput(now=8.0).productive == 2.0  # the clock was set back
    assert status.elapsed(now=12.0) == 11.0
    assert states_in(status) == ["running", "running"]
    end = JobFinished(
        time=20.0, state=JobState.SUCCEEDED, why="", exit_code=0, duration=1.0, restarts=1
    )
    status(end)
    assert status.goodput(now=50.0) == Goodput(13.0, restarting=4.0, waiting=2.0)
    assert status.elapsed(now=50.0) == 19.0


def test_goodput_leaves_out_the_last_stop() -> None:
    """A stop counts as part of a restart once it is known that one follows."""
    status = status_after(*RUNNING, StopRequested(time=5.0, reason="a", plan="b"))
    assert status.goodput(now=9.0) == Goodput(2.0, waiting=2.0)
    restarted = status_after(
        *RUNNING,
        StopRequested(time=5.0, reason="a", plan="b"),
        failed(6.0),
        Restarting(time=7.0, attempt=1, why="a", delay=1.0, restarts=1),
    )
    assert restarted.goodput(now=9.0) == Goodput(2.0, restarting=4.0, waiting=2.0)
    end = JobFinished(
        time=9.0, state=JobState.STOPPED, why="", exit_code=1, duration=8.0, restarts=0
    )
    status(end)
    assert status.goodput(now=50.0) == Goodput(2.0, waiting=2.0)


def test_goodput_counts_waiting_for_nodes() -> None:
    """Also after a round has run; the start of the next one belongs to the restart."""
    status = status_after(
        *RUNNING,
        MembershipChanged(time=4.0, why="a", round=1, nodes=2),
        msgspec.structs.replace(FORMING, time=5.0),
        msgspec.structs.replace(FORMED, time=8.0),
        worker_started(0, 9.0, attempt=1),
        worker_started(1, 10.0, attempt=1),
    )
    assert status.goodput(now=10.0) == Goodput(1.0, restarting=3.0, waiting=5.0)


def test_states_of_workers() -> None:
    status = status_after(*RUNNING, worker_exited(0, 3), worker_exited(1, 15, is_victim=True))
    assert states_in(status) == ["failed", "stopped"]
    status(worker_exited(9, 1))  # of another attempt
    assert states_in(status) == ["failed", "stopped"]


def test_the_page_of_a_node() -> None:
    status = status_after(job_started(nnodes="2"), FORMED, *RUNNING[1:], worker_exited(0, 0))
    code, body = get(status, "/status")
    page = json.loads(body)
    assert code == 200
    assert page["run_id"] == "run"
    assert page["round"] == 4
    assert page["membership_changes"] == 3
    assert page["master"] == "10.0.0.1:29500"
    assert (page["group_rank"], page["group_world_size"], page["world_size"]) == (1, 2, 4)
    assert page["workers"][0] == {
        "rank": 0, "local_rank": 0, "pid": 100, "state": "succeeded", "since": 0.0,
        "status": "exit code 0", "usage": None, "heartbeat": None, "reported": "",
        "stdout_path": None, "stderr_path": None, "step": "", "step_since": None,
        "rss_bytes": None, "ready_since": None, "probe": "",
    }  # fmt: skip
    assert page["goodput"] == {"productive": 7.0, "restarting": 0.0, "waiting": 2.0}


def test_the_status_of_a_worker_says_since_when() -> None:
    usage = ResourceUsage(1.0, 2.0, 3, 4, 5, 6, 7)
    exited = msgspec.structs.replace(worker_exited(0, 3), time=8.0, usage=usage)
    status = status_after(*RUNNING, exited).status(now=10.0)
    assert [(worker.state, worker.since) for worker in status.workers] == [
        ("failed", 8.0),
        ("running", 3.0),
    ]
    assert status.workers[0].usage == usage
    assert (status.restarts_left, status.since, status.is_ready) == (3, 3.0, True)


def test_a_path_that_is_not_text() -> None:
    status = status_after(job_started(entrypoint="\udcff.py"))
    assert json.loads(get(status, "/status")[1])["entrypoint"] == "\udcff.py"
    assert r'entrypoint="\\udcff.py"' in get(status, "/metrics")[1]


def metrics_of(status: JobStatus, now: float) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return the samples by name, as Prometheus reads them: it is strict about types and units."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    text = format_metrics([({}, status)], now)
    for family in text_string_to_metric_families(text):  # type: ignore[no-untyped-call]
        assert family.documentation.endswith(".")
        for sample in family.samples:
            name = sample.name.removeprefix("elastic_aio_")
            found.setdefault(name, []).append((sample.labels, sample.value))
    return found


def test_metrics_are_open_metrics() -> None:
    usage = ResourceUsage(1.5, 0.25, 4096, 0, 0, 0, 0)
    workers = (
        WorkerStatus(
            0, 0, 1, usage=usage, heartbeat=6.5, step="17/1000", step_since=2.0, rss_bytes=2048
        ),
        WorkerStatus(3, 1, 2, usage=usage, heartbeat=8.0, step="epoch 2", step_since=8.0),
        WorkerStatus(4, 2, 3),
    )
    status = status_after(*RUNNING, failed(5.0)).status(7.0)
    found = metrics_of(msgspec.structs.replace(status, workers=workers), 7.0)
    first, second = {"rank": "0", "local_rank": "0"}, {"rank": "3", "local_rank": "1"}
    assert {name: found[name] for name in found if name.startswith("worker_")} == {
        "worker_cpu_seconds_total": [(first, 1.75), (second, 1.75)],
        "worker_resident_memory_bytes": [(first, 2048)],
        "worker_max_rss_bytes": [(first, 4096), (second, 4096)],
        "worker_heartbeat_age_seconds": [(first, 0.5), (second, 0.0)],
        "worker_progress_age_seconds": [(first, 5.0), (second, 0.0)],
        "worker_step": [(first, 17)],
    }
    phases = {labels["elastic_aio_phase"]: value for labels, value in found["phase"]}
    assert phases == {phase: float(phase == "stopping") for phase in PHASES}
    values = {name: samples[0][1] for name, samples in found.items() if samples[0][0] == {}}
    assert values == {
        "attempt": 0,
        "round": 0,
        "restarts_total": 0,
        "membership_changes_total": 0,
        "elapsed_seconds_total": 6.0,
        "goodput_seconds_total": 2.0,
        "restarting_seconds_total": 0.0,
        "waiting_seconds_total": 2.0,
    }
    assert found["job_info"] == [
        ({"run_id": "run", "node": "host", "role": "default", "entrypoint": "train.py"}, 1)
    ]


def test_metrics_of_a_job_that_has_not_begun() -> None:
    found = metrics_of(StatusTracker().status(1.0), 1.0)
    assert found["job_info"] == [({}, 1)]
    assert {labels["state"]: value for labels, value in found["workers"]} == {
        "running": 0, "succeeded": 0, "failed": 0, "stopped": 0
    }  # fmt: skip


def test_labels_are_escaped() -> None:
    status = status_after(job_started(role='a"b\\c\nd'))
    assert metrics_of(status.status(1.0), 1.0)["job_info"][0][0]["role"] == 'a"b\\c\nd'
