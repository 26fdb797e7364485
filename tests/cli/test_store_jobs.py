"""`aio-elastic events`, `jobs` and `gc`: the commands that ask a store, and their errors."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest

from elastic_aio import Event, JobFinished, WorkerStarted
from elastic_aio.cli import main
from elastic_aio.discovery.runs import enter_run, restore_end, run_store
from elastic_aio.outcome import JobOutcome, JobState
from elastic_aio.rendezvous.event_stream import EventStreamWriter
from elastic_aio.spec.tls import TlsSpec
from elastic_aio.store import StoreServer, connect
from tests.support.certificates import Authority
from tests.support.children import until
from tests.support.cli import CLI, Ended, Running, run_beside, run_program, running
from tests.support.sockets import free_port

HOUR = 3600.0


async def end_job(endpoint: str, run_id: str, seconds_ago: float | None) -> None:
    """Leave a job that has ended so long ago; None: one without an end."""
    async with connect(endpoint) as store:
        entry = await enter_run(store, run_id, job=run_id, reuse=False)
        assert entry is not None
        record, _ = entry
        if seconds_ago is not None:
            outcome = JobOutcome(JobState.FAILED, "rank 1 failed", 3, 0)
            await restore_end(run_store(store, run_id, record), outcome, time.time() - seconds_ago)


async def run(*words: str) -> list[str]:
    """Run a sub-command that succeeds; return its lines."""
    ended = await run_beside(*words)
    assert (ended.code, ended.err) == (0, "")
    return ended.out.splitlines()


@pytest.mark.slow
async def test_a_table_and_lines_of_json() -> None:
    async with StoreServer("127.0.0.1") as server:
        at = ["--rdzv-endpoint", server.endpoint]
        assert await run("jobs", *at) == ["no job is at this store"]
        await end_job(server.endpoint, "old\n", 3 * HOUR)
        await end_job(server.endpoint, "mine", None)
        header, ended, lost = await run("jobs", *at)
        assert header.split() == ["RUN", "STATE", "NODES", "SINCE"]
        assert ended.split()[:3] == ["old", "failed", "-"]
        assert ended.endswith("(3 hours ago)")
        assert lost.split()[:3] == ["mine", "lost", "0"]
        first, second = map(json.loads, await run("jobs", "--json", *at))
        assert (first["run_id"], first["state"], first["exit_code"]) == ("old\n", "failed", 3)
        assert (second["run_id"], second["nodes"], second["ended_at"]) == ("mine", [], None)


@pytest.mark.slow
async def test_what_is_over_is_removed() -> None:
    """A dry run says what would be; recent ends and lost jobs are kept by default."""
    async with StoreServer("127.0.0.1") as server:
        at = ["--rdzv-endpoint", server.endpoint]
        for run_id, ago in (("old", 2 * HOUR), ("late", 60.0), ("gone", None)):
            await end_job(server.endpoint, run_id, ago)
        would = ["would remove old: failed, 2 hours ago"]
        assert await run("gc", "--dry-run", *at) == would
        assert await run("gc", *at) == ["removed old: failed, 2 hours ago"]
        kept = "kept: 1 lost job (--lost), 1 job of the last 600 s (--older-than)"
        assert await run("gc", *at) == [f"nothing to remove; {kept}"]
        late, gone = await run("gc", "--older-than", "0", "--lost", *at)
        assert late == "removed late: failed, 1 minute ago"
        assert gone.startswith("removed gone: lost, ")
        assert await run("jobs", *at) == ["no job is at this store"]
        assert await run("jobs", "--json", *at) == []


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


async def write(
    server: StoreServer, *events: Event, token: str | None = None, tls: TlsSpec | None = None
) -> None:
    async with connect(server.endpoint, token=token, tls=tls) as store:
        entry = await enter_run(store, "mine", job="j", reuse=False)
        assert entry is not None
        record, _ = entry
        await EventStreamWriter(run_store(store, "mine", record)).write(events)


@contextmanager
def following(endpoint: str, *options: str) -> Iterator[Running]:
    """Run `aio-elastic events` while the block is open."""
    with running([*CLI, "events", "--rdzv-endpoint", endpoint, *options]) as program:
        yield program


@pytest.mark.slow
async def test_events_are_printed_to_the_end_of_the_job() -> None:
    """Each event is a line as it happens; the exit code is 0 when the job has finished."""
    async with StoreServer("127.0.0.1") as server:
        with following(server.endpoint, "--rdzv_id=mine") as program:
            waiting = "aio-elastic events: no events of run 'mine' yet: waiting\n"
            await until(lambda: program.err == waiting)
            await write(server, WORKER)
            first = f"{at(NOW)}  box: rank 1 started (pid 7)\n"
            await until(lambda: program.out == first)
            await write(server, DONE)
            ended = await asyncio.to_thread(program.ended)
    last = f"{at(NOW + 1)}  box: job succeeded after 1 s: done\n"
    assert ended == Ended(0, first + last, waiting)


@pytest.mark.slow
async def test_lines_of_json_from_a_cursor(tmp_path: Path) -> None:
    """`--json --after 0` starts at the second event; the token comes from a file."""
    token = tmp_path / "token"
    token.write_text("secret-of-this-test\n")
    async with StoreServer("127.0.0.1", token="secret-of-this-test") as server:
        await write(server, WORKER, WORKER, DONE, token="secret-of-this-test")
        words = ["events", "--rdzv-endpoint", server.endpoint, "--rdzv-id", "mine"]
        lines = await run(*words, "--token-file", str(token), "--json", "--after", "0")
        refused = await run_beside(*words)
    assert refused == Ended(1, "", "aio-elastic events: the store asks for a token\n")
    events = [json.loads(line) for line in lines]
    assert [event["event"] for event in events] == ["WorkerStarted", "JobFinished"]
    assert [event["seq"] for event in events] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("backend", [[], ["--rdzv-backend=c10d"], ["--rdzv-backend=tcp"]])
async def test_the_options_of_a_run_can_be_pasted(
    tmp_path: Path, authority: Authority, backend: list[str]
) -> None:
    """Those of a node that may serve the store; an option of the command itself comes first."""
    (tmp_path / "token").write_text("secret-of-this-test\n")
    (tmp_path / "wrong").write_text("secret-of-no-test\n")
    tls = authority.issue()
    conf = f"token_file={tmp_path}/token,tls_cert={tls.cert},tls_key={tls.key},tls_ca={tls.ca}"
    pasted = [*backend, f"--rdzv-conf={conf},is_host=true,join_timeout=60"]
    async with StoreServer("127.0.0.1", token="secret-of-this-test", tls=tls) as server:
        pasted.append(f"--rdzv-endpoint={server.endpoint}")
        await write(server, WORKER, DONE, token="secret-of-this-test", tls=tls)
        assert "mine" in (await run("jobs", *pasted))[1]
        assert "nothing to remove" in (await run("gc", *pasted))[0]
        assert len(await run("events", *pasted, "--rdzv-id=mine")) == 2
        refused = await run_beside("jobs", *pasted, f"--token-file={tmp_path}/wrong")
    assert refused.code == 1
    assert "token" in refused.err


@pytest.mark.slow
async def test_an_unknown_key_is_reported() -> None:
    async with StoreServer("127.0.0.1") as server:
        ended = await run_beside(
            "jobs", f"--rdzv-endpoint={server.endpoint}", "--rdzv-conf=join_timout=9"
        )
    problem = "--rdzv-conf: 'join_timout' is unknown and has no effect; did you mean join_timeout?"
    assert (ended.code, ended.err) == (0, f"aio-elastic jobs: {problem}\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_it_quietly(number: int) -> None:
    """No traceback is printed."""
    async with StoreServer("127.0.0.1") as server:
        await write(server, WORKER)
        with following(server.endpoint, "--rdzv-id=mine") as program:
            await until(lambda: program.out)
            program.send(number)
            ended = await asyncio.to_thread(program.ended)
    assert (ended.code, ended.out.count("\n"), ended.err) == (128 + number, 1, "")


@pytest.mark.slow
async def test_a_closed_pipe_ends_it_quietly() -> None:
    """`aio-elastic events ... | head -1` prints no error."""
    script = '"$@" | head -1; echo ${PIPESTATUS[0]}'
    async with StoreServer("127.0.0.1") as server:
        await write(server, WORKER)
        words = [*CLI, "events", "--rdzv-endpoint", server.endpoint, "--rdzv-id", "mine"]
        argv = ["bash", "-c", script, "bash", *words]
        # Only a write after the exit of `head` fails, so events are written until then.
        ending = asyncio.ensure_future(asyncio.to_thread(run_program, argv))
        while not ending.done():
            await write(server, WORKER)
        ended = await ending
    assert ended == Ended(0, f"{at(NOW)}  box: rank 1 started (pid 7)\n141\n", "")


@pytest.mark.slow
def test_a_search_for_a_store_is_reported() -> None:
    """Long before it ends."""
    endpoint = f"127.0.0.1:{free_port()}"
    with following(endpoint, "--timeout", "300") as program:
        program.wait_err("\n")
        assert program.err == (
            f"aio-elastic events: no store answers yet at {endpoint}, the search takes up to 300 s"
            " (--timeout)\n"
        )
        program.send(signal.SIGINT)
        assert program.wait() == 130


# ------------------------------------------------------------------ mistakes


COMMANDS = ("events", "jobs", "gc")
NO_STORE = "at 127.0.0.1:1 within 0.2 s: 127.0.0.1:1: connection refused"
AT_TWO = "at 127.0.0.1:1, 127.0.0.1:2 within 0.2 s: 127.0.0.1:1: connection refused"
AT_ONE = ["--rdzv-endpoint=127.0.0.1:1", "--timeout=0.2"]
OF_ALL = [
    (["--bogus"], 2, "unrecognized arguments: --bogus"),
    (["--rdzv-endpoint", "a:99999"], 2, "--rdzv-endpoint: must have a port from 0 to 65535"),
    (["--rdzv-endpoint", "a:0"], 2, "--rdzv-endpoint: needs a port other than 0"),
    (["--rdzv-endpoint", "http://a:1"], 2, "or HOST, without a scheme (got 'http://a:1')"),
    (["--timeout", "0"], 2, "--timeout: must be a number of seconds above 0 (got '0'"),
    (
        ["--rdzv-backend=reddis", "--rdzv-endpoint=a"],
        2,
        "--rdzv-backend: must be one of: c10d, etcd, ",
    ),
    (["--rdzv-backend=etcd", "--rdzv-conf=retention=1"], 2, "retention: must be"),
    ([*AT_ONE, "--rdzv-conf=token_file=/no"], 2, "--rdzv-conf: token_file: must be a file that"),
    ([*AT_ONE, "--rdzv-conf=tls_ca=/no"], 2, "--rdzv-conf: tls_ca: must be a file that can"),
    (["--token-file=/no/such"], 2, "--token-file: must be a file that can be read: no such file"),
    (["--token-file=/dev/null"], 2, "--token-file: must not be an empty file (got '/dev/null')"),
    (AT_ONE, 1, f"no store {NO_STORE}"),
    (["--rdzv-endpoint=127.0.0.1:1,127.0.0.1:2", "--timeout=0.2"], 1, f"no store {AT_TWO}"),
    (["--rdzv-backend=etcd", *AT_ONE], 1, f"no etcd {NO_STORE}"),
    (["--rdzv-backend=redis", *AT_ONE], 1, f"no redis {NO_STORE}"),
]
OF_ONE = [
    ("events", ["--rdzv-id", ""], 2, "--rdzv-id: must not be empty"),
    ("events", ["--after", "x"], 2, "--after: must be the number of an event (got 'x'"),
    ("events", ["--after=-2"], 2, "--after: must be the number of an event (got '-2'"),
    ("gc", ["--older-than", "x"], 2, "--older-than: must be a number of seconds of at least 0"),
]


@pytest.mark.parametrize(
    ("command", "arguments", "code", "problem"),
    [*((command, *row) for row in OF_ALL for command in COMMANDS), *OF_ONE],
)
def test_errors_are_one_line(
    command: str, arguments: list[str], code: int, problem: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Never a traceback; 2 for what cannot be accepted, 1 when there is no store."""
    assert main([command, *arguments]) == code
    captured = capfd.readouterr()
    assert captured.err.startswith(f"aio-elastic {command}: ")
    assert problem in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    """All options are listed."""
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    shown = " ".join(capfd.readouterr().out.split())
    own = {"events": "--rdzv-id --after", "jobs": "", "gc": "--older-than --lost --dry-run"}
    for option in ("--rdzv-endpoint", "--token-file", "--json", *own[command].split()):
        assert option in shown
    if command != "events":
        assert "seconds to search for a store (default 5)" in shown
