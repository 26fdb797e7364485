"""The CPUs of this host, read from sysfs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from elastic_aio.hardware.cpus import Cpus, Topology, parse_cpus


def read_topology(sys: Path = Path("/sys"), cpus: Iterable[int] = ()) -> Topology:
    """Read the topology from sysfs.

    A kernel without NUMA has no nodes there: all CPUs then belong to node 0.  Where a file
    of a CPU cannot be read, the CPU has a package, core and cache of its own.

    Args:
        sys: where sysfs is mounted.
        cpus: CPUs to describe even if no node lists them, those of the process for example.
    """
    nodes: dict[int, Cpus] = {}
    for path in sorted(sys.glob("devices/system/node/node[0-9]*")):
        if found := parse_cpus(_text(path / "cpulist")):
            nodes[int(path.name[4:])] = found
    if not nodes:
        nodes[0] = frozenset(cpus) or parse_cpus(_text(sys / "devices/system/cpu/online"))
    every = frozenset(cpus).union(*nodes.values())
    packages, cores, caches = {}, {}, {}
    for cpu in every:
        path = sys / f"devices/system/cpu/cpu{cpu}"
        package = _text(path / "topology/physical_package_id")
        packages[cpu] = int(package) if re.fullmatch(r"-?\d+", package) else 0
        cores[cpu] = parse_cpus(_text(path / "topology/thread_siblings_list")) | {cpu}
        caches[cpu] = _last_cache(path / "cache") | {cpu}
    return Topology(nodes, packages, cores, caches)


def _last_cache(path: Path) -> Cpus:
    """Return the CPUs that share the highest level of data cache; empty if it is unknown."""
    best, shared = -1, Cpus()
    for index in sorted(path.glob("index[0-9]*")):
        level = _text(index / "level")
        is_data = _text(index / "type") in ("Unified", "Data")
        if is_data and level.isdecimal() and int(level) > best:
            best, shared = int(level), parse_cpus(_text(index / "shared_cpu_list"))
    return shared


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""
