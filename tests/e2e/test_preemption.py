"""Preemptions of jobs on the command line: the signal of a notice, one node or several."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_aio import (
    AttemptFailed,
    JobFinished,
    JobState,
    MembershipChanged,
    NodeStandby,
    PreemptionNotice,
    RendezvousStoreLost,
    Restarting,
    RoundFormed,
    StopRequested,
    WorkerExited,
)
from tests.support.children import SIGNAL_LOGGER, none_alive, noting, until, until_sync
from tests.support.cli import CLI, Running, noted_job, run_program, running_cli
from tests.support.cluster import AgentProcess, Cluster
from tests.support.etcd import ETCD, EtcdProcess
from tests.support.leaks import alive, leaked_processes
from tests.support.redis import REDIS, RedisProcess
from tests.support.worker_notes import Note

pytestmark = pytest.mark.e2e

WORKER = """
import os, sys, time
from elastic_aio.worker import pending_change
rank, words = int(os.environ["RANK"]), sys.argv[1:]
print(f"rank {rank} begins", flush=True)
while (change := pending_change()) is None:
    time.sleep(0.003)
print(f"rank {rank}: {change.reason}", flush=True)
does = words[rank % len(words)]
time.sleep(99 if does == "waits" else 0)
sys.exit(int(does))
"""
NOTICED = r"rank \d: preemption"


@contextmanager
def job(tmp_path: Path, does: str, *options: object, nproc: int = 2) -> Iterator[Running]:
    """Run a job whose workers do that after a notice."""
    script = tmp_path / "train.py"
    script.write_text(WORKER)
    words = [*options, "--nproc-per-node", nproc, "--max-restarts", 3, script, *does.split(",")]
    with running_cli(*words) as launcher:
        until_sync(lambda: launcher.out.count("begins") == nproc)
        yield launcher


def until_noticed(launcher: Running, nproc: int = 2) -> None:
    until_sync(lambda: launcher.out.count("preemption") == nproc)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("does", ["0", "3,0"])
def test_the_signal_is_a_notice(does: str, loop: str, tmp_path: Path) -> None:
    """The job ends as soon as its workers have, and no failure is reported."""
    with job(tmp_path, does, "--preempt-signal=USR1", f"--loop={loop}") as launcher:
        launcher.send(signal.SIGUSR1)
        ended = launcher.ended()
    assert ended.code == 85
    assert ended.out.count("preemption") == 2
    assert "preemption: the workers are stopped in 60 s: SIGUSR1 was received" in ended.err
    assert "FAILED" not in ended.err
    assert "Traceback" not in ended.err
    assert ended.errors[-1].endswith("was preempted: SIGUSR1 was received")


def test_workers_that_run_at_the_deadline_are_stopped(tmp_path: Path) -> None:
    options = "--preempt-signal=SIGUSR2", "--preempt-deadline=0.2"
    with job(tmp_path, "waits,0", *options) as launcher:
        launcher.send(signal.SIGUSR2)
        ended = launcher.ended()
    assert ended.code == 85
    assert "was preempted: SIGUSR2 was received" in ended.err


@pytest.mark.parametrize("restarts", [0, 3])
@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_the_signal_to_all_processes_is_no_failure(
    name: str, restarts: int, tmp_path: Path
) -> None:
    """It ends the workers before it reaches the launcher, as in a control group."""
    options = f"--preempt-signal={name}", f"--max-restarts={restarts}"
    with noted_job(tmp_path, 2, noting(), *options) as (launcher, pids):
        number = signal.Signals[f"SIG{name}"]
        launcher.send(signal.SIGSTOP)  # or it may judge their ends before, on a busy host
        for pid in pids:
            os.kill(pid, number)
        launcher.send(number)
        launcher.send(signal.SIGCONT)
        assert launcher.wait() == 85
        assert "failed" not in launcher.err


SEES = """
import os, signal, subprocess, sys, time
from elastic_aio.worker import pending_change
rank, names = os.environ["RANK"], ("SIGUSR1", "SIGUSR2")
def is_caught(pid, number):
    (line,) = [one for one in open(f"/proc/{pid}/status") if one.startswith("SigCgt")]
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
helper = subprocess.Popen(["sleep", "99"])
own = [name for name in names if is_caught("self", signal.Signals[name])]
inherited = [name for name in names if is_caught(helper.pid, signal.Signals[name])]
actions = {signal.getsignal(signal.Signals[name]) for name in names}
helper.kill(), helper.wait()
if not (forked := os.fork()):
    time.sleep(99)
