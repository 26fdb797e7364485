"""What the workers were doing: the values of a dump, read from its texts, in one line; pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import Struct

from elastic_aio.ranks import format_ranks
from elastic_aio.text import one_line, truncate

_THREADS_MAX: Final = 200
_FRAMES_MAX: Final = 200
_TEXT_MAX: Final = 500
_GROUPS_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class StackFrame:
    """A Python function that runs: `function` in line `line` of `file`."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f'File "{self.file}", line {self.line} in {self.function}'


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """One thread: its `name` (or number) and its `frames`, the innermost first."""

    name: str
    frames: tuple[StackFrame, ...]


@dataclass(frozen=True, slots=True)
class WorkerStacks:
    """What the worker `rank` was doing: `local_rank` on this node, process `pid`."""

    rank: int
    local_rank: int
    pid: int
    source: str = ""
    """How the Python stacks were read: "faulthandler" or "py-spy"; empty without any."""
    threads: tuple[ThreadStack, ...] = ()
    """Its Python threads; the main thread is the last one."""
    state: str = ""
    """State of the main thread: a letter of `proc_pid_stat(5)`."""
    wchan: str = ""
    """Kernel function in which the main thread waits."""
    syscall: str = ""
    """System call of the main thread."""
    kernel_stack: tuple[str, ...] = ()
    """Kernel stack of the main thread, the innermost function first; root only."""
    status: str = ""
    """What the worker has reported: its step, its phase and its status."""
    note: str = ""
    """Why there are no Python stacks."""

    @property
    def main_thread(self) -> ThreadStack | None:
        """The main thread; None without Python stacks."""
        return self.threads[-1] if self.threads else None


@dataclass(frozen=True, slots=True)
class StackDump:
    """What the `workers` of a node were doing in an `attempt`, in the order of their ranks."""

    time: float
    """Unix seconds."""
    attempt: int
    reason: str
    """Why the dump was made."""
    workers: tuple[WorkerStacks, ...]
    path: str | None = None
    """File with the text; None if the job has no log directory."""

    @property
    def summary(self) -> str:
        """One line, such as `ranks 0-2 wait in all_reduce, rank 3 is in DataLoader.__next__`."""
        return summarize(self.workers)

    def __str__(self) -> str:
        """Return the text of the file."""
        parts = [f"{self.reason}\n{self.summary}\n"]
        parts += [_format_worker(worker) for worker in self.workers]
        return "\n".join(parts)


# ------------------------------------------------------------------------- texts in


_THREAD: Final = re.compile(
    r"(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):"
)
_FRAME: Final = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


def parse_faulthandler(text: str) -> tuple[ThreadStack, ...]:
    """Read a text of `faulthandler` about all threads; the main thread is the last."""
    threads: list[ThreadStack] = []
    name, frames = "", list[StackFrame]()
    for line in [*text.splitlines(), "Thread 0x0 (most recent call first):"]:
        if match := _FRAME.fullmatch(line):
            if len(frames) < _FRAMES_MAX:
                frames.append(_frame(*match.groups()))
        elif match := _THREAD.fullmatch(line):
            if name and len(threads) < _THREADS_MAX:
                threads.append(ThreadStack(name, tuple(frames)))
            name, frames = _clean(match[2] or match[1]), []
    return tuple(threads)


class _SpyFrame(Struct):
    name: str
    filename: str
    line: int = 0


class _SpyThread(Struct):
    thread_id: int
    thread_name: str | None
    frames: list[_SpyFrame]


def parse_py_spy(text: str) -> tuple[ThreadStack, ...]:
    """Read a text of `py-spy dump --json`; the main thread becomes the last."""
    try:
        found = msgspec.json.decode(text, type=list[_SpyThread])
    except (msgspec.MsgspecError, UnicodeError):
        return ()  # it is no such text
    threads = [
        ThreadStack(
            _clean(thread.thread_name or f"{thread.thread_id:#x}"),
            tuple(
                StackFrame(_clean(frame.filename), frame.line, _clean(frame.name))
                for frame in thread.frames[:_FRAMES_MAX]
            ),
        )
        for thread in found[:_THREADS_MAX]
    ]
    return tuple(sorted(threads, key=lambda thread: thread.name == "MainThread"))


def _frame(file: str, line: str, function: str) -> StackFrame:
    return StackFrame(_clean(file), int(line) if line.isdecimal() else 0, _clean(function))


def _clean(text: str) -> str:
    return one_line(text, _TEXT_MAX)


# ------------------------------------------------------------------------ the summary


