"""`aio-elastic events` as a process: its output, errors and exit codes."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from datetime import datetime
from pathlib import Path

import pytest

from elastic_aio import Event, JobFinished, JobState, WorkerStarted
from elastic_aio.discovery.runs import enter_run, run_store
from elastic_aio.rendezvous.event_stream import EventStreamWriter
from elastic_aio.store import StoreServer, connect
from tests.support.sockets import free_port

NOW = 1_700_000_000.5
WORKER = WorkerStarted(rank=1, local_rank=1, pid=7, node="box", time=NOW)
DONE = JobFinished(
    state=JobState.SUCCEEDED,
    why="done",
    exit_code=0,
    duration=1.0,
    restarts=0,
    node="box",
    time=NOW + 1,
)


def at(seconds: float) -> str:
    """Return Unix seconds as the command prints them: in local time."""
    return f"{datetime.fromtimestamp(int(seconds))}"  # noqa: DTZ006  # local time is meant


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "elastic_aio",
        "events",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def write(server: StoreServer, *events: Event, token: str | None = None) -> None:
    async with connect(server.endpoint, token=token) as store:
        entry = await enter_run(store, "mine", job="j", reuse=False)
        assert entry is not None
        record, _ = entry
        await EventStreamWriter(run_store(store, "mine", record)).write(events)


async def read_line(stream: asyncio.StreamReader | None) -> str:
    assert stream is not None
    async with asyncio.timeout(60):
        return (await stream.readline()).decode()


@pytest.mark.slow
async def test_events_are_printed_to_the_end_of_the_job() -> None:
    """Each event is a line as it happens; the exit code is 0 when the job has finished."""
    async with StoreServer("127.0.0.1") as server:
        process = await start("--rdzv-endpoint", server.endpoint, "--rdzv_id=mine")
        waiting = "aio-elastic events: no events of run 'mine' yet: waiting\n"
        assert await read_line(process.stderr) == waiting
        await write(server, WORKER)
        assert await read_line(process.stdout) == f"{at(NOW)}  box: rank 1 started (pid 7)\n"
        await write(server, DONE)
        out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert out.decode() == f"{at(NOW + 1)}  box: job succeeded after 1 s: done\n"


@pytest.mark.slow
async def test_lines_of_json_from_a_cursor(tmp_path: Path) -> None:
    """`--json --after 0` starts at the second event; the token comes from a file."""
    token = tmp_path / "token"
    token.write_text("secret-of-this-test\n")
    async with StoreServer("127.0.0.1", token="secret-of-this-test") as server:
        await write(server, WORKER, WORKER, DONE, token="secret-of-this-test")
        run = ["--rdzv-endpoint", server.endpoint, "--rdzv-id", "mine"]
        process = await start(*run, "--token-file", str(token), "--json", "--after", "0")
        out, err = await process.communicate()
        assert (process.returncode, err) == (0, b"")
        refused = await start(*run)
        _, err = await refused.communicate()
    assert (refused.returncode, err) == (1, b"aio-elastic events: the store asks for a token\n")
    events = [json.loads(line) for line in out.decode().splitlines()]
    assert [event["event"] for event in events] == ["WorkerStarted", "JobFinished"]
    assert [event["seq"] for event in events] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
async def test_a_signal_ends_it_quietly(number: int, code: int) -> None:
    """No traceback is printed."""
    async with StoreServer("127.0.0.1") as server:
        await write(server, WORKER)
        process = await start("--rdzv-endpoint", server.endpoint, "--rdzv-id", "mine")
        await read_line(process.stdout)
        process.send_signal(number)
        out, err = await process.communicate()
    assert (process.returncode, out, err) == (code, b"", b"")


@pytest.mark.slow
async def test_a_closed_pipe_ends_it_quietly() -> None:
    """`aio-elastic events ... | head -1` prints no error."""
    async with StoreServer("127.0.0.1") as server:
        await write(server, WORKER)
        process = await asyncio.create_subprocess_shell(
            f"{sys.executable} -m elastic_aio events --rdzv-endpoint {server.endpoint}"
            " --rdzv-id mine | head -1; echo ${PIPESTATUS[0]}",
            executable="/bin/bash",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        # Only a write after the exit of `head` fails, so events are written until then.
        ending = asyncio.ensure_future(process.communicate())
        while not ending.done():
            await write(server, WORKER)
        out, err = await ending
    line = f"{at(NOW)}  box: rank 1 started (pid 7)\n141\n"
    assert (out.decode(), err) == (line, b"")


@pytest.mark.slow
async def test_a_search_for_a_store_is_reported() -> None:
    """Long before it ends."""
    endpoint = f"127.0.0.1:{free_port()}"
    process = await start("--rdzv-endpoint", endpoint, "--timeout", "300")
    assert await read_line(process.stderr) == (
        f"aio-elastic events: no store answers yet at {endpoint}, the search takes up to 300 s"
        " (--timeout)\n"
    )
    process.send_signal(signal.SIGINT)
    assert await process.wait() == 130