if sys.argv[1:] == ["handles"]:
    signal.signal(signal.SIGUSR1, lambda *_: print(f"rank {rank} handles", flush=True))
print(f"rank {rank}: {own} {inherited} {actions}", "ELASTIC_AIO_NOTICE_SIGNAL" in os.environ)
print(f"rank {rank} begins", flush=True)
while (change := pending_change()) is None:
    time.sleep(0.003)
time.sleep(0.3)  # saves
os.kill(forked, signal.SIGKILL)
ended = os.WTERMSIG(os.waitpid(forked, 0)[1])
print(f"rank {rank}: {change.reason}, forked process ended by {ended}", flush=True)
"""


def signal_all(launcher: Running, number: int) -> None:
    """Send a signal to all processes of the launcher's session and below, as linuxproc does."""
    for pid in [*leaked_processes()]:
        if pid != launcher.pid:
            os.kill(pid, number)
    launcher.send(number)


@pytest.mark.parametrize("start", [[], ["--preload=json"], ["-m"]], ids=str)
@pytest.mark.parametrize("name", ["USR1", "SIGUSR2"])
def test_the_notice_to_all_processes_ends_no_python_worker(
    name: str, start: list[str], tmp_path: Path
) -> None:
    """Nor what a worker has forked; what a worker executes has the default action."""
    (tmp_path / "sees.py").write_text(SEES)
    words = [*start, "sees"] if start == ["-m"] else [*start, "sees.py"]
    options = "--nproc-per-node=2", f"--preempt-signal={name}", "--max-restarts=3"
    with running_cli(*options, *words, cwd=tmp_path) as launcher:
        until_sync(lambda: launcher.out.count("begins") == 2)
        number = signal.Signals[f"SIG{name.removeprefix('SIG')}"]
        signal_all(launcher, number)
        ended = launcher.ended()
    assert ended.code == 85, ended.err
    for rank in range(2):
        seen = f"rank {rank}: ['{number.name}'] [] {{<Handlers.SIG_DFL: 0>}} False\n"
        assert seen in ended.out
        assert f"rank {rank}: preemption, forked process ended by 9\n" in ended.out


def test_a_worker_with_a_handler_gets_the_notice_to_all_processes(tmp_path: Path) -> None:
    """Libraries set theirs where `signal.getsignal` shows none."""
    (tmp_path / "sees.py").write_text(SEES)
    with running_cli("--preempt-signal=USR1", tmp_path / "sees.py", "handles") as launcher:
        until_sync(lambda: "begins" in launcher.out)
        signal_all(launcher, signal.SIGUSR1)
        ended = launcher.ended()
    assert ended.code == 85, ended.err
    assert "rank 0 handles\n" in ended.out


@pytest.mark.parametrize("options", [[], ["--preempt-signal=TERM"], ["--preempt-forward=USR1"]])
def test_a_worker_of_another_job_has_the_default_action(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "sees.py").write_text(SEES)
    with running_cli(*options, tmp_path / "sees.py") as launcher:
        until_sync(lambda: "begins" in launcher.out)
        assert "rank 0: [] [] {<Handlers.SIG_DFL: 0>} False\n" in launcher.out
        launcher.send(signal.SIGTERM)
        launcher.wait()


def test_a_job_inside_of_a_worker_has_the_default_action(tmp_path: Path) -> None:
    """Also below a command, which does not remove the variable."""
    (tmp_path / "sees.py").write_text(SEES)
    inner = [*CLI, "run", tmp_path / "sees.py"]
    with running_cli("--preempt-signal=USR1", "--no-python", *inner) as launcher:
        until_sync(lambda: "begins" in launcher.out)
        assert "rank 0: [] [] {<Handlers.SIG_DFL: 0>} False\n" in launcher.out
        launcher.send(signal.SIGTERM)
        launcher.wait()


