"""Children: started from an argv on any event loop, and watched until they end.

Both ways to start give a `Child`, whose exit is seen without a thread, signal handler or timer.

On a **stock loop** children come from `asyncio.create_subprocess_exec`, through public API only.
asyncio reaps them.  A pidfd that is opened here sends signals without racing the reaper (asyncio's
`send_signal` can hit a recycled pid before Python 3.13), and gives the status and the resource
usage.  Descriptors are handed over, never PIPE: `Process.wait()` on pipes waits for their end of
file, which a grandchild can hold back.

On **other loops** (uvloop) children come from `subprocess.Popen`, are watched by pidfd and reaped
by `wait4`, which also reports their resource usage.  uvloop's own subprocess is unfit for
supervision: it ignores `close_fds`, it forks the whole address space while the loop is blocked
(with a parent of 2 GB that takes 76 ms, `Popen` by vfork 1 ms), and it hangs if other code reaps
the child.  asyncio is unfit too where it waits for children by threads, the default of Python 3.11:
it starts a thread per child, which fails when the process table is full.  The watcher is a setting
of the process, so a library does not change it; the command line does.

Neither uses `preexec_fn` (it rules out vfork) or PR_SET_PDEATHSIG (see `guardian`).

A child inherits the signal mask of the spawning thread, and threads of programs often block all
signals; a stop could then only kill it.  Clearing the mask here around the spawn would let the
program's own signals in.  So `posix_spawn`, which takes the mask of the child, starts such a
child.  It takes no working directory: env(1) changes that, and executes the program (same pid).
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Protocol

from msgspec import Struct

from elastic_aio.aio import ForkGuard, create_task, set_result_if_pending
from elastic_aio.errors import HostError, SpawnError
from elastic_aio.outcome import ExitStatus, ResourceUsage
from elastic_aio.process import proc
from elastic_aio.process.adopted import subreaper
from elastic_aio.process.rusage import peek_usage, usage_of
from elastic_aio.text import error_reason


class ChildSpec(Struct, frozen=True):
    """A child to start, and all that it inherits.

    The child gets the descriptors `stdin`, `stdout` and `stderr` as 0, 1 and 2; the caller closes
    them.  It inherits `pass_fds` under their own numbers, leads a session of its own, and is bound
    to `cpus`, if any, before it runs.  A forked child runs `call` in place of `argv` and exits with
    the code that `call` returns.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str | None
    stdin: int
    stdout: int
    stderr: int
    pass_fds: tuple[int, ...] = ()
    call: Callable[[], int] | None = None
    cpus: frozenset[int] = frozenset()


class ChildExit(Struct, frozen=True):
    """How a child ended, and when: `at` is `time.monotonic`, since uvloop's is in milliseconds."""

    status: ExitStatus
    at: float
    usage: ResourceUsage | None = None


class Child(Protocol):
    @property
    def pid(self) -> int:
        """Its process id, which is also the id of its session."""

    @property
    def exited(self) -> asyncio.Future[ChildExit]:
        """Done when the process has ended and was reaped, or is about to be; never cancelled."""

    on_exit: Callable[[ChildExit], object]
    """Called at once when the child has ended, before the callbacks of `exited`, which take an
    iteration of the loop.  Not called if it is set later."""

    def has_ended(self) -> bool:
        """Return whether the process has ended, reaped or not."""

    def send_signal(self, number: int) -> bool:
        """Send a signal to the process itself; return whether it still existed."""

    def release(self) -> None:
        """Let it, once on the session list, run its program if it waits for that (see `fork`)."""


class Spawner(Protocol):
    async def __call__(self, spec: ChildSpec, /) -> Child:
        """Start one child and return when it runs.

        Raises:
            SpawnError: the child could not be started.
        """


# Errors that another attempt cannot avoid, with a shell's exit code for each.
_PERMANENT = {
    errno.ENOENT: 127,
    errno.ENOTDIR: 127,
    errno.EACCES: 126,
    errno.EPERM: 126,
    errno.ENOEXEC: 126,
    errno.E2BIG: 126,
    errno.EISDIR: 126,
    errno.ELOOP: 126,
    errno.ENAMETOOLONG: 126,
    errno.ETXTBSY: 126,
}


