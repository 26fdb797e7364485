"""The client of control sockets in an event loop: what a program can ask of a job."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec import Raw

from elastic_aio import (
    Agent,
    JobFinished,
    JobStarted,
    LaunchSpec,
    SignalForwarded,
    WorkerStarted,
    event_to_json,
)
from elastic_aio.control import (
    AgentUnreachable,
    ControlError,
    DoneReply,
    EndReply,
    JobClient,
    JobNotFound,
    RunningJob,
    connect,
    list_jobs,
)
from elastic_aio.control.protocol import AcceptedReply, EventReply, encode
from elastic_aio.outcome import JobState
from tests.support.children import DEADLINE_S, SLEEPER, until, until_ready
from tests.support.cli import running_cli
from tests.support.control import own_control_dir, sockets
from tests.support.leaks import leaked_processes

pytestmark = pytest.mark.both_loops

COUNT = 20_000
"""Events of a long answer."""


@pytest.fixture(autouse=True)
def directory() -> Iterator[Path]:
    with own_control_dir() as path:
        yield path


@asynccontextmanager
async def job(run_id: str = "my-run", nproc: int = 2) -> AsyncIterator[Agent]:
    async with Agent(
        LaunchSpec(SLEEPER, nproc_per_node=nproc, run_id=run_id), control=True
    ) as agent:
        await until_ready(agent)
        yield agent


async def test_what_can_be_asked_of_a_job() -> None:
    async with job() as agent, connect("my-run") as client:
        status = await client.status()
        assert status.run_id == "my-run"
        assert all(worker.usage is not None for worker in status.workers)
        assert (await client.signal("SIGCONT", rank=1)).pids == (agent.pids()[1],)
        assert "rank 1" in (await client.dump()).text
        kinds = [type(event) async for event in client.events()]
        assert kinds[0] is JobStarted
        assert kinds.count(WorkerStarted) == 2
        assert await client.restart("new data") is True
        assert (await client.status(usage=False)).attempt == 1
        waiting = asyncio.ensure_future(client.wait())
        following = asyncio.ensure_future(anext(client.events(agent.status().seq, follow=True)))
        end = await client.stop("enough", signal="SIGINT")
        assert isinstance(end, EndReply)
        assert (end.state, end.exit_code) == (JobState.STOPPED, 130)
        assert end.why.startswith("enough, requested by ")
        assert await waiting == end
        assert "enough" in (await following).sentence


async def test_a_follower_sees_the_end_and_a_second_stop_changes_nothing() -> None:
    async with job(), connect() as client:
        assert await client.stop(wait=False) is None
        *_, last = [event async for event in client.events(follow=True)]
        assert isinstance(last, JobFinished)


async def test_which_job_is_meant() -> None:
    with pytest.raises(JobNotFound, match=r"^no job of this user runs on this host$"):
        async with connect():
            pass
    async with job("a", 1), job("b2", 1):
        found = [each.status.run_id for each in await list_jobs() if each.status]
        assert sorted(found) == ["a", "b2"]
        with pytest.raises(JobNotFound, match=r"^must be given, 2 jobs run here: "):
            async with connect():
                pass
        with pytest.raises(JobNotFound, match=r"^no such job; running here: .* \(got 'x'\)$"):
            async with connect("x"):
                pass
        with pytest.raises(JobNotFound, match=r"^must be a whole id or a pid; running here: "):
            async with connect("b"):
                pass
        async with connect("b2") as named, connect(named.job.path) as by_path:
            assert (await by_path.status()).run_id == "b2"


async def test_a_job_that_has_ended_is_not_found() -> None:
    """Unlike a job whose launcher was killed: that has left its socket."""
    async with job(), connect() as client:
        await client.stop()
        with pytest.raises(JobNotFound, match="the job has ended"):
            await client.status()


async def test_files_of_other_programs_stay(directory: Path) -> None:
    """A bound socket refuses until its program listens; what is left of a killed launcher goes."""
    (directory / "notes.sock").write_text("precious")
    (directory / "1-f.sock").write_text("precious")
    for name in ("other.sock", "1-e.sock", ".1-e.sock"):
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(directory / name))
    assert await list_jobs() == []
    for name in ("other.sock", "notes.sock", "none.sock"):
        with pytest.raises(JobNotFound, match=r"^no job is at this control socket \(got '.*'\)$"):
            async with connect(str(directory / name)):
                pass
    assert sockets(directory) == [".1-e.sock", "1-f.sock", "notes.sock", "other.sock"]


async def test_a_refusal_is_an_error() -> None:
    async with job(), connect() as client:
        with pytest.raises(ControlError, match=r"^rank: must be one of this node's running"):
            await client.signal(18, rank=9)


async def test_the_end_of_the_block_ends_what_still_waits(directory: Path) -> None:
    """The agent notices it too: a slot of its connections is free again."""
    async with job() as agent:
        async with connect() as client:
            waiting = asyncio.ensure_future(client.wait())
            await asyncio.sleep(0)
            events = client.events(follow=True)
            await anext(events)
        with pytest.raises(AgentUnreachable, match="the connection to the agent is lost"):
            await waiting
        with pytest.raises(AgentUnreachable):
            _ = [event async for event in events]
        assert agent.status().is_ready
        assert len(sockets(directory)) == 1


@pytest.fixture
def silent(directory: Path) -> Iterator[str]:
    """Listen as an agent that is suspended."""
    with socket.socket(socket.AF_UNIX) as listener:
        path = str(directory / f"{os.getpid()}-00000000.sock")
        listener.bind(path)
        listener.listen()
        yield path


async def test_an_agent_that_does_not_answer_is_given_up(silent: str) -> None:
    """Each request, within the limit; the job is not taken for gone."""
    async with connect(os.getpid(), timeout=0.1) as client:
        assert client.job.path == silent
        requests = [
            client.status(),
            client.stop(),
            client.stop(kill=True, wait=False),
            client.restart(),
            client.signal(10),
            client.dump(),
            client.wait(),
            anext(client.events(follow=True)),
            anext(client.events()),
        ]
        for request in requests:
            with pytest.raises(AgentUnreachable, match=r"^the agent does not answer: timed out$"):
                await request
        for _ in range(20):  # a timer may fire a little before its time
            with pytest.raises(TimeoutError, match="the job has not ended"):
                await client.wait(0.01)


async def test_a_job_that_ends_while_it_is_asked_has_ended(silent: str) -> None:
    """It has removed its socket when it breaks off: it is not one that does not answer."""
    async with connect(os.getpid(), timeout=0.1) as client:
        for request in (list_jobs, client.status, client.stop):
            with socket.socket(socket.AF_UNIX) as listener:
                os.unlink(silent)
                listener.bind(silent)
                listener.listen()
                listener.setblocking(False)
                asked = asyncio.ensure_future(request())
                loop = asyncio.get_running_loop()
                connection, _ = await loop.sock_accept(listener)
                assert await loop.sock_recv(connection, 1) == b"{"  # a part: the end is a reset
                os.rename(silent, f"{silent}.away")
                connection.close()
                if request == list_jobs:
                    assert await asked == []
                else:
                    with pytest.raises(JobNotFound, match="the job has ended"):
                        await asked
                os.rename(f"{silent}.away", silent)


async def test_the_last_answer_of_a_job_that_has_ended_may_be_none(silent: str) -> None:
    """The agent has read the request, and its job ends: the connection ends without a reset."""
    with socket.socket(socket.AF_UNIX) as listener:
        os.unlink(silent)
        listener.bind(silent)
        listener.listen()
        listener.setblocking(False)
        client = JobClient(RunningJob(silent, os.getpid(), None))
        asked = asyncio.ensure_future(client.dump())
        loop = asyncio.get_running_loop()
        connection, _ = await loop.sock_accept(listener)
        with connection:
            await loop.sock_recv(connection, 65536)
            connection.sendall(encode(AcceptedReply()))
            os.unlink(silent)
        with pytest.raises(JobNotFound, match="the job has ended"):
            await asked


async def test_a_long_answer_does_not_block_the_event_loop(directory: Path) -> None:
    """Other tasks have their turns while megabytes of events are read."""
    path, turns = str(directory / f"{os.getpid()}-00000000.sock"), 0
    line = encode(EventReply(Raw(event_to_json(SignalForwarded(attempt=0, signal=18, pids=(7,))))))

    def answer() -> None:
        with listener.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(encode(AcceptedReply()) + line * COUNT + encode(DoneReply()))

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        answering = asyncio.create_task(asyncio.to_thread(answer))
        others = asyncio.create_task(take_turns())
        count = run = longest = seen = 0
        async for _ in JobClient(RunningJob(path, os.getpid(), None)).events():
            count += 1
            run = run + 1 if turns == seen else 1
            longest, seen = max(longest, run), turns
        others.cancel()
        await answering
    assert count == COUNT
    assert longest <= 2 + (1 << 16) // len(line)


async def test_silent_agents_do_not_delay_each_other(silent: str) -> None:
    """All together have the patience."""
    async with job():
        found = await list_jobs(0.2)
        assert sorted(each.status is None for each in found) == [False, True]
        assert silent in [each.path for each in found if each.status is None]


@pytest.mark.e2e
async def test_a_follower_notices_that_the_launcher_was_killed() -> None:
    with running_cli("--no-python", "sleep", "600") as program:
        while not (found := await list_jobs()) or not found[0].status:
            await asyncio.sleep(0.01)
        async with connect(program.pid) as client:
            events = client.events(follow=True)
            await anext(events)
            waiting = asyncio.ensure_future(client.wait())
            os.kill(program.pid, signal.SIGKILL)
            async with asyncio.timeout(DEADLINE_S):
                with pytest.raises(AgentUnreachable):
                    _ = [event async for event in events]
                with pytest.raises(AgentUnreachable):
                    await waiting
        program.wait()
    await until(lambda: not leaked_processes())