def test_sigterm_is_a_notice_first_and_then_a_stop(tmp_path: Path) -> None:
    """Kubernetes sends one; the second one begins the stop plan, the third one kills."""
    options = "--preempt-signal=TERM", "--shutdown-timeout=60"
    script = SIGNAL_LOGGER  # which ends at no signal
    with noted_job(tmp_path, 2, script, *options) as (launcher, pids):
        log = tmp_path / "log"
        launcher.send(signal.SIGTERM)
        launcher.wait_err("preemption: the workers are stopped in 60 s")
        assert not log.exists() or log.read_text() == ""
        launcher.send(signal.SIGTERM)  # the same one
        launcher.repeat(signal.SIGTERM, 1)
        until_sync(lambda: log.read_text().split() == ["SIGTERM"] * 2)
        assert all(map(alive, pids))
        launcher.repeat(signal.SIGTERM, 1)
        assert launcher.wait() == 85
        assert "the stop signal was repeated, sending SIGKILL" in launcher.err
    assert none_alive(pids)()


def test_sigterm_is_no_stop_after_a_notice_of_another_origin(tmp_path: Path) -> None:
    """Of another node, which the scheduler has signalled first, or of a command."""
    options = "--preempt-signal=TERM", "--shutdown-timeout=60"
    with noted_job(tmp_path, 2, SIGNAL_LOGGER, *options) as (launcher, pids):
        log = tmp_path / "log"
        assert run_program([*CLI, "preempt", str(launcher.pid), "--deadline=50"]).code == 0
        launcher.send(signal.SIGTERM)
        launcher.repeat(signal.SIGUSR2, 1)
        until_sync(lambda: len(log.read_text().split()) == 2)
        assert log.read_text().split() == ["SIGUSR2"] * 2
        launcher.send(signal.SIGTERM)
        until_sync(lambda: log.read_text().split().count("SIGTERM") == 2)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert launcher.wait() == 85


def test_a_second_signal_of_the_notice_has_no_effect(tmp_path: Path) -> None:
    """A signal that workers get without it is not sent to them either; a stop signal stops."""
    with noted_job(tmp_path, 2, SIGNAL_LOGGER, "--preempt-signal=USR1") as (launcher, pids):
        launcher.send(signal.SIGUSR1)
        launcher.wait_err("preemption: the workers")
        launcher.send(signal.SIGUSR1)
        launcher.send(signal.SIGUSR2)
        log = tmp_path / "log"
        until_sync(lambda: log.read_text().split() == ["SIGUSR2"] * 2)
        launcher.send(signal.SIGINT)
        until_sync(lambda: log.read_text().split().count("SIGINT") == 2)
        assert launcher.err.count("preemption:") == 1
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert launcher.wait() == 85


def test_the_signal_goes_to_the_workers_on_demand(tmp_path: Path) -> None:
    options = "--preempt-signal=USR1", "--preempt-forward=USR1"
    with noted_job(tmp_path, 2, SIGNAL_LOGGER, *options) as (launcher, pids):
        launcher.send(signal.SIGUSR1)
        until_sync(lambda: (tmp_path / "log").read_text().split() == ["SIGUSR1"] * 2)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert launcher.wait() == 85


def test_a_launcher_that_is_killed_during_the_notice(tmp_path: Path) -> None:
    """The guardian ends the workers."""
    with noted_job(tmp_path, 2, noting(), "--preempt-signal=USR1") as (launcher, pids):
        launcher.send(signal.SIGUSR1)
        launcher.wait_err("preemption: the workers")
        launcher.send(signal.SIGKILL)
        assert launcher.wait() == 137
        until_sync(none_alive(pids))
        until_sync(lambda: not leaked_processes())


