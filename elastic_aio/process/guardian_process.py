"""The guardian process of a program: how it is spawned, and what it guards.

There is one for all jobs of the program, whatever event loops and threads they run in.  It starts
with the first of them and ends with the last; a fork of the program has one of its own.

Its interpreter takes some 8 ms to start, and no worker may start before.  So nothing here needs an
event loop or asyncio: the command line spawns the guardian before it imports the launcher
(`spawned_early`), and the runtime of the job takes it over.
"""

from __future__ import annotations

import _socket
import fcntl
import itertools
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from threading import RLock
from typing import Protocol
from weakref import WeakSet

from elastic_aio.errors import HostError
from elastic_aio.outcome import ExitStatus
from elastic_aio.process import proc
from elastic_aio.process.descendants import FINAL, ROW_SIZE, JobRow, ListFile, SessionList
from elastic_aio.spec.stop import StopPlan, StopStep
from elastic_aio.text import error_reason, one_line

FAILED = "cannot start the guardian process"
_MAIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "guardian_main.py")
# Runs the files of the guardian from memory; the comment is for readers of the process list.
_LOADER = """\
# guardian_main.py
import sys
with open(int(sys.argv.pop(1))) as file:
    __file__, texts = eval(file.read())
for name, text in texts.items():
    sys.modules[name] = module = type(sys)(name)
    exec(compile(text, name + ".py", "exec"), vars(module) if name != "guardian_main" else None)
"""
_NAMES = ("proc", "descendants", "stop_order", "guard", "guardian_main")
_FILES = {name: os.path.join(os.path.dirname(_MAIN), f"{name}.py") for name in _NAMES}
_program = b""
_kept: list[tuple[int, int]] = []
# Set in the guardian's environment, so that an application that runs itself notices.
_VARIABLE = "ELASTIC_AIO_GUARDIAN"
# Descriptors of one message: SCM_MAX_FD in the kernel is 253, but each needs a number here when the
# message is read again.
_PIPES_EACH = 64
# Messages on the way from which on they are shared.
_MESSAGES = 100


class KeptPipes:
    """The ends of the workers' pipes that this process reads, kept open for the guardian.

    They are sent to a Unix socket that the guardian inherits, and stay on the way: it sleeps until
    this process has ended, and then reads them (SCM_RIGHTS in unix(7)).  In the other direction the
    guardian reports.
    """

    def __init__(self) -> None:
        """Open the socket, or raise an OSError."""
        self._sender, self._receiver = _socket.socketpair(
            _socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC
        )
        self.descriptor = self._receiver.fileno()
        """The end that a guardian inherits."""
        self.reports = self._sender.fileno()
        """The end at which its reports arrive."""
        for end in (self._sender, self._receiver):
            end.setblocking(False)
        self._owners: set[int] = set()
        self._messages = 0  # on the way

    def replace(self, owner: int, descriptors: Sequence[int]) -> None:
        """Keep only these pipes of an owner.

        Pipes of many owners share messages, because a socket takes some 150 messages.  The last
        ones are not kept if the kernel allows no more on the way: as many as a user may have open.
        """
        new = [(owner, number) for number in descriptors]
        must_read = owner in self._owners or (new and self._messages >= _MESSAGES)
        (self._owners.add if new else self._owners.discard)(owner)
        count = self._messages if must_read else 0
        self._messages -= count
        for _ in range(count):  # each goes to the end of the queue
            received = self._receive()
            kept = [each for each in received if each[0] != owner]
            room = _PIPES_EACH - len(kept)
            self._send([*kept, *new[:room]])
            new = new[room:]
            for _, number in received:
                os.close(number)
        while new:
            self._send(new[:_PIPES_EACH])
            new = new[_PIPES_EACH:]

    def _send(self, pipes: Sequence[tuple[int, int]]) -> None:
        if pipes:
            owners, numbers = zip(*pipes, strict=True)
            content = struct.pack(f"{len(pipes)}i", *numbers)
            rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, content)]
            with suppress(OSError):
                self._sender.sendmsg([struct.pack(f"{len(pipes)}q", *owners)], rights)
                self._messages += 1

    def _receive(self) -> list[tuple[int, int]]:
        space = _socket.CMSG_SPACE(4 * _PIPES_EACH)
        try:
            data, ancillary, _, _ = self._receiver.recvmsg(
                8 * _PIPES_EACH, space, _socket.MSG_CMSG_CLOEXEC
            )
        except OSError:
            return []
        owners = (owner for (owner,) in struct.iter_unpack("q", data))
        contents = b"".join(content for _, _, content in ancillary)
        return [*zip(owners, memoryview(contents).cast("i"), strict=False)]

    def receive_reports(self) -> list[list[int]]:
        """Return the numbers of each report that has arrived."""
        reports = []
        with suppress(BlockingIOError):
            while True:
                reports.append([*map(int, self._sender.recv(256).split())])
        return reports

    def close(self) -> None:
        """Close the socket, and what is on the way.  Idempotent."""
        self._sender.close()
        self._receiver.close()


