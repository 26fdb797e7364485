"""CPU sets of workers on fake hosts: a tree like sysfs, torch's four modes, and "cpu"."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_aio.errors import SpecError
from elastic_aio.hardware.cpus import NUMA_MODES, Topology, bind_workers, format_cpus, parse_cpus
from elastic_aio.hardware.host import read_topology


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def make_host(
    root: Path,
    *,
    packages: int = 2,
    nodes: int = 1,
    cores: int = 4,
    threads: int = 2,
    caches: int = 1,
) -> int:
    """Describe a host in a tree like /sys; return its number of CPUs.

    Args:
        root: the tree.
        packages: sockets.
        nodes: NUMA nodes of each.
        cores: physical cores of each node.
        threads: hardware threads of each core; the second ones are numbered last.
        caches: last-level caches of each node.
    """
    physical = packages * nodes * cores
    for node in range(packages * nodes):
        first = [*range(node * cores, (node + 1) * cores)]
        every = [core + physical * thread for thread in range(threads) for core in first]
        write(root / f"devices/system/node/node{node}/cpulist", format_cpus(every))
        for position, core in enumerate(first):
            siblings = [core + physical * thread for thread in range(threads)]
            size = cores // caches
            shared = first[position // size * size : position // size * size + size]
            cache = [core + physical * thread for thread in range(threads) for core in shared]
            for cpu in siblings:
                path = root / f"devices/system/cpu/cpu{cpu}"
                write(path / "topology/physical_package_id", node // nodes)
                write(path / "topology/thread_siblings_list", format_cpus(siblings))
                for index, (level, kind, cpus) in enumerate(
                    [(1, "Data", siblings), (1, "Instruction", every), (3, "Unified", cache)]
                ):
                    write(path / f"cache/index{index}/level", level)
                    write(path / f"cache/index{index}/type", kind)
                    write(path / f"cache/index{index}/shared_cpu_list", format_cpus(cpus))
    return physical * threads


def bound(mode: str, topology: Topology, nodes: list[int], **options: object) -> list[str]:
    allowed = options.get("allowed", frozenset().union(*topology.nodes.values()))
    assert isinstance(allowed, frozenset | set)
    nproc = options.get("nproc", len(nodes))
    assert isinstance(nproc, int)
    sets = bind_workers(mode, topology, allowed, nproc=nproc, device_nodes=nodes)
    return [format_cpus(cpus) for cpus in sets]


@pytest.fixture
def smt(tmp_path: Path) -> Topology:
    """Two packages with two nodes each; four cores with two threads in each node."""
    make_host(tmp_path, packages=2, nodes=2)
    return read_topology(tmp_path)


def test_node_takes_all_cpus_of_the_device(smt: Topology) -> None:
    assert bound("node", smt, [0, 0, 3]) == ["0-3,16-19", "0-3,16-19", "12-15,28-31"]


def test_socket_takes_all_nodes_of_the_package(smt: Topology) -> None:
    assert bound("socket", smt, [1, 2]) == ["0-7,16-23", "8-15,24-31"]


def test_exclusive_divides_whole_cores_and_gives_the_rest_to_the_first(smt: Topology) -> None:
    """Four cores for three devices; a device of another node takes none of them."""
    expected = ["0-1,16-17", "2,18", "4-7,20-23", "3,19"]
    assert bound("exclusive", smt, [0, 0, 1, 0]) == expected


def test_exclusive_counts_devices_without_a_worker(smt: Topology) -> None:
    """The share of a device does not depend on how many workers there are."""
    assert bound("exclusive", smt, [0, 0], nproc=1) == ["0-1,16-17"]


def test_exclusive_needs_a_core_for_each_device(smt: Topology) -> None:
    with pytest.raises(SpecError, match=r"NUMA node 0 has 4 usable cores for 5 devices"):
        bound("exclusive", smt, [0] * 5)
    with pytest.raises(SpecError, match=r"NUMA node 0 has 1 usable core for 2 devices"):
        bound("exclusive", smt, [0, 0], allowed={1})


def test_core_complex_takes_one_cache_each_and_starts_again(tmp_path: Path) -> None:
    make_host(tmp_path, packages=1, cores=8, threads=1, caches=2)
    topology = read_topology(tmp_path)
    assert bound("core-complex", topology, [0, 0, 0]) == ["0-3", "4-7", "0-3"]


def test_core_complex_prefers_the_largest(tmp_path: Path) -> None:
    """Of CPUs that this process may use."""
    make_host(tmp_path, packages=1, cores=8, threads=1, caches=2)
    topology = read_topology(tmp_path)
    assert bound("core-complex", topology, [0, 0], allowed={1, 4, 5}) == ["4-5", "1"]


def test_only_allowed_cpus_are_given_out(smt: Topology) -> None:
    assert bound("node", smt, [0], allowed={1, 2, 9}) == ["1-2"]
    with pytest.raises(SpecError, match="NUMA node 1 of device 0 has no CPU that may be used"):
        bound("node", smt, [1], allowed={1, 2, 9})


def test_every_worker_needs_a_device(smt: Topology) -> None:
    with pytest.raises(SpecError, match="needs a device for each of 2 workers, not 1; 'cpu'"):
        bound("node", smt, [0], nproc=2)


def test_cpu_divides_the_cores_in_the_order_of_the_nodes(tmp_path: Path) -> None:
    make_host(tmp_path, packages=2, cores=3)
    topology = read_topology(tmp_path)
    assert bound("cpu", topology, [], nproc=2) == ["0-2,6-8", "3-5,9-11"]
    assert bound("cpu", topology, [], nproc=4) == ["0-1,6-7", "2-3,8-9", "4,10", "5,11"]


def test_cpu_divides_threads_and_then_shares_them(tmp_path: Path) -> None:
    make_host(tmp_path, packages=1, cores=2)
    topology = read_topology(tmp_path)
    assert bound("cpu", topology, [], nproc=3) == ["0-1", "2", "3"]
    assert bound("cpu", topology, [], nproc=6) == ["0", "1", "2", "3", "0", "1"]


def test_a_node_without_cpus_is_no_node(tmp_path: Path) -> None:
    """Memory of an accelerator can be a NUMA node; torch fails on such hosts."""
    make_host(tmp_path, packages=1, cores=2, threads=1)
    write(tmp_path / "devices/system/node/node1/cpulist", "")
    topology = read_topology(tmp_path)
    assert topology.nodes == {0: {0, 1}}
    assert bound("socket", topology, [0]) == ["0-1"]


def test_a_host_without_numa_is_one_node(tmp_path: Path) -> None:
    """Nothing else is known of its CPUs either."""
    topology = read_topology(tmp_path, cpus={0, 2})
    assert topology.nodes == {0: {0, 2}}
    assert bound("exclusive", topology, [0, 0]) == ["0", "2"]
    assert bound("core-complex", topology, [0, 0]) == ["0", "2"]


@pytest.mark.slow
@settings(max_examples=30)  # each example writes a tree of files
@given(
    packages=st.integers(1, 2),
    nodes=st.integers(1, 2),
    cores=st.sampled_from([2, 4]),
    threads=st.integers(1, 2),
    nproc=st.integers(1, 9),
    data=st.data(),
)
def test_workers_get_allowed_cpus_and_share_no_core(
    tmp_path_factory: pytest.TempPathFactory,
    packages: int,
    nodes: int,
    cores: int,
    threads: int,
    nproc: int,
    data: st.DataObject,
) -> None:
    """In every mode; cores are shared in "node" and "socket", and by too many workers."""
    root = tmp_path_factory.mktemp("sys")
    count = make_host(root, packages=packages, nodes=nodes, cores=cores, threads=threads)
    topology = read_topology(root)
    allowed = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    places = data.draw(
        st.lists(st.integers(0, packages * nodes - 1), min_size=nproc, max_size=nproc)
    )
    for mode in NUMA_MODES:
        try:
            sets = bind_workers(mode, topology, allowed, nproc=nproc, device_nodes=places)
        except SpecError:
            assert mode != "cpu"
            continue
        assert len(sets) == nproc
        assert all(cpus and cpus <= allowed for cpus in sets)
        if mode == "exclusive" or (mode == "cpu" and nproc <= len(allowed)):
            assert sum(map(len, sets)) == len(frozenset().union(*sets))


@given(st.sets(st.integers(0, 300)))
def test_lists_of_cpus_round_trip(cpus: set[int]) -> None:
    assert parse_cpus(format_cpus(cpus)) == cpus


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1-b", "0x1"])
def test_broken_lists_are_empty(text: str) -> None:
    assert parse_cpus(text) == frozenset()


def test_this_host() -> None:
    """The CPUs of this process are divided among two workers."""
    allowed = os.sched_getaffinity(0)
    topology = read_topology(cpus=allowed)
    first, second = bind_workers("cpu", topology, allowed, nproc=2)
    assert first | second <= allowed
    assert not first & second or len(allowed) == 1
