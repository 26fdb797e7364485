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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from msgspec import Struct

from elastic_aio.agent.preflight import resolve_nproc
from elastic_aio.compat.torch.agent import LocalElasticAgent, WorkerSpec
from elastic_aio.compat.torch.errors import ChildFailedError, record
from elastic_aio.compat.torch.installation import note_use
from elastic_aio.compat.torch.multiprocessing import SignalException
from elastic_aio.compat.torch.multiprocessing.logs import DefaultLogsSpecs, LogsSpecs, Std
from elastic_aio.compat.torch.rendezvous import get_rendezvous_handler
from elastic_aio.compat.torch.rendezvous.api import RendezvousParameters
from elastic_aio.spec.checks import UsageError, variable_of
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.rdzv_conf import parse_pairs
from elastic_aio.spec.rendezvous import STATIC_PORT
from elastic_aio.torch_variables import outside_worker
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
_GRACE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_GRACE_S = "30"  # torch's
_STATIC_TIMEOUT = 900
_NO_RUN_ID = "none"


# ------------------------------------------------------------ torch.distributed.launcher


@dataclass
class LaunchConfig:
    """How a program or function is run on several nodes.

    Raises:
        ValueError: a setting cannot be accepted.
    """

    min_nodes: int
    """Least number of nodes."""
    max_nodes: int
    """Largest number of nodes."""
    nproc_per_node: int
    """Workers of each node."""
    logs_specs: LogsSpecs | None = None
    """Where the output goes; None is `DefaultLogsSpecs()`."""
    run_id: str = ""
    """Id of the run, the same on all nodes; empty takes a random one."""
    role: str = "default_role"
    """Role of the workers."""
    rdzv_endpoint: str = ""
    """`HOST:PORT` of the rendezvous's store."""
    rdzv_backend: str = "etcd"
    """How the nodes meet: "c10d", "static", "etcd", "etcd-v2", or a registered name."""
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    """Settings of the rendezvous, as for `--rdzv-conf`."""
    rdzv_timeout: int = -1
    """Older name of `rdzv_configs["timeout"]`; -1 is not set."""
    max_restarts: int = 3
    """How many failed attempts may be followed by another attempt."""
    monitor_interval: float = 0.1
    """Seconds between two looks for waiting nodes of a handler that is not ours."""
    start_method: str | None = "spawn"
    """How functions are started: "spawn", "fork" or "forkserver"."""
    log_line_prefix_template: str | None = None
    """Prefix of shown lines, with `${role_name}`, `${local_rank}` and `${rank}`."""
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    """No effect."""
    local_addr: str | None = None
    """Address of this node for the others; None finds it."""
    event_log_handler: str = "null"
    """Where torch's events go: "null" or "console"."""
    numa_options: Any = None
    """torch `NumaOptions`."""
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    """Signals that stop the workers."""
    duplicate_stdout_filters: list[str] | None = None
    """Lines of stdout with one of these texts are copied to a file."""
    duplicate_stderr_filters: list[str] | None = None
    """The same for stderr."""
    virtual_local_rank: bool = False
    """Whether each worker has LOCAL_RANK 0 and sees its own GPU only."""
    shutdown_timeout: int | None = None
    """Seconds from the first signal of a stop to SIGKILL; None takes
    `TORCH_ELASTIC_SHUTDOWN_TIMEOUT`, else 30."""

    def __post_init__(self) -> None:
        """Fill in defaults; the caller's dict is not changed."""
        if not isinstance(self.rdzv_configs, Mapping):
            raise ValueError(f"rdzv_configs: must be a dict (got {self.rdzv_configs!r})")
        self.rdzv_configs = {"timeout": _STATIC_TIMEOUT, **self.rdzv_configs}
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout
        if self.logs_specs is None:
            self.logs_specs = DefaultLogsSpecs()
        if not callable(getattr(self.logs_specs, "reify", None)):  # torch's own will do
            raise ValueError(f"logs_specs: must be a LogsSpecs (got {self.logs_specs!r})")
        if self.shutdown_timeout is None:
            text = os.environ.get(_GRACE_VARIABLE) or _GRACE_S
            self.shutdown_timeout = _whole_number(_GRACE_VARIABLE, text)
        if self.shutdown_timeout < 0:
            problem = "must be at least 0"
            raise ValueError(f"shutdown_timeout: {problem} (got {self.shutdown_timeout})")


