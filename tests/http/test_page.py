"""The page for people, in a real browser: needs playwright and chromium."""

from __future__ import annotations

import gc
import json
import re
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.children import until_sync
from tests.support.cli import CLI, running, running_cli
from tests.support.control import own_control_dir
from tests.support.leaks import leaked_processes

CHROMIUM = shutil.which("chromium")
WORKER = """
import os, sys, time
from elastic_aio.worker import progress
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"<b>bold</b> line of rank {rank}", flush=True)
step = 0
while not os.path.exists(f"{sys.argv[1]}/{rank}.{attempt}"):
    step += 1
    progress(f"{step}/100000")
    time.sleep(0.05)
sys.exit("<b>no</b> <img src=x onerror=alert(1)>" if attempt == "0" else 0)
"""
SERVER = """
import asyncio, sys
from elastic_aio import JobState, StatusServer
from elastic_aio.events import *
from elastic_aio.outcome import ExitStatus, Failure
from elastic_aio.node_events import NodeExcluded, RoundForming
from elastic_aio.spec.restart import UNLIMITED
from msgspec.structs import replace

def events():
{events}

async def main():
    async with StatusServer("127.0.0.1:0", patience=60.0) as server:
        attempt = time = 0
        for seq, event in enumerate(events()):
            time += 1 if isinstance(event, WorkerStarted | JobFinished) else 0.5
            attempt += isinstance(event, Restarting)
            server(replace(event, seq=seq, attempt=attempt, time=1e9 + time, run_id="<b>long</b>"))
        print(f"http://{{server.address}}/", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
asyncio.run(main())
"""
# A hundred attempts of 48 workers, and most of the 10,000 events that are kept.
LONG_JOB = SERVER.format(
    events="""
    yield JobStarted(
        entrypoint="x", nproc_per_node=48, nnodes="1", max_restarts=UNLIMITED, agent_pid=1)
    for attempt in range(100):
        ids = [dict(rank=rank, local_rank=rank, pid=rank + 2) for rank in range(48)]
        for one in ids:
            yield WorkerStarted(**one)
        for one in ids:
            failed = one["rank"] == attempt % 48
            status = ExitStatus(code=1) if failed else ExitStatus(signal=15)
            yield WorkerExited(**one, status=status, duration=1.0, is_victim=not failed)
        root = Failure(**ids[attempt % 48], host="h", status=ExitStatus(code=1), time=0.0, order=0)
        yield AttemptFailed(root=root, failures=(root,))
        if attempt < 99:
            yield Restarting(attempt=1, why="again", delay=0.0, restarts=attempt + 1)
    yield JobFinished(
        state=JobState.FAILED, why="<i>no</i> more", exit_code=3, duration=9.0, restarts=99)
"""
)
EXCLUDED_NODE = SERVER.format(
    events="""
    yield JobStarted(entrypoint="x", nproc_per_node=1, nnodes="2", max_restarts=1, agent_pid=1)
    yield WorkerStarted(rank=0, local_rank=0, pid=2)
    yield StopRequested(reason="another node", plan="")
    yield NodeExcluded(name="n", member="n.1", why="its worker", is_own=True)
    yield Restarting(attempt=1, why="again", delay=0.0, restarts=1)
    yield RoundForming(round=1, joined=1, minimum=2, maximum=2)
    yield JobFinished(
        state=JobState.SUCCEEDED, why="done", exit_code=0, duration=4.0, restarts=1)
"""
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]


@pytest.fixture
def page() -> Iterator[Any]:
    """A page of a browser; what its script raises, or a dialog, is an error."""
    sync_api = pytest.importorskip("playwright.sync_api")
    problems: list[str] = []
    with sync_api.sync_playwright() as playwright:
        # Without its own sandbox, which root and containers do not have.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1100, "height": 760})
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("dialog", lambda dialog: problems.append(dialog.message))
        yield tab
        browser.close()
    gc.collect()  # ends the executor of playwright's event loop, and so its thread
    for thread in threading.enumerate():
        if thread.name.startswith("asyncio_"):
            thread.join(5)
    assert not problems


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path


def opened(page: Any, job: Any) -> None:
    """Open the page of a command, and wait until its workers run."""
    address = job.wait_err(r"--http: listening at http://(\S+)$")[1]
    page.goto(f"http://{address}/", wait_until="domcontentloaded")
    page.wait_for_selector("#phase.running")


