"""Where nodes meet: every way to write an address of this machine, and ports that others hold."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from elastic_aio import RoundForming
from tests.support.nodes import AT_ONCE_S, Nodes, free_port
from tests.support.programs import Program

pytestmark = pytest.mark.black_box

# Holds a port, and does with those that connect what its second argument says.
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
    """Tell whether this machine has an address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "[::1]"])
async def test_addresses_of_this_machine(host: str, tmp_path: Path) -> None:
    """The nodes meet, one serves the other, and workers get an address that they reach."""
    if not can_bind("::1") and host == "[::1]":
        pytest.skip("this machine has no IPv6")
    async with Nodes(tmp_path, 2, endpoint=f"{host}:{free_port()}") as nodes:
        began = time.monotonic()
        agents = [nodes.start() for _ in range(2)]
        await nodes.up(*agents)
        assert time.monotonic() - began < AT_ONCE_S
        for agent in agents:
            assert await agent.ask((await agent.up())[0], "connect") == "connected"
        assert {ended.code for ended in await nodes.finish(*agents)} == {0}


async def test_the_name_of_this_machine(tmp_path: Path) -> None:
    """The machine's own name works wherever it can be looked up."""
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        pytest.skip("the name of this machine cannot be looked up")
    async with Nodes(tmp_path, 2, endpoint=f"{socket.gethostname()}:{free_port()}") as nodes:
        agents = [nodes.start() for _ in range(2)]
        await nodes.up(*agents)
        for agent in agents:
            assert await agent.ask((await agent.up())[0], "connect") == "connected"


async def test_a_chosen_local_address(tmp_path: Path) -> None:
    """Workers meet at the address that group rank 0 was told is its own."""
    async with Nodes(tmp_path, 2) as nodes:
        host = nodes.start("host", local_addr="127.0.0.3")
        await host.event(RoundForming)
        other = nodes.start("other", local_addr="127.0.0.4")
        workers = await nodes.up(host, other)
        assert {one.master_addr for one in workers} == {"127.0.0.3"}
        assert await other.ask((await other.up())[0], "connect") == "connected"


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
async def test_addresses_of_no_machine(host: str, tmp_path: Path) -> None:
    """Where all would meet themselves, nobody meets: one line and code 2."""
    async with Nodes(tmp_path, 2, endpoint=f"{host}:29400") as nodes:
        ended = await nodes.start().ended()
        assert ended.code == 2
        (line,) = ended.err.splitlines()
        assert host in line


async def test_two_hosts_by_force(tmp_path: Path) -> None:
    """Two nodes that both insist on serving: the port is the first one's, and they meet there."""
    async with Nodes(tmp_path, 2, conf={"is_host": 1}) as nodes:
        host = nodes.start("host")
        await host.event(RoundForming)
        second = nodes.start("second")
        await nodes.up(host, second)
        assert {one.code for one in await nodes.finish(host, second)} == {0}


@asynccontextmanager
async def held_port(folder: Path, how: str) -> AsyncIterator[tuple[int, Program]]:
    """Let another program hold a port."""
    port = free_port()
    reading, writing = os.pipe()
    argv = ["python3", "-I", "-S", "-u", "-c", HOLDER, port, how]
    program = Program("holder", argv, folder / "holder", stdout=writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as said:
        try:
            assert await asyncio.to_thread(said.readline) == b"ready\n"
            yield port, program
        finally:
            await program.kill()


@pytest.mark.parametrize("how", ["is silent", "closes", "answers"])
async def test_another_program_holds_the_port(how: str, tmp_path: Path) -> None:
    """Where something else listens there is no meeting, and its pid is told."""
    async with held_port(tmp_path, how) as (port, program):
        endpoint = f"127.0.0.1:{port}"
        async with Nodes(tmp_path, 2, endpoint=endpoint, conf={"read_timeout": 2}) as nodes:
            node = nodes.start()
            began = time.monotonic()
            ended = await node.ended()
            assert time.monotonic() - began < 2 + AT_ONCE_S
            assert ended.code not in (0, 143)
            said = ended.err.splitlines()[-1]
            assert endpoint in said
            assert f"pid {program.pid}" in said


async def test_nobody_is_there(tmp_path: Path) -> None:
    """An address that is not ours and where nobody answers is named."""
    # TEST-NET-2: nobody has it.
    endpoint = f"198.51.100.77:{free_port()}"
    async with Nodes(tmp_path, 2, endpoint=endpoint, conf={"read_timeout": 2}) as nodes:
        ended = await nodes.start().ended(2 + AT_ONCE_S)
        assert ended.code == 75
        assert endpoint in ended.err.splitlines()[-1]


async def test_a_name_that_cannot_be_looked_up(tmp_path: Path) -> None:
    """A name that nobody knows is named, in one line."""
    endpoint = f"no-such-host.invalid:{free_port()}"
    async with Nodes(tmp_path, 2, endpoint=endpoint, conf={"read_timeout": 2}) as nodes:
        ended = await nodes.start().ended(2 + 3 * AT_ONCE_S)
        assert ended.code == 75
        assert "no-such-host.invalid" in ended.err.splitlines()[-1]
