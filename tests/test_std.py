"""The grammar of `-r` and `-t`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.errors import SpecError
from elastic_aio.std import Std, StdMap


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        ("0", {0: 0, 7: 0}),
        ("3", {0: 3, 100: 3}),
        (" 2 ", {0: 2}),
        (Std.OUT, {0: 1, 5: 1}),
        (3, {0: 3}),
        ("0:3,1:1", {0: 3, 1: 1, 2: 0}),
        ("10:3", {10: 3, 1: 0, 0: 0}),
        ("0-3:3,10:1", {0: 3, 3: 3, 4: 0, 10: 1}),
        ("2-2:2", {2: 2, 1: 0, 3: 0}),
        (" 0:1 , 1:2 ", {0: 1, 1: 2}),
        ({0: 3, 12: Std.ERR}, {0: 3, 12: 2, 1: 0}),
        ({}, {0: 0}),
        (StdMap(Std.ALL), {4: 3}),
    ],
)
def test_every_form_is_read(value: object, chosen: dict[int, int]) -> None:
    """A mask is for all ranks; a list or mapping is for those it names."""
    parsed = StdMap.parse("logs.tee", value)
    assert {rank: int(parsed.of(rank)) for rank in chosen} == chosen


@pytest.mark.parametrize(
    "value",
    [
        "",
        "4",
        "-1",
        "a",
        "0:4",
        "0:",
        ":1",
        "0:1,",
        "0:1;1:1",
        "0-:1",
        "-3:1",
        "1-2-3:1",
        "0:1:2",
        4,
        -1,
        True,
        1.0,
        None,
        {0: 4},
        {-1: 1},
        {"0": 1},
        {0: True},
        {True: 1},
        [0, 1],
        "9" * 5000,
    ],
)
def test_anything_else_is_refused_in_one_line(value: object) -> None:
    """What follows no form is a SpecError that shows the accepted ones."""
    with pytest.raises(SpecError, match=r"^logs\.tee: must be a mask 0-3 or a list") as caught:
        StdMap.parse("logs.tee", value)
    assert "\n" not in str(caught.value)


def test_a_rank_named_twice_is_refused() -> None:
    """Overlapping ranges contradict each other."""
    with pytest.raises(SpecError, match=r"^-r: must name rank 2 only once, not '0-3:3,2:1'"):
        StdMap.parse("-r", "0-3:3,2:1")


def test_a_backward_range_is_refused() -> None:
    """A range runs upwards."""
    with pytest.raises(SpecError, match=r"a range must not run backwards \(3-1\)"):
        StdMap.parse("-r", "3-1:3")


def test_questions_about_a_map() -> None:
    """Emptiness and the highest rank are known without a number of workers."""
    assert StdMap().is_empty
    assert StdMap.parse("f", "0:0,9:0").is_empty
    assert not StdMap.parse("f", "5:1").is_empty
    assert not StdMap.parse("f", 2).is_empty
    assert StdMap.parse("f", "0-3:3,10:1").highest_rank == 10
    assert StdMap.parse("f", "3").highest_rank == -1


@given(st.dictionaries(st.integers(0, 300), st.sampled_from(list(Std)), min_size=1))
def test_a_written_list_is_read_back(chosen: dict[int, Std]) -> None:
    """Text and mapping of the same choice give equal maps."""
    text = ",".join(f"{rank}:{int(mask)}" for rank, mask in chosen.items())
    assert StdMap.parse("f", text) == StdMap.parse("f", chosen)
    assert all(StdMap.parse("f", text).of(rank) == mask for rank, mask in chosen.items())


def test_the_numbers_are_torchs() -> None:
    """OUT is 1, ERR is 2, ALL is both."""
    assert (Std.NONE, Std.OUT, Std.ERR, Std.ALL) == (0, 1, 2, 3)
    assert Std.OUT | Std.ERR is Std.ALL
