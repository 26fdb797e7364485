"""`aio-elastic jobs` and `aio-elastic gc`, and the errors of all commands that ask a store."""

from __future__ import annotations

import asyncio
import json
import sys
import time

import pytest

from elastic_aio.cli import main
from elastic_aio.discovery.runs import enter_run, restore_end, run_store
from elastic_aio.outcome import JobOutcome, JobState
from elastic_aio.store import StoreServer, connect

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


async def run(*arguments: str) -> list[str]:
    """Run a sub-command that succeeds; return its lines."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "elastic_aio", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    return out.decode().splitlines()


@pytest.mark.slow
async def test_a_table_and_lines_of_json() -> None:
    async with StoreServer("127.0.0.1") as server:
        at = ["--rdzv-endpoint", server.endpoint]
        assert await run("jobs", *at) == ["no job is at this store"]
        await end_job(server.endpoint, "old\n", 3 * HOUR)
        await end_job(server.endpoint, "mine", None)
        header, ended, lost = await run("jobs", *at)
        assert header.split() == ["RUN", "STATE", "NODES", "SINCE"]
        assert ended.split()[:3] == ["old", "failed", "0"]
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
