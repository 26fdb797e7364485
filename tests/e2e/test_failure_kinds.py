"""Each kind of failure is run; the console says what the table of the guide says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.failure_kinds import KINDS, Kind, Missing, line_of, row_of, rows_of_page

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
# The texts of Python differ between its versions, and a small change of them is no defect here.
OF_PAGE = (3, 11)


def test_the_page_has_all_kinds_in_their_order() -> None:
    names = [kind.name for kind in KINDS]
    assert [*rows_of_page()] == names
    assert len(set(names)) == len(names) >= 40


@pytest.mark.skipif(sys.version_info[:2] != OF_PAGE, reason="the page shows texts of Python 3.11")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.replace(" ", "-"))
def test_the_console_says_what_the_page_says(kind: Kind, tmp_path: Path) -> None:
    """`python -m tests.support.failure_kinds --write` writes the page."""
    try:
        line = line_of(kind, tmp_path)
    except Missing as problem:
        pytest.skip(str(problem))
    assert row_of(kind, line) == rows_of_page()[kind.name]