def check_sigchld() -> None:
    """Raise HostError if SIGCHLD is ignored, so that the kernel reaps children itself."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        raise HostError(
            "SIGCHLD is ignored in this process, so the workers' exit statuses would be lost;"
            " call signal.signal(signal.SIGCHLD, signal.SIG_DFL) first"
        )


def check_program(spec: ChildSpec) -> None:
    """Raise the SpawnError of a program that cannot be executed, if a wrapper is executed first."""
    path = program_path(spec)
    if not os.path.exists(path):
        raise spawn_error(FileNotFoundError(errno.ENOENT, "missing"), spec)
    if os.path.isdir(path) or not os.access(path, os.X_OK):
        raise spawn_error(PermissionError(errno.EACCES, os.strerror(errno.EACCES)), spec)
    try:
        with open(path, "rb") as file:
            first_line = file.read(256).partition(b"\n")[0]
    except PermissionError:
        return  # it may be executed, and not read: no script then
    interpreter = first_line[2:].split()[:1] if first_line.startswith(b"#!") else []
    if interpreter and not os.path.exists(interpreter[0]):
        raise spawn_error(FileNotFoundError(errno.ENOENT, "missing"), spec)


def program_path(spec: ChildSpec) -> str:
    """Return a program's path, which need not exist; raise a SpawnError if PATH lacks the name."""
    program = spec.argv[0]
    if os.path.sep in program:
        return os.path.join(spec.cwd or "", program)
    # As in a shell, a file that cannot be executed does not hide a later one that can.
    path = _which(spec, os.F_OK | os.X_OK) or _which(spec, os.F_OK)
    if path is None:
        raise spawn_error(FileNotFoundError(errno.ENOENT, "missing"), spec)
    return path


def _which(spec: ChildSpec, mode: int) -> str | None:
    """Return the first file in PATH that has the program's name and a mode; no directories."""
    # As `shutil.which`, whose import takes as long as ten modules here.
    for directory in os.get_exec_path(spec.env) if spec.env.get("PATH") != "" else ():
        path = os.path.join(directory, spec.argv[0])
        if os.access(path, mode) and not os.path.isdir(path):
            return path
    return None


def check_directory(spec: ChildSpec) -> None:
    """Raise the SpawnError of a spawn if a forked child cannot enter its working directory."""
    if spec.cwd is not None and not (os.path.isdir(spec.cwd) and os.access(spec.cwd, os.X_OK)):
        raise spawn_error(OSError(errno.ENOENT, "no such directory"), spec)


def spawn_error(error: OSError, spec: ChildSpec) -> SpawnError:
    """Return a `SpawnError` that says in one line why a child could not be started."""
    program, code = spec.argv[0], error.errno or 0
    if code == errno.EACCES and os.path.sep not in program and not _which(spec, os.F_OK):
        code = errno.ENOENT  # a directory has this name
    path = os.path.join(spec.cwd or "", program)
    is_permanent, exit_code = True, 126
    if spec.cwd is not None and not os.path.isdir(spec.cwd):
        problem = "is not a directory" if os.path.exists(spec.cwd) else "does not exist"
        reason = f"its working directory {spec.cwd} {problem}"
    elif spec.cwd is not None and not os.access(spec.cwd, os.X_OK):
        reason = f"its working directory {spec.cwd} cannot be entered"
    elif code == errno.ENOENT and os.path.sep in program and os.path.exists(path):
        reason = "its interpreter (the first line, after #!) does not exist"
    elif code == errno.E2BIG:
        size = sum(len(part) + 1 for part in spec.argv)
        size += sum(len(name) + len(value) + 2 for name, value in spec.env.items())
        reason = f"its arguments and environment ({size} bytes) are too long"
    else:
        reason = "command not found" if code == errno.ENOENT else error_reason(error)
        is_permanent, exit_code = code in _PERMANENT, _PERMANENT.get(code, 1)
    message = f"cannot run {program}: {reason}"
    return SpawnError(message, permanent=is_permanent, exit_code=exit_code)


# ------------------------------------------------------------------------------- the end


