"""Groups of jobs and independent workers, as real processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import (
    Agent,
    Exec,
    GroupSpec,
    HostError,
    JobFailed,
    JobPreempted,
    JobStopped,
    LaunchSpec,
    LivenessSpec,
    LogSpec,
    PreemptionSpec,
    SpecError,
    StopPlan,
    launch,
)
from elastic_aio.agent.agent import driver_of, make_agent
from elastic_aio.agent.supervisor import ChildRestartReceived, SupervisorMachine
from elastic_aio.agent.supervisor_driver import SupervisorDriver
from elastic_aio.child_events import ChildFinished, ChildLaunched, ReadinessChanged, ReloadFailed
from elastic_aio.events import (
    AttemptFailed,
    Event,
    JobFinished,
    JobStarted,
    StopRequested,
    WorkerStarted,
)
from elastic_aio.outcome import JobState
from elastic_aio.spec.restart import UNLIMITED, Backoff, RestartPolicy
from tests.support import functions
from tests.support.children import POLITE, SLEEPER, shell, until
from tests.support.fake_rendezvous import FakeRendezvous, node_spec
from tests.support.leaks import alive, marked_processes, open_descriptors, own_children
from tests.support.restarts import AT_ONCE

PLAN = StopPlan.within(5)
DEADLINE_S = 30.0
ALWAYS = RestartPolicy(when="always", backoff=None)


def leaf(argv: Sequence[str] = SLEEPER, **settings: Any) -> LaunchSpec:
    """Return a job of one worker that sleeps, unless it runs something else."""
    return LaunchSpec([*argv], **{"stop": PLAN, **settings})


def workers(number: int, argv: Sequence[str] = SLEEPER, **settings: Any) -> LaunchSpec:
    """Return so many independent workers."""
    policy = {"scope": "worker", "backoff": None, **settings.pop("policy", {})}
    restarts = settings.pop("max_restarts", 3)
    return leaf(
        argv,
        nproc_per_node=number,
        max_restarts=restarts,
        restart=RestartPolicy(**policy),
        **settings,
    )


async def until_all_run(agent: Agent) -> None:
    """Wait until the whole tree is ready."""
    async for event in agent.events():
        if isinstance(event, ReadinessChanged) and not event.child and event.is_ready:
            return
    raise AssertionError("it has ended")


def order(events: Sequence[Event], kind: type[Event]) -> list[str]:
    """Return the children of the events of a kind, in their order."""
    return [event.child for event in events if isinstance(event, kind)]


# ------------------------------------------------------------------ independent workers


@pytest.mark.parametrize("path", ["", "g"])
async def test_nothing_is_stopped_that_would_wait_for_a_stopped_child(path: str) -> None:
    """Neither by a restart nor by a reload, at each level."""
    below = GroupSpec({"a": leaf(), "b": leaf()}, after={"b": ["a"]})
    async with make_agent(GroupSpec({"g": below, "other": leaf()})) as agent:
        await until_all_run(agent)
        pids = agent.pids("g/b")
        await agent.stop(child="g/a")
        new = GroupSpec({**below.children, "b": leaf(env={"NEW": "1"})}, after={"b": ["a"]})
        spec = GroupSpec({"g": new, "other": leaf()}) if not path else new
        for request in (agent.restart(child=path), agent.reload(path), agent.reload(path, spec)):
            with pytest.raises(SpecError, match=r"is after 'a', which was stopped.*g/b"):
                await request
        assert agent.pids("g/b") == pids


async def test_a_reload_replaces_what_does_not_run_by_the_description(tmp_path: Path) -> None:
    """Neither what a failed reload has replaced, nor, by the former description, what it kept."""
    flag = tmp_path / "database"
    broken = shell(f"[ $RANK = 0 ] || [ -e {flag} ] || exit 3; exec sleep 99")
    former, changed = (GroupSpec({"a": workers(2, one)}) for one in (SLEEPER, broken))
    async with make_agent(former) as agent, asyncio.timeout(DEADLINE_S):
        await until_all_run(agent)
        old = agent.pids("a")
        assert not await agent.reload("", changed)
        half = agent.pids("a")
        assert (half[0] != old[0], half[1]) == (True, old[1])
        assert await agent.reload("", former)
        back = agent.pids("a")
        assert (back[0] != half[0], back[1]) == (True, old[1])
        assert not await agent.reload("", changed)
        half = agent.pids("a")
        flag.touch()
        assert await agent.reload("", changed)
        done = agent.pids("a")
        assert (done[0], done[1] != old[1]) == (half[0], True)


@pytest.mark.both_loops
async def test_a_worker_that_dies_restarts_alone() -> None:
    """The others keep their processes; each worker knows its rank among all."""
    async with Agent(workers(4, max_restarts=1)) as agent:
        await until_all_run(agent)
        before = agent.pids()
        os.kill(before[1], signal.SIGKILL)
        await until(lambda: agent.pids().get(1, before[1]) != before[1])
        after = agent.pids()
        assert {rank for rank in before if before[rank] != after[rank]} == {1}
        assert agent.children()["1"].restarts == 1
        os.kill(after[1], signal.SIGKILL)
        with pytest.raises(JobFailed) as failed:
            await agent.wait()
    result = failed.value.result
    assert result.exit_code == 128 + signal.SIGKILL
    assert result.failures[0].rank == 1
    assert "1: " in result.reason
    assert [attempt.number for attempt in result.children["1"].attempts] == [0, 1]
    assert {child.state for name, child in result.children.items() if name != "1"} == {
        JobState.STOPPED
    }


async def test_workers_get_ranks_of_one_world(tmp_path: Path) -> None:
    """As those of a group, with a restart count of their own and no shared store."""
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE TORCHELASTIC_RESTART_COUNT ROLE_NAME"
    shown = " ".join(f"${name}" for name in names.split())
    script = f"echo {shown} > {tmp_path}/$RANK; [ $RANK$TORCHELASTIC_RESTART_COUNT != 10 ]"
    await launch(workers(3, shell(script), role="web"))
    found = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert found == [[str(n), str(n), "3", "3", str(int(n == 1)), "web"] for n in range(3)]


async def test_the_rest_restarts_with_a_worker(tmp_path: Path) -> None:
    """With scope "rest": those with higher ranks, and no other."""
    async with Agent(workers(3, policy={"scope": "rest"})) as agent:
        await until_all_run(agent)
        before = agent.pids()
        os.kill(before[1], signal.SIGKILL)
        await until(lambda: len({*agent.pids().values()} - {*before.values()}) == 2)
        assert agent.pids()[0] == before[0]


async def test_always_restarts_after_a_success_too(tmp_path: Path) -> None:
    """And needs no `max_restarts`; attempts and the count of restarts go on."""
    script = f"echo $TORCHELASTIC_RESTART_COUNT >> {tmp_path}/n; test $(wc -l < {tmp_path}/n) -lt 4"
    script += " || exec sleep 99"
    async with Agent(leaf(shell(script), restart=ALWAYS)) as agent:
        notes = tmp_path / "n"
        await until(lambda: notes.exists() and len(notes.read_text().split()) == 4)
        await agent.stop()
        with pytest.raises(JobStopped):
            await agent.wait()
        history = [event async for event in agent.events()]
    assert (tmp_path / "n").read_text().split() == ["0", "1", "2", "3"]
    assert [event.attempt for event in history if isinstance(event, WorkerStarted)] == [0, 1, 2, 3]
    assert [type(event) for event in history].count(JobStarted) == 1
    assert isinstance(history[-1], JobFinished)
    assert all(event.child == "" for event in history)


async def test_workers_are_added_and_removed() -> None:
    """The present ones keep their processes."""
    async with Agent(workers(2)) as agent:
        await until_all_run(agent)
        before = agent.pids()
        await agent.scale("", 4)
        await until(lambda: len(agent.pids()) == 4)
        assert {**agent.pids(), **before} == agent.pids()
        assert [*agent.children()] == ["0", "1", "2", "3"]
        await agent.scale("", 1)
        await until(lambda: len(agent.pids()) == 1)
        assert agent.pids() == {0: before[0]}
        assert [*agent.children()] == ["0"]
        with pytest.raises(SpecError, match=r"^child: must be one of: 0 \(got '3'\)$"):
            agent.stop(child="3")
        with pytest.raises(SpecError, match=r"^child: must be text without NUL \(got None\)$"):
            await agent.scale(None, 2)  # type: ignore[arg-type]
        with pytest.raises(SpecError, match=r"^child: must be text without NUL \(got LaunchSpec"):
            await agent.reload(workers(2))  # type: ignore[arg-type]


async def test_a_job_whose_workers_restart_together_has_no_other_number() -> None:
    async with Agent(leaf(["sleep", "99"])) as agent:
        with pytest.raises(SpecError, match=r"^child: must be of a group or of independent worke"):
            await agent.scale("", 3)


async def test_the_tree_follows_its_spec() -> None:
    """A child may become a group, workers or a gang, and be removed."""
    slow = leaf(SLEEPER, stop=StopPlan.within(5))
    gang = leaf(nproc_per_node=2)
    kinds: list[LaunchSpec | GroupSpec] = [slow, GroupSpec({"x": slow}), workers(2), gang]
    below = [[], ["a/x"], ["a/0", "a/1"], []]
    async with Agent(GroupSpec({"a": slow, "gone": slow})) as agent:
        await until_all_run(agent)
        async with asyncio.timeout(60):
            for kind, expected in [*zip(kinds, below, strict=True)] * 2:
                assert await agent.reload("", GroupSpec({"a": kind, "b": slow}))
                await until(lambda: "gone" not in agent.children())
                assert [path for path in agent.children() if path.startswith("a/")] == expected
                assert await agent.restart(child="a")
                assert len(agent.pids("a")) == max(len(expected), 2 if kind is gang else 1)


async def test_a_change_of_the_scale_ends() -> None:
    """Also one that changes nothing, or a child that does not run."""
    children: dict[str, LaunchSpec | GroupSpec] = {
        "gang": leaf(),
        "pool": workers(2),
        "replicas": GroupSpec.replicas(leaf(), 2),
    }
    async with Agent(GroupSpec(children)) as agent:
        await until_all_run(agent)
        before = agent.pids("pool")
        async with asyncio.timeout(30):
            for child in children:
                await agent.scale(child, 2)
            assert agent.pids("pool") == before
            await until(lambda: len(agent.pids("gang")) == 2)
            for child in children:
                await agent.stop(child=child)
                if child != "replicas":  # the last would end the group
                    await agent.scale(child, 3)
                    assert await agent.reload(child)
                    assert await agent.restart(child=child)
                    assert len(agent.pids(child)) == 3


async def test_a_restart_of_what_its_group_ends(tmp_path: Path) -> None:
    """The answer does not wait for the end of the job."""
    slow = leaf(shell(f"trap 'sleep 0.5; exit' TERM; touch {tmp_path}/trap; sleep 99 & wait"))
    inner = GroupSpec({"a": slow, "b": leaf()})
    async with Agent(GroupSpec({"inner": inner, "c": leaf()}, essential=["c"])) as agent:
        await until_all_run(agent)
        await until((tmp_path / "trap").exists)
        restarting = asyncio.create_task(agent.restart(child="inner/a"))
        await until(lambda: agent.children()["inner/a"].phase == "stopping")
        agent.stop(child="inner")
        async with asyncio.timeout(30):
            assert not await restarting


async def test_a_reload_replaces_one_worker_after_the_other(tmp_path: Path) -> None:
    """Each new one runs before the old one is stopped; a broken spec replaces none."""
    async with Agent(workers(2)) as agent:
        await until_all_run(agent)
        before = agent.pids()
        assert await agent.reload(spec=workers(2, ["sleep", "98"]))
        middle = agent.pids()
        assert not {*before.values()} & {*middle.values()}
        assert not await agent.reload(spec=workers(2, shell("exit 3")))
        assert agent.pids() == middle
        assert agent.status(usage=False).is_ready
        assert not any(map(alive, before.values()))
    history = [event async for event in agent.events()]
    starts = [event.seq for event in history if isinstance(event, WorkerStarted)]
    stops = [event.seq for event in history if isinstance(event, StopRequested)]
    assert starts[2] < stops[0] < starts[3] < stops[1]


# ------------------------------------------------------------------------------ groups


@pytest.mark.both_loops
async def test_a_server_a_trainer_and_a_sidecar(tmp_path: Path) -> None:
    """A server that restarts alone, a trainer that ends the job, a sidecar that is reported."""
    started = tmp_path / "started"
    server = leaf(shell(f"echo $TORCHELASTIC_RESTART_COUNT >> {started}; exec sleep 99"))
    spec = GroupSpec(
        {
            "server": server.replace(restart=ALWAYS),
            "trainer": leaf(shell(f"until [ -e {tmp_path}/go ]; do sleep 0.01; done; exit 7")),
            "sidecar": leaf(shell("exit 5")),
        },
        after={"trainer": ["server"]},
        essential=["server", "trainer"],
        ends_with="trainer",
    )
    async with Agent(spec) as agent:
        await until_all_run(agent)
        before = {path: agent.pids(path) for path in ("server", "trainer")}
        await until(lambda: agent.children()["sidecar"].phase == "failed")
        os.kill(before["server"][0], signal.SIGKILL)
        await until(lambda: agent.pids("server").get(0) not in (None, before["server"][0]))
        assert agent.pids("trainer") == before["trainer"]
        (tmp_path / "go").touch()
        with pytest.raises(JobFailed, match="trainer") as failed:
            await agent.wait()
        history = [event async for event in agent.events()]
    assert failed.value.result.exit_code == 7
    states = {name: child.state.value for name, child in failed.value.result.children.items()}
    assert states == {"server": "stopped", "trainer": "failed", "sidecar": "failed"}
    assert started.read_text().split() == ["0", "1"]
    assert order(history, ChildFinished)[0] == "sidecar"
    launched = order(history, ChildLaunched)
    assert launched.index("server") < launched.index("trainer")
    assert isinstance(history[-1], JobFinished)


async def test_children_stop_in_the_reverse_order(tmp_path: Path) -> None:
    """A child stops when nothing is left of those that were started after it."""
    notes = {"NOTES": str(tmp_path)}
    slow = shell('trap "sleep 0.2; echo $NAME >> $NOTES/stopped; exit 0" TERM; sleep 99 & wait')
    children = {name: leaf(slow, env={**notes, "NAME": name}) for name in ("a", "b", "c")}
    spec = GroupSpec(children, after={"b": ["a"], "c": ["b"]})
    async with Agent(spec) as agent:
        await until_all_run(agent)
        await asyncio.sleep(0.2)  # the shells have set their traps
        agent.stop()
        with pytest.raises(JobStopped):
            await agent.wait()
    assert (tmp_path / "stopped").read_text().split() == ["c", "b", "a"]


@pytest.mark.parametrize("path", ["/", "a/", "/a", "a//b", "a/.", " ", "a/b/0", "A"])
async def test_a_path_of_no_child_is_refused(path: str) -> None:
    """None of them means the whole job, or waits for an event of that path."""
    async with Agent(GroupSpec({"a": GroupSpec({"b": leaf()})})) as agent:
        await until_all_run(agent)
        for request in (agent.restart(child=path), agent.scale(path, 2), agent.reload(path)):
            with pytest.raises(SpecError, match=r"^child: must be one of: a, a/b"):
                await request
        for ask in (agent.stop, agent.pids, agent.logs):
            with pytest.raises(SpecError, match=r"^child: must be one of: a, a/b"):
                ask(child=path)


async def test_groups_are_nested(tmp_path: Path) -> None:
    """Paths name the children; directories, roles and run ids follow them."""
    script = "echo $ROLE_NAME $TORCHELASTIC_RUN_ID $RANK $WORLD_SIZE"
    replicas = GroupSpec.replicas(leaf(shell(script), nproc_per_node=2), 2)
    spec = GroupSpec(
        {"serving": replicas, "last": leaf(shell(script))},
        after={"last": ["serving"]},
        logs=LogSpec(log_dir=str(tmp_path), redirects=3),
        run_id="tree",
    )
    result = await launch(spec)
    (run,) = tmp_path.iterdir()
    files = sorted(str(path.relative_to(run)) for path in run.rglob("stdout.log"))
    assert files == [
        "last/attempt_0/0/stdout.log",
        *(f"serving/{n}/attempt_0/{rank}/stdout.log" for n in range(2) for rank in range(2)),
    ]
    assert (run / files[0]).read_text() == "last tree.last 0 1\n"
    assert (run / files[4]).read_text() == "1 tree.serving.1 1 2\n"
    assert result.children["serving"].children["1"].state is JobState.SUCCEEDED
    assert result.log_dir == str(run)


async def test_a_child_is_stopped_and_started_by_request() -> None:
    """It stays stopped; the others notice nothing."""
    async with Agent(GroupSpec({"a": leaf(), "b": leaf()})) as agent:
        await until_all_run(agent)
        kept, former = agent.pids("a"), agent.pids("b")
        await agent.stop(child="b")
        assert not alive(former[0])
        assert agent.children()["b"].phase == "stopped"
        assert await agent.restart(child="b")
        assert agent.pids("b") != former
        assert agent.pids("a") == kept
        with pytest.raises(SpecError, match=r"^child: must be one of: a, b \(got 'x'\)$"):
            await agent.restart(child="x")


async def test_a_child_that_ignores_its_stop_is_killed_by_request() -> None:
    """As `stop --kill` does; what it is in stays."""
    stubborn = leaf(shell("trap '' TERM; while :; do sleep 0.02; done"), stop=StopPlan.within(600))
    spec = GroupSpec({"a": GroupSpec({"b": stubborn}), "c": leaf()})
    async with Agent(spec) as agent:
        await until_all_run(agent)
        agent.stop(child="a")
        await until(lambda: agent.children()["a/b"].phase == "stopping")
        await agent.stop(child="a", signal="SIGKILL")
        assert agent.children()["a"].phase == "stopped"
        assert agent.children()["c"].phase == "running"


async def test_a_restart_of_the_whole_leaves_out_what_was_stopped() -> None:
    """All others run in a later attempt when it returns."""
    async with Agent(GroupSpec({"a": leaf(), "b": leaf(), "c": leaf()})) as agent:
        await until_all_run(agent)
        await agent.stop(child="b")
        before = {path: agent.pids(path) for path in ("a", "c")}
        async with asyncio.timeout(30):
            assert await agent.restart()
        assert agent.children()["b"].phase == "stopped"
        for path, pids in before.items():
            assert agent.pids(path).keys() == pids.keys()
            assert agent.pids(path) != pids


async def test_the_events_have_the_restarts_of_the_supervisor() -> None:
    """Not those of the spec, of a leaf that its supervisor restarts."""
    async with Agent(leaf(restart=ALWAYS, logs=LogSpec(log_dir="/dev/null"))) as agent:
        await until(lambda: agent.pids() != {})
        started = await anext(agent.events())
        assert isinstance(started, JobStarted)
        assert (started.max_restarts, started.keeps_logs) == (UNLIMITED, False)
        assert agent.status().max_restarts == UNLIMITED
    tree = {
        "a": leaf(restart=ALWAYS),
        "b": leaf(max_restarts=3, restart=AT_ONCE),
        "c": leaf(),
    }
    async with Agent(GroupSpec(tree)) as agent:
        await until_all_run(agent)
        limits = {name: child.max_restarts for name, child in agent.children().items()}
        assert limits == {"a": UNLIMITED, "b": 3, "c": 0}


async def test_a_child_that_restarts_is_not_ready_until_it_runs_again() -> None:
    """Its status says so in between."""
    script = "test $TORCHELASTIC_RESTART_COUNT = 0 || exec sleep 99; exec sleep 0.1"
    spec = leaf(shell(script), restart=RestartPolicy(when="always", backoff=Backoff(at_once=0)))
    async with Agent(GroupSpec({"a": spec, "b": leaf()})) as agent:
        await until(lambda: agent.children()["a"].phase == "restarting")
        assert agent.children()["a"].ready_since is None
        assert agent.children()["b"].ready_since is not None
        await until(lambda: agent.children()["a"].ready_since is not None)
        assert agent.children()["a"].generation == 1


@pytest.mark.parametrize("strategy", ["one_for_one", "one_for_all", "rest_for_one"])
async def test_a_group_of_groups_is_restarted_by_request(strategy: Any, tmp_path: Path) -> None:
    """Starts and attempts go on, and each attempt has a directory of its own."""
    below = GroupSpec({"a": leaf(), "deep": GroupSpec({"x": leaf()})}, strategy=strategy)
    logs = LogSpec(log_dir=tmp_path, redirects="3")
    async with Agent(GroupSpec({"inner": below, "other": leaf()}, logs=logs)) as agent:
        await until_all_run(agent)
        for number in (1, 2):
            before = agent.pids("inner/deep")
            async with asyncio.timeout(DEADLINE_S):
                assert await agent.restart(child="inner")
            assert agent.pids("inner/deep").keys() == before.keys()
            assert agent.pids("inner/deep") != before
            assert agent.children()["inner/deep/x"].attempt == number
    found = sorted(path.name for path in next(tmp_path.glob("*/inner/deep/x")).iterdir())
    assert found == ["attempt_0", "attempt_1", "attempt_2"]


async def test_a_gang_is_scaled_by_a_restart() -> None:
    """The same number changes nothing; a child that does not run has the number at its start."""
    spec = GroupSpec({"a": leaf(nproc_per_node=2), "b": GroupSpec.replicas(leaf(), 2)})
    async with Agent(spec) as agent, asyncio.timeout(DEADLINE_S):
        await until_all_run(agent)
        before = agent.pids("a")
        await agent.scale("a", 2)
        assert agent.pids("a") == before
        await agent.scale("a", 3)
        await until(lambda: len(agent.pids("a")) == 3)
        await agent.scale("b", 2)
        await agent.stop(child="b")
        await agent.scale("b", 3)
        assert await agent.restart(child="b")
        assert {"b/0", "b/1", "b/2"} <= agent.children().keys()


async def test_a_child_that_a_reload_removes_is_not_in_the_status() -> None:
    async with Agent(GroupSpec({"a": leaf(), "b": leaf()})) as agent:
        await until_all_run(agent)
        former = agent.pids("b")[0]
        assert await agent.reload(spec=GroupSpec({"a": leaf()}))
        await until(lambda: "b" not in agent.children())
        assert not alive(former)
        assert agent.status().is_ready


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"argv": ["/no/such/program"]}, "command: cannot run /no/such/program: command not found"),
        ({"argv": ["/etc/passwd"]}, "command: cannot run /etc/passwd: permission denied"),
        ({"cwd": "/no/such"}, "command: cannot run sleep: its working directory /no/such does not"),
        ({"limits": {"user": "nosuchuser"}}, "limits.user: is no user of this host"),
    ],
)
async def test_a_reload_that_cannot_start_a_child_is_refused(
    wrong: dict[str, Any], problem: str
) -> None:
    """What differs is checked before anything is stopped; what does not differ is not checked."""
    former: dict[str, Any] = {"a": leaf(), "b": leaf(), "g": GroupSpec({"c": workers(2)})}
    async with Agent(GroupSpec(former)) as agent, asyncio.timeout(DEADLINE_S):
        await until_all_run(agent)
        pids = {name: agent.pids(name) for name in former}
        broken, other = leaf(**wrong), leaf(["sleep", "98"])
        for changes, name in (
            ({"b": broken}, "children.b"),
            ({"new": broken}, "children.new"),
            ({"g": GroupSpec({"c": workers(2, **wrong)})}, "children.g.children.c"),
        ):
            with pytest.raises(SpecError) as caught:
                await agent.reload("", GroupSpec({**former, "a": other, **changes}))
            assert str(caught.value).startswith(f"{name}.{problem}")
        with pytest.raises(SpecError, match=r"^children\.b\."):
            await agent.reload("b", broken)
        assert {name: agent.pids(name) for name in former} == pids
        assert await agent.reload("", GroupSpec({**former, "a": other}))


async def test_a_reload_by_the_same_description_is_refused_too(tmp_path: Path) -> None:
    program = tmp_path / "server"
    program.symlink_to("/bin/sleep")
    argv = [str(program), "99"]
    kinds = (leaf(argv), workers(2, argv), GroupSpec({"a": leaf(argv), "b": leaf()}))
    for spec in kinds:
        async with Agent(spec) as agent, asyncio.timeout(DEADLINE_S):
            status = agent.status
            await until(lambda: status().is_ready)  # noqa: B023  # it is awaited here
            pids = [worker.pid for leaf in agent.status().leaves for worker in leaf.workers]
            program.rename(tmp_path / "away")
            with pytest.raises(SpecError, match="command: cannot run"):
                await agent.reload()
            (tmp_path / "away").rename(program)
            leaves = agent.status().leaves
            assert pids == [worker.pid for leaf in leaves for worker in leaf.workers]


async def test_the_run_id_stays() -> None:
    async with Agent(GroupSpec({"a": leaf()}, run_id="J")) as agent, asyncio.timeout(DEADLINE_S):
        await until_all_run(agent)
        with pytest.raises(SpecError, match=r"^run_id: must stay 'J': the job runs .got 'K'."):
            await agent.reload("", GroupSpec({"a": leaf(), "b": leaf()}, run_id="K"))
        assert await agent.reload("", GroupSpec({"a": leaf(), "b": leaf()}, run_id="J"))


async def test_a_start_that_fails_in_a_reload_is_no_failure_of_others(tmp_path: Path) -> None:
    """No check sees that a program is being written; the next reload starts it."""
    program = tmp_path / "server"
    shutil.copy("/bin/sleep", program)
    busy = leaf([str(program), "99"])
    group = GroupSpec({"d": leaf()})
    former: dict[str, Any] = {"a": leaf(), "b": leaf(), "c": workers(1), "g": group}
    changed = GroupSpec({**former, "b": busy, "new": busy, "h": GroupSpec({"e": busy})})
    async with Agent(GroupSpec(former)) as agent, asyncio.timeout(DEADLINE_S):
        await until_all_run(agent)
        kept = ("a", "c", "g")
        pids = {name: agent.pids(name) for name in kept}
        with open(program, "r+b"):
            assert not await agent.reload("", changed)
            failed = {"b", "new", "h"}
            await until(lambda: all(agent.children()[one].phase == "failed" for one in failed))
        assert agent.children()["new"].reason == "another attempt could not start it either"
        assert await agent.reload("", changed)
        assert {name: agent.pids(name) for name in kept} == pids
        await until(lambda: agent.status().is_ready)


async def test_a_failed_reload_names_the_last_answer_of_the_new_worker() -> None:
    events: list[Event] = []
    probe, limit = Exec("echo no database; exit 3", period=0.05), LivenessSpec(ready_timeout=0.5)
    async with make_agent(workers(1), listeners=[events.append]) as agent:
        await until_all_run(agent)
        pids = agent.pids()
        assert not await agent.reload("", workers(1, ready=probe, liveness=limit))
        (failed,) = (event for event in events if isinstance(event, ReloadFailed))
        assert failed.why.endswith("last probe: exit code 3: no database")
        assert agent.pids() == pids


async def test_a_child_of_one_worker_has_no_store() -> None:
    """A launcher that it runs brings its own, and its workers would look for ours."""
    checks = (shell(f"[ $TORCHELASTIC_USE_AGENT_STORE = {has} ]") for has in (False, True))
    one, two = (leaf(check, nproc_per_node=1 + n) for n, check in enumerate(checks))
    await launch(GroupSpec({"one": one, "two": two}))


async def test_a_further_worker_is_started_again_while_the_program_is_replaced(
    tmp_path: Path,
) -> None:
    """The others have run the program."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec sleep 99\n")
    program.chmod(0o755)
    async with make_agent(workers(1, [str(program)])) as agent, asyncio.timeout(DEADLINE_S):
        await until_all_run(agent)
        program.rename(tmp_path / "new")
        await agent.scale("", 2)
        await until(lambda: agent.children()["1"].phase == "restarting")
        (tmp_path / "new").rename(program)
        await until(lambda: len(agent.pids()) == 2)


