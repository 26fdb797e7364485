"""When probes are due and what their answers mean, without a clock."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.spec.probe import LogMatch, Notify, PolledProbe, Probe, Tcp
from elastic_aio.watch.probe_table import ProbeTable, Verdict


def probe(threshold: int | None = None, initial_delay: float = 0.0) -> Tcp:
    return Tcp("h:1", period=10, threshold=threshold, initial_delay=initial_delay)


def ask(table: ProbeTable, answer: bool | None, *, takes: float = 1.0) -> Verdict:
    """Ask worker 0 when it is due; the answer takes some seconds."""
    began = table.next_due
    assert began is not None
    ((local_rank, _),) = table.take_due(began)
    assert local_rank == 0
    assert table.next_due is None, "one question at a time"
    return table.answer(0, began, began + takes, is_success=answer)


def verdicts(table: ProbeTable, answers: Sequence[bool | None]) -> list[Verdict]:
    return [ask(table, answer) for answer in answers]


NOTHING, READY, NOT_ALIVE = Verdict.NOTHING, Verdict.READY, Verdict.NOT_ALIVE


@pytest.mark.parametrize(
    ("threshold", "answers", "found"),
    [
        (None, [False, False, True], [NOTHING, NOTHING, READY]),
        (2, [True, False, True, True], [NOTHING, NOTHING, NOTHING, READY]),
        (2, [True, None, True], [NOTHING, NOTHING, READY]),
    ],
)
def test_successes_in_a_row_make_a_worker_ready(
    threshold: int | None, answers: list[bool | None], found: list[Verdict]
) -> None:
    """A question that could not be asked is neither a success nor a failure."""
    table = ProbeTable(probe(threshold), None)
    table.add(0, 0.0)
    assert verdicts(table, answers) == found
    assert table.next_due is None, "it stays ready"


@pytest.mark.parametrize(
    ("threshold", "answers", "found"),
    [
        (None, [False, False, False], [NOTHING, NOTHING, NOT_ALIVE]),
        (None, [False, False, True, False, False], [NOTHING] * 5),
        (1, [True, False], [NOTHING, NOT_ALIVE]),
        (2, [False, None, False], [NOTHING, NOTHING, NOT_ALIVE]),
        (1, [False, False, True, False], [NOT_ALIVE, NOTHING, NOTHING, NOT_ALIVE]),
    ],
)
def test_failures_in_a_row_are_reported_once(
    threshold: int | None, answers: list[bool | None], found: list[Verdict]
) -> None:
    """And again after a success."""
    table = ProbeTable(None, probe(threshold))
    table.add(0, 0.0)
    assert verdicts(table, answers) == found


@pytest.mark.parametrize("ready", [Notify(), LogMatch("up"), probe()])
def test_a_worker_is_asked_whether_it_is_alive_when_it_is_ready(ready: Probe) -> None:
    """Whatever says that it is ready."""
    table = ProbeTable(ready, probe(1, initial_delay=5))
    table.add(0, 100.0)
    if isinstance(ready, PolledProbe):
        assert table.next_due == 100.0
        assert ask(table, True, takes=7) is READY
    else:
        assert table.next_due is None
        table.set_ready(0, 107.0)
    table.set_ready(0, 200.0)
    assert table.next_due == 112.0
    assert table.since_success(0, 110.0) == 3.0
    assert ask(table, False) is NOT_ALIVE


def test_questions_begin_a_period_apart() -> None:
    """An answer that takes longer is waited for."""
    table = ProbeTable(probe(99), None)
    table.add(0, 0.0)
    for takes, due in ((1.0, 10.0), (25.0, 35.0), (0.0, 45.0)):
        ask(table, True, takes=takes)
        assert table.next_due == due


def test_an_answer_about_a_worker_that_has_exited_changes_nothing() -> None:
    table = ProbeTable(probe(), probe())
    table.add(0, 0.0)
    table.take_due(0.0)
    table.remove(0)
    table.remove(0)
    table.set_ready(0, 1.0)
    assert table.answer(0, 0.0, 1.0, is_success=True) is NOTHING
    assert table.next_due is None
    assert table.since_success(0, 1.0) == 0.0


@given(
    st.lists(st.tuples(st.booleans() | st.none(), st.floats(0, 30)), max_size=60),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_verdicts_follow_from_runs_of_answers(
    answers: list[tuple[bool | None, float]], ready: int, alive: int
) -> None:
    """As a reader of the answers would count them."""
    table = ProbeTable(probe(ready), probe(alive))
    table.add(0, 0.0)
    is_ready, is_reported, run = False, False, 0
    for answer, takes in answers:
        verdict = ask(table, answer, takes=takes)
        expected = NOTHING
        if answer is not None:
            run = run + 1 if answer is not is_ready else 0
            is_reported = is_reported and not answer
            if not is_ready and run == ready:
                is_ready, run, expected = True, 0, READY
            elif is_ready and run >= alive and not is_reported:
                is_reported, expected = True, NOT_ALIVE
        assert verdict is expected
