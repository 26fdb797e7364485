"""Public values are structs; `dataclasses`, `copy` and `pickle` treat them as they did before."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import pickle
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio import ExitStatus, JobFailed, LaunchResult, NodeRange, RendezvousSpec, SpecError
from elastic_aio.outcome import AttemptResult, Failure, Goodput, JobState, WorkerResult
from elastic_aio.spec.rendezvous import EngineSpec
from elastic_aio.spec.restart import Backoff
from elastic_aio.text import shown_bytes
from elastic_aio.value import Value, from_json, to_json
from elastic_aio.worker_error import WorkerError

WORKER = WorkerResult(1, 0, 7, ExitStatus(code=3), 0.5, stderr_tail="tail", return_value=[4])
VALUES = [NodeRange(1, 3), Backoff(initial=2.0), EngineSpec(user="u", password="secret"), WORKER]


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize("copied", [copy.copy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copy_is_equal(value: Value, copied: Callable[[Value], Value]) -> None:
    assert copied(value) == value
    assert type(copied(value)) is type(value)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_dataclasses_accepts_a_value(value: Any) -> None:
    assert dataclasses.is_dataclass(type(value))
    assert dataclasses.replace(value) == value
    names = [each.name for each in dataclasses.fields(value)]
    assert names == list(dataclasses.asdict(value))


def test_values_are_matched_by_position() -> None:
    match NodeRange(1, 3):
        case NodeRange(1, maximum):
            assert maximum == 3
        case _:
            pytest.fail("not matched")


def test_replace_checks_again() -> None:
    changed = dataclasses.replace(EngineSpec(user="u"), password="p")
    assert (changed.user, changed.password) == ("u", "p")
    with pytest.raises(SpecError, match=r"engine\.user"):
        dataclasses.replace(changed, user=None)
    with pytest.raises(TypeError):
        dataclasses.replace(changed, colour="red")  # type: ignore[call-arg]  # that is the point


def test_fields_have_their_defaults() -> None:
    fields = {each.name: each for each in dataclasses.fields(LaunchResult)}
    assert fields["run_id"].default is fields["run_id"].default_factory is dataclasses.MISSING
    assert fields["restarts"].default == 0
    assert fields["goodput"].default_factory is Goodput
    assert not fields["return_values"].repr


def test_values_are_equal_by_type_and_fields() -> None:
    assert NodeRange(1, 2) == NodeRange(1, 2) != NodeRange(1, 3)
    assert hash(NodeRange(1, 2)) == hash(NodeRange(1, 2))
    other: object = (1, 2)
    assert NodeRange(1, 2) != other


def test_a_value_is_frozen() -> None:
    with pytest.raises(AttributeError):
        NodeRange().minimum = 2  # type: ignore[misc]  # that is the point
    with pytest.raises(AttributeError):
        del NodeRange().minimum


def test_secrets_and_what_is_long_are_not_in_the_repr() -> None:
    assert repr(Goodput(1.0)) == "Goodput(productive=1.0, restarting=0.0, waiting=0.0)"
    assert "user='u'" in repr(EngineSpec(user="u", password="secret"))
    result = LaunchResult("r", JobState.SUCCEEDED, "", 0, 1.0, return_values={0: "long"})
    for value in (EngineSpec(user="u", password="secret"), RendezvousSpec(token="secret" * 3)):
        assert "secret" not in repr(value)
    assert "tail" not in repr(WORKER)
    assert "[4]" not in repr(WORKER)
    assert "long" not in repr(result)


def test_the_repr_of_a_result_and_of_its_error_is_a_short_line() -> None:
    attempts = tuple(AttemptResult(n, 0.0, 0.0, workers=(WORKER,) * 64) for n in range(100))
    result = LaunchResult("r", JobState.FAILED, "why\n" * 1000, 1, 1.0, attempts=attempts)
    error = JobFailed("why\n" * 1000, result)
    assert repr(result).startswith("LaunchResult(run_id='r', state=<JobState.FAILED: 'failed'>")
    assert len(repr(result)) <= 1000
    assert repr(error).startswith("JobFailed('why")
    assert len(repr(error)) <= 320
    assert len((repr(result) + repr(error)).splitlines()) == 1
    assert str(error) == "why\n" * 1000


def test_json_has_any_text() -> None:
    """Of a value, and of plain data with a value in it; Python's own reader finds the same text."""
    odd = Backoff(initial=2.0), ExitStatus(code=3), "b\udcff"
    assert json.loads(to_json(odd))[1:] == [{"code": 3, "signal": None}, "b\udcff"]
    assert to_json({"n": WORKER}) == b'{"n":' + to_json(WORKER) + b"}"


OS_TEXTS = st.binary(max_size=20).map(os.fsdecode) | st.text('\\ud8fcé\udcff\udc80"', max_size=20)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), 1 << 63) | OS_TEXTS
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.dictionaries(OS_TEXTS, inner),
)  # fmt: skip


@given(PLAIN)
def test_text_of_the_operating_system_is_the_same_after_json(value: object) -> None:
    """As text and as the name of a field, beside texts that look like an escape."""
    content = to_json(value)
    content.decode("utf-8")
    assert from_json(content, Any) == json.loads(content) == value


@given(OS_TEXTS, OS_TEXTS)
def test_a_value_is_the_same_after_json(text: str, path: str) -> None:
    error = WorkerError(text, None, 1.5, path)
    failure = Failure(1, 0, 7, "h", ExitStatus(code=3), 1.0, 0, error=error, notes=(text, path))
    assert from_json(to_json(failure), Failure) == failure


@given(st.text(st.characters(codec=None) | st.characters(categories=["Cs"])))
def test_json_has_no_other_surrogate(text: str) -> None:
    """What no name or path can have is escaped, as for people; halves of a character join."""
    read = from_json(to_json([text]), list[str])[0]
    os.fsencode(read)
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    assert shown_bytes(read) == shown_bytes(joined)


def test_numbers_that_json_lacks_are_null_beside_any_text() -> None:
    for text in "x", "\udcff":
        assert json.loads(to_json([math.nan, -math.inf, text])) == [None, None, text]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[" * 100_000,
        b'"\xff"',
        b"[1]",
        *(
            b'{"text":"\\udcff"%b}' % rest
            for rest in (
                b",",
                b',"other":"\xff"',
                b',"other":"\xed\xb3\xbf"',
                b',"other":"\\ud800"',
                b',"number":NaN',
                b',"number":1e999',
                b',"number":"1"',
                b',"more":' + b"[" * 100_000,
            )
        ),
    ],
    ids=lambda content: repr(content[:40]),
)
def test_other_bytes_are_no_json(content: bytes) -> None:
    """A text that is not UTF-8 lets nothing else in."""
    with pytest.raises(ValueError, match=r"."):
        from_json(content, Texts)


class Texts(msgspec.Struct):
    text: str
    other: str = ""
    number: float = 0.0


def test_json_has_no_password_of_a_url() -> None:
    """Of an event, a status, a record."""
    url = 'redis://u:pw@h "x'
    assert json.loads(to_json([url, "a@b", {url: f"{url}\n{url}"}])) == [
        (shown := url.replace("pw", "***")),
        "a@b",
        {shown: f"{shown}\n{shown}"},
    ]
