"""Checks of the values that users set: each refuses with one line that names the field."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from elastic_aio.errors import SpecError

__all__ = [
    "PathLike",
    "check_number",
    "checked_argument",
    "checked_environment",
    "checked_integer",
    "checked_items",
    "checked_pair",
    "checked_part",
    "checked_path",
    "checked_text",
    "is_port",
    "listed",
    "set_fields",
]

Part = TypeVar("Part")


class PathLike(Protocol):
    """A path of any kind; `os.PathLike`, which a pure module cannot name."""

    def __fspath__(self) -> str:
        """Return the path as text."""
        ...


def set_fields(value: object, **fields: object) -> None:
    """Set the fields of a frozen dataclass that is being made."""
    for name, content in fields.items():
        object.__setattr__(value, name, content)


def checked_argument(name: str, value: object) -> str:
    if hasattr(value, "__fspath__"):
        value = value.__fspath__()
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise SpecError(name, value, "an argument must be text, a path or a number")
    return checked_text(name, str(value))


def checked_part(name: str, value: object, kind: type[Part]) -> Part:
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise SpecError(name, value, f"must be a {kind.__name__}")
    return value


def checked_path(name: str, value: object) -> str:
    path = value.__fspath__() if hasattr(value, "__fspath__") else value
    if not isinstance(path, str) or not path or "\0" in path:
        raise SpecError(name, value, "must be a path")
    return path


def checked_text(name: str, value: object) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise SpecError(name, value, "must be text without NUL")
    return value


def checked_items(name: str, value: object) -> list[Any]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise SpecError(name, value, "must be a list")
    return list(value)


def checked_pair(name: str, value: object) -> tuple[Any, Any]:
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return value[0], value[1]
    raise SpecError(name, value, "must be a pair")


def checked_integer(name: str, value: object, *, at_least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise SpecError(name, value, f"must be a whole number of at least {at_least}")
    return value


def checked_environment(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise SpecError("env", value, "must be a mapping of names to texts")
    for name, text in value.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise SpecError("env", name, "a name must be text without '=' or NUL")
        if not isinstance(text, str) or "\0" in text:
            raise SpecError(f"env[{name!r}]", text, "must be text without NUL")
    return dict(value)


def check_number(
    name: str, value: object, *, at_least: float | None = None, above: float | None = None
) -> None:
    bound = f"at least {at_least:g}" if at_least is not None else f"above {above:g}"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # `not (a <= x)` also refuses NaN, which compares false with everything.
    fits = is_number and (
        (at_least is None or value >= at_least)  # type: ignore[operator]  # is_number
        and (above is None or value > above)  # type: ignore[operator]  # is_number
        and value != float("inf")
    )
    if not fits:
        raise SpecError(name, value, f"must be a number {bound}")


def is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) < 65536


def listed(values: Collection[int]) -> str:
    return ", ".join(str(value) for value in sorted(values))