async def test_a_reload_is_repeated_after_a_failure(tmp_path: Path) -> None:
    """The same description replaces what the last reload has failed to replace, and only that."""
    flag = tmp_path / "database"
    new = workers(2, shell(f"[ -e {flag} ] || exit 3; exec sleep 99"))
    former: dict[str, Any] = {"a": workers(2), "b": leaf(), "g": GroupSpec({"c": workers(1)})}
    changed = GroupSpec({**former, "a": new, "g": GroupSpec({"c": new.replace(nproc_per_node=1)})})
    events: list[Event] = []
    agent = make_agent(GroupSpec(former), listeners=[events.append])
    async with agent, asyncio.timeout(DEADLINE_S):
        await until_all_run(agent)
        pids = {name: agent.pids(name) for name in former}
        assert not await agent.reload("", changed)
        await until(lambda: len(order(events, ReloadFailed)) == 2)
        flag.touch()
        assert await agent.reload("", changed)
        await until(lambda: not {*agent.pids("g").values()} & {*pids["g"].values()})
        assert not {*agent.pids("a").values()} & {*pids["a"].values()}
        assert agent.pids("b") == pids["b"]
        done = agent.pids("a")
        assert await agent.reload("", changed)
        assert agent.pids("a") == done


async def test_a_program_that_is_away_for_a_while(tmp_path: Path) -> None:
    """Its children are started again and again, and no other one; each failed start says why."""
    program, away = tmp_path / "server", tmp_path / "away"
    program.symlink_to("/bin/sleep")
    argv = [str(program), "99"]
    policy: dict[str, Any] = {"when": "always", "backoff": Backoff(initial=0.05, cap=0.05)}
    children = {
        "a": leaf(argv, restart=RestartPolicy(**policy)),
        "b": leaf(),
        "c": workers(1, argv, policy=policy, max_restarts=0),
    }
    async with Agent(GroupSpec(children, window=None)) as agent, asyncio.timeout(DEADLINE_S):
        await until_all_run(agent)
        before = agent.pids("b")
        program.rename(away)
        for child in ("a", "c"):
            os.kill(agent.pids(child)[0], signal.SIGKILL)
        missing = {"a", "c/0"}
        async for event in agent.events():
            if isinstance(event, AttemptFailed) and event.root.pid is None:
                assert event.root.summary == f"rank 0: cannot run {program}: command not found"
                missing.discard(event.child)
            if not missing:
                break
        away.rename(program)
        await until(lambda: agent.pids("a") and agent.pids("c"))
        assert agent.pids("b") == before


