"""Sets of CPUs, the topology of a host, and the CPUs that a worker is bound to.

torch has four modes, which start from the NUMA node of the device whose index is the local rank:

node           the CPUs of that node.
socket         the CPUs of all nodes in the same package.
exclusive      the physical cores of that node, divided among the devices of the node.
core-complex   one group of CPUs with a common last-level cache of that node, another one
               for each device while there are enough.

The mode "cpu" needs no device: the physical cores are divided among the workers, in the
order of their NUMA nodes.  Only CPUs that the launcher itself may use are given out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct

from elastic_aio.errors import SpecError
from elastic_aio.text import counted

Cpus = frozenset[int]


class Topology(Struct, frozen=True):
    """The online CPUs of a host."""

    nodes: Mapping[int, Cpus]
    """CPUs by NUMA node; nodes without CPUs are left out."""
    packages: Mapping[int, int]
    """The physical package (socket) by CPU."""
    cores: Mapping[int, Cpus]
    """The CPUs that share a physical core, by CPU."""
    caches: Mapping[int, Cpus]
    """The CPUs that share the last-level cache, by CPU."""

    def node_of(self, cpu: int) -> int:
        """Return the NUMA node of a CPU; 0 if none has it."""
        return next((node for node, cpus in self.nodes.items() if cpu in cpus), 0)


def parse_cpus(text: str) -> Cpus:
    """Read a list of CPUs as in sysfs, `0-2,4`; empty if it is not one."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            return Cpus()
        found.update(range(int(first), int(last or first) + 1))
    return Cpus(found)


def format_cpus(cpus: Iterable[int]) -> str:
    """Write CPUs as a list of ranges, `0-2,4`."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


# ------------------------------------------------------------------------ binding

NUMA_MODES: Final = ("node", "socket", "exclusive", "core-complex", "cpu")
"""The values of `LaunchSpec.numa_binding`."""


def bind_workers(
    mode: str,
    topology: Topology,
    allowed: Iterable[int],
    *,
    nproc: int,
    device_nodes: Sequence[int] = (),
) -> list[Cpus]:
    """Return the CPUs of each worker, by local rank, out of the `allowed` ones.

    `device_nodes` are the NUMA nodes of all visible devices, by their index; not for "cpu".
    SpecError, of `numa_binding`: a worker would have no device or no CPU.
    """
    usable = Cpus(allowed)
    if mode == "cpu":
        return _divide_cpus(topology, usable, nproc)
    if nproc > len(device_nodes):
        problem = f"needs a device for each of {counted(nproc, 'worker')}, not {len(device_nodes)}"
        raise SpecError("numa_binding", mode, f"{problem}; 'cpu' needs none")
    bound = []
    for index in range(nproc):
        node = device_nodes[index]
        cpus = _of_socket(topology, node) if mode == "socket" else topology.nodes.get(node, Cpus())
        if not (cpus := cpus & usable):
            problem = f"NUMA node {node} of device {index} has no CPU that may be used"
            raise SpecError("numa_binding", mode, problem)
        peers = [peer for peer, other in enumerate(device_nodes) if other == node]
        if mode == "exclusive":
            cpus = _share_of_cores(topology, cpus, node, peers.index(index), len(peers))
        elif mode == "core-complex":
            complexes = sorted(
                _groups(topology.caches, cpus), key=lambda group: (-len(group), min(group))
            )
            cpus = complexes[peers.index(index) % len(complexes)]
        bound.append(cpus)
    return bound


def _of_socket(topology: Topology, node: int) -> Cpus:
    """Return the CPUs of all NUMA nodes in the package of a node."""
    packages = {topology.packages[cpu] for cpu in topology.nodes.get(node, ())}
    nodes = topology.nodes.values()
    return Cpus().union(*(cpus for cpus in nodes if topology.packages[min(cpus)] in packages))


def _share_of_cores(topology: Topology, cpus: Cpus, node: int, position: int, parts: int) -> Cpus:
    cores = _groups(topology.cores, cpus)
    if len(cores) < parts:
        problem = f"NUMA node {node} has {counted(len(cores), 'usable core')} for {parts} devices"
        raise SpecError("numa_binding", "exclusive", problem)
    return _part(cores, position, parts)


def _divide_cpus(topology: Topology, usable: Cpus, nproc: int) -> list[Cpus]:
    # Hardware threads are divided only if there are too few cores, and shared if even
    # those are too few.
    cores = _groups(topology.cores, usable)
    parts = cores if len(cores) >= nproc else [Cpus({cpu}) for core in cores for cpu in core]
    parts.sort(key=lambda part: (topology.node_of(min(part)), min(part)))
    if len(parts) < nproc:
        return [parts[rank % len(parts)] for rank in range(nproc)]
    return [_part(parts, rank, nproc) for rank in range(nproc)]


def _part(groups: Sequence[Cpus], position: int, parts: int) -> Cpus:
    """Return one of equal parts of some groups; the first parts get the remaining groups."""
    each, more = divmod(len(groups), parts)
    start = position * each + min(position, more)
    return Cpus().union(*groups[start : start + each + (position < more)])


def _groups(shared: Mapping[int, Cpus], cpus: Cpus) -> list[Cpus]:
    """Return CPUs in groups that share a core or a cache; the lowest group first."""
    found: dict[int, set[int]] = {}
    for cpu in sorted(cpus):
        found.setdefault(min(shared[cpu]), set()).add(cpu)
    return [Cpus(found[lowest]) for lowest in sorted(found)]