def test_the_page_follows_a_job(page: Any, script: Path, tmp_path: Path) -> None:
    """Phases, ranks, steps, a restart, a log that is text and not HTML, and the end."""
    from playwright.sync_api import expect

    options = ["--http=127.0.0.1:0", "--nproc-per-node=2", "--max-restarts=1", "-r3"]
    with running_cli(*options, "--rdzv-id=<b>x</b>", script, tmp_path) as job:
        opened(page, job)
        assert page.locator("#workers tr").count() == 2
        page.click("#workers tr:nth-child(2) button:has-text('stdout')")
        expect(page.locator("#log-text")).to_have_text("<b>bold</b> line of rank 1\n")
        expect(page.locator("#progress")).to_have_text(re.compile(r"^step \d+ of 100000, about "))
        expect(page.locator("#workers tr >> nth=0 >> td >> nth=7")).to_have_text(re.compile(r"/s$"))
        expect(page.locator("#charts")).to_have_text(re.compile(r"CPUs: \d.*memory: \d.*rate: \d"))
        (tmp_path / "1.0").touch()
        summary = re.compile("^attempt 1, 1 of 1 restarts, 2 workers, ")
        expect(page.locator("#summary")).to_have_text(summary)
        page.wait_for_selector("#phase.running")
        why = page.locator("#why")
        expect(why).to_contain_text("evidence: rank 1 (pid")
        expect(why).to_contain_text("<b>no</b> <img src=x onerror=alert(1)>")
        expect(page.locator("#attempts tr")).to_have_count(2)
        assert page.locator("#log b, #why b, #events b, #events img, h1 b").count() == 0
        # A button keeps the focus although the table changes.
        page.click("#workers tr:nth-child(2) button:has-text('stderr')")
        expect(page.locator("#workers tr >> nth=0 >> td >> nth=7")).to_have_text(re.compile(r"/s$"))
        focus = "document.activeElement.textContent"
        assert page.evaluate(focus) == "stderr"
        job.send(signal.SIGTERM)
        expect(page.locator("#end")).to_have_text(
            re.compile("^The job has been stopped: exit code 143, after .*: SIGTERM")
        )
        expect(page.locator("#connection")).to_have_text("ended")
        expect(page.locator("#workers .badge.stopped")).to_have_count(2)
        assert page.locator("#phase").inner_text() == "stopped"
        assert job.wait() == 128 + signal.SIGTERM


def test_a_failed_job_says_why(page: Any, script: Path, tmp_path: Path) -> None:
    """The end reaches the page although the server ends with the job; events have a raw form."""
    from playwright.sync_api import expect

    with running_cli("--http=127.0.0.1:0", script, tmp_path) as job:
        opened(page, job)
        (tmp_path / "0.0").touch()
        end = re.compile(r"^The job has failed: exit code 1, after .* s: \S")
        expect(page.locator("#end.failed")).to_have_text(end)
        expect(page.locator("#why")).to_contain_text("the job ended: failed, exit code 1")
        page.locator("#events summary >> nth=-1").press("Enter")
        raw = json.loads(page.locator("#events pre").inner_text())
        assert (raw["event"], raw["state"], raw["exit_code"]) == ("JobFinished", "failed", 1)
        assert "sentence" not in raw
        assert job.wait() == 1


def test_a_launcher_that_was_killed(page: Any, script: Path, tmp_path: Path) -> None:
    """The page does not go on to say that the job runs."""
    from playwright.sync_api import expect

    with running_cli("--http=127.0.0.1:0", script, tmp_path) as job:
        opened(page, job)
        job.send(signal.SIGKILL)
        expect(page.locator("#connection")).to_have_text(re.compile("^no answer of the launcher"))
        expect(page.locator("#phase")).to_have_text("running?")
        job.wait()
        guardian = "guardian_main"  # which ends the workers first
        until_sync(lambda: guardian not in str(leaked_processes()), "the end of the guardian")


