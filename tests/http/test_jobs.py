"""All jobs of a user on a host behind one port: seen as they come, asked while they run, and after.

Most tests run agents in the event loop of the server; a launcher that is suspended or killed is a
process.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from elastic_aio import Agent, Event, LaunchSpec, RunRecorder, SpecError, launch
from elastic_aio.control.sockets import CONTROL_DIR, SOCKET_SUFFIX
from elastic_aio.http import jobs as jobs_module
from elastic_aio.http.app import JOB_PAGE
from elastic_aio.http.jobs import ENDED_MAX, JOBS_PAGE, HostJobs, JobsServer
from elastic_aio.record import JobRecord
from tests.support.children import DEADLINE_S, SLEEPER, shell, until, until_ready
from tests.support.cli import CLI, run_beside, run_program, running, running_cli
from tests.support.control import own_control_dir, sockets
from tests.support.sockets import free_port

pytestmark = pytest.mark.both_loops


@pytest.fixture(autouse=True)
def directory() -> Iterator[Path]:
    with own_control_dir() as path:
        yield path


class Client:
    """Asks a server, which may answer while jobs of the same event loop run."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def get(self, path: str, **headers: str) -> httpx.Response:
        return await self._client.get(path, headers=headers)

    async def jobs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self.get("/jobs")).json()["jobs"]
        return found

    async def only(self) -> dict[str, Any]:
        (job,) = await self.jobs()
        return job

    async def until(self, **values: object) -> dict[str, Any]:
        """Wait until the only job has these values; each change of the list is looked at."""
        async with asyncio.timeout(DEADLINE_S), self._client.stream("GET", "/changes") as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: "):
                    for job in await self.jobs():
                        if values.items() <= job.items():
                            return job
        raise AssertionError("the stream has ended")

    async def events(self, name: str) -> list[str]:
        """Return the kinds of the events of a run that has ended."""
        lines = (await self.get(f"/jobs/{name}/events")).text.splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [json.loads(line)["event"] for line in data]


@asynccontextmanager
async def serving(**options: float) -> AsyncIterator[Client]:
    async with (
        JobsServer("127.0.0.1:0", **options) as server,
        httpx.AsyncClient(base_url=f"http://{server.address}", timeout=DEADLINE_S) as client,
    ):
        yield Client(client)


def agent(run_id: str = "r", argv: list[str] = SLEEPER, **settings: Any) -> Agent:
    return Agent(LaunchSpec(argv, run_id=run_id, **settings), control=True)


async def test_a_job_is_seen_when_it_begins_and_shown_after_its_end(directory: Path) -> None:
    """There is no directory of sockets before the first job."""
    directory.rmdir()
    async with serving() as client:
        assert await client.jobs() == []
        async with agent() as job:
            await until_ready(job)
            shown = await client.until(phase="running")
            assert (shown["run_id"], shown["pid"], shown["answers"]) == ("r", os.getpid(), True)
            assert (shown["running"], shown["workers"], shown["ended_at"]) == (1, 1, None)
        shown = await client.until(answers=False)
        assert (shown["phase"], shown["exit_code"]) == ("stopped", 143)
        assert shown["ended_at"] > shown["started_at"]
        assert sockets(directory) == []
        assert (await client.events("r"))[-1] == "JobFinished"
        assert (await client.get("/jobs/r/status")).json()["phase"] == "stopped"


async def test_a_run_id_that_is_not_utf_8() -> None:
    """The list has it as it is; an address has it escaped, as people read it."""
    async with serving() as client, agent("run \udcff") as job:
        await until_ready(job)
        assert (await client.until(phase="running"))["run_id"] == "run \udcff"
        page = await client.get("/jobs/run%20%5Cudcff/status")
        assert page.json()["run_id"] == "run \udcff"
        assert r'run_id="run \\udcff"' in (await client.get("/metrics")).text


