"""Jobs whose event loop ends, or whose agent is collected, before their block is left."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from elastic_aio import Agent, LaunchSpec, RestartPolicy
from elastic_aio.multiprocessing import start_context, start_processes
from tests.support import functions
from tests.support.children import POLITE, none_alive, noted, until, until_sync
from tests.support.cli import running
from tests.support.leaks import alive, leaked_processes

LoopFactory = Callable[[], asyncio.AbstractEventLoop]
# Keeps what is entered by hand until the loop has ended.
Held = list[object]


@pytest.fixture(
    params=[asyncio.SelectorEventLoop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
def loop_factory(request: pytest.FixtureRequest) -> LoopFactory:
    """Each event loop."""
    factory: LoopFactory = request.param
    return factory


def polite_agent(directory: Path) -> Agent:
    """Return an agent of two workers that write their ranks to `stopped` on SIGTERM."""
    return Agent(LaunchSpec(POLITE, nproc_per_node=2, env={"NOTES": str(directory)}))


def polite_tree(directory: Path) -> Agent:
    """Return an agent of two such workers, which are children of a supervisor."""
    policy = RestartPolicy(scope="worker")
    env = {"NOTES": str(directory)}
    return Agent(LaunchSpec(POLITE, nproc_per_node=2, env=env, restart=policy))


def polite_group(directory: Path) -> Any:
    """Return a group of two such workers."""
    envs = {rank: {"NOTES": str(directory), "RANK": str(rank)} for rank in range(2)}
    return start_processes("g", POLITE, {0: (), 1: ()}, envs)


@pytest.mark.parametrize(
    "make", [polite_agent, polite_tree, polite_group], ids=["agent", "tree", "group"]
)
@pytest.mark.parametrize("entered", ["in a block", "by hand"])
def test_the_loop_of_a_background_task_ends(
    make: Callable[[Path], Any],
    entered: str,
    loop_factory: LoopFactory,
    tmp_path: Path,
    recwarn: pytest.WarningsRecorder,
) -> None:
    """The stop plan runs first; a block that is never left is worth a warning."""
    held: Held = []

    async def work() -> None:
        if entered == "by hand":
            held.append(await make(tmp_path).__aenter__())
            return
        async with make(tmp_path) as job:
            await job.wait()

    async def main() -> list[int]:
        held.append(asyncio.ensure_future(work()))
        return await until(noted(tmp_path, 2))

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        pids = runner.run(main())
    assert not any(map(alive, pids))
    assert sorted((tmp_path / "stopped").read_text().split()) == ["0", "1"]
    warned = [str(warning.message) for warning in recwarn if warning.category is ResourceWarning]
    assert len(warned) == (entered == "by hand")
    text = "the job bash was running when its event loop was shut down; use `async with`"
    assert set(warned) <= {text}


@pytest.mark.slow
@pytest.mark.parametrize("join", [True, False])
def test_the_loop_of_spawned_functions_ends(
    join: bool, loop_factory: LoopFactory, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Joined in a background task, and not joined at all."""
    held: Held = []

    async def work() -> None:
        held.append(await start_context(functions.indexed_wait, (str(tmp_path),), 2, join))

    async def main() -> list[int]:
        held.append(asyncio.ensure_future(work()))
        return await until(noted(tmp_path, 2))

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        pids = runner.run(main())
    assert not any(map(alive, pids))
    assert len([warning for warning in recwarn if warning.category is ResourceWarning]) == (
        not join
    )


@pytest.mark.both_loops
@pytest.mark.parametrize(
    "make", [polite_agent, polite_tree, polite_group], ids=["agent", "tree", "group"]
)
async def test_an_agent_is_collected(make: Callable[[Path], Any], tmp_path: Path) -> None:
    """Its event loop runs on, and stops the job by its plan."""
    held: Held = [await make(tmp_path).__aenter__()]
    pids = await until(noted(tmp_path, 2))
    with pytest.warns(ResourceWarning) as warned:
        held.clear()
    await until(none_alive(pids))
    text = "the job bash was running when its agent was garbage-collected; use `async with`"
    assert [str(warning.message) for warning in warned] == [text]
    assert sorted((tmp_path / "stopped").read_text().split()) == ["0", "1"]
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await until(lambda: all(task.done() for task in others))