class GuardedProgram:
    """What the jobs of this process share: the list of their sessions, and their guardian.

    Any thread may use it.  A lock on a byte of the list says that this process runs and is still
    this program: the kernel releases it at the end of the process and at an exec, and forks do not
    inherit it.  Closing the list, or another descriptor of the file, unlocks it.

    To wake the guardian, which waits for the lock of that byte, this process locks the next byte
    before it unlocks it (`wake`).  So the guardian distinguishes a program that is gone, which
    holds no lock, from one that asks for something.
    """

    lock = RLock()
    """Held for the time of some system calls, or of a spawn.  A collected event loop may need it
    again in the same thread."""
    present: GuardedProgram | None = None
    """The program of the next job; None if no job is guarded."""

    def __init__(self) -> None:
        """Open the list, or raise an OSError; `close_if_unused` must follow."""
        self.jobs: dict[int, GuardedJob] = {}
        self.guarded: set[int] = set()
        self.process: GuardianProcess | None = None
        """The present guardian, which may have ended."""
        self.ended: dict[int, tuple[int, bool]] = {}
        """By owner, the last request to end a job that the guardian has done, and whether nothing
        was left."""
        self.watchers: WeakSet[Watcher] = WeakSet()
        self._fork = os.getpid()
        self._owners = itertools.count(1)
        self._serials = itertools.count(1)
        self._byte = 0
        # The names of the markers differ by the owner.
        self._prefix = f"ELASTIC_AIO_JOB_{os.urandom(12).hex()}"
        with ExitStack() as undo:
            descriptor = os.memfd_create("elastic_aio-sessions", os.MFD_CLOEXEC)
            undo.callback(os.close, descriptor)
            self.list = ListFile(descriptor)
            self.pipes = KeptPipes()
            undo.callback(self.pipes.close)
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
            self._resources = undo.pop_all()

    @classmethod
    def current(cls) -> GuardedProgram:
        """Return the program of the jobs that run, or a new one; raise an OSError."""
        program = cls.present
        if program is None or program.is_copy:
            program = cls.present = cls()
        return program

    @property
    def is_copy(self) -> bool:
        """Whether this is a fork of the process, whose jobs are its own."""
        return self._fork != os.getpid()

    def next_owner(self) -> tuple[int, str]:
        """Return a number for a job, and the name of its marker."""
        owner = next(self._owners)
        return owner, f"{self._prefix}{owner & 0xFFFFFFFF:08x}"

    def running_process(self, python: str | None) -> GuardianProcess:
        """Return the guardian, spawned if none runs; for errors see `Guardian.start`."""
        with self.lock:
            process = self.process
            if process is None or process.has_ended():
                if process is not None:
                    self.receive()  # what it has reported before its end
                words = (self.list.descriptor, self.pipes.descriptor, self._prefix)
                self.process = process = GuardianProcess(words, next(self._serials), python)
            return process

    def wake(self) -> None:
        """Let the guardian read the list: a job is to be ended; needs no event loop."""
        with self.lock:
            byte = self._byte
            fcntl.lockf(self.list.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte + 1)
            self._byte = byte + 1
            fcntl.lockf(self.list.descriptor, fcntl.LOCK_UN, 1, byte)

    def receive(self, receiver: Watcher | None = None) -> None:
        """Take the reports of the guardian, and let the watchers look but for the receiver."""
        with self.lock:
            for serial, *ended in self.pipes.receive_reports():
                if ended:
                    owner, number, is_success = ended
                    self.ended[owner] = number, bool(is_success)
                elif self.process is not None and self.process.serial == serial:
                    self.process.is_ready = True
                    self.process.close()
            for watcher in [*self.watchers]:
                if watcher is not receiver:
                    watcher.look_soon()

    def forget(self, owner: int) -> None:
        """Guard a job no more; the next job belongs to another program if this was the last."""
        self.guarded.discard(owner)
        if not self.guarded and GuardedProgram.present is self:
            GuardedProgram.present = None

    def close_if_unused(self) -> None:
        if not self.jobs:
            process, self.process = self.process, None
            if process is not None and not process.has_ended():
                process.process.kill()
                process.process.wait()  # it was killed: this returns at once
                process.has_ended()
            self._resources.close()


