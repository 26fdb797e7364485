"""torch.distributed.run and torch.distributed.launcher: `elastic_launch`, and torchrun's `main`.

Programs use the parser (`get_args_parser`), the translation of its namespace
(`config_from_args`), `run(args)`, or `elastic_launch(config, entrypoint)(*args)`.

What differs from torch on purpose: an invalid setting is a ValueError of one line,
`--rdzv-id` counts for a single node too, and the environment of this process is not changed.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from elastic_aio.agent.preflight import resolve_nproc
from elastic_aio.cli.options import UsageError
from elastic_aio.cli.rdzv_conf import parse_pairs
from elastic_aio.cli.torchrun import outside_worker
from elastic_aio.compat.torch.arguments import get_args_parser
from elastic_aio.compat.torch.errors import record
from elastic_aio.compat.torch.launcher import LaunchConfig, elastic_launch, launch_agent
from elastic_aio.compat.torch.multiprocessing.logs import DefaultLogsSpecs, LogsSpecs, Std
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.rendezvous import STATIC_PORT
from elastic_aio.worker.scripts import run_script

__all__ = [
    "LaunchConfig",
    "config_from_args",
    "determine_local_world_size",
    "elastic_launch",
    "get_args_parser",
    "get_rdzv_endpoint",
    "get_use_env",
    "launch_agent",
    "main",
    "parse_args",
    "parse_min_max_nnodes",
    "run",
]

log = logging.getLogger(__name__)

_PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
_NO_RUN_ID = "none"


# ------------------------------------------------------------- torchrun's command line


def parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    """Parse torchrun's arguments; None takes those of the process.

    Raises:
        SystemExit: they are invalid (code 2), or ask for help.
    """
    return get_args_parser().parse_args(args)


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """Return the least and the largest number of nodes of `N` or `MIN:MAX`.

    Raises:
        ValueError: they are no numbers.
        RuntimeError: there are more than two parts.
    """
    parts = str(nnodes).split(":")
    if len(parts) > 2:
        raise RuntimeError(f'nnodes={nnodes} is not in "MIN:MAX" format')
    return int(parts[0]), int(parts[-1])


def determine_local_world_size(nproc_per_node: str) -> int:
    """Return the number of workers that `--nproc-per-node` means on this host.

    "gpu", "xpu" and "auto" count what torch sees, if this process has imported it; else the
    devices of the host.

    Raises:
        ValueError: the word is unknown, or the host has no such device.
    """
    word = str(nproc_per_node)
    if word.lstrip("-").isdecimal():
        return int(word)
    kind = {"gpu": "cuda", "xpu": "xpu", "auto": "accelerator"}.get(word, "")
    seen = getattr(sys.modules.get("torch"), kind, None) if kind else None
    if seen is not None and seen.is_available():
        return int(seen.device_count())
    return resolve_nproc(LaunchSpec(["true"], nproc_per_node=word))


def get_rdzv_endpoint(args: argparse.Namespace) -> str:
    """Return the endpoint of the rendezvous that torchrun's arguments mean."""
    if args.rdzv_backend == "static" and not args.rdzv_endpoint:
        return f"{args.master_addr}:{args.master_port}"
    return str(args.rdzv_endpoint)


def get_use_env(args: argparse.Namespace) -> bool:
    """Return whether workers get their local rank by the environment only."""
    return bool(getattr(args, "use_env", True))


