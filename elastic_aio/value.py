"""The base of frozen public values, a struct that the functions of `dataclasses` accept; JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterable
from typing import Any, ClassVar, Final, TypeVar

import msgspec

from elastic_aio.text import redacted

_T = TypeVar("_T")

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
        default = {"default": each.default, "default_factory": each.default_factory}
        default = {key: one for key, one in default.items() if one is not msgspec.NODEFAULT}
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
    return dict(made.__dataclass_fields__)


# In JSON: what is no surrogate alone; a byte that is not UTF-8 (PEP 383); another surrogate.
_ESCAPES: Final = rb"(?i)((?:\\\\|\\ud[89ab]..\\ud[c-f]..)+)|((?:\\udc[89a-f].)+)|\\ud[89a-f].."


def to_json(value: object) -> bytes:
    """Return a value or plain data, `redacted`, as JSON in UTF-8, which `from_json` reads.

    JSON has a byte that is not UTF-8 as `\\udcXX`, as Python's `json` has: it reads the same text.
    """
    try:
        content = _encoder.encode(value)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(value, str_keys=True))
        plain = json.loads(text, parse_constant=lambda _: None)  # JSON has no NaN
        text = json.dumps(plain, separators=(",", ":"))
        content = re.sub(_ESCAPES, lambda m: m[0] if m.lastindex else b"\\" + m[0], text.encode())
    return redacted(content.decode()).encode() if b"//" in content else content


def from_json(content: bytes, kind: type[_T]) -> _T:
    """Return what `to_json` has written, or raise a ValueError: it is no JSON, or another kind."""
    try:
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.DecodeError:
            # msgspec reads no lone surrogate.  It has to accept all else.
            checked = re.sub(_ESCAPES, lambda m: b"\\ufffd" if m[2] else m[0], content)
            if checked == content:
                raise
        msgspec.json.decode(checked, type=kind)
        return msgspec.convert(json.loads(content), kind, str_keys=True)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
