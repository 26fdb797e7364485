"""The views of `aio-elastic top`: as text, and with rich where it is installed."""

from __future__ import annotations

import io
import time

import pytest

from elastic_aio.cli.status_text import WORKER_COLUMNS, fit, format_size, table, worker_row
from elastic_aio.cli.top import View, rich_view
from elastic_aio.outcome import ResourceUsage
from elastic_aio.status import WorkerStatus

USAGE = ResourceUsage(60.0, 3.0, 3 << 29, 4, 5, 6, 7)
WORKERS = [
    WorkerStatus(0, 0, 1234, since=90.0, usage=USAGE, heartbeat=97.0, reported="step 7"),
    WorkerStatus(1, 1, 5, state="failed", since=98.0, status="exit code 3"),
]


def test_the_cells_of_workers() -> None:
    rows = [worker_row(worker, 100.0, 0.5) for worker in WORKERS]
    assert rows[0] == (
        "0", "1234", "running", "10 s", "50%", "1 m 03 s", "1.5 GiB", "3 s ago: step 7",
    )  # fmt: skip
    assert rows[1][2:4] == ("failed (exit code 3)", "2 s")
    lines = table(WORKER_COLUMNS, rows)
    assert len({line.index("STATE") for line in lines[:1]}) == 1
    assert fit(lines, 10)[0] == "RANK  PID…"


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (2048, "2 KiB"), (3 << 29, "1.5 GiB"), (1 << 50, "1.02e+03 TiB")]
)
def test_sizes(size: int, text: str) -> None:
    assert format_size(size) == text


def test_a_view_with_rich() -> None:
    console_module = pytest.importorskip("rich.console")
    rows = [worker_row(worker, time.time(), 0.5) for worker in WORKERS]
    console = console_module.Console(file=io.StringIO(), width=120, force_terminal=True)
    console.print(rich_view(View(["run r", "[bold]no markup"], WORKER_COLUMNS, rows)))
    drawn = console.file.getvalue()
    assert "[bold]no markup" in drawn
    assert "1234" in drawn
    assert "exit code 3" in drawn
