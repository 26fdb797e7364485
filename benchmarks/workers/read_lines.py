"""Reads the output of a job in a program: `read_lines.py HOW LINES WORKERS LOG_DIR COMMAND...`.

HOW is `single` or `batch`.  Prints the monotonic nanoseconds at which the last of so many lines
was read; 0 where the version of elastic_aio cannot read them.
"""

from __future__ import annotations

import asyncio
import sys
import time

from elastic_aio import Agent, LaunchSpec, LogSpec


async def main(how: str, lines: int, workers: int, log_dir: str, command: list[str]) -> int:
    """Run the job; return the time of the last line."""
    logs = LogSpec(log_dir=log_dir, redirects=1)
    count = 0
    async with Agent(LaunchSpec(command, nproc_per_node=workers, logs=logs)) as agent:
        async with agent.logs() as reader:
            if how == "batch":
                while count < lines:
                    count += len(await reader.batch())
            else:
                async for _ in reader:
                    count += 1
                    if count == lines:
                        break
        ended = time.monotonic_ns()
        await agent.wait()
    return ended


if __name__ == "__main__":
    how, lines, workers, log_dir, *command = sys.argv[1:]
    can_read = hasattr(Agent, "logs")
    print(asyncio.run(main(how, int(lines), int(workers), log_dir, command)) if can_read else 0)
