"""The text before each line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic_aio.logs.prefix import LineOrigin, make_prefix

ORIGIN = LineOrigin(role="trainer", rank=5, local_rank=1, attempt=2, host="node-a", stream="stderr")


def never() -> str:
    raise AssertionError("the time is not wanted")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (None, b"[trainer1]:"),
        ("", b"[trainer1]:"),
        ("[${role_name}${local_rank}]:", b"[trainer1]:"),
        ("${rank}/${local_rank} ", b"5/1 "),
        ("${host} ${attempt} ${stream}|", b"node-a 2 stderr|"),
        ("$rank:", b"5:"),
        ("$$ $$rank ", b"$ $rank "),
        ("${unknown} ${rank}", b"${unknown} 5"),
        ("100% {rank} $", b"100% {rank} $"),
        ("${ }|", b"${ }|"),
        ("ä ", "ä ".encode()),
        ("\udcff ", b"? "),
    ],
)
def test_variables_are_replaced(template: str | None, text: bytes) -> None:
    """Known variables are replaced, everything else stays, and the clock is not asked."""
    prefix = make_prefix(template, ORIGIN, never)
    assert prefix() == text
    assert prefix() == text


def test_the_time_is_that_of_the_lines() -> None:
    """With a time in it, the prefix is made anew for each chunk."""
    times: Iterator[str] = iter(["12:00", "12:01"])
    prefix = make_prefix("${timestamp} [${rank}]", ORIGIN, lambda: next(times))
    assert prefix() == b"12:00 [5]"
    assert prefix() == b"12:01 [5]"


def test_a_value_is_no_template() -> None:
    """A role that looks like a variable is text."""
    origin = LineOrigin("${rank}", 5, 1, 0, "h", "stdout")
    assert make_prefix(None, origin, never)() == b"[${rank}1]:"