async def test_the_pages_of_a_job() -> None:
    """By its place in the list, the pid of its launcher, and its id; they are those of `--http`."""
    async with serving() as client, agent("my run", nproc_per_node=2) as job:
        await until_ready(job)
        name = (await client.until(phase="running"))["name"]
        assert name == f"{os.getpid()}-{name.partition('-')[2]}"
        for path in name, str(os.getpid()), "my%20run":
            assert (await client.get(f"/jobs/{path}/readyz")).text == "running\n"
        status = (await client.get(f"/jobs/{name}/status")).json()
        assert {one["rank"]: one["pid"] for one in status["workers"]} == job.pids()
        assert all(one["usage"]["max_rss_bytes"] > 0 for one in status["workers"])
        page = await client.get(f"/jobs/{name}/")
        assert "EventSource(`events?" in page.text
        assert page.headers["content-security-policy"].startswith("default-src 'none'; ")
        answer = await client.get("/jobs/my%20run")
        assert (answer.status_code, answer.headers["location"]) == (307, "my%20run/")
        assert (await client.get(f"/jobs/{name}/no")).text.startswith("the pages are /  /healthz")


async def test_the_log_of_a_captured_stream(tmp_path: Path) -> None:
    """Its file is made for the reader."""
    async with serving() as client, agent(argv=shell("exec sleep 99")) as job:
        await until_ready(job)
        await client.until(phase="running")
        answer = await client.get("/jobs/r/logs/0/stderr")
        assert (answer.status_code, answer.text) == (200, "")
        assert (await client.get("/jobs/r/logs/1/stderr")).status_code == 404


async def test_other_pages() -> None:
    async with serving() as client:
        assert (await client.get("/healthz")).text == "serving\n"
        page = await client.get("/")
        assert page.headers["content-security-policy"].startswith("default-src 'none'; ")
        assert "innerHTML" not in page.text
        assert "http://" not in page.text
        for path in "/no", "/jobs/x/status", "/jobs/../status", "/jobs/%2E%2E/":
            assert (await client.get(path)).status_code == 404
        answer = await client.get("/jobs", Host="evil.example")
        assert answer.status_code == 403
        answer = await client._client.post("/jobs/x/")
        assert (answer.status_code, answer.text) == (404, "no such job: see /jobs\n")
        answer = await client._client.post("/jobs")
        assert (answer.status_code, answer.text) == (405, "all pages are read-only\n")


async def test_one_exposition_has_the_metrics_of_all_jobs() -> None:
    async with serving() as client, agent("a") as one, agent('b"\\') as other:
        for job in one, other:
            await until_ready(job)
        for run_id in "a", 'b"\\':
            await client.until(run_id=run_id, phase="running")
        text = (await client.get("/metrics")).text
    families = list(text_string_to_metric_families(text))  # type: ignore[no-untyped-call]
    assert len({family.name for family in families}) == len(families)
    values = {family.name: family.samples for family in families}
    for name in "up", "workers", "goodput_seconds", "worker_resident_memory_bytes":
        found = {sample.labels["run_id"] for sample in values[f"elastic_aio_{name}"]}
        assert found == {"a", 'b"\\'}
    assert {sample.value for sample in values["elastic_aio_up"]} == {1}


async def test_an_idle_server_does_not_wake_up() -> None:
    """A client waits for changes, and a job is followed."""
    async with serving() as client, agent() as job:
        await until_ready(job)
        await client.until(phase="running")
        async with client._client.stream("GET", "/changes") as stream:
            await anext(stream.aiter_lines())
            # The loop gives up the processor once for each time it waits.
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
            await asyncio.sleep(0.3)
            assert resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before < 5


async def test_a_directory_of_sockets_that_was_removed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made anew, and watched."""
    monkeypatch.setattr(jobs_module, "_REMADE_S", 0.01)
    async with serving() as client:
        shutil.rmtree(directory)
        await until(directory.exists)
        async with agent() as job:
            await until_ready(job)
            assert (await client.until(phase="running"))["answers"]


async def test_a_socket_that_was_made_anew_is_no_second_job(directory: Path) -> None:
    async with serving() as client, agent() as job:
        await until_ready(job)
        first = (await client.until(phase="running"))["name"]
        server = job._control
        assert server is not None
        server.close()
        server.open()
        await client.until(phase="running", name=sockets(directory)[0].removesuffix(SOCKET_SUFFIX))
        assert (await client.only())["name"] != first


@pytest.mark.parametrize("answer", [b"", b"\xff\xfe\n", b'{"reply":"event","event":{}}\n' * 3])
async def test_a_socket_of_another_program(directory: Path, answer: bytes) -> None:
    """It is no job, and disturbs none."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        writer.close()

    other = await asyncio.start_unix_server(serve, directory / f"1-a{SOCKET_SUFFIX}")
    async with other, serving() as client, agent() as job:
        await until_ready(job)
        await client.until(phase="running", run_id="r", answers=True)
        names = [row["run_id"] for row in await client.jobs() if row["started_at"]]
        assert names == ["r"]
        assert "elastic_aio_up{" in (await client.get("/metrics")).text


