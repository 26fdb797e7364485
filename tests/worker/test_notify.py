"""The messages of a worker, from its side."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_aio.worker import exclude_node, heartbeat, phase, progress, ready
from elastic_aio.worker.context import NOTIFY_FD, NOTIFY_SOCKET
from tests.support.cli import REPOSITORY


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NOTIFY_FD, raising=False)
    monkeypatch.delenv(NOTIFY_SOCKET, raising=False)
    # The signal's handler would stay in this process.
    monkeypatch.setattr("elastic_aio.worker.interpreter._offered_by", os.getpid())


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The launcher's end of the sockets of this process, which is a worker."""
    kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
    own, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with own, theirs:
        monkeypatch.setenv(NOTIFY_FD, str(theirs.fileno()))
        yield own


def test_each_message_is_one_datagram(launcher: socket.socket) -> None:
    assert ready("up\nREADY=0")
    assert heartbeat()
    assert progress(3)
    assert progress("epoch 1", total=9, status="fast")
    with phase("save", timeout=0.5), phase("inner"):
        pass
    assert exclude_node("two\nlines")
    messages = [launcher.recv(4096) for _ in range(9)]
    assert messages == [
        b"READY=1\nSTATUS=up READY=0",
        b"WATCHDOG=1",
        b"PROGRESS=3",
        b"PROGRESS=epoch 1/9\nSTATUS=fast",
        b"PHASE=save\nPHASE_TIMEOUT_USEC=500000",
        b"PHASE=inner",
        b"PHASE_END=inner",
        b"PHASE_END=save",
        b"EXCLUDE=two lines",
    ]


def test_without_a_launcher_nothing_is_sent() -> None:
    assert not ready()
    assert not progress(1)
    with phase("save", timeout=1):
        pass


@pytest.mark.parametrize("text", ["", "x", "-1", "99999999999", "999999"])
def test_a_variable_that_names_no_socket(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NOTIFY_FD, text)
    assert not heartbeat()


def test_another_file_under_the_number_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child has the variable, and the number may be that of a file, or of another socket."""
    with open(tmp_path / "data", "wb") as file:
        monkeypatch.setenv(NOTIFY_FD, str(file.fileno()))
        assert not heartbeat()
    assert (tmp_path / "data").read_bytes() == b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(str(tmp_path / "log"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
            client.connect(str(tmp_path / "log"))
            monkeypatch.setenv(NOTIFY_FD, str(client.fileno()))
            assert not heartbeat()
            log.setblocking(False)
            with pytest.raises(BlockingIOError):
                log.recv(10)


def test_the_address_is_used_without_the_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as launcher:
        launcher.bind("")  # an abstract address
        monkeypatch.setenv(NOTIFY_SOCKET, "@" + launcher.getsockname()[1:].decode())
        assert heartbeat("below")
        assert launcher.recv(100) == b"WATCHDOG=1\nSTATUS=below"
    assert not heartbeat()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as launcher:
        launcher.bind(str(tmp_path / "socket"))
        monkeypatch.setenv(NOTIFY_SOCKET, str(tmp_path / "socket"))
        assert heartbeat()


@pytest.mark.slow
def test_a_launcher_that_does_not_read_delays_nothing(launcher: socket.socket) -> None:
    """Messages are dropped; the end of a phase waits for a second at most."""
    began = time.monotonic()
    sent = 0
    while progress(sent):
        sent += 1
    assert sent > 50
    assert not heartbeat()
    assert time.monotonic() - began < 20
    with phase("save"):
        while True:
            try:
                launcher.recv(4096)
            except BlockingIOError:
                break
    assert launcher.recv(100) == b"PHASE_END=save"
    launcher.close()
    assert not heartbeat()


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan")])
def test_a_wrong_timeout(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout: must be a number above 0"):
        phase("x", timeout=timeout)


def test_a_report_imports_little() -> None:
    """Neither `socket` nor asyncio: a worker reports in its first lines."""
    code = (
        "import sys\n"
        "from elastic_aio.worker import ready; ready()\n"
        "assert not {'socket', 'asyncio', 'msgspec'} & {*sys.modules}\n"
    )
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60)
