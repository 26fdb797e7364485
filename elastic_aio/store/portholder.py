"""Who listens at a TCP port of this machine, as far as /proc tells."""

from __future__ import annotations

import os

__all__ = ["port_holder"]

_LISTEN = "0A"
_SHOWN = 80


def port_holder(port: int) -> str | None:
    """Name the program that listens at `port`, with its pid; None if nobody does.

    It reads the whole of /proc, which takes a while on a busy machine: not for the
    event loop.
    """
    owners = _listeners(port)
    if not owners:
        return None
    pid = _process_with({f"socket:[{inode}]" for inode in owners})
    if pid is not None:
        return f"{_command(pid)} (pid {pid})"
    # What others have open can be seen by root alone.
    return f"a process of user {next(iter(owners.values()))}"


def _listeners(port: int) -> dict[str, str]:
    """Return the owner of each listening socket at `port`, by inode."""
    owners = {}
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        try:
            with open(table, encoding="ascii") as file:
                lines = file.read().splitlines()[1:]
        except OSError:
            continue  # an address family that the kernel was booted without
        for fields in map(str.split, lines):
            is_listening = len(fields) > 9 and fields[3] == _LISTEN
            if is_listening and int(fields[1].rpartition(":")[2], 16) == port:
                owners[fields[9]] = fields[7]
    return owners


def _process_with(wanted: set[str]) -> int | None:
    """Return the oldest process that has one of these files open."""
    for pid in sorted(map(int, filter(str.isdecimal, os.listdir("/proc")))):
        folder = f"/proc/{pid}/fd"
        try:
            for name in os.listdir(folder):
                if os.readlink(f"{folder}/{name}") in wanted:
                    return pid
        except OSError:
            continue  # it has gone, or it is another user's
    return None


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return "a process"
    text = b" ".join(words).decode(errors="replace")
    # One line, whatever somebody else has put there.
    text = "".join(char if char.isprintable() else " " for char in text).strip()
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
