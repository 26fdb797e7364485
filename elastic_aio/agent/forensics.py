"""What the workers are doing right now: Python stacks, and what the kernel shows of them.

A worker that runs in an interpreter of this package, or that has used `elastic_aio.worker`, has
offered its stacks (`worker.interpreter.offer_stacks`): on a signal its faulthandler writes them
to a file in its memory, which is read here through /proc.  The signal is sent only to a process
that has this file open and handles the signal, since it would end any other.  Of the others
`py-spy` reads the stacks, where it is installed and allowed to.

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
from elastic_aio.stacks import (
    ThreadStack,
    WorkerStacks,
    parse_faulthandler,
    parse_py_spy,
)
from elastic_aio.text import one_line
from elastic_aio.worker.interpreter import STACKS_FILE, STACKS_SIGNAL

_LIMIT_S: Final = 1.8
"""Seconds for everything; the parse and the file take the rest of two."""
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
    """Stacks that a worker was asked for: its file, and how long that was before."""

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
    if (path := _offered_file(pid)) is None or not _handles_signal(pid):
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
    directory = f"/proc/{pid}/fd"
    try:
        if os.readlink(f"{directory}/{_USUAL_DESCRIPTOR}") == _LINK:
            return f"{directory}/{_USUAL_DESCRIPTOR}"
    except OSError:
        pass  # it has another number
    try:
        for name in os.listdir(directory):
            if os.readlink(f"{directory}/{name}") == _LINK:
                return f"{directory}/{name}"
    except OSError:
        pass  # the process has ended, or is another user's
    return None


def _handles_signal(pid: int) -> bool:
    return bool(_mask(f"/proc/{pid}/status", b"SigCgt:") >> (STACKS_SIGNAL - 1) & 1)


def _mask(path: str, *keys: bytes) -> int:
    """Return the signals in any of these masks of proc_pid_status(5)."""
    mask = 0
    try:
        with open(path, "rb") as file:
            for line in file:
                if line.startswith(keys):
                    mask |= int(line.split()[1], 16)
    except (OSError, ValueError, IndexError):
        return 0  # it has ended
    return mask


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
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    keys = b"SigPnd:", b"ShdPnd:", b"SigBlk:"
    masks = (_mask(f"/proc/{pid}/task/{thread}/status", *keys) for thread in threads)
    return any(mask >> (STACKS_SIGNAL - 1) & 1 for mask in masks)


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
            [program, "dump", "--full-filenames", "--pid", str(pid)],
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
    threads = parse_py_spy(out[:_TEXT_MAX])
    return threads, "" if threads else f"py-spy: {one_line(err, 200) or 'no output'}"


def _is_python(pid: int) -> bool:
    try:
        return "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False


# ---------------------------------------------------------------------------- the kernel


def _kernel_state(target: Target) -> WorkerStacks:
    """Return what the kernel shows of the main thread of a worker."""
    worker = WorkerStacks(target.rank, target.local_rank, target.pid, status=target.status)
    if proc.is_foreign():
        return replace(worker, note="/proc shows the processes of another pid namespace")
    directory = f"/proc/{target.pid}"
    wchan = _read(f"{directory}/wchan")
    stack = _read(f"{directory}/stack").splitlines()
    return replace(
        worker,
        state=_read(f"{directory}/stat").rpartition(")")[2].strip()[:1],
        wchan="" if wchan == "0" else one_line(wchan, 100),
        syscall=_syscall_name(_read(f"{directory}/syscall")),
        kernel_stack=tuple(line.rpartition(" ")[2] for line in stack[:50]),
    )


def _syscall_name(text: str) -> str:
    number = text.partition(" ")[0]
    if not number.isdecimal():
        return ""  # it runs, or may not be looked at
    names = _SYSCALLS.get(platform.machine(), {})
    return names.get(int(number), f"number {number}")


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 16).decode("ascii", "replace").strip()
    except OSError:
        return ""  # it has ended, or the kernel does not allow it


# -------------------------------------------------------------------------------- idleness


def read_activity(pids: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Return the CPU time in ticks and the bytes written, of workers and their descendants.

    By pid; a process that starts or ends changes the result.
    """
    found: dict[int, tuple[int, int]] = {}
    for pid in pids:
        try:
            below = [process.pid for process in proc.iter_descendants(pid)]
        except OSError:
            below = []
        for each in (pid, *below):
            fields = _read(f"/proc/{each}/stat").rpartition(")")[2].split()
            if len(fields) > 12:
                written = _read(f"/proc/{each}/io").partition("wchar:")[2].split()
                bytes_written = int(written[0]) if written else 0
                found[each] = int(fields[11]) + int(fields[12]), bytes_written
    return found
