"""The health check of a node: a command that says whether this host is fit for workers."""

from __future__ import annotations

from contextlib import closing

from elastic_aio.agent.runtime import LocalRuntime
from elastic_aio.aio import run_shielded
from elastic_aio.errors import HostError, SpawnError
from elastic_aio.process.children import Child
from elastic_aio.process.command_output import CommandOutput
from elastic_aio.spec.stop import StopPlan
from elastic_aio.text import error_reason

_AT_ONCE = StopPlan(())


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