def _forget_program() -> None:
    GuardedProgram.lock = RLock()  # another thread of the parent may hold it
    GuardedProgram.present = None
    _early.clear()


os.register_at_fork(after_in_child=_forget_program)


class Watcher(Protocol):
    """Waits in an event loop for reports of the guardian."""

    def look_soon(self) -> None:
        """Look at `GuardedProgram.process` and `ended`; called in any thread."""


class GuardedJob:
    """A job that the guardian ends when this process has ended; must be closed.

    `marker` names the job's environment variable; `since` is when the job began, in clock
    ticks since boot; `sessions` has its part of the list.
    """

    def __init__(self, program: GuardedProgram, plan: StopPlan) -> None:
        """List the job, or raise an OSError; `create` does it in the present program."""
        first = plan.steps[0] if plan.steps else StopStep(signal.SIGKILL, 0)
        grace = min(first.grace, plan.guardian_grace)
        self.program = program
        self.owner, self.marker = program.next_owner()
        # One tick earlier: processes of the present tick may be older or newer.
        self.since = proc.ticks_now() - 1
        self.sessions = SessionList(program.list, self.owner)
        self._listed = JobRow(self.since, first.signal, grace, not plan.reaches_all(first))
        self._requests = 0
        self._row = program.list.take()
        self._is_listed = True
        self._write()
        program.jobs[self.owner] = self
        program.guarded.add(self.owner)

    def __repr__(self) -> str:
        return f"<GuardedJob {self.marker}>"

    @classmethod
    def create(cls, plan: StopPlan | None = None) -> GuardedJob:
        """Begin a job; `close` must follow.

        `plan` has the signal that its processes get first, and the grace.

        Raises:
            HostError: the kernel has no anonymous files or pidfds, or no descriptor is left.
        """
        if not hasattr(os, "pidfd_open") or not hasattr(os, "memfd_create"):
            raise HostError("elastic_aio needs Linux 5.3 or newer (pidfd_open, memfd_create)")
        with GuardedProgram.lock:
            try:
                program = GuardedProgram.current()
                try:
                    return cls(program, plan or StopPlan())
                except OSError:
                    program.close_if_unused()
                    raise
            except OSError as error:
                problem = f"cannot create an anonymous file: {error_reason(error)}"
                raise HostError(problem) from error

    def _write(self) -> None:
        self.program.list.write_job(self._row, self.owner, self._listed)

    def keep_pipes(self, descriptors: Sequence[int]) -> None:
        """Keep only these pipes of the job (see `KeptPipes`)."""
        with self.program.lock:
            self.program.pipes.replace(self.owner, descriptors)

    def request_end(self) -> int:
        """Let the guardian end what is left of the job; return the number of the request.

        Its answer will be in `GuardedProgram.ended`; `resume` must follow.
        """
        self._requests += 1
        self._set_end(self._requests)
        self.program.wake()
        return self._requests

    def resume(self) -> None:
        """Let the job go on: the guardian ends it with this process."""
        self._set_end(0)
        self.program.wake()

    def release(self) -> None:
        """Let the guardian end the job as if this process had ended; needs no event loop."""
        self._set_end(FINAL)
        self.program.wake()

    def _set_end(self, end: int) -> None:
        if self._is_listed and self._listed.end != FINAL:
            self._listed.end = end
            self._write()

    def unlist(self) -> bool:
        """Let the guardian leave the job alone; return whether it was the last.  Idempotent."""
        with self.program.lock:
            if self._is_listed:
                self._is_listed = False
                self.program.list.clear([self._row])
                self.program.list.give_back([self._row])
                self.program.pipes.replace(self.owner, ())
                self.program.ended.pop(self.owner, None)
            self.program.forget(self.owner)
            return not self.program.guarded

    def close(self) -> None:
        """Guard the job no more; the last one ends the guardian.  Idempotent."""
        if self.program.is_copy:
            return
        with self.program.lock:
            self.unlist()
            self.sessions.detach()
            if self.program.jobs.pop(self.owner, None) is not None:
                self.program.close_if_unused()


