"""Checks of this host and process before a job starts, and what its workers get from them."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from elastic_aio.aio import run_shielded
from elastic_aio.errors import HostError, InternalError, SpawnError, SpecError
from elastic_aio.process.children import ChildSpec, check_directory, check_program, command_spawner
from elastic_aio.process.guardian_process import list_size
from elastic_aio.ranks import with_local_rank
from elastic_aio.spec.job import NPROC_ACCEPTED, Command, Function, LaunchSpec, Module, Script
from elastic_aio.worker.context import without_channels

if TYPE_CHECKING:
    from elastic_aio.hardware.host import Accelerator

_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_STARTUP: Final = os.path.join(_PACKAGE, "worker", "startup")
"""Directory of the module that the interpreter of a script imports first."""


def _version_of_startup() -> tuple[int, int] | None:
    try:
        status = os.stat(os.path.join(_STARTUP, "sitecustomize.py"))
    except OSError:
        return None  # the package has been removed
    return status.st_ino, status.st_mtime_ns


_VERSION: Final = _version_of_startup()
"""As this launcher has begun."""
ACCELERATORS: Final = "elastic_aio.accelerators"
"""Entry point group of functions that return a number of devices, for `nproc_per_node`."""


def resolve_nproc(spec: LaunchSpec) -> int:
    """Return the number of workers that `nproc_per_node` means on this host.

    `cpu` counts the processors that this process may run on; `gpu`, `xpu` and the names of
    private-use backends count the devices that it can see.  `auto` counts the devices of the first
    kind that exists, else the processors.

    Raises:
        SpecError: there is no device, the word is unknown, or the logs name a rank that does not
            exist.
    """
    wanted = spec.nproc_per_node
    if not isinstance(wanted, int):
        wanted = _count(wanted, spec)
    spec.check_with(wanted)
    if spec.virtual_local_rank:
        device_env(spec, wanted - 1)
    return wanted


def _count(word: str, spec: LaunchSpec) -> int:
    processors = len(os.sched_getaffinity(0))
    if word == "cpu":
        return processors
    from elastic_aio.hardware.host import PRIVATE_BACKENDS  # only words need devices

    words = {
        "gpu": "NVIDIA or AMD",
        "xpu": "Intel",
        "auto": "",
        **dict.fromkeys(PRIVATE_BACKENDS, ""),
    }
    if word in words:
        devices = len(visible_accelerators(spec, word))
        if word == "auto":
            return devices or processors
    else:
        devices = _count_by_plugin(word, words)
    if not devices:
        problem = f"no {words.get(word) or word} device is visible; use a number, 'cpu' or 'auto'"
        raise SpecError("nproc_per_node", word, problem)
    return devices


def visible_accelerators(spec: LaunchSpec, word: str) -> list[Accelerator]:
    """Return the devices that the workers of a job can see, of the kind that a word names."""
    from elastic_aio.hardware.host import DeviceSources, find_accelerators, read_nvml

    env = {**os.environ, **spec.env}
    sources = DeviceSources(env, read_nvml=read_nvml, is_divided=spec.virtual_local_rank)
    return find_accelerators(word, sources)


def _count_by_plugin(word: str, words: Iterable[str]) -> int:
    from importlib.metadata import entry_points

    plugins = entry_points(group=ACCELERATORS)
    for entry in plugins.select(name=word):
        try:
            return int(entry.load()())
        except Exception as error:
            problem = f"the plug-in raised {error!r}"
            raise SpecError("nproc_per_node", word, problem) from error
    known = ", ".join(sorted({"cpu", *words, *plugins.names}))
    raise SpecError("nproc_per_node", word, f"{NPROC_ACCEPTED}; words are {known}")


def device_env(spec: LaunchSpec, local_rank: int) -> dict[str, str]:
    """Return the variable for `virtual_local_rank`; SpecError if it lists too few devices."""
    from elastic_aio.hardware.host import device_of

    word = spec.nproc_per_node if isinstance(spec.nproc_per_node, str) else "gpu"
    env = {**os.environ, **spec.env}
    name, value = device_of(local_rank, word, env)
    if value is None:
        problem = f"needs a device for local rank {local_rank}, and {name} is {env[name]!r}"
        raise SpecError("virtual_local_rank", True, problem)
    return {name: value}


def worker_cpus(spec: LaunchSpec, nproc: int) -> list[frozenset[int]]:
    """Return the CPUs that each worker is bound to, if any, by local rank, or raise SpecError."""
    if spec.numa_binding is None:
        return []
    from elastic_aio.hardware.cpus import bind_workers
    from elastic_aio.hardware.host import numa_node, read_topology

    allowed = os.sched_getaffinity(0)
    nodes = []
    if spec.numa_binding != "cpu":
        word = spec.nproc_per_node if isinstance(spec.nproc_per_node, str) else "auto"
        nodes = [numa_node(device) for device in visible_accelerators(spec, word)]
    return bind_workers(
        spec.numa_binding, read_topology(cpus=allowed), allowed, nproc=nproc, device_nodes=nodes
    )


def check_file_size(spec: LaunchSpec, nproc: int) -> None:
    """Raise HostError if the guardian's list of the workers' sessions may not fit into a file."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    needed = list_size(nproc + int(spec.start_method == "forkserver"))
    if soft != resource.RLIM_INFINITY and soft < needed:
        raise HostError(
            f"the file size limit is too low: this job takes {needed} bytes and the limit is {soft}"
            " (raise it with ulimit -f)"
        )


