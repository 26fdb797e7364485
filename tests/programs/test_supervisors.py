"""What `benchmarks.supervisors` observes of this package, and the page that has its tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.comparison import Family, between, cells_of, replaced
from benchmarks.peers import OURS, Installer, Lacks
from benchmarks.supervisor_peers import Supervisor
from benchmarks.supervisors import FAMILIES, PAGE, main

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


def test_no_cell_is_empty_or_failed() -> None:
    page = PAGE.read_text()
    rows = [row for family in FAMILIES for row in cells_of(page, family.title).values()]
    assert all(cell and not cell.startswith("not run") for row in rows for cell in row)


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
