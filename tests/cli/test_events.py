"""`aio-elastic events` as users meet it."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest

from elastic_aio import Event, JobFinished, JobState, WorkerStarted
from elastic_aio.cli import main
from elastic_aio.rendezvous.stream import EventStream
from elastic_aio.store import StoreServer, connect

WORKER = WorkerStarted(rank=1, local_rank=1, pid=7, node="box")
DONE = JobFinished(
    state=JobState.SUCCEEDED, why="done", exit_code=0, duration=1.0, restarts=0, node="box"
)


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
        await EventStream(store.prefixed("elastic_aio/mine")).write(events)


async def line_of(stream: asyncio.StreamReader | None) -> str:
    assert stream is not None
    async with asyncio.timeout(60):
        return (await stream.readline()).decode()


async def test_a_job_is_told_to_its_end() -> None:
    """A line for each event as it happens, and 0 when the job has finished."""
    async with StoreServer("127.0.0.1") as server:
        process = await start("--rdzv-endpoint", server.endpoint, "--rdzv_id=mine")
        waiting = "aio-elastic events: nothing is known of a run 'mine' there yet: waiting\n"
        assert await line_of(process.stderr) == waiting
        await write(server, WORKER)
        assert await line_of(process.stdout) == "box: rank 1 started (pid 7)\n"
        await write(server, DONE)
        out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert out == b"box: the job has succeeded after 1 s: done\n"


async def test_lines_of_json_from_a_cursor(tmp_path: Path) -> None:
    """Each is an event as `event_to_json` writes it; the token is in a file."""
    token = tmp_path / "token"
    token.write_text("secret\n")
    async with StoreServer("127.0.0.1", token="secret") as server:
        await write(server, WORKER, WORKER, DONE, token="secret")
        place = ["--rdzv-endpoint", server.endpoint, "--rdzv-id", "mine"]
        process = await start(*place, "--token-file", str(token), "--json", "--after", "0")
        out, err = await process.communicate()
        assert (process.returncode, err) == (0, b"")
        refused = await start(*place)
        _, err = await refused.communicate()
    assert (refused.returncode, err) == (1, b"aio-elastic events: the store asks for a token\n")
    events = [json.loads(line) for line in out.decode().splitlines()]
    assert [event["event"] for event in events] == ["WorkerStarted", "JobFinished"]
    assert [event["seq"] for event in events] == [1, 2]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
async def test_a_signal_ends_it_quietly(number: int, code: int) -> None:
    """Ctrl-C leaves no traceback."""
    async with StoreServer("127.0.0.1") as server:
        await write(server, WORKER)
        process = await start("--rdzv-endpoint", server.endpoint, "--rdzv-id", "mine")
        await line_of(process.stdout)
        process.send_signal(number)
        out, err = await process.communicate()
    assert (process.returncode, out, err) == (code, b"", b"")


async def test_a_reader_that_has_seen_enough() -> None:
    """`aio-elastic events ... | head -1` ends without complaint."""
    async with StoreServer("127.0.0.1") as server:
        await write(server, WORKER)
        process = await asyncio.create_subprocess_shell(
            f"{sys.executable} -m elastic_aio events --rdzv-endpoint {server.endpoint}"
            " --rdzv-id mine | head -1; echo ${PIPESTATUS[0]}",
            executable="/bin/bash",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        # It finds out by a line that nobody reads, however late `head` begins.
        ending = asyncio.ensure_future(process.communicate())
        while not ending.done():
            await write(server, WORKER)
        out, err = await ending
    assert (out, err) == (b"box: rank 1 started (pid 7)\n141\n", b"")


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["--bogus"], 2, "unrecognized arguments: --bogus"),
        (["--rdzv-endpoint", "a:99999"], 2, "--rdzv-endpoint: must have a port from 0 to 65535"),
        (["--rdzv-id", ""], 2, "--rdzv-id: must not be empty"),
        (["--after", "x"], 2, "argument --after: must be the number of an event, not 'x'"),
        (["--after=-2"], 2, "argument --after: must be the number of an event, not '-2'"),
        (["--timeout", "0"], 2, "argument --timeout: must be a number of seconds, not '0'"),
        (["--token-file", "/no/such/file"], 2, "cannot read the token file '/no/such/file'"),
        (["--token-file", "/dev/null"], 2, "the token file '/dev/null' is empty"),
        (
            ["--rdzv-endpoint", "127.0.0.1:1,127.0.0.1:2", "--timeout", "0.2"],
            1,
            "no store at 127.0.0.1:1, 127.0.0.1:2 within 0.2 s",
        ),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], code: int, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Never a traceback; 2 for what cannot be accepted, 1 when there is no store."""
    assert main(["events", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.err.startswith("aio-elastic events: ")
    assert complaint in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """All options are listed."""
    with pytest.raises(SystemExit) as caught:
        main(["events", "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for option in ("--rdzv-endpoint", "--rdzv-id", "--token-file", "--json", "--after"):
        assert option in out
