"""Random requests to launchers that cannot answer: each is answered or given up, none comes later.

`ELASTIC_AIO_FUZZ_SEED` sets the seed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from elastic_aio.control import AgentUnreachable, ControlError, JobClient, list_jobs
from elastic_aio.control.protocol import (
    AwaitEnd,
    ControlRequest,
    GetEvents,
    RestartJob,
    StopJob,
    encode,
)
from tests.support.children import DEADLINE_S, until
from tests.support.cli import Running, running
from tests.support.control import own_control_dir
from tests.support.leaks import leaked_processes

pytestmark = [pytest.mark.slow, pytest.mark.both_loops]

SEED = int(os.environ.get("ELASTIC_AIO_FUZZ_SEED", "1"))
COUNT = 50
"""Requests of each case, at once: a launcher serves 64 connections."""
LIMIT_S = 0.3

# SIGUSR1 blocks the event loop until a file appears; with an argument, no module loads later.
PROGRAM = """if True:
    import asyncio, os, signal, sys, time
    from elastic_aio import Agent, LaunchSpec, LogSpec, StopPlan
    from elastic_aio.agent import later
    directory, is_removed = sys.argv[1], sys.argv[2] == "removed"

    def block(*_):
        open(f"{directory}/busy", "w").close()
        while not os.path.exists(f"{directory}/go"):
            time.sleep(0.01)

    async def main():
        if is_removed:
            later.LATER.clear()
            for module in ("control.session", "watch.watchdog"):
                sys.modules[f"elastic_aio.{module}"] = None
        script = "trap '' USR1 TERM; echo > $READY; while :; do sleep 0.05; done"
        env = {"READY": f"{directory}/ready"}
        spec = LaunchSpec(["bash", "-c", script], env=env, stop=StopPlan.within(2))
        async with Agent(spec, control=True) as agent:
            signal.signal(signal.SIGUSR1, block)
            try:
                await agent.wait()
            except Exception as error:
                print(error)

    asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def directory() -> Iterator[Path]:
    with own_control_dir() as path:
        yield path


@asynccontextmanager
async def job(tmp_path: Path, kind: str = "") -> AsyncIterator[tuple[Running, JobClient]]:
    """Run a job that ignores SIGTERM for two seconds; yield its launcher and a client."""
    with running([sys.executable, "-c", PROGRAM, str(tmp_path), kind]) as launcher:
        await until((tmp_path / "ready").exists)
        while not (found := await list_jobs()):
            await asyncio.sleep(0.01)  # its socket is made beside the workers
        yield launcher, JobClient(found[0], timeout=LIMIT_S)
    await until(lambda: not leaked_processes())


async def follow(client: JobClient, after: int) -> None:
    async for _ in client.events(after, follow=True):
        pass


async def list_events(client: JobClient, after: int = -1) -> list[str]:
    return [type(event).__name__ async for event in client.events(after)]


async def break_off(client: JobClient, choice: random.Random) -> None:
    """Send a part of a request, or all of it, and close the connection at once or later."""
    known: list[ControlRequest] = [StopJob(), RestartJob(), AwaitEnd(), GetEvents(follow=True)]
    request = choice.choice(known)
    line = encode(request)
    with socket.socket(socket.AF_UNIX) as sock, suppress(BrokenPipeError):
        sock.setblocking(False)
        sock.connect(client.job.path)
        parts = [line[:-1], line[: len(line) // 2], b"", b"\0\n"]
        sock.send(choice.choice([line, line * 3, choice.choice(parts)]))
        if choice.random() < 0.5:
            sock.shutdown(socket.SHUT_WR)
        await asyncio.sleep(choice.choice([0.0, 0.0, LIMIT_S]))


def requests(client: JobClient, choice: random.Random) -> list[Coroutine[Any, Any, Any]]:
    """Return random requests; of those that end the job, all that are given up."""
    makers: list[Callable[[], Coroutine[Any, Any, Any]]] = [
        lambda: client.status(),
        lambda: client.wait(LIMIT_S),
        lambda: client.dump("fuzz"),
        lambda: client.signal("SIGCONT"),
        lambda: client.restart("fuzz"),
        lambda: client.stop("fuzz", wait=choice.random() < 0.5),
        lambda: client.stop("fuzz", kill=True),
        lambda: list_events(client, choice.randrange(-1, 9)),
        lambda: follow(client, choice.randrange(-1, 9)),
        lambda: break_off(client, choice),
    ]
    breaks = [break_off(client, choice) for _ in range(COUNT // 5)]
    return breaks + [choice.choice(makers)() for _ in range(COUNT - len(breaks))]


async def outcomes(work: list[Coroutine[Any, Any, Any]]) -> list[object]:
    """Return what each request returns or raises; none may take for ever."""
    async with asyncio.timeout(DEADLINE_S):
        return [*await asyncio.gather(*work, return_exceptions=True)]


def kinds(found: list[object]) -> set[type]:
    return {type(one) for one in found if isinstance(one, BaseException)}


async def is_unchanged(client: JobClient) -> bool:
    """Return whether the job runs, and nothing has happened to it since it has begun."""
    client = JobClient(client.job, timeout=DEADLINE_S)
    names = await list_events(client)
    return (await client.status()).is_ready and names == ["JobStarted", "WorkerStarted"]


@pytest.mark.parametrize("state", ["suspended", "busy"])
async def test_a_launcher_that_does_not_read(tmp_path: Path, state: str) -> None:
    choice = random.Random(SEED)
    async with job(tmp_path) as (launcher, client):
        if state == "suspended":
            launcher.send(signal.SIGSTOP)
        else:
            launcher.send(signal.SIGUSR1)
            await until((tmp_path / "busy").exists)
        found = await outcomes(requests(client, choice))
        assert kinds(found) <= {AgentUnreachable, TimeoutError}
        assert sum(isinstance(one, AgentUnreachable) for one in found) > COUNT // 3
        (tmp_path / "go").touch()
        launcher.send(signal.SIGCONT)
        assert await is_unchanged(client)


async def test_a_launcher_that_ends(tmp_path: Path) -> None:
    """Its workers take their time; a later SIGKILL ends that."""
    choice = random.Random(SEED)
    async with job(tmp_path) as (launcher, client):
        assert await client.stop("first", wait=False) is None
        found = await outcomes(requests(client, choice))
        assert kinds(found) <= {AgentUnreachable, ControlError, TimeoutError}
        assert await asyncio.to_thread(launcher.wait) == 0
        assert "was stopped: first" in launcher.out


async def test_a_launcher_whose_package_was_removed(tmp_path: Path) -> None:
    """Before it could load what answers requests; it says so, and performs none."""
    choice = random.Random(SEED)
    async with job(tmp_path, "removed") as (launcher, client):
        found = await outcomes(requests(client, choice))
        assert kinds(found) == {ControlError}
        problems = {str(one) for one in found if isinstance(one, ControlError)}
        assert all(one.startswith("the request failed: ModuleNotFoundError(") for one in problems)
        assert launcher.process.poll() is None
        with pytest.raises(
            ControlError, match=rf"may have other jobs, .* \(kill -9 {launcher.pid} does"
        ):
            await client.kill_launcher()
