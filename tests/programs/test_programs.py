"""Programs of torch's users, unmodified, under `aio-elastic run`."""

from __future__ import annotations

import importlib.util
import re
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.docs.test_blocks import place
from tests.docs.test_sessions import check_session
from tests.support.children import until_sync
from tests.support.cli import CLI, REPOSITORY, Ended, run_cli, run_program, running
from tests.support.doc_outputs import block_of
from tests.support.doc_setups import Setup
from tests.support.sockets import free_port, listening

__all__ = ["place"]

PROGRAMS = Path(__file__).parent
SECONDS = 900.0  # torch takes seconds to import, per process and attempt; minutes on a busy host


def found(module: str) -> bool:
    """Return whether a module can be imported, without its import."""
    return importlib.util.find_spec(module) is not None


pytestmark = [pytest.mark.torch, pytest.mark.skipif(not found("torch"), reason="needs torch")]


needs_accelerate = pytest.mark.skipif(not found("accelerate"), reason="needs accelerate")


def lines_of_accelerate(prefix: str) -> list[str]:
    """Return what `accelerate_resume.py` prints, sorted; `{}` in the prefix is the local rank."""
    lines = []
    for rank in (0, 1):
        begins = [f"rank {rank} of 2: from epoch {first} by elastic_aio" for first in (0, 2)]
        lines += [prefix.format(rank) + text for text in (*begins, f"rank {rank}: finished")]
    return sorted(lines)


RESTARTED = ("--nproc-per-node=2", "--max-restarts=1")
ENVIRONMENT = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "LOGLEVEL": None}


def run_torch(*args: object, **options: object) -> Ended:
    """Run a job of torch workers on CPUs to its end."""
    return run_cli("--tee=3", *args, env=ENVIRONMENT, seconds=SECONDS, **options)


def ranks(*ended: Ended) -> list[str]:
    """Check that programs have succeeded; return the lines of their ranks, sorted."""
    assert not any(one.code for one in ended), [one.err for one in ended]
    lines = [line for one in ended for line in one.out.splitlines()]
    return sorted(line for line in lines if line.startswith("rank"))


def test_ddp_resumes_from_its_snapshot(tmp_path: Path) -> None:
    """Rank 1 is killed in epoch 2; the restart trains epochs 2 to 4 only."""
    program = [REPOSITORY / "examples/train_ddp.py", "--snapshot", tmp_path / "snapshot.pt"]
    ended = run_torch(*RESTARTED, *program)
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert "[default0]:attempt 1: training from epoch 2 of 5" in lines
    assert [line.split(": loss")[0] for line in lines if ": loss" in line] == [
        f"[default0]:epoch {epoch}" for epoch in range(5)
    ]


def test_ddp_resumes_on_nodes_that_share_no_directory(tmp_path: Path) -> None:
    """Rank 0 sends its snapshot: a node without the file trains the same epochs as the others."""
    port = free_port()
    nodes = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    with ExitStack() as stack:
        agents = []
        for rank in (0, 1):
            (tmp_path / f"node{rank}").mkdir()
            snapshot = tmp_path / f"node{rank}/snapshot.pt"
            program = [REPOSITORY / "examples/train_ddp.py", "--snapshot", snapshot]
            words = ["--max-restarts=1", f"--node-rank={rank}", *program]
            agents.append(stack.enter_context(running([*CLI, "run", *nodes, *words])))
            until_sync(lambda: listening([port]), "the store", SECONDS)
        ended = [agent.ended(SECONDS) for agent in agents]
    assert [one.code for one in ended] == [0, 0], [one.err for one in ended]
    assert "attempt 1: training from epoch 2 of 5" in "".join(one.out for one in ended)
    assert len([*tmp_path.rglob("snapshot.pt")]) == 1  # of rank 0


def test_the_guide_of_training_prints_what_it_shows(place: Path) -> None:
    """Its program crashes in step 25, and the restart goes on from the checkpoint of step 20."""
    session = block_of("guides/train.md", "$ aio-elastic run")
    program = block_of("guides/train.md", "nn.Linear").text
    check_session(session, Setup(files={"train.py": program}), place, seconds=SECONDS)
    assert [path.name for path in place.glob("*.pt*")] == ["train.pt"]