def check_main_guard() -> None:
    """Raise HostError if a worker imports the script that started its job, and starts it again."""
    # One of them is loaded where a main script is imported again.
    if not {"elastic_aio.worker.bootstrap", "multiprocessing.process"} & sys.modules.keys():
        return
    from elastic_aio.worker.bootstrap import is_importing_main

    if is_importing_main():
        raise HostError(
            "a worker imports this script to find its functions, and the script starts a job"
            " again; put that part under: if __name__ == '__main__':"
        )


def worker_argv(
    spec: LaunchSpec, local_rank: int, args: Sequence[Any] | None = None
) -> tuple[str, ...]:
    """Return the argv of one worker that runs a command; `args` replaces the job's."""
    args = tuple(with_local_rank(arg, local_rank) for arg in (spec.args if args is None else args))
    python = spec.python or sys.executable
    match spec.entrypoint:
        case Script(path):
            return (python, "-u", path, *args)
        case Module(name):
            return (python, "-u", "-m", name, *args)
        case Command(argv):
            program, *first = argv
            return (program, *(with_local_rank(arg, local_rank) for arg in first), *args)
        case Function():
            raise InternalError("a function has no command")


def check_runnable(spec: LaunchSpec) -> None:
    """Check that Python can find the script: a missing script is not a failure of a worker.

    Raises SpawnError with a shell's exit code: 127 for a missing script, 126 for an unreadable one.
    """
    match spec.entrypoint:
        case Script(path):
            pass
        case Function(call):
            from elastic_aio.worker.scripts import run_script

            if call is not run_script:
                return
            path = spec.args[0]
        case _:
            return
    if spec.cwd is not None and not os.path.isdir(spec.cwd):
        return  # the error of the spawn is clearer
    full = os.path.join(spec.cwd or "", path)
    if not os.path.exists(full):
        import shutil  # for mistakes only

        problem = f"script not found: {path}"
        if not os.path.dirname(path) and shutil.which(path):
            problem += "; the program of this name needs --no-python (in Python: an argv list)"
        raise SpawnError(problem, permanent=True, exit_code=127)
    if not os.access(full, os.R_OK):
        raise SpawnError(f"script cannot be read: {path}", permanent=True, exit_code=126)
    if os.path.isdir(full) and not os.path.exists(os.path.join(full, "__main__.py")):
        raise SpawnError(
            f"script is a directory without __main__.py: {path}", permanent=True, exit_code=126
        )


