"""torch's `elastic_launch`: functions as workers, a restart, and a failure with its reason.

Only the imports differ from a program of torch.  They are, there:

    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
    from torch.distributed.launcher import LaunchConfig, elastic_launch

Run it with:  python examples/torch_compat/launch_functions.py
"""

from __future__ import annotations

import importlib.util
import os

from elastic_aio.compat.torch.errors import ChildFailedError, record
from elastic_aio.compat.torch.launch import LaunchConfig, elastic_launch


def add(numbers: list[int]) -> int:
    """Add this rank's share of the numbers; with torch, return the sum of all ranks."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    share = sum(numbers[rank::size])
    if importlib.util.find_spec("torch") is None:
        return share
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    total = torch.tensor(share)
    distributed.all_reduce(total)
    distributed.destroy_process_group()
    return int(total)


def succeed_later() -> str:
    """Fail on the first attempt."""
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if attempt == "0":
        raise RuntimeError("not yet")
    return f"attempt {attempt}"


@record
def divide(number: int) -> float:
    """Fail for rank 0."""
    return number / int(os.environ["RANK"])


def main() -> None:
    """Run each function as a job of two workers."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="sums",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=1,
    )
    print("sums:", elastic_launch(config, add)(list(range(100))))
    print("restarted:", elastic_launch(config, succeed_later)())
    try:
        elastic_launch(config, divide)(1)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"failed: rank {rank}, exit code {failure.exitcode}: {failure.message['message']}")


if __name__ == "__main__":
    main()
