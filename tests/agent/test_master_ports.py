"""The ports at which the workers of many nodes meet: reserved, served, given back."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from pathlib import Path

import pytest

from elastic_aio import LogSpec
from elastic_aio.agent.worker_store import MasterPorts
from elastic_aio.errors import HostError, StoreRefused
from elastic_aio.outcome import JobOutcome, JobState
from elastic_aio.rendezvous.base import (
    EndJob,
    RestartCause,
    RoundFailing,
    RoundStarted,
    RoundStopped,
    RoundSucceeded,
)
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.store import connect
from elastic_aio.store.connection import Connection
from elastic_aio.store.wire import ADD, OPENING, encode
from tests.support.children import noting, shell
from tests.support.fake_rendezvous import HERE, member, node_spec

GOOD_END = EndJob(JobOutcome(JobState.SUCCEEDED, "all workers have finished", 0))


def is_free(port: int) -> bool:
    """Return whether a port can be bound: no socket listens there.

    A connection that the server closed first stays in TIME_WAIT (tcp(7)); that is allowed.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HERE, port))
        except OSError:
            return False
        return True


async def served(port: int, key: str) -> int:
    """Count at the store at a port; return how often it was done there by now."""
    async with connect(f"{HERE}:{port}", reconnect_for=0) as store:
        return await store.add(key, 1)


async def test_every_round_has_a_fresh_store_that_was_reserved_before(tmp_path: Path) -> None:
    """The reserved port is the same until it is used, and can be reached before that."""
    async with member(node_spec(tmp_path, noting(), 1)) as node:
        rendezvous, ports = node.rendezvous, []
        for number in range(3):
            port = rendezvous.agent.reserve_master_port(HERE)
            assert rendezvous.agent.reserve_master_port(HERE) == port
            assert await served(port, "k") == 1, "a fresh one, before the round begins"
            rendezvous.start_round(
                number, RestartCause(number, "c joined", 0) if number else None, port=port
            )
            ports.append(port)
            assert rendezvous.agent.reserve_master_port(HERE) != port, "it belongs to a round now"
            await rendezvous.wait_report(RoundStarted, number + 1)
            assert await served(port, "k") == 2, "the same store serves the round"
        assert len(set(ports)) == 3
        assert is_free(ports[0]), "a former round's store is closed"
        assert is_free(ports[1])
    assert all(map(is_free, ports))


async def test_a_node_of_another_rank_keeps_its_reservation(tmp_path: Path) -> None:
    """Only group rank 0 serves; what the others have reserved stays for a later round."""
    async with member(node_spec(tmp_path, noting(), 1)) as node:
        port = node.rendezvous.agent.reserve_master_port(HERE)
        node.rendezvous.start_round(0, group_rank=1, port=port)  # of another host, by chance
        await node.rendezvous.wait_report(RoundStarted)
        assert node.rendezvous.agent.reserve_master_port(HERE) == port
        node.rendezvous.start_round(1, group_rank=0, port=port)
        await node.rendezvous.wait_report(RoundStarted, 2)
        assert await served(port, "k") == 1
    assert is_free(port)


async def test_rounds_that_never_begin_give_their_ports_back(tmp_path: Path) -> None:
    """Three rounds on each other's heels: the store of the last one is the one that serves."""
    async with member(node_spec(tmp_path, noting(), 1)) as node:
        node.rendezvous.start_round(0, group_rank=1)
        await node.rendezvous.wait_report(RoundStarted)
        ports = []
        for number in (1, 2, 3):
            ports.append(node.rendezvous.agent.reserve_master_port(HERE))
            node.rendezvous.start_round(number, port=ports[-1])
        await node.rendezvous.wait_report(RoundStarted, 2)
        assert node.rendezvous.reports[-1] == RoundStarted(3)
        assert await served(ports[2], "k") == 1
        node.rendezvous.start_round(4, group_rank=1)
        await node.rendezvous.wait_report(RoundStarted, 3)
        assert all(map(is_free, ports))


async def test_a_port_that_the_user_has_chosen(tmp_path: Path) -> None:
    """It is the same for every round, and bound when a round begins here."""
    with socket.create_server((HERE, 0)) as other:
        port = other.getsockname()[1]
    async with member(node_spec(tmp_path, noting(), 1, master_port=port)) as node:
        for number in range(2):
            assert node.rendezvous.agent.reserve_master_port(HERE) == port
            node.rendezvous.start_round(number, port=port)
            await node.rendezvous.wait_report(RoundStarted, number + 1)
            assert await served(port, "k") == 1, "a fresh store"
    assert is_free(port)


async def test_a_port_that_another_process_has(tmp_path: Path) -> None:
    """One line names the process, here and for the other nodes."""
    with socket.create_server((HERE, 0)) as other:
        port = other.getsockname()[1]
        async with member(node_spec(tmp_path, ["true"], 1, master_port=port)) as node:
            node.rendezvous.agent.reserve_master_port(HERE)
            node.rendezvous.start_round(0, port=port)
            ended = await node.rendezvous.wait_report(RoundStopped)
        (failure,) = ended.failures
        assert failure.message.startswith(f"cannot listen on {HERE}:{port}: ")
        assert failure.message.endswith(f"(pid {os.getpid()})")
        assert "\n" not in failure.message
        assert not ended.is_permanent
        assert isinstance(node.rendezvous.reports[0], RoundFailing)


async def test_a_port_that_was_never_reserved_is_left_alone(tmp_path: Path) -> None:
    """The node that announced it serves it: with a static rendezvous, the nodes' own store."""
    with socket.create_server((HERE, 0)) as other:
        async with member(node_spec(tmp_path, ["true"], 1)) as node:
            node.rendezvous.start_round(0, port=other.getsockname()[1])
            await node.rendezvous.wait_report(RoundSucceeded)