def test_elastic_training_saves_before_a_preemption(tmp_path: Path) -> None:
    """No checkpoint is due for a long time; the next job goes on from that of the notice."""
    program = [REPOSITORY / "examples/train_elastic.py", "--checkpoint", tmp_path / "train.pt"]
    endless = [*program, "--steps=1000000", "--save-every=1000000", "--step-time=0.01"]
    words = ["--nproc-per-node=2", "--preempt-signal=USR1", "--preempt-deadline=600"]
    with running([*CLI, "run", *words, *endless], env=ENVIRONMENT) as job:
        until_sync(lambda: "from step 0" in job.out, "the first step", SECONDS)
        job.send(signal.SIGUSR1)
        assert job.ended(SECONDS).code == 85
    ended = run_torch("--nproc-per-node=2", *program, "--steps=1")
    assert ended.code == 0, ended.err
    (step,) = re.findall(r"restart 0: from step (\d+)", ended.out)
    assert 0 < int(step) < 1_000_000


def test_fsdp_resumes_from_a_distributed_checkpoint(tmp_path: Path) -> None:
    """The program itself compares the parameters with those of an uninterrupted training."""
    ended = run_torch(*RESTARTED, PROGRAMS / "fsdp_checkpoint.py", tmp_path)
    assert ended.code == 0, ended.err
    assert "rank 1 (pid" in ended.err  # it was killed
    assert sorted(ended.out.splitlines()) == [
        f"[default{rank}]:rank {rank}: steps {first} to 5" for rank in (0, 1) for first in (0, 3)
    ]


def test_rpc_forms_again_after_a_restart() -> None:
    """Every worker calls every other one in both attempts."""
    ended = run_torch("--nproc-per-node=3", "--max-restarts=1", PROGRAMS / "rpc_sum.py")
    assert ended.code == 0, ended.err
    answers = {line for line in ended.out.splitlines() if "attempt 1" in line}
    assert answers == {f"[default{n}]:rank {n}: attempt 1, 2 answers" for n in range(3)}


@pytest.mark.skipif(not found("lightning"), reason="needs lightning")
def test_lightning_resumes_a_fit(tmp_path: Path) -> None:
    """Rank 1 is killed in epoch 2; the Trainer of the restart begins with that epoch."""
    ended = run_torch(*RESTARTED, PROGRAMS / "lightning_resume.py", tmp_path)
    assert ended.code == 0, ended.err
    for rank in (0, 1):
        epochs = [line for line in ended.out.splitlines() if f"rank {rank} of 2: epoch" in line]
        assert [int(line[-1]) for line in epochs] == [0, 1, 2, 2, 3]
        assert f"[default{rank}]:rank {rank}: finished after 4 epochs" in ended.out


@needs_accelerate
def test_accelerate_resumes_from_its_state(tmp_path: Path) -> None:
    """Rank 1 is killed in epoch 2, where the restart begins."""
    ended = run_torch(*RESTARTED, PROGRAMS / "accelerate_resume.py", tmp_path)
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == lines_of_accelerate("[default{}]:")


@needs_accelerate
def test_accelerate_launch_runs_its_job_here(tmp_path: Path) -> None:
    """By `aio-elastic exec`: both attempts are those of this library."""
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--mixed_precision=no"]
    nodes = ["--num_machines=1", "--num_processes=2", "--main_process_port=0"]
    others = ["--dynamo_backend=no", "--max_restarts=1"]
    program = [str(PROGRAMS / "accelerate_resume.py"), str(tmp_path)]
    ended = run_program(
        [*CLI, "exec", sys.executable, *launch, *nodes, *others, *program],
        env=ENVIRONMENT,
        seconds=SECONDS,
    )
    assert ranks(ended) == lines_of_accelerate("")


