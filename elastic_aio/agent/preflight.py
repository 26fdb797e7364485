"""What a job finds on its machine, looked up before anything starts."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_aio.errors import InternalError, SpawnError, SpecError, SurroundingsError
from elastic_aio.spec import Command, Function, LaunchSpec, Module, Script
from elastic_aio.worker.bootstrap import is_importing_main

__all__ = [
    "check_child_signals",
    "check_guarded",
    "check_runnable",
    "command_of",
    "environment",
    "free_port",
    "node_name",
    "resolve_nproc",
]


def resolve_nproc(spec: LaunchSpec) -> int:
    """Return the number of workers that `nproc_per_node` means on this machine.

    `cpu` counts the processors this process may run on, `gpu` the NVIDIA devices
    it can see, `auto` the devices if there are any and else the processors.

    Raises:
        SpecError: there is no device, or the logs name a rank that does not exist.
    """
    wanted = spec.nproc_per_node
    if not isinstance(wanted, int):
        processors = len(os.sched_getaffinity(0))
        devices = 0 if wanted == "cpu" else visible_gpus()
        if wanted == "gpu" and not devices:
            accepted = (
                "needs a visible NVIDIA device (there is none); use a number, 'cpu' or 'auto'"
            )
            raise SpecError("nproc_per_node", wanted, accepted)
        wanted = devices or processors
    spec.logs.check_with(wanted)
    return wanted


def visible_gpus() -> int:
    """Count NVIDIA devices: those that CUDA_VISIBLE_DEVICES lists, or all that exist."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        present = sum(1 for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name))
    except OSError:
        present = 0
    if listed is None or not present:
        return present
    # CUDA takes the list up to the first entry that is no device.
    count = 0
    for entry in map(str.strip, listed.split(",")):
        is_index = entry.isdecimal() and len(entry) < 6 and int(entry) < present
        if not is_index and not re.fullmatch(r"(GPU|MIG)-[\w-]+(/\d+/\d+)?", entry):
            break
        count += 1
    return count


def check_child_signals() -> None:
    """Refuse to work where exit statuses are thrown away.

    Raises:
        SurroundingsError: SIGCHLD is ignored, so the kernel reaps children itself.
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        raise SurroundingsError(
            "SIGCHLD is ignored in this process, so the workers' exit statuses would be lost;"
            " call signal.signal(signal.SIGCHLD, signal.SIG_DFL) first"
        )


def check_guarded() -> None:
    """Refuse to start a job while a worker imports the script that started it.

    Raises:
        SurroundingsError: the script's main part is not guarded.
    """
    if is_importing_main():
        raise SurroundingsError(
            "a worker imports this script to find its functions, and the script starts a job"
            " again; put that part under: if __name__ == '__main__':"
        )


def command_of(
    spec: LaunchSpec, local_rank: int, args: Sequence[Any] | None = None
) -> tuple[str, ...]:
    """Return the argv of one worker that runs a command; `args` replaces the job's.

    `${local_rank}` in arguments is replaced; nothing else is touched (torchrun also
    turns `$$` into `$`, which breaks arguments that mean what they say).
    """
    place = str(local_rank)
    given = spec.args if args is None else args
    args = tuple(arg.replace("${local_rank}", place) for arg in given)
    python = spec.python or sys.executable
    match spec.entrypoint:
        case Script(path):
            return (python, "-u", path, *args)
        case Module(name):
            return (python, "-u", "-m", name, *args)
        case Command(argv):
            program, *first = argv
            return (program, *(arg.replace("${local_rank}", place) for arg in first), *args)
        case Function():
            raise InternalError("a function has no command")


def check_runnable(spec: LaunchSpec) -> None:
    """Refuse a script that Python itself would not find: that is no worker's failure.

    Raises:
        SpawnError: with a shell's exit code, 127 for a missing script and 126 for
            one that cannot be read.
    """
    if not isinstance(spec.entrypoint, Script):
        return
    path = spec.entrypoint.path
    if spec.cwd is not None and not os.path.isdir(spec.cwd):
        return  # spawning says this better
    full = os.path.join(spec.cwd or "", path)
    if not os.path.exists(full):
        raise SpawnError(f"script not found: {path}", permanent=True, exit_code=127)
    if not os.access(full, os.R_OK):
        raise SpawnError(f"script cannot be read: {path}", permanent=True, exit_code=126)
    if os.path.isdir(full) and not os.path.exists(os.path.join(full, "__main__.py")):
        raise SpawnError(
            f"script is a folder without __main__.py: {path}", permanent=True, exit_code=126
        )


def environment(spec: LaunchSpec, nproc: int, ours: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process of the job: ours go over the user's over the inherited.

    With `nproc` workers on a node some have defaults, for what nobody has set.
    """
    defaults = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if nproc > 1:
        defaults["OMP_NUM_THREADS"] = "1"
    return {**defaults, **os.environ, **spec.env, **ours}


def free_port() -> int:
    """Return a TCP port that nobody listens on now, on IPv4 and IPv6.

    Raises:
        SurroundingsError: there is none.
    """
    try:
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        with socket.socket(family) as one:
            if family is socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            one.bind(("", 0))
            port: int = one.getsockname()[1]
            return port
    except OSError as error:
        raise SurroundingsError(f"cannot find a free port: {error}") from error


def node_name() -> str:
    """Return this host's name, without asking any name server."""
    return socket.gethostname()
