"""Limits by a cgroup of the workers, where one is delegated to the tests."""

from __future__ import annotations

import os

import pytest

from elastic_aio import HostError, JobFailed, LaunchSpec, LimitSpec, LogSpec, launch
from elastic_aio.process.cgroups import Cgroup
from tests.support.children import python, shell

pytestmark = pytest.mark.both_loops


@pytest.fixture(autouse=True)
async def _delegated() -> None:
    """Skip the tests where no cgroup with these controllers is delegated."""
    try:
        await Cgroup.make({"memory.max": "max", "pids.max": "max"}).aclose()
    except HostError as error:
        pytest.skip(str(error))


async def test_a_worker_that_takes_too_much_memory() -> None:
    """The reason says which limit killed it."""
    limits = LimitSpec(memory_max="64M")
    with pytest.raises(JobFailed) as caught:
        await launch(LaunchSpec(python("x = b'x' * (1 << 30)"), limits=limits))
    root = caught.value.failures[0]
    assert root.status.signal == 9
    assert root.cause == "out of memory: killed by the memory limit of its cgroup"


async def test_all_workers_together_have_so_many_processes() -> None:
    """The limit is not one for each worker."""
    script = "for i in 1 2 3 4 5 6; do sleep 0.5 & done; wait"
    spec = LaunchSpec(shell(script), nproc_per_node=2, limits=LimitSpec(pids_max=9))
    with pytest.raises(JobFailed) as caught:
        await launch(spec.replace(logs=LogSpec(redirects=3)))
    assert "Resource temporarily unavailable" in str(caught.value.failures[0].stderr_tail)


async def test_the_cgroup_is_removed() -> None:
    script = "grep ^0:: /proc/self/cgroup"
    result = await launch(LaunchSpec(shell(script), limits={"pids_max": 9}))
    assert result.exit_code == 0
    group = Cgroup.make({})
    base = os.path.dirname(group.path)
    await group.aclose()
    assert not [name for name in os.listdir(base) if name.startswith(f"elastic_aio-{os.getpid()}-")]
