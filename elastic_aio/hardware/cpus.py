"""Sets of CPUs, and what the CPUs of a host share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

Cpus = frozenset[int]


class Topology(Struct, frozen=True):
    """The online CPUs of a host.

    Attributes:
        nodes: CPUs by NUMA node; nodes without CPUs are left out.
        packages: the physical package (socket) by CPU.
        cores: the CPUs that share a physical core, by CPU.
        caches: the CPUs that share the last-level cache, by CPU.
    """

    nodes: Mapping[int, Cpus]
    packages: Mapping[int, int]
    cores: Mapping[int, Cpus]
    caches: Mapping[int, Cpus]

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
