"""How many processes the kernel's OOM killer has killed, by the counters that it keeps."""

from __future__ import annotations

import os

from msgspec import Struct

from elastic_aio.text import counted


class OomCounts(Struct, frozen=True):
    """The kernel's counters at one time; None where the host has none.

    Attributes:
        group: of this control group and those below it.
        host: of the whole host.
    """

    group: int | None = None
    host: int | None = None

    @classmethod
    def read(cls) -> OomCounts:
        """Read the counters."""
        return cls(_group_count(), _count("/proc/vmstat"))

    def kills_until(self, later: OomCounts) -> str:
        """Return what was killed between this time and a later one; empty if nothing was."""
        for what, before, after in (
            ("this control group", self.group, later.group),
            ("this host", self.host, later.host),
        ):
            if before is not None and after is not None and after > before:
                processes = counted(after - before, "process", "processes")
                return f"the kernel has killed {processes} of {what} during this attempt"
        return ""


def _group_count() -> int | None:
    """Read `memory.events` (cgroup v2) or `memory.oom_control` (v1)."""
    groups = [line.split(":", 2) for line in _lines("/proc/self/cgroup")]
    for _, controllers, path in (group for group in groups if len(group) == 3):
        if controllers == "":
            name = "memory.events"
            parents = [f"/sys/fs/cgroup{path}", f"/sys/fs/cgroup/unified{path}", "/sys/fs/cgroup"]
        elif "memory" in controllers.split(","):
            name = "memory.oom_control"
            parents = [f"/sys/fs/cgroup/memory{path}", "/sys/fs/cgroup/memory"]
        else:
            continue
        for parent in parents:
            count = _count(os.path.join(parent, name))
            if count is not None:
                return count
    return None


def _count(path: str) -> int | None:
    values = (line[9:] for line in _lines(path) if line.startswith("oom_kill "))
    value = next(values, "")  # none if this cgroup version is not mounted here
    return int(value) if value.isdecimal() else None


def _lines(path: str) -> list[str]:
    """Return the lines of a file of the kernel; none if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
