"""The peak memory of a program, measured in a process of its own.

In the process of the tests, memory that earlier tests have freed hides what a later one
takes; and ru_maxrss of a child begins with the peak of its parent (getrusage(2)).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.children import DEADLINE_S
from tests.support.cli import environment

_PROGRAM = """
import asyncio, gc, sys

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:")) * 1024

{definitions}

gc.collect()
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins at the present size (proc(5))
before = peak()
asyncio.run(main(*sys.argv[1:]))
print(peak() - before)
"""


def peak_growth(definitions: str, *args: object, cwd: Path) -> int:
    """Return by how many bytes `await main(*args)` raises the peak memory of a process.

    `definitions` is Python source that defines `main`, whose arguments are texts.
    """
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM.replace("{definitions}", definitions), *map(str, args)],
        env=environment(),
        cwd=cwd,
        stdout=subprocess.PIPE,
        timeout=DEADLINE_S,
        check=True,
    )
    return int(ended.stdout)