@needs_accelerate
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_accelerate_launch_of_two_nodes(backend: str) -> None:
    """Each node has its own `accelerate launch`, by `aio-elastic exec`.

    The first one has the store of the nodes: its accelerate refuses a port that is in use.
    """
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--mixed_precision=no"]
    nodes = ["--num_machines=2", "--num_processes=4", "--main_process_ip=127.0.0.1"]
    port = free_port()
    others = [f"--main_process_port={port}", f"--rdzv_backend={backend}"]
    command = [*CLI, "exec", sys.executable, *launch, "--dynamo_backend=no", *nodes, *others]
    program = str(PROGRAMS / "accelerate_sum.py")
    with ExitStack() as stack:
        agents = []
        for rank in (0, 1):
            argv = [*command, f"--machine_rank={rank}", program]
            agents.append(stack.enter_context(running(argv, env=ENVIRONMENT)))
            until_sync(lambda: listening([port]), "the store", SECONDS)
        ended = [agent.ended(SECONDS) for agent in agents]
    assert ranks(*ended) == [f"rank {rank} of 4: 10 by elastic_aio" for rank in range(4)]


@pytest.mark.skipif(
    not (found("lightning") and found("jsonargparse")), reason="needs lightning and jsonargparse"
)
def test_lightning_cli_under_torchrun() -> None:
    """By `aio-elastic exec`; the launcher leaves the program's options alone."""
    torchrun = [*CLI, "exec", sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    trainer = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "max_epochs": 1}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    options = [f"--trainer.{name}={value}" for name, value in {**trainer, **quiet}.items()]
    program = [str(PROGRAMS / "lightning_cli.py"), "fit", *options, "--model.width=8"]
    ended = run_program([*torchrun, *program], env=ENVIRONMENT, seconds=SECONDS)
    assert ranks(ended) == [f"rank {rank} of 2: 8 features by elastic_aio" for rank in (0, 1)]


@pytest.mark.skipif(not (found("lightning") and found("click")), reason="needs lightning and click")
def test_fabric_run_runs_its_job_here() -> None:
    """Lightning's `fabric run`, by `aio-elastic exec`."""
    command = ["-m", "lightning.fabric.cli", "--accelerator=cpu", "--devices=2"]
    others = ["--strategy=ddp", f"--main-port={free_port()}", str(PROGRAMS / "fabric_sum.py")]
    ended = run_program(
        [*CLI, "exec", sys.executable, *command, *others], env=ENVIRONMENT, seconds=SECONDS
    )
    assert {*ranks(ended)} == {f"rank {rank}: 3 by elastic_aio" for rank in (0, 1)}


@needs_accelerate
def test_notebook_launcher_runs_its_job_here() -> None:
    """After `install()`, while an event loop runs."""
    ended = run_program(
        [sys.executable, str(PROGRAMS / "notebook_sum.py"), str(free_port())],
        env=ENVIRONMENT,
        seconds=SECONDS,
    )
    assert {*ranks(ended)} == {f"rank {rank}: 21 by elastic_aio" for rank in (0, 1)}


@needs_accelerate
@pytest.mark.parametrize(
    ("script", "last"),
    [
        ("test_script", "**Test reinstantiated state**"),
        ("test_sync", "`sync_each_batch=False`**"),
        ("test_ops", "testing sending tensors across devices"),
    ],
)
def test_accelerates_own_scripts(script: str, last: str) -> None:
    """Of its test suite, which `accelerate test` runs."""
    spec = importlib.util.find_spec("accelerate")
    assert spec is not None
    assert spec.origin is not None
    scripts = Path(spec.origin).parent / "test_utils/scripts"
    ended = run_torch("--nproc-per-node=2", scripts / f"{script}.py")
    assert ended.code == 0, ended.err
    assert last in ended.out
    assert "[default1]:" in ended.out


@needs_accelerate
def test_accelerate_on_cpus_only_replaces_nothing_and_says_so() -> None:
    """`--cpu` starts one plain process, whatever `--num_processes` says."""
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--mixed_precision=no"]
    nodes = ["--num_machines=1", "--num_processes=2", "--dynamo_backend=no"]
    program = str(PROGRAMS / "accelerate_sum.py")
    ended = run_program(
        [*CLI, "exec", sys.executable, *launch, *nodes, program],
        env=ENVIRONMENT,
        seconds=SECONDS,
    )
    assert [line.partition(" by ")[0] for line in ranks(ended)] == ["rank 0 of 1: 1"]
    assert "has launched nothing by torch's launcher in its own process" in ended.err
