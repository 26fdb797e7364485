"""When the bytes of a file were seen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.logs.streams import _KEPT_MAX, LineTimes


def test_a_range_has_the_times_of_its_parts() -> None:
    times = LineTimes()
    assert [*times.spans(0, 5, 9.0)] == [(5, 9.0)]
    times.note(10, 1.0)
    times.note(10, 1.5)
    times.note(30, 2.0)
    assert times.end == 30
    assert [*times.spans(0, 40, 9.0)] == [(10, 1.0), (30, 2.0), (40, 9.0)]
    assert [*times.spans(10, 20, 9.0)] == [(20, 2.0)]
    assert [*times.spans(7, 7, 9.0)] == []


def test_a_file_that_is_shorter_begins_anew() -> None:
    times = LineTimes()
    times.note(100, 1.0)
    times.note(5, 2.0)
    assert [*times.spans(0, 10, 9.0)] == [(5, 2.0), (10, 9.0)]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 60))
def test_many_times_are_thinned_and_never_too_early(steps: list[int], repeat: int) -> None:
    """A byte that was seen at a time gets this one or a later one; the last one stays."""
    times, end, seen = LineTimes(), 0, []
    for number, step in enumerate(steps * repeat):
        end += step
        times.note(end, float(number))
        seen.append((end, float(number)))
    assert len(times._ends) <= _KEPT_MAX
    assert times.end == end
    for position, time in seen[:: max(1, len(seen) // 20)]:
        ((_, found),) = times.spans(position - 1, position, -1.0)
        assert found >= time
    assert [*times.spans(end - 1, end, -1.0)] == [(end, float(len(seen) - 1))]