async def test_a_child_that_cannot_be_opened_says_why(tmp_path: Path) -> None:
    """The event and the status have the reason of each failed start."""
    logs = LogSpec(log_dir=tmp_path / "logs", redirects=3)
    policy = RestartPolicy(when="always")
    spec = GroupSpec({"a": leaf(restart=policy), "b": leaf()}, logs=logs)
    async with Agent(spec) as agent, asyncio.timeout(DEADLINE_S):
        await until_all_run(agent)
        directory = Path(str(agent.status().log_dir))
        directory.rename(tmp_path / "moved")
        directory.touch()
        os.kill(agent.pids("a")[0], signal.SIGKILL)
        async for event in agent.events():
            if isinstance(event, AttemptFailed) and event.root.pid is None:
                break
        assert isinstance(event, AttemptFailed)
        assert event.child == "a"
        assert "cannot create the directory of a: " in event.sentence
        assert agent.children()["a"].failure == event.root.summary
        directory.unlink()
        await until(lambda: agent.status().is_ready)


async def test_workers_below_a_group_keep_their_role_and_words_in_a_reload() -> None:
    """A reload of the group reads the number that a word means, as the first start."""
    cpu = workers(1).replace(nproc_per_node="cpu")
    async with Agent(GroupSpec({"a": leaf(), "w": cpu})) as agent, asyncio.timeout(DEADLINE_S):
        await until_all_run(agent)
        former = agent.children()["w"]
        new = cpu.replace(entrypoint=["sleep", "98"])
        assert await agent.reload("", GroupSpec({"a": leaf(), "w": new}))
        status = agent.children()["w"]
        assert len(status.children) == len(former.children) == len(os.sched_getaffinity(0))
        assert {one.role for one in status.children} == {one.role for one in former.children}