async def test_a_job_that_too_many_clients_follow_is_looked_at_again() -> None:
    """At the next question: a notice of a change would be the cause of the next one."""
    jobs = HostJobs()
    async with agent() as job:
        await until_ready(job)
        assert job._control is not None
        job._control._waiting_max = 0
        jobs.open()
        for _ in range(3):
            await until(lambda: not jobs._tasks)
            assert (jobs._runs, jobs.changes.count) == ({}, 0)
            await jobs.rows()
        job._control._waiting_max = 1
        await until(lambda: not jobs._tasks)
        await jobs.rows()
        await until(lambda: any(run.known().phase == "running" for run in jobs._runs.values()))
        await jobs.aclose()


async def test_few_jobs_that_have_ended_are_kept() -> None:
    async with serving() as client:
        for number in range(ENDED_MAX + 2):
            async with agent(str(number), ["true"]) as job:
                await job.wait()
            await client.until(run_id=str(number), phase="succeeded")
        rows = await client.jobs()
        assert [int(row["run_id"]) for row in rows] == [*range(ENDED_MAX + 1, 1, -1)]


async def test_streams_end_with_the_server() -> None:
    async with agent() as job:
        await until_ready(job)
        streams = {}
        async with JobsServer("127.0.0.1:0") as server:
            host, _, port = server.address.rpartition(":")
            for path in "/changes", f"/jobs/{os.getpid()}/events":
                reader, writer = streams[path] = await asyncio.open_connection(host, int(port))
                writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                await reader.readuntil(b"data: ")
        for reader, writer in streams.values():
            assert (await reader.read()).endswith(b"\r\n0\r\n\r\n")  # the last chunk
            writer.close()


async def test_a_cancelled_start_leaves_nothing() -> None:
    """At each point; nor does an end that is cancelled."""
    for page in JOB_PAGE, JOBS_PAGE:
        await page.load()
    async with agent() as job:
        await until_ready(job)
        for turns in range(40):
            server = JobsServer("127.0.0.1:0")
            starting = asyncio.ensure_future(server.__aenter__())
            for _ in range(turns):
                await asyncio.sleep(0)
            starting.cancel()
            await asyncio.wait([starting])
            if not starting.cancelled():
                ending = asyncio.ensure_future(server.__aexit__(None, None, None))
                await asyncio.sleep(0)
                ending.cancel()
                await asyncio.wait([ending])


@pytest.mark.e2e
async def test_launchers_that_are_suspended_or_killed(directory: Path) -> None:
    """They delay no other job; each says so, and what was known can still be read."""
    async with serving() as client, agent("good") as good:
        with (
            running_cli("--rdzv-id=held", "--no-python", *SLEEPER) as held,
            running_cli("--rdzv-id=dead", "--no-python", *SLEEPER) as dead,
        ):
            await until_ready(good)
            for run_id in "held", "dead":
                await client.until(run_id=run_id, phase="running", answers=True)
            held.send(signal.SIGSTOP)
            dead.send(signal.SIGKILL)
            row = await client.until(run_id="dead", phase="failed")
            assert (row["exit_code"], row["reason"]) == (
                None,
                "the launcher was killed, or is lost",
            )
            assert row["ended_at"] is not None
            rows = {one["run_id"]: one for one in await client.jobs()}
            assert {name: one["answers"] for name, one in rows.items()} == {
                "good": True, "held": False, "dead": False
            }  # fmt: skip
            text = (await client.get("/metrics")).text
            assert f'elastic_aio_up{{run_id="held",pid="{held.pid}"}} 0\n' in text
            assert f'elastic_aio_up{{run_id="good",pid="{os.getpid()}"}} 1\n' in text
            answer = await client.get("/jobs/held/status")
            assert (answer.status_code, answer.json()["phase"]) == (503, "running")
            assert (await client.get("/jobs/held/healthz")).status_code == 503
            assert (await client.get("/jobs/dead/healthz")).text == "failed\n"
            assert (await client.get("/jobs/good/healthz")).text == "running\n"
            held.send(signal.SIGCONT)
            assert (await client.get("/jobs/held/healthz")).text == "running\n"
            held.send(signal.SIGTERM)
            held.wait()


