"""Who has a port: found in /proc, and said in one line."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_aio.store import portholder
from elastic_aio.store.portholder import port_holder

_LISTENER = """
import socket, sys
sock = socket.socket(getattr(socket, sys.argv[1]))
sock.bind((sys.argv[2], 0))
sock.listen()
print(sock.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("family", "host"), [("AF_INET", "127.0.0.1"), ("AF_INET6", "::1")])
def test_another_program(family: str, host: str) -> None:
    """It is named with its arguments and its pid, made printable and cut."""
    if family == "AF_INET6" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    argv = [sys.executable, "-c", _LISTENER, family, host, "\x1b[2J" + "x" * 200]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        holder = port_holder(int(process.stdout.readline()))
        process.stdin.close()
    assert holder is not None
    assert holder.startswith(sys.executable[:40])
    assert holder.endswith(f"(pid {process.pid})")
    assert holder.isprintable()
    assert len(holder) < 120


def test_nobody() -> None:
    """A port that is only bound, or free, has no holder."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        assert port_holder(port) is None
        sock.listen()
        assert port_holder(port) is not None
    assert port_holder(port) is None


def test_what_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other users' files are hidden; then the user is named."""
    monkeypatch.setattr(portholder, "_process_with", lambda _: None)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        assert port_holder(sock.getsockname()[1]) == f"a process of user {os.getuid()}"
