"""The listening sockets of a job: bound once, inherited by its workers, closed at the end."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from msgspec import Struct

from elastic_aio.aio import run_in_thread
from elastic_aio.errors import HostError, SpecError
from elastic_aio.process import proc
from elastic_aio.sockets import BACKLOG, Address, look_up, port_owner
from elastic_aio.spec.sockets import SocketSpec
from elastic_aio.text import error_reason

_LACK = {*proc.LACK, errno.ENOBUFS}


class Listeners:
    """The sockets of one leaf; must be closed.

    Workers get them from number 3 on.  As the sockets have the lowest free numbers here too, no
    descriptor that is opened later, for a worker to inherit it, has one of those.
    """

    def __init__(self, specs: Sequence[SocketSpec], owner: tuple[int, int] = (-1, -1)) -> None:
        """Prepare; nothing is bound before `open`.  `owner`: user and group of paths; -1: ours."""
        self._specs = specs
        self._owner = owner
        # By address, and for a socket of one worker by local rank.
        self._sockets: dict[tuple[str, int | None], socket.socket] = {}
        self._addresses: dict[str, Address] = {}
        self._paths: dict[str, _Path] = {}

    def __repr__(self) -> str:
        return f"<Listeners at {', '.join(spec.address for spec in self._specs)}>"

    @property
    def names(self) -> str:
        """The value of `LISTEN_FDNAMES`."""
        return ":".join(spec.name or "unknown" for spec in self._specs)

    async def open(self, nproc: int, former: Sequence[Listeners] = ()) -> None:
        """Bind all sockets of so many workers, which listen from now on.

        An address that one of the `former` has is taken over: it is open until both are closed.

        Cancellation: nothing is left open.

        Raises:
            SpecError: an address is in use, or is none of this host.
            HostError: no descriptor is left.
        """
        try:
            for spec in self._specs:
                if not any(one._share(spec, self) for one in former):
                    await self._open(spec, nproc)
        except BaseException:  # a cancellation too
            self.close()
            raise

    async def _open(self, spec: SocketSpec, nproc: int) -> None:
        try:
            if spec.path is not None:
                self._sockets[spec.address, None] = self._bind_path(spec.path, spec.mode)
                return
            self._addresses[spec.address] = await _resolve(*spec.host_port)
            for local_rank in range(nproc) if spec.reuse_port else (None,):
                self._sockets[spec.address, local_rank] = self._bind(spec)
        except OSError as error:
            raise await _refusal(spec, error) from error

    def _share(self, spec: SocketSpec, new: Listeners) -> bool:
        """Give other listeners a copy of the sockets at an address; return whether there are."""
        found = {key: one for key, one in self._sockets.items() if key[0] == spec.address}
        if not found or ((spec.address, None) in found) is spec.reuse_port:
            return False
        for key, one in found.items():
            new._sockets[key] = one.dup()
        if spec.address in self._addresses:
            new._addresses[spec.address] = self._addresses[spec.address]
        if (path := self._paths.get(spec.address)) is not None:
            path.users += 1
            new._paths[spec.address] = path
            new._set_access(path.name, spec.mode)
        return True

    def descriptors(self, local_rank: int) -> tuple[int, ...]:
        """Return the sockets of a worker, in their order, or raise OSError.

        A worker beyond those of `open` gets sockets of its own now, where each worker has them.
        """
        return tuple(self._socket(spec, local_rank).fileno() for spec in self._specs)

    def _socket(self, spec: SocketSpec, local_rank: int) -> socket.socket:
        key = spec.address, local_rank if spec.reuse_port else None
        if key not in self._sockets:
            self._sockets[key] = self._bind(spec)
        return self._sockets[key]

    def _bind(self, spec: SocketSpec) -> socket.socket:
        family, address = self._addresses[spec.address]
        with ExitStack() as stack:
            sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if spec.reuse_port:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address[0] != "::")
            sock.bind(address)
            sock.listen(BACKLOG)
            stack.pop_all()  # it stays open
        return sock

    def _bind_path(self, path: str, mode: int) -> socket.socket:
        with ExitStack() as stack:
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            if _is_stale(path):
                os.unlink(path)
            sock.bind(path)
            self._paths[f"unix://{path}"] = _Path(path, os.stat(path))
            self._set_access(path, mode)  # before it listens: until then no client gets in
            sock.listen(BACKLOG)
            stack.pop_all()  # it stays open
        return sock

    def _set_access(self, path: str, mode: int) -> None:
        os.chmod(path, mode)
        os.chown(path, *self._owner, follow_symlinks=False)

    def close(self) -> None:
        """Close all sockets, and remove the paths that are still theirs.  Idempotent."""
        for sock in self._sockets.values():
            sock.close()
        self._sockets.clear()
        while self._paths:
            _, path = self._paths.popitem()
            path.users -= 1
            with suppress(OSError):  # it was removed
                if not path.users and os.path.samestat(os.stat(path.name), path.made):
                    os.unlink(path.name)


class _Path(Struct):
    """The path of a socket that listeners have made; `users` of them have it open."""

    name: str
    made: os.stat_result
    users: int = 1


def _is_stale(path: str) -> bool:
    """Return whether a path is a socket at which no process listens.

    The kernel knows the paths of this network namespace (proc_pid_net(5)): a server is not
    disturbed by a connection.
    """
    if not os.path.lexists(path) or not stat.S_ISSOCK(os.lstat(path).st_mode):
        return False
    with open("/proc/self/net/unix", "rb") as file:
        if any(b" 00010000 " in row and row.endswith(b" %s\n" % os.fsencode(path)) for row in file):
            return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        return client.connect_ex(path) == errno.ECONNREFUSED


async def _resolve(host: str | None, port: int) -> Address:
    """Return the address of a host, an IPv4 one if it has one; None is all addresses."""
    if host is None:
        is_dual = socket.has_dualstack_ipv6()
        return (socket.AF_INET6, ("::", port)) if is_dual else (socket.AF_INET, ("0.0.0.0", port))
    return min(await look_up(host, port), key=lambda found: found[0] != socket.AF_INET)


async def _refusal(spec: SocketSpec, error: OSError) -> SpecError | HostError:
    """Return the error of an address that cannot be bound."""
    reason = error_reason(error)
    if error.errno in _LACK:
        return HostError(f"cannot open the sockets: {reason}")
    if error.errno == errno.EADDRINUSE and spec.path is None:
        owner = await run_in_thread(port_owner, spec.host_port[1], daemon=True)
        reason += f" by {owner}" if owner else ""
    return SpecError("sockets", spec.address, f"cannot be bound: {reason}")
