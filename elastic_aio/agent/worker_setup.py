"""What the workers of a job inherit beside their environment: sockets, limits, their user.

Loaded by jobs that have any of it.  `LocalRuntime` opens it before the first attempt, and closes it
when no process of the job is left.
"""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from elastic_aio import aio
from elastic_aio.errors import HostError, SpawnError, SpecError
from elastic_aio.process import children, exec_main
from elastic_aio.process.cgroups import Cgroup
from elastic_aio.process.children import Child, ChildSpec
from elastic_aio.process.listeners import Listeners
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.limits import LimitSpec
from elastic_aio.text import error_reason

Spawn = Callable[[ChildSpec], Awaitable[Child]]

_EXEC_S: Final = 10.0
"""Seconds that an exec may take, on a slow file system, until the program counts as started.  Only
a fork of this process at the wrong moment, which holds the pipe open, makes it last that long."""
_REFUSED: Final = 126


class WorkerSetup:
    """The sockets, the cgroup and the settings of the workers of one leaf; must be closed."""

    def __init__(self, spec: LaunchSpec, nproc: int, listeners: Listeners | None = None) -> None:
        """Prepare; `listeners` are the sockets of `spec` that the caller has opened, and closes."""
        self._spec = spec
        self._nproc = nproc
        self._given = listeners
        self._listeners: Listeners | None = None
        self._cgroup: Cgroup | None = None
        self._starter: ExecStarter | None = None
        self.account = Account()

    def __repr__(self) -> str:
        return f"<WorkerSetup: {self._listeners}, {self._cgroup}>"

    @property
    def descriptors(self) -> int:
        """How many descriptors of this process the sockets take, at most."""
        own = self._nproc * sum(each.reuse_port for each in self._spec.sockets)
        return 0 if self._given is not None else 2 * len(self._spec.sockets) + own

    @property
    def cgroup(self) -> str:
        """The directory of the cgroup of the workers; empty without one."""
        return "" if self._cgroup is None else self._cgroup.path

    async def open(self) -> None:
        """Bind the sockets, make the cgroup, and look the user up.

        Raises:
            SpecError: an address cannot be bound, or there is no such user or group.
            HostError: this host lacks something.
        """
        limits = self._spec.limits or LimitSpec()
        self.account = find_account(limits)
        self._starter = ExecStarter(self._spec.python)
        self._listeners = self._given
        if self._given is None and self._spec.sockets:
            self._listeners = Listeners(self._spec.sockets, self.account.owner)
            await self._listeners.open(self._nproc)
        if limits.cgroup:
            # In a thread: the kernel takes long to move a process.  Its end is waited for, so that
            # what it has made is known.
            await aio.run_shielded(
                lambda: aio.run_in_thread(self._make_cgroup, limits, daemon=True)
            )

    def _make_cgroup(self, limits: LimitSpec) -> None:
        self._cgroup = self._cgroup or Cgroup.make(limits.cgroup)

    async def spawn_worker(self, spawn: Spawn, spec: ChildSpec, local_rank: int) -> Child:
        """Start a worker with all of it, or raise SpawnError (see `ExecStarter.start`)."""
        settings = self._settings()
        descriptors: tuple[int, ...] = ()
        if (listeners := self._listeners) is not None:
            try:
                descriptors = listeners.descriptors(local_rank)
            except OSError as error:
                message = f"sockets: cannot be bound: {error_reason(error)}"
                raise SpawnError(message, permanent=False, exit_code=1) from error
            settings["sockets"] = ",".join(map(str, descriptors))
            settings["names"] = listeners.names
        return await self._start(spawn, spec, settings, descriptors)

    async def spawn_command(self, spawn: Spawn, spec: ChildSpec) -> Child:
        """Start another command of the job, which has the limits and no sockets."""
        settings = self._settings()
        return await self._start(spawn, spec, settings, ()) if settings else await spawn(spec)

    async def _start(
        self, spawn: Spawn, spec: ChildSpec, settings: dict[str, str], descriptors: tuple[int, ...]
    ) -> Child:
        assert self._starter is not None, "open() comes first"
        own = {name: text for name, text in self.account.env.items() if name not in self._spec.env}
        spec = replace(spec, env={**spec.env, **own})
        return await self._starter.start(spawn, spec, settings, descriptors)

    def _settings(self) -> dict[str, str]:
        limits, settings = self._spec.limits or LimitSpec(), {}
        if self._cgroup is not None:
            settings["cgroup"] = self._cgroup.path
        for name in ("oom_score_adj", "nice", "umask"):
            if (value := getattr(limits, name)) is not None:
                settings[name] = str(value)
        return settings | self.account.settings

    def kill(self) -> None:
        """Kill what is in the cgroup: the last step of a stop."""
        if self._cgroup is not None:
            self._cgroup.kill()

    def close_sockets(self) -> None:
        """Close the sockets that were opened here.  Idempotent."""
        if self._listeners is not None and self._given is None:
            self._listeners.close()

    async def aclose(self) -> None:
        """Close the sockets and remove the cgroup.  Idempotent."""
        self.close_sockets()
        if self._cgroup is not None:
            await self._cgroup.aclose()


