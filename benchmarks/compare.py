"""`python -m benchmarks.compare OLD NEW`: measure two commits of this repository beside each other.

The rows are those of `python -m benchmarks` that measure an earlier version too.  In each round
OLD, NEW, torchrun and the limits are measured in random order; the figures are medians.  Both
commits are measured by the code of this checkout.
"""

from __future__ import annotations

import argparse
import inspect
import signal
import subprocess
import sys
import tarfile
import tempfile
from functools import partial
from io import BytesIO
from pathlib import Path

from benchmarks.__main__ import ROWS, add_options, measure
from benchmarks.launchers import Launcher, elastic_aio
from tests.support.cli import REPOSITORY
from tests.support.leaks import begin_session

_COMPARED = [name for name, row in ROWS.items() if "old" in inspect.signature(row).parameters]
_GIT = ("git", "-C", str(REPOSITORY))
_USAGE_ERROR = 2


def main() -> int:
    """Build both commits, measure them, and remove them."""
    begin_session()
    # SIGTERM ends the command as Ctrl-C does: what was built and started goes with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("OLD", help="commit to compare with; any revision that git understands")
    parser.add_argument("NEW", help="commit that has to meet the goals")
    add_options(parser, _COMPARED)
    arguments = parser.parse_args()
    commits = {}
    for name in ("OLD", "NEW"):
        revision = getattr(arguments, name)
        commits[name] = _commit(revision)
        if not commits[name]:
            problem = f"must be a commit of this repository (got {revision!r})"
            print(f"{name}: {problem}", file=sys.stderr)
            return _USAGE_ERROR
    with tempfile.TemporaryDirectory(prefix="elastic_aio-compare-") as directory:
        old, ours = (_built(commit, Path(directory, name)) for name, commit in commits.items())
        names = arguments.only or _COMPARED
        measure({name: partial(ROWS[name], ours, old=old) for name in names}, arguments, commits)
    return 0


def _commit(revision: str) -> str:
    """Return the id of a commit, empty if there is none."""
    words = ["rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"]
    return subprocess.run([*_GIT, *words], capture_output=True, text=True).stdout.strip()


def _built(commit: str, root: Path) -> Launcher:
    """Return the launcher of a commit, whose package is compiled in `root`."""
    content = subprocess.check_output([*_GIT, "archive", commit, "elastic_aio"])
    with tarfile.open(fileobj=BytesIO(content)) as archive:
        archive.extractall(root, filter="data")
    (root / "benchmarks").symlink_to(REPOSITORY / "benchmarks")
    subprocess.run([sys.executable, "-m", "compileall", "-q", root / "elastic_aio"], check=True)
    return elastic_aio(root)


if __name__ == "__main__":
    raise SystemExit(main())
