"""`--dry-run`: what a run would start on this node, as text; nothing is started."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from typing import Final

from msgspec.structs import asdict

from elastic_aio.agent import preflight
from elastic_aio.agent.worker_store import MASTER_ADDR
from elastic_aio.cli.options import choose_loop, print_error
from elastic_aio.cli.run_options import RunRequest, as_option_error
from elastic_aio.errors import SpawnError, SpecError
from elastic_aio.hardware.cpus import format_cpus
from elastic_aio.logs.paths import StreamPlan, StreamTarget, filtered_logs, plan_logs, run_prefix
from elastic_aio.ranks import NodeSize, WorkerRanks, assign_node_ranks
from elastic_aio.spec.checks import UsageError
from elastic_aio.spec.fields import SpecValue, spec_fields
from elastic_aio.spec.group import restart_limit
from elastic_aio.spec.job import Function, LaunchSpec
from elastic_aio.spec.restart import UNLIMITED
from elastic_aio.text import redacted
from elastic_aio.worker.context import REAL_LOCAL_RANK, WorkerContext

_SETTINGS: Final = ("ready", "alive", "sockets", "limits")

_RANDOM: Final = "<random>"
_FREE_PORT: Final = "<a free port>"
_FROM_RENDEZVOUS: Final = "<from the rendezvous>"

# What only the rendezvous of several nodes decides.
_AGREED: Final = (
    "RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "ELASTIC_AIO_ROUND",
)


def main_dry_run(request: RunRequest) -> int:
    """Print the plan of a command line; return the exit code."""
    spec = request.spec
    for warning in request.warnings:
        print_error("run", warning, 0)
    try:
        choose_loop(request.loop)
        if request.event_log_handler != "null":
            from elastic_aio.torch_events import load_event_handler

            load_event_handler(request.event_log_handler)
        preflight.check_runnable(spec)
        nproc = preflight.resolve_nproc(spec)
        cpus = preflight.worker_cpus(spec, nproc)
    except (SpecError, UsageError) as error:
        return print_error("run", as_option_error(error, request.variables), 2)
    except SpawnError as error:
        return print_error("run", str(error), error.exit_code)
    print(redacted("\n".join(plan_lines(spec, nproc, cpus, os.environ))))
    return 0


def plan_lines(
    spec: LaunchSpec, nproc: int, cpus: list[frozenset[int]], inherited: Mapping[str, str]
) -> Iterator[str]:
    """Yield the plan of a job's first attempt on this node; `cpus` are each worker's, if bound."""
    (node,) = assign_node_ranks([NodeSize(spec.role, nproc)])
    workers = node.worker_ranks(nproc)
    environments = [_environment(spec, ranks, inherited) for ranks in workers]
    names = environments[0].keys()
    common = {name for name in names if len({env.get(name) for env in environments}) == 1}
    directory = _directory(spec)
    yield f"run id: {spec.run_id or _RANDOM}"
    yield from _nodes(spec)
    yield f"workers on this node: {nproc}"
    limit = restart_limit(spec)
    yield f"restarts: {'unlimited' if limit == UNLIMITED else limit}"
    yield f"stop: {spec.stop}"
    yield from setting_lines(spec)
    yield f"logs: {directory or 'none'}"
    for name, path in filtered_logs(spec.logs, directory, 0).items():
        yield f"selected lines of {name}: {path}"
    yield "environment of every worker, besides the inherited one:"
    yield from (f"  {name}={environments[0][name]}" for name in sorted(common))
    for ranks, env in zip(workers, environments, strict=True):
        logs = plan_logs(spec.logs, directory, 0, ranks.local_rank)
        yield f"worker {ranks.local_rank}:"
        yield f"  command: {command_text(spec, ranks.local_rank)}"
        if cpus:
            yield f"  cpus: {format_cpus(cpus[ranks.local_rank])}"
        yield f"  stdout: {_target(logs.stdout)}"
        yield f"  stderr: {_target(logs.stderr)}"
        own = sorted(env.keys() - common)
        yield "  environment: " + " ".join(f"{name}={shlex.quote(env[name])}" for name in own)


def setting_lines(spec: LaunchSpec) -> Iterator[str]:
    """Yield which workers restart and when, their probes, sockets and limits, as far as set."""
    if spec.restart.scope != "group":
        yield f"restart scope: {spec.restart.scope}"
    if spec.restart.when != "on-failure":
        yield f"restart: {spec.restart.when}"
    for name in _SETTINGS:
        value = getattr(spec, name)
        for one in value if isinstance(value, tuple) else filter(None, [value]):
            yield f"{name}: {_set_fields(one) if isinstance(one, SpecValue) else one}"


def _set_fields(value: SpecValue) -> str:
    """Return a value as its constructor takes it, without defaults."""
    fields = {name: each.default for name, each in spec_fields(type(value)).items()}
    shown = [
        f"{one}={getattr(value, one)!r}" for one in fields if getattr(value, one) != fields[one]
    ]
    return f"{type(value).__name__}({', '.join(shown)})"


def _nodes(spec: LaunchSpec) -> Iterator[str]:
    yield f"nodes: {spec.nnodes}"
    if spec.nnodes.maximum > 1:
        rendezvous = spec.rendezvous
        rank = "any" if rendezvous.node_rank is None else rendezvous.node_rank
        where = f"{rendezvous.backend} at {', '.join(rendezvous.endpoints)}"
        yield f"rendezvous: {where}, group rank of this node: {rank}"


def _directory(spec: LaunchSpec) -> str | None:
    """Return where the logs would be, as far as it is known before the run."""
    logs = spec.logs
    if logs.is_off:
        return None
    run = run_prefix(spec.run_id or "", preflight.hostname())
    run = run if spec.run_id else _RANDOM + run
    if logs.log_dir is not None:
        return f"{os.path.abspath(logs.log_dir)}/{run}{_RANDOM}"
    return f"<temporary directory>/elastic_aio_{run}{_RANDOM}"


def _environment(
    spec: LaunchSpec, ranks: WorkerRanks, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of a worker that differ from the inherited ones."""
    logs = plan_logs(spec.logs, _directory(spec), 0, ranks.local_rank)
    context = WorkerContext(
        **asdict(ranks),
        role=spec.role,
        run_id=spec.run_id or _RANDOM,
        master_addr=spec.master_addr or MASTER_ADDR,
        master_port=spec.master_port or 0,
        max_restarts=spec.max_restarts,
        use_agent_store=spec.host_store,
        error_file=logs.error_file,
    )
    own = context.to_env()
    if spec.master_port is None:
        own["MASTER_PORT"] = _FREE_PORT
    if spec.nnodes.maximum > 1:
        own |= dict.fromkeys(_AGREED, _FROM_RENDEZVOUS)
    if spec.virtual_local_rank:
        own |= {"LOCAL_RANK": "0", REAL_LOCAL_RANK: str(ranks.local_rank)}
        own |= preflight.device_env(spec, ranks.local_rank)
    if spec.worker_env:
        own |= spec.worker_env[ranks.local_rank]
    env = preflight.worker_env(spec, ranks.local_world_size, own)
    return {name: value for name, value in env.items() if inherited.get(name) != value}


def command_text(spec: LaunchSpec, local_rank: int) -> str:
    """Return what a worker runs, as a shell reads it."""
    args = spec.args + (spec.worker_args[local_rank] if spec.worker_args else ())
    if isinstance(spec.entrypoint, Function):
        return "a function worker that runs " + shlex.join(map(str, args))
    return shlex.join(preflight.worker_argv(spec, local_rank, args))


def _target(plan: StreamPlan) -> str:
    if plan.path is None:
        return "this console" if plan.target is StreamTarget.CONSOLE else "/dev/null"
    return f"{plan.path} and this console" if plan.is_shown else plan.path
