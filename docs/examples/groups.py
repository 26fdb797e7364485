"""Groups of processes without restarts, for async programs."""

# %%
import asyncio

from elastic_aio.multiprocessing import (
    GroupContext,
    ProcessContext,
    ProcessException,
    ProcessExitedException,
    ProcessFailure,
    RunProcsResult,
    start_context,
    start_processes,
)


def leave(index: int) -> None:
    raise SystemExit(index + 3)


async def groups() -> None:
    context: ProcessContext | None = await start_context(leave, nprocs=1, join=False)
    try:
        while context is not None and not await context.join():
            pass
    except ProcessExitedException as error:
        print(error.exit_code, isinstance(error, ProcessException))  # 3 True

    group: GroupContext
    async with start_processes("fail", "false", {0: ()}, {0: {}}) as group:
        result: RunProcsResult | None = await group.wait()
    failures: list[ProcessFailure] = list(result.failures.values()) if result else []
    print([failure.exitcode for failure in failures])  # [1]


if __name__ == "__main__":
    asyncio.run(groups())
