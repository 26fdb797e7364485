"""The health check of a node: a command that says whether this host is fit for workers."""

from __future__ import annotations

import asyncio
import os
from contextlib import closing
from io import FileIO

from elastic_aio.agent.runtime import LocalRuntime
from elastic_aio.aio import run_shielded
from elastic_aio.errors import HostError, SpawnError
from elastic_aio.process.children import Child
from elastic_aio.spec.stop import StopPlan
from elastic_aio.text import error_reason, one_line

_TAIL = 4096  # bytes of the output that are kept
_LINE_MAX = 200
_AT_ONCE = StopPlan(())


class CommandOutput:
    """The end of what a command writes; must be closed."""

    def __init__(self) -> None:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reader, False)
        self._reader, self.writer = FileIO(reader), FileIO(writer, "w")
        self._tail = b""
        asyncio.get_running_loop().add_reader(reader, self._read)

    def _read(self) -> bool:
        """Read once; return whether there was something."""
        data = self._reader.read(1 << 16)
        if data == b"":  # the end; None: there is nothing yet
            asyncio.get_running_loop().remove_reader(self._reader)
        self._tail = (self._tail + (data or b""))[-_TAIL:]
        return bool(data)

    def last_line(self) -> str:
        """Return the last line that is not empty, after the end of the command."""
        for _ in range(_TAIL):  # a pipe holds less
            if not self._read():
                break
        lines = reversed(self._tail.decode("utf-8", "replace").splitlines())
        return next(filter(None, (one_line(line, _LINE_MAX) for line in lines)), "")

    def close(self) -> None:
        self.writer.close()
        asyncio.get_running_loop().remove_reader(self._reader)
        self._reader.close()


async def _start(runtime: LocalRuntime, command: str, output: int) -> Child:
    child = await runtime.start_command(("/bin/sh", "-c", command), output)
    runtime.tree.add(child)
    return child


async def check_health(runtime: LocalRuntime, command: str, timeout: float) -> str:
    """Run a command of the shell; return why this host is not fit, in one line, empty if it is.

    No worker of the job may run meanwhile.  After `timeout` seconds the command is killed; so is
    what it has left behind when it ends.

    Cancellation: kills the command.
    """
    try:
        with closing(CommandOutput()) as output:
            try:
                writer = output.writer.fileno()
                child = await run_shielded(lambda: _start(runtime, command, writer))
                output.writer.close()
                has_ended = await runtime.clock.wait_for(child.exited, seconds=timeout)
            finally:
                await run_shielded(lambda: runtime.tree.stop(_AT_ONCE, lambda *_: None))
            last = output.last_line()
    except (SpawnError, HostError, OSError) as error:
        why = error_reason(error) if isinstance(error, OSError) else str(error)
        return f"its health check cannot run: {why}"
    status = child.exited.result().status if has_ended else None
    if status is not None and status.is_success:
        return ""
    what = f"has not ended within {timeout:g} s" if status is None else f"has failed ({status})"
    return f"its health check {what}" + (f": {last}" if last else "")