class PidfdWatch:
    """Calls back once, on this loop, when the process of a pidfd ends; it need not be a child."""

    def __init__(self, descriptor: int, on_end: Callable[[], None]) -> None:
        """Watch `descriptor`, which this object closes, and call `on_end`."""
        self.descriptor = descriptor
        """The pidfd; -1 after the end of the process or `close`."""
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(descriptor, self._on_readable)

    def __repr__(self) -> str:
        return f"<PidfdWatch {'done' if self.descriptor < 0 else f'on {self.descriptor}'}>"

    def close(self) -> None:
        """End the watch: the callback does not run any more.  Idempotent."""
        if self.descriptor >= 0:
            self._loop.remove_reader(self.descriptor)
            os.close(self.descriptor)
            self.descriptor = -1

    def _on_readable(self) -> None:
        # Before the close: the callback may reap by the pidfd.
        try:
            self._on_end()
        finally:
            self.close()


def has_ended(descriptor: int) -> bool:
    """Return whether the process of a pidfd has ended, reaped or not; reaps nothing."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(0))


class PidfdChild:
    """A child with a pidfd (-1 after its end), through which signals are sent."""

    _is_reaped_here = True
    """Whether its pid cannot be another process's before this loop has noticed its end."""

    def __init__(
        self, pid: int, pidfd: int, reaped: asyncio.Future[ChildExit] | None = None
    ) -> None:
        """Watch a child; `reaped` is done when it is reaped, if that follows its exit."""
        self.pid = pid
        self._fork = ForkGuard()
        self.exited: asyncio.Future[ChildExit] = asyncio.get_running_loop().create_future()
        self.reaped = reaped or self.exited
        self.on_exit: Callable[[ChildExit], object] = bool  # no callback by default
        self._pidfd = pidfd
        subreaper.own.add(pid)
        self.reaped.add_done_callback(lambda _: subreaper.own.discard(pid))

    def __repr__(self) -> str:
        state = str(self.exited.result().status) if self.exited.done() else "running"
        return f"<Child {self.pid}: {state}>"

    def set_exited(self, ended: ChildExit) -> None:
        on_exit, self.on_exit = self.on_exit, bool  # drops what it refers to
        self.exited.set_result(ended)
        on_exit(ended)

    def has_ended(self) -> bool:
        return self._pidfd < 0 or has_ended(self._pidfd)

    def send_signal(self, number: int) -> bool:
        # A zombie accepts signals too (kill(2)), so the check comes first.
        if self._fork.is_copy or self.has_ended():
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return False
        except PermissionError:
            return self._is_reaped_here and _kill(self.pid, number)
        return True

    def release(self) -> None:
        """Do nothing: the child does not wait."""


def _kill(pid: int, number: int) -> bool:
    """Send a signal where a seccomp filter of an older container runtime refuses pidfds."""
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True