async def test_two_reloads_at_once() -> None:
    """The second ends the first."""
    async with Agent(workers(2)) as agent, asyncio.timeout(DEADLINE_S):
        await until_all_run(agent)
        first, second = await asyncio.gather(agent.reload(), agent.reload())
        assert (first, second) == (False, True)


async def test_a_tree_is_ready_while_its_essential_children_are() -> None:
    async with Agent(GroupSpec({"a": leaf(), "b": leaf()})) as agent:
        assert not agent.status().is_ready
        await until_all_run(agent)
        assert agent.status().is_ready
        await agent.stop(child="b")
        assert not agent.status().is_ready
        await agent.restart(child="b")
        await until(lambda: agent.status().is_ready)
    assert not agent.status().is_ready


async def test_a_child_that_fails_waits_for_what_it_is_after(tmp_path: Path) -> None:
    """It costs one of its restarts, whatever the time that the other one takes."""
    up = tmp_path / "up"
    server = leaf(
        shell(f"trap 'rm {up}; exit' TERM; touch {up}; while :; do sleep 0.01; done"),
        ready={"exec": f"test -e {up}", "period": 0.05},
    )
    trainer = leaf(shell("while test -e $UP; do sleep 0.01; done; exit 3"), env={"UP": str(up)},
                   max_restarts=1, restart=RestartPolicy(backoff=None))  # fmt: skip
    spec = GroupSpec({"server": server, "trainer": trainer}, after={"trainer": ["server"]})
    async with Agent(spec) as agent, asyncio.timeout(DEADLINE_S):
        await until_all_run(agent)
        await agent.stop(child="server")
        await until(lambda: agent.children()["trainer"].phase == "restarting")
        assert await agent.restart(child="server")
        await until(lambda: agent.children()["trainer"].phase == "running")
        assert agent.children()["trainer"].restarts == 1


