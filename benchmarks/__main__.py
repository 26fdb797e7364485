"""`python -m benchmarks`: run all benchmarks and print a table.

Every figure is a median; launchers and limits are measured in turns within one run, so that
the ratios mean something on a busy host too.  Goals are printed and never enforced.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

from benchmarks import (
    engines,
    failure,
    functions,
    neighbours,
    nodes,
    output,
    scale,
    start,
    store,
    trees,
)
from benchmarks.launchers import Launcher, describe_host, elastic_aio, find_torch, torchrun
from benchmarks.table import Line, as_json, as_table
from tests.support.leaks import begin_session

# Called with our launcher, torchrun's if there is one, and the rounds.  A row with a parameter
# `old` measures an earlier version of ours too.
_Row = Callable[..., list[Line]]
_NODES: dict[str, _Row] = {
    "form": nodes.form,
    "loss": nodes.loss,
    "partition": nodes.partition,
    "scale": nodes.scale,
    "failure": nodes.failure,
    "preempt": nodes.preempt,
    "host": nodes.host,
    "members": scale.members,
    "idle-group": nodes.idle_group,
}
_STORE: dict[str, _Row] = {
    "store-server": store.store_server,
    "store-client": store.store_client,
    "store-idle": store.store_idle,
    "store-init": store.store_init,
    "store-neighbours": neighbours.store_neighbours,
}
_ENGINES: dict[str, _Row] = {
    "engine-round": engines.round,
    "engine-leader": engines.leader,
    "engine-jobs": engines.jobs,
    "engine-client": engines.client,
}
ROWS: dict[str, _Row] = {
    "start": start.start,
    "memory": start.memory,
    "peer": failure.peer,
    "restart": failure.restart,
    "tail": failure.tail,
    "many": start.many,
    "idle": start.idle,
    "lines": output.lines,
    "tee": output.tee,
    "latency": output.latency,
    "read": output.read,
    "spawn": functions.spawn,
    "value": functions.value,
    "preload": functions.preload,
    "kill-one": trees.kill_one,
    "reloads": trees.reloads,
    **_NODES,
    **_STORE,
    **_ENGINES,
}
_GROUPS = {"nodes": list(_NODES), "store": list(_STORE), "engines": list(_ENGINES)}
_ROUNDS = 15
_ROUNDS_QUICK = 3


def main() -> int:
    """Run the benchmarks that the command line chooses."""
    begin_session()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add_options(parser, [*ROWS, *_GROUPS])
    arguments = parser.parse_args()
    names = [row for name in arguments.only or ROWS for row in _GROUPS.get(name, [name])]
    ours = elastic_aio()
    measure({name: partial(ROWS[name], ours) for name in names}, arguments)
    return 0


def add_options(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Add the options of a command that measures some of the rows of these names."""
    parser.add_argument(
        "--torch-python",
        metavar="PATH",
        default=sys.executable,
        help="interpreter that has torch (default: this one)",
    )
    parser.add_argument(
        "--only",
        metavar="NAME",
        choices=names,
        action="append",
        help=f"run this row or group of rows; may be given more than once: {', '.join(names)}",
    )
    parser.add_argument(
        "--rounds", metavar="N", type=_rounds, default=_ROUNDS, help=f"(default: {_ROUNDS})"
    )
    parser.add_argument(
        "--quick",
        dest="rounds",
        action="store_const",
        const=_ROUNDS_QUICK,
        help=f"{_ROUNDS_QUICK} rounds, not more",
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE too")


def _rounds(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a number of at least 1 (got {text!r})")
    return int(text)


def measure(
    rows: Mapping[str, Callable[[Launcher | None, int], list[Line]]],
    arguments: argparse.Namespace,
    commits: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Measure rows and print them, of two commits if they are given."""
    torch = find_torch(arguments.torch_python)
    if torch is None:
        print(f"{arguments.torch_python} has no torch: torchrun is left out", file=sys.stderr)
    theirs = torchrun(torch) if torch else None
    rounds = arguments.rounds
    lines: list[Line] = []
    for name, row in rows.items():
        began = time.monotonic()
        lines += row(theirs, rounds)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    host = describe_host(torch)
    heading = "".join(f"{name}: {commit}\n" for name, commit in commits.items())
    table = as_table(lines, with_old=bool(commits))
    print(f"{heading}{host}; medians of at most {rounds} rounds.\n\n{table}")
    if arguments.json:
        figures = [as_json(line) for line in lines]
        content = {**commits, "host": host, "rounds": rounds, "lines": figures}
        Path(arguments.json).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
