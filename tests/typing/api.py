"""Never run: a type checker in strict mode reads how the library is used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from elastic_aio import (
    Agent,
    AttemptFailed,
    AttemptResult,
    Backoff,
    Command,
    Decide,
    Event,
    EventListener,
    EventReader,
    ExitStatus,
    Failure,
    Function,
    Goodput,
    JobEvents,
    JobFailed,
    JobFinished,
    JobState,
    JobStatus,
    JobStopped,
    LaunchResult,
    LaunchSpec,
    LogSpec,
    Module,
    RendezvousSpec,
    ResourceUsage,
    RestartAction,
    Restarting,
    RestartPolicy,
    RestartWindow,
    Script,
    SignalSpec,
    SpawnError,
    SpecError,
    StartMethod,
    StdMap,
    StopPlan,
    StopStep,
    WorkerError,
    WorkerExited,
    WorkerResult,
    WorkerStatus,
    event_from_json,
    event_to_json,
    follow_job,
    format_failure,
    launch,
    run,
    sync,
)
from elastic_aio.control import (
    AgentUnreachable,
    EndReply,
    JobClient,
    RunningJob,
    connect,
    list_jobs,
)
from elastic_aio.multiprocessing import spawn, start_context, start_processes
from elastic_aio.plugins import LogDestinations, LogLayout, LogLayoutContext
from elastic_aio.worker import WorkerContext, record


def specs() -> list[LaunchSpec]:
    """Every kind of entry point and setting is accepted."""
    return [
        LaunchSpec("train.py"),
        LaunchSpec(Path("train.py"), args=["--lr", 0.1, Path("data"), 3]),
        LaunchSpec(["bash", "-c", "exit 0"], nproc_per_node=2),
        LaunchSpec(len, args=["abc"], start_method="fork"),
        LaunchSpec(Function(len, "measure"), start_method="forkserver", preload=["json"]),
        LaunchSpec(Script("train.py"), nproc_per_node="auto", nnodes="1:2"),
        LaunchSpec(Module("pkg.train"), nnodes=(1, 1), env={"A": "b"}, cwd=Path("/")),
        LaunchSpec(
            Command(("true",)),
            max_restarts=3,
            logs=LogSpec(
                log_dir="logs",
                redirects=StdMap.parse("redirects", "0-3:3"),
                local_ranks_filter=frozenset({0}),
            ),
            restart=RestartPolicy(
                backoff=Backoff(initial=1, cap=30),
                window=RestartWindow(2, 600.0),
                restart_on=frozenset({1, 137}),
                decide=decide,
            ),
            stop=StopPlan((StopStep("SIGTERM", 10.0), StopStep(3, 1))),
            stdin="rank0",
        ),
    ]


def decide(failure: Failure) -> RestartAction:
    """Decide without waiting."""
    return RestartAction.GIVE_UP if failure.status.code == 3 else RestartAction.DEFAULT


async def decide_later(failure: Failure) -> RestartAction:
    """Decide with waiting."""
    return RestartAction.RESTART


callback: Decide = decide
start_method: StartMethod = "forkserver"


class ByDay(LogLayout):
    """A plug-in derives from a public class."""

    __slots__ = ()

    def plan(self, worker: LogLayoutContext) -> LogDestinations:
        return LogDestinations(stdout=f"{worker.directory}/today.out")


def policies() -> tuple[RestartPolicy, RestartPolicy]:
    """Both kinds of callback are accepted."""
    return RestartPolicy(decide=decide), RestartPolicy(decide=decide_later)


async def one_job(spec: LaunchSpec) -> int:
    """Await a whole job and look at all of its result."""
    try:
        result: LaunchResult = await launch(spec, signals=SignalSpec(), listeners=[heard])
    except JobFailed as failed:
        failures: tuple[Failure, ...] = failed.failures
        cause: Failure | None = failed.root_cause
        text: str = format_failure(failed.result, "job")
        print(text, cause.summary if cause else failures)
        return failed.result.exit_code
    except JobStopped as stopped:
        state: JobState = stopped.result.state
        print(state.value)
        return stopped.result.exit_code
    except SpecError as refused:
        field: str = refused.field
        print(field)
        return 2
    except SpawnError as missing:
        return missing.exit_code
    attempts: tuple[AttemptResult, ...] = result.attempts
    workers: tuple[WorkerResult, ...] = attempts[-1].workers
    status: ExitStatus = workers[0].status
    usage: ResourceUsage | None = workers[0].usage
    values: Mapping[int, object] = result.return_values
    shell_code: int = status.shell_code
    spent: Goodput = result.goodput
    print(
        spent.restarting, usage.user_s if usage else None, values, result.log_dir, result.restarts
    )
    return shell_code


def heard(event: Event) -> None:
    """Take an event as a listener."""
    line: bytes = event_to_json(event)
    again: Event = event_from_json(line)
    print(again.seq, again.time, again.attempt, again.node)


listener: EventListener = heard


async def watched_job(spec: LaunchSpec) -> LaunchResult:
    """Watch a job by its events."""
    async with Agent(spec) as agent:
        run_id: str = agent.run_id
        reader: EventReader[Event] = agent.events()
        await reader.aclose()
        present: JobStatus = agent.status(usage=False)
        one: WorkerStatus = present.workers[0]
        pids: dict[int, int] = agent.pids()
        is_running: bool = await agent.restart("new data")
        productive: float = present.goodput.productive
        print(one.heartbeat, pids, is_running, productive)
        async for event in agent.events(after=0):
            seen: Event = event
            match event:
                case AttemptFailed(root=root):
                    cause: Failure = root
                    error: WorkerError | None = cause.error
                    print(run_id, error)
                case Restarting():
                    delay: float = event.delay
                    print(delay)
                case WorkerExited():
                    status: ExitStatus = event.status
                    print(status)
                case JobFinished():
                    state: JobState = event.state
                    print(state)
                case _:
                    print(type(seen).__name__)
        agent.kill()
        agent.stop(signal=15, reason="enough")
        await agent.stop()
        result: LaunchResult = await agent.wait()
        return result


def script(spec: LaunchSpec) -> int:
    """Run a job without a loop."""
    result: LaunchResult = run(spec, signals=True)
    return result.exit_code


@record
def main(steps: int, *, name: str = "x") -> float:
    """Keep the signature of a recorded function."""
    context: WorkerContext = WorkerContext.from_env()
    rank: int = context.rank
    return float(rank + steps)


@record
async def main_async(steps: int) -> str:
    """Keep the signature of a recorded coroutine function."""
    return str(steps)


async def called() -> tuple[float, str]:
    """Call both."""
    number: float = main(3, name="y")
    text: str = await main_async(3)
    return number, text


async def groups() -> None:
    """Bare groups of processes, in both forms."""
    await spawn(print, ("x",), nprocs=2)
    context = await start_context(print, join=False, start_method="fork")
    if context is not None:
        is_over: bool = await context.join(timeout=1.0, grace_period=2.0)
        pids: list[int] = context.pids()
        print(is_over, pids)
    async with start_processes("g", len, {0: ("abc",)}, {0: {}}, LogSpec(tee=3)) as group:
        result = await group.wait(timeout=1.0)
        await group.close(timeout=3.0)
    if result is not None and not result.is_failed():
        print(result.return_values[0], result.stdouts[0], result.failures)
    with sync.start_processes("g", ["true"], {0: ()}, {0: {}}) as other:
        print(other.wait(), other.pids())


async def far_job() -> int:
    """Follow a job of many nodes from anywhere."""
    last = -1
    stream: JobEvents = follow_job("node0:29400,node1", "run", token=None, after=last)
    async with stream as events:
        async for event in events:
            seen: Event = event
            last = seen.seq
    return last


def meetings() -> list[RendezvousSpec]:
    """Every kind of meeting."""
    return [
        RendezvousSpec(),
        RendezvousSpec(backend="static", node_rank=0, endpoint="node0"),
        RendezvousSpec(join_timeout=5, is_host=False, conf={"a": "b"}, token="secret-of-this-test"),
    ]


async def control(found: RunningJob) -> EndReply | None:
    """Control a job of another process."""
    jobs: list[RunningJob] = await list_jobs()
    async with connect(jobs[0].pid) as job:
        client: JobClient = job
        status: JobStatus = await client.status()
        async for event in client.events(status.seq, follow=True):
            printed: Event = event
            print(printed.sentence)
        text: str = (await client.dump()).text
        print(text, await client.restart(), (await client.signal("SIGUSR1")).pids)
        try:
            return await client.stop("enough")
        except AgentUnreachable:
            return await JobClient(found).wait()
