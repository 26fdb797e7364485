"""A program below any supervisor: `child.py NOTES NAME [BEHAVIOUR...]` notes what happens to it.

Each note is a line "WHAT NAME PID NANOSECONDS" of the file NOTES.  Behaviours: `exit=CODE` ends
at once; `ready=SECONDS` prints "ready" after a time; `say=TEXT` prints a line; `stubborn` ignores
SIGTERM, as a process does that it forks; `daemon` leaves a daemon; `slow=SECONDS` takes that
long for its end; `serve=FD,VERSION` answers connections of a listening socket; `http=PORT` answers
GETs with 200, and with 503 after SIGUSR1; `exit-after=SECONDS,CODE`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time

_NOTES, _NAME, *_WORDS = sys.argv[1:]
_GIVEN = dict(word.partition("=")[::2] for word in _WORDS)


def _note(what: str) -> None:
    line = f"{what} {_NAME} {os.getpid()} {time.monotonic_ns()}\n"
    file = os.open(_NOTES, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, line.encode())
    os.close(file)


def _fork(what: str, *, daemon: bool) -> None:
    """Fork a process that only a signal ends; a daemon has another parent and session."""
    if os.fork():
        return
    if daemon:
        os.setsid()
        if os.fork():
            os._exit(0)
    _note(what)
    while True:
        signal.pause()


def _answer(listener: socket.socket, answer: bytes) -> None:
    try:
        connection, _ = listener.accept()
    except BlockingIOError:
        return  # another worker has it
    connection.settimeout(2)
    try:
        if answer.startswith(b"HTTP"):
            connection.recv(4096)
        connection.sendall(answer)
    except OSError:
        pass
    connection.close()


def _listener() -> socket.socket | None:
    if "serve" in _GIVEN:
        listener = socket.socket(fileno=int(_GIVEN["serve"].partition(",")[0]))
    elif "http" in _GIVEN:
        listener = socket.create_server(("127.0.0.1", int(_GIVEN["http"])))
    else:
        return None
    listener.setblocking(False)
    return listener


def main() -> None:
    """Behave as the words say until a signal ends it."""
    received: list[int] = []
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    stubborn = "stubborn" in _GIVEN
    signal.signal(signal.SIGTERM, signal.SIG_IGN if stubborn else lambda *_: received.append(15))
    signal.signal(signal.SIGUSR1, lambda *_: received.append(10))
    if stubborn:
        _fork("forked", daemon=False)
    if "daemon" in _GIVEN:
        _fork("daemon", daemon=True)
    _note("start")
    if "say" in _GIVEN:
        print(_GIVEN["say"], flush=True)
    if "exit" in _GIVEN:
        sys.exit(int(_GIVEN["exit"]))
    listener = _listener()
    if "ready" in _GIVEN:
        time.sleep(float(_GIVEN["ready"]))
        _note("ready")
        print("ready", flush=True)
    _serve(listener, reader, received)
    _note("term")
    time.sleep(float(_GIVEN.get("slow", 0)))
    _note("end")


def _serve(listener: socket.socket | None, reader: int, received: list[int]) -> None:
    """Answer connections until SIGTERM comes, or the time of `exit-after` is over."""
    seconds, _, code = _GIVEN.get("exit-after", "").partition(",")
    version = _GIVEN.get("serve", "").partition(",")[2]
    while signal.SIGTERM not in received:
        files = [reader, *([listener.fileno()] if listener else [])]
        ready, _, _ = select.select(files, [], [], float(seconds) if seconds else None)
        if not ready:
            sys.exit(int(code))
        if reader in ready:
            os.read(reader, 100)
        elif listener is not None:
            bad = signal.SIGUSR1 in received
            status = b"503 No" if bad else b"200 OK"
            http = b"HTTP/1.0 " + status + b"\r\nContent-Length: 0\r\n\r\n"
            _answer(listener, version.encode() if version else http)


if __name__ == "__main__":
    main()