def test_a_long_job_is_cheap_and_fits_a_phone(page: Any) -> None:
    """The page has a bounded number of elements, and no line is wider than the window."""
    from playwright.sync_api import expect

    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 375, "height": 700})
    with running([sys.executable, "-c", LONG_JOB], stdin_pipe=True) as server:
        page.goto(server.wait_out(r"^http\S+$")[0], wait_until="domcontentloaded")
        end = "The job has failed: exit code 3, after 9 s: <i>no</i> more"
        expect(page.locator("#end")).to_have_text(end, timeout=60_000)
        expect(page.locator("#attempts tr")).to_have_count(100)
        expect(page.locator("#events details")).to_have_count(200)
        assert page.evaluate("document.querySelectorAll('*').length") < 3000
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        spent = page.evaluate("fetch('status').then(one => one.json()).then(one => one.goodput)")
        assert spent == {"productive": 2450.0, "restarting": 4801.5, "waiting": 48.0}
        shown = page.evaluate("[...spent().values()]")
        assert sum(one["productive"] for one in shown) == spent["productive"]
        dark = page.evaluate("getComputedStyle(document.body).color")
        page.emulate_media(color_scheme="light")
        assert page.evaluate("getComputedStyle(document.body).color") != dark
        expect(page.locator("#summary")).to_have_text(re.compile("^attempt 99, 99 restarts, "))
        page.focus("#picture")
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowDown")
        expect(page.locator("#pointed")).to_have_text(
            re.compile(r"^attempt 98: rank 1 \(pid 3\): ")
        )
        assert server.process.stdin is not None
        server.process.stdin.close()
        assert server.wait() == 0


def test_an_excluded_node_waits(page: Any) -> None:
    """What the other nodes do then costs it no time; the status says the same."""
    from playwright.sync_api import expect

    with running([sys.executable, "-c", EXCLUDED_NODE], stdin_pipe=True) as server:
        page.goto(server.wait_out(r"^http\S+$")[0], wait_until="domcontentloaded")
        expect(page.locator("#phase")).to_have_text("succeeded", timeout=60_000)
        phases = page.evaluate("job.phases.map(one => [one.phase, one.kind, one.from])")
        assert [phase for phase, _, _ in phases] == [
            "starting", "running", "stopping", "excluded", "forming"
        ]  # fmt: skip
        ends = [*(since for _, _, since in phases[1:]), page.evaluate("job.end.time")]
        spent = page.evaluate("fetch('status').then(one => one.json()).then(one => one.goodput)")
        lanes = zip(phases, ends, strict=True)
        waited = sum(end - since for (_, kind, since), end in lanes if kind == "waiting")
        assert waited == spent["waiting"]
        assert server.process.stdin is not None
        server.process.stdin.close()
        assert server.wait() == 0


def hide(page: Any, *, is_hidden: bool) -> None:
    """Let a page believe that it is hidden, or shown."""
    value = f"{{value: {str(is_hidden).lower()}, configurable: true}}"
    page.evaluate(f"Object.defineProperty(document, 'hidden', {value})")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def test_the_list_of_all_jobs(page: Any, script: Path, tmp_path: Path) -> None:
    """It follows the jobs that come and go, and leads to their pages."""
    from playwright.sync_api import expect

    with own_control_dir(), running([*CLI, "serve", "--http", "127.0.0.1:0"]) as server:
        url = server.wait_out(r" at (http\S+)$")[1]
        page.goto(url, wait_until="domcontentloaded")
        with running_cli("--rdzv-id=<b>x</b>", "--max-restarts=1", script, tmp_path) as job:
            expect(page.locator("#running a")).to_have_text("<b>x</b>")
            expect(page.locator("#running td.running")).to_have_text("running")
            page.click("#running a")
            page.wait_for_selector("#phase.running")
            expect(page.locator("#progress")).to_have_text(re.compile("^step "))
            # Six pages would take all connections of the browser: a hidden page has none.
            hide(page, is_hidden=True)
            assert page.evaluate("stream.readyState === EventSource.CLOSED")
            (tmp_path / "0.0").touch()
            hide(page, is_hidden=False)
            expect(page.locator("#attempts tr")).to_have_count(2)
            page.wait_for_selector("#phase.running")
            expect(page.locator("#events details")).to_have_count(page.evaluate("job.seq + 1"))
            page.click("#all a")
            expect(page.locator("#running a")).to_have_count(1)
            job.send(signal.SIGTERM)
            expect(page.locator("#ended td.stopped")).to_have_text("stopped")
            expect(page.locator("#running a")).to_have_count(0)
            job.wait()
            page.click("#ended a >> nth=0")
            end = re.compile("^The job has been stopped: exit code 143, ")
            expect(page.locator("#end")).to_have_text(end)
            expect(page.locator("#connection")).to_have_text("ended")
            assert page.locator("main b, h1 b").count() == 0
        server.send(signal.SIGTERM)
        assert server.wait() == 0