async def test_a_group_that_fails_is_started_anew_by_its_parent(tmp_path: Path) -> None:
    """Up to its `max_restarts`; then it is given up, and all of it is stopped."""
    script = f"echo x >> {tmp_path}/n; exit 3"
    inner = GroupSpec({"good": leaf(), "bad": leaf(shell(script))}, max_restarts=2)
    spec = GroupSpec({"inner": inner, "other": leaf()}, window=None)
    with pytest.raises(JobFailed, match="inner") as failed:
        await launch(spec)
    assert failed.value.result.exit_code == 3
    assert (tmp_path / "n").read_text().split() == ["x"] * 3


async def test_a_group_is_not_started_anew_for_what_no_start_repairs() -> None:
    """As a program is not that does not exist."""
    inner = GroupSpec({"a": leaf(["/nowhere/program"])}, restart="always")
    async with Agent(GroupSpec({"inner": inner, "b": leaf()})) as agent:
        events = [event async for event in agent.events()]
        with pytest.raises(JobFailed, match="program"):
            await agent.wait()
    assert len(order(events, ChildLaunched)) == 3
    assert agent.status().phase == "failed"


async def test_the_logs_of_a_group_that_is_started_anew(tmp_path: Path) -> None:
    """Its leaves have other directories, and go on with their numbers."""
    failing = leaf(shell("echo $TORCHELASTIC_RUN_ID; exit 5"))
    inner = GroupSpec({"a": failing}, max_restarts=2)
    logs = LogSpec(log_dir=str(tmp_path), redirects=3)
    async with Agent(GroupSpec({"inner": inner}, window=None, logs=logs)) as agent:
        events = [event async for event in agent.events()]
        with pytest.raises(JobFailed, match="exit code 5"):
            await agent.wait()
    launched = [one for one in events if isinstance(one, ChildLaunched) and one.child == "inner/a"]
    assert [(one.generation, one.attempt) for one in launched] == [(0, 0), (1, 1), (2, 2)]
    (run,) = tmp_path.iterdir()
    found = sorted(run.glob("inner/a/attempt_*/0/stdout.log"))
    assert [path.parts[-3] for path in found] == ["attempt_0", "attempt_1", "attempt_2"]
    assert all(path.read_text() for path in found)


