"""What `benchmarks.supervisors` observes of `aio-elastic up`, and the page that has its table."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.supervisor_peers import ElasticAio, Lacks, Peer
from benchmarks.supervisors import BEHAVIOURS
from tests.support.cli import REPOSITORY

OURS = ElasticAio("elastic_aio", "", Path())


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("kill", "7 of 7 unchanged"),
        ("daemon", "0 of 1 left"),
        ("sigkill-stubborn", "0 of 2 left"),
        ("ready-line", "after the first is ready"),
        ("ready-http", "after the first is ready"),
        ("stop-order", "one after the other"),
        ("limit", "3 starts, exit code 3"),
        ("escalation", "the other child: 2 starts, exit code 3"),
        ("code", "exit code 7, 0 left"),
        ("broken", "v1 serves"),
        ("scale", "4 of 4 unchanged"),
        ("hup", "the old child kept, a new one started"),
        ("liveness", "restarted"),
        ("status", "its pid"),
        ("logs", "a file for each"),
        ("config", "exit code 2, 1 line"),
    ],
)
def test_a_behaviour(name: str, seen: str) -> None:
    _, behaviour = BEHAVIOURS[name]
    assert behaviour(OURS) == seen


def test_the_page_has_each_behaviour() -> None:
    """`python -m benchmarks.supervisors` prints its table."""
    page = (REPOSITORY / "docs/supervisors.md").read_text()
    rows = [line.split(" | ")[0].removeprefix("| ") for line in page.splitlines()]
    titles = [title for title, _ in BEHAVIOURS.values()]
    assert [row for row in rows if row in titles] == titles


def test_a_peer_without_a_command_lacks_it(tmp_path: Path) -> None:
    """So that its cell says that nothing was run."""
    with pytest.raises(Lacks):
        Peer("other", "1", tmp_path).control(tmp_path, "status", "web")