class GuardianProcess:
    """A guardian that has been spawned; `close` must follow."""

    def __init__(self, words: Sequence[object], serial: int, python: str | None) -> None:
        """Spawn it, with these arguments and the number by which it reports that it works.

        For `python` and errors, see `Guardian` and its `start`.
        """
        self.serial = serial
        self.python = _interpreter(python)
        self.is_ready = False
        """Whether it has reported that it works."""
        self.problem = ""
        """Why it has ended before."""
        self.on_reaped: Callable[[], object] = bool
        with ExitStack() as resources:
            try:
                self.errors = os.memfd_create("elastic_aio-guardian", os.MFD_CLOEXEC)
                """Descriptor of the file that is its stderr, until it is ready."""
                resources.callback(os.close, self.errors)
                program = _open_program(resources)
                self.process = subprocess.Popen(
                    (self.python, "-I", "-S", *program, *map(str, words), str(serial)),
                    env={**os.environ, _VARIABLE: "1"},
                    cwd="/",  # it must not keep a file system from being unmounted
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self.errors,
                    pass_fds=(
                        *(word for word in words if isinstance(word, int)),
                        *map(int, program[2:]),
                    ),
                    start_new_session=True,
                )
            except OSError as error:
                reason = error_reason(error)
                raise HostError(f"{FAILED}: cannot run {self.python}: {reason}") from error
            self._resources = resources.pop_all()

    def __repr__(self) -> str:
        return f"<GuardianProcess {self.process.pid}>"

    def has_ended(self) -> bool:
        """Return whether it has ended; it is reaped then."""
        with GuardedProgram.lock:
            if self.process.poll() is None:
                return False
            if not self.is_ready and not self.problem:
                content = os.pread(self.errors, 65536, 0).decode("utf-8", "replace")
                *_, last = content.splitlines() or [""]
                reason = f", {one_line(last, 200)}" if last else ""
                status = ExitStatus.from_returncode(self.process.returncode)
                self.problem = f"ended at once ({status}{reason})"
            self.close()
            on_reaped, self.on_reaped = self.on_reaped, bool
        on_reaped()
        return True

    def close(self) -> None:
        """Close the file of its errors.  Idempotent."""
        self._resources.close()


def _interpreter(fallback: str | None) -> str:
    """Return the running interpreter, or `fallback` in a program that is not run by one.

    Raises:
        HostError: there is none, or this program was started in place of one.
    """
    if not _program and not os.path.isfile(_MAIN):
        raise HostError(f"{FAILED}: {_MAIN} is not a file; the package must not be in an archive")
    if _VARIABLE in os.environ:
        problem = f"this program was started as one: sys.executable is {sys.executable!r}"
        raise HostError(f"{FAILED}: {problem}, which is no Python interpreter")
    is_frozen = getattr(sys, "frozen", False)
    python = fallback if is_frozen or not sys.executable else sys.executable
    if not python:
        kind = "a frozen application" if is_frozen else "no Python interpreter"
        problem = f"sys.executable is {kind} ({sys.executable!r})"
        raise HostError(f"{FAILED}: {problem}; name an interpreter by LaunchSpec(python=...)")
    return python


def keep_program() -> None:
    """Keep the files of the guardian in memory: they may be replaced while a job runs."""
    global _program, _kept
    if _program:
        return
    texts = {}
    with suppress(OSError):  # of an archive, or no descriptor is left
        for name, path in _FILES.items():
            with open(path, encoding="utf-8") as file:
                texts[name] = file.read()
        _program, _kept = repr((_MAIN, texts)).encode(), _versions()


def _versions() -> list[tuple[int, int]]:
    """Return what identifies the present files; nothing if they are gone."""
    with suppress(OSError):
        return [(found.st_ino, found.st_mtime_ns) for found in map(os.stat, _FILES.values())]
    return []


def _open_program(resources: ExitStack) -> tuple[str, ...]:
    """Return the arguments of an interpreter: the file, or if it was replaced, the program."""
    if not _program or _versions() == _kept:
        return (_MAIN,)
    descriptor = os.memfd_create("elastic_aio-guardian-program", os.MFD_CLOEXEC)
    resources.callback(os.close, descriptor)
    os.write(descriptor, _program)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return "-c", _LOADER, str(descriptor)


_early: list[GuardedJob] = []


def list_size(sessions: int) -> int:
    """Return the bytes of the session list with a further job, of so many sessions."""
    program = GuardedProgram.present
    rows = 0 if program is None or program.is_copy else program.list.rows - len(_early)
    return (rows + sessions + 2) * ROW_SIZE  # the job, and a worker that is being started


@contextmanager
def spawned_early(plan: StopPlan, python: str | None) -> Iterator[None]:
    """Spawn the guardian with the next job of this process, and end both if none takes it.

    If that fails, the job tries again and reports the error.
    """
    with suppress(HostError):
        job = GuardedJob.create(plan)
        try:
            job.program.running_process(python)
            _early.append(job)
        except HostError:
            job.close()
    try:
        yield
    finally:
        if unused := take_early():
            unused.close()


def take_early() -> GuardedJob | None:
    """Return the job whose guardian was spawned early; it takes the place of another one."""
    return _early.pop() if _early else None
