"""The change that a worker is about to be restarted for, from both sides."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_aio.worker import PendingChange, pending_change
from elastic_aio.worker.context import PENDING_CHANGE
from elastic_aio.worker.membership import write_pending_change


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of this process, which is a worker."""
    path = tmp_path / "pending"
    monkeypatch.setenv(PENDING_CHANGE, str(path))
    return path


@pytest.mark.parametrize(
    "change",
    [
        PendingChange("d joined", 1700000000.25),
        PendingChange("", 0.1 + 0.2),
        PendingChange("two\nlines, é", 3.0),
    ],
)
def test_a_worker_reads_what_its_launcher_has_written(file: Path, change: PendingChange) -> None:
    assert pending_change() is None
    write_pending_change(str(file), PendingChange("another, which was longer", 1.0))
    write_pending_change(str(file), change)
    assert pending_change() == change
    assert list(file.parent.iterdir()) == [file]
    for _ in range(2):
        write_pending_change(str(file), None)
        assert pending_change() is None
    assert not list(file.parent.iterdir())


def test_outside_of_a_job_of_several_nodes_no_change_is_pending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(PENDING_CHANGE, raising=False)
    assert pending_change() is None
    write_pending_change("", PendingChange("d joined", 1.0))  # no directory


def test_a_surrogate_in_a_reason_breaks_no_worker(file: Path) -> None:
    write_pending_change(str(file), PendingChange("node \udcff joined", 2.0))
    assert pending_change() == PendingChange("node ? joined", 2.0)
