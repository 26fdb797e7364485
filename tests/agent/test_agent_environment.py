"""What a worker finds around it: variables, arguments, descriptors, signals."""

from __future__ import annotations

import ast
import os
import re
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import LaunchResult, LaunchSpec, LogSpec, Module, launch
from elastic_aio.worker.context import WorkerContext
from tests.support.children import python, shell
from tests.support.cli import CLI, REPOSITORY, environment, run_program

PLACES = {
    "RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE",
}  # fmt: skip
DOCUMENTED = PLACES | {
    "ELASTIC_AIO_PENDING_CHANGE",
    "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "ELASTIC_AIO_ATTEMPT", "ELASTIC_AIO_ROUND", "ELASTIC_AIO_NOTIFY_FD", "ELASTIC_AIO_TASK",
    "PYTHONFAULTHANDLER",
    "PYTHONUNBUFFERED",
}  # fmt: skip
MARKER = re.compile(r"ELASTIC_AIO_JOB_[0-9a-f]{32}")


async def outputs(directory: Path, entrypoint: list[str] | Module, **settings: Any) -> list[str]:
    """Run workers; return what each has printed."""
    result = await run_logged(directory, entrypoint, **settings)
    return [Path(worker.stdout_path or "").read_text() for worker in result.attempts[-1].workers]


async def run_logged(directory: Path, entrypoint: Any, **settings: Any) -> LaunchResult:
    """Run workers with their output in files."""
    logs = LogSpec(log_dir=str(directory), redirects=3)
    return await launch(LaunchSpec(entrypoint, logs=logs, **settings))


async def environments(directory: Path, **settings: Any) -> list[dict[str, str]]:
    """Run workers; return the environment of each."""
    texts = await outputs(directory, ["env", "-0"], **settings)
    return [dict(line.split("=", 1) for line in text.split("\0") if line) for text in texts]