async def test_a_preemption_gives_notice_to_all_leaves(tmp_path: Path) -> None:
    """The job is preempted when all have ended."""
    script = 'until [ -e "$ELASTIC_AIO_PENDING_CHANGE" ]; do sleep 0.01; done; '
    script += f"touch {tmp_path}/$ROLE_NAME"
    spec = GroupSpec({"a": leaf(shell(script)), "b": leaf(shell(script))})
    async with Agent(spec) as agent:
        await until_all_run(agent)
        assert agent.preempt(seconds=60)
        assert not agent.preempt(seconds=60)
        with pytest.raises(JobPreempted):
            await agent.wait()
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


async def test_the_notice_of_the_group_counts_for_its_leaves(tmp_path: Path) -> None:
    """Its signal ends no Python worker, and is sent to those that handle it."""
    script = tmp_path / "child.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "path = sys.argv[1]\n"
        "signal.signal(signal.SIGUSR2, lambda *_: (open(path, 'w').write('noted'), sys.exit()))\n"
        "open(path + '.ready', 'w').close()\n"
        "time.sleep(99)\n"
    )
    spec = GroupSpec(
        {name: LaunchSpec(script, args=[str(tmp_path / name)]) for name in "ab"},
        preemption=PreemptionSpec(signal="USR1", forward="USR2"),
    )
    async with Agent(spec) as agent:
        await until(lambda: len([*tmp_path.glob("*.ready")]) == 2)
        for name in "ab":
            os.kill(agent.pids(name)[0], signal.SIGUSR1)
        assert agent.preempt(seconds=60)
        with pytest.raises(JobPreempted):
            await agent.wait()
    assert [(tmp_path / name).read_text() for name in "ab"] == ["noted", "noted"]