async def test_workers_may_host_it_themselves(tmp_path: Path) -> None:
    """Then the port is a free one until worker 0 listens there."""
    script = "echo $TORCHELASTIC_USE_AGENT_STORE; ! (: < /dev/tcp/127.0.0.1/$MASTER_PORT)"
    logs = LogSpec(log_dir=tmp_path, redirects=3)
    async with member(node_spec(tmp_path, shell(script), 1, host_store=False, logs=logs)) as node:
        port = node.rendezvous.agent.reserve_master_port(HERE)
        assert node.rendezvous.agent.reserve_master_port(HERE) == port
        assert is_free(port)
        node.rendezvous.start_round(0, port=port)
        await node.rendezvous.wait_report(RoundSucceeded)
        node.rendezvous.instruct(GOOD_END)
        result = await node.agent.wait()
    assert Path(result.log_dir or "", "attempt_0/0/stdout.log").read_text() == "False\n"


@pytest.mark.parametrize("address", [HERE, "::1"])
async def test_a_port_for_worker_0_is_held_for_it(address: str) -> None:
    """Its server can bind the port, on any address; no other socket gets it by chance."""
    ports = MasterPorts(LaunchSpec(["true"], nnodes=2, run_id="r", host_store=False))
    port = ports.reserve(HERE)
    with socket.socket() as strict, pytest.raises(OSError, match="in use"):
        strict.bind((HERE, port))  # as the kernel does when it looks for a free port
    ports.claim(port)
    await ports.serve(HERE, port)
    with (
        socket.create_server((address, port), family=family_of(address)) as server,
        socket.create_connection(server.getsockname()[:2]),
    ):
        pass
    await ports.end_attempt()
    with socket.socket() as strict:
        strict.bind(("127.0.0.2", port))
    await ports.aclose()


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


async def test_the_address_of_the_spec(tmp_path: Path) -> None:
    """The workers get it, and the store listens on every interface if it cannot be bound."""
    ports = MasterPorts(LaunchSpec(["true"], nnodes=2, run_id="r", master_addr="192.0.2.1"))
    assert ports.address_of(HERE) == "192.0.2.1"
    port = ports.reserve("127.0.0.2")
    assert await served(port, "k") == 1
    await ports.aclose()


@pytest.mark.parametrize("address", ["192.0.2.1", "no-such-name.invalid", "bad\0name"])
async def test_an_address_that_cannot_be_bound(address: str) -> None:
    """Behind a translator of addresses, or by a name, every interface is served."""
    ports = MasterPorts(LaunchSpec(["true"], nnodes=2, run_id="r"))
    port = ports.reserve(address)
    assert await served(port, "k") == 1
    assert ports.reserve(address) == port
    await ports.aclose()
    assert is_free(port)


async def test_an_address_that_has_changed() -> None:
    """The port moves with it, but one that was announced before is still served."""
    ports = MasterPorts(LaunchSpec(["true"], nnodes=2, run_id="r"))
    first, second = ports.reserve(HERE), ports.reserve("192.0.2.1")
    assert first != second
    ports.claim(first)
    assert ports.reserve("192.0.2.1") == second
    await ports.serve(HERE, first)
    assert await served(first, "k") == 1
    ports.claim(second)
    await ports.end_attempt()
    assert is_free(first)
    await ports.serve("192.0.2.1", second)
    assert await served(second, "k") == 1
    assert repr(ports).startswith("<MasterPorts: next port []")
    await ports.aclose()
    assert is_free(second)


async def test_a_port_that_a_store_of_this_process_has() -> None:
    """A port can be served once at a time."""
    with socket.create_server((HERE, 0)) as other:
        port = other.getsockname()[1]
        ports = MasterPorts(LaunchSpec(["true"], nnodes=2, run_id="r", master_port=port))
        ports.claim(ports.reserve(HERE))
        with pytest.raises(HostError, match=rf"{port}.*taken by"):
            await ports.serve(HERE, port)
    await ports.serve(HERE, port)
    await ports.aclose()


async def test_with_a_token_only_hosts_of_agents_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reserved port and a served one; the agent of another node introduces its host."""
    monkeypatch.setattr(Connection, "_host", lambda self: "192.0.2.7")
    rendezvous = RendezvousSpec(token="token-of-this-test")
    spec = LaunchSpec(["true"], nnodes=2, run_id="r", rendezvous=rendezvous)
    near, far = MasterPorts(spec), MasterPorts(spec)
    port = near.reserve(HERE)
    with pytest.raises(StoreRefused, match="asks for a token"):
        await served(port, "k")
    near.claim(port)
    await near.serve(HERE, port)
    with pytest.raises(StoreRefused, match="asks for a token"):
        await served(port, "k")
    reader, writer = await asyncio.open_connection(HERE, port)
    writer.write(OPENING + encode(ADD, b"/k", 1))  # as torch's clients do
    far.introduce(HERE, port)
    assert await reader.readexactly(8) == struct.pack("<q", 1)
    writer.close()
    await far.aclose()
    await near.aclose()
    assert is_free(port)


async def test_an_introduction_to_nothing_ends_with_the_attempt() -> None:
    """The port is never bound."""
    with socket.create_server((HERE, 0)) as other:
        port = other.getsockname()[1]
    rendezvous = RendezvousSpec(token="token-of-this-test")
    ports = MasterPorts(LaunchSpec(["true"], nnodes=2, run_id="r", rendezvous=rendezvous))
    ports.introduce(HERE, port)
    await asyncio.sleep(0)
    await ports.end_attempt()
    await ports.aclose()
