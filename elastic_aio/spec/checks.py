"""Checks of the values that users set; each raises a `SpecError` that names the field.

A check of a field takes its name and an argument, and returns the argument in its final form: the
`checked_…` functions, and the values of the classes below.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeGuard, TypeVar, cast

from msgspec import Struct

from elastic_aio.errors import SpecError
from elastic_aio.outcome import SIGNAL_NUMBERS
from elastic_aio.text import redacted

Kind = TypeVar("Kind")

MAX_NUMBER: Final = 999_999_999
"""The largest number that a setting accepts: 31 years, in seconds."""

TOKEN_MIN: Final = 16
"""Characters of a token.  Its proofs can be compared with guesses, so it must not be guessed."""

YES: Final = frozenset({"1", "true", "t", "yes", "y"})
NO: Final = frozenset({"0", "false", "f", "no", "n"})

_LABEL: Final = re.compile(r"(?=[_-]*[^\W_])[\w-]{1,63}")
_IPV6: Final = r"[0-9a-fA-F:.]+(?:%[\w.-]+)?"

_HOST_PORT: Final = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]]+))(?::(.*))?", re.DOTALL)
# The kernel ends a text at NUL.  Python reads bytes that are not UTF-8 as U+DC80 to U+DCFF.
_NO_OS_TEXT: Final = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")


def checked_mode(name: str, value: object, what: str = "a mode such as '0660' or 0o660") -> int:
    """Return permissions that are given as a number or an octal text, or raise SpecError."""
    if isinstance(value, str) and re.fullmatch("(0o)?[0-7]{1,4}", value):
        value = int(value, 8)
    if not is_integer(value) or not 0 <= value <= 0o777:
        raise SpecError(name, value, f"must be {what}")
    return value


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether `value` is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def checked_part(name: str, value: object, kind: type[Kind], hint: str = "") -> Kind:
    if value is None:
        default: Kind = _default_part(kind)  # type: ignore[arg-type]
        return default
    if not isinstance(value, kind):
        raise SpecError(name, value, f"must be a {kind.__name__}{hint}")
    return value


@functools.cache
def _default_part(kind: Any) -> Any:
    """Return the part without settings: a frozen value, the same for all specs."""
    return kind()


class Part(Struct, frozen=True):
    """A part of a spec, a value of a class of its own; None is the part without settings."""

    part: type[Any]
    hint: str = ""

    def __call__(self, name: str, value: object) -> Any:
        return checked_part(name, value, self.part, self.hint)


class Seconds(Struct, frozen=True, kw_only=True):
    """A number of seconds, above a limit or at least that."""

    at_least: float | None = None
    above: float | None = None

    def __call__(self, name: str, value: Any) -> Any:
        check_number(name, value, at_least=self.at_least, above=self.above)
        return value


class Whole(Struct, frozen=True, kw_only=True):
    """A whole number, of at least so much, and at most that if there is a limit."""

    at_least: int
    at_most: int | None = None

    def __call__(self, name: str, value: object) -> int:
        if self.at_most is None:
            return checked_integer(name, value, at_least=self.at_least)
        if not is_integer(value) or not self.at_least <= value <= self.at_most:
            problem = f"must be a whole number from {self.at_least} to {self.at_most}"
            raise SpecError(name, value, problem)
        return value


class OneOf(Struct, frozen=True):
    """One of some words."""

    accepted: tuple[str, ...]

    def __call__(self, name: str, value: Any) -> Any:
        if value not in self.accepted:
            *others, last = map(repr, self.accepted)
            raise SpecError(name, value, f"must be {', '.join(others)} or {last}")
        return value


def optional(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """Return a check that accepts None too, of a field whose default is something else."""
    return lambda name, value: None if value is None else check(name, value)


def checked_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise SpecError(name, value, "must be a bool")
    return value


def checked_name(name: str, value: object) -> str:
    """Return a text that is not empty."""
    if not checked_text(name, value):
        raise SpecError(name, value, "must not be empty")
    return cast("str", value)


def checked_path(name: str, value: object) -> str:
    path = value.__fspath__() if hasattr(value, "__fspath__") else value
    if not is_os_text(path) or not path:
        raise SpecError(name, value, "must be a path")
    return path


def checked_text(name: str, value: object) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise SpecError(name, value, "must be text without NUL")
    if not is_os_text(value):
        raise SpecError(name, value, "must be text in UTF-8")
    return value


def is_os_text(value: object) -> TypeGuard[str]:
    """Return whether a value is text that the operating system may have, and may be given."""
    return isinstance(value, str) and not _NO_OS_TEXT.search(value)


def checked_items(name: str, value: object) -> list[Any]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise SpecError(name, value, "must be a list")
    return list(value)


def checked_console(value: object) -> Any:
    """Return a console: two descriptors or text streams, one stream, or a function; or None."""
    if value is None or hasattr(value, "write"):
        return value
    if callable(value):
        if inspect.iscoroutinefunction(value):
            problem = "must not be a coroutine function, which nothing would await"
            raise SpecError("console", value, problem)
        return value
    return tuple(
        part if hasattr(part, "write") else checked_integer("console", part, at_least=0)
        for part in checked_pair("console", value)
    )


def checked_token(value: object, name: str = "token") -> str | None:
    """Return the token of a store; the message does not show a wrong one."""
    if value is None:
        return None
    if not is_os_text(value):
        raise SpecError(name, type(value).__name__, "must be text or None")
    if len(value) < TOKEN_MIN:
        raise SpecError(
            name, f"{len(value)} characters", f"must have at least {TOKEN_MIN} characters"
        )
    return value


def checked_pair(name: str, value: object) -> tuple[Any, Any]:
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return value[0], value[1]
    raise SpecError(name, value, "must be a pair")


def checked_integer(name: str, value: object, *, at_least: int) -> int:
    if not is_integer(value) or value < at_least:
        raise SpecError(name, value, f"must be a whole number of at least {at_least}")
    check_not_absurd(name, value)
    return value


def check_not_absurd(name: str, value: float) -> None:
    """Raise `SpecError` for a number that no calculation and no message could use."""
    if value > MAX_NUMBER:
        raise SpecError(name, value, f"must be at most {MAX_NUMBER}")


def checked_texts(name: str, value: object) -> Mapping[str, str]:
    """Return a read-only copy of a mapping of names to texts."""
    if not isinstance(value, Mapping):
        raise SpecError(name, value, "must be a mapping of names to texts")
    for key, text in value.items():
        checked_text(name, key)
        checked_text(f"{name}[{key!r}]", text)
    return MappingProxyType(dict(value))


def check_keys(name: str, table: Mapping[Any, Any], known: Iterable[str]) -> None:
    """Raise `SpecError` for a key of a table that is not known."""
    names = [*known]
    for key in table:
        if key not in names:
            raise SpecError(name, key, f"has no such key; there are {', '.join(names)}")


def check_number(
    name: str,
    value: object,
    *,
    at_least: float | None = None,
    above: float | None = None,
    what: str = "",
) -> None:
    # Comparisons with NaN are false, so it is refused too.
    if (
        not (is_integer(value) or isinstance(value, float))
        or not (at_least is None or value >= at_least)
        or not (above is None or value > above)
        or value == float("inf")
    ):
        bound = f"of at least {at_least:g}" if at_least is not None else f"above {above:g}"
        raise SpecError(name, value, f"{what}must be a number {bound}")
    check_not_absurd(name, value)


def checked_port(name: str, value: object, *, at_least: int = 1) -> int:
    if not is_integer(value) or not at_least <= value <= 65535:
        raise SpecError(name, value, f"must be a port from {at_least} to 65535")
    return value


def signal_number(name: str, value: object) -> int:
    """Return the number of a signal: of 10, or of the text `10`, `USR1`, `SIGUSR1` or `RTMIN+3`."""
    number = value
    if isinstance(value, str):
        number = SIGNAL_NUMBERS.get(f"SIG{value.upper().removeprefix('SIG')}") or parse_int(value)
    if not is_integer(number) or number not in SIGNAL_NUMBERS.values():
        raise SpecError(name, value, "must be a signal number or a name such as 'SIGTERM'")
    return int(number)


def parse_port(text: str, *, at_least: int = 1) -> int | None:
    """Return the TCP port that `text` writes in ASCII digits; None if it is no such number."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= 5
    return int(text) if is_number and at_least <= int(text) <= 65535 else None


