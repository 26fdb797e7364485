"""What the workers are doing right now: Python stacks, and the kernel's view of them.

A worker that runs in an interpreter of this package, or that has used `elastic_aio.worker`, has
offered its stacks (`worker.interpreter.offer_stacks`): on a signal its faulthandler writes them to
a file in its memory, which is read here through /proc.  The signal would end any other process; so
it is sent only to a process that has this file open and handles the signal.  The stacks of other
workers are read by `py-spy`, where it is installed and allowed to.

Everything blocks, in a thread of its own, and for two seconds at most.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from msgspec import Struct

from elastic_aio.process import proc
from elastic_aio.stacks import ThreadStack, WorkerStacks, parse_faulthandler, parse_py_spy
from elastic_aio.text import one_line
from elastic_aio.worker.interpreter import STACKS_FILE, STACKS_SIGNAL

_LIMIT_S: Final = 1.8  # for everything; the parse and the file take the rest of two seconds
_FAULTHANDLER_S: Final = 1.0
_PAUSE_S: Final = 0.005
_TEXT_MAX: Final = 1 << 20
_LINK: Final = f"/memfd:{STACKS_FILE} (deleted)"
_USUAL_DESCRIPTOR: Final = "255"
_PY_SPIES_MAX: Final = 16

# System calls in which processes wait, by machine.
_SYSCALLS: Final = {
    "x86_64": {
        0: "read", 1: "write", 7: "poll", 16: "ioctl", 20: "writev", 23: "select",
        34: "pause", 35: "nanosleep", 42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom",
        46: "sendmsg", 47: "recvmsg", 61: "wait4", 72: "fcntl", 73: "flock", 74: "fsync",
        75: "fdatasync", 128: "rt_sigtimedwait", 130: "rt_sigsuspend", 202: "futex",
        230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 257: "openat",
        270: "pselect6", 271: "ppoll", 281: "epoll_pwait", 288: "accept4", 426: "io_uring_enter",
    },
    "aarch64": {
        22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 56: "openat", 63: "read",
        64: "write", 66: "writev", 72: "pselect6", 73: "ppoll", 82: "fsync", 83: "fdatasync",
        95: "waitid", 98: "futex", 101: "nanosleep", 115: "clock_nanosleep",
        133: "rt_sigsuspend", 137: "rt_sigtimedwait", 202: "accept", 203: "connect",
        206: "sendto", 207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 242: "accept4",
        260: "wait4", 426: "io_uring_enter",
    },
}  # fmt: skip


class Target(Struct, frozen=True):
    """A worker to look at; `status` is what it has reported."""

    rank: int
    local_rank: int
    pid: int
    status: str = ""


class _Request(Struct):
    """Stacks that a worker was asked for: its file, and the former length of the file."""

    descriptor: int
    begin: int
    size: int = -1


def read_stacks(targets: Sequence[Target]) -> tuple[WorkerStacks, ...]:
    """Return what the workers are doing, in the order of `targets`; blocks for two seconds."""
    deadline = time.monotonic() + _LIMIT_S
    found = {target.pid: _kernel_state(target) for target in targets}
    requests: dict[int, _Request] = {}
    try:
        for target in () if proc.is_foreign() else targets:
            if (request := _request_stacks(target.pid)) is not None:
                requests[target.pid] = request
        _wait_written(requests, min(deadline, time.monotonic() + _FAULTHANDLER_S))
        for pid, request in requests.items():
            if threads := parse_faulthandler(_written(request)):
                found[pid] = replace(found[pid], threads=threads, source="faulthandler")
    finally:
        for request in requests.values():
            os.close(request.descriptor)
    missing = [pid for pid, worker in found.items() if not worker.threads]
    for pid, (threads, note) in _spy(missing, deadline).items():
        source = "py-spy" if threads else ""
        found[pid] = replace(found[pid], threads=threads, source=source, note=note)
    return tuple(found[target.pid] for target in targets)


# ------------------------------------------------------------------------ faulthandler


def _request_stacks(pid: int) -> _Request | None:
    """Ask a worker for its stacks; None if it has not offered them, or no descriptor is left."""
    if (path := _offered_file(pid)) is None or not _has_signal(pid, b"SigCgt"):
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    request = _Request(descriptor, os.fstat(descriptor).st_size)
    try:
        os.kill(pid, STACKS_SIGNAL)
    except OSError:
        os.close(descriptor)
        return None
    return request


def _offered_file(pid: int) -> str | None:
    if proc.link_of(pid, f"fd/{_USUAL_DESCRIPTOR}") == _LINK:
        return f"/proc/{pid}/fd/{_USUAL_DESCRIPTOR}"
    try:
        for number in proc.list_numbers(pid, "fd"):
            if proc.link_of(pid, f"fd/{number}") == _LINK:
                return f"/proc/{pid}/fd/{number}"
    except OSError:
        pass  # no descriptor is left
    return None


def _has_signal(pid: int, *masks: bytes) -> bool:
    """Return whether one of these masks of a process or a thread has the signal."""
    try:
        found = proc.read_status(pid, *masks).values()
    except OSError:
        return False  # no descriptor is left
    return any(proc.is_in(int(mask, 16), STACKS_SIGNAL) for mask in found)


def _wait_written(requests: dict[int, _Request], deadline: float) -> None:
    pending = dict(requests)
    while pending and time.monotonic() < deadline:
        for pid, request in [*pending.items()]:
            size = os.fstat(request.descriptor).st_size
            # The handler is being run as long as the signal is pending or blocked.
            if size == request.size > request.begin and not _is_handling(pid):
                del pending[pid]
            request.size = size
            if not os.path.exists(f"/proc/{pid}"):
                pending.pop(pid, None)
        if pending:
            # The kernel does not report the end of a signal handler to other processes.
            time.sleep(_PAUSE_S)


def _is_handling(pid: int) -> bool:
    try:
        threads = proc.list_numbers(pid, "task")
    except OSError:
        return False  # no descriptor is left
    return any(_has_signal(thread, b"SigPnd", b"ShdPnd", b"SigBlk") for thread in threads)


def _written(request: _Request) -> str:
    content = os.pread(request.descriptor, _TEXT_MAX, request.begin)
    return content.decode("utf-8", "replace")


# ------------------------------------------------------------------------------ py-spy


def _spy(pids: Sequence[int], deadline: float) -> dict[int, tuple[tuple[ThreadStack, ...], str]]:
    """Return the stacks that `py-spy` reads, or why there are none."""
    pythons = [pid for pid in pids if _is_python(pid)]
    program = shutil.which("py-spy")
    if program is None:
        note = "the worker offers none, and py-spy is not installed (see `aio-elastic help hangs`)"
        return dict.fromkeys(pythons, ((), note))
    found: dict[int, tuple[tuple[ThreadStack, ...], str]] = {}
    for begin in range(0, len(pythons), _PY_SPIES_MAX):
        spies = {pid: _start_spy(program, pid) for pid in pythons[begin : begin + _PY_SPIES_MAX]}
        for pid, spy in spies.items():
            found[pid] = _spy_result(spy, deadline)
    return found


def _start_spy(program: str, pid: int) -> subprocess.Popen[str] | None:
    try:
        return subprocess.Popen(
            [program, "dump", "--json", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError:
        return None


def _spy_result(
    spy: subprocess.Popen[str] | None, deadline: float
) -> tuple[tuple[ThreadStack, ...], str]:
    if spy is None:
        return (), "py-spy cannot be started"
    with spy:
        try:
            out, err = spy.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            spy.kill()
            return (), "py-spy takes too long"
    threads = parse_py_spy(out)
    return threads, "" if threads else f"py-spy: {one_line(err, 200) or 'no output'}"


def _is_python(pid: int) -> bool:
    return "python" in os.path.basename(proc.link_of(pid, "exe"))


# ---------------------------------------------------------------------------- the kernel


def _kernel_state(target: Target) -> WorkerStacks:
    """Return what the kernel shows of the main thread of a worker."""
    worker = WorkerStacks(target.rank, target.local_rank, target.pid, status=target.status)
    if proc.is_foreign():
        return replace(worker, note="/proc shows the processes of another pid namespace")
    try:
        process = proc.read_process(target.pid)
    except OSError:
        process = None  # no descriptor is left
    stack = _text(target.pid, "stack").splitlines()
    return replace(
        worker,
        state="" if process is None else process.state,
        wchan=one_line(proc.wait_channel(target.pid), 100),
        syscall=_syscall_name(_text(target.pid, "syscall")),
        kernel_stack=tuple(line.rpartition(" ")[2] for line in stack[:50]),
    )


def _syscall_name(text: str) -> str:
    number = text.partition(" ")[0]
    if not number.isdecimal():
        return ""  # it runs, or may not be looked at
    names = _SYSCALLS.get(platform.machine(), {})
    return names.get(int(number), f"number {number}")


def _text(pid: int, name: str) -> str:
    try:
        return (proc.read(pid, name) or b"").decode("ascii", "replace").strip()
    except OSError:
        return ""  # no descriptor is left
