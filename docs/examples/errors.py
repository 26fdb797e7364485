"""The errors: their bases, what they carry, and what to do about each."""

# %%
from elastic_aio import (
    ElasticAioError,
    HostError,
    InternalError,
    JobEnded,
    JobPreempted,
    RendezvousFailed,
    SpawnError,
    SpecError,
    StoreError,
)


def advice(error: ElasticAioError) -> str:
    """Return what a program that runs jobs does after an error."""
    match error:
        case SpecError():
            return f"correct {error.field}"
        case HostError() | SpawnError():
            return "run it on another host"
        case JobPreempted():
            return "run it again"
        case RendezvousFailed():
            return "look at the other nodes"
        case JobEnded():
            return f"see {error.result.reason}"
        case StoreError():
            return "look at the store"
        case InternalError():
            return "report it"
    return "none"


print(advice(SpecError("nnodes", 0, "must be at least 1")))  # correct nnodes
print(
    advice(SpawnError("cannot be executed", permanent=True, exit_code=126))
)  # run it on another host
print(advice(HostError("no interpreter for the guardian")))  # run it on another host

# %%
import asyncio

from elastic_aio import StoreClosed, StoreError, StoreLost, StoreRefused, StoreTimeout
from elastic_aio.store import MemoryStore


async def look() -> None:
    async with MemoryStore(timeout=0.1) as store:
        try:
            await store.get("missing")
        except StoreTimeout:
            print("it is not set")  # it is not set
        except (StoreLost, StoreRefused) as error:
            print("try another endpoint:", error)
    try:
        await store.get("missing")
    except StoreClosed as error:
        print(isinstance(error, StoreError))  # True


asyncio.run(look())

# %%
import asyncio

from elastic_aio import AgentUnreachable, ControlError, JobNotFound
from elastic_aio.control import connect


async def stop(job: str) -> None:
    try:
        async with connect(job) as client:
            await client.stop("enough")
    except JobNotFound:
        print("there is none")  # there is none
    except AgentUnreachable:
        print("its launcher does not answer")
    except ControlError as error:
        print("it refuses:", error)


asyncio.run(stop("no-such-job"))