def parse_host_port(
    name: str, value: object, *, default_port: int | None = None, at_least: int = 1
) -> tuple[str, int]:
    """Split `HOST:PORT`, `[IPV6]:PORT` or, where there is a default port, `HOST` or `[IPV6]`.

    Return the host without brackets, and the port; 0 (any free one) only if `at_least` allows it.
    """
    forms = "HOST:PORT or [IPV6]:PORT" if default_port is None else "HOST:PORT, [IPV6]:PORT or HOST"
    text = checked_text(name, value)
    value = text if "//" in text else redacted(f"//{text}")[2:]
    if "://" in text:
        raise SpecError(name, value, f"must be {forms}, without a scheme")
    match = _HOST_PORT.fullmatch(text)
    if match is None:
        raise SpecError(name, value, f"must be {forms}")
    ipv6, plain, port_text = match.groups()
    host = ipv6 or plain
    is_complete = port_text is not None or default_port is not None
    if not is_host_name(host) or (ipv6 is not None and ":" not in ipv6) or not is_complete:
        raise SpecError(name, value, f"must be {forms}")
    port = default_port if port_text is None else parse_port(port_text, at_least=at_least)
    if port is None:
        raise SpecError(name, value, f"must have a port from {at_least} to 65535")
    return host, port


def format_host_port(host: str, port: int) -> str:
    """Return `HOST:PORT`, an IPv6 address in brackets; the reverse of `parse_host_port`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def checked_host(name: str, value: object) -> str:
    """Return a host's name or address, without brackets and port."""
    host = checked_text(name, value)
    # A single colon would be a port's; an IPv6 address has more.
    if not is_host_name(host) or host.count(":") == 1 or "[" in host:
        shown = redacted(f"//{host}")[2:]
        raise SpecError(name, shown, "must be the name or address of a host, without a port")
    return host