# Functions that wait for other workers.
_COLLECTIVES: Final = re.compile(
    r"_?(all_reduce|all_gather|all_to_all|allreduce|allgather|barrier|monitored_barrier|broadcast"
    r"|gather|scatter|reduce|reduce_scatter|send|recv|isend|irecv|wait|synchronize|rendezvous"
    r"|init_process_group|destroy_process_group|batch_isend_irecv|join|acquire|result)(_\w+)?"
)
# Decorators and module calls, which do not tell the function that was called.
_WRAPPERS: Final = re.compile(
    r"_?(wrapper|wrapped|inner|inner_wrapper|decorate_context|decorate_autocast|__call__|_fn"
    r"|_call_impl|_wrapped_call_impl|<lambda>|<module>|__exit__|__enter__)|_?call_\w+"
)
_CLASSES: Final = {
    "torch/utils/data/dataloader.py": "DataLoader",
    "torch/autograd/__init__.py": "autograd",
    "multiprocessing/queues.py": "Queue",
    "/queue.py": "Queue",
}
_LIBRARY: Final = re.compile(
    r"<frozen .*>|.*/elastic_aio/worker/.*|.*/(site-packages|dist-packages)/.*"
    r"|.*/lib(64)?/(pypy|python)\d[^/]*/.*"
)
# States of proc_pid_stat(5) in which a process waits in no system call.
_STATES: Final = {"R": "running", "T": "suspended", "t": "suspended by a debugger", "Z": "exited"}


def summarize(workers: Iterable[WorkerStacks]) -> str:
    """Return in one line what the workers were doing: equal workers together, by their ranks."""
    groups: dict[str, list[int]] = {}
    for worker in workers:
        groups.setdefault(_activity(worker), []).append(worker.rank)
    texts = [_with_ranks(activity, ranks) for activity, ranks in groups.items()]
    if len(texts) > _GROUPS_MAX:
        left_out = len(texts) - _GROUPS_MAX
        texts = [*texts[:_GROUPS_MAX], f"and {left_out} more groups of ranks"]
    return ", ".join(texts) or "no worker was running"


def _with_ranks(activity: str, ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} {activity}"
    plural = activity.replace("waits in", "wait in", 1).replace("is ", "are ", 1)
    return f"ranks {format_ranks(ranks)} {plural}"


def _activity(worker: WorkerStacks) -> str:
    """Return what a worker does, as in `waits in barrier`."""
    thread = worker.main_thread
    if thread is not None and thread.frames:
        return _python_activity(thread.frames)
    if worker.state in _STATES:
        return f"is {_STATES[worker.state]}"
    if worker.syscall or worker.wchan:
        return f"is in system call {worker.syscall or worker.wchan}"
    return "is in an unknown place"


def _python_activity(frames: Sequence[StackFrame]) -> str:
    """Describe a stack by the library function that the program has called last."""
    own = next((index for index, frame in enumerate(frames) if not _is_library(frame)), None)
    # Without code of the program, the innermost function is known at least.
    called = frames if own is None else reversed(frames[:own])
    for frame in called:
        function = _last_part(frame.function)
        if not _WRAPPERS.fullmatch(function):
            verb = "waits in" if _COLLECTIVES.fullmatch(function) else "is in"
            return f"{verb} {truncate(_qualified(frame), 80)}"
    frame = frames[own or 0]
    file = frame.file.rpartition("/")[2]
    return f"is in {truncate(frame.function, 60)} ({truncate(file, 60)}:{frame.line})"


def _is_library(frame: StackFrame) -> bool:
    return bool(_LIBRARY.fullmatch(frame.file))


def _last_part(function: str) -> str:
    """Return the name of a function without its class, which py-spy adds."""
    return function.rpartition(".")[2]


def _qualified(frame: StackFrame) -> str:
    """Return the name of a function, with its class or its module where it is not clear alone."""
    for path, name in _CLASSES.items():
        if frame.file.endswith(path):
            return f"{name}.{_last_part(frame.function)}"
    if not frame.function.startswith("__"):
        return frame.function
    return f"{frame.file.rpartition('/')[2].removesuffix('.py')}.{frame.function}"


# ------------------------------------------------------------------------- texts out


def _format_worker(worker: WorkerStacks) -> str:
    lines = [f"rank {worker.rank} (local rank {worker.local_rank}, pid {worker.pid})"]
    if worker.status:
        lines.append(f"  reported: {worker.status}")
    kernel = (("state", worker.state), ("system call", worker.syscall), ("waits in", worker.wchan))
    if known := ", ".join(f"{name} {value}" for name, value in kernel if value):
        lines.append(f"  main thread: {known}")
    lines += [f"    {function}" for function in worker.kernel_stack]
    if worker.note:
        lines.append(f"  no Python stacks: {worker.note}")
    for thread in worker.threads:
        is_main = " (main)" if thread is worker.main_thread else ""
        lines.append(f"  thread {thread.name}{is_main}, most recent call first, {worker.source}:")
        lines += [f"    {frame}" for frame in thread.frames] or ["    <no Python frame>"]
    return "\n".join(lines) + "\n"
