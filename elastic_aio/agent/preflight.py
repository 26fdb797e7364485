"""Checks of this host and process before a job starts, and what its workers get from them."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_aio.errors import HostError, InternalError, SpawnError, SpecError
from elastic_aio.spec.job import Command, Function, LaunchSpec, Module, Script
from elastic_aio.worker.bootstrap import is_importing_main


def resolve_nproc(spec: LaunchSpec) -> int:
    """Return the number of workers that `nproc_per_node` means on this host.

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
            problem = "no NVIDIA device is visible; use a number, 'cpu' or 'auto'"
            raise SpecError("nproc_per_node", wanted, problem)
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


def check_sigchld() -> None:
    """Check that the kernel keeps the exit statuses of children.

    Raises:
        HostError: SIGCHLD is ignored, so the kernel reaps children itself.
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        raise HostError(
            "SIGCHLD is ignored in this process, so the workers' exit statuses would be lost;"
            " call signal.signal(signal.SIGCHLD, signal.SIG_DFL) first"
        )


def check_main_guard() -> None:
    """Check that no worker is importing the script that started its job.

    Raises:
        HostError: the script's main part is not guarded.
    """
    if is_importing_main():
        raise HostError(
            "a worker imports this script to find its functions, and the script starts a job"
            " again; put that part under: if __name__ == '__main__':"
        )


def worker_argv(
    spec: LaunchSpec, local_rank: int, args: Sequence[Any] | None = None
) -> tuple[str, ...]:
    """Return the argv of one worker that runs a command; `args` replaces the job's.

    `${local_rank}` in arguments is replaced; nothing else is touched (torchrun also
    turns `$$` into `$`, which breaks arguments with a literal `$$`).
    """

    def substitute(arg: str) -> str:
        return arg.replace("${local_rank}", str(local_rank))

    args = tuple(map(substitute, spec.args if args is None else args))
    python = spec.python or sys.executable
    match spec.entrypoint:
        case Script(path):
            return (python, "-u", path, *args)
        case Module(name):
            return (python, "-u", "-m", name, *args)
        case Command(argv):
            program, *first = argv
            return (program, *map(substitute, first), *args)
        case Function():
            raise InternalError("a function has no command")


def check_runnable(spec: LaunchSpec) -> None:
    """Check that Python can find the script: a missing one is not a failure of a worker.

    Raises:
        SpawnError: with a shell's exit code, 127 for a missing script and 126 for
            one that cannot be read.
    """
    if not isinstance(spec.entrypoint, Script):
        return
    path = spec.entrypoint.path
    if spec.cwd is not None and not os.path.isdir(spec.cwd):
        return  # the error of the spawn is clearer
    full = os.path.join(spec.cwd or "", path)
    if not os.path.exists(full):
        raise SpawnError(f"script not found: {path}", permanent=True, exit_code=127)
    if not os.access(full, os.R_OK):
        raise SpawnError(f"script cannot be read: {path}", permanent=True, exit_code=126)
    if os.path.isdir(full) and not os.path.exists(os.path.join(full, "__main__.py")):
        raise SpawnError(
            f"script is a directory without __main__.py: {path}", permanent=True, exit_code=126
        )


def worker_env(spec: LaunchSpec, nproc: int, own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process of the job.

    Args:
        spec: the job, whose `env` overrides the inherited environment.
        nproc: number of workers on this host; with several, OMP_NUM_THREADS defaults to 1.
        own: variables of this package, which override all others.
    """
    defaults = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if nproc > 1:
        defaults["OMP_NUM_THREADS"] = "1"
    return {**defaults, **os.environ, **spec.env, **own}


def free_port() -> int:
    """Return a TCP port that is free now, on IPv4 and IPv6.

    Raises:
        HostError: there is no free port.
    """
    try:
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        with socket.socket(family) as probe:
            if family is socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind(("", 0))
            port: int = probe.getsockname()[1]
            return port
    except OSError as error:
        raise HostError(f"cannot find a free port: {error}") from error


def hostname() -> str:
    """Return this host's name, without a DNS query."""
    return socket.gethostname()