@pytest.mark.e2e
async def test_a_launcher_that_was_suspended_before(directory: Path) -> None:
    """It is listed by its pid, and followed when it goes on."""
    with running_cli("--rdzv-id=held", "--no-python", *SLEEPER) as held:
        await until(lambda: [name for name in sockets(directory) if name[0] != "."])
        held.send(signal.SIGSTOP)
        async with serving() as client:
            row = await client.only()
            assert (row["pid"], row["answers"], row["ended_at"]) == (held.pid, False, None)
            held.send(signal.SIGCONT)
            await client.until(run_id="held", phase="running", answers=True)
        held.send(signal.SIGTERM)
        held.wait()


@pytest.mark.e2e
async def test_runs_that_ended_before(tmp_path: Path) -> None:
    """From their records, with their events and the last log lines."""
    script = tmp_path / "worker.py"
    script.write_text("import sys; sys.exit('<b>no</b>')")
    options = ["--rdzv-id=past", "--redirects=3", f"--log-dir={tmp_path / 'logs'}", str(script)]
    assert (await run_beside("run", *options)).code == 1
    async with serving() as client:
        row = await client.only()
        assert (row["run_id"], row["phase"], row["exit_code"]) == ("past", "failed", 1)
        assert (await client.events("past"))[-1] == "JobFinished"
        assert (await client.events(row["name"]))[0] == "JobStarted"
        assert (await client.get("/jobs/past/status")).json()["phase"] == "failed"
        assert (await client.get("/jobs/past/logs/0/stderr")).text == "<b>no</b>\n"
        shutil.rmtree(tmp_path / "logs")
        shutil.rmtree(Path(os.environ["XDG_STATE_HOME"]) / "elastic_aio")
        assert await client.jobs() == []


async def test_a_disk_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with RunRecorder() as recorder:
        await launch(LaunchSpec(["true"], run_id="past"), listeners=[recorder])
    answers, read = threading.Event(), JobRecord.events

    def events(run: JobRecord) -> list[Event]:
        assert answers.wait(DEADLINE_S)
        return read(run)

    monkeypatch.setattr(JobRecord, "events", events)
    monkeypatch.setattr(jobs_module, "_RECORDS_S", 0.3)
    async with serving() as client:
        silent = await client.get("/jobs/past/status")
        assert (silent.status_code, silent.text) == (503, "the disk does not answer\n")
        assert (await client.only())["run_id"] == "past"
        answers.set()
        assert (await client.events("past"))[-1] == "JobFinished"


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command(number: int, directory: Path) -> None:
    """It needs no job, and a signal ends it."""
    with running([*CLI, "serve", "--http", "127.0.0.1:0"]) as server:
        url = server.wait_out(r"^serving the jobs of this host at (http://127.0.0.1:\d+/)$")[1]
        assert httpx.get(f"{url}jobs").json() == {"jobs": []}
        with httpx.stream("GET", f"{url}changes") as stream:
            assert next(stream.iter_lines()) == "retry: 2000"
            server.send(number)
            assert server.wait() == 0
        assert server.err == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--http=9000"], "--http: must be HOST:PORT or [IPV6]:PORT (got '9000')"),
        (["--htp=x"], "unrecognized arguments: --htp=x; did you mean --http?"),
        (["x"], "unrecognized arguments: x"),
    ],
)
def test_mistakes(options: list[str], problem: str) -> None:
    ended = run_program([*CLI, "serve", *options])
    assert (ended.code, ended.errors) == (2, [f"aio-elastic serve: {problem}"])


@pytest.mark.slow
def test_a_port_in_use_or_a_missing_extra_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = run_program([*CLI, "serve", f"--http={address}"])
    line = f"aio-elastic serve: --http: cannot listen: address already in use (got '{address}')"
    assert (ended.code, ended.errors) == (2, [line])
    program = (
        "import sys; sys.modules['hypercorn'] = None; sys.argv[1:] = ['serve']\n"
        "from elastic_aio.cli import entry; sys.exit(entry())"
    )
    ended = run_program([sys.executable, "-c", program])
    line = "aio-elastic serve: --http: needs the extra http: pip install 'elastic_aio[http]'"
    assert (ended.code, ended.errors) == (2, [f"{line} (got 'localhost:9000')"])


async def test_an_address_that_cannot_be_used_leaves_nothing(directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SpecError, match="address: cannot listen: address already in use"):
            await JobsServer(address).__aenter__()
    assert os.environ[CONTROL_DIR] == str(directory)
