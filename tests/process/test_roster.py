"""The list of sessions that a guardian reads."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.process.roster import format_roster, parse_roster, read_roster
from elastic_aio.process.sweep import Session

numbers = st.integers(0, 2**63)


@given(st.lists(st.tuples(numbers, numbers, st.none() | numbers), max_size=5))
def test_what_is_written_is_read_back(rows: list[tuple[int, int, int | None]]) -> None:
    """One line a session, open or closed."""
    content = format_roster([Session(*row) for row in rows])
    assert content.count(b"\n") == len(rows)
    assert parse_roster(content) == rows


def test_the_form() -> None:
    """Number, ticks of the start, ticks of the end or a dash."""
    assert format_roster([Session(12, 345), Session(13, 346, 400)]) == b"12 345 -\n13 346 400\n"


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        (b"", []),
        (b"12 345", []),
        (b"12 345 -\n13 34", [(12, 345, None)]),
        (b"a b c\n1 2 3\n", [(1, 2, 3)]),
        (b"1 2 3 4\n\n5 6 x\n7 8 -\n", [(7, 8, None)]),
    ],
)
def test_unfinished_lines_are_left_out(
    content: bytes, rows: list[tuple[int, int, int | None]]
) -> None:
    """An agent that dies while it writes leaves the whole lines readable."""
    assert parse_roster(content) == rows


def test_the_file_is_read_whole() -> None:
    """Reading does not depend on the descriptor's position."""
    descriptor = os.memfd_create("roster")
    content = b"".join(b"%d 1 -\n" % number for number in range(20_000))
    os.write(descriptor, content)
    assert read_roster(descriptor) == content
    assert read_roster(descriptor) == content
    os.close(descriptor)