class Account(Struct, frozen=True):
    """The user that workers run as: settings (see `exec_main`), and variables for it."""

    settings: dict[str, str] = {}
    env: dict[str, str] = {}

    @property
    def owner(self) -> tuple[int, int]:
        """User and group of what is made for the workers; -1: of this process."""
        return int(self.settings.get("user", -1)), int(self.settings.get("group", -1))


def find_account(limits: LimitSpec) -> Account:
    """Return the user and group of some limits, or raise SpecError: this host has no such one."""
    if limits.user is None and limits.group is None:
        return Account()
    uid, gid, user = limits.user, limits.group, None
    try:
        if uid is not None:
            user = pwd.getpwnam(uid) if isinstance(uid, str) else pwd.getpwuid(uid)
            uid = user.pw_uid
    except KeyError:
        if isinstance(uid, str) or gid is None:
            needs = "" if isinstance(uid, str) else ": needs a group"
            raise SpecError("limits.user", uid, f"is no user of this host{needs}") from None
    try:
        if isinstance(gid, str):
            gid = grp.getgrnam(gid).gr_gid
    except KeyError:
        raise SpecError("limits.group", gid, "is no group of this host") from None
    env: dict[str, str] = {}
    if user is not None:
        env = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name}
        gid = user.pw_gid if gid is None else gid
    assert gid is not None, "a user without an entry needs a group"
    groups = [gid] if user is None else os.getgrouplist(user.pw_name, gid)
    # Without a privilege the kernel refuses even what changes nothing: setgroups(2).
    if os.geteuid() and uid in (None, os.geteuid()) and gid == os.getegid():
        return Account({}, env)
    settings = {"groups": ",".join(map(str, groups)), "group": str(gid)}
    return Account(settings if uid is None else {**settings, "user": str(uid)}, env)


# ------------------------------------------------------------------- an exec by way of another


