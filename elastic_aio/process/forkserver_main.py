"""The fork server: imports the workers' modules once, and forks workers on request.

Run as `python -u forkserver_main.py SOCKET SETTINGS`, by `forkserver`; ends when the other end of
its socket is closed.  It starts no thread and no event loop, so that its forks are clean copies.
Only a parent can reap: this process reaps the workers and reports their status.  So a signal to all
processes of a job must not end it; its workers begin without what keeps such signals away.
"""

from __future__ import annotations

import errno
import gc
import os
import pickle
import resource
import select
import signal
import socket
import sys
from typing import Any, NoReturn

# Descriptors in one message: the kernel's limit (SCM_MAX_FD).
_DESCRIPTORS_MAX = 253
# Characters of an error that are sent: a message has to fit into the client's buffer.
_TEXT_MAX = 8192
# These end the server while it imports modules.
_STOPS = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM}
# Not blocked meanwhile: what the kernel sends for faults, or a program that a module starts needs.
_LEFT = {signal.SIGABRT, signal.SIGBUS, signal.SIGCHLD, signal.SIGFPE, signal.SIGILL}
_LEFT |= {signal.SIGPIPE, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP}
# Imported once, like the user's modules.
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_OURS = ("elastic_aio.worker.bootstrap", "elastic_aio.worker.forked", "elastic_aio.worker.scripts")


def main() -> int:
    """Import the modules, then fork on request; return the exit code."""
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        settings = _read(int(sys.argv[2]))
        # The first entry is the directory of this file.
        server = _Server(channel, sys.path[0 if sys.flags.safe_path else 1 :])
        try:
            server.serve(settings)
        except (BrokenPipeError, ConnectionResetError):
            return 0  # the client is gone
        except OSError as error:
            # Without an answer the client would wait for ever; it notices the end.
            print(f"fork server: {error}", file=sys.stderr)  # noqa: T201  # its only output
            return 1
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
        self._poller = select.poll()
        self._poller.register(channel, select.POLLIN)
        self._handlers: dict[int, Any] = {}  # of workers, for the signals that are ignored here

    def serve(self, settings: dict[str, Any]) -> None:
        # Blocked: handlers that modules install are the workers'.  Their threads inherit that.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _STOPS - _LEFT)
        # Another interpreter's own library goes first.
        path = [*self._path, *(p for p in settings["path"] if p not in self._path)]
        sys.argv[:] = settings["argv"]
        directory = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Of the same package as the launcher, although another copy may be installed.
            sys.path[:] = [_ROOT, *path]
            for name in _OURS:
                __import__(name)
            sys.path[:] = path
            self._set_path(settings)
            for name in settings["preload"]:
                __import__(name)
        except BaseException as error:  # noqa: BLE001  # a user's module can raise anything
            from elastic_aio.worker.bootstrap import describe_error

            text = f"cannot preload {name!r}: {describe_error(error)}"
            self._send("failed", text[:_TEXT_MAX])
            return
        # Workers begin in the first directory, and their exits are for this process.
        os.fchdir(directory)
        os.close(directory)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Ignored too, since the threads of modules do not block them.  A worker that is being
        # forked keeps a signal until it has its own handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._handlers = {one: signal.signal(one, signal.SIG_IGN) for one in _STOPS}
        # The present objects are exempt from the children's collections: their pages stay shared.
        gc.collect()
        gc.freeze()
        self._send("ready")
        while True:
            for descriptor, _ in self._poller.poll():
                if descriptor in self._workers:
                    self._reap(descriptor)
                elif not self._on_request():
                    return

    def _set_path(self, settings: dict[str, Any]) -> None:
        from elastic_aio.worker import scripts

        if settings["program"]:
            sys.path[:] = [*scripts.first_path(settings["program"]), *self._path]
        elif settings["python"] == sys.executable:
            sys.path[:] = settings["path"]

    def _send(self, *message: Any, pidfd: int | None = None) -> None:
        descriptors = [] if pidfd is None else [pidfd]
        socket.send_fds(self._channel, [pickle.dumps(message)], descriptors)

    def _reap(self, descriptor: int) -> None:
        pid = self._workers.pop(descriptor)
        self._poller.unregister(descriptor)
        os.close(descriptor)
        _, status, rusage = os.wait4(pid, 0)
        self._send("exited", pid, status, tuple(rusage))

    def _on_request(self) -> bool:
        """Serve one request; return False if the client has closed the socket."""
        content, descriptors, flags, _ = socket.recv_fds(
            self._channel, 1, _DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
        )
        if not content:
            return False
        if flags & socket.MSG_CTRUNC:  # no descriptor is left for some of them
            for descriptor in descriptors:
                os.close(descriptor)
            self._send("refused", errno.EMFILE)
            return True
        request = _read(descriptors[0])  # closes it
        try:
            pid = os.fork()
        except OSError as error:
            self._send("refused", error.errno)
        else:
            if pid == 0:
                self._run_worker(request, descriptors[1:])
            self._on_forked(pid)
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        return True

    def _on_forked(self, pid: int) -> None:
        pidfd = -1
        try:
            pidfd = os.pidfd_open(pid)  # only this process reaps: still this worker's
            self._send("started", pid, pidfd=pidfd)
        except OSError as error:
            # No descriptor is left, or too many are in flight (unix(7)).
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            if pidfd >= 0:
                os.close(pidfd)
            self._send("refused", error.errno)
            return
        self._workers[pidfd] = pid
        self._poller.register(pidfd, select.POLLIN)

    def _run_worker(self, request: dict[str, Any], descriptors: list[int]) -> NoReturn:
        from elastic_aio.worker import bootstrap, forked, scripts
        from elastic_aio.worker.context import NOTIFY_FD

        streams, passed = descriptors[:3], descriptors[3:]

        def detach() -> None:
            self._channel.close()
            for pidfd in self._workers:
                os.close(pidfd)
            if (soft := request["soft_limit"]) is not None:
                _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            if request["cpus"]:
                os.sched_setaffinity(0, request["cpus"])
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())

        def call() -> int:
            for descriptor in streams:
                os.close(descriptor)
            argv = request["argv"]
            arguments = argv[argv.index("-u") + 1 :]  # after the interpreter and its flags
            numbers = dict(zip(request["numbers"], passed, strict=True))
            # The socket is inherited under another number than the launcher's.
            notify = numbers.get(int(request["env"].get(NOTIFY_FD, -1)))
            if notify is not None:
                os.environ[NOTIFY_FD] = str(notify)
                os.set_inheritable(notify, True)
            if arguments[0] == bootstrap.MAIN:
                return bootstrap.main(arguments[1:], numbers)
            sys.path[:] = self._path
            return scripts.run_as_interpreter(arguments)

        forked.run_forked(detach, streams, request["cwd"], request["env"], call)


if __name__ == "__main__":
    sys.exit(main())