def open_child_pidfd(pid: int) -> int:
    """Return a pidfd of a child; -1 if it is reaped already.

    Raises:
        OSError: no descriptor is left.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return -1
    try:
        # The pid may even be another process's by now: only our own child can be waited for.
        os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError as error:
        os.close(descriptor)
        if not isinstance(error, ChildProcessError):
            raise
        return -1
    return descriptor


class ReapedChild(PidfdChild):
    """A child that is watched by pidfd and reaped here, by `wait4`.

    If the embedding program reaps it first, its status is lost.
    """

    def __init__(self, pid: int, *, on_reaped: Callable[[int], object] = bool) -> None:
        """Watch a child that has just been started.

        `on_reaped` gets the return code, minus the signal's number if a signal ended it.

        Raises:
            OSError: no descriptor is left for the pidfd; the child is killed and reaped.
        """
        try:
            descriptor = open_child_pidfd(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)  # it was killed: this returns at once
            on_reaped(-signal.SIGKILL)
            raise
        super().__init__(pid, descriptor)
        self._on_reaped = on_reaped
        if self._pidfd < 0:
            self._end(255, ExitStatus(), None)
        else:
            PidfdWatch(self._pidfd, self._reap)

    def _reap(self) -> None:
        self._pidfd = -1  # the watch closes it
        usage = None
        try:
            _, wait_status, rusage = os.wait4(self.pid, 0)
        except ChildProcessError:
            status = ExitStatus()  # the embedding program reaps all children
            code = 255
        else:
            code = os.waitstatus_to_exitcode(wait_status)
            status = ExitStatus.from_returncode(code)
            usage = usage_of(rusage)
        self._end(code, status, usage)

    def _end(self, code: int, status: ExitStatus, usage: ResourceUsage | None) -> None:
        self._on_reaped(code)
        self.set_exited(ChildExit(status, time.monotonic(), usage))


# ----------------------------------------------------------------------------- the start


def command_spawner(loop: asyncio.AbstractEventLoop) -> Spawner:
    """Return the spawner for `loop`, which is running."""
    is_stock = isinstance(loop, asyncio.SelectorEventLoop)
    return spawn_with_asyncio if is_stock and _waits_by_pidfd() else spawn_with_popen


def _waits_by_pidfd() -> bool:
    """Return whether asyncio waits for children by pidfd in the running loop."""
    if sys.version_info >= (3, 12):
        return True
    watcher = asyncio.get_child_watcher()
    # Attached to one loop: the main thread's.
    is_attached = watcher.is_active() and threading.current_thread() is threading.main_thread()
    return is_attached and isinstance(watcher, asyncio.PidfdChildWatcher)


def _blocks_signals() -> bool:
    return bool(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def _options(spec: ChildSpec) -> dict[str, Any]:
    names = ("cwd", "stdin", "stdout", "stderr", "pass_fds")
    options = {name: getattr(spec, name) for name in names}
    return {**options, "env": dict(spec.env), "start_new_session": True}


@contextmanager
def _bound_to(cpus: frozenset[int]) -> Iterator[None]:
    """Bind this thread to some CPUs, if any, while it spawns a child.

    The child inherits the binding (sched_setaffinity(2)), so it is bound before its program runs,
    without a further process or program.
    """
    if not cpus:
        yield
        return
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        with suppress(OSError):  # this process has lost these CPUs
            os.sched_setaffinity(0, own)


async def spawn_with_asyncio(spec: ChildSpec) -> Child:
    """Start a child through asyncio, which will reap it.

    Raises:
        SpawnError: the child could not be started; or it has run, but the embedding program has
            reaped it before asyncio opened its pidfd, so that its pid and status are lost.
    """
    if spec.cpus or _blocks_signals():
        return await spawn_with_popen(spec)  # which spawns in one step, see `_bound_to`
    with subreaper.spawning():
        try:
            process = await asyncio.create_subprocess_exec(*spec.argv, **_options(spec))
        except ProcessLookupError as error:
            problem = f"{spec.argv[0]} has run, but another part of this program has reaped it"
            raise SpawnError(problem, permanent=False, exit_code=1) from error
        except OSError as error:
            raise spawn_error(error, spec) from error
        try:
            return _AsyncioChild(process)
        except OSError as error:  # no descriptor left for the pidfd
            process.kill()
            await process.wait()  # it was killed: this returns at once
            raise spawn_error(error, spec) from error


class _AsyncioChild(PidfdChild):
    """A child that asyncio reaps.

    asyncio reports code 255 for a child that another part of the program has reaped.  So the status
    is read from the zombie before asyncio reaps it: the kernel wakes the pollers of a process from
    the latest to the first, and asyncio polled first.  If asyncio or the other part was faster
    nevertheless, 255 counts as a lost status.

    A child that exits at once, as one of five `/bin/true`, is reaped before
    `create_subprocess_exec` returns.  Then asyncio's status counts, and the usage is lost.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        descriptor = -1 if process.returncode is not None else open_child_pidfd(process.pid)
        super().__init__(process.pid, descriptor, asyncio.get_running_loop().create_future())
        self._process = process
        self._watch: PidfdWatch | None = None
        self._end: tuple[ExitStatus, ResourceUsage | None] | None = None
        if self._pidfd >= 0:
            self._watch = PidfdWatch(descriptor, self._on_end)
            self._end = _peek(descriptor)  # asyncio sees first what ended before it was watched
        self._wait()

    def _on_end(self) -> None:
        self._end = self._end or _peek(self._pidfd)
        self._pidfd = -1  # the watch closes it
        # asyncio reaps it in this iteration of the loop, and says so three iterations later.
        if self._end is not None and not self._fork.is_copy:
            self._set_exit(*self._end)

    def _wait(self) -> None:
        self._wait_task = create_task(self._process.wait(), name=f"exit of {self.pid}")
        self._wait_task.add_done_callback(self._on_waited)

    def _on_waited(self, task: asyncio.Task[int]) -> None:
        if self._fork.is_copy:
            return
        if task.cancelled():
            # The loop shuts down and cancels all tasks, while the stop of the tree still
            # waits for this exit.
            self._wait()
            return
        if self._watch is not None:
            self._watch.close()
            self._pidfd = -1
        status, usage = self._end or (ExitStatus.from_returncode(task.result()), None)
        if self._end is None and self._watch is not None and task.result() == 255:
            status = ExitStatus()
        self._set_exit(status, usage)
        set_result_if_pending(self.reaped, self.exited.result())

    def _set_exit(self, status: ExitStatus, usage: ResourceUsage | None) -> None:
        if not self.exited.done():
            self.set_exited(ChildExit(status, time.monotonic(), usage))


