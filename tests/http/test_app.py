"""The pages of a job as an ASGI app: what they say, alone and mounted in another app."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp

from elastic_aio import Agent, GroupSpec, JobState, LaunchSpec, LogSpec, event_from_json
from elastic_aio import events as all_events
from elastic_aio.agent.agent import driver_of
from elastic_aio.events import JobFinished, JobStarted, Restarting, WorkerStarted
from elastic_aio.http import app as app_module
from elastic_aio.http import status_app
from elastic_aio.http.app import LOG_MAX, READERS_MAX
from elastic_aio.http.server import ListenedJob
from elastic_aio.logs.trimmer import free_range
from elastic_aio.node_events import RoundForming
from tests.support.children import DEADLINE_S, SLEEPER, until, until_ready

STARTED = JobStarted(entrypoint="x", nproc_per_node=1, nnodes="1", max_restarts=0, agent_pid=1)


def client_of(app: ASGIApp) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


async def ask(app: ASGIApp, path: str) -> httpx.Response:
    async with client_of(app) as client:
        return await client.get(path)


def shown(log: str) -> Starlette:
    """The pages of a job of one worker, of rank 3, whose standard output is in a file."""
    job = ListenedJob()
    job.add(STARTED)
    job.add(WorkerStarted(seq=1, rank=3, local_rank=0, pid=1, stdout_path=log))
    return status_app(job)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/healthz", "text/plain; charset=utf-8"),
        ("/metrics", "application/openmetrics-text; version=1.0.0; charset=utf-8"),
        ("/status", "application/json"),
    ],
)
async def test_no_page_is_kept_or_taken_for_another_type(path: str, kind: str) -> None:
    answer = await ask(shown("/log"), path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == kind
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path", ["/no", "/healthz/", "/logs/3", "/logs//etc/passwd", "/logs/x/stdout", "/logs/3/x"]
)
async def test_an_unknown_page_names_the_known_ones(path: str) -> None:
    answer = await ask(shown("/log"), path)
    assert answer.status_code == 404
    assert answer.text == (
        "the pages are /  /healthz  /readyz  /metrics  /status  /events"
        "  /logs/[CHILD/]RANK/stdout|stderr\n"
    )


async def test_all_pages_are_read_only() -> None:
    async with client_of(shown("/log")) as client:
        answer = await client.post("/status")
        assert (answer.status_code, answer.text) == (405, "all pages are read-only\n")
        assert answer.headers["allow"] == "GET, HEAD"
        answer = await client.head("/events")
        assert (answer.status_code, answer.content) == (200, b"")


async def test_the_page_loads_nothing_from_elsewhere() -> None:
    answer = await ask(shown("/log"), "/")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; connect-src 'self';")
    assert answer.text.rstrip().endswith("</script>")
    assert "http://" not in answer.text
    assert "innerHTML" not in answer.text


async def test_logs(tmp_path: Path) -> None:
    """The last lines of the file of a rank; no path of a request is one of a file."""
    log = tmp_path / "stdout.log"
    log.write_text("".join(f"line {number}\n" for number in range(20_000)))
    app = shown(str(log))
    answer = await ask(app, "/logs/3/stdout")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.text.startswith("line ")
    assert answer.text.endswith("\nline 19999\n")
    assert LOG_MAX - 20 < len(answer.content) <= LOG_MAX
    log.unlink()
    for path, problem in {
        "/logs/7/stdout": "no worker of this node has rank 7; it has: 3",
        "/logs/3/stderr": "stderr of rank 3 is in no file (see --tee, --redirects)",
        "/logs/3/stdout": "nothing was written, or the log was removed",
    }.items():
        answer = await ask(app, path)
        assert (answer.status_code, answer.text) == (404, f"{problem}\n")


async def test_the_end_of_a_log_whose_beginning_was_freed(tmp_path: Path) -> None:
    """By rotation: what reads as zeros is left out."""
    log = tmp_path / "stdout.log"
    log.write_text("".join(f"line {number:05}\n" for number in range(1000)))
    with log.open("rb+") as file:
        free_range(file.fileno(), 0, 8192)
    answer = await ask(shown(str(log)), "/logs/3/stdout")
    assert answer.text.startswith("line 00745\nline 00746\n")


async def test_a_disk_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few threads wait for it; further requests are refused at once, and others answered."""
    answers, calls = threading.Event(), []

    def read_end(path: str, size: int) -> bytes:
        calls.append(path)
        assert answers.wait(DEADLINE_S)
        return f"the last {size} bytes of {path}".encode()

    monkeypatch.setattr(app_module, "read_end", read_end)
    app = shown("/log")
    waiting = [asyncio.ensure_future(ask(app, "/logs/3/stdout")) for _ in range(READERS_MAX)]
    await until(lambda: len(calls) == READERS_MAX)
    refused = await ask(app, "/logs/3/stdout")
    assert (refused.status_code, refused.text) == (503, "too many log files are being read\n")
    assert (await ask(app, "/healthz")).status_code == 200
    answers.set()
    for answer in await asyncio.gather(*waiting):
        assert answer.text == f"the last {LOG_MAX} bytes of /log"


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "elastic_aio.http.app")
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    with pytest.raises(ImportError, match=r"needs the extra http: pip install 'elastic_aio\[http"):
        importlib.import_module("elastic_aio.http.app")


