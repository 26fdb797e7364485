"""torch's own process groups over the agent's store, restart after restart."""

from __future__ import annotations

import os
import sys

import pytest

from elastic_aio import LaunchSpec, LogSpec, RestartPolicy, launch

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

RESTARTS = int(os.environ.get("ELASTIC_AIO_GLOO_RESTARTS", "3"))
# Rank 1 comes late, which is when stale keys of the attempt before would mislead it.
WORKER = f"""
import os, time, torch, torch.distributed as dist
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if rank == 1:
    time.sleep(0.05)
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size(), total
dist.barrier()
if attempt < {RESTARTS}:
    os._exit(7 if rank == attempt % 2 else 0)
dist.destroy_process_group()
"""


async def test_gloo_forms_again_after_every_restart() -> None:
    """No attempt meets the keys or the port of the one before it."""
    spec = LaunchSpec(
        [sys.executable, "-c", WORKER],
        nproc_per_node=2,
        max_restarts=RESTARTS,
        logs=LogSpec(redirects=3),
        restart=RestartPolicy(restart_on=[7]),
    )
    result = await launch(spec)
    assert result.restarts == RESTARTS


async def test_worker_0_binds_the_port_that_the_agent_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With both servers of torch's TCPStore."""
    worker = """
import os, torch.distributed as dist
assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "False"
dist.init_process_group("gloo")
dist.barrier()
"""
    for libuv in "01":
        monkeypatch.setenv("USE_LIBUV", libuv)
        spec = LaunchSpec([sys.executable, "-c", worker], nproc_per_node=2, host_store=False)
        assert (await launch(spec)).state == "succeeded"
