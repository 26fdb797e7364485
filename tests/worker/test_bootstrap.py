"""The two formats of a function worker, and what it imports."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.process.payload import argv_of, make_payload, memory_file
from elastic_aio.process.results import read_told
from elastic_aio.worker import bootstrap
from tests.support import functions

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple),
    max_leaves=10,
)


@pytest.fixture
def result() -> Iterator[int]:
    """A memory file."""
    descriptor = memory_file("result")
    yield descriptor
    os.close(descriptor)


def perform(result: int, function: Any, *args: Any) -> int:
    return bootstrap.perform(lambda: (function, args), result)


@given(value=PLAIN)
def test_plain_values_come_back(value: Any) -> None:
    """By marshal or by pickle, whichever takes them; types and contents are kept."""
    descriptor = memory_file("result")
    try:
        assert perform(descriptor, lambda: value) == 0
        kind, found = bootstrap.read_result(descriptor)
        assert kind == bootstrap.VALUE
        assert found == value
        assert type(found) is type(value)
    finally:
        os.close(descriptor)


class Number(int):
    """Not exactly an int."""


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
        [1] * 200,
    ],
)
def test_what_is_not_plain(value: object) -> None:
    """marshal would change its type, or is not meant for its size."""
    assert not bootstrap.is_plain(value)


def test_a_result_cut_short_says_nothing(result: int) -> None:
    """Nothing at all, no header, and less than the header promises."""
    assert bootstrap.read_result(result) == (bootstrap.NOTHING, None)
    os.pwrite(result, b"x" * 100, 16)
    assert bootstrap.read_result(result) == (bootstrap.NOTHING, None)
    os.ftruncate(result, 0)
    assert perform(result, lambda: {"a": b"x" * 200_000}) == 0
    os.ftruncate(result, 100_000)
    assert bootstrap.read_result(result) == (bootstrap.NOTHING, None)


async def test_what_is_told(result: int) -> None:
    """A damaged value is a problem that is told, and never an error here."""
    assert perform(result, lambda: {1: 2}) == 0
    assert (await read_told(result)).value == {1: 2}
    os.pwrite(result, b"\xff\xff\xff", 16)
    told = await read_told(result)
    assert told.value is None
    assert told.problem.startswith("its value cannot be unpickled here: ")


def test_a_worker_imports_next_to_nothing() -> None:
    """For a function of a module and plain arguments not even pickle, and never asyncio."""
    payload = make_payload(pow, (2, 3))
    result = memory_file("result")
    try:
        command = list(argv_of(sys.executable, payload, result, 0))
        command[1:1] = ["-I", "-S", "-v"]
        done = subprocess.run(
            command,
            pass_fds=(payload.descriptor, result),
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert bootstrap.read_result(result) == (bootstrap.VALUE, 8)
    finally:
        os.close(result)
        payload.close()
    imported = {line.split("'")[1] for line in done.stderr.splitlines() if line[:8] == "import '"}
    assert "bootstrap" in imported
    assert not imported & {"asyncio", "pickle", "_pickle", "re", "typing", "dataclasses", "enum"}


def test_the_call_is_pickled_as_late_as_possible() -> None:
    """Arguments that marshal does not take go through pickle, unchanged."""
    args = ({"a": Number(1)}, [b"x" * 10_000])
    payload = make_payload(functions.give, args)
    try:
        content = os.pread(payload.descriptor, 1 << 20, 0)
        end = 8 + int.from_bytes(content[:8], "little")
        function, found = pickle.loads(content[end:])
        assert function is functions.give
        assert found == args
        assert type(found[0]["a"]) is Number
    finally:
        payload.close()


def test_descriptors_may_have_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do in a worker that a server has forked."""
    assert bootstrap.InheritedDescriptor(7).detach() == 7
    monkeypatch.setattr(bootstrap, "_numbers", {7: 11})
    assert bootstrap.InheritedDescriptor(7).detach() == 11
