"""The change that a worker is about to be restarted for, from both sides."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from elastic_aio.worker import PendingChange, agree_to_change, pending_change
from elastic_aio.worker.context import NOTIFY_FD, PENDING_CHANGE
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
        PendingChange("d joined", 1700000000.25, number=3),
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


def test_a_worker_of_another_user_reads_the_change_whatever_the_umask(file: Path) -> None:
    umask = os.umask(0o077)
    try:
        write_pending_change(str(file), PendingChange("d joined", 1.0))
    finally:
        os.umask(umask)
    assert file.stat().st_mode & 0o777 == 0o644


def test_a_surrogate_in_a_reason_breaks_no_worker(file: Path) -> None:
    write_pending_change(str(file), PendingChange("node \udcff joined", 2.0))
    assert pending_change() == PendingChange(r"node \udcff joined", 2.0)


def test_a_worker_agrees_to_the_change_that_is_pending(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The signal's handler would stay in this process.
    monkeypatch.setattr("elastic_aio.worker.interpreter._offered_by", os.getpid())
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    with own, theirs:
        monkeypatch.setenv(NOTIFY_FD, str(theirs.fileno()))
        assert not agree_to_change()
        for number in (0, 7):
            write_pending_change(str(file), PendingChange("d joined", 1.0, number))
            assert agree_to_change()
            assert own.recv(4096) == f"CHANGE_AGREED={number}".encode()
        write_pending_change(str(file), None)
        assert not agree_to_change()
        with pytest.raises(BlockingIOError):
            own.recv(4096)
