"""The store is lost: its process is killed, stopped, or cut off; who meets where then."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from elastic_aio.rendezvous.points import Found, MeetingPoints
from tests.rendezvous.conftest import RUN, MakePoints, Node, StartNode, free_port


async def meet_again(points: MeetingPoints, found: Found) -> tuple[str, Found, float]:
    """Wait for the loss, and find another store; return why, where, and when by the clock."""
    why = await found.store.wait_lost()
    again = await points.find(is_first=False)
    return why, again, time.monotonic()


async def test_a_killed_host_is_replaced_within_a_second(
    make_points: MakePoints, start_node: StartNode, only_local: Callable[[str], None]
) -> None:
    """All who are left meet at the next endpoint."""
    port = free_port()
    endpoints = f"127.0.0.1:{port},127.0.0.2:{port}"
    host: Node = await start_node(endpoint=endpoints)
    assert (await host.says("endpoint"))["is_host"]
    only_local("127.0.0.2")
    both = [make_points(endpoints) for _ in range(2)]
    found = [await points.find(is_first=True) for points in both]
    assert [one.index for one in found] == [0, 0]
    again = [
        asyncio.ensure_future(meet_again(points, one))
        for points, one in zip(both, found, strict=True)
    ]
    host.send(signal.SIGKILL)
    begin = time.monotonic()
    met = await asyncio.gather(*again)
    assert [one.index for _, one, _ in met] == [1, 1]
    assert sorted(one.is_host for _, one, _ in met) == [False, True]
    # Expected within a second; the limit leaves room for a machine under load.
    assert max(when for _, _, when in met) - begin < 3


async def test_a_stopped_host_is_replaced_and_comes_after(
    make_points: MakePoints, start_node: StartNode, only_local: Callable[[str], None]
) -> None:
    """Its silence is noticed in time; when it runs again, it joins the others."""
    port = free_port()
    endpoints = f"127.0.0.1:{port},127.0.0.2:{port}"
    host: Node = await start_node(endpoint=endpoints, heartbeat_timeout=2.0, coordinates=True)
    assert (await host.says("endpoint"))["is_host"]
    await host.says("coordinates")
    only_local("127.0.0.2")
    points = make_points(endpoints, heartbeat_timeout=2.0)
    found = await points.find(is_first=True)
    assert (found.index, found.is_host) == (0, False)
    host.send(signal.SIGSTOP)
    begin = time.monotonic()
    why, again, when = await meet_again(points, found)
    assert why.startswith("no answer for 1.75 s")
    assert (again.index, again.is_host) == (1, True)
    assert when - begin < 8
    async with again.store.lease(2.0) as lease:
        await lease.set(f"elastic_aio/{RUN}/coordinator", "we")
        host.send(signal.SIGCONT)
        # Its own store may seem well to it, but the run is elsewhere.
        said = await host.says("endpoint")
        assert (said["index"], said["is_host"]) == (1, False)


async def test_a_host_that_was_stopped_stays_where_there_is_no_other(
    make_points: MakePoints, start_node: StartNode
) -> None:
    """With one endpoint the others wait for it, and come back."""
    endpoint = f"127.0.0.1:{free_port()}"
    host: Node = await start_node(endpoint=endpoint, heartbeat_timeout=2.0)
    await host.says("endpoint")
    points = make_points(endpoint, heartbeat_timeout=2.0)
    found = await points.find(is_first=True)
    instance = found.store.instance
    host.send(signal.SIGSTOP)
    await found.store.wait_lost()
    finding = asyncio.ensure_future(points.find(is_first=False))
    await asyncio.sleep(0.5)  # let it try
    assert not finding.done()
    host.send(signal.SIGCONT)
    again = await finding
    assert not again.is_host
    assert again.store.instance == instance


async def test_the_next_on_the_same_machine_takes_the_port(start_node: StartNode) -> None:
    """Of several agents on one machine, one takes the place of the host that was killed."""
    endpoint = f"localhost:{free_port()}"
    nodes: list[Node] = [await start_node(endpoint=endpoint) for _ in range(3)]
    said = [await node.says("endpoint") for node in nodes]
    (host,) = (node for node, one in zip(nodes, said, strict=True) if one["is_host"])
    host.send(signal.SIGKILL)
    left = [node for node in nodes if node is not host]
    again = [await node.says("endpoint") for node in left]
    assert sorted(one["is_host"] for one in again) == [False, True]


# A network of several machines, as network namespaces of this one.


def has_namespaces() -> bool:
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("nft"):
        return False
    name = f"probe{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return False
    subprocess.run(["ip", "netns", "del", name], check=True)
    return True


@dataclass(frozen=True)
class Machine:
    """A machine of the network."""

    name: str
    address: str

    @property
    def inside(self) -> list[str]:
        """What makes a command run there."""
        return ["ip", "netns", "exec", self.name]

    def run(self, *command: str) -> None:
        subprocess.run([*self.inside, *command], check=True, capture_output=True)

    def knows(self, **addresses: str) -> None:
        """Give it an /etc/hosts of its own."""
        folder = Path("/etc/netns") / self.name
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"{address} {name}\n" for name, address in addresses.items()]
        (folder / "hosts").write_text("".join(lines))

    def cut_off(self) -> None:
        """Drop everything that comes or goes, without a word."""
        rules = "add table inet cut; "
        for hook in ("input", "output"):
            rules += f"add chain inet cut {hook} {{ type filter hook {hook} priority 0; }}; "
            rules += f'add rule inet cut {hook} iifname != "lo" oifname != "lo" drop; '
        rules = rules.replace('input iifname != "lo" oifname != "lo"', 'input iifname != "lo"')
        rules = rules.replace('output iifname != "lo" oifname', "output oifname")
        self.run("nft", rules)


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    """Three machines on one network that has no name server and no way out."""
    if not has_namespaces():
        pytest.skip("needs root, ip and nft")
    prefix = f"ea{os.getpid()}"
    switch = f"{prefix}s"
    made = [
        Machine(f"{prefix}{letter}", f"10.77.0.{number}") for number, letter in enumerate("abc", 1)
    ]
    names = [switch, *(machine.name for machine in made)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        for number, machine in enumerate(made):
            port = f"port{number}"
            ip(
                "-n",
                switch,
                "link",
                "add",
                port,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                machine.name,
            )
            ip("-n", switch, "link", "set", port, "master", "br0", "up")
            ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", "eth0")
            ip("-n", machine.name, "link", "set", "eth0", "up")
        yield made
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)
        if os.path.isdir("/etc/netns") and not os.listdir("/etc/netns"):
            os.rmdir("/etc/netns")


async def test_names_without_a_name_server(machines: list[Machine], start_node: StartNode) -> None:
    """Machines know each other by /etc/hosts, and themselves by a loopback address."""
    first, second, _ = machines
    first.knows(nodea="127.0.1.1", nodeb=second.address)
    second.knows(nodea=first.address, nodeb="127.0.1.1")
    # The nodes come in the wrong order.
    other: Node = await start_node(before=second.inside, endpoint="nodea:29400,nodeb:29400")
    host: Node = await start_node(before=first.inside, endpoint="nodea:29400,nodeb:29400")
    said = await host.says("endpoint")
    assert (said["index"], said["is_host"], said["local_address"]) == (0, True, first.address)
    said = await other.says("endpoint")
    assert (said["index"], said["is_host"], said["local_address"]) == (0, False, second.address)
    host.send(signal.SIGKILL)
    said = await other.says("endpoint")
    assert (said["index"], said["is_host"], said["local_address"]) == (1, True, second.address)


async def test_machines_that_fail(machines: list[Machine], start_node: StartNode) -> None:
    """A host that is killed, and one that is cut off: the others meet at the next in time."""
    endpoints = ",".join(f"{machine.address}:29400" for machine in machines)
    nodes: list[Node] = []
    for machine in machines:
        nodes.append(
            await start_node(before=machine.inside, endpoint=endpoints, heartbeat_timeout=3.0)
        )
        said = await nodes[-1].says("endpoint")
        assert (said["index"], said["is_host"]) == (0, machine is machines[0])
        assert said["local_address"] == machine.address
    # `ip netns exec` becomes the node: it is the process to kill.
    nodes[0].send(signal.SIGKILL)
    begin = time.monotonic()
    left = [await node.says("endpoint") for node in nodes[1:]]
    assert [(one["index"], one["is_host"]) for one in left] == [(1, True), (1, False)]
    assert max(one["at"] for one in left) - begin < 3  # expected within a second
    machines[1].cut_off()
    begin = time.monotonic()
    lost = await nodes[2].says("why")
    assert lost["at"] - begin < 6
    one = await nodes[2].says("endpoint")
    assert (one["index"], one["is_host"]) == (2, True)
    assert one["at"] - lost["at"] < 5


async def test_a_partition_that_heals(machines: list[Machine], start_node: StartNode) -> None:
    """Both sides have a store; when they see each other again, the later host yields."""
    endpoints = ",".join(f"{machine.address}:29400" for machine in machines[:2])
    settings = {"endpoint": endpoints, "heartbeat_timeout": 2.0, "coordinates": True}
    first: Node = await start_node(before=machines[0].inside, **settings)
    assert (await first.says("endpoint"))["is_host"]
    machines[0].cut_off()
    second: Node = await start_node(before=machines[1].inside, **settings)
    said = await second.says("endpoint")
    assert (said["index"], said["is_host"]) == (1, True)
    machines[0].run("nft", "flush", "ruleset")
    assert (await second.says("why"))["why"] == f"{machines[0].address}:29400"
    said = await second.says("endpoint")
    assert (said["index"], said["is_host"]) == (0, False)
