"""Where control sockets are: only in a directory of this user alone."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_aio.control import sockets
from elastic_aio.control.sockets import (
    CONTROL_DIR,
    directories,
    has_ended,
    make_directory,
    open_peer,
)


@pytest.fixture(autouse=True)
def fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that is used without XDG_RUNTIME_DIR; it does not exist yet."""
    path = tmp_path / "fallback"
    monkeypatch.delenv(CONTROL_DIR)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(sockets, "_fallback", lambda: str(path))
    monkeypatch.setattr(sockets, "_LENGTH_MAX", 200)
    return path


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of XDG_RUNTIME_DIR."""
    path = tmp_path / "runtime"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    return path


def test_the_runtime_directory_comes_first(runtime: Path, fallback: Path) -> None:
    assert make_directory() == make_directory() == str(runtime / "elastic_aio")
    assert stat.S_IMODE((runtime / "elastic_aio").stat().st_mode) == 0o700
    assert not fallback.exists()


def test_the_fallback_is_private(fallback: Path) -> None:
    assert make_directory() == str(fallback)
    assert stat.S_IMODE(fallback.stat().st_mode) == 0o700


@pytest.mark.parametrize("value", ["relative", "/nowhere", ""])
def test_a_runtime_directory_that_cannot_be_used(
    value: str, fallback: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", value)
    assert make_directory() == str(fallback)


def test_a_runtime_directory_with_a_long_path(
    runtime: Path, fallback: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a socket has at most 107 bytes."""
    monkeypatch.setattr(sockets, "_LENGTH_MAX", 5)
    assert make_directory() == str(fallback)


def test_clients_look_into_all_directories(runtime: Path, fallback: Path) -> None:
    """Their environment may differ from that of the job."""
    fallback.mkdir(mode=0o700)
    assert str(runtime / "elastic_aio") not in directories()
    make_directory()
    found = directories()
    assert found.index(str(runtime / "elastic_aio")) < found.index(str(fallback))


@pytest.mark.parametrize("problem", ["others can enter it", "it is a link", "another user's"])
def test_a_directory_that_is_not_of_this_user_alone_is_refused(
    problem: str, fallback: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user may have made a link, towards a directory of ours."""
    fallback.mkdir(mode=0o700)
    if problem == "others can enter it":
        fallback.chmod(0o750)
    elif problem == "it is a link":
        fallback.rename(fallback.with_name("target"))
        fallback.symlink_to(fallback.with_name("target"))
    else:
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    expected = "is a link, not a dir" if "link" in problem else "user alone: its mode must be 0700"
    with pytest.raises(PermissionError, match=expected):
        make_directory()
    assert str(fallback) not in directories()


def test_a_variable_names_the_only_directory(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONTROL_DIR, str(tmp_path / "own"))
    assert directories() == []
    assert make_directory() == str(tmp_path / "own")
    assert directories() == [str(tmp_path / "own")]


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """Connect to a socket of this process."""
    path = str(tmp_path / "1.sock")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(path)
        listener.listen()
        client.connect(path)
        yield client, path


@pytest.mark.parametrize("option", ["new kernel", "old kernel"])
def test_the_process_that_listens_is_known_by_a_pidfd(
    listening: tuple[socket.socket, str], option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if option == "old kernel":
        monkeypatch.setattr(sockets, "_SO_PEERPIDFD", 9999)
    pidfd = open_peer(*listening)
    try:
        information = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
        assert f"Pid:\t{os.getpid()}\n" in information
        assert not has_ended(pidfd)
    finally:
        os.close(pidfd)


def test_a_process_that_is_younger_than_the_socket_is_another_one(
    listening: tuple[socket.socket, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pid of the process that has listened was used again."""
    monkeypatch.setattr(sockets, "_SO_PEERPIDFD", 9999)
    long_ago = time.time() - 1e6
    os.utime(listening[1], (long_ago, long_ago))
    with pytest.raises(ConnectionRefusedError, match="the launcher has ended"):
        open_peer(*listening)


def test_a_process_of_another_namespace_has_no_pidfd(
    listening: tuple[socket.socket, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_SO_PEERPIDFD", 9999)
    monkeypatch.setattr(sockets, "peer_of", lambda _: (0, 0))
    assert open_peer(*listening) == -1
    assert not has_ended(-1)
