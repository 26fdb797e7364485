"""The next job of the same id, while a node of the former one is cut off."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from elastic_aio import JobFinished, RoundFormed, RoundForming
from elastic_aio.rendezvous.messages import MemberPhase, decode_status
from elastic_aio.store import connect
from tests.support.chaos import ChaosProxy
from tests.support.children import DEADLINE_S
from tests.support.cluster import Cluster
from tests.support.sockets import LOOPBACK, free_port

pytestmark = pytest.mark.black_box

CONF = {"heartbeat_timeout": 3, "close_timeout": 10}


async def succeeded(endpoint: str) -> None:
    """Wait until the store has the success of a node."""
    async with (
        asyncio.timeout(DEADLINE_S),
        connect(endpoint) as store,
        store.watch("elastic_aio/job/0/t/", is_prefix=True) as statuses,
    ):
        texts = [*statuses.present.values()]
        while not any(decode_status(one).phase is MemberPhase.SUCCEEDED for one in texts):
            texts = [text for text in [(await anext(statuses)).value] if text]


@pytest.mark.parametrize("reuse", [False, True])
async def test_a_node_of_a_finished_job_enters_no_next_one(tmp_path: Path, reuse: bool) -> None:
    """Its workers have succeeded; its job ended while it was cut off, and the next one begins."""
    conf = {**CONF, "reuse": str(reuse).lower()}
    port = free_port(LOOPBACK)
    endpoint = f"{LOOPBACK}:{port}"
    async with (
        Cluster(tmp_path, 2, endpoint=endpoint, conf=conf) as cluster,
        ChaosProxy(port) as proxy,
    ):
        host = cluster.start("host")
        await host.event(RoundForming)
        node = cluster.start("node", rdzv_endpoint=proxy.endpoint, conf={"is_host": "false"})
        await cluster.workers(host, node)
        (worker,) = await node.workers()
        node.order(worker, "exit 0")
        await succeeded(endpoint)
        proxy.is_stalled = True
        for worker in await host.workers():
            host.order(worker, "exit 0")
        assert (await host.ended()).code == 0
        next_host = cluster.start("next")
        await next_host.event(RoundForming)
        proxy.is_stalled = False
        proxy.cut()
        assert (await node.ended()).code == 75
        assert "another job with the id 'job' runs there" in node.events_of(JobFinished)[-1].why
        assert len(await node.workers()) == 1, "it runs no worker of the next job"
        assert not next_host.events_of(RoundFormed)
        next_host.send(signal.SIGTERM)
        await next_host.ended()
