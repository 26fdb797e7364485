"""Plain values: what is one, and that a damaged form is refused before marshal reads it."""

from __future__ import annotations

import marshal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.worker import plain_value

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters())
    | st.binary(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple),
    max_leaves=10,
)


class Number(int):
    """A subclass of int, which is not plain."""


@pytest.mark.slow
@given(value=PLAIN)
def test_values_survive_a_round_trip(value: Any) -> None:
    form = plain_value.dump(value)
    if form:
        assert repr(plain_value.load(form)) == repr(value)
    else:
        assert not plain_value.is_plain(value)


@pytest.mark.parametrize("value", [None, 3, -(10**30), "\ud800", [[[[1]]]], [[]] * 999])
def test_a_small_value_is_plain(value: object) -> None:
    assert plain_value.load(plain_value.dump(value)) == value


@pytest.mark.parametrize(
    "value",
    [
        Number(1),
        bytearray(b"x"),
        memoryview(b"x"),
        {1: 2},
        {1},
        [[[[[[1]]]]]],
        b"x" * 5000,
        [1] * 2000,
        [[1] * 99] * 99,
        ["x" * 4000] * 20,
        pytest.param(1 << (1 << 20), id="large int"),
    ],
)
def test_other_values_are_not_plain(value: object) -> None:
    """marshal would change the type, or the value is large."""
    assert plain_value.dump(value) == b""


@pytest.mark.slow
@given(value=PLAIN, data=st.data())
def test_damaged_bytes(value: Any, data: st.DataObject) -> None:
    """The only error is one of value: no other type, no endless list."""
    form = bytearray(plain_value.dump(value) or b"N")
    form[data.draw(st.integers(0, len(form) - 1))] = data.draw(st.integers(0, 255))
    for damaged in (bytes(form), bytes(form[:-1]), bytes(form) + b"N"):
        try:
            plain_value.load(damaged)
        except ValueError:
            pass


@pytest.mark.parametrize(
    "form",
    [
        b"[\xff\xff\xff\x7f",
        b"(\xff\xff\xff\x7f" * 9,
        b"\xdb\xff\xff\xff\x7f",
        b"[\xff\xff\xff\xff",
        b"s\xff\xff\xff\x7f",
        b"[\xd0\x07\0\0" + b"N" * 2000,
        b"{0",
        b"c",
        b"",
        b"NN",
    ],
)
def test_a_false_length(form: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """marshal, which would make the list first, does not read it."""
    read: list[bytes] = []
    monkeypatch.setattr(marshal, "loads", read.append)
    with pytest.raises(ValueError, match="damaged"):
        plain_value.load(form)
    assert read == []
