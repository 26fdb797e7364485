"""The scripts of `.ci/` end what they have started."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.children import until_sync
from tests.support.cli import REPOSITORY, running
from tests.support.leaks import alive

SCRIPT = """
source .ci/functions
step "a step"
mkdir "$work/clone"
in_clone clone 'exit 3' || echo "status $?"
in_clone clone 'sleep 99 & echo $! >"$PIDS"; echo $$ >>"$PIDS"; sleep 99; true'
"""


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["TERM", "INT", "HUP"])
def test_a_signal_leaves_nothing(name: str, tmp_path: Path) -> None:
    """No process of the step that runs, and no directory; the step is named as failed."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci/functions").symlink_to(REPOSITORY / ".ci/functions")
    (tmp_path / ".ci/run").write_text(SCRIPT)
    place, pids = tmp_path / "a place", tmp_path / "pids"
    place.mkdir()
    env = {"TMPDIR": str(place), "PIDS": str(pids)}
    words = ["bash", "-euo", "pipefail", ".ci/run"]
    with running(words, env=env, cwd=tmp_path) as script:
        until_sync(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        started = [int(pid) for pid in pids.read_text().split()]
        script.send(signal.Signals[f"SIG{name}"])
        assert script.wait() == 128 + signal.Signals[f"SIG{name}"]
        assert "status 3" in script.out
        assert "a step (FAILED)" in script.out
    assert not any(alive(pid) for pid in started)
    assert not any(place.iterdir())
