"""Short texts for messages: counted, truncated, on one line; and text of the operating system.

Paths, arguments, names and values of variables may have bytes that are not UTF-8.  Python reads
them as lone surrogates (PEP 383).  As data, such a text is the same wherever it is read: `os_bytes`
and `os_text` where bytes are stored, `value.to_json` and `value.from_json` in JSON.  Where people
read it, it is escaped, as in `\\udcff`.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

ESCAPES: Final = r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]+[0-~]|[0-~])"
"""What moves or colours a terminal, and is no text: the sequences of ECMA-48, and those of xterm
for titles and links."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return `number` with its noun: `1 node`, `2 nodes`; `plural` defaults to noun + "s"."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def format_duration(seconds: float) -> str:
    """Return a time for people: `0.31 s`, `43 s`, `12 m 03 s`, `2 h 05 m`."""
    if seconds < 9.95:
        return f"{max(seconds, 0):.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} m {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} m"


# The limit behind an error of the kernel, and the option of `ulimit` that raises it.
_LIMITS: Final = {errno.EMFILE: ("RLIMIT_NOFILE", "-n"), errno.EFBIG: ("RLIMIT_FSIZE", "-f")}
# What a sandbox, an old kernel or a file system answers to a call that it does not have.
_NO_CALL: Final = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, 524}


def error_reason(error: OSError) -> str:
    """Return why a call failed, with a limit that made it fail: `no such file or directory`."""
    reason = lower_first(error.strerror or str(error) or type(error).__name__)
    if error.errno in _LIMITS:
        name, option = _LIMITS[error.errno]
        with suppress(ImportError):  # no descriptor is left
            import resource  # for errors only: workers load this module

            soft, _ = resource.getrlimit(getattr(resource, name))
            reason += f"; the limit is {soft} (raise it with ulimit {option})"
    if error.errno in _NO_CALL and error.filename is None and (name := _called(error)):
        return f"{name}: {reason}"
    return reason


def _called(error: OSError) -> str:
    """Return the system call that raised an error, by the text of its line; empty if unknown."""
    import re  # for errors only
    import traceback

    line = "".join(frame.line or "" for frame in traceback.extract_tb(error.__traceback__)[-1:])
    found = re.search(r"\b(?:os|_?signal|select|fcntl|resource|_?socket)\.([a-z]\w*)\(", line)
    return found[1] if found else ""


def lower_first(text: str) -> str:
    """Return a text with a small first letter, unless its first word is a name: `AF_UNIX ...`."""
    rest = text.split(" ", 1)[0][1:]
    return text[:1].lower() + text[1:] if rest == rest.lower() else text


def truncate(text: str, limit: int) -> str:
    """Return at most `limit` characters; a longer text ends with an ellipsis."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def abridge(text: str, limit: int) -> str:
    """Return at most `limit` characters of a longer text: both its ends, and a note between."""
    if len(text) <= limit:
        return text
    note = f"\n[... {len(text) - limit} characters or more are left out ...]\n"
    kept = max(limit - len(note), 2)
    return f"{text[: kept // 2]}{note}{text[-(kept - kept // 2) :]}"


def redacted(text: str) -> str:
    """Return `text` without the passwords of its URLs: `redis://user:***@host`."""
    if "@" not in text or "//" not in text:
        return text
    import re  # for such texts only: workers load this module

    def hide(match: re.Match[str]) -> str:
        _, at, rest = match[2].rpartition("@")
        return f"{match[1]}***@{rest}" if at else match[0]

    # Nothing is read twice: a worker may write a megabyte without a space.
    return re.sub(r'(//[^\s/:"[]*+:)(?!\d+[/?#])([^\s"\\]*+)', hide, text)


def one_line(text: str, limit: int | None = None) -> str:
    """Return `text` as a single printable line of at most `limit` characters, `redacted`.

    White space and control characters become single spaces, so that text from another host or
    process can neither break a line nor move a terminal's cursor.
    """
    line = " ".join(printable(text).split())
    return line if limit is None else truncate(line, limit)


def printable(text: str) -> str:
    """Return `text`, `redacted`, with spaces in place of control characters, such as a terminal's.

    Tabs stay, and lone surrogates are escaped.
    """
    if (text := redacted(text)).isprintable():
        return text
    escaped = shown_bytes(text).decode()
    return "".join(char if char.isprintable() or char == "\t" else " " for char in escaped)


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the word of `known` that a mistyped word most likely means; None if none is near."""
    import difflib  # for mistakes only

    # Of equally near words the shortest: the others were further away.
    candidates = sorted(known, key=len)
    found = difflib.get_close_matches(word, candidates, n=1, cutoff=0.66)
    return found[0] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean ...?` for a mistyped word, or nothing."""
    found = closest(word, known)
    return f"; did you mean {found}?" if found else ""


def format_value(value: object, limit: int = 120) -> str:
    """Return the `repr` of a value as one line of at most `limit` characters."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001  # a user's __repr__; an int of 5,000 digits
        text = f"<{type(value).__name__}: {error}>"
    return one_line(text, limit)


def shown_bytes(text: str) -> bytes:
    """Return UTF-8 for people: each lone surrogate, which no console takes, as `\\udcXX`."""
    return text.encode("utf-8", "backslashreplace")


def os_bytes(text: str) -> bytes:
    """Return the bytes of a text of the operating system, as `os.fsencode`."""
    return text.encode("utf-8", "surrogateescape")


def os_text(data: bytes) -> str:
    """Return the text of such bytes, the reverse of `os_bytes`."""
    return data.decode("utf-8", "surrogateescape")
