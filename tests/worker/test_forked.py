"""What a forked worker keeps of its parent."""

from __future__ import annotations

import multiprocessing
import multiprocessing.pool
import os
from typing import Any

import pytest

from elastic_aio import LaunchSpec, run

METHODS = ["spawn", "fork", "forkserver"]


def who() -> tuple[object, ...]:
    me, parent = multiprocessing.current_process(), multiprocessing.parent_process()
    return me.name, me.daemon, me.pid == os.getpid(), parent, multiprocessing.active_children()


def count_in_a_pool() -> tuple[int, str]:
    """Return what a child of this process computes, and its name."""
    context = multiprocessing.get_context("fork")
    with context.Pool(1) as pool:
        return pool.apply(abs, [-3]), pool.apply(name_of_process)


def name_of_process() -> str:
    return multiprocessing.current_process().name


def key() -> bytes:
    return bytes(multiprocessing.current_process().authkey)


def values_of(function: Any, method: Any, *args: Any) -> list[Any]:
    result = run(LaunchSpec(function, args=args, nproc_per_node=2, start_method=method))
    return [result.return_values[rank] for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_worker_of_a_daemonic_process_may_have_children(method: str) -> None:
    """A task of a pool is in such a process, which may have none itself."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        daemon = pool.apply(name_of_process)
        assert daemon.startswith("ForkPoolWorker-")
        known = pool.apply(values_of, [who, method])
        assert known == [("MainProcess", False, True, None, [])] * 2
        found = pool.apply(values_of, [count_in_a_pool, method])
        assert found == [(3, "ForkPoolWorker-1")] * 2
        # The process itself is what it was.
        assert pool.apply(name_of_process) == daemon


def test_a_forked_worker_has_the_key_of_its_parent() -> None:
    """A manager of the parent refuses a client that has another one."""
    assert values_of(key, "fork") == [key()] * 2
