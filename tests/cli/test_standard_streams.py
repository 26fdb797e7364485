"""What commands print is whole, whatever their standard output is."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import subprocess
import termios
import tty
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import pytest

from tests.support.children import until_sync
from tests.support.cli import CLI, environment, run_cli, run_program

PAGE = 4096
POLL = {"x86_64": "7 ", "aarch64": "73 "}[os.uname().machine]  # poll, ppoll
WORKER = 'for i in range(6000): print(f"LINE-{i} " + "x" * 90)'


def open_pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PAGE)
    return reader, writer


def open_terminal() -> tuple[int, int]:
    reader, writer = os.openpty()
    tty.setraw(writer)
    return reader, writer


def open_socket() -> tuple[int, int]:
    reader, writer = socket.socketpair()
    return reader.detach(), writer.detach()


@contextmanager
def unread(kind: str, argv: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start a command, whose output does not block and is full; yield it and the other end."""
    with ExitStack() as stack:
        reader, writer = {"pipe": open_pipe, "terminal": open_terminal, "socket": open_socket}[
            kind
        ]()
        stack.callback(os.close, reader)
        os.set_blocking(writer, False)
        process = subprocess.Popen(
            argv, stdout=writer, stderr=subprocess.PIPE, env=environment({"PYTHONUNBUFFERED": None})
        )
        stack.enter_context(process)
        stack.callback(process.kill)  # before it is waited for

        def count() -> int:
            found = array.array("i", [0])
            fcntl.ioctl(reader, termios.FIONREAD, found)
            return found[0]

        until_sync(lambda: count() >= PAGE - 1, "output that is not read")
        assert not os.get_blocking(writer)  # as the other programs that have it need it
        os.close(writer)
        yield process, reader


def read_all(reader: int, process: subprocess.Popen[bytes]) -> bytes:
    """Return all, read by small pieces."""
    parts = []
    while True:
        try:
            part = os.read(reader, 500)
        except OSError:  # EIO: nothing has the terminal open
            part = b""
        if not part:
            break
        parts.append(part)
    return b"".join(parts)


def stderr_of(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stderr is not None
    return process.stderr


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["pipe", "terminal", "socket"])
@pytest.mark.parametrize("words", ["run --help", "help what-happens", "completion bash"])
def test_an_output_that_does_not_block(kind: str, words: str) -> None:
    """O_NONBLOCK was set by another program that has the same pipe, terminal or socket."""
    argv = [*CLI, *words.split()]
    expected = run_program(argv).out.encode()
    with unread(kind, argv) as (process, reader):
        assert read_all(reader, process) == expected
        assert (process.wait(), stderr_of(process).read()) == (0, b"")


@pytest.mark.e2e
def test_all_lines_of_a_log(tmp_path: Path) -> None:
    script = tmp_path / "w.py"
    script.write_text(WORKER)
    ended = run_cli("--log-dir", tmp_path / "logs", "--redirects", 3, script)
    assert ended.code == 0
    argv = [*CLI, "logs", str(tmp_path / "logs"), "-n", "9000"]
    with unread("pipe", argv) as (process, reader):
        assert read_all(reader, process).count(b"LINE-") == 6000
        assert process.wait() == 0


@pytest.mark.e2e
@pytest.mark.parametrize("words", ["run --help", "completion bash", "help what-happens"])
def test_a_reader_that_exits(words: str) -> None:
    """While the command waits for it; no command has a word to say about that."""
    with unread("pipe", [*CLI, *words.split()]) as (process, reader):
        closed = os.open(os.devnull, os.O_RDONLY)
        os.dup2(closed, reader)
        os.close(closed)
        assert (process.wait(), stderr_of(process).read()) == (141, b"")


@pytest.mark.e2e
@pytest.mark.parametrize("words", ["--help", "--version", "completion bash", "run --help"])
def test_a_disk_that_is_full(words: str) -> None:
    with open("/dev/full", "wb") as output:
        ended = subprocess.run(
            [*CLI, *words.split()], stdout=output, stderr=subprocess.PIPE, check=False
        )
    said = b"aio-elastic: no space left on device\n"
    assert (ended.returncode, ended.stderr) == (1, said)


@pytest.mark.e2e
def test_the_line_of_an_error() -> None:
    """It waits too, and stands behind what another program has written."""
    reader, writer = open_pipe()
    os.set_blocking(writer, False)
    os.write(writer, b"x" * PAGE)
    process = subprocess.Popen([*CLI, "no-command"], stderr=writer)
    os.close(writer)
    path = Path(f"/proc/{process.pid}/syscall")
    until_sync(lambda: path.read_text().startswith(POLL), "a command that waits")
    said = read_all(reader, process)
    os.close(reader)
    assert process.wait() == 2
    assert said.startswith(b"x" * PAGE + b"aio-elastic: command: must be ")
    assert said.endswith(b"(got 'no-command')\n")
