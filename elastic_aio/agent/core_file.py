"""The core file that the kernel has written of a worker (core(5))."""

from __future__ import annotations

import glob
import os
import re
import stat
from contextlib import suppress

_PATTERN = "/proc/sys/kernel/core_pattern"
_USES_PID = "/proc/sys/kernel/core_uses_pid"


def core_note(pid: int, directory: str, since: float) -> str:
    """Return a line that names the core file of a process of this user; empty without one.

    The process ran in `directory`; older files than `since`, in Unix seconds, are of others.  For
    systemd, which may have kept one, the line is a command.
    """
    with suppress(OSError):
        with open(_PATTERN, errors="surrogateescape") as pattern_file, open(_USES_PID) as uses_pid:
            pattern, has_pid = pattern_file.read().strip(), uses_pid.read().strip() != "0"
        if pattern.startswith("|"):
            return f"core dump: coredumpctl info {pid}" if "systemd-coredump" in pattern else ""
        names = os.path.join(glob.escape(directory), expand(pattern, pid, has_pid=has_pid))
        found = [
            (status.st_mtime, path)
            for path in glob.glob(names)
            if stat.S_ISREG((status := os.lstat(path)).st_mode) and status.st_uid == os.geteuid()
        ]
        time, path = max(found, default=(0.0, ""))
        return f"core file: {os.path.abspath(path)}" if path and time >= since else ""
    return ""


def expand(pattern: str, pid: int, *, has_pid: bool) -> str:
    """Return the wildcard for the names that a core_pattern may give the file of a process."""
    known = {"%": "%", "p": str(pid), "": ""}
    name = re.sub("%(.?)", lambda match: known.get(match[1], "*"), glob.escape(pattern))
    return f"{name}.{pid}" if has_pid and "%p" not in pattern.replace("%%", "") else name
