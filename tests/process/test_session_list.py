"""The session list that a guardian reads."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_aio.process.descendants import (
    STARTING,
    SessionList,
    WorkerSession,
    read_session_list,
    write_session,
    write_session_list,
)

Row = tuple[int, int, int | None]

ticks = st.integers(0, 2**63)


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


rows = st.lists(
    st.tuples(st.integers(1, 2**63), ticks, st.none() | ticks),
    max_size=5,
    unique_by=lambda row: row[0],
)


def sessions_of(rows: list[Row]) -> list[WorkerSession]:
    return [WorkerSession(*row) for row in rows]


@pytest.mark.parametrize(
    ("session", "pid", "start", "is_certain"),
    [
        (WorkerSession(100, 5), 100, 5, True),
        (WorkerSession(100, 5), 101, 5, True),
        (WorkerSession(100, 5), 101, 999, True),
        (WorkerSession(100, 5), 100, 999, False),
        (WorkerSession(100, 5, 50), 101, 49, True),
        (WorkerSession(100, 5, 50), 101, 50, True),
        (WorkerSession(100, 5, 50), 101, 51, False),
        (WorkerSession(100, 5, 50), 100, 5, True),
        (WorkerSession(100, 5, 50), 100, 51, False),
    ],
)
def test_membership_is_certain_only_before_the_leader_was_reaped(
    session: WorkerSession, pid: int, start: int, is_certain: bool
) -> None:
    """A later process, or one with the leader's pid, may be of another session."""
    assert session.is_certain(pid, start) is is_certain


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=rows)
def test_rows_survive_a_round_trip(descriptor: int, rows: list[Row]) -> None:
    """Each content replaces the one before, longer or shorter."""
    write_session_list(descriptor, sessions_of(rows))
    assert content(descriptor).count(b"\n") == len(rows)
    assert rows_of(descriptor) == rows


def test_the_format(descriptor: int) -> None:
    """Number, ticks of the start, ticks of the end or a dash; and a checksum."""
    write_session_list(descriptor, sessions_of([(18, 255, None), (19, 256, 4096)]))
    lines = content(descriptor).splitlines(keepends=True)
    assert [line.split()[:3] for line in lines] == [[b"12", b"ff", b"-"], [b"13", b"100", b"1000"]]
    assert [len(line) for line in lines] == [64, 64]


def test_one_row_is_replaced(descriptor: int) -> None:
    """The exit of one leader writes one line."""
    write_session_list(descriptor, sessions_of([(1, 5, None), (2, 6, None), (3, 7, None)]))
    write_session(descriptor, 1, WorkerSession(2, 6, 99))
    write_session(descriptor, 3, WorkerSession(4, 8))
    assert rows_of(descriptor) == [(1, 5, None), (2, 6, 99), (3, 7, None), (4, 8, None)]


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=rows, after=rows, data=st.data())
def test_a_write_cut_at_any_byte_makes_no_session_up(
    descriptor: int, before: list[Row], after: list[Row], data: st.DataObject
) -> None:
    """An agent may be killed while it writes: at most the entry that is torn is lost."""
    write_session_list(descriptor, sessions_of(after))
    new = content(descriptor)
    write_session_list(descriptor, sessions_of(before))
    cut = data.draw(st.integers(0, len(new)))
    os.pwrite(descriptor, new[:cut], 0)
    read = rows_of(descriptor)
    assert set(read) <= {*before, *after}
    whole = [*after[: cut // 64], *before[-(-cut // 64) :]]
    assert {number for number, _, _ in read} >= {number for number, _, _ in whole}


@pytest.mark.parametrize("kept", [(), (0,), (1, 3), (2,), (0, 1, 2, 3)])
def test_rows_that_stay_are_listed_at_any_moment(
    kept: tuple[int, ...], descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While others are removed, each is at its old place or at its new one."""
    rows: list[Row] = [(number, 5, None) for number in range(4)]
    write_session_list(descriptor, sessions_of(rows))
    staying = [rows[position] for position in kept]
    seen: list[set[Row]] = []
    write, cut = os.pwrite, os.ftruncate

    def look_and_write(descriptor: int, line: bytes, offset: int) -> int:
        seen.append(set(rows_of(descriptor)))
        return write(descriptor, line, offset)

    def look_and_cut(descriptor: int, size: int) -> None:
        seen.append(set(rows_of(descriptor)))
        cut(descriptor, size)

    monkeypatch.setattr(os, "pwrite", look_and_write)
    monkeypatch.setattr(os, "ftruncate", look_and_cut)
    write_session_list(descriptor, sessions_of(staying))
    assert len(seen) == len(kept) + 1
    assert all(set(staying) <= listed <= set(rows) for listed in seen)
    assert rows_of(descriptor) == staying


@pytest.mark.parametrize("garbage", [b"", b"12 345", b"\n" * 64, b"\0" * 128, b"x" * 200])
def test_other_content_is_left_out(descriptor: int, garbage: bytes) -> None:
    os.write(descriptor, garbage)
    assert rows_of(descriptor) == []


@pytest.mark.slow
def test_the_whole_file_is_read(descriptor: int) -> None:
    """Reading does not depend on the descriptor's position."""
    write_session_list(descriptor, [WorkerSession(number, 1) for number in range(20_000)])
    os.lseek(descriptor, 100, os.SEEK_SET)
    for _ in range(2):
        assert list(read_session_list(descriptor)) == list(range(20_000))


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "close", "remove", "start", "end"]), st.integers(1, 6)),
        max_size=30,
    )
)
def test_the_file_has_the_sessions_and_whether_children_are_started(
    descriptor: int, steps: list[tuple[str, int]]
) -> None:
    """After every step, whatever row a session has."""
    os.ftruncate(descriptor, 0)
    listed = SessionList(descriptor)
    since: int | None = None
    for tick, (step, number) in enumerate(steps):
        session = listed.sessions.get(number)
        if step == "add" and session is None:
            listed.add(WorkerSession(number, tick))
        elif step == "close" and session is not None:
            listed.close(session, tick)
        elif step == "remove" and session is not None:
            listed.remove([number])
        elif step in ("start", "end"):
            since = tick if step == "start" else None
            listed.set_starting(since)
        read = read_session_list(descriptor)
        starting = read.pop(STARTING, None)
        assert (None if starting is None else starting.opened) == since
        assert {one.number: (one.opened, one.closed) for one in read.values()} == {
            one.number: (one.opened, one.closed) for one in listed.sessions.values()
        }