async def test_the_program_of_the_guide() -> None:
    """It is served as an ASGI server does it."""
    guide = Path(__file__).parents[2] / "docs/guides/events.md"
    (source,) = re.findall(r"```python\n([^`]*status_app[^`]*)```", guide.read_text())
    program: dict[str, Any] = {}
    exec(source, program)
    agent, app = program["agent"], program["app"]
    async with app.router.lifespan_context(app):
        await until_ready(agent)
        answer = await ask(app, "/job/readyz")
        assert (answer.status_code, answer.text) == (200, "running\n")
    answer = await ask(app, "/job/readyz")
    assert (answer.status_code, answer.text) == (503, "stopped\n")


async def test_the_pages_of_an_agent_in_another_app() -> None:
    """Before its start, while it runs, and after its end; its own paths are relative."""
    agent = Agent(LaunchSpec(SLEEPER, nproc_per_node=2, run_id="r"))
    app = Starlette(routes=[Mount("/job", status_app(agent))])

    async def read(path: str) -> tuple[int, str]:
        answer = await ask(app, path)
        return answer.status_code, answer.text

    assert await read("/job/healthz") == (200, "starting\n")
    assert await read("/job/readyz") == (503, "starting\n")
    assert (await read("/job/events"))[0] == 503
    async with agent:
        await until_ready(agent)
        assert await read("/job/readyz") == (200, "running\n")
        status = json.loads((await read("/job/status"))[1])
        assert {one["rank"]: one["pid"] for one in status["workers"]} == agent.pids()
        assert all(one["usage"]["max_rss_bytes"] > 0 for one in status["workers"])
        assert "worker_cpu_seconds_total{" in (await read("/job/metrics"))[1]
        page = (await read("/job/"))[1]
        assert 'fetch("status"' in page
        assert "EventSource(`events?" in page
    assert await read("/job/healthz") == (503, "stopped\n")
    stream = (await read("/job/events"))[1]
    assert stream.startswith("retry: 2000\n\nid: 0\ndata: ")
    assert stream.count("\ndata: ") == agent.status().seq + 1
    async with client_of(app) as client:
        last = {"Last-Event-ID": str(agent.status().seq)}
        assert (await client.get("/job/events", headers=last)).status_code == 204


async def test_events_have_their_sentence_and_what_they_explain() -> None:
    """Beside their fields, none of which has such a name; also if a path is no text."""
    job = ListenedJob()
    why = "the limit \udcff"
    restarting = Restarting(seq=1, attempt=1, why=why, delay=0.0, restarts=1)
    finished = JobFinished(
        seq=3, state=JobState.FAILED, why=why, exit_code=1, duration=1.0, restarts=1
    )
    waiting = RoundForming(seq=2, round=0, joined=1, minimum=2, maximum=2)
    for event in STARTED, restarting, waiting, finished:
        job.add(event)
    answer = await ask(status_app(job), "/events")
    lines = re.findall("^data: (.*)$", answer.text, re.MULTILINE)
    found = [json.loads(line) for line in lines]
    assert [one["sentence"] for one in found][1] == "restarting as attempt 1: the limit \\udcff"
    assert found[1]["explanation"] == {
        "time": 0.0,
        "text": "attempt 1 follows",
        "rule": "the limit \\udcff",
        "evidence": ["1 restart so far"],
    }
    assert [(one["level"], one["is_wait"]) for one in found] == [
        (30, False), (30, False), (30, True), (20, False)
    ]  # fmt: skip
    assert event_from_json(lines[2]) == waiting
    added = {"sentence", "level", "explanation", "is_wait"}
    kinds = [getattr(all_events, name) for name in dir(all_events)]
    fields = {name for kind in kinds for name in getattr(kind, "__struct_fields__", ())}
    assert not added & fields


async def test_kept_events_leave_the_loop_to_others() -> None:
    """A new client of a long job is sent a thousand of them."""
    job = ListenedJob()
    for seq in range(1000):
        job.add(WorkerStarted(seq=seq, rank=3, local_rank=0, pid=1))
    job.add(
        JobFinished(
            seq=1000, state=JobState.SUCCEEDED, why="", exit_code=0, duration=1.0, restarts=0
        )
    )
    turns = 0
    loop = asyncio.get_running_loop()

    def note_turn() -> None:
        nonlocal turns
        turns += 1
        noting[0] = loop.call_soon(note_turn)

    noting = [loop.call_soon(note_turn)]
    answer = await ask(status_app(job), "/events")
    noting[0].cancel()
    assert answer.text.count("data: ") == 1001
    assert turns > 1000 / 50


async def test_the_pages_of_a_tree() -> None:
    """Status and metrics have the children, and a log page the path of the child."""
    say = ["sh", "-c", "echo I am $ROLE_NAME; exec sleep 99"]
    leaf = LaunchSpec(say, logs=LogSpec(redirects=3))
    async with Agent(GroupSpec({"a": leaf, "g": GroupSpec({"b": leaf})})) as agent:
        app = status_app(agent)
        await until_ready(agent)
        status = (await ask(app, "/status")).json()
        assert [child["child"] for child in status["children"]] == ["a", "g"]
        metrics = (await ask(app, "/metrics")).text
        assert 'elastic_aio_workers{child="g/b",state="running"} 1' in metrics
        assert 'elastic_aio_workers{child="a",state="running"} 1' in metrics
        await until(lambda: len([*driver_of(agent).logged]) == 4)
        answer = await ask(app, "/logs/g/b/0/stdout")
        while not answer.text:
            answer = await ask(app, "/logs/g/b/0/stdout")
        assert answer.text == "I am b\n"
        assert (await ask(app, "/logs/x/0/stdout")).status_code == 404
        answer = await ask(app, "/logs/0/stdout")
        assert (answer.status_code, answer.text) == (404, "rank 0 is of several children: a, g/b\n")
        assert (await ask(app, "/readyz")).status_code == 200
