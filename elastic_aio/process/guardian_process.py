"""One guardian process: how it is spawned, and what it guards.

Its interpreter takes some 8 ms to start, and no worker may start before.  So nothing here needs an
event loop or asyncio: the command line spawns the guardian before it imports the launcher
(`spawned_early`), and the runtime of the job takes it over.
"""

from __future__ import annotations

import _socket
import fcntl
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from msgspec import Struct

from elastic_aio.errors import HostError
from elastic_aio.process import proc
from elastic_aio.spec.stop import StopPlan, StopStep
from elastic_aio.text import error_reason

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
_NAMES = ("proc", "descendants", "stop_order", "guardian_main")
_FILES = {name: os.path.join(os.path.dirname(_MAIN), f"{name}.py") for name in _NAMES}
_program = b""
_kept: list[tuple[int, int]] = []
# Set in the guardian's environment, so that an application that runs itself notices.
_VARIABLE = "ELASTIC_AIO_GUARDIAN"
# Descriptors of one message (SCM_MAX_FD in the kernel), of which some are left free.
_PIPES_EACH = 250


class KeptPipes:
    """The ends of the workers' pipes that this process reads, kept open for the guardian.

    They are sent to a Unix socket that the guardian inherits, and stay on the way: it sleeps until
    this process has ended, and then reads them (SCM_RIGHTS in unix(7)).
    """

    def __init__(self) -> None:
        """Open the socket, or raise an OSError."""
        self._sender, self._receiver = _socket.socketpair(
            _socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC
        )
        self.descriptor = self._receiver.fileno()
        """The end that a guardian inherits."""
        for end in (self._sender, self._receiver):
            end.setblocking(False)
        self._is_empty = True

    def replace(self, descriptors: Sequence[int]) -> None:
        """Keep only these pipes; the last ones are not kept if the user has too many on the way."""
        if self._is_empty and not descriptors:
            return
        self._is_empty = not descriptors
        with suppress(OSError):  # BlockingIOError: no message is left
            while True:
                _, ancillary, _, _ = self._receiver.recvmsg(1, _socket.CMSG_SPACE(4 * _PIPES_EACH))
                for _, _, content in ancillary:
                    for (descriptor,) in struct.iter_unpack("i", content):
                        os.close(descriptor)
        with suppress(OSError):
            for start in range(0, len(descriptors), _PIPES_EACH):
                part = descriptors[start : start + _PIPES_EACH]
                content = struct.pack(f"{len(part)}i", *part)
                self._sender.sendmsg([b"!"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, content)])

    def close(self) -> None:
        """Close the socket, and what is on the way.  Idempotent."""
        self._sender.close()
        self._receiver.close()


class GuardedJob(Struct, frozen=True):
    """What a guardian knows of its job.

    `marker` names the job's environment variable; `since` is when the job began, in clock
    ticks since boot; `session_list` is a descriptor (see `descendants`).
    """

    marker: str
    since: int
    session_list: int
    pipes: KeptPipes

    @classmethod
    def create(cls) -> GuardedJob:
        """Begin a job; `close` must follow.

        The session list is locked, which says that this process runs and is still this
        program.  Closing the descriptor, or another one of this file, unlocks it.

        Raises:
            HostError: the kernel has no anonymous files or pidfds, or no descriptor is left.
        """
        if not hasattr(os, "pidfd_open") or not hasattr(os, "memfd_create"):
            raise HostError("elastic_aio needs Linux 5.3 or newer (pidfd_open, memfd_create)")
        try:
            with ExitStack() as undo:
                session_list = os.memfd_create("elastic_aio-sessions", os.MFD_CLOEXEC)
                undo.callback(os.close, session_list)
                marker = f"ELASTIC_AIO_JOB_{os.urandom(16).hex()}"
                # One tick earlier: processes of the present tick may be older or newer.
                job = cls(marker, proc.ticks_now() - 1, session_list, KeptPipes())
                undo.callback(job.pipes.close)
                job.lock()
                undo.pop_all()
                return job
        except OSError as error:
            raise HostError(f"cannot create an anonymous file: {error_reason(error)}") from error

    def lock(self) -> None:
        """Lock the session list, or raise an OSError if a guardian has locked it."""
        fcntl.lockf(self.session_list, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        """Let the guardian end the job as if this process had ended; needs no event loop."""
        fcntl.lockf(self.session_list, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the session list, which a guardian takes for the end of this process."""
        self.pipes.close()
        os.close(self.session_list)


class GuardianProcess:
    """A guardian that has been spawned; `close` must follow."""

    def __init__(self, job: GuardedJob, plan: StopPlan, python: str | None) -> None:
        """Spawn it; for arguments and errors, see `Guardian` and its `start`."""
        self.job = job
        self.python = _interpreter(python)
        first = plan.steps[0] if plan.steps else StopStep(signal.SIGKILL, 0)
        grace = min(first.grace, plan.guardian_grace)
        with ExitStack() as resources:
            try:
                self.errors = os.memfd_create("elastic_aio-guardian", os.MFD_CLOEXEC)
                """Descriptor of the file that is its stderr."""
                resources.callback(os.close, self.errors)
                self.report, writer = os.pipe()
                """Descriptor of the pipe through which it reports that it works."""
                resources.callback(os.close, self.report)
                with open(writer, "wb", buffering=0):
                    numbers = (writer, job.session_list, job.pipes.descriptor)
                    program = _open_program(resources)
                    scope = "all" if plan.reaches_all(first) else "leaders"
                    words = (*numbers, job.marker, job.since, first.signal, grace, scope)
                    self.process = subprocess.Popen(
                        (self.python, "-I", "-S", *program, *map(str, words)),
                        env={**os.environ, _VARIABLE: "1"},
                        cwd="/",  # it must not keep a file system from being unmounted
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=self.errors,
                        pass_fds=(*numbers, *map(int, program[2:])),
                        start_new_session=True,
                    )
            except OSError as error:
                reason = error_reason(error)
                raise HostError(f"{FAILED}: cannot run {self.python}: {reason}") from error
            self._resources = resources.pop_all()

    def __repr__(self) -> str:
        return f"<GuardianProcess {self.process.pid}>"

    def close(self) -> None:
        """Close the pipe and the file.  Idempotent."""
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


_early: list[GuardianProcess] = []


@contextmanager
def spawned_early(plan: StopPlan, python: str | None) -> Iterator[None]:
    """Spawn the guardian of the next job of this process, and end it if no job takes it.

    If that fails, the job tries again and reports the error.
    """
    with suppress(HostError):
        job = GuardedJob.create()
        try:
            _early.append(GuardianProcess(job, plan, python))
        except HostError:
            job.close()
    try:
        yield
    finally:
        if unused := take_early():
            unused.process.kill()
            unused.process.wait()
            unused.close()
            unused.job.close()


def take_early() -> GuardianProcess | None:
    return _early.pop() if _early else None
