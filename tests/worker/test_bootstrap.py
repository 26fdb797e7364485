"""The two formats of function workers, and the modules that a worker imports."""

from __future__ import annotations

import marshal
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.process.calls import call_argv, make_payload, memory_file, read_call_result
from elastic_aio.worker import bootstrap
from elastic_aio.worker.bootstrap import dump_plain, is_plain, load_plain
from tests.support import functions

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


@pytest.fixture
def result() -> Iterator[int]:
    """A memory file."""
    descriptor = memory_file("result")
    yield descriptor
    os.close(descriptor)


def perform(result: int, function: Any, *args: Any) -> int:
    return bootstrap.perform(lambda: (function, args), result)


@pytest.mark.slow
@given(value=PLAIN)
def test_values_survive_a_round_trip(value: Any) -> None:
    """By marshal or by pickle, with type and content."""
    descriptor = memory_file("result")
    try:
        assert perform(descriptor, lambda: value) == 0
        kind, content = bootstrap.read_result(descriptor)
        assert kind == bootstrap.VALUE
        assert content == value
        assert type(content) is type(value)
    finally:
        os.close(descriptor)


class Number(int):
    """A subclass of int, which is not plain."""


def test_a_result_cut_short_is_nothing(result: int) -> None:
    """An empty file, one without a header, and one shorter than its header says."""
    assert bootstrap.read_result(result) == (bootstrap.NOTHING, None)
    os.pwrite(result, b"x" * 100, 16)
    assert bootstrap.read_result(result) == (bootstrap.NOTHING, None)
    os.ftruncate(result, 0)
    assert perform(result, lambda: {"a": b"x" * 200_000}) == 0
    os.ftruncate(result, 100_000)
    assert bootstrap.read_result(result) == (bootstrap.NOTHING, None)


async def test_a_damaged_value_is_a_problem(result: int) -> None:
    assert perform(result, lambda: {1: 2}) == 0
    assert (await read_call_result(result)).value == {1: 2}
    os.pwrite(result, b"\xff\xff\xff", 16)
    damaged = await read_call_result(result)
    assert damaged.value is None
    assert damaged.problem.startswith("its value cannot be unpickled here: ")


@pytest.mark.parametrize("kind", [bootstrap.RAISED, bootstrap.EXITED])
async def test_a_result_of_another_form_is_a_problem(result: int, kind: int) -> None:
    """Its reader never fails."""
    assert perform(result, lambda: 7) == 0
    os.pwrite(result, bytes([kind]), 0)
    assert "cannot be unpickled here: TypeError: " in (await read_call_result(result)).problem


async def test_only_small_values_are_read_in_the_event_loop(
    result: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread reads a long nested list; a false length is refused before any byte is read."""
    threads = []
    read_result = bootstrap.read_result

    def read(descriptor: int, **options: bool) -> tuple[int, Any]:
        threads.append(threading.current_thread())
        return read_result(descriptor, **options)

    monkeypatch.setattr(bootstrap, "read_result", read)
    for value in ([list(range(99))] * 9, [list(range(99))] * 99, [["y" * 4000] * 9] * 9):
        assert perform(result, lambda value=value: value) == 0
        assert (await read_call_result(result)).value == value
    assert [thread is threading.main_thread() for thread in threads] == [True, False, False]
    monkeypatch.undo()

    sizes = []
    pread = os.pread

    def pread_and_measure(descriptor: int, size: int, offset: int) -> bytes:
        sizes.append(size)
        return pread(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", pread_and_measure)
    os.ftruncate(result, (1 << 22) + 16)
    os.pwrite(
        result, bytes([bootstrap.VALUE, 1]).ljust(8, b"\0") + (1 << 22).to_bytes(8, "little"), 0
    )
    damaged = await read_call_result(result)
    assert (
        damaged.problem == "its value cannot be unpickled here: ValueError: its bytes are damaged"
    )
    assert max(sizes) <= 1 << 17


def test_a_worker_imports_few_modules() -> None:
    """For a function of a module with plain arguments, not even pickle."""
    payload = make_payload(pow, (2, 3))
    result = memory_file("result")
    try:
        command = list(call_argv(sys.executable, payload, result, 0))
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


def test_other_arguments_are_pickled() -> None:
    args = ({"a": Number(1)}, [b"x" * 10_000])
    payload = make_payload(functions.give, args)
    try:
        content = os.pread(payload.descriptor, 1 << 20, 0)
        end = 8 + int.from_bytes(content[:8], "little")
        function, unpickled = pickle.loads(content[end:])
        assert function is functions.give
        assert unpickled == args
        assert type(unpickled[0]["a"]) is Number
    finally:
        payload.close()


def test_descriptors_can_have_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a worker of the fork server."""
    assert bootstrap.InheritedDescriptor(7).detach() == 7
    monkeypatch.setattr(bootstrap, "_numbers", {7: 11})
    assert bootstrap.InheritedDescriptor(7).detach() == 11


# -------------------------------------------------------------------------- plain values


@pytest.mark.slow
@given(value=PLAIN)
def test_forms_survive_a_round_trip(value: Any) -> None:
    form = dump_plain(value)
    if form:
        assert repr(load_plain(form)) == repr(value)
    else:
        assert not is_plain(value)


@pytest.mark.parametrize("value", [None, 3, -(10**30), "\ud800", [[[[1]]]], [[]] * 999])
def test_a_small_value_is_plain(value: object) -> None:
    assert load_plain(dump_plain(value)) == value


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
    assert dump_plain(value) == b""


@pytest.mark.slow
@given(value=PLAIN, data=st.data())
def test_damaged_bytes(value: Any, data: st.DataObject) -> None:
    """The only error is one of value: no other type, no endless list."""
    form = bytearray(dump_plain(value) or b"N")
    form[data.draw(st.integers(0, len(form) - 1))] = data.draw(st.integers(0, 255))
    for damaged in (bytes(form), bytes(form[:-1]), bytes(form) + b"N"):
        try:
            load_plain(damaged)
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
        load_plain(form)
    assert read == []


@pytest.mark.parametrize("kind", [bootstrap.RAISED, bootstrap.UNPICKLABLE, bootstrap.EXITED])
@pytest.mark.parametrize("content", [(5, 6, 7), (None, None, None), [1], 7, (), ("m", "t")])
async def test_a_result_of_other_types_is_damaged(result: int, kind: int, content: Any) -> None:
    """A worker may write anything; the launcher reports it as its failure."""
    form = bootstrap.dump_plain(content)
    os.pwrite(result, bytes([kind, True]).ljust(8, b"\0") + len(form).to_bytes(8, "little"), 0)
    os.pwrite(result, form, 16)
    read = await read_call_result(result)
    if kind != bootstrap.RAISED and content == ("m", "t"):
        assert read.problem == "m"
    else:
        assert (read.error, "cannot be unpickled here" in read.problem) == (None, True)
