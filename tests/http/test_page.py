"""The page for people, in a real browser: needs playwright and chromium."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import running_cli

CHROMIUM = shutil.which("chromium")
WORKER = """
import os, sys, time
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"<b>bold</b> line of rank {rank}", flush=True)
while not os.path.exists(f"{sys.argv[1]}/{rank}.{attempt}"):
    time.sleep(0.05)
sys.exit(attempt == "0")
"""

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]


@pytest.fixture
def page() -> Iterator[Any]:
    """A page of a browser; what its script raises or reports is an error."""
    sync_api = pytest.importorskip("playwright.sync_api")
    problems: list[str] = []
    with sync_api.sync_playwright() as playwright:
        # Without its own sandbox, which root and containers do not have.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1100, "height": 760})
        tab.on("pageerror", lambda error: problems.append(str(error)))
        yield tab
        browser.close()
    gc.collect()  # ends the executor of playwright's event loop, and so its thread
    for thread in threading.enumerate():
        if thread.name.startswith("asyncio_"):
            thread.join(5)
    assert not problems


def test_the_page_follows_a_job(page: Any, tmp_path: Path) -> None:
    """Phases, ranks, a restart, a log that is text and not HTML, and the end."""
    from playwright.sync_api import expect

    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    options = ["--http=127.0.0.1:0", "--nproc-per-node=2", "--max-restarts=1", "-r3"]
    with running_cli(*options, script, tmp_path) as job:
        address = job.wait_err(r"--http: listening at http://(\S+)$")[1]
        page.goto(f"http://{address}/", wait_until="domcontentloaded")
        page.wait_for_selector("#phase.running")
        assert page.locator("#workers tr").count() == 2
        page.click("#workers tr:nth-child(2) button:has-text('stdout')")
        expect(page.locator("#log-text")).to_have_text("<b>bold</b> line of rank 1\n")
        assert page.locator("#log b").count() == 0
        if target := os.environ.get("ELASTIC_AIO_SCREENSHOT"):
            page.screenshot(path=target)
        (tmp_path / "1.0").touch()
        summary = re.compile("^attempt 1, 1 of 1 restarts, 2 workers")
        expect(page.locator("#summary")).to_have_text(summary)
        page.wait_for_selector("#phase.running")
        assert "Restarting" in page.inner_text("#events")
        job.send(signal.SIGTERM)
        expect(page.locator("#connection")).not_to_have_text("live")
        assert job.wait() == 128 + signal.SIGTERM
