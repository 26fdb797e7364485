"""The checks that several settings share: signals, hosts, ports."""

from __future__ import annotations

import functools
import inspect
import signal
from collections.abc import Callable
from typing import Any

import pytest

from elastic_aio import (
    Backoff,
    LaunchSpec,
    LogSpec,
    RendezvousSpec,
    RestartPolicy,
    SignalSpec,
    StopPlan,
    StopStep,
)
from elastic_aio.errors import SpecError
from elastic_aio.outcome import SIGKILL, SIGTERM, signal_name
from elastic_aio.spec.checks import (
    checked_host,
    checked_port,
    format_host_port,
    parse_host_port,
    parse_port,
    signal_number,
)
from tests.support.children import assert_one_line

HUGE = 10**5000  # Python refuses to print it
ABSURD = [HUGE, -HUGE, 10**400, 1e308, -1e308, float("nan"), [HUGE], (HUGE, HUGE), {HUGE: HUGE},
          frozenset([HUGE]), "9" * 5000, b"\xff", object]  # fmt: skip


def stop_with(**step: Any) -> StopPlan:
    return StopPlan([StopStep(**{"signal": 15, "grace": 1.0, **step})])


def restart_with(**backoff: Any) -> LaunchSpec:
    return LaunchSpec(["true"], max_restarts=3, restart=RestartPolicy(backoff=Backoff(**backoff)))


MAKERS: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (LaunchSpec, functools.partial(LaunchSpec, entrypoint=["true"])),
    (RestartPolicy, RestartPolicy),
    (Backoff, restart_with),
    (StopStep, stop_with),
    (StopPlan, StopPlan),
    (StopPlan.within, lambda **set_: StopPlan.within(**{"grace": 1.0, **set_})),
    (SignalSpec, SignalSpec),
    (LogSpec, LogSpec),
    (RendezvousSpec, RendezvousSpec),
]


@pytest.mark.parametrize(("described", "make"), MAKERS)
def test_absurd_values_are_refused_in_one_line(
    described: Callable[..., Any], make: Callable[..., Any]
) -> None:
    """Or accepted, if they fit the field, and then they can be printed."""
    for name in inspect.signature(described).parameters:
        for value in ABSURD:
            assert_one_line(functools.partial(make, **{name: value}))


def test_the_table_agrees_with_the_signal_module() -> None:
    """Every signal below SIGRTMIN that Python names."""
    for known in signal.Signals:
        if known < signal.SIGRTMIN:
            assert signal_name(known.value) == known.name
            assert signal_number("field", known.name) == known.value
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
    """Real-time signals count from the first one; other numbers have no name."""
    assert signal_name(number) == name


@pytest.mark.parametrize("value", [*range(1, 32), *range(34, 65)])
def test_a_signal_number_is_accepted(value: int) -> None:
    """As a number, as its text, and as the name that messages have for it."""
    assert signal_number("field", value) == value
    assert signal_number("field", str(value)) == value
    assert signal_number("field", signal_name(value)) == value


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ("TERM", 15),
        ("sigterm", 15),
        ("SIGRTMIN", 34),
        ("SIGRTMIN+3", 37),
        ("RTMIN+3", 37),
        ("rtmin+30", 64),
        ("SIGRTMAX", 64),
        ("SIGRTMAX-1", 63),
        ("RTMAX-30", 34),
    ],
)
def test_a_name_may_lack_sig_and_count_real_time_signals(value: str, number: int) -> None:
    """As in kill(1), systemd and Docker."""
    assert signal_number("field", value) == number


@pytest.mark.parametrize("value", ["SIGNOPE", "SIG", "", 0, -1, 65, 32, 33, True, 15.0, None])
def test_other_values_are_not_signals(value: object) -> None:
    """Unknown names, reserved numbers, other types."""
    with pytest.raises(SpecError, match=r"^stop: must be a signal number or a name such as"):
        signal_number("stop", value)


@pytest.mark.parametrize(
    "value", ["RTMIN+31", "RTMIN-1", "RTMIN+", "RTMIN + 3", "RTMAX+1", "RTMAX-31", "32", "+9", "-9"]
)
def test_a_text_beyond_the_known_signals_is_refused(value: str) -> None:
    """Offsets out of range, signs, space."""
    with pytest.raises(SpecError, match=r"^stop: must be a signal number or a name such as"):
        signal_number("stop", value)


