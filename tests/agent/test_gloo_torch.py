"""torch's own process groups over the agent's store, restart after restart."""

from __future__ import annotations

import os
import sys

import pytest

from elastic_aio import LaunchSpec, LogSpec, launch
from tests.support.cli import run_cli

pytest.importorskip("torch")
from tests.support import functions_torch  # it imports torch
from tests.support.restarts import at_once

pytestmark = pytest.mark.torch

ENDS = int(os.environ.get("ELASTIC_AIO_GLOO_ENDS", "1"))
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
        restart=at_once(restart_on=[7]),
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


async def test_functions_end_while_gloo_works() -> None:
    """A thread of it that comes back to the interpreter ends with it, and aborts nothing."""
    for _ in range(ENDS):
        result = await launch(LaunchSpec(functions_torch.reduce_and_leave, nproc_per_node=2))
        assert result.return_values == dict.fromkeys(range(2), 1.0)


@pytest.mark.parametrize("options", [["--run-path"], ["--preload=torch"]])
def test_scripts_end_while_gloo_works(options: list[str]) -> None:
    for _ in range(ENDS):
        ended = run_cli(*options, "--nproc-per-node=2", functions_torch.__file__, seconds=200)
        assert ended.code == 0, ended.err