async def test_the_table_of_variables(tmp_path: Path) -> None:
    """Every variable of torchrun's is there with its value, and its names only."""
    found = await environments(
        tmp_path, nproc_per_node=3, role="trainer", run_id="my run", max_restarts=4
    )
    for rank, env in enumerate(found):
        assert {name: env[name] for name in PLACES} == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "ROLE_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "ROLE_WORLD_SIZE": "3",
            "GROUP_WORLD_SIZE": "1",
        }
        assert env["ROLE_NAME"] == "trainer"
        assert env["TORCHELASTIC_RUN_ID"] == "my run"
        assert env["TORCHELASTIC_RESTART_COUNT"] == "0"
        assert env["TORCHELASTIC_MAX_RESTARTS"] == "4"
        assert env["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        assert env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
        assert env["TORCHELASTIC_ERROR_FILE"].endswith(f"/attempt_0/{rank}/error.json")
        assert Path(env["TORCHELASTIC_ERROR_FILE"]).parent.is_dir()
        assert env["OMP_NUM_THREADS"] == "1"
        assert socket.gethostbyname(env["MASTER_ADDR"]).startswith("127.")
        context = WorkerContext.from_env(env)
        assert (context.rank, context.role, context.restart_count) == (rank, "trainer", 0)


@pytest.mark.parametrize("nproc", [1, 2])
async def test_descriptors_do_not_leak(nproc: int, tmp_path: Path) -> None:
    """A worker has our variables, the documented ones, the job's marker, and nothing else."""
    documented = DOCUMENTED | ({"OMP_NUM_THREADS"} if nproc > 1 else set())
    for env in await environments(tmp_path, nproc_per_node=nproc, env={"MINE": "x"}):
        markers = {name for name in env if MARKER.fullmatch(name)}
        assert len(markers) == 1
        assert env.keys() == os.environ.keys() | documented | {"MINE"} | markers
        untouched = os.environ.keys() - documented
        assert {name: env[name] for name in untouched} == {
            name: os.environ[name] for name in untouched
        }


@pytest.mark.slow
def test_nothing_leaks_when_the_descriptor_limit_was_raised() -> None:
    """Putting back the limit for the workers adds no variable of its own."""
    # One write: the workers share a pipe, which keeps small ones whole.
    code = "import os; os.write(1, f'{sorted(os.environ)}\\n'.encode())"
    env = {**dict.fromkeys(("PWD", "OLDPWD", "SHLVL", "_")), "PYTHONPATH": str(REPOSITORY)}
    ended = run_program(
        ["prlimit", "--nofile=64:", *CLI, "run", "--nproc-per-node", "8",
         "--no-python", sys.executable, "-S", "-c", code],
        env=env,
    )  # fmt: skip
    assert ended.code == 0
    inherited = environment({**env, "TMPDIR": ""}).keys()
    for line in ended.out.splitlines():
        names = set(ast.literal_eval(line))
        marker = {name for name in names if MARKER.fullmatch(name)}
        assert names == inherited | DOCUMENTED | {"OMP_NUM_THREADS"} | marker


async def test_each_job_has_its_own_marker(tmp_path: Path) -> None:
    """A job inside a worker of another one would carry both."""
    first = await environments(tmp_path)
    second = await environments(tmp_path)
    assert {name for name in first[0] if MARKER.fullmatch(name)}.isdisjoint(second[0])


async def test_threads_of_a_lone_worker(tmp_path: Path) -> None:
    """OMP_NUM_THREADS is left alone for one worker."""
    (env,) = await environments(tmp_path)
    assert "OMP_NUM_THREADS" not in env


async def test_what_users_have_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our defaults give way to the inherited environment and to the job's own."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.setenv("FOO", "outer")
    found = await environments(tmp_path, nproc_per_node=2, env={"FOO": "inner", "BAR": "b"})
    for env in found:
        assert env["OMP_NUM_THREADS"] == "7"
        assert env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
        assert (env["FOO"], env["BAR"]) == ("inner", "b")


async def test_the_place_wins_over_what_is_inherited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher inside a worker gives its own workers their own place."""
    monkeypatch.setenv("RANK", "77")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/outer/error.json")
    monkeypatch.setenv("MASTER_PORT", "1")
    (env,) = await environments(tmp_path, env={"WORLD_SIZE": "9"})
    assert (env["RANK"], env["WORLD_SIZE"]) == ("0", "1")
    assert env["TORCHELASTIC_ERROR_FILE"].startswith(str(tmp_path))
    assert env["MASTER_PORT"] != "1"


@pytest.mark.slow
async def test_a_fresh_port_for_each_attempt(tmp_path: Path) -> None:
    """Rank 0 can bind the port that its attempt shares, if asked to; the next has another."""
    script = python(
        """
import os, socket, sys
port = int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    socket.create_server((os.environ["MASTER_ADDR"], port)).close()
print(port)
sys.stdout.flush()
sys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] != "3")
"""
    )
    result = await run_logged(tmp_path, script, max_restarts=3, host_store=False)
    assert len(result.attempts) == 4
    ports = [
        {
            Path(one.stdout_path or "").read_text()
            for one in attempt.workers
            if one.status.signal is None
        }
        for attempt in result.attempts
    ]
    assert all(len(of_attempt) == 1 for of_attempt in ports)
    assert len(set.union(*ports)) > 1


async def test_two_workers_get_the_same_port(tmp_path: Path) -> None:
    """The address to meet at is the same for the whole group."""
    found = await environments(tmp_path, nproc_per_node=4)
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in found}) == 1


async def test_local_rank_in_arguments(tmp_path: Path) -> None:
    """`${local_rank}` is replaced in arguments; every other dollar stays."""
    args = ["${local_rank}", "x${local_rank}y", "$local_rank", "$$", "$${local_rank}", "${rank}"]
    entrypoint = ["printf", "%s\\n", "first ${local_rank}"]
    for rank, text in enumerate(await outputs(tmp_path, entrypoint, args=args, nproc_per_node=2)):
        assert text.split("\n")[:-1] == [
            f"first {rank}", f"{rank}", f"x{rank}y", "$local_rank", "$$", f"${rank}", "${rank}",
        ]  # fmt: skip


async def test_arguments_that_are_no_text(tmp_path: Path) -> None:
    """Numbers and paths are passed as text."""
    (text,) = await outputs(tmp_path, ["echo"], args=[1, 2.5, Path("/a b")])
    assert text == "1 2.5 /a b\n"


@pytest.mark.slow
async def test_python_workers_are_unbuffered(tmp_path: Path) -> None:
    """What a script prints is there even when it ends without flushing."""
    script = tmp_path / "script.py"
    script.write_text("import os\nprint('said')\nos._exit(0)\n")
    (text,) = await outputs(tmp_path, [str(sys.executable), "-c", "pass"])
    assert text == ""
    result = await run_logged(tmp_path, str(script))
    assert Path(result.attempts[0].workers[0].stdout_path or "").read_text() == "said\n"


async def test_a_module(tmp_path: Path) -> None:
    """A module is found from the working directory, and gets its arguments."""
    (tmp_path / "some_module.py").write_text("import sys\nprint(sys.argv[1:])\n")
    (text,) = await outputs(tmp_path, Module("some_module"), args=["-x"], cwd=tmp_path)
    assert text == "['-x']\n"


async def test_another_interpreter(tmp_path: Path) -> None:
    """`python` chooses what runs scripts and modules."""
    other = tmp_path / "python"
    other.write_text('#!/bin/sh\necho "$@"\n')
    other.chmod(0o755)
    (text,) = await outputs(tmp_path, Module("a.b"), args=["c"], python=str(other))
    assert text == "-u -m a.b c\n"


async def test_working_directory(tmp_path: Path) -> None:
    """Workers run where they should; we stay where we are."""
    before = os.getcwd()
    (text,) = await outputs(tmp_path, ["pwd", "-P"], cwd=tmp_path)
    assert text == f"{tmp_path.resolve()}\n"
    assert os.getcwd() == before


async def test_stdin_is_empty(tmp_path: Path) -> None:
    """A worker that reads its input is at the end of it at once."""
    assert await outputs(tmp_path, ["cat"], nproc_per_node=2) == ["", ""]


LIST_DESCRIPTORS = "echo $ELASTIC_AIO_NOTIFY_FD; ls /proc/$$/fd; true"


async def test_descriptors_of_a_worker(tmp_path: Path) -> None:
    """A worker inherits its three streams, and of ours the socket for its messages only."""
    reading, writing = os.pipe()
    try:
        os.set_inheritable(writing, True)
        found = await outputs(tmp_path, shell(LIST_DESCRIPTORS), nproc_per_node=3)
    finally:
        os.close(reading)
        os.close(writing)
    for text in found:
        notify, *descriptors = text.split()
        # 255 is bash's own copy of its script or terminal.
        assert set(descriptors) - {"255"} == {"0", "1", "2", notify}


async def test_descriptor_limit_of_a_worker(tmp_path: Path) -> None:
    """The limits inside a worker are those that the program had."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    (text,) = await outputs(tmp_path, shell("ulimit -Sn; ulimit -Hn"))
    assert text.split() == [str(soft), str(hard)]