# --------------------------------------------------------------------------- every end


async def test_a_second_signal_kills_all_at_once(tmp_path: Path) -> None:
    """Also children whose turn in the order of the stop has not come."""
    before = own_children()
    stubborn = shell("trap '' TERM; sleep 99 & wait; wait")
    spec = GroupSpec({"a": leaf(stubborn), "b": leaf(stubborn)}, after={"b": ["a"]})
    async with Agent(spec) as agent:
        await until_all_run(agent)
        agent.stop()
        agent.kill()
        with pytest.raises(JobStopped):
            await agent.wait()
    assert own_children() == before


@pytest.mark.both_loops
@pytest.mark.parametrize("turns", [0, 1, 3, 10, 40])
async def test_a_cancelled_launch_leaves_nothing(turns: int) -> None:
    """Cancelled twice, at any moment of the start."""
    mark = "OF_THIS_TEST", os.urandom(8).hex()
    x, y, w = (one.replace(env=dict([mark])) for one in (workers(3), leaf(), leaf(POLITE)))
    tree = GroupSpec({"x": x, "y": y, "z": GroupSpec({"w": w})})
    events: list[Event] = []
    task = asyncio.create_task(launch(tree, listeners=[events.append]))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not marked_processes(*mark)
    started = {event.pid for event in events if isinstance(event, WorkerStarted)}
    assert not started & own_children(), "zombies"


async def test_a_restart_that_cannot_be_is_refused() -> None:
    """The arguments of a function are the workers' alone: the job goes on."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    call = LaunchSpec(functions.close_and_sleep, args=(theirs,), stop=PLAN)
    with ours, theirs:
        async with Agent(GroupSpec({"call": call, "other": leaf()})) as agent:
            await until_all_run(agent)
            theirs.close()
            assert await asyncio.to_thread(ours.poll, 30), "the end of the file"
            before = agent.pids("other")
            requests = [partial(agent.restart, child=child) for child in ("call", "")]
            for request in (*requests, partial(agent.reload, "call")):
                with pytest.raises(HostError, match="descriptors"):
                    await request()
            assert agent.pids("other") == before


async def test_a_run_of_several_nodes_is_started_once(tmp_path: Path) -> None:
    """Its store knows its end, whatever would start it again."""
    many = node_spec(tmp_path, ["true"], run_id=None)
    made: list[FakeRendezvous] = []

    def make(*parts: Any) -> FakeRendezvous:
        made.append(FakeRendezvous(*parts))
        return made[-1]

    spec = GroupSpec({"many": many, "other": leaf()}, essential=["other"])
    async with make_agent(spec, rendezvous=make) as agent:
        await until(lambda: made)
        await agent.stop(child="many")
        with pytest.raises(SpecError, match="several nodes"):
            await agent.restart(child="many")
        driver = driver_of(agent)
        driver.receive(ChildRestartReceived("many", "in spite of that"))
        await until(lambda: agent.children()["many"].phase == "failed")
        assert len(made) == 1
        assert agent.status().phase == "running"


async def test_an_error_of_a_callback_is_raised() -> None:
    """As a job alone raises it; the other children are stopped."""

    def decide(_: object) -> Any:
        raise KeyError("what to do")

    policy = RestartPolicy(decide=decide)
    bad = leaf(shell("exit 3"), max_restarts=1, restart=policy)
    with pytest.raises(KeyError, match="what to do"):
        await launch(GroupSpec({"a": leaf(), "group": GroupSpec({"bad": bad})}))


async def test_a_defect_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the start of a child, deep in a tree, or of the state machine: it is raised."""
    before = own_children()
    make = SupervisorDriver._make_leaf

    def make_leaf(self: Any, spec: LaunchSpec, start: Any, *rest: Any) -> Any:
        if start.effect.name == "bad":
            raise RuntimeError("a defect")
        return make(self, spec, start, *rest)

    monkeypatch.setattr(SupervisorDriver, "_make_leaf", make_leaf)
    after = {"bad": ["a"]}
    group = GroupSpec({"a": leaf(), "bad": leaf()}, after=after)
    for spec in (group, GroupSpec({"x": leaf(), "group": group})):
        with pytest.raises(RuntimeError, match="a defect"):
            await launch(spec)
        assert own_children() == before
    async with Agent(GroupSpec({"a": leaf(), "b": GroupSpec({"c": leaf()})})) as agent:
        await until_all_run(agent)
        pids = [*agent.pids("a").values(), *agent.pids("b").values()]
        monkeypatch.setattr(SupervisorMachine, "handle", make_leaf)
        agent.preempt()
        with pytest.raises(AttributeError):
            await agent.wait()
        assert not any(map(alive, pids))


