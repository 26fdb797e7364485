"""What workers report, and when they are silent for too long: pure."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.spec.liveness import LivenessSpec
from elastic_aio.watch.deadlines import MESSAGE_MAX, DeadlineTable, WorkerReport


def table_of(**limits: Any) -> tuple[DeadlineTable, WorkerReport]:
    """Return a table with worker 0, which was started at 100 s."""
    table = DeadlineTable(LivenessSpec(**limits))
    return table, table.add(0, 100.0)


def reasons(table: DeadlineTable, now: float) -> list[str]:
    return [missed.reason for missed in table.expire(now)]


# Limits, messages as (time, content), and the time and the reason of the first missed deadline.
Case = tuple[dict[str, float], list[tuple[float, bytes]], float | None, str]


def case(
    limits: dict[str, float], messages: list[tuple[float, bytes]], at: float | None, reason: str
) -> Case:
    return limits, messages, at, reason


HEARTBEAT = {"heartbeat_timeout": 5.0}
PROGRESS = {"progress_timeout": 5.0}
SILENT = "no heartbeat for 5 s (heartbeat timeout)"
CASES: list[Case] = [
    case({}, [], None, ""),
    case({"idle_report": 1}, [], None, ""),
    # From the start, and from the last message, whatever it says.
    case(HEARTBEAT, [], 105, SILENT),
    case(HEARTBEAT, [(104, b"WATCHDOG=1")], 109, SILENT),
    case(
        HEARTBEAT, [(104, b"STATUS=loading\nMAINPID=1\n")], 109, f"{SILENT}, last status 'loading'"
    ),
    # What is no message is no heartbeat.
    case(HEARTBEAT, [(104, b"hello")], 105, SILENT),
    case(HEARTBEAT, [(104, b"X=" + b"x" * MESSAGE_MAX)], 105, SILENT),
    # Not before it is ready.
    case(
        {"heartbeat_timeout": 5, "ready_timeout": 60},
        [(101, b"WATCHDOG=1")],
        160,
        "not ready 60 s after its start (ready timeout)",
    ),
    case({"heartbeat_timeout": 5, "ready_timeout": 60}, [(150, b"READY=1\n")], 155, SILENT),
    case({"ready_timeout": 60}, [(150, b"READY=1")], None, ""),
    case({"ready_timeout": 60}, [(150, b"READY=0")], 160, "not ready 60 s after"),
    # The same step is no progress.
    case(
        PROGRESS,
        [(103, b"PROGRESS=7"), (104, b"PROGRESS=7"), (105, b"WATCHDOG=1")],
        108,
        "no progress for 5 s (progress timeout), at step 7",
    ),
    case(PROGRESS, [(103, b"PROGRESS=7"), (104, b"PROGRESS=8")], 109, "no progress"),
    # A phase with a limit replaces the other deadlines, until it ends.
    case(
        {"heartbeat_timeout": 5, "progress_timeout": 5},
        [(101, b"PHASE=checkpoint\nPHASE_TIMEOUT_USEC=60000000")],
        161,
        "phase 'checkpoint' has not ended after 60 s",
    ),
    case(
        PROGRESS,
        [(101, b"PHASE=checkpoint\nPHASE_TIMEOUT_USEC=60000000"), (140, b"PHASE_END=checkpoint")],
        145,
        "no progress for 5 s",
    ),
    case(HEARTBEAT, [(101, b"PHASE=load")], 106, f"{SILENT}, in phase 'load'"),
    # The end of an outer phase ends those inside; the end of an unknown one nothing.
    case(
        {},
        [
            (101, b"PHASE=a\nPHASE_TIMEOUT_USEC=60000000"),
            (102, b"PHASE=b\nPHASE_TIMEOUT_USEC=1000000"),
            (102.5, b"PHASE_END=c"),
        ],
        103,
        "phase 'b' has not ended after 1 s",
    ),
    case(
        {},
        [
            (101, b"PHASE=a\nPHASE_TIMEOUT_USEC=60000000"),
            (102, b"PHASE=b\nPHASE_TIMEOUT_USEC=1000000"),
            (102.5, b"PHASE_END=a"),
        ],
        None,
        "",
    ),
    # sd_notify(3).
    case(HEARTBEAT, [(104, b"STOPPING=1")], None, ""),
    case(HEARTBEAT, [(104, b"EXTEND_TIMEOUT_USEC=30000000")], 134, "no heartbeat"),
    case(HEARTBEAT, [(104, b"EXTEND_TIMEOUT_USEC=1e9")], 109, "no heartbeat"),
    case({}, [(104, b"WATCHDOG=trigger")], 0, "the worker asked to be ended (WATCHDOG=trigger)"),
]


@pytest.mark.parametrize(("limits", "messages", "at", "reason"), CASES)
def test_when_a_deadline_is_missed(
    limits: dict[str, float], messages: list[tuple[float, bytes]], at: float | None, reason: str
) -> None:
    table, _ = table_of(**limits)
    for when, content in messages:
        table.feed(0, content, when)
    assert table.next_deadline == table.deadline_of(0) == at
    if at is None:
        assert table.expire(1e9) == []
        return
    assert table.expire(at - 0.001) == []
    (missed,) = table.expire(max(at, 104.0))
    assert missed.reason.startswith(reason)
    assert table.expire(max(at, 104.0)) == []


def test_a_missed_deadline_counts_again_after_a_message() -> None:
    table, report = table_of(heartbeat_timeout=5)
    assert len(table.expire(110.0)) == 1
    table.feed(0, b"WATCHDOG=1", 111.0)
    assert report.heartbeat_at == 111.0
    assert table.next_deadline == 116.0
    assert reasons(table, 116.0) == ["no heartbeat for 5 s (heartbeat timeout)"]


def test_the_first_of_several_workers_comes_first() -> None:
    table, _ = table_of(heartbeat_timeout=5)
    table.add(1, 90.0)
    table.add(2, 1000.0)
    assert table.next_deadline == 95.0
    assert [missed.local_rank for missed in table.expire(200.0)] == [1, 0]
    table.remove(2, 300.0, is_success=False)
    assert table.next_deadline is None


def test_a_success_begins_the_deadline_of_the_others() -> None:
    """Whatever they say, except that they need more time."""
    table, _ = table_of(exit_skew_timeout=5, heartbeat_timeout=1000)
    for local_rank in 1, 2, 3:
        table.add(local_rank, 100.0)
    table.remove(1, 110.0, is_success=False)
    assert table.next_deadline == 1100.0
    table.remove(2, 120.0, is_success=True)
    table.feed(0, b"STOPPING=1", 121.0)
    table.feed(3, b"EXTEND_TIMEOUT_USEC=30000000", 122.0)
    assert [table.deadline_of(local_rank) for local_rank in (0, 3)] == [125.0, 152.0]
    (missed,) = table.expire(125.0)
    assert (missed.local_rank, missed.kind, missed.age) == (0, "exit skew", 5.0)
    assert missed.reason == "not finished 5 s after the first success (exit skew timeout)"
    table.is_stopping = True
    assert [table.deadline_of(3), table.next_deadline] == [None, None]
    assert table.expire(1e9) == []


def test_workers_that_run_long_after_a_success_are_reported_once() -> None:
    for is_stopped in False, True:
        table, _ = table_of()
        table.add(1, 100.0)
        assert table.deadline_of(0) is None
        table.remove(1, 110.0, is_success=True)
        assert table.next_deadline == 170.0
        assert table.take_skew(169.0) == 0.0
        if is_stopped:
            table.is_stopping = True
        assert table.take_skew(171.0) == (0.0 if is_stopped else 61.0)
        assert table.take_skew(172.0) == 0.0
        assert table.next_deadline is None


def test_the_success_of_another_node_begins_the_same_deadlines() -> None:
    """The earliest success counts; a worker that is started later is late at once."""
    table, _ = table_of(exit_skew_timeout=5)
    table.remove(0, 101.0, is_success=False)
    table.note_success(90.0)
    table.note_success(95.0)
    table.add(1, 110.0)
    assert table.deadline_of(1) == table.next_deadline == 95.0
    (missed,) = table.expire(110.0)
    assert (missed.kind, missed.age) == ("exit skew", 20.0)
    assert table.deadline_of(1) == 150.0
    assert table.take_skew(151.0) == 61.0
    assert table.deadline_of(1) is None


def test_no_report_is_due_once_all_have_succeeded() -> None:
    table, _ = table_of()
    table.remove(0, 110.0, is_success=True)
    assert table.next_deadline is None
    assert table.take_skew(1000.0) == 0.0


def test_what_a_worker_says_is_kept_for_people() -> None:
    table, report = table_of()
    assert table.feed(0, b"READY=1\nSTATUS=a\x1b[31m\tb\xff\n", 101.0)
    assert not table.feed(0, b"READY=1\nPROGRESS=12/100", 102.0)
    table.feed(0, b"PHASE=checkpoint", 103.0)
    assert (report.ready_at, report.status, report.step) == (101.0, "a [31m b\ufffd", "12/100")
    assert report.phase == "checkpoint"
    assert str(report) == "step 12/100, phase 'checkpoint', a [31m b\ufffd"
    assert not table.feed(7, b"READY=1", 104.0)


@given(st.lists(st.binary(max_size=300), max_size=30))
def test_hostile_bytes_are_bounded(messages: list[bytes]) -> None:
    """Whatever they are, and however many."""
    table, report = table_of(heartbeat_timeout=5)
    for content in messages:
        table.feed(0, b"PHASE=" + content, 101.0)
        table.feed(0, b"PHASE_TIMEOUT_USEC=" + content, 101.0)
        table.feed(0, b"EXTEND_TIMEOUT_USEC=" + content + b"\nSTATUS=" + content, 101.0)
    assert len(report.phases) <= 16
    assert len(report.status) <= 200
    assert all(len(phase.name) <= 60 for phase in report.phases)
    table.expire(1e12)
    assert table.next_deadline is None or table.next_deadline > 1e12


def test_all_workers_that_run_have_to_agree_to_a_change() -> None:
    table, _ = table_of()
    for local_rank in (1, 2):
        table.add(local_rank, 100.0)
    table.feed(0, b"CHANGE_AGREED=1", 101.0)
    for content in (b"CHANGE_AGREED=-1", b"CHANGE_AGREED=", b"CHANGE_AGREED=0"):
        table.feed(1, content, 101.0)
        assert table.agreed_change == -1
    table.feed(1, b"CHANGE_AGREED=1", 102.0)
    assert table.agreed_change == -1
    table.remove(2, 103.0, is_success=True)
    assert table.agreed_change == 1


def test_a_step_is_progress_of_the_attempt() -> None:
    """Also of a worker that has exited since; without a text it is none."""
    table, _ = table_of()
    table.feed(0, b"PROGRESS=", 101.0)
    table.feed(0, b"PHASE=save\nPHASE_END=save\nWATCHDOG=1", 102.0)
    assert not table.has_progress
    table.feed(0, b"PROGRESS=0", 103.0)
    table.remove(0, 104.0, is_success=False)
    assert table.has_progress


def test_the_first_reason_to_exclude_the_node_counts() -> None:
    """One line of it; an empty one is none."""
    table, _ = table_of()
    table.add(1, 100.0)
    table.feed(1, b"EXCLUDE=", 101.0)
    assert table.exclusion == ""
    table.feed(1, b"EXCLUDE=bad \xff\x1b[31mGPU", 102.0)
    table.feed(0, b"EXCLUDE=other", 103.0)
    assert table.exclusion.startswith("bad ")
    assert "\x1b" not in table.exclusion
