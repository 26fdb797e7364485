"""Signal names as plain data agree with the machine's."""

from __future__ import annotations

import signal

import pytest

from elastic_aio.errors import SpecError
from elastic_aio.signames import SIGKILL, SIGTERM, signal_name, signal_number


def test_the_table_is_the_machines() -> None:
    """Every signal that Python knows by name has the same name and number here."""
    for one in signal.Signals:
        if one < signal.SIGRTMIN:
            assert signal_name(one.value) == one.name
            assert signal_number("field", one.name) == one.value
    assert (SIGKILL, SIGTERM) == (9, 15)


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (1, "SIGHUP"),
        (31, "SIGSYS"),
        (34, "SIGRTMIN"),
        (36, "SIGRTMIN+2"),
        (64, "SIGRTMIN+30"),
        (32, "signal 32"),
        (0, "signal 0"),
        (99, "signal 99"),
    ],
)
def test_every_number_has_a_name(number: int, name: str) -> None:
    """Real-time signals count from the first one; strangers are just numbers."""
    assert signal_name(number) == name


@pytest.mark.parametrize("value", [1, 15, 31, 34, 64])
def test_a_number_is_taken_as_it_is(value: int) -> None:
    """A number of an existing signal stands for itself."""
    assert signal_number("field", value) == value


@pytest.mark.parametrize(
    "value", ["TERM", "sigterm", "SIGNOPE", "SIG", "", 0, -1, 65, 32, 33, True, 15.0, None]
)
def test_what_is_no_signal_is_refused(value: object) -> None:
    """Other spellings, reserved numbers and other types are refused by the field's name."""
    with pytest.raises(SpecError, match=r"^stop: must be a signal number or a name such as"):
        signal_number("stop", value)


def test_an_enum_member_becomes_a_plain_number() -> None:
    """`signal.SIGUSR1` is accepted and kept as an int."""
    number = signal_number("field", signal.SIGUSR1)
    assert number == 10
    assert type(number) is int
