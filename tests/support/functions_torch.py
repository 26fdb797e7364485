"""A function of workers that use torch, and a script."""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist


def reduce_and_leave() -> float:
    """Return the mean of a tensor over two workers; leave a thread of gloo in Python code."""
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        is_called = threading.Event()

        def call_for_ever(_: object) -> None:
            is_called.set()
            while True:
                time.sleep(0.001)

        dist.all_reduce(torch.ones(1), async_op=True).get_future().then(call_for_ever)
        store.set("waits", "")
        is_called.wait()
    else:
        store.wait(["waits"])
        dist.all_reduce(torch.ones(1))
    return float(total.item() / dist.get_world_size())


if __name__ == "__main__":
    assert reduce_and_leave() == 1
