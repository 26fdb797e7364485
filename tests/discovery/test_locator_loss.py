"""The loss of the store: its process is killed, suspended, or disconnected."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_aio.discovery.locator import LocatedStore, StoreLocator
from elastic_aio.discovery.runs import enter_run
from elastic_aio.store import RemoteStore
from tests.discovery.conftest import RUN, MakeLocator, Node, StartNode
from tests.support.netns import Network
from tests.support.sockets import free_port


async def meet_again(
    locator: StoreLocator, located: LocatedStore
) -> tuple[str, LocatedStore, float]:
    """Wait for the loss and locate another store; return reason, store and loop time."""
    assert isinstance(located.store, RemoteStore)
    why = await located.store.wait_lost()
    again = await locator.locate(is_first=False)
    return why, again, time.monotonic()


@pytest.mark.slow
async def test_a_killed_host_is_replaced_within_a_second(
    make_locator: MakeLocator, start_node: StartNode, only_local: Callable[[str], None]
) -> None:
    port = free_port()
    endpoints = f"127.0.0.1:{port},127.0.0.2:{port}"
    host: Node = await start_node(endpoint=endpoints)
    assert (await host.wait_printed("endpoint"))["is_host"]
    only_local("127.0.0.2")
    both = [make_locator(endpoints) for _ in range(2)]
    located = [await locator.locate(is_first=True) for locator in both]
    assert [one.index for one in located] == [0, 0]
    again = [
        asyncio.ensure_future(meet_again(locator, one))
        for locator, one in zip(both, located, strict=True)
    ]
    host.send(signal.SIGKILL)
    begin = time.monotonic()
    met = await asyncio.gather(*again)
    assert [one.index for _, one, _ in met] == [1, 1]
    assert sorted(one.is_host for _, one, _ in met) == [False, True]
    # Expected within a second; the limit leaves room for a host under load.
    assert max(when for _, _, when in met) - begin < 3


@pytest.mark.slow
async def test_a_suspended_host_is_replaced_and_follows(
    make_locator: MakeLocator, start_node: StartNode, only_local: Callable[[str], None]
) -> None:
    port = free_port()
    endpoints = f"127.0.0.1:{port},127.0.0.2:{port}"
    host: Node = await start_node(endpoint=endpoints, heartbeat_timeout=2.0, coordinates=True)
    assert (await host.wait_printed("endpoint"))["is_host"]
    await host.wait_printed("coordinates")
    only_local("127.0.0.2")
    locator = make_locator(endpoints, heartbeat_timeout=2.0)
    located = await locator.locate(is_first=True)
    assert (located.index, located.is_host) == (0, False)
    host.send(signal.SIGSTOP)
    begin = time.monotonic()
    why, again, when = await meet_again(locator, located)
    assert why.startswith("no answer for 1.5 s")
    assert (again.index, again.is_host) == (1, True)
    assert when - begin < 8
    async with again.store.lease(2.0) as lease:
        await enter_run(again.store, RUN, job="", reuse=False)
        await lease.set(f"elastic_aio/{RUN}/0/coordinator", "we")
        await lease.set(f"elastic_aio/{RUN}/0/round", "ours")
        host.send(signal.SIGCONT)
        # Its own store may seem well to it, but the run is elsewhere.
        said = await host.wait_printed("endpoint")
        assert (said["index"], said["is_host"]) == (1, False)


@pytest.mark.slow
async def test_a_suspended_host_of_the_only_endpoint_is_kept(
    make_locator: MakeLocator, start_node: StartNode
) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    host: Node = await start_node(endpoint=endpoint, heartbeat_timeout=2.0)
    await host.wait_printed("endpoint")
    locator = make_locator(endpoint, heartbeat_timeout=2.0)
    located = await locator.locate(is_first=True)
    instance = located.instance
    host.send(signal.SIGSTOP)
    assert isinstance(located.store, RemoteStore)
    await located.store.wait_lost()
    finding = asyncio.ensure_future(locator.locate(is_first=False))
    await asyncio.sleep(0.5)  # let it try
    assert not finding.done()
    host.send(signal.SIGCONT)
    again = await finding
    assert not again.is_host
    assert again.instance == instance


@pytest.mark.slow
async def test_another_agent_of_the_same_host_takes_the_port(start_node: StartNode) -> None:
    endpoint = f"localhost:{free_port()}"
    nodes: list[Node] = [await start_node(endpoint=endpoint) for _ in range(3)]
    said = [await node.wait_printed("endpoint") for node in nodes]
    (host,) = (node for node, one in zip(nodes, said, strict=True) if one["is_host"])
    host.send(signal.SIGKILL)
    left = [node for node in nodes if node is not host]
    again = [await node.wait_printed("endpoint") for node in left]
    assert sorted(one["is_host"] for one in again) == [False, True]


# A network of several hosts, as network namespaces of this one.


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """Three hosts on one network, without a working name server and a default route."""
    with Network(tmp_path, "a", "b", "c") as network:
        yield network


@pytest.mark.slow
@pytest.mark.netns
async def test_names_without_a_name_server(network: Network, start_node: StartNode) -> None:
    """Hosts know each other by /etc/hosts, and themselves by a loopback address."""
    first, second = network["a"], network["b"]
    (first.etc / "hosts").write_text(f"127.0.1.1 nodea\n{second.address} nodeb\n")
    (second.etc / "hosts").write_text(f"{first.address} nodea\n127.0.1.1 nodeb\n")
    # The nodes come in the wrong order.
    other: Node = await start_node(before=second.argv([]), endpoint="nodea:29400,nodeb:29400")
    host: Node = await start_node(before=first.argv([]), endpoint="nodea:29400,nodeb:29400")
    said = await host.wait_printed("endpoint")
    assert (said["index"], said["is_host"], said["local_address"]) == (0, True, first.address)
    said = await other.wait_printed("endpoint")
    assert (said["index"], said["is_host"], said["local_address"]) == (0, False, second.address)
    host.send(signal.SIGKILL)
    said = await other.wait_printed("endpoint")
    assert (said["index"], said["is_host"], said["local_address"]) == (1, True, second.address)


@pytest.mark.slow
@pytest.mark.netns
async def test_killed_and_disconnected_hosts(network: Network, start_node: StartNode) -> None:
    hosts = [*network.hosts.values()]
    endpoints = ",".join(f"{host.address}:29400" for host in hosts)
    nodes: list[Node] = []
    for host in hosts:
        nodes.append(
            await start_node(before=host.argv([]), endpoint=endpoints, heartbeat_timeout=3.0)
        )
        said = await nodes[-1].wait_printed("endpoint")
        assert (said["index"], said["is_host"]) == (0, host is hosts[0])
        assert said["local_address"] == host.address
    # The command that enters the namespace becomes the node: it has the pid to kill.
    nodes[0].send(signal.SIGKILL)
    begin = time.monotonic()
    left = [await node.wait_printed("endpoint") for node in nodes[1:]]
    assert [(one["index"], one["is_host"]) for one in left] == [(1, True), (1, False)]
    assert max(one["at"] for one in left) - begin < 3  # expected within a second
    network.isolate("b")
    begin = time.monotonic()
    lost = await nodes[2].wait_printed("why")
    assert lost["at"] - begin < 6
    one = await nodes[2].wait_printed("endpoint")
    assert (one["index"], one["is_host"]) == (2, True)
    assert one["at"] - lost["at"] < 5


@pytest.mark.slow
@pytest.mark.netns
async def test_a_partition_that_heals(network: Network, start_node: StartNode) -> None:
    """The later host yields."""
    hosts = network["a"], network["b"]
    endpoints = ",".join(f"{host.address}:29400" for host in hosts)
    settings = {"endpoint": endpoints, "heartbeat_timeout": 2.0, "coordinates": True}
    first: Node = await start_node(before=hosts[0].argv([]), **settings)
    assert (await first.wait_printed("endpoint"))["is_host"]
    network.isolate("a")
    second: Node = await start_node(before=hosts[1].argv([]), **settings)
    said = await second.wait_printed("endpoint")
    assert (said["index"], said["is_host"]) == (1, True)
    network.heal()
    assert (await second.wait_printed("why"))["why"] == f"{hosts[0].address}:29400"
    said = await second.wait_printed("endpoint")
    assert (said["index"], said["is_host"]) == (0, False)
