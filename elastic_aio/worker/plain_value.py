"""Plain values: arguments and results that marshal keeps unchanged, so that no pickle is used.

The launcher reads results in its event loop, so their size is limited.  A worker that damages
its result must not block the loop either: marshal makes a list as long as its form says before
it looks for the items.  So a form is checked before it is loaded.
"""

from __future__ import annotations

import marshal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SIZE_MAX = 1 << 16
"""How many bytes the form of a value has at most."""
_ITEMS_MAX = 1000
_DEPTH_MAX = 4
_TEXT_MAX = 4096
_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
# marshal's forms of these in version 2, which has neither references nor other names of them.
_VERSION = 2
_FIXED = {b"N": 0, b"F": 0, b"T": 0, b"i": 4, b"g": 8}


def is_plain(value: object) -> bool:
    """Return whether marshal keeps a value unchanged: scalars, small tuples and lists."""
    level: list[Any] = [value]
    count = 1
    for _ in range(_DEPTH_MAX + 1):
        inner: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is tuple or kind is list:
                count += len(item)
                if count > _ITEMS_MAX:
                    return False
                inner += item
            elif kind not in _SCALARS or (kind in (bytes, str) and len(item) >= _TEXT_MAX):
                return False
        if not inner:
            return True
        level = inner
    return False


def dump(value: Any) -> bytes:
    """Return the form of a plain value; b"" if the value is not plain, or too large."""
    form = marshal.dumps(value, _VERSION) if is_plain(value) else b""
    return form if len(form) <= SIZE_MAX else b""


def load(form: bytes) -> Any:
    """Return the value of a form.

    Raises:
        ValueError: it is damaged.
    """
    if not _is_sound(form):
        raise ValueError("its bytes are damaged")
    return marshal.loads(form)


def _is_sound(form: bytes) -> bool:
    """Whether a form has as many items as it says, and few."""
    position, missing, count = 0, 1, 1
    while missing and position < len(form):
        kind = form[position : position + 1]
        position += 1
        missing -= 1
        if kind in _FIXED:
            position += _FIXED[kind]
            continue
        size = int.from_bytes(form[position : position + 4], "little", signed=True)
        position += 4
        if kind == b"l":  # the sign is that of the number
            position += 2 * abs(size)
        elif size < 0:
            return False
        elif kind in (b"s", b"u"):
            position += size
        elif kind in (b"(", b"["):
            missing += size
            count += size
        else:
            return False
        if count > _ITEMS_MAX:
            return False
    return not missing and position == len(form)
