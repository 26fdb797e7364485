"""No process of a job outlives its supervisor, however that ends."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support.children import noted, noting, until_sync
from tests.support.cli import Running, running, running_cli
from tests.support.traces import alive, strays

# A second is promised; as much again for a machine that is busy with other tests.
PROMISED_S = 2.0

# A child in another process group, one in another session with a parent that is
# gone, and one that ignores what asks it to stop.
HYDRA = noting(
    first="""
set -m; sleep 99 & echo $! > "$NOTES/group.$RANK"; set +m
(setsid bash -c 'echo $$ > "$NOTES/daemon.$RANK"; exec sleep 99' > /dev/null 2>&1 &)
(trap '' TERM INT HUP QUIT; sleep 99 & echo $! > "$NOTES/deaf.$RANK")
until [ -s "$NOTES/daemon.$RANK" ]; do :; done
"""
)


def gone() -> bool:
    """Tell whether nothing of this test session runs any more."""
    return not strays()


def hydra_pids(folder: Path, count: int) -> list[int]:
    """Wait until the workers and all that they start run; return their pids."""
    pids = list(until_sync(noted(folder, count)))
    for kind in ("group", "daemon", "deaf"):
        pids += [int((folder / f"{kind}.{rank}").read_text()) for rank in range(count)]
    assert all(map(alive, pids))
    return pids


def guardian_of(launcher: Running) -> int:
    """Return the pid of a launcher's guardian."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    (found,) = (
        int(pid)
        for pid in children
        if b"guardian_main.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    return found


def ignores(pid: int, number: int) -> bool:
    """Tell whether a process ignores a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = re.findall(r"^SigIgn:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return bool(int(mask, 16) & 1 << (number - 1))


def test_launcher_killed(tmp_path: Path) -> None:
    """After SIGKILL of the launcher everything is gone within a second."""
    with running_cli("--nproc-per-node", 3, "--no-python", *HYDRA,
                     env={"NOTES": str(tmp_path)}) as job:  # fmt: skip
        pids = hydra_pids(tmp_path, 3)
        job.send(signal.SIGKILL)
        assert job.wait() == 137
        until_sync(lambda: not any(map(alive, pids)), "the end of the workers", PROMISED_S)
    until_sync(gone, "the end of the guardian")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_launcher_asked_to_stop(number: signal.Signals, tmp_path: Path) -> None:
    """After a stop signal everything is gone when the launcher is."""
    with running_cli("--nproc-per-node", 2, "--shutdown-timeout", 0.5, "--no-python", *HYDRA,
                     env={"NOTES": str(tmp_path)}) as job:  # fmt: skip
        pids = hydra_pids(tmp_path, 2)
        job.send(number)
        assert job.wait() == 128 + number
        assert not any(map(alive, pids))
    assert gone()


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV, signal.SIGALRM])
def test_launcher_crashed(number: signal.Signals, tmp_path: Path) -> None:
    """A launcher that crashes takes everything along."""
    with running_cli("--nproc-per-node", 2, "--no-python", *HYDRA,
                     env={"NOTES": str(tmp_path)}) as job:  # fmt: skip
        pids = hydra_pids(tmp_path, 2)
        job.send(number)
        assert job.wait() == 128 + number
        until_sync(lambda: not any(map(alive, pids)), "the end of the workers", PROMISED_S)
    until_sync(gone, "the end of the guardian")


EMBEDDING = """
import asyncio, os, sys
from elastic_aio import LaunchSpec, launch
if sys.argv[1] == "uvloop":
    import uvloop
    factory = uvloop.new_event_loop
else:
    factory = asyncio.SelectorEventLoop
async def main():
    task = asyncio.ensure_future(launch(LaunchSpec(sys.argv[3:], nproc_per_node=int(sys.argv[2]))))
    if os.environ.get("FORK"):
        while not os.path.exists(os.environ["NOTES"] + "/0"):
            await asyncio.sleep(0.01)
        if not os.fork():
            import time
            time.sleep(99)
            os._exit(0)
    await task
with asyncio.Runner(loop_factory=factory) as runner:
    runner.run(main())