class elastic_launch:
    """Runs a function or a program as a job: `elastic_launch(config, entrypoint)(*args)`.

    Arguments, results and errors are as for `launch_agent`.
    """

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: Callable[..., Any] | str | None,
        health_check_server: Any = None,
    ) -> None:
        self._job = config, entrypoint
        self._health_check_server = health_check_server

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Run the job with these arguments of the entrypoint."""
        return launch_agent(*self._job, list(args), self._health_check_server)


def launch_agent(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    health_check_server: Any = None,
) -> dict[int, Any]:
    """Run this node's part of a job; return what the functions of its workers returned, by rank.

    `entrypoint` is a function or a program; `${local_rank}` is replaced in arguments of a program.
    `start` and `stop` of `health_check_server` are called around the job.

    Raises:
        ChildFailedError: workers have failed, and no restart is left.
        RendezvousError: the nodes did not come together.
        SignalException: a signal ended the job; no process of it is left.
        ValueError: a setting cannot be accepted.
        elastic_aio.HostError: this host lacks something that the job needs.
    """
    if not config.run_id:
        config.run_id = uuid.uuid4().hex
        log.warning("config has no run_id, generated a random run_id: %s", config.run_id)
    handler = get_rendezvous_handler(
        RendezvousParameters(
            backend=config.rdzv_backend,
            endpoint=config.rdzv_endpoint,
            run_id=config.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=config.local_addr,
            **config.rdzv_configs,
        )
    )
    assert config.logs_specs is not None, "it has a default"
    assert config.shutdown_timeout is not None, "it has a default"
    shared = _names_of(WorkerSpec) & _names_of(LaunchConfig)
    agent = LocalElasticAgent(
        WorkerSpec(
            local_world_size=config.nproc_per_node,
            rdzv_handler=handler,
            entrypoint=entrypoint,
            args=tuple(args),
            **{name: getattr(config, name) for name in shared},
        ),
        logs_specs=config.logs_specs,
        start_method=config.start_method,
        log_line_prefix_template=config.log_line_prefix_template,
        shutdown_timeout=config.shutdown_timeout,
        health_check_server=health_check_server,
        signals_to_handle=config.signals_to_handle,
    )
    is_shut_down = True
    try:
        result = agent.run()
    except SignalException:
        is_shut_down = False  # so that other nodes may go on
        raise
    finally:
        if is_shut_down:
            handler.shutdown()
    if result.is_failed():
        raise ChildFailedError(_get_entrypoint_name(entrypoint, args), result.failures)
    return result.return_values


def _names_of(kind: type[WorkerSpec | LaunchConfig]) -> set[str]:
    return {each.name for each in fields(kind)}


def _get_entrypoint_name(entrypoint: Callable[..., Any] | str | None, args: Sequence[Any]) -> str:
    """Return the name of the program or function, for the report of a failure."""
    if isinstance(entrypoint, str):
        if entrypoint != sys.executable:
            return entrypoint
        return next((str(arg) for arg in args if not str(arg).startswith("-")), "")
    return getattr(entrypoint, "__name__", "")


def _whole_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}: must be a whole number of seconds (got {text!r})") from None


# ------------------------------------------------------------- torchrun's command line


def _texts(value: str) -> list[str]:
    parts = [part.split(",") for part in value.split(",,")]
    texts = parts[0]
    for part in parts[1:]:
        texts[-1] += f",{part[0]}"
        texts += part[1:]
    return texts


class _Argument(Struct, frozen=True):
    """An option of torchrun; a flag if its default is False."""

    default: Any
    help: str
    kind: Callable[[str], Any] = str
    short: str = ""
    choices: tuple[str, ...] | None = None
    has_variable: bool = True


_ARGUMENTS: Final = {
    "nnodes": _Argument("1:1", "nodes of the job: N or MIN:MAX"),
    "nproc-per-node": _Argument("1", "workers per node: a number, 'cpu', 'gpu', 'xpu' or 'auto'"),
    "rdzv-backend": _Argument("static", "rendezvous of several nodes: 'c10d', 'static', ..."),
    "rdzv-endpoint": _Argument("", "HOST:PORT of the rendezvous's store"),
    "rdzv-id": _Argument("none", "id of the run, the same on all nodes"),
    "rdzv-conf": _Argument("", "settings of the rendezvous: KEY=VALUE,..."),
    "standalone": _Argument(False, "run on a single node without rendezvous"),
    "max-restarts": _Argument(0, "restarts of the group after failures", int),
    "monitor-interval": _Argument(
        0.1, "seconds between two looks for nodes that wait at a rendezvous plug-in", float
    ),
    "start-method": _Argument(
        "spawn", "start of functions", choices=("spawn", "fork", "forkserver")
    ),
    "event-log-handler": _Argument("null", "where torch's events go: 'null' or 'console'"),
    "role": _Argument("default", "name of the workers' role"),
    "module": _Argument(False, "run a module, as `python -m` does", short="-m"),
    "no-python": _Argument(False, "execute the program itself instead of a Python script"),
    "run-path": _Argument(False, "run the script as a function's worker, in this Python"),
    "log-dir": _Argument(None, "directory for logs; '/dev/null' keeps none"),
    "redirects": _Argument(
        "0", "streams written to files: 0 to 3, or per local rank as in '0:3,1:1'", short="-r"
    ),
    "tee": _Argument("0", "streams written to files and to the console", short="-t"),
    "local-ranks-filter": _Argument("", "local ranks that the console shows, as in '0,2'"),
    "duplicate-stdout-filters": _Argument(
        [], "texts: lines of stdout with one of them are copied to a file", _texts
    ),
    "duplicate-stderr-filters": _Argument([], "the same for stderr", _texts),
    "node-rank": _Argument(0, "group rank of this node, with 'static'", int),
    "master-addr": _Argument("127.0.0.1", "host of the node with rank 0, with 'static'"),
    "master-port": _Argument(None, "TCP port of the workers' store, with 'static'", int),
    "local-addr": _Argument(None, "address of this node for the other nodes"),
    "logs-specs": _Argument(
        None, "entry point of torchrun.logs_specs that lays out the logs", has_variable=False
    ),
    "numa-binding": _Argument(
        None,
        "CPUs of the workers, near their GPUs",
        choices=("node", "socket", "exclusive", "core-complex"),
        has_variable=False,
    ),
    "signals-to-handle": _Argument(
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "signals that stop the job, as names"
    ),
    "shutdown-timeout": _Argument(None, "seconds from the first signal to SIGKILL", int),
    "virtual-local-rank": _Argument(False, "give each worker LOCAL_RANK 0 and its own GPU only"),
}
"""The options by name, without "--"."""


def get_args_parser() -> argparse.ArgumentParser:
    """Return torchrun's parser; the PET_* variables of this process are its defaults.

    Not in a worker, whose variables describe its own job.
    """
    parser = argparse.ArgumentParser(
        description="Run a script as a group of worker processes, with torchrun's options."
    )
    env, _ = outside_worker(os.environ)
    for name, argument in _ARGUMENTS.items():
        spellings = dict.fromkeys([f"--{name}", f"--{name.replace('-', '_')}"])
        if argument.short:
            spellings = {argument.short: None, **spellings}
        default: Any = argument.default
        text = env.get(variable_of(name)) if argument.has_variable else None
        if argument.default is False:
            if text is not None:
                default = _flag(parser, variable_of(name), text)
            parser.add_argument(
                *spellings, action="store_true", default=default, help=argument.help
            )
            continue
        parser.add_argument(
            *spellings,
            type=argument.kind,
            default=default if text is None else text,  # argparse converts a text
            choices=argument.choices,
            help=argument.help,
        )
    parser.add_argument("training_script", help="the script, module or program to run")
    parser.add_argument(
        "training_script_args", nargs=argparse.REMAINDER, help="arguments of the script"
    )
    return parser


def _flag(parser: argparse.ArgumentParser, variable: str, text: str) -> bool:
    try:
        return bool(int(text))
    except ValueError:
        parser.error(f"{variable}: must be a number (0 is off) (got {text!r})")


def parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    """Parse torchrun's arguments; None takes the process's.

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

    "gpu", "xpu" and "auto" count the devices that torch sees, if this process has imported it; else
    the devices of the host.

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
    shared = _names_of(LaunchConfig) & {name.replace("-", "_") for name in _ARGUMENTS}
    settings = {name: getattr(args, name) for name in shared}
    config = LaunchConfig(
        **settings
        | {
            "min_nodes": low,
            "max_nodes": high,
            "nproc_per_node": determine_local_world_size(args.nproc_per_node),
            "logs_specs": logs,
            "run_id": args.rdzv_id,
            "rdzv_endpoint": get_rdzv_endpoint(args),
            "rdzv_configs": rdzv_configs,
            "log_line_prefix_template": os.environ.get(_PREFIX_VARIABLE),
            "numa_options": args.numa_binding,
        }
    )
    return config, *_command(args)


def _with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """Return a caller's own namespace, completed with torchrun's defaults."""
    defaults = vars(get_args_parser().parse_args([""]))
    return argparse.Namespace(**{**defaults, **vars(args)})


def _command(args: argparse.Namespace) -> tuple[Callable[..., Any] | str, list[str]]:
    """Return the program of the workers, and its arguments; --run-path wins, as in torchrun."""
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
    """Run the job of torchrun's arguments, which are not changed; errors as for `launch_agent`."""
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
    note_use()
    run(parse_args(args))


if __name__ == "__main__":
    main()
