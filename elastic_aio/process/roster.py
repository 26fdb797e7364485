"""The list of workers' sessions that an agent leaves where its guardian can read it.

It lives in an anonymous file in memory: writing costs no wake-up, and what is
there survives the agent by as long as the guardian keeps it open.  One line a
session: its number, the ticks at which its leader started, and those at which it
was reaped (`-` while it is not).  Imported by the guardian's bare interpreter.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from elastic_aio.process.sweep import Session


def format_roster(sessions: Iterable[Session]) -> bytes:
    """Return the lines of `sessions`."""
    return b"".join(
        b"%d %d %s\n" % (one.number, one.opened, b"-" if one.closed is None else b"%d" % one.closed)
        for one in sessions
    )


def parse_roster(content: bytes) -> list[tuple[int, int, int | None]]:
    """Read the lines; an unfinished or foreign one is left out."""
    found = []
    for line in content.split(b"\n"):
        parts = line.split()
        if len(parts) != 3:
            continue
        try:
            closed = None if parts[2] == b"-" else int(parts[2])
            found.append((int(parts[0]), int(parts[1]), closed))
        except ValueError:
            continue
    return found


def read_roster(descriptor: int) -> bytes:
    """Return all that stands in the file."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