def config_from_args(
    args: argparse.Namespace,
) -> tuple[LaunchConfig, Callable[..., Any] | str, list[str]]:
    """Return the job of torchrun's arguments: its config, what to run, and the arguments.

    Args:
        args: from `get_args_parser`.

    Raises:
        ValueError: a value cannot be accepted.
    """
    args = _with_defaults(args)
    low, high = parse_min_max_nnodes(args.nnodes)
    if not 0 < low <= high:
        raise ValueError(f"--nnodes: must be N or MIN:MAX with 1 <= MIN <= MAX (got {args.nnodes})")
    if args.max_restarts < 0:
        raise ValueError(f"--max-restarts: must be at least 0 (got {args.max_restarts})")
    rdzv_configs = _rdzv_configs(args.rdzv_conf)
    if args.rdzv_backend == "static":
        rdzv_configs["rank"] = args.node_rank
    elif args.node_rank:
        log.warning("node_rank is only used for static rdzv_backend (got %s)", args.node_rank)
    logs = _logs_specs_class(args.logs_specs)(
        log_dir=args.log_dir,
        redirects=Std.from_str(args.redirects),
        tee=Std.from_str(args.tee),
        local_ranks_filter=_local_ranks(args.local_ranks_filter),
    )
    config = LaunchConfig(
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=determine_local_world_size(args.nproc_per_node),
        logs_specs=logs,
        run_id=args.rdzv_id,
        role=args.role,
        rdzv_endpoint=get_rdzv_endpoint(args),
        rdzv_backend=args.rdzv_backend,
        rdzv_configs=rdzv_configs,
        max_restarts=args.max_restarts,
        monitor_interval=args.monitor_interval,
        start_method=args.start_method,
        log_line_prefix_template=os.environ.get(_PREFIX_VARIABLE),
        local_addr=args.local_addr,
        event_log_handler=args.event_log_handler,
        numa_options=args.numa_binding,
        signals_to_handle=args.signals_to_handle,
        duplicate_stdout_filters=args.duplicate_stdout_filters,
        duplicate_stderr_filters=args.duplicate_stderr_filters,
        virtual_local_rank=args.virtual_local_rank,
        shutdown_timeout=args.shutdown_timeout,
    )
    return config, *_command(args)


def _with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """Return a namespace of a caller's own, completed with torchrun's defaults."""
    defaults = vars(get_args_parser().parse_args([""]))
    return argparse.Namespace(**{**defaults, **vars(args)})


def _command(args: argparse.Namespace) -> tuple[Callable[..., Any] | str, list[str]]:
    """Return what the workers run, and its arguments; --run-path wins, as in torchrun."""
    entrypoint: Callable[..., Any] | str
    script, rest = args.training_script, list(args.training_script_args)
    if not get_use_env(args):
        rest.insert(0, "--local-rank=${local_rank}")
    if args.run_path:
        return run_script, [script, *rest]
    if args.no_python:
        if args.module:
            raise ValueError("-m/--module: excludes --no-python")
        return script, rest
    entrypoint = os.environ.get("PYTHON_EXEC", sys.executable)
    return entrypoint, ["-u", *(["-m"] if args.module else []), script, *rest]


def _rdzv_configs(text: str) -> dict[str, Any]:
    try:
        return {**parse_pairs(text)}
    except UsageError as error:
        raise ValueError(str(error)) from None


def _local_ranks(text: str) -> set[int] | None:
    if not text:
        return None
    try:
        return {int(part) for part in text.split(",")}
    except ValueError:
        problem = "must be local ranks such as '0,2'"
        raise ValueError(f"--local-ranks-filter: {problem} (got {text!r})") from None


def _logs_specs_class(name: str | None) -> type[LogsSpecs]:
    if name is None:
        return DefaultLogsSpecs
    from importlib.metadata import entry_points

    for entry in entry_points(group="torchrun.logs_specs").select(name=name):
        found: type[LogsSpecs] = entry.load()
        return found
    raise ValueError(f"--logs-specs: must be an entry point of torchrun.logs_specs (got {name!r})")


def run(args: argparse.Namespace) -> None:
    """Run the job of torchrun's arguments to its end.

    Args:
        args: from `get_args_parser`; not changed.

    Raises:
        ChildFailedError: workers have failed, and no restart is left.
        Exception: as for `launch_agent`.
    """
    for note in outside_worker(os.environ)[1]:
        log.warning("%s", note)
    args = _with_defaults(args)
    is_default = (
        args.rdzv_backend == "static"
        and not args.rdzv_endpoint
        and args.master_port is None
        and parse_min_max_nnodes(args.nnodes)[1] == 1
    )
    if args.standalone or is_default:
        args.rdzv_backend, args.rdzv_endpoint = "c10d", "localhost:0"
        if args.rdzv_id == _NO_RUN_ID:
            args.rdzv_id = str(uuid.uuid4())
        if args.standalone:
            args.nnodes = "1"
    if args.master_port is None:
        args.master_port = STATIC_PORT
    config, entrypoint, arguments = config_from_args(args)
    elastic_launch(config=config, entrypoint=entrypoint)(*arguments)


@record
def main(args: Sequence[str] | None = None) -> None:
    """Run torchrun's command line; None takes the arguments of the process."""
    run(parse_args(args))


if __name__ == "__main__":
    main()