"""


def embedding(loop: str, nproc: int, *entrypoint: str) -> list[str]:
    """Return a program that runs a job on a loop of its choice."""
    return [sys.executable, "-c", EMBEDDING, loop, str(nproc), *entrypoint]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_fork_of_the_embedding_program_lives_on(loop: str, tmp_path: Path) -> None:
    """A fork that holds all our descriptors hides our end from nobody, and is left alone."""
    env = {"NOTES": str(tmp_path), "FORK": "1"}
    with running(embedding(loop, 2, *HYDRA), env=env) as program:
        pids = hydra_pids(tmp_path, 2)

        def forks() -> list[int]:
            sign = EMBEDDING[:40].strip()
            return [pid for pid, command in strays().items()
                    if sign in command and pid != program.pid]  # fmt: skip

        (fork,) = until_sync(forks)
        try:
            program.send(signal.SIGKILL)
            program.wait()
            until_sync(lambda: not any(map(alive, pids)), "the end of the workers", PROMISED_S)
            until_sync(lambda: set(strays()) == {fork}, "the end of the guardian")
            assert alive(fork)
        finally:
            os.kill(fork, signal.SIGKILL)
    until_sync(gone)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("count", range(6))
def test_killed_in_the_middle_of_spawning(loop: str, count: int) -> None:
    """SIGKILL at any moment while 50 workers are being spawned leaves none of them."""
    seen = random.Random(time.time_ns()).randint(1, 45)
    with running(embedding(loop, 50, "sleep", "99")) as program:
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children")
        while len(children.read_text().split()) < seen:
            assert program.process.poll() is None
        program.send(signal.SIGKILL)
        program.wait()
        killed = time.monotonic()
        until_sync(gone, f"nothing after {seen} children", 10)
        # The guardian itself stays for a moment after the last find.
        assert time.monotonic() - killed < PROMISED_S + 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_stopped_at_a_random_early_moment(number: signal.Signals) -> None:
    """A signal during the start ends with its code and leaves nothing, handled or not."""
    dice = random.Random(time.time_ns())
    for _ in range(4):
        with running_cli("--nproc-per-node", 8, "--no-python", "sleep", "99") as job:
            end = time.monotonic() + dice.uniform(0, 0.25)
            while time.monotonic() < end:
                pass  # the moment is the point: nothing is waited for
            job.send(number)
            assert job.wait() == 128 + number
            assert "Traceback" not in job.err
        until_sync(gone)


def test_the_guardian_is_replaced(tmp_path: Path) -> None:
    """A guardian that was killed has a successor, which does its work."""
    env = {"NOTES": str(tmp_path), "LOGLEVEL": "INFO"}
    with running_cli("--nproc-per-node", 2, "--no-python", *HYDRA, env=env) as job:
        pids = hydra_pids(tmp_path, 2)
        for _ in range(2):
            former = guardian_of(job)
            os.kill(former, signal.SIGKILL)
            match = job.wait_err(rf"guardian process had died; pid (?!{former}\b)(\d+) replaces it")
            until_sync(lambda former=former: guardian_of(job) != former)  # type: ignore[misc]  # bound now
        assert int(match[1]) > 0
        assert all(map(alive, pids))
        job.send(signal.SIGKILL)
        job.wait()
        until_sync(lambda: not any(map(alive, pids)), "the end of the workers", PROMISED_S)
    until_sync(gone)


def test_the_guardian_is_deaf(tmp_path: Path) -> None:
    """No signal but SIGKILL ends a guardian, so that a sweep of all processes guards still."""
    env = {"NOTES": str(tmp_path)}
    with running_cli("--no-python", *HYDRA, env=env) as job:
        pids = hydra_pids(tmp_path, 1)
        guardian = guardian_of(job)
        until_sync(lambda: ignores(guardian, signal.SIGTERM), "a guardian that has begun")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            os.kill(guardian, number)
        job.send(signal.SIGKILL)
        job.wait()
        until_sync(lambda: not any(map(alive, pids)), "the end of the workers", PROMISED_S)
    until_sync(gone)


def test_nested_jobs(tmp_path: Path) -> None:
    """A job inside a worker of another job ends with it."""
    inner = [sys.executable, "-m", "elastic_aio", "run", "--nproc-per-node", "2", "--no-python"]
    with running_cli("--no-python", *inner, *HYDRA, env={"NOTES": str(tmp_path)}) as job:
        pids = hydra_pids(tmp_path, 2)
        job.send(signal.SIGKILL)
        job.wait()
        until_sync(lambda: not any(map(alive, pids)), "the end of the workers", PROMISED_S)
    until_sync(gone)


def test_an_exception_in_the_embedding_program(tmp_path: Path) -> None:
    """A program that ends by an exception beside its job leaves nothing of it."""
    code = EMBEDDING.replace("    await task\n", """
    while not os.path.exists(os.environ["NOTES"] + "/0"):
        await asyncio.sleep(0.01)
    raise SystemExit(5)
""")  # fmt: skip
    for loop in ("asyncio", "uvloop"):
        folder = tmp_path / loop
        folder.mkdir()
        with running([sys.executable, "-c", code, loop, "1", *noting()],
                     env={"NOTES": str(folder)}) as program:  # fmt: skip
            assert program.wait() == 5
        assert gone()