def _peek(descriptor: int) -> tuple[ExitStatus, ResourceUsage | None] | None:
    """Return how the child of a pidfd has ended, and its usage; None if it runs or is reaped."""
    try:
        result = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:
        return None
    if result is None:
        return None
    is_exit = result.si_code == os.CLD_EXITED
    code = result.si_status if is_exit else -result.si_status
    return ExitStatus.from_returncode(code), peek_usage(descriptor)


async def spawn_with_popen(spec: ChildSpec) -> Child:
    """Start a child that is watched by pidfd and reaped here, or raise a SpawnError."""
    try:
        with _bound_to(spec.cpus):
            if _blocks_signals():
                return ReapedChild(_posix_spawn(spec))
            process = subprocess.Popen(spec.argv, **_options(spec))  # noqa: ASYNC220  # vfork: blocks 1 ms, see above
            return ReapedChild(process.pid, on_reaped=partial(setattr, process, "returncode"))
    except OSError as error:
        raise spawn_error(error, spec) from error


def _posix_spawn(spec: ChildSpec) -> int:
    path, argv = program_path(spec), spec.argv
    if spec.cwd is not None:
        check_directory(spec)
        check_program(spec)
        # env takes a name with a "=" for a variable, wherever it stands: a shell executes it.
        shell = ("/bin/sh", "-c", 'exec "$0" "$@"') if "=" in spec.argv[0] else ()
        path, argv = "/usr/bin/env", ("env", "-C", spec.cwd, "--", *shell, *spec.argv)
    targets = {0: spec.stdin, 1: spec.stdout, 2: spec.stderr, **{fd: fd for fd in spec.pass_fds}}
    actions: list[tuple[Any, ...]] = []
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as undo:
        for target, source in targets.items():
            # A copy, because another stream may have this number, and because a descriptor
            # that is duplicated as itself may stay closed on exec (glibc before 2.29).
            copy = fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, 3)
            undo.callback(os.close, copy)
            actions.append((os.POSIX_SPAWN_DUP2, copy, target))
        for fd in _inheritable() - targets.keys():
            if fd < soft_limit:
                actions.append((os.POSIX_SPAWN_CLOSE, fd))
            else:  # opened before the limit was lowered: the C library refuses the number
                os.set_inheritable(fd, False)
                undo.callback(_make_inheritable, fd)
        return os.posix_spawn(
            path,
            argv,
            dict(spec.env),
            file_actions=actions,
            setsid=True,
            setsigmask=(),
            setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),  # the interpreter ignores them
        )


def _make_inheritable(descriptor: int) -> None:
    with suppress(OSError):  # closed in the meantime
        os.set_inheritable(descriptor, True)


def _inheritable() -> set[int]:
    """Return the descriptors that every child would inherit."""
    descriptors = set()
    for descriptor in proc.own_descriptors():
        try:
            if os.get_inheritable(descriptor):
                descriptors.add(descriptor)
        except OSError:
            continue  # closed in the meantime
    return descriptors
