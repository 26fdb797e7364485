"""Tokens of stores come from files: a command line can be read by every user of a machine."""

from __future__ import annotations

from elastic_aio.errors import SurroundingsError

__all__ = ["read_token"]


def read_token(path: str) -> str:
    """Return the token in a file: its text without surrounding space.

    Raises:
        SurroundingsError: the file cannot be read, is no text, or is empty.
    """
    try:
        with open(path, encoding="utf-8") as file:
            token = file.read().strip()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise SurroundingsError(f"cannot read the token file {path!r}: {why}") from None
    if not token:
        raise SurroundingsError(f"the token file {path!r} is empty")
    return token