def test_an_agent_is_collected_right_before_its_loop_ends(
    loop_factory: LoopFactory, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """One warning, though the loop ends while the job is being stopped."""

    async def main() -> list[int]:
        held: Held = [await polite_agent(tmp_path).__aenter__()]
        pids = await until(noted(tmp_path, 2))
        held.clear()
        return pids

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        pids = runner.run(main())
    assert not any(map(alive, pids))
    warned = [str(warning.message) for warning in recwarn if warning.category is ResourceWarning]
    assert [text.partition(";")[0] for text in warned] == [
        "the job bash was running when its agent was garbage-collected"
    ]


PROGRAM = """
import asyncio, gc, os, sys, uvloop, warnings
from pathlib import Path
from elastic_aio import Agent, LaunchSpec, RestartPolicy
from tests.support.children import noted, until
factory, how = sys.argv[1:3]
warnings.simplefilter("always")
loop = (uvloop.new_event_loop if factory == "uvloop" else asyncio.SelectorEventLoop)()
policy = RestartPolicy(scope=os.environ["SCOPE"])
agent = Agent(LaunchSpec(sys.argv[3:], nproc_per_node=2, restart=policy))
async def main():
    await agent.__aenter__()
    print(*await until(noted(Path(os.environ["NOTES"]), 2)))
loop.run_until_complete(main())
if how == "closed":
    loop.close()
elif how == "collected":
    del agent
    gc.collect()
else:
    del agent, loop
    gc.collect()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("loop", ["asyncio", pytest.param("uvloop", marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["closed", "collected", "forgotten"])
@pytest.mark.parametrize("scope", ["group", "worker"])
def test_no_loop_runs_any_more(how: str, loop: str, scope: str, tmp_path: Path) -> None:
    """The guardian ends the job: SIGTERM, then SIGKILL; the program runs on."""
    argv = [sys.executable, "-c", PROGRAM, loop, how, *POLITE]
    with running(argv, env={"NOTES": str(tmp_path), "SCOPE": scope}, stdin_pipe=True) as program:
        program.wait_out("ready")
        *pids, _ = program.out.split()
        until_sync(none_alive(map(int, pids)), "the end of the workers")
        until_sync((tmp_path / "stopped").exists)
        assert program.process.stdin is not None
        program.process.stdin.close()
        assert program.wait() == 0, program.err
        ours = [line for line in program.err.splitlines() if "was running when" in line]
        assert len({*ours}) == 1  # of each leaf of a tree
        assert "ResourceWarning: " in ours[0]
        assert ours[0].endswith("; use `async with`")
    until_sync(lambda: not leaked_processes())  # the guardian looks twice


# Becomes a daemon after a job, as programs do that fork, and goes on with its loop.
DAEMON = """
import asyncio, os, sys, time, uvloop
from elastic_aio import LaunchSpec, launch
loop = (uvloop.new_event_loop if sys.argv[1] == "uvloop" else asyncio.SelectorEventLoop)()
loop.run_until_complete(launch(LaunchSpec(["true"])))
if fork := os.fork():
    os._exit(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]))
loop.run_until_complete(loop.run_in_executor(None, time.sleep, 0.1))  # a thread wakes the loop
os._exit(7)
"""


@pytest.mark.parametrize("loop", ["asyncio", pytest.param("uvloop", marks=pytest.mark.slow)])
def test_a_fork_after_the_job_goes_on_with_the_loop(loop: str) -> None:
    with running([sys.executable, "-c", DAEMON, loop]) as program:
        assert program.wait() == 7, program.err


# Forks in a coroutine while a job runs; the fork leaves by `sys.exit`.
FORKING = """
import asyncio, os, sys, uvloop
from pathlib import Path
from elastic_aio import Agent, LaunchSpec, RestartPolicy, launch
from elastic_aio.multiprocessing import start_processes
from tests.support.children import noted, until
factory, how = sys.argv[1:3]
notes, argv, envs = Path(os.environ["NOTES"]), sys.argv[3:], {i: {"RANK": str(i)} for i in (0, 1)}
policy = RestartPolicy(scope=os.environ["SCOPE"])
spec = LaunchSpec(argv, nproc_per_node=2, restart=policy)

async def fork():
    pids = await until(noted(notes, 2))
    fork = os.fork()
    if not fork:
        sys.exit(7)
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    pidfd = os.pidfd_open(fork)
    loop.add_reader(pidfd, ended.set)
    await ended.wait()
    loop.remove_reader(pidfd)
    print("fork", os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)
    for pid in pids:
        os.kill(pid, 0)
    assert not (notes / "stopped").exists()
    await loop.run_in_executor(None, print, "a thread wakes the loop")

async def main():
    if how == "task":
        job = asyncio.ensure_future(launch(spec))
        await fork()
        job.cancel()
        await asyncio.wait([job])
    elif how == "block":
        async with Agent(spec):
            await fork()
    else:
        async with start_processes("g", argv, {0: (), 1: ()}, envs):
            await fork()

make = uvloop.new_event_loop if factory == "uvloop" else asyncio.SelectorEventLoop
with asyncio.Runner(loop_factory=make) as runner:
    runner.run(main())
"""


@pytest.mark.parametrize("loop", ["asyncio", pytest.param("uvloop", marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["block", "task", "group"])
@pytest.mark.parametrize("scope", ["group", "worker"])
def test_a_fork_that_exits_leaves_the_job_alone(
    how: str, loop: str, scope: str, tmp_path: Path
) -> None:
    """Its copy of the job neither stops the workers nor waits for them, and the loop of its
    parent goes on."""
    argv = [sys.executable, "-c", FORKING, loop, how, *POLITE]
    with running(argv, env={"NOTES": str(tmp_path), "SCOPE": scope}) as program:
        assert program.wait() == 0, program.err
        assert program.out.splitlines()[-2:] == ["fork 7", "a thread wakes the loop"]
        assert "Traceback" not in program.err
        assert "Task was destroyed" not in program.err
    assert sorted((tmp_path / "stopped").read_text().split()) == ["0", "1"]
