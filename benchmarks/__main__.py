"""`python -m benchmarks`: run them all, print a table.

Every figure is a median; launchers and limits are measured in turns within one run,
so that the ratios mean something on a busy machine too.  Goals are printed and
never enforced.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import crowd, failure, functions, network, nodes, output, start
from benchmarks.measure import Contender, describe_machine, elastic_aio, find_torch, torchrun
from benchmarks.table import Line, as_json, as_table

_Row = Callable[[Contender, Contender | None, int], list[Line]]
_NODES: dict[str, _Row] = {
    "form": nodes.form,
    "loss": nodes.loss,
    "partition": network.partition,
    "scale": nodes.scale,
    "failure": nodes.failure,
    "host": nodes.host,
    "crowd": crowd.crowd,
    "idle-group": network.idle_group,
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
    "spawn": functions.spawn,
    "value": functions.value,
    "preload": functions.preload,
    **_NODES,
}
_GROUPS = {"nodes": list(_NODES)}
_ROUNDS = 15
_ROUNDS_QUICK = 3


def main() -> int:
    """Run the benchmarks that the command line chooses."""
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
    machine = describe_machine(torch)
    print(f"{machine}; medians of {rounds} rounds.\n\n{as_table(lines)}")
    if arguments.json:
        content = {"machine": machine, "rounds": rounds, "lines": [as_json(line) for line in lines]}
        Path(arguments.json).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


def _chosen(names: list[str] | None) -> list[str]:
    """Return the rows that are asked for, those of a group in its place."""
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
        help=f"run this row, or those of many `nodes`; may be given more than once:"
        f" {', '.join(_ROWS)}",
    )
    parser.add_argument("--quick", action="store_true", help=f"{_ROUNDS_QUICK} rounds, not more")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE too")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
