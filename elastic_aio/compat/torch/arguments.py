"""torchrun's arguments as an argparse parser, which programs extend or use as a parent.

Types and defaults are torchrun's; the help texts are those of `aio-elastic run`.  An option
has a dashed and an underscored spelling, and most have a PET_* variable as their default.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any, Final

from msgspec import Struct

from elastic_aio.cli.options import variable_of
from elastic_aio.cli.torchrun import outside_worker

__all__ = ["get_args_parser"]


def _texts(value: str) -> list[str]:
    """Split at commas; two commas are a comma of the text."""
    parts = [part.split(",") for part in value.split(",,")]
    texts = parts[0]
    for part in parts[1:]:
        texts[-1] += f",{part[0]}"
        texts += part[1:]
    return texts


class _Argument(Struct, frozen=True):
    """One option of torchrun; a flag if its default is False."""

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

    Not in a worker: they describe its own job there.
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
