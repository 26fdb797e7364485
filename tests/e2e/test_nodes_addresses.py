"""Endpoints: every way to write an address of this host, and ports that are taken."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.cli import running
from tests.support.cluster import AT_ONCE_S, Cluster, within
from tests.support.sockets import free_port

pytestmark = pytest.mark.black_box

# Listens at a port; its second argument says how it treats connections.
HOLDER = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server:
    print("ready", flush=True)
    held = []
    while True:
        connection, _ = server.accept()
        if sys.argv[2] == "closes":
            connection.close()
        elif sys.argv[2] == "answers":
            connection.sendall(b"HTTP/1.1 400 Bad Request\\r\\n\\r\\n")
        held.append(connection)
"""


def can_bind(host: str) -> bool:
    """Tell whether this host has an address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.2", "localhost", "[::1]", socket.gethostname()]
)
async def test_addresses_of_this_host(host: str, tmp_path: Path) -> None:
    """The nodes form a group, and the workers can reach the master address."""
    if not can_bind(host.strip("[]")):
        pytest.skip("this host has no such address")
    async with Cluster(tmp_path, 2, endpoint=f"{host}:{free_port()}") as cluster:
        with within():
            agents = [cluster.start() for _ in range(2)]
            await cluster.workers(*agents)
        await cluster.check_master(*agents)
        await cluster.succeed(*agents)


async def test_a_chosen_local_address(tmp_path: Path) -> None:
    """The master address is the `--local-addr` of group rank 0."""
    async with Cluster(tmp_path, 2) as cluster:
        host = await cluster.start_first("host", local_addr="127.0.0.3")
        other = cluster.start("other", local_addr="127.0.0.4")
        workers = await cluster.workers(host, other)
        assert {worker.master_addr for worker in workers} == {"127.0.0.3"}
        await cluster.check_master(other)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
async def test_wildcard_addresses_are_refused(host: str, tmp_path: Path) -> None:
    """With a wildcard address every node would be its own host: one line and code 2."""
    async with Cluster(tmp_path, 2, endpoint=f"{host}:29400") as cluster:
        ended = await cluster.start().ended()
        assert ended.code == 2
        (line,) = ended.err.splitlines()
        assert host in line


async def test_two_nodes_must_serve(tmp_path: Path) -> None:
    """Two nodes with `is_host=1`: the first one binds the port, and the second one uses it."""
    async with Cluster(tmp_path, 2, conf={"is_host": 1}) as cluster:
        host = await cluster.start_first("host")
        second = cluster.start("second")
        await cluster.workers(host, second)
        await cluster.succeed(host, second)


@contextmanager
def taken_port(how: str) -> Iterator[tuple[int, int]]:
    """Let another program listen at a port; yield the port and the pid."""
    port = free_port()
    with running([sys.executable, "-I", "-S", "-c", HOLDER, port, how]) as program:
        program.wait_out("ready")
        yield port, program.pid


@pytest.mark.parametrize("how", ["is silent", "closes", "answers"])
async def test_another_program_has_the_port(how: str, tmp_path: Path) -> None:
    """The job ends, and the error names the endpoint and the pid of the other program."""
    with taken_port(how) as (port, pid):
        endpoint = f"127.0.0.1:{port}"
        async with Cluster(tmp_path, 2, endpoint=endpoint, conf={"read_timeout": 2}) as cluster:
            node = cluster.start()
            with within(2 + AT_ONCE_S):
                ended = await node.ended()
            assert ended.code not in (0, 143)
            line = ended.err.splitlines()[-1]
            assert endpoint in line
            assert f"pid {pid}" in line


# TEST-NET-2 (RFC 5737): assigned to no host.
@pytest.mark.parametrize("host", ["198.51.100.77", "no-such-host.invalid"])
async def test_an_address_that_is_not_reached(host: str, tmp_path: Path) -> None:
    """The error names a remote address that does not answer, and a name that does not exist."""
    endpoint = f"{host}:{free_port()}"
    async with Cluster(tmp_path, 2, endpoint=endpoint, conf={"read_timeout": 2}) as cluster:
        # A query for a name takes as long as the name server of this host.
        seconds = 2 + (AT_ONCE_S if host[0].isdecimal() else 3 * AT_ONCE_S)
        await cluster.start().fails(endpoint, seconds=seconds)