@pytest.mark.slow
async def test_descriptor_limit_too_small(tmp_path: Path) -> None:
    """A limit that a large job had to raise is restored in its workers, under the same pid."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        logs = LogSpec(log_dir=str(tmp_path), redirects=3)
        spec = LaunchSpec(shell("ulimit -Sn; echo $$"), nproc_per_node=60, logs=logs)
        result = await launch(spec)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for worker in result.attempts[0].workers:
        said = Path(worker.stdout_path or "").read_text().split()
        assert said == ["200", str(worker.pid)]


async def test_signals_of_a_worker(tmp_path: Path) -> None:
    """No signal is blocked or ignored in a worker that was not so in our parent."""
    (text,) = await outputs(tmp_path, shell("grep -E '^Sig(Blk|Ign)' /proc/$$/status"))
    masks = dict(re.findall(r"^(Sig\w+):\s*([0-9a-f]+)$", text, re.MULTILINE))
    assert int(masks["SigBlk"], 16) == 0
    ignored = int(masks["SigIgn"], 16)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM, signal.SIGCHLD):
        assert not ignored & 1 << (number - 1), number.name


async def test_a_worker_leads_a_session(tmp_path: Path) -> None:
    """Each worker has a session and a process group of its own."""
    result = await run_logged(tmp_path, shell("echo $$; cut -d' ' -f5,6 /proc/$$/stat"),
                              nproc_per_node=2)  # fmt: skip
    for worker in result.attempts[0].workers:
        numbers = Path(worker.stdout_path or "").read_text().split()
        assert numbers == [str(worker.pid)] * 3


async def test_the_error_file_without_logs() -> None:
    """Without log files a worker has a place for its error; with /dev/null it has none."""
    code = "import os, sys; sys.exit(os.environ['TORCHELASTIC_ERROR_FILE'] == '')"
    assert (await launch(LaunchSpec(python(code)))).exit_code == 0
    code = "import os, sys; sys.exit(os.environ['TORCHELASTIC_ERROR_FILE'] != '')"
    spec = LaunchSpec(python(code), logs=LogSpec(log_dir="/dev/null", tee=3))
    assert (await launch(spec)).exit_code == 0


async def test_workers_may_differ_in_arguments_and_variables(tmp_path: Path) -> None:
    """Those of one follow those of all; the launcher's own variables stay as they are."""
    found = await outputs(
        tmp_path,
        ["sh", "-c", 'echo "$0 $* $A $B $RANK ${ELASTIC_AIO_PENDING_CHANGE:+set}"', "x"],
        args=["all", "${local_rank}"],
        env={"A": "a", "B": "b"},
        worker_args=[["first"], []],
        worker_env=[{"A": "own", "RANK": "7", "ELASTIC_AIO_PENDING_CHANGE": ""}, {}],
        nproc_per_node=2,
    )
    assert found == ["x all 0 first own b 0 set\n", "x all 1 a b 1 set\n"]


@pytest.mark.parametrize("start_method", ["spawn", "fork", "forkserver"])
async def test_functions_may_differ_in_arguments(start_method: Any) -> None:
    spec = LaunchSpec(
        max,
        args=[2],
        worker_args=[[1], [3]],
        nproc_per_node=2,
        start_method=start_method,
    )
    result = await launch(spec)
    assert result.return_values == {0: 2, 1: 3}
