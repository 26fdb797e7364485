"""A job while it runs: status, events, lines, stacks."""

# %%
import asyncio

from elastic_aio import (
    Agent,
    Event,
    EventReader,
    JobStatus,
    LaunchSpec,
    WorkerStarted,
    WorkerStatus,
)


async def watch() -> None:
    async with Agent(LaunchSpec(["sleep", "60"], nproc_per_node=2)) as agent:
        events: EventReader[Event] = agent.events()
        async for event in events:
            if isinstance(event, WorkerStarted) and event.rank == 1:
                break
        status: JobStatus = agent.status()
        workers: tuple[WorkerStatus, ...] = status.workers
        print([worker.state for worker in workers])  # ['running', 'running']


asyncio.run(watch())

# %%
import asyncio

from elastic_aio import Agent, LaunchSpec, LogLine, LogReader, LogSpec


async def read() -> None:
    spec = LaunchSpec(["echo", "hello"], logs=LogSpec(redirects=3))
    async with Agent(spec) as agent:
        lines: LogReader = agent.logs()
        async for line in lines:
            print(describe(line))
        await agent.wait()


def describe(line: LogLine) -> str:
    return f"rank {line.rank}, {line.stream}: {line.text}"


asyncio.run(read())

# %%
import asyncio
import sys

from elastic_aio import (
    Agent,
    LaunchSpec,
    StackDump,
    StackFrame,
    ThreadStack,
    WorkerReady,
    WorkerStacks,
)

PROGRAM = """
import time
from elastic_aio.worker import ready

def wait_for_data():
    ready()
    time.sleep(600)

wait_for_data()
"""


async def dump() -> None:
    async with Agent(LaunchSpec([sys.executable, "-c", PROGRAM])) as agent:
        async for event in agent.events():
            if isinstance(event, WorkerReady):
                break
        dumped: StackDump = await agent.dump()
        worker: WorkerStacks = dumped.workers[0]
        thread: ThreadStack | None = worker.main_thread
        frames: tuple[StackFrame, ...] = thread.frames if thread else ()
        print(any(frame.function == "wait_for_data" for frame in frames))  # True


asyncio.run(dump())

# %%
import asyncio
import sys

from elastic_aio import ConsoleTarget, Event, EventListener, LaunchSpec, LogLine, TextOutput, launch


class Upper:
    """An output for `console`: whatever has `write` and `flush`."""

    def write(self, text: str) -> int:
        return sys.stdout.write(text.upper())

    def flush(self) -> None:
        sys.stdout.flush()


def show(event: Event) -> None:
    seen.append(type(event).__name__)


def collect(line: LogLine) -> None:
    lines.append(line.text)


seen: list[str] = []
lines: list[str] = []
output: TextOutput = Upper()
listener: EventListener = show
console: ConsoleTarget = collect
asyncio.run(launch(LaunchSpec(["echo", "hello"]), console=output, listeners=[listener]))  # HELLO
asyncio.run(launch(LaunchSpec(["echo", "hello"]), console=console))
print(lines, seen[0])  # ['hello'] JobStarted

# %%
import asyncio

from elastic_aio import JobEvents, LaunchSpec, RendezvousSpec, follow_job, launch
from elastic_aio.store import StoreServer


async def follow() -> None:
    async with StoreServer("127.0.0.1") as server:
        meeting = RendezvousSpec(endpoint=server.endpoint, is_host=False)
        spec = LaunchSpec(["true"], nnodes=2, run_id="both", rendezvous=meeting)
        await asyncio.gather(launch(spec), launch(spec))
        events: JobEvents
        async with follow_job(server.endpoint, "both") as events:
            names = [type(event).__name__ async for event in events]
    print(names[-1])  # JobFinished


asyncio.run(follow())
