"""Whether the kernel has killed for lack of memory, by the counters of our cgroup."""

from __future__ import annotations

import os

__all__ = ["oom_kills"]


def oom_kills() -> int | None:
    """Return how many processes of this cgroup the kernel has killed so far.

    Reads `memory.events` (cgroup v2) or `memory.oom_control` (v1); None where the
    machine keeps neither.
    """
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return None
    for _, controllers, path in (group for group in groups if len(group) == 3):
        if controllers == "":
            places = [f"/sys/fs/cgroup{path}", f"/sys/fs/cgroup/unified{path}", "/sys/fs/cgroup"]
            name = "memory.events"
        elif "memory" in controllers.split(","):
            places = [f"/sys/fs/cgroup/memory{path}", "/sys/fs/cgroup/memory"]
            name = "memory.oom_control"
        else:
            continue
        for place in places:
            count = _count(os.path.join(place, name))
            if count is not None:
                return count
    return None


def _count(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            for line in file:
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
    except (OSError, ValueError):
        pass  # not this layout
    return None
