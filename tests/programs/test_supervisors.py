"""What `benchmarks.supervisors` observes of this package, and the page that has its tables."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.comparison import Family, Row, between, cells_of, observe, replaced
from benchmarks.launcher_peers import Accelerate, FtLauncher, Launch, Launching, Torchrun
from benchmarks.peers import OURS, Installer, Lacks, NotRun, Peer
from benchmarks.supervisor_peers import Supervisor
from benchmarks.supervisors import FAMILIES, PAGE, main
from benchmarks.trials import restore_signals

STEADY = [
    pytest.param(family, name, id=f"{family.title}: {name}")
    for family in FAMILIES
    for name, row in family.rows.items()
    if not row.varies
]


@pytest.mark.e2e
@pytest.mark.parametrize(("family", "name"), STEADY)
def test_our_cell_is_as_on_the_page(family: Family, name: str, tmp_path: Path) -> None:
    row = family.rows[name]
    if row.needs and shutil.which(row.needs) is None:
        pytest.skip(f"needs {row.needs}")
    restore_signals()
    ours = family.peers[OURS](Installer(tmp_path))
    try:
        seen = row.behaviour(ours)
    except Lacks:
        seen = "no setting"
    assert seen == cells_of(PAGE.read_text(), family.title)[row.title][0]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.title)
def test_the_page_has_each_row_and_column(family: Family) -> None:
    """In their order; a peer that did not run is below the table."""
    cells = cells_of(PAGE.read_text(), family.title)
    headings = cells.pop("behaviour")
    assert list(cells) == [row.title for row in family.rows.values()]
    assert all(len(row) == len(headings) for row in cells.values())
    shown = [heading.rpartition(" ")[0] for heading in headings]
    absent = [name for name in family.peers if name not in shown]
    assert shown == [name for name in family.peers if name in shown]
    assert all(f"* {name}: not run here: " in between(PAGE.read_text()) for name in absent)


def test_no_cell_is_empty_and_ours_have_run() -> None:
    page = PAGE.read_text()
    rows = [row for family in FAMILIES for row in cells_of(page, family.title).values()]
    assert all(all(row) for row in rows)
    assert not [row for row in rows if row[0].startswith("not run")]


def test_there_are_many_rows() -> None:
    assert sum(len(family.rows) for family in FAMILIES) >= 60


def refuse_all(_: Peer) -> str:
    raise Lacks


def never_answer(_: Peer) -> str:
    raise TimeoutError("ready: not within 60 s")


def test_a_table_says_what_was_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {
        "a": Row("a row", lambda peer: f"{peer.name} | x"),
        "b": Row("no row", refuse_all, alone=True),
        "c": Row("late", never_answer),
    }
    peers: list[Peer | NotRun] = [
        Peer("one", "1.0", Path()),
        NotRun("two", "no bus"),
        Peer("three", "3", Path()),
    ]
    table = observe(Family("Peers", rows, {}), list(rows), peers)
    text = "\n".join(table.lines())
    assert cells_of(replaced(PAGE.read_text(), text), "Peers") == {
        "behaviour": ["one 1.0", "three 3"],
        "a row": ["one | x", "three | x"],
        "no row": ["no setting", "no setting"],
        "late": ["not run: ready", "not run: ready"],
    }
    assert text.endswith("* two: not run here: no bus")
    assert "TimeoutError: ready" in capsys.readouterr().err


def test_a_peer_that_is_not_installed_has_its_reason(tmp_path: Path) -> None:
    def find(_: Installer) -> Peer:
        raise FileNotFoundError("first line\nno such command")

    assert Installer(tmp_path).attempt("x", find) == NotRun("x", "no such command")


@pytest.mark.parametrize(
    ("peer", "launch"),
    [
        (Torchrun, Launch(alone=True)),
        (Torchrun, Launch(heartbeat=2)),
        (FtLauncher, Launch(alone=True)),
        (Accelerate, Launch(nodes="1:2")),
        (Accelerate, Launch(shown=1)),
    ],
)
def test_a_launcher_without_an_option_lacks_it(
    peer: type[Launching], launch: Launch, tmp_path: Path
) -> None:
    with pytest.raises(Lacks):
        peer("other", "1", tmp_path).command(launch)


def test_an_output_replaces_that_of_the_page() -> None:
    page = PAGE.read_text()
    changed = replaced(page, "new")
    assert between(changed) == "new"
    assert replaced(changed, between(page)) == page


def test_a_page_is_not_written_with_some_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--write", "--only", "kill"]) == 2
    assert capsys.readouterr().err == "--write: needs all rows and peers (got --only or --peer)\n"


def test_a_peer_without_a_command_lacks_it(tmp_path: Path) -> None:
    """So that its cell says that nothing was run."""
    with pytest.raises(Lacks):
        Supervisor("other", "1", tmp_path).control(tmp_path, "status", "web")
