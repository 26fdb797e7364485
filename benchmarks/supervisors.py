"""`python -m benchmarks.supervisors`: small behaviours of this package and of its peers, as tables.

It installs the peers that can be installed here in a temporary directory, runs each behaviour
with each of them, and prints what was observed as Markdown: docs/comparison.md has its output.
"no setting": the peer has none for it, so nothing was run.  "not run": the peer, or the
behaviour, did not run here.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.comparison import Family, observe, replaced
from benchmarks.launcher_rows import LAUNCHERS
from benchmarks.launchers import describe_host
from benchmarks.peers import Installer
from benchmarks.supervisor_rows import SUPERVISORS
from benchmarks.trials import restore_signals
from tests.support.cli import REPOSITORY

FAMILIES: tuple[Family, ...] = (LAUNCHERS, SUPERVISORS)
PAGE = REPOSITORY / "docs/comparison.md"
_USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the behaviours that the command line chooses; print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.supervisors", description=__doc__)
    names = [name for family in FAMILIES for name in family.rows]
    parser.add_argument("--only", metavar="NAME", choices=names, action="append", help="a row")
    columns = {name for family in FAMILIES for name in family.peers}
    parser.add_argument("--peer", metavar="NAME", choices=columns, action="append", help="a column")
    parser.add_argument(
        "--venv",
        metavar="DIR",
        type=Path,
        help="virtual environment for the peers, used with what it has (default: a temporary one)",
    )
    parser.add_argument(
        "--write", action="store_true", help=f"write the output of all rows into {PAGE.name}"
    )
    arguments = parser.parse_args(argv)
    if arguments.write and (arguments.only or arguments.peer):
        print("--write: needs all rows and peers (got --only or --peer)", file=sys.stderr)
        return _USAGE_ERROR
    restore_signals()
    output = "\n".join(_output(arguments))
    print(output)
    if arguments.write:
        PAGE.write_text(replaced(PAGE.read_text(), output))
    return 0


def _output(arguments: argparse.Namespace) -> Iterator[str]:
    yield f"{datetime.now(UTC):%Y-%m-%d}, {describe_host(None)}."
    with tempfile.TemporaryDirectory(prefix="peers-") as directory:
        installer = Installer(Path(directory), arguments.venv)
        for family in FAMILIES:
            chosen = [each for each in family.rows if each in (arguments.only or family.rows)]
            if not chosen:
                continue
            peers = [
                installer.attempt(name, find)
                for name, find in family.peers.items()
                if name in (arguments.peer or family.peers)
            ]
            yield ""
            yield from observe(family, chosen, peers).lines()


if __name__ == "__main__":
    raise SystemExit(main())
