"""What the jobs of the chaos run execute: workers that write numbered lines, and a host program.

`python -m tests.support.chaos_program launch METHOD LOOP DIRECTORY DAEMON` runs `work` in two
workers through the library, and reports the end and what it left in this process.  With other
arguments the module is a worker's script.

A worker writes a byte to `$NOTES/<pid>` after each line that the kernel has accepted, so that
the lines that must be found are known however the worker ends.
"""

from __future__ import annotations

import json
import os
import sys
import time

# A line is `line PID NUMBER xxx`.
PADDING = "x" * 60


def work(count: int, fails: bool = False, pause: float = 0.0, daemon: str = "") -> int:
    """Write `count` lines; fail in the first attempt, as rank 0, if `fails`.

    `daemon` is what is left behind, in a session of its own and without a parent: a process
    that executes a `program`, or a `fork` of this one.
    """
    if daemon:
        _leave_daemon(daemon)
    notes = os.open(f"{os.environ['NOTES']}/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in range(count):
        line = f"line {os.getpid()} {number} {PADDING}\n".encode()
        if os.write(1, line) < len(line):
            raise OSError("a short write")
        os.write(notes, b".")
        time.sleep(pause / count)
    os.close(notes)
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and os.environ["RANK"] == "0"
    if fails and is_first:
        raise ValueError("the first attempt")
    return count


def _leave_daemon(kind: str) -> None:
    # Nothing marks a fork of a forked worker as one of the job, and its parents are gone, until it
    # executes a program.  So this worker does not end before: the exec closes the pipe.
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        os.waitpid(child, 0)
        os.read(reader, 1)
        os.close(reader)
        return
    try:
        os.setsid()
        if os.fork() == 0:
            null = os.open("/dev/null", os.O_RDWR)
            for number in range(3):
                os.dup2(null, number)
            if kind == "fork":
                os.close(writer)
            if kind == "program":
                os.execlp("sleep", "sleep", "99")
            time.sleep(99)
    finally:
        os._exit(0)


def _open_descriptors() -> dict[int, str]:
    """Return the descriptors of this process; needs no further descriptor to find them."""
    found = {}
    for number in range(256):
        try:
            os.fstat(number)
        except OSError:
            continue
        try:
            found[number] = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            found[number] = "?"  # the injury
    return found


def _launch(method: str, loop: str, directory: str, daemon: str) -> int:
    """Run `work` in two workers, and write the end to `$NOTES/report`; return the exit code."""
    import gc
    import threading

    from elastic_aio import ElasticAioError, InternalError, LaunchSpec, LogSpec, StopPlan, run
    from tests.support.chaos_program import work as function

    report = os.open(f"{os.environ['NOTES']}/report", os.O_WRONLY | os.O_CREAT)
    factory = None
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
        factory().close()  # libuv keeps descriptors that it opens with its first loop
    spec = LaunchSpec(
        function,
        args=[30, True, 0.1, daemon],
        nproc_per_node=2,
        max_restarts=1,
        start_method=method,  # type: ignore[arg-type]  # LaunchSpec checks it
        logs=LogSpec(log_dir=directory, redirects="3", tee="1"),
        stop=StopPlan.within(1),
    )
    before = _open_descriptors()
    try:
        values = run(spec, loop_factory=factory).return_values
        end = "success" if values == {0: 30, 1: 30} else f"values {values}"
    except (ElasticAioError, OSError, ImportError) as error:
        end = f"{type(error).__name__}: {error}"
        if isinstance(error, InternalError):
            end = f"internal error: {error.__cause__!r} {end}"
    except BaseException as error:  # noqa: BLE001  # it is what the chaos run looks for
        end = f"unexpected {type(error).__name__}: {error}"
    gc.collect()  # a loop that could not be made is a cycle
    leaked = {number: name for number, name in _open_descriptors().items() if number not in before}
    threads = [thread.name for thread in threading.enumerate()][1:]
    text = json.dumps({"end": end, "descriptors": leaked, "threads": threads})
    os.write(report, text.encode())
    return 0 if end == "success" else 1


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        sys.exit(_launch(*sys.argv[2:]))
    else:
        work(int(sys.argv[1]), sys.argv[2] == "fails", float(sys.argv[3]), sys.argv[4])
