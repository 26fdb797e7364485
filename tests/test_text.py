"""Texts for messages: numbers with nouns, truncation, one line; text of the operating system."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.text import (
    abridge,
    counted,
    error_reason,
    format_value,
    lower_first,
    one_line,
    os_bytes,
    os_text,
    printable,
    redacted,
    shown_bytes,
    truncate,
)


def test_a_noun_agrees_with_its_number() -> None:
    """The plural of most nouns ends in s; another one can be given."""
    assert [counted(number, "node") for number in (0, 1, 2)] == ["0 nodes", "1 node", "2 nodes"]
    assert counted(3, "process", "processes") == "3 processes"


@pytest.mark.parametrize(("limit", "text"), [(4, "text"), (3, "te…"), (1, "…")])
def test_a_long_text_ends_with_an_ellipsis(limit: int, text: str) -> None:
    assert truncate("text", limit) == text


def test_a_long_text_keeps_its_ends() -> None:
    """Of a traceback the last line says most."""
    text = f"first{'x' * 1000}last"
    short = abridge(text, 100)
    assert len(short) == 100
    assert short.startswith("firstx")
    assert short.endswith("xlast")
    assert "\n[... 909 characters or more are left out ...]\n" in short
    assert abridge(text, len(text)) == text


def test_control_characters_cannot_leave_the_line() -> None:
    """Not even the escape that begins a terminal's commands, nor Unicode's own newline."""
    assert one_line("\x1b[2Ja\r\n b\u2028c\udcff ") == r"[2Ja b c\udcff"
    assert one_line("a b c", 4) == "a b…"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://bob:pw@db:6379/0", "redis://bob:***@db:6379/0"),
        ("to redis://:pw@db, http://a:b@c refused", "to redis://:***@db, http://a:***@c refused"),
        ("A=x://bob:p:w@ss@h B='y://u:p@h/?q=1'", "A=x://bob:***@h B='y://u:***@h/?q=1'"),
        ("postgres://bob:a/b+c==@db/x", "postgres://bob:***@db/x"),
        ("socks5h://bob:pw@[::1]:1080", "socks5h://bob:***@[::1]:1080"),
        ("h:1,etcd://bob:pw@h:2,h:3", "h:1,etcd://bob:***@h:2,h:3"),
        ("smtp://bob@corp.com:pw@host", "smtp://bob@corp.com:***@host"),
        (r"http://CORP\bob:pw@proxy:80", r"http://CORP\bob:***@proxy:80"),
        ("//a:" * 20_000 + "b@c", "//a:***@c"),
        ("//a:" * 200_000 + " @", "//a:" * 200_000 + " @"),  # for minutes, if read twice
        *[
            (same, same)
            for same in (
                "http://h:80/@a", "http://[::1]:80/a@b", "ssh://git@h/x", "git@h:x/y", "a:b@c",
                "http://h:80 a@b", "mailto:a@b", "//", "@",
            )
        ],
    ],
)  # fmt: skip
def test_no_line_has_the_password_of_a_url(text: str, shown: str) -> None:
    """On the console and in JSON; what is no password stays."""
    assert redacted(text) == one_line(text) == printable(text) == shown
    assert printable(f"{text}\n\x1b{text}") == f"{shown}  {shown}"


class _TwoLines:
    def __repr__(self) -> str:
        return "<two\n   lines>"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x", "'x'"),
        (_TwoLines(), "<two lines>"),
        ("y" * 200, "'" + "y" * 118 + "…"),
        ("z" * 118, "'" + "z" * 118 + "'"),
    ],
)
def test_a_value_is_shown_as_one_line(value: object, text: str) -> None:
    assert format_value(value) == text


@given(st.binary())
def test_bytes_of_the_operating_system_are_a_text_and_back(data: bytes) -> None:
    """The same as for `os`, which pure modules do without."""
    text = os_text(data)
    assert text == os.fsdecode(data)
    assert os_bytes(text) == os.fsencode(text) == data


@pytest.mark.parametrize("show", [one_line, printable, lambda text: shown_bytes(text).decode()])
@pytest.mark.parametrize("text", ["caf\udce9", "\ud800", "/é/\udc80/x"])
def test_a_text_for_people_is_escaped(show: Callable[[str], str], text: str) -> None:
    """As in Python's own messages, so that a name is not mistaken for another."""
    assert show(text) == text.encode("utf-8", "backslashreplace").decode()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("No such file or directory", "no such file or directory"),
        ("Input/output error", "input/output error"),
        ("AF_UNIX path too long", "AF_UNIX path too long"),
        ("RPC struct is bad", "RPC struct is bad"),
        ("A b", "a b"),
        ("", ""),
    ],
)
def test_a_reason_begins_with_a_small_letter_unless_it_is_a_name(text: str, expected: str) -> None:
    assert lower_first(text) == expected
    assert error_reason(OSError(1, text)).endswith(expected)


def test_the_reason_of_an_error_without_a_number() -> None:
    assert error_reason(OSError("AF_UNIX path too long")) == "AF_UNIX path too long"


def test_a_refused_system_call_is_named() -> None:
    """It is what a sandbox, an old kernel or a file system does not have."""
    with pytest.raises(OSError, match="Invalid") as caught:
        os.memfd_create("x" * 300)
    assert error_reason(caught.value) == "memfd_create: invalid argument"
    with pytest.raises(FileNotFoundError) as missing:
        open("/proc/self/task/x", "w").close()
    assert error_reason(missing.value) == "no such file or directory"