async def test_a_child_that_cannot_be_opened_is_an_error_of_the_job(tmp_path: Path) -> None:
    """One line, before any other child that is after it starts; also deep in a tree."""
    bad = leaf(logs=LogSpec(log_dir="/proc/none", redirects=3))
    group = GroupSpec({"bad": bad, "b": leaf()}, after={"b": ["bad"]})
    below = GroupSpec({"a": leaf(), "group": group})
    for spec, where in (group, "children.bad"), (below, "children.group.children.bad"):
        with pytest.raises(SpecError, match=rf"^{where}\.logs\.log_dir: "):
            await launch(spec)


async def test_a_child_that_does_not_fit_this_host_is_named() -> None:
    nowhere = leaf(sockets=["tcp://192.0.2.1:80"])
    pool = workers(2, sockets=["tcp://192.0.2.1:80"])
    for spec, field in (
        (GroupSpec({"a": leaf(), "b": leaf(nproc_per_node="xpu")}), "children.b.nproc_per_node"),
        (GroupSpec({"a": leaf(), "b": nowhere}), "children.b.sockets"),
        (GroupSpec({"a": leaf(), "b": pool}), "children.b.sockets"),
        (pool, "sockets"),
    ):
        with pytest.raises(SpecError, match=rf"^{field}: "):
            await launch(spec)


async def test_a_callback_gets_each_line_once() -> None:
    """Of all children, also of one that starts anew."""
    shown: list[tuple[str, str]] = []
    say = shell("echo $ROLE_NAME $TORCHELASTIC_RESTART_COUNT")
    again = shell(f"{say[-1]}; exit $((1 - TORCHELASTIC_RESTART_COUNT))")
    children = {"a": leaf(say), "b": leaf(again, max_restarts=1, restart=AT_ONCE)}
    spec = GroupSpec(children, strategy="rest_for_one", logs=LogSpec(tee=3))
    await launch(spec, console=lambda line: shown.append((line.child, line.text)))
    assert sorted(shown) == [("a", "a 0"), ("b", "b 0"), ("b", "b 1")]


async def test_lines_of_children_are_read(tmp_path: Path) -> None:
    """Of the whole tree, or below a child; each line names its child."""
    say = shell("echo I am $ROLE_NAME")
    spec = GroupSpec({"a": leaf(say), "g": GroupSpec({"b": leaf(say)})}, logs=LogSpec(redirects=3))
    async with Agent(spec) as agent:
        lines = [line async for line in agent.logs()]
        assert {(line.child, line.text) for line in lines} == {
            ("a", "I am a"),
            ("g/b", "I am b"),
        }
        assert [line.child async for line in agent.logs(child="g")] == ["g/b"]


POINTS = 60


@pytest.mark.slow
@pytest.mark.both_loops
async def test_cancelled_at_random_points(tmp_path: Path) -> None:
    """Once or twice: restarts, stops in an order and logs end, and nothing is left."""
    seed = time.time_ns()
    dice = random.Random(seed)
    flaky = shell("sleep 0.02; exit $((TORCHELASTIC_RESTART_COUNT < 2))")
    group = GroupSpec({"x": workers(2, flaky), "y": leaf(flaky, max_restarts=2, restart=AT_ONCE)})
    children: dict[str, LaunchSpec | GroupSpec]
    children = {"a": leaf(POLITE), "b": group, "c": leaf(shell("sleep 0.05"))}
    logs = LogSpec(log_dir=str(tmp_path), redirects=3)
    order = {"b": ["a"], "c": ["b"]}
    spec = GroupSpec(children, after=order, ends_with="c", logs=logs, window=None)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await launch(spec)
    length, cancelled = loop.time() - began, 0
    descriptors, own, tasks = open_descriptors(), own_children(), asyncio.all_tasks()
    for point in range(POINTS):
        task = loop.create_task(launch(spec))
        first = dice.uniform(0, length) if point % 3 else dice.uniform(0, length / 10)
        timers = [loop.call_later(first, task.cancel)]
        if point % 2:
            timers.append(loop.call_later(first + dice.uniform(0, length / 4), task.cancel))
        await asyncio.wait([task])
        for timer in timers:
            timer.cancel()
        cancelled += task.cancelled()
        assert task.cancelled() or task.result().exit_code == 0, f"point {point} of seed {seed}"
        await asyncio.sleep(0)
        left = {one for one in asyncio.all_tasks() - tasks if not one.done()}
        assert not left, f"point {point} of seed {seed}"
        assert own_children() == own
        assert not open_descriptors().keys() - descriptors.keys()
    assert cancelled > POINTS / 4


async def test_a_tree_that_waits_costs_nothing() -> None:
    """Fifty children: no task wakes up, and no thread is left."""
    spec = GroupSpec({f"c{number}": leaf() for number in range(50)}, window=None)
    async with Agent(spec) as agent:
        await until_all_run(agent)
        await asyncio.sleep(2.0)  # what the launchers do while a job is idle is done
        before = switches()
        await asyncio.sleep(1.0)
        assert switches() - before <= 5
        assert threading.active_count() == 1


def switches() -> int:
    """Return how often this process has waited by now."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
