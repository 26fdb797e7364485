"""The base of frozen public values, a struct that the functions of `dataclasses` accept; JSON."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, ClassVar

import msgspec

from elastic_aio.text import jsonable

_encoder = msgspec.json.Encoder()


class _Fields:
    """Makes the fields for `dataclasses` on first use."""

    def __get__(self, value: object, owner: type[Value]) -> dict[str, dataclasses.Field[Any]]:
        return _fields_of(owner)


class Value(msgspec.Struct, frozen=True):
    """A frozen value with `replace()`, `fields()` and `asdict()` of `dataclasses`.

    A start makes dozens of such classes.  `dataclass` writes and compiles six methods for each: 3.7
    million instructions, with Python 3.11.
    """

    __dataclass_fields__: ClassVar[Any] = _Fields()
    _hidden: ClassVar[tuple[str, ...]] = ()
    """Fields that `repr()` leaves out: secrets and long values."""

    def __repr__(self) -> str:
        shown = [name for name in self.__struct_fields__ if name not in self._hidden]
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
        return f"{type(self).__qualname__}({fields})"


@functools.cache
def _fields_of(owner: type[Value]) -> dict[str, dataclasses.Field[Any]]:
    settings: list[tuple[str, Any, dict[str, Any], bool]] = []
    for each in msgspec.structs.fields(owner):
        default: dict[str, Any] = {}
        if each.default is not msgspec.NODEFAULT:
            default["default"] = each.default
        elif each.default_factory is not msgspec.NODEFAULT:
            default["default_factory"] = each.default_factory
        settings.append((each.name, each.type, default, each.name in owner._hidden))
    return dataclass_fields(owner, settings)


def dataclass_fields(
    owner: type, fields: Iterable[tuple[str, Any, dict[str, Any], bool]]
) -> dict[str, dataclasses.Field[Any]]:
    """Return `dataclasses.fields` for names, types, defaults, and whether they are hidden."""
    settings = [
        (name, kind, dataclasses.field(**default, repr=not is_hidden))
        for name, kind, default, is_hidden in fields
    ]
    made: Any = dataclasses.make_dataclass(owner.__name__, settings, kw_only=True)
    found: dict[str, dataclasses.Field[Any]] = made.__dataclass_fields__
    return found


def to_json(value: object) -> bytes:
    """Return a value or plain data as JSON in UTF-8; lone surrogates are escaped."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:  # a path or an argument that is not UTF-8
        return _encoder.encode(jsonable(msgspec.to_builtins(value)))