def test_a_signal_before_the_workers_have_started(tmp_path: Path) -> None:
    """It is not lost: the workers see the notice as soon as they look."""
    script = tmp_path / "train.py"
    script.write_text(WORKER)
    with running_cli("--preempt-signal=USR1", "--no-control", script, "0") as launcher:
        status = Path(f"/proc/{launcher.pid}/status")

        def handles() -> bool:
            line = next(one for one in status.read_text().splitlines() if "SigCgt" in one)
            return bool(int(line.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)

        until_sync(handles)
        launcher.send(signal.SIGUSR1)
        assert launcher.wait() == 85


def test_a_command_gives_the_notice(tmp_path: Path) -> None:
    """Of a job that names no signal; an earlier deadline replaces a later one."""
    with job(tmp_path, "waits") as launcher:
        words = [*CLI, "preempt", str(launcher.pid), "--reason=spot"]
        replies = [run_program([*words, f"--deadline={one}"]) for one in (300, 300, 30)]
        assert [one.code for one in replies] == [0, 0, 0]
        for one in replies[::2]:
            assert "the workers have notice of a preemption" in one.out
        assert "a notice that it had before leaves no more time" in replies[1].out
        until_noticed(launcher)
        assert run_program([*CLI, "stop", str(launcher.pid)]).code == 0
        assert launcher.wait() == 85
        for seconds in (300, 30):
            assert f"stopped in {seconds} s: spot, requested by" in launcher.err


# ------------------------------------------------------------------ several nodes


async def noticed(node: AgentProcess, *workers: Note) -> None:
    """Wait until a node has the notice, and check that its workers see it."""
    await node.event(PreemptionNotice)
    for worker in workers:
        assert (await node.ask(worker, "pending")).startswith("preemption in ")


def check_undisturbed(*nodes: AgentProcess) -> None:
    """Check that each node had one notice, and no restart and no other round."""
    for node in nodes:
        assert len(node.events_of(PreemptionNotice)) == 1
        assert len(node.events_of(RoundFormed)) == 1
        assert not node.events_of(Restarting)
        assert not node.events_of(MembershipChanged)
        assert not node.events_of(AttemptFailed)


async def check_preempted(*nodes: AgentProcess, why: str = "SIGUSR1") -> None:
    """Wait for the end of these nodes; check that it is the same everywhere."""
    for node in nodes:
        ended = await node.ended()
        assert ended.code == 85
        assert "FAILED" not in ended.err
        (finished,) = node.events_of(JobFinished)
        assert (finished.state, finished.exit_code) == (JobState.PREEMPTED, 85)
        assert f"{why} was received" in finished.why


@contextmanager
def engine(backend: str, directory: Path) -> Iterator[dict[str, object]]:
    """Run what a backend needs; yield the arguments of a `Cluster`."""
    if backend in ("c10d", "static"):
        yield {"rdzv_backend": backend}
        return
    if (ETCD if backend == "etcd" else REDIS) is None:
        pytest.skip(f"needs {backend}")
    directory.mkdir()
    with (EtcdProcess if backend == "etcd" else RedisProcess)(directory) as server:
        yield {"rdzv_backend": backend, "endpoint": server.endpoint}


@pytest.mark.black_box
@pytest.mark.parametrize(
    "backend",
    [
        "c10d",
        "static",
        pytest.param("etcd", marks=pytest.mark.engine),
        pytest.param("redis", marks=pytest.mark.engine),
    ],
)
async def test_the_workers_of_all_nodes_have_the_notice(backend: str, tmp_path: Path) -> None:
    """Of a signal at one node; a worker that fails then stops no other, and none is restarted."""
    with engine(backend, tmp_path / "engine") as settings:
        options = {"max_restarts": 3, "preempt_signal": "USR1", **settings}
        conf = {"last_call_timeout": 0}
        async with Cluster(tmp_path / "job", 3, conf=conf, **options) as cluster:  # type: ignore[arg-type]  # of any kind
            ranks = range(3) if backend == "static" else [None] * 3
            nodes = [cluster.start(node_rank=rank) for rank in ranks]
            workers = [(await node.workers())[0] for node in nodes]
            nodes[1].send(signal.SIGUSR1)
            for node, worker in zip(nodes, workers, strict=True):
                await noticed(node, worker)
            nodes[0].order(workers[0], "exit 7")
            await nodes[0].event(WorkerExited)
            nodes[1].order(workers[1], "exit 0")
            await nodes[1].event(WorkerExited)
            await noticed(nodes[2], workers[2])  # it runs on
            assert nodes[0].is_running
            nodes[2].order(workers[2], "exit 0")
            await check_preempted(*nodes)
            check_undisturbed(*nodes)
            assert not any(node.events_of(StopRequested) for node in nodes)


@pytest.mark.black_box
async def test_all_nodes_stop_their_workers_at_the_deadline(tmp_path: Path) -> None:
    options = {"max_restarts": 3, "preempt_signal": "USR1", "preempt_deadline": 1}
    async with Cluster(tmp_path, 3, **options) as cluster:  # type: ignore[arg-type]  # of any kind
        nodes = await cluster.start_all(3)
        workers = await cluster.workers(*nodes)
        nodes[2].send(signal.SIGUSR1)
        await check_preempted(*nodes)
        check_undisturbed(*nodes)
        assert none_alive([worker.pid for worker in workers])()
        for node in nodes:
            assert node.events_of(StopRequested)[0].reason == "the job is preempted"


@pytest.mark.black_box
async def test_the_earliest_deadline_counts_on_all_nodes(tmp_path: Path) -> None:
    """A spot warning to one node, after the notice that a scheduler gave to all."""
    options = {"max_restarts": 3, "preempt_signal": "USR1", "preempt_deadline": 600}
    async with Cluster(tmp_path, 3, **options) as cluster:  # type: ignore[arg-type]  # of any kind
        nodes = await cluster.start_all(3)
        workers = await cluster.workers(*nodes)
        for node in nodes:
            node.send(signal.SIGUSR1)
        for node in nodes:
            await node.event(PreemptionNotice)
        words = [*CLI, "preempt", str(nodes[1].pid), "--deadline=1", "--reason=spot"]
        reply = await asyncio.to_thread(run_program, words)
        assert "the workers have notice of a preemption" in reply.out
        for node in nodes:
            assert (await node.ended()).code == 85
            first, *_, last = node.events_of(PreemptionNotice)
            assert "SIGUSR1" in first.why
            assert last.why.startswith("spot")
            assert last.time_left <= 1
        assert none_alive([worker.pid for worker in workers])()


@pytest.mark.black_box
@pytest.mark.parametrize("restarts", [0, 3])
async def test_the_signal_to_all_processes_of_all_nodes(restarts: int, tmp_path: Path) -> None:
    """It ends the workers of each node before it reaches the launcher."""
    options = {"max_restarts": restarts, "preempt_signal": "TERM"}
    async with Cluster(tmp_path, 2, **options) as cluster:  # type: ignore[arg-type]  # of any kind
        nodes = await cluster.start_all(2)
        for node in nodes:
            node.send(signal.SIGSTOP)
        for worker in await cluster.workers(*nodes):
            os.kill(worker.pid, signal.SIGTERM)
        for node in nodes:
            node.send(signal.SIGTERM)
        for node in nodes:
            node.send(signal.SIGCONT)
        await check_preempted(*nodes, why="SIGTERM")
        for node in nodes:
            assert not node.events_of(AttemptFailed)
            assert len(node.events_of(RoundFormed)) == 1


@pytest.mark.black_box
async def test_the_coordinator_is_killed_during_the_notice(tmp_path: Path) -> None:
    """With the store that it serves: the others keep the notice, and form no other round."""
    async with Cluster(tmp_path, "1:3", preempt_signal="USR1", max_restarts=3) as cluster:
        store = await cluster.start_store()
        nodes = [cluster.start() for _ in range(3)]
        workers = {node: (await node.workers())[0] for node in nodes}
        first, others = cluster.split(nodes)
        others[0].send(signal.SIGUSR1)
        for node in nodes:
            await noticed(node, workers[node])
        first.send(signal.SIGKILL)
        late = cluster.start("late")
        await late.event(NodeStandby)
        for node in others:
            await noticed(node, workers[node])
            assert alive(workers[node].pid)
            node.order(workers[node], "exit 0")
        await check_preempted(*others)
        check_undisturbed(*others)
        assert (await late.ended()).code == 85
        assert not late.events_of(RoundFormed)
        store.send(signal.SIGTERM)


@pytest.mark.black_box
async def test_the_host_of_the_only_store_is_lost_during_the_notice(tmp_path: Path) -> None:
    """The workers of the others keep their time until the deadline, longer than any search."""
    conf = {"heartbeat_timeout": 2, "read_timeout": 3, "last_call_timeout": 0}
    options = {"max_restarts": 3, "preempt_signal": "USR1", "preempt_deadline": 8}
    async with Cluster(tmp_path, 3, conf=conf, **options) as cluster:  # type: ignore[arg-type]  # of any kind
        host = await cluster.start_first("host")
        others = [cluster.start(conf={"is_host": "false"}) for _ in range(2)]
        nodes = [host, *others]
        workers = await cluster.workers(*nodes)
        host.send(signal.SIGUSR1)
        for node in nodes:  # whose own notice is in the store by then
            await noticed(node, (await node.workers())[0])
        host.send(signal.SIGKILL)
        for node in others:
            await node.event(RendezvousStoreLost)
        await check_preempted(*others)
        check_undisturbed(*others)
        for node in others:
            (stop,) = node.events_of(StopRequested)
            assert stop.reason == "the job is preempted"
        await until(none_alive([worker.pid for worker in workers]))


@pytest.mark.black_box
@pytest.mark.parametrize("serves", [True, False])
async def test_a_notice_to_an_excluded_node(serves: bool, tmp_path: Path) -> None:
    """It is one to all nodes if it serves their store; else the others go on."""
    async with Cluster(tmp_path, "2:3", preempt_signal="USR1", max_restarts=3) as cluster:
        nodes = await cluster.start_all(3)
        host = cluster.store_host()
        excluded = next(node for node in nodes if (node is host) is serves)
        others = [node for node in nodes if node is not excluded]
        (worker,) = await excluded.workers()
        assert await excluded.ask(worker, "exclude bad memory") == "True"
        excluded.order(worker, "exit 3")
        workers = await cluster.workers(*others, attempt=1)
        excluded.send(signal.SIGUSR1)
        if not serves:
            assert (await excluded.ended()).code == 85
            await cluster.succeed(*others, attempt=1)
            return
        for node in others:
            await node.event(PreemptionNotice)
            assert excluded.is_running
            (own,) = [one for one in workers if one.node == node.name]
            node.order(own, "exit 0")
        for node in nodes:
            assert (await node.ended()).code == 85


@pytest.mark.black_box
async def test_a_stopped_host_during_the_notice(tmp_path: Path) -> None:
    """A node that is suspended for a moment gets the notice later, and its own deadline."""
    async with Cluster(tmp_path, 2, preempt_signal="USR1") as cluster:
        nodes = await cluster.start_all(2)
        workers = await cluster.workers(*nodes)
        _, others = cluster.split(nodes)
        (suspended,) = others
        first = next(node for node in nodes if node is not suspended)
        suspended.send(signal.SIGSTOP)
        first.send(signal.SIGUSR1)
        await first.event(PreemptionNotice)
        suspended.send(signal.SIGCONT)
        event = await suspended.event(PreemptionNotice)
        assert event.time_left < 60
        for node in nodes:
            for worker in workers:
                if worker.node == node.name:
                    node.order(worker, "exit 0")
        await check_preempted(*nodes)
        check_undisturbed(*nodes)


@pytest.mark.black_box
async def test_a_job_that_was_preempted_runs_again_with_its_id(tmp_path: Path) -> None:
    """At a store that has outlived it, as after a requeue."""
    async with Cluster(tmp_path, 2, preempt_signal="USR1", can_split=True) as cluster:
        store = await cluster.start_store()
        pair = [cluster.start() for _ in range(2)]
        for node in pair:
            await node.workers()
        pair[0].send(signal.SIGUSR1)
        for node in pair:
            await node.event(PreemptionNotice)
            node.order((await node.workers())[0], "exit 0")
        await check_preempted(*pair)
        again = [cluster.start("again") for _ in range(2)]
        await cluster.succeed(*again)
        store.send(signal.SIGTERM)
        await until(lambda: not store.is_running)
    await asyncio.sleep(0)
