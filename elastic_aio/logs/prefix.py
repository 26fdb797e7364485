"""The text before each line on the console."""

from __future__ import annotations

from collections.abc import Callable
from string import Template

from msgspec import Struct

__all__ = ["DEFAULT_PREFIX", "LineOrigin", "make_prefix"]

DEFAULT_PREFIX = "[${role}${local_rank}]:"


class LineOrigin(Struct, frozen=True):
    """Who writes: the variables of a prefix template, except the time."""

    role: str
    rank: int
    local_rank: int
    attempt: int
    host: str
    stream: str


def make_prefix(
    template: str | None, origin: LineOrigin, now: Callable[[], str]
) -> Callable[[], bytes]:
    """Return a function that gives the prefix of the lines that arrive now.

    Known variables are `${role}` (torch: `${role_name}`), `${rank}`,
    `${local_rank}`, `${attempt}`, `${host}`, `${stream}` and `${timestamp}`;
    unknown ones stay as they are, and `$$` is a dollar sign (`string.Template`).

    Args:
        template: None or an empty text stands for torchrun's default.
        origin: the values.
        now: gives the time as text; called once per chunk, and only if used.
    """
    values = {
        "role": origin.role,
        "role_name": origin.role,
        "rank": origin.rank,
        "local_rank": origin.local_rank,
        "attempt": origin.attempt,
        "host": origin.host,
        "stream": origin.stream,
    }
    parsed = Template(template or DEFAULT_PREFIX)
    if "timestamp" in parsed.template:
        return lambda: parsed.safe_substitute(values, timestamp=now()).encode("utf-8", "replace")
    fixed = parsed.safe_substitute(values).encode("utf-8", "replace")
    return lambda: fixed