async def check_start(spec: LaunchSpec) -> None:
    """Raise SpecError if workers of a spec cannot be started here: before what runs is stopped.

    Limits are tried by a process that ends at once.
    """
    nproc = resolve_nproc(spec)
    check_preload(spec)
    field = type(spec.entrypoint).__name__.lower()
    try:
        check_file_size(spec, nproc)
        check_runnable(spec)
        is_call = isinstance(spec.entrypoint, Function)
        argv = (spec.python or sys.executable,) if is_call else worker_argv(spec, 0)
        env = worker_env(spec, nproc, next(iter(spec.worker_env), {}))
        child = ChildSpec(argv, env, spec.cwd, 0, 1, 2)
        check_directory(child)
        check_program(child)
        if spec.limits is not None:
            field = "limits"
            await _try_limits(spec, replace(child, argv=("true",), cwd=None))
    except (SpawnError, HostError) as error:
        raise SpecError(field, spec.name, str(error)) from error


async def _try_limits(spec: LaunchSpec, child: ChildSpec) -> None:
    from elastic_aio.agent.worker_setup import WorkerSetup  # few jobs have one

    setup = WorkerSetup(spec.replace(sockets=()), 1)
    try:
        await setup.open()
        tried = await setup.spawn_command(command_spawner(asyncio.get_running_loop()), child)
        await asyncio.wait([tried.exited])
    except SpawnError as error:
        if str(error).startswith("limits."):  # else this host lacks `true`
            raise
    finally:
        await run_shielded(setup.aclose)


def check_preload(spec: LaunchSpec) -> None:
    """Check that there is the first module to be preloaded, if this process can tell.

    Raises SpecError if there is none.
    """
    # Later modules may depend on what the first does, submodules on their package, and another
    # interpreter or path may have others; the fork server reports those.
    changed = {"PYTHONPATH", "PYTHONHOME"} & spec.env.keys()
    if not spec.preload or changed or spec.python not in (None, sys.executable):
        return
    from importlib.machinery import PathFinder
    from importlib.util import find_spec

    name = spec.preload[0].partition(".")[0]
    program = spec.entrypoint
    first = [spec.cwd or "."]
    if isinstance(program, Script):
        path = os.path.join(spec.cwd or "", program.path)
        if not os.path.exists(path):
            return  # the error of the start is clearer
        first = [path, os.path.dirname(os.path.realpath(path))]
    is_found = name in sys.modules or find_spec(name) or PathFinder.find_spec(name, first)
    if not is_found:
        problem = f"cannot import {spec.preload[0]!r}: no module named {name!r}"
        raise SpecError("preload", ",".join(spec.preload), problem)


def worker_env(spec: LaunchSpec, nproc: int, own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process of the job.

    `own` overrides the job's `env`, and both override the inherited environment.  With several
    workers on this host OMP_NUM_THREADS defaults to 1.
    """
    # Python writes at once what it prints, so that a kill loses none of it: also in what a command
    # starts, where `-u` does not reach.  A worker of Python itself writes lines, also where the
    # image of a container has the variable: it is the launcher's then.
    defaults = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "PYTHONUNBUFFERED": "1"}
    inherited = without_channels(os.environ)
    is_own = inherited.get("PYTHONUNBUFFERED") in ("", "0") or isinstance(spec.entrypoint, Command)
    if not is_own:
        inherited["PYTHONUNBUFFERED"] = "lines"
    # A crash (SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL) leaves its stack on standard error.
    defaults["PYTHONFAULTHANDLER"] = "1"
    if nproc > 1:
        defaults["OMP_NUM_THREADS"] = "1"
    return {**defaults, **inherited, **spec.env, **own}


def startup_env(
    spec: LaunchSpec, env: Mapping[str, str], *, is_watched: bool = True
) -> dict[str, str]:
    """Return the variables with which a Python script runs `worker/startup` first."""
    # Empty: no scripts or modules, an interpreter that would not find the hook, a replaced package.
    former = env.get("PYTHONPATH")
    is_script = isinstance(spec.entrypoint, Script | Module) and spec.start_method == "spawn"
    if not is_script or former == "" or os.pathsep in _STARTUP or _version_of_startup() != _VERSION:
        return {}
    path = _STARTUP if former is None else f"{_STARTUP}{os.pathsep}{former}"
    return {"PYTHONPATH": path, **({"ELASTIC_AIO_STARTUP": "1"} if is_watched else {})}


def free_port() -> int:
    """Return a TCP port that is free now, on IPv4 and IPv6, or raise HostError."""
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