def test_an_enum_member_becomes_a_plain_number() -> None:
    number = signal_number("field", signal.SIGUSR1)
    assert number == 10
    assert type(number) is int


@pytest.mark.parametrize(
    "host",
    ["node0", "10.0.0.1", "::1", "fe80::1%eth0.7", "::ffff:10.0.0.1", "a_b.c", "a.b.", "x" * 63,
     "my_host", "project_web-1_", "b\u00fccher.example", "xn--bcher-kva"],
)  # fmt: skip
def test_hosts(host: str) -> None:
    """Names, IPv4 and IPv6 addresses."""
    assert checked_host("x", host) == host


@pytest.mark.parametrize(
    "host",
    ["", "a:1", "[::1]", "a b", "a,b", "user@a", "http://a", "a..b", ".", "x" * 64, "x." * 130, 5,
     "~", "-", "_", "--", "a.-", "a~b", "*.a", "a\n", "a!", "::g", "::1%", "fe80::1%a b"],
)  # fmt: skip
def test_other_texts_are_not_hosts(host: object) -> None:
    with pytest.raises(SpecError, match=r"^x: must be "):
        checked_host("x", host)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node0:1", "node0", 1),
        ("[::1]:080", "::1", 80),
        ("[fe80::1%eth0]:65535", "fe80::1%eth0", 65535),
    ],
)
def test_a_host_and_a_port(text: str, host: str, port: int) -> None:
    """IPv6 addresses stand in brackets; the formatted pair parses to itself."""
    assert parse_host_port("x", text) == (host, port)
    assert parse_host_port("x", format_host_port(host, port)) == (host, port)


def test_a_default_port() -> None:
    """It makes the port optional; port 0 has to be allowed."""
    assert parse_host_port("x", "a", default_port=7) == ("a", 7)
    assert parse_host_port("x", "[::1]", default_port=7) == ("::1", 7)
    assert parse_host_port("x", "a:0", at_least=0) == ("a", 0)
    with pytest.raises(SpecError, match="must have a port from 0 to 65535"):
        parse_host_port("x", "a:65536", at_least=0)
    with pytest.raises(SpecError, match=r"^x: must be HOST:PORT, .* or HOST, without a scheme"):
        parse_host_port("x", "http://a:1", default_port=7)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a", "must be HOST:PORT or [IPV6]:PORT (got 'a')"),
        ("::1:80", "must be HOST:PORT or [IPV6]:PORT (got '::1:80')"),
        ("[a]:80", "must be HOST:PORT or [IPV6]:PORT (got '[a]:80')"),
        ("a:0", "must have a port from 1 to 65535 (got 'a:0')"),
        ("a..b:1", "must be HOST:PORT or [IPV6]:PORT (got 'a..b:1')"),
        ("a:\u0661", "must have a port from 1 to 65535 (got 'a:\u0661')"),
        ("~:1", "must be HOST:PORT or [IPV6]:PORT (got '~:1')"),
        ("a :1", "must be HOST:PORT or [IPV6]:PORT (got 'a :1')"),
        ("[::~]:1", "must be HOST:PORT or [IPV6]:PORT (got '[::~]:1')"),
        ("u:pw@a:1", "must have a port from 1 to 65535 (got 'u:***@a:1')"),
        (":pw@a:1", "must be HOST:PORT or [IPV6]:PORT (got ':***@a:1')"),
        (
            "redis://u:pw@a:1",
            "must be HOST:PORT or [IPV6]:PORT, without a scheme (got 'redis://u:***@a:1')",
        ),
        (7, "must be text without NUL (got 7)"),
    ],
)
def test_other_texts_are_not_endpoints(text: object, problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_host_port("x", text)
    assert str(caught.value) == f"x: {problem}"


def test_ports() -> None:
    """As text and as numbers; the lowest one accepted is 1 unless stated otherwise."""
    texts = ("1", "65535", "0", "65536", "-1", " 1", "x", "", "\u0661")
    assert [parse_port(text) for text in texts] == [1, 65535, *[None] * 7]
    assert parse_port("0", at_least=0) == checked_port("x", 0, at_least=0) == 0
    for value in (0, 65536, True, "1", 1.0):
        with pytest.raises(SpecError, match=r"^x: must be a port from 1 to 65535 \(got "):
            checked_port("x", value)
