"""The network namespaces of the tests: links that are cut lose exactly their packets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.netns import Host, Network, remove_stale

pytestmark = [pytest.mark.e2e, pytest.mark.netns]

_NAMESPACES = Path("/run/netns")
# Prints each datagram that it receives.
_LISTEN = """
import socket, sys
receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
receiver.bind(("", 7000))
print("ready", flush=True)
while True:
    print(receiver.recv(100).decode(), flush=True)
"""
_SEND = """
import socket, sys
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(sys.argv[2].encode(), (sys.argv[1], 7000))
"""


@contextmanager
def listening(host: Host) -> Iterator[subprocess.Popen[str]]:
    """Receive datagrams on a host while the block is open."""
    argv = host.argv([sys.executable, "-I", "-S", "-c", _LISTEN])
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert read_line(process) == "ready"
        try:
            yield process
        finally:
            process.kill()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def send(source: Host, target: Host, text: str) -> None:
    """Send a datagram from a host to another."""
    source.run(sys.executable, "-I", "-S", "-c", _SEND, target.address, text)


def test_a_cut_link_loses_one_direction(tmp_path: Path) -> None:
    """Datagrams in the cut direction are lost, the others arrive, until the link is healed."""
    with Network(tmp_path, "a", "b", "c") as network:
        a, b, c = network.hosts.values()
        with listening(a) as at_a, listening(b) as at_b:
            send(a, b, "1")
            assert read_line(at_b) == "1"
            network.cut("a", "b")
            send(a, b, "lost")
            send(c, b, "2")  # so the lost datagram is not merely late
            assert read_line(at_b) == "2"
            send(b, a, "3")
            assert read_line(at_a) == "3"
            network.heal()
            network.partition("a", "b", "c")
            send(b, a, "lost")
            send(a, b, "lost")
            send(c, b, "4")
            assert read_line(at_b) == "4"
            network.heal()
            send(b, a, "5")
            send(a, b, "6")
            assert read_line(at_a) == "5"
            assert read_line(at_b) == "6"


def test_a_host_is_isolated(tmp_path: Path) -> None:
    """A host has its own name, resolver and addresses; those of the tests are unchanged."""
    name = socket.gethostname()
    with Network(tmp_path, "lonely") as network:
        host = network["lonely"]
        assert host.run("hostname") == "lonely"
        assert "nameserver 10.77.0.250" in host.run("cat", "/etc/resolv.conf")
        assert host.run("cat", "/etc/hosts") == "127.0.0.1 localhost\n::1 localhost"
        addresses = host.run("ip", "-br", "-4", "address")
        assert [line.split()[2] for line in addresses.splitlines()] == [
            "127.0.0.1/8",
            "10.77.0.1/24",
        ]
    assert socket.gethostname() == name
    assert "10.77.0.250" not in Path("/etc/resolv.conf").read_text()


def test_nothing_is_left(tmp_path: Path) -> None:
    """Neither a namespace nor a process in it is left after an exception in the block."""
    before = set(os.listdir(_NAMESPACES)) if _NAMESPACES.exists() else set()
    with pytest.raises(ZeroDivisionError), Network(tmp_path, "a", "b") as network:  # noqa: PT012  # the block raises after a start
        process = subprocess.Popen(network["a"].argv(["sleep", "99"]))
        while Path(f"/proc/{process.pid}/comm").read_text().strip() != "sleep":
            time.sleep(0.003)
        raise ZeroDivisionError
    assert process.wait() == -9
    assert set(os.listdir(_NAMESPACES)) <= before


def test_namespaces_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    """`remove_stale` removes the namespaces of killed runs and no others."""
    code = f"""
import os, pathlib, signal, subprocess
from tests.support.netns import Network
with Network(pathlib.Path({str(tmp_path / "other")!r}), "a") as network:
    subprocess.Popen(network["a"].argv(["sleep", "99"]))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    with Network(tmp_path, "mine"):
        before = set(os.listdir(_NAMESPACES))
        subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
        assert len(set(os.listdir(_NAMESPACES)) - before) == 2
        remove_stale()
        assert set(os.listdir(_NAMESPACES)) <= before
        assert any(name.endswith("-mine") for name in os.listdir(_NAMESPACES))
