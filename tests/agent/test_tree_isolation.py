"""What the death of one process leaves alone: other workers, other replicas and their stores."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from elastic_aio import Agent, GroupSpec
from elastic_aio.agent.worker_store import MASTER_ADDR
from elastic_aio.store import connect
from tests.agent.test_supervisor_driver import leaf, until_all_run, workers
from tests.support.children import shell, until
from tests.support.leaks import alive
from tests.support.restarts import AT_ONCE

WORKERS = 64
REPLICAS = 3


async def test_one_of_many_workers_restarts_alone() -> None:
    """The other 63 keep their processes, and none of them counts a restart."""
    async with Agent(workers(WORKERS)) as agent:
        await until_all_run(agent)
        before = agent.pids()
        assert len({*before.values()}) == WORKERS
        os.kill(before[17], signal.SIGKILL)
        await until(lambda: agent.pids().get(17, before[17]) != before[17])
        after = agent.pids()
        assert [rank for rank in before if before[rank] != after[rank]] == [17]
        assert all(map(alive, after.values()))
        restarts = {path: child.restarts for path, child in agent.children().items() if path}
        assert restarts == {str(rank): int(rank == 17) for rank in range(WORKERS)}


async def test_rank_0_of_a_replica_takes_no_other_replica_down(tmp_path: Path) -> None:
    """Its own group starts anew with an empty store; the others keep processes and stores."""
    note = f"echo $MASTER_PORT > {tmp_path}/$ROLE_NAME.$RANK.$TORCHELASTIC_RESTART_COUNT"
    replica = leaf(
        shell(f"{note}; exec sleep 99"), nproc_per_node=2, max_restarts=1, restart=AT_ONCE
    )
    paths = [str(number) for number in range(REPLICAS)]
    async with Agent(GroupSpec.replicas(replica, REPLICAS)) as agent:
        await until_all_run(agent)
        await until(lambda: len([*tmp_path.iterdir()]) == 2 * REPLICAS)
        await until(lambda: all(file.read_text() for file in tmp_path.iterdir()))
        ports = {path: int((tmp_path / f"{path}.0.0").read_text()) for path in paths}
        assert len({*ports.values()}) == REPLICAS
        for path in paths:
            async with connect(f"{MASTER_ADDR}:{ports[path]}") as store:
                await store.set("/replica", path)
        before = {path: agent.pids(path) for path in paths}
        os.kill(before["1"][0], signal.SIGKILL)
        await until(lambda: (tmp_path / "1.1.1").exists() and (tmp_path / "1.1.1").read_text())
        await until(lambda: len(agent.pids("1")) == 2)
        assert not {*before["1"].values()} & {*agent.pids("1").values()}
        for path in ("0", "2"):
            assert agent.pids(path) == before[path]
            assert all(map(alive, before[path].values()))
            async with connect(f"{MASTER_ADDR}:{ports[path]}") as store:
                assert await store.get("/replica") == path.encode()
        new_port = int((tmp_path / "1.1.1").read_text())
        async with connect(f"{MASTER_ADDR}:{new_port}") as store:
            assert await store.peek("/replica") is None
