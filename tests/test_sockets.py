"""The owner of a port, from /proc, and keepalive."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_aio import sockets
from elastic_aio.sockets import discard_unsent, enable_keepalive, port_owner

_LISTENER = """
import socket, sys
sock = socket.socket(getattr(socket, sys.argv[1]))
sock.bind((sys.argv[2], 0))
sock.listen()
print(sock.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("family", "host"), [("AF_INET", "127.0.0.1"), ("AF_INET6", "::1")])
def test_the_owner_is_another_process(family: str, host: str, tmp_path: Path) -> None:
    """Its command line is made printable, and truncated before the first option."""
    if family == "AF_INET6" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this host has no IPv6")
    script = tmp_path / ("\x1b[2J" + "x" * 200)
    script.write_text(_LISTENER)
    argv = [sys.executable, str(script), family, host, "--token", "secret"]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        owner = port_owner(int(process.stdout.readline()))
        process.stdin.close()
    assert owner is not None
    assert owner.startswith(sys.executable[:40])
    assert owner.endswith(f"(pid {process.pid})")
    assert owner.isprintable()
    assert len(owner) < 120
    assert "secret" not in owner


def test_a_port_without_listener() -> None:
    """A port that is free, or bound but not listening, has no owner."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        assert port_owner(port) is None
        sock.listen()
        assert port_owner(port) is not None
    assert port_owner(port) is None


def test_the_owner_is_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptors of other users' processes are unreadable; the user id is given."""
    monkeypatch.setattr(sockets, "_process_with", lambda _: None)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        assert port_owner(sock.getsockname()[1]) == f"a process of user {os.getuid()}"


def test_a_timeout_may_be_longer_than_the_kernel_counts() -> None:
    """Then no probes are sent."""
    with socket.socket() as sock:
        enable_keepalive(sock, 200_000.0)
        assert not sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 200_000_000
        enable_keepalive(sock, 9e8)


@pytest.mark.both_loops
async def test_the_kernel_drops_what_a_connection_that_is_given_up_has_not_sent() -> None:
    """Its reader gets a reset in place of the rest, as the kernel has no room for all of it."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as server:
        transport, _ = await loop.create_connection(asyncio.Protocol, *server.getsockname())
        accepted, _ = server.accept()
        with accepted:
            transport.write(bytes(1 << 26))
            discard_unsent(transport)
            transport.abort()
            await asyncio.sleep(0)  # the loop closes the socket after this step
            with pytest.raises(ConnectionResetError):
                await asyncio.to_thread(_read_all, accepted)
            discard_unsent(transport)  # of a closed socket: nothing


def _read_all(sock: socket.socket) -> None:
    while sock.recv(1 << 20):
        pass