class ExecStarter:
    """Starts programs through a bare interpreter, which sets what they inherit (`exec_main`).

    That takes ten milliseconds for each start.  The package may be replaced while a job runs, so
    the source of `exec_main` is kept in memory.
    """

    def __init__(self, python: str | None) -> None:
        """Choose the interpreter: this one, or `python` in a program that is not run by one.

        Raises:
            HostError: there is none, or its program cannot be read.
        """
        is_own = bool(sys.executable) and not getattr(sys, "frozen", False)
        if not (chosen := sys.executable if is_own else python):
            problem = "no Python interpreter; name one by LaunchSpec(python=...)"
            raise HostError(f"cannot pass sockets or limits to workers: {problem}")
        try:
            with open(exec_main.__file__, encoding="utf-8") as file:
                source = file.read()
        except OSError as error:
            why = error_reason(error)
            raise HostError(f"cannot pass sockets or limits to workers: {why}") from error
        self._command = (chosen, "-I", "-S", "-c", source)

    def __repr__(self) -> str:
        return f"<ExecStarter by {self._command[0]}>"

    async def start(
        self,
        spawn: Spawn,
        spec: ChildSpec,
        settings: dict[str, str],
        descriptors: tuple[int, ...] = (),
    ) -> Child:
        """Start `spec` by `spawn` with `settings`, and return when its program is executed.

        `descriptors` are inherited for the settings only.

        Cancellation: the child is killed.

        Raises:
            SpawnError: the program cannot be executed, or a setting be made; it names that one.
        """
        children.check_directory(spec)
        children.check_program(spec)
        taken = range(exec_main.FIRST, exec_main.FIRST + len(descriptors))
        if clash := set(taken) & set(spec.pass_fds):
            problem = f"sockets: descriptor {min(clash)} is in use by this program"
            raise SpawnError(problem, permanent=False, exit_code=1)
        if "LC_CTYPE" not in spec.env:
            settings = {**settings, "unset": "LC_CTYPE"}  # which an interpreter sets (PEP 538)
        try:
            reader, writer = os.pipe2(os.O_CLOEXEC)
        except OSError as error:
            raise children.spawn_error(error, spec) from error
        try:
            try:
                words = exec_main.format_words(settings, writer, spec.argv)
                inherited = (*spec.pass_fds, *descriptors, writer)
                argv = (*self._command, *words)
                child = await spawn(replace(spec, argv=argv, pass_fds=inherited))
            finally:
                os.close(writer)
            try:
                report = await _read_report(reader, child)
            except BaseException:  # a cancellation too: no caller knows the child
                child.send_signal(signal.SIGKILL)
                raise
        finally:
            os.close(reader)
        self._check(report, spec, settings)
        return child

    def _check(self, report: bytes, spec: ChildSpec, settings: dict[str, str]) -> None:
        if not report:
            problem = f"the interpreter {self._command[0]} has ended before"
            message = f"cannot run {spec.argv[0]}: {problem}"
            raise SpawnError(message, permanent=False, exit_code=1)
        if (refused := exec_main.parse_report(report)) is None:
            return
        field, number = refused
        error = OSError(number, os.strerror(number))
        if field == exec_main.EXEC:
            raise children.spawn_error(error, spec)
        if field == "groups":  # of the user, or else of the group alone
            field = "user" if "user" in settings else "group"
        message = f"{_FIELDS.get(field, f'limits.{field}')}: {error_reason(error)}"
        raise SpawnError(message, permanent=True, exit_code=_REFUSED)


_FIELDS: Final = {"sockets": "sockets", "cgroup": "limits"}
"""The fields of a spec by the names of settings, where they differ."""


async def _read_report(reader: int, child: Child) -> bytes:
    """Read what the child reports until its exec or its end."""
    os.set_blocking(reader, False)
    report = b""
    while True:
        has_ended = child.exited.done()
        try:
            data = os.read(reader, 256)
        except BlockingIOError:
            # A fork of this process may hold the other end: the end of the child counts too.
            if has_ended or not await _wait(reader, child, _EXEC_S if report else None):
                break
            continue
        if not data:
            break
        report += data
    if report != exec_main.READY:
        await asyncio.wait([child.exited])  # it exits at once
    return report


async def _wait(reader: int, child: Child, timeout: float | None) -> bool:
    """Wait until there is something to read or the child has ended; return False at the timeout."""
    readable = aio.create_task(aio.wait_readable([reader]))
    try:
        waited: list[asyncio.Future[Any]] = [readable, child.exited]
        done, _ = await asyncio.wait(waited, timeout=timeout, return_when="FIRST_COMPLETED")
    finally:
        await aio.cancel_and_wait([readable])
    return bool(done)
