"""Who coordinates, as it is written and read."""

from __future__ import annotations

import pytest

from elastic_aio.rendezvous.incumbent import Incumbent, read_incumbent


def test_what_is_written_is_read() -> None:
    """The form is that of every version so far, and comes back."""
    holder = Incumbent(epoch=3, member="host-1.7.ab", name="host-1")
    assert holder.written() == b'{"epoch":3,"member":"host-1.7.ab","name":"host-1"}'
    assert read_incumbent(holder.written()) == holder


@pytest.mark.parametrize(
    "text",
    [
        None,
        b"",
        b"x",
        b"{}",
        b'{"epoch":"3","member":"","name":""}',
        b'{"epoch":3,"member":"\xff","name":""}',
        b'{"x":' * 100_000,
    ],
)
def test_what_cannot_be_read_is_nobody(text: bytes | None) -> None:
    """A vacant office, and one that strangers have written into."""
    assert read_incumbent(text) is None
