"""The session list that a guardian reads."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_aio.process.proc_scan import WorkerSession, read_session_list, write_session_list

Row = tuple[int, int, int | None]

numbers = st.integers(0, 2**63)


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = os.memfd_create("sessions")
    yield descriptor
    os.close(descriptor)


def content(descriptor: int) -> bytes:
    return os.pread(descriptor, 1 << 20, 0)


def rows_of(descriptor: int) -> list[Row]:
    sessions = read_session_list(descriptor)
    assert list(sessions) == [session.number for session in sessions.values()]
    return [(session.number, session.opened, session.closed) for session in sessions.values()]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.tuples(numbers, numbers, st.none() | numbers), max_size=5, unique_by=lambda row: row[0]
    )
)
def test_rows_survive_a_round_trip(descriptor: int, rows: list[Row]) -> None:
    """Each content replaces the one before, longer or shorter."""
    write_session_list(descriptor, [WorkerSession(*row) for row in rows])
    assert content(descriptor).count(b"\n") == len(rows)
    assert rows_of(descriptor) == rows


def test_the_format(descriptor: int) -> None:
    """Number, ticks of the start, ticks of the end or a dash."""
    write_session_list(descriptor, [WorkerSession(12, 345), WorkerSession(13, 346, 400)])
    assert content(descriptor) == b"12 345 -\n13 346 400\n"


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
def test_unfinished_lines_are_left_out(descriptor: int, content: bytes, rows: list[Row]) -> None:
    """An agent may be killed while it writes."""
    os.write(descriptor, content)
    assert rows_of(descriptor) == rows


def test_the_whole_file_is_read(descriptor: int) -> None:
    """Reading does not depend on the descriptor's position."""
    os.write(descriptor, b"".join(b"%d 1 -\n" % number for number in range(20_000)))
    for _ in range(2):
        assert list(read_session_list(descriptor)) == list(range(20_000))
