"""Sockets that a job opens for its workers."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_aio.errors import SpecError
from elastic_aio.process.listeners import Listeners
from elastic_aio.spec.sockets import SocketSpec, checked_sockets
from tests.support.sockets import free_port


@contextmanager
def opened(specs: Sequence[str | SocketSpec]) -> Iterator[Listeners]:
    listeners = Listeners(checked_sockets("sockets", specs))
    try:
        yield listeners
    finally:
        listeners.close()


def name_of(descriptor: int) -> object:
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        assert not os.get_inheritable(descriptor)
        return sock.getsockname()


async def test_sockets_listen_in_their_order(tmp_path: Path) -> None:
    """A name is one address, IPv4 if there is one; `*` accepts both families."""
    ports, path = [free_port(), free_port()], str(tmp_path / "s")
    specs = [f"web=tcp://localhost:{ports[0]}", f"unix://{path}", f"tcp://*:{ports[1]}"]
    with opened(specs) as listeners:
        await listeners.open(2)
        names = [name_of(each) for each in listeners.descriptors(0)]
        assert names[:2] == [("127.0.0.1", ports[0]), path]
        assert listeners.descriptors(1) == listeners.descriptors(0)
        assert listeners.names == "web:unknown:unknown"
        for address in ("127.0.0.1", "::1") if socket.has_dualstack_ipv6() else ("127.0.0.1",):
            socket.create_connection((address, ports[1]), timeout=5).close()
        with open(os.devnull, "rb") as later:
            assert later.fileno() >= 3 + 3
    assert not os.path.exists(path)
    listeners.close()


async def test_each_worker_may_have_a_socket_of_its_own() -> None:
    port = free_port()
    with opened([SocketSpec(f"tcp://127.0.0.1:{port}", reuse_port=True)]) as listeners:
        await listeners.open(2)
        found = {listeners.descriptors(rank) for rank in (0, 1, 2, 2)}
        assert len(found) == 3  # the third one, of a worker that has been added, too
        assert {name_of(one) for (one,) in found} == {("127.0.0.1", port)}


async def test_a_port_in_use_names_its_owner() -> None:
    """Nothing stays open."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with opened([f"tcp://*:{free_port()}", f"tcp://127.0.0.1:{port}"]) as listeners:
            with pytest.raises(SpecError) as caught:
                await listeners.open(1)
            assert str(caught.value).startswith("sockets: cannot be bound: address already in use")
            assert f"(pid {os.getpid()}) (got 'tcp://127.0.0.1:{port}')" in str(caught.value)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("tcp://192.0.2.1:9", "cannot assign requested address"),
        ("tcp://no-such-host.invalid:9", "cannot be bound: "),
        ("unix:///no/such/directory/s", "no such file or directory"),
    ],
)
async def test_an_address_that_is_none_of_this_host(address: str, reason: str) -> None:
    with opened([address]) as listeners, pytest.raises(SpecError, match=reason):
        await listeners.open(1)


async def test_a_path_that_a_killed_launcher_has_left_is_replaced(tmp_path: Path) -> None:
    """Not one at which a program listens, or that is no socket."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as former:
        former.bind(str(path))
        former.listen()
        with opened([f"unix://{path}"]) as listeners, pytest.raises(SpecError, match="in use"):
            await listeners.open(1)
    with opened([f"unix://{path}"]) as listeners:
        await listeners.open(1)
        path.unlink()
        path.touch()  # of another program by now
    assert path.exists()
    with opened([f"unix://{path}"]) as listeners, pytest.raises(SpecError, match="in use"):
        await listeners.open(1)


async def test_the_path_of_a_socket_has_its_mode_and_owner(tmp_path: Path) -> None:
    """Whatever the umask; who takes it over sets its own."""
    path = tmp_path / "s"
    former = os.umask(0o077)
    try:
        with opened([f"unix://{path}"]) as listeners:
            await listeners.open(1)
            assert path.stat().st_mode & 0o777 == 0o666
            owner = (65534, 65534) if os.geteuid() == 0 else (-1, -1)
            new = Listeners([SocketSpec(f"unix://{path}", mode="0600")], owner)
            await new.open(1, [listeners])
            assert path.stat().st_mode & 0o777 == 0o600
            assert path.stat().st_uid == (65534 if os.geteuid() == 0 else os.geteuid())
            new.close()
            assert path.exists()
    finally:
        os.umask(former)


async def test_a_server_at_a_path_is_not_disturbed(tmp_path: Path) -> None:
    """The attempt to bind its path connects to no server, which might take that ill."""
    path = f"{tmp_path}/s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        server.setblocking(False)
        problem = "cannot be bound: address already in use"
        with opened([f"unix://{path}"]) as listeners, pytest.raises(SpecError, match=problem):
            await listeners.open(1)
        with pytest.raises(BlockingIOError):
            server.accept()
