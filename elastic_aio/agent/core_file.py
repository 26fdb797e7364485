"""The core file that the kernel has written of a worker (core(5))."""

from __future__ import annotations

import glob
import os
import re
import stat
import struct
from contextlib import suppress

_PATTERN = "/proc/sys/kernel/core_pattern"
_USES_PID = "/proc/sys/kernel/core_uses_pid"
_PT_NOTE, _NT_PRPSINFO = 4, 3
_NOTES_MAX = 1 << 16


def core_note(pid: int, directory: str) -> str:
    """Return a line that names the core file of a process of this user; empty without one.

    The process ran in `directory`.  For systemd, which may have kept one, the line is a command.
    """
    with suppress(OSError, struct.error):
        with open(_PATTERN, errors="surrogateescape") as pattern_file, open(_USES_PID) as uses_pid:
            pattern, has_pid = pattern_file.read().strip(), uses_pid.read().strip() != "0"
        if pattern.startswith("|"):
            return f"core dump: coredumpctl info {pid}" if "systemd-coredump" in pattern else ""
        names = os.path.join(glob.escape(directory), expand(pattern, pid, has_pid=has_pid))
        found = [
            (status.st_mtime, path)
            for path in glob.glob(names)
            if stat.S_ISREG((status := os.lstat(path)).st_mode)
            and status.st_uid == os.geteuid()
            and pid_of_core(path) == pid
        ]
        _, path = max(found, default=(0.0, ""))
        return f"core file: {os.path.abspath(path)}" if path else ""
    return ""


def pid_of_core(path: str) -> int:
    """Return the process of a core file of 64 bits: pr_pid of its NT_PRPSINFO note; else 0."""
    with open(path, "rb") as file:
        header = file.read(64)
        if header[:5] != b"\x7fELF\2":
            return 0
        order = "<" if header[5] == 1 else ">"
        (table,) = struct.unpack_from(f"{order}Q", header, 32)
        file.seek(table)  # of the segments: the notes are the first one
        kind, _, offset, _, _, size = struct.unpack_from(f"{order}2I4Q", file.read(40))
        file.seek(offset)
        notes = file.read(min(size, _NOTES_MAX)) if kind == _PT_NOTE else b""
    at = 0
    while at + 12 <= len(notes):
        name, length, kind = struct.unpack_from(f"{order}3I", notes, at)
        content = at + 12 + (name + 3 & ~3)
        if kind == _NT_PRPSINFO:
            return int(struct.unpack_from(f"{order}I", notes, content + 24)[0])
        at = content + (length + 3 & ~3)
    return 0


def expand(pattern: str, pid: int, *, has_pid: bool) -> str:
    """Return the wildcard for the names that a core_pattern may give the file of a process."""
    known = {"%": "%", "p": str(pid), "": ""}
    name = re.sub("%(.?)", lambda match: known.get(match[1], "*"), glob.escape(pattern))
    return f"{name}.{pid}" if has_pid and "%p" not in pattern.replace("%%", "") else name
