"""Calls functions in other processes, in one way: `python -m benchmarks.workers.calls WAY ...`.

Prints one line of JSON: nanoseconds of wall and of processor time for `bare N` (N bare
interpreters), `ours N` and `torch N` (N trivial functions); nanoseconds from the
return to the caller for `value SIZE` and `pipe SIZE`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

from benchmarks.workers import trivial

_PIPE = """
import os, sys, time
data = b"x" * int(sys.argv[1])
os.write(1, b"%020d" % time.monotonic_ns())
view = memoryview(data)
while view:
    view = view[os.write(1, view):]
"""


def main() -> None:
    """Measure one way, after a first time that is not counted."""
    way, number = sys.argv[1], int(sys.argv[2])
    if way in ("value", "pipe"):
        measure = _value if way == "value" else _pipe
        measure(number)
        print(json.dumps([measure(number)]))
        return
    call = {"bare": _bare, "ours": _ours, "torch": _torch}[way](number)
    if way != "torch":  # its first time is like its others, and takes seconds
        call()
    began, used = time.monotonic_ns(), _cpu()
    call()
    print(json.dumps([time.monotonic_ns() - began, _cpu() - used]))


def _cpu() -> int:
    times = os.times()
    return int(sum(times[:4]) * 1e9)


def _bare(number: int) -> Callable[[], None]:
    def call() -> None:
        for process in [subprocess.Popen([sys.executable, "-c", "pass"]) for _ in range(number)]:
            process.wait()

    return call


def _ours(number: int) -> Callable[[], object]:
    from elastic_aio.sync import spawn

    return lambda: spawn(trivial.nothing, nprocs=number)


def _torch(number: int) -> Callable[[], object]:
    from torch.multiprocessing import spawn

    return lambda: spawn(trivial.nothing, nprocs=number)


def _value(size: int) -> int:
    from elastic_aio import LaunchSpec, run

    at, data = run(LaunchSpec(trivial.give, args=[size])).return_values[0]
    taken = time.monotonic_ns() - at
    assert len(data) == size
    return int(taken)


def _pipe(size: int) -> int:
    with subprocess.Popen(
        [sys.executable, "-c", _PIPE, str(size)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        at = int(process.stdout.read(20))
        data = process.stdout.read()
        taken = time.monotonic_ns() - at
    assert len(data) == size
    return taken


if __name__ == "__main__":
    main()
