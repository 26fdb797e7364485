"""The server that forks workers: imports what they need once, and then only forks.

Run as `python -u forkserver_main.py SOCKET SETTINGS`, by `forkserver`; ends when the
other end of its socket is closed.  It starts no thread and no loop, so that a fork
of it is a clean copy.  Whoever forks a worker must reap it: this process does, and
tells the true status.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import socket
import sys
from typing import Any, NoReturn

__all__ = ["main"]

# What one message can bring: the kernel's limit (SCM_MAX_FD).
_DESCRIPTORS_MAX = 253
# Imported once, as what users preload.
_OURS = ("elastic_aio.worker.bootstrap", "elastic_aio.worker.forked", "elastic_aio.worker.scripts")


def main() -> int:
    """Import the modules, then fork on request; return the exit code."""
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        settings = _read(int(sys.argv[2]))
        _Server(channel, sys.path[1:]).serve(settings)
    return 0


def _read(descriptor: int) -> Any:
    with open(descriptor, "rb") as file:
        file.seek(0)
        return pickle.loads(file.read())


class _Server:
    def __init__(self, channel: socket.socket, path: list[str]) -> None:
        channel.set_inheritable(False)
        self._channel = channel
        self._path = path  # of a bare interpreter
        self._workers: dict[int, int] = {}  # pid by pidfd
        self._waiting = select.poll()
        self._waiting.register(channel, select.POLLIN)

    def serve(self, settings: dict[str, Any]) -> None:
        sys.path[:] = settings["path"]
        sys.argv[:] = settings["argv"]
        try:
            for name in (*_OURS, *settings["preload"]):
                __import__(name)
        except BaseException as error:  # noqa: BLE001  # a user's module can raise anything
            self._tell("failed", f"cannot import {name}: {type(error).__name__}: {error}")
            return
        # What is there now is not looked at by any child's collections, and stays shared.
        gc.collect()
        gc.freeze()
        self._tell("ready")
        while True:
            for descriptor, _ in self._waiting.poll():
                if descriptor in self._workers:
                    self._reap(descriptor)
                elif not self._heed():
                    return

    def _tell(self, *words: Any, pidfd: int | None = None) -> None:
        try:
            descriptors = [] if pidfd is None else [pidfd]
            socket.send_fds(self._channel, [pickle.dumps(words)], descriptors)
        except OSError:
            pass  # nobody is there; the next look at the socket ends us

    def _reap(self, descriptor: int) -> None:
        pid = self._workers.pop(descriptor)
        self._waiting.unregister(descriptor)
        os.close(descriptor)
        _, status, used = os.wait4(pid, 0)
        self._tell("exited", pid, status, tuple(used))

    def _heed(self) -> bool:
        """Serve one request; tell whether there may be more."""
        word, descriptors, _, _ = socket.recv_fds(
            self._channel, 1, _DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
        )
        if not word:
            return False
        request = _read(descriptors[0])  # closes it
        try:
            pid = os.fork()
        except OSError as error:
            self._tell("refused", error.errno)
        else:
            if pid == 0:
                self._live(request, descriptors[1:])
            self._take_in(pid)
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        return True

    def _take_in(self, pid: int) -> None:
        try:
            pidfd = os.pidfd_open(pid)  # not reaped before we do it: still this worker's
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._tell("refused", error.errno)
            return
        self._workers[pidfd] = pid
        self._waiting.register(pidfd, select.POLLIN)
        self._tell("started", pid, pidfd=pidfd)

    def _live(self, request: dict[str, Any], descriptors: list[int]) -> NoReturn:
        """Be a worker, to its end; nothing above us on the stack is ours to return to."""
        from elastic_aio.worker import forked

        code = 1
        try:
            os.setsid()
            self._channel.close()
            for pidfd in self._workers:
                os.close(pidfd)
            forked.forget_parent()
            forked.take_streams(*descriptors[:3])
            for descriptor in descriptors[:3]:
                os.close(descriptor)
            if request["cwd"] is not None:
                os.chdir(request["cwd"])
            os.environ.clear()
            os.environ.update(request["env"])
            forked.renew_streams()
            code = self._run(request, descriptors[3:])
        except BaseException as error:  # noqa: BLE001  # there is nobody to raise it to
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            forked.leave(code)
        raise SystemExit(code)  # never reached

    def _run(self, request: dict[str, Any], descriptors: list[int]) -> int:
        from elastic_aio.worker import bootstrap, scripts

        argv = request["argv"]
        words = argv[argv.index("-u") + 1 :]  # after the interpreter and its flags
        if words[0] == bootstrap.MAIN:
            return bootstrap.main(
                words[1:], dict(zip(request["numbers"], descriptors, strict=True))
            )
        sys.path[:] = self._path
        return scripts.run_as_interpreter(words)


if __name__ == "__main__":
    sys.exit(main())