def is_host_name(host: str) -> bool:
    """Return whether a text can be a name or an address.

    The labels of a name have RFC 1035's sizes; beside RFC 1123's characters they may have
    underscores, as names of containers do, and letters of other scripts.
    """
    if ":" in host:
        return re.fullmatch(_IPV6, host) is not None
    labels = host.removesuffix(".").split(".")
    return len(host) <= 253 and all(_LABEL.fullmatch(label) for label in labels)


# ------------------------------------------------------------ settings that are text


class UsageError(Exception):
    """A command line is invalid; the message is one line."""


def variable_of(name: str) -> str:
    """Return the PET_* variable of an option."""
    return f"PET_{name.replace('-', '_').upper()}"


def invalid_value(option: str, problem: str, value: object) -> UsageError:
    """Return the error of an option whose value cannot be accepted."""
    return UsageError(str(SpecError(option, value, problem)))


def parse_int(text: str) -> int | None:
    """Return the whole number from 0 to `MAX_NUMBER` that `text` is; None if it is not one."""
    is_number = text.isascii() and text.isdecimal() and len(text) < 10
    return int(text) if is_number else None


def parse_size(text: str) -> int | None:
    """Return a number of bytes, with a unit of 1024 (`K`, `M`, `G`, `T`) or without; else None."""
    if (found := re.fullmatch(r"(?ai)(\d{1,15})([KMGT]?)", text)) is None:
        return None
    return int(found[1]) << (10 * ("", "K", "M", "G", "T").index(found[2].upper()))


def parse_number(
    option: str, text: str, *, least: int = 0, most: int = MAX_NUMBER, unit: str = "a whole number"
) -> int:
    """Return `text` as a whole number from `least` to `most`.

    UsageError: it is not one; the message names `option`, `unit` and the range.
    """
    number = parse_int(text)
    if number is None or not least <= number <= most:
        raise invalid_value(option, f"must be {unit} from {least} to {most}", text)
    return number


def parse_seconds(
    option: str, text: str, *, is_positive: bool = False, limit: float = float("inf")
) -> float:
    """Return `text` as seconds: at least 0, or above 0 with `is_positive`, and below `limit`.

    UsageError: it is not a number, or out of range.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    # A comparison with NaN is false, so NaN is refused too.
    if not 0 <= seconds < limit or (is_positive and not seconds):
        bound = "above 0" if is_positive else "of at least 0"
        if limit <= seconds < float("inf"):
            bound = f"below {limit:.0f}"
        raise invalid_value(option, f"must be a number of seconds {bound}", text)
    return seconds


def read_token(option: str, path: str, *, at_least: int = TOKEN_MIN) -> str:
    """Return the store token in a file: its text without surrounding space.

    Tokens and passwords come from files because every user of the host can read a command line.
    UsageError, with `option`: the file cannot be read, is not UTF-8, or is too short.
    """
    try:
        with open(path, encoding="utf-8") as file:
            token = file.read().strip()
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or "it is not text").lower()
        raise invalid_value(option, f"must be a file that can be read: {reason}", path) from None
    if not token:
        raise invalid_value(option, "must not be an empty file", path)
    if len(token) < at_least:
        problem = f"must be a file with at least {at_least} characters"
        raise invalid_value(option, problem, f"{len(token)} in {path}")
    return token


def parse_switch(option: str, text: str) -> bool:
    """Return `text` as a truth value, or raise a UsageError that names `option`."""
    if text.lower() not in YES | NO:
        raise invalid_value(option, "must be true or false", text)
    return text.lower() in YES
