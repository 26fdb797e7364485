"""The CPUs of torch's own NUMA binding, on the same trees."""

from __future__ import annotations

import builtins
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_aio.errors import SpecError
from elastic_aio.hardware.cpus import Cpus, bind_workers
from elastic_aio.hardware.host import read_topology
from tests.hardware.test_numa import make_host, write

binding: Any = pytest.importorskip("torch.numa.binding")
pytestmark = pytest.mark.torch


def redirect(function: Callable[..., Any], root: Path) -> Callable[..., Any]:
    """Return a function that takes paths below /sys from a tree."""

    def call(path: Any, *args: Any, **settings: Any) -> Any:
        if isinstance(path, str) and path.startswith("/sys/"):
            path = f"{root}{path.removeprefix('/sys')}"
        return function(path, *args, **settings)

    return call


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("mode", ["node", "socket", "exclusive", "core-complex"])
def test_the_cpus_are_torchs(
    mode: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On random hosts, with random places of the devices and random allowed CPUs."""
    chance = random.Random(seed)
    packages, nodes = chance.choice([(1, 1), (2, 1), (2, 2)])
    count = make_host(tmp_path, packages=packages, nodes=nodes, cores=chance.choice([4, 8]),
                      threads=chance.choice([1, 2]), caches=chance.choice([1, 2, 4]))  # fmt: skip
    write(tmp_path / "devices/system/node/possible", f"0-{packages * nodes - 1}")
    allowed = {cpu for cpu in range(count) if chance.random() < 0.8}
    # torch fails if a node of the package has no CPU left.
    allowed |= {min(cpus) for cpus in read_topology(tmp_path).nodes.values()}
    places = [chance.randrange(packages * nodes) for _ in range(chance.randint(1, 6))]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed)
    monkeypatch.setattr(binding, "_get_gpu_count", lambda: len(places))
    monkeypatch.setattr(
        binding, "_get_numa_node_index_for_gpu_index", lambda gpu_index: places[gpu_index]
    )
    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    expected: list[Cpus] | None = []
    with monkeypatch.context() as patched:
        patched.setattr(builtins, "open", redirect(open, tmp_path))
        patched.setattr(os, "listdir", redirect(os.listdir, tmp_path))
        try:
            expected = [
                Cpus(binding._get_logical_cpus_to_bind_to(gpu_index=index, numa_options=options))
                for index in range(len(places))
            ]
        except RuntimeError:
            expected = None  # too few cores
    topology = read_topology(tmp_path)
    if expected is None:
        with pytest.raises(SpecError):
            bind_workers(mode, topology, allowed, nproc=len(places), device_nodes=places)
    else:
        got = bind_workers(mode, topology, allowed, nproc=len(places), device_nodes=places)
        assert got == expected
