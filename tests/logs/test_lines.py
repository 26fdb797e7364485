"""LineSplitter and prefixes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic_aio.logs.lines import (
    HELD_MAX,
    Frame,
    Lines,
    LineSplitter,
    LongLine,
    Piece,
    PrefixFields,
    RawSplitter,
    make_prefix,
    with_prefix,
)


def last_frame(line: bytes) -> bytes:
    """Return what a terminal would show of a line: its last frame that is not empty."""
    return next((frame for frame in reversed(line.split(b"\r")) if frame), b"")


def reference(content: bytes) -> list[bytes]:
    """Return the expected lines in order, a last one without a newline too."""
    *whole, rest = content.split(b"\n")
    shown = [last_frame(line) for line in whole]
    return [*shown, last_frame(rest)] if last_frame(rest) else shown


def lines_of(pieces: list[Piece], content: bytes) -> list[bytes]:
    """Return the lines of the pieces; long lines are taken from the content."""
    lines: list[bytes] = []
    for piece in pieces:
        match piece:
            case Lines(block):
                assert block.endswith(b"\n")
                assert b"\r" not in block
                lines += block[:-1].split(b"\n")
            case LongLine(start, end):
                text = content[start:end]
                assert b"\n" not in text
                assert b"\r" not in text
                assert len(text) > HELD_MAX
                assert content[end : end + 1] in (b"\n", b"\r", b"")
                lines.append(text)
            case Frame(text):
                assert text
                assert b"\n" not in text
                assert b"\r" not in text
    return lines


def pieces_of(chunks: list[bytes]) -> list[Piece]:
    splitter = LineSplitter()
    pieces: list[Piece] = []
    for chunk in chunks:
        before = splitter.offset
        pieces += splitter.feed(chunk)
        assert splitter.offset == before + len(chunk)
    return pieces + splitter.finish()


def cut_up(content: bytes, cuts: list[int]) -> list[bytes]:
    offsets = sorted({0, len(content), *(cut % (len(content) + 1) for cut in cuts)})
    return [content[start:end] for start, end in pairwise(offsets)]


# Mostly ends of lines and frames, and bytes that are not UTF-8.
tricky = st.lists(
    st.sampled_from(
        [b"\n", b"\r", b"\r\n", b"a", b"bc", b"\xc3\xa4", b"\xff", b"\0", b" ", b"\n\n"]
    ),
    max_size=40,
).map(b"".join)
cut_lists = st.lists(st.integers(0, 10**6), max_size=10)


@given(tricky | st.binary(max_size=100), cut_lists)
@example(b"", [])
@example(b"\r", [])
@example(b"a\r", [1])
@example(b"a\r\nb", [2])
@example(b"a\rb\r\r\n", [1, 2, 3])
def test_chunks_do_not_change_the_lines(content: bytes, cuts: list[int]) -> None:
    pieces = pieces_of(cut_up(content, cuts))
    assert lines_of(pieces, content) == reference(content)


@given(tricky)
def test_chunks_of_one_byte_do_not_change_the_lines(content: bytes) -> None:
    pieces = pieces_of([content[place : place + 1] for place in range(len(content))])
    assert lines_of(pieces, content) == reference(content)


long_parts = st.lists(
    st.sampled_from(
        [
            b"x" * (HELD_MAX + 1),
            b"y" * HELD_MAX,
            b"z" * (HELD_MAX - 1),
            b"w" * (3 * HELD_MAX),
            b"\n",
            b"\r",
            b"ab",
        ]
    ),
    max_size=8,
).map(b"".join)


@given(long_parts, cut_lists)
@example(b"x" * (HELD_MAX + 1) + b"\rab\n" + b"y" * (HELD_MAX + 1), [5, HELD_MAX + 5])
def test_long_lines_are_shown_from_the_file(content: bytes, cuts: list[int]) -> None:
    pieces = pieces_of(cut_up(content, cuts))
    assert lines_of(pieces, content) == reference(content)


def test_a_line_is_held_up_to_the_limit() -> None:
    """HELD_MAX bytes are `Lines`, one byte more is a `LongLine`."""
    short, long = b"s" * HELD_MAX, b"l" * (HELD_MAX + 1)
    splitter = LineSplitter()
    assert splitter.feed(short) == []
    assert splitter.feed(b"\n") == [Lines(short + b"\n")]
    assert splitter.feed(long) == []
    assert splitter.feed(b"\nnext\n") == [
        LongLine(HELD_MAX + 1, 2 * HELD_MAX + 2),
        Lines(b"next\n"),
    ]


def test_a_long_last_line_is_a_range_of_the_file() -> None:
    splitter = LineSplitter()
    splitter.feed(b"a\n" + b"x" * HELD_MAX)
    assert splitter.feed(b"x") == []
    assert splitter.finish() == [LongLine(2, 2 + HELD_MAX + 1)]
    assert splitter.finish() == []


def test_memory_stays_bounded() -> None:
    """64 MiB without a newline, in chunks of 64 KiB."""
    splitter = LineSplitter()
    chunk = b"x" * 65_521
    tracemalloc.start()
    try:
        for _ in range(1024):
            assert splitter.feed(chunk) == []
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert splitter.offset == 1024 * 65_521
    assert peak < 6 * HELD_MAX
    assert splitter.finish() == [LongLine(0, 1024 * 65_521)]


def test_a_frame_is_the_last_that_is_not_empty() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"10%\r") == [Frame(b"10%")]
    assert splitter.feed(b"20%") == []
    assert splitter.feed(b"\r30%\r40%") == [Frame(b"40%")]
    assert splitter.feed(b"\r") == [Frame(b"40%")]
    assert splitter.feed(b"\n") == [Lines(b"40%\n")]
    assert splitter.feed(b"\r\r") == []
    assert splitter.finish() == []


def test_crlf_ends_a_line() -> None:
    """Also when a chunk ends between the two."""
    splitter = LineSplitter()
    assert splitter.feed(b"one\r\ntwo\r") == [Lines(b"one\n"), Frame(b"two")]
    assert splitter.feed(b"\nthree\r\n") == [Lines(b"two\n"), Lines(b"three\n")]


def test_whole_lines_come_as_one_block() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"a\nb\nc") == [Lines(b"a\nb\n")]
    assert splitter.feed(b"d\ne\n") == [Lines(b"cd\ne\n")]
    assert splitter.finish() == []


def test_the_repr_has_the_offsets() -> None:
    splitter = LineSplitter()
    splitter.feed(b"ab\ncd\ref")
    assert repr(splitter) == "<LineSplitter at 8, current frame from 6>"


@pytest.mark.parametrize(
    ("block", "prefix", "text"),
    [
        (b"", b"> ", b""),
        (b"a\n", b"", b"a\n"),
        (b"a\n", b"> ", b"> a\n"),
        (b"a\nb\n", b"> ", b"> a\n> b\n"),
        (b"\n\n", b"> ", b"> \n> \n"),
        (b"\xff\n", b"[0]:", b"[0]:\xff\n"),
    ],
)
def test_every_line_gets_the_prefix(block: bytes, prefix: bytes, text: bytes) -> None:
    assert with_prefix(block, prefix) == text


@given(st.lists(st.binary(max_size=5).filter(lambda line: b"\n" not in line), min_size=1))
def test_a_prefixed_block_has_its_lines(lines: list[bytes]) -> None:
    block = b"".join(line + b"\n" for line in lines)
    prefixed = with_prefix(block, b"P:")
    assert prefixed.endswith(b"\n")
    assert prefixed[:-1].split(b"\n") == [b"P:" + line for line in lines]


FIELDS = PrefixFields(
    role="trainer", rank=5, local_rank=1, attempt=2, host="node-a", stream="stderr"
)


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
        ("\udcff ", rb"\udcff "),
    ],
)
def test_variables_are_replaced(template: str | None, text: bytes) -> None:
    """Known variables are replaced, everything else stays, and the clock is not asked."""
    prefix = make_prefix(template, FIELDS, never)
    assert prefix() == text
    assert prefix() == text


def test_a_child_has_its_path_and_its_rank() -> None:
    """A template may have them in another form."""
    fields = PrefixFields("web", 1, 1, 0, "h", "stdout", "serving/3")
    assert make_prefix(None, fields, never)() == b"[serving/3:1]:"
    assert make_prefix("${child}|", fields, never)() == b"serving/3|"


def test_the_time_is_that_of_the_lines() -> None:
    """With a time in it, the prefix is made anew for each chunk."""
    times: Iterator[str] = iter(["12:00", "12:01"])
    prefix = make_prefix("${timestamp} [${rank}]", FIELDS, lambda: next(times))
    assert prefix() == b"12:00 [5]"
    assert prefix() == b"12:01 [5]"


def test_a_value_is_no_template() -> None:
    """A role that looks like a variable is text."""
    fields = PrefixFields("${rank}", 5, 1, 0, "h", "stdout")
    assert make_prefix(None, fields, never)() == b"[${rank}1]:"


def test_raw_bytes_that_are_followed_by_more_end_with_a_line() -> None:
    """The reader of a pipe knows that more comes, though the file has no more yet."""
    splitter = RawSplitter()
    assert splitter.feed(b"one\ntw", True) == [Lines(b"one\n")]
    assert (splitter.offset, splitter.needed) == (6, 4)
    assert splitter.feed(b"o\nthr", False) == [Lines(b"two\nthr")]
    assert splitter.feed(b"a long line", True) == [Lines(b"a long line")]
