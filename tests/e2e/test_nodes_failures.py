"""Workers that fail on one of many nodes: one restart for all, one budget, one end."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import AttemptFailed, JobFinished, Restarting, RoundForming
from tests.support.nodes import AT_ONCE_S, Node, Nodes

pytestmark = pytest.mark.black_box

# The command line with a delay before each restart, which no option sets.
WITH_BACKOFF = """
import msgspec
from elastic_aio import Backoff, RestartPolicy, cli
parse = cli.parse_run
def parse_with_backoff(argv, env):
    request = parse(argv, env)
    policy = RestartPolicy(backoff=Backoff(initial=1.0, factor=2.0, jitter=False))
    return msgspec.structs.replace(request, spec=request.spec.replaced(restart=policy))
cli.parse_run = parse_with_backoff
raise SystemExit(cli.entry())
"""


async def pair(nodes: Nodes, **options: Any) -> tuple[Node, Node]:
    """Start two nodes whose workers have started; the first serves the store."""
    host = nodes.start("host", **options)
    await host.event(RoundForming)
    other = nodes.start("other", **options)
    await nodes.up(host, other)
    return host, other


async def fail(node: Node, attempt: int, how: str) -> None:
    """Let the first worker of a node fail."""
    node.tell((await node.up(attempt=attempt))[0], how)


async def test_all_restart_when_one_fails(tmp_path: Path) -> None:
    """Workers elsewhere are asked to stop, and all start again with the same count."""
    async with Nodes(tmp_path, 2, max_restarts=1) as nodes:
        host, other = await pair(nodes, nproc=2)
        began = time.monotonic()
        await fail(other, 0, "exit 3")
        for worker in await host.up():
            assert (await host.note("signal", pid=worker.pid)).text == "SIGTERM"
        workers = await nodes.up(host, other, attempt=1)
        assert time.monotonic() - began < AT_ONCE_S
        assert {(one.restart_count, one.max_restarts) for one in workers} == {(1, 1)}
        for node in (host, other):
            assert (await node.event(Restarting)).restarts == 1
            assert await node.ask((await node.up(attempt=1))[0], "connect") == "connected"
        assert {ended.code for ended in await nodes.finish(host, other, attempt=1)} == {0}


async def test_one_budget_for_all(tmp_path: Path) -> None:
    """Failures on different nodes count together; the one beyond the budget ends the job."""
    async with Nodes(tmp_path, 2, max_restarts=3) as nodes:
        host, other = await pair(nodes)
        for attempt in range(3):
            await fail((host, other)[attempt % 2], attempt, "exit 3")
            workers = await nodes.up(host, other, attempt=attempt + 1)
            assert {one.restart_count for one in workers} == {attempt + 1}
        await fail(other, 3, "exit 9")
        for node in (host, other):
            ended = await node.ended(AT_ONCE_S)
            assert ended.code == 9
            report = ended.err[ended.err.index("=====") :]
            assert "rank      : 1 (local_rank: 0)" in report
            assert "exitcode  : 9" in report
            assert (await node.event(JobFinished)).exit_code == 9


@pytest.mark.parametrize("culprit", ["host", "other"])
async def test_the_root_cause_is_told_everywhere(culprit: str, tmp_path: Path) -> None:
    """A plain exception of one worker stands with its traceback in the report of every node."""
    async with Nodes(tmp_path, 2) as nodes:
        host, other = await pair(nodes, nproc=2)
        fails = {"host": host, "other": other}[culprit]
        worker = (await fails.up())[1]
        fails.tell(worker, "raise no data")
        for node in (host, other):
            ended = await node.ended(AT_ONCE_S)
            assert ended.code == 1
            root = ended.err.split("Root Cause (first observed failure):")[1]
            assert f"rank      : {worker.rank} (local_rank: 1)" in root
            assert f"(pid: {worker.pid})" in root
            assert "host      : " in root
            assert "Traceback (most recent call last):" in root
            assert "ValueError: no data" in root
            failed = await node.event(AttemptFailed)
            assert failed.root.rank == worker.rank


async def test_the_first_of_several_failures_is_the_root(tmp_path: Path) -> None:
    """Workers that were stopped because of another one's failure are not to blame."""
    async with Nodes(tmp_path, 3) as nodes:
        agents = [nodes.start(nproc=2) for _ in range(3)]
        workers = await nodes.up(*agents)
        culprit = (await agents[1].up())[1]
        assert len(workers) == 6
        agents[1].tell(culprit, "exit 42")
        for agent in agents:
            assert (await agent.ended(AT_ONCE_S)).code == 42
            assert (await agent.event(AttemptFailed)).root.rank == culprit.rank


async def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    """What can never start ends the job on all nodes at once, however many restarts are left."""
    async with Nodes(tmp_path, 2, max_restarts=5) as nodes:
        host = nodes.start("host")
        await host.event(RoundForming)
        other = nodes.start("other", tmp_path / "nothing", no_python=True)
        for node in (host, other):
            ended = await node.ended()
            assert ended.code == 127
            assert "nothing" in ended.err


async def test_a_delay_is_waited_for_once(tmp_path: Path) -> None:
    """Delays before restarts belong to the job: they grow, whichever node it was that failed."""
    launcher = [sys.executable, "-W", "default", "-c", WITH_BACKOFF]
    async with Nodes(tmp_path, 2, max_restarts=3, launcher=launcher) as nodes:
        host, other = await pair(nodes)
        for attempt, fails in enumerate((host, other)):
            failed_at = time.monotonic()
            await fail(fails, attempt, "exit 3")
            workers = await nodes.up(host, other, attempt=attempt + 1)
            delay = 2.0**attempt
            for one in workers:
                assert delay <= one.time - failed_at < delay + AT_ONCE_S
            for node in (host, other):
                told = await node.event(Restarting, restarts=attempt + 1)
                assert told.delay == delay
