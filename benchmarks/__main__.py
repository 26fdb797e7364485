"""`python -m benchmarks`: run all benchmarks and print a table.

Every figure is a median; launchers and limits are measured in turns within one run, so that
the ratios mean something on a busy host too.  Goals are printed and never enforced.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import engines, failure, functions, neighbours, nodes, output, scale, start, store
from benchmarks.launchers import Launcher, describe_host, elastic_aio, find_torch, torchrun
from benchmarks.table import Line, as_json, as_table
from tests.support.leaks import begin_session

_Row = Callable[[Launcher, Launcher | None, int], list[Line]]
_NODES: dict[str, _Row] = {
    "form": nodes.form,
    "loss": nodes.loss,
    "partition": nodes.partition,
    "scale": nodes.scale,
    "failure": nodes.failure,
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
_ROWS: dict[str, _Row] = {
    "start": start.start,
    "memory": start.memory,
    "peer": failure.peer,
    "restart": failure.restart,
    "tail": failure.tail,
    "many": start.many,
    "idle": start.idle,
    "tee": output.tee,
    "latency": output.latency,
    "read": output.read,
    "spawn": functions.spawn,
    "value": functions.value,
    "preload": functions.preload,
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
    arguments = _parser().parse_args()
    torch = find_torch(arguments.torch_python)
    if torch is None:
        print(f"{arguments.torch_python} has no torch: torchrun is left out", file=sys.stderr)
    theirs = torchrun(torch) if torch else None
    rounds = _ROUNDS_QUICK if arguments.quick else _ROUNDS
    lines: list[Line] = []
    for name in _chosen(arguments.only) or _ROWS:
        began = time.monotonic()
        lines += _ROWS[name](elastic_aio(), theirs, rounds)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    host = describe_host(torch)
    print(f"{host}; medians of {rounds} rounds.\n\n{as_table(lines)}")
    if arguments.json:
        content = {"host": host, "rounds": rounds, "lines": [as_json(line) for line in lines]}
        Path(arguments.json).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


def _chosen(names: list[str] | None) -> list[str]:
    """Return the names of the chosen rows, each group replaced by its rows."""
    return [row for name in names or () for row in _GROUPS.get(name, [name])]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--torch-python",
        metavar="PATH",
        default=sys.executable,
        help="interpreter that has torch (default: this one)",
    )
    parser.add_argument(
        "--only",
        metavar="NAME",
        choices=[*_ROWS, *_GROUPS],
        action="append",
        help="run this row, or all those of `nodes`, `store` or `engines`; may be given more than"
        f" once: {', '.join(_ROWS)}",
    )
    parser.add_argument("--quick", action="store_true", help=f"{_ROUNDS_QUICK} rounds, not more")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE too")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
