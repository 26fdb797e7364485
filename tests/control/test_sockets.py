"""Where control sockets are: only in a directory of this user alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from elastic_aio.control import sockets
from elastic_aio.control.sockets import CONTROL_DIR, directories, make_directory


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


def test_a_directory_that_others_can_enter_is_refused(fallback: Path) -> None:
    fallback.mkdir()
    fallback.chmod(0o750)
    with pytest.raises(PermissionError, match="user alone: its mode must be 0700"):
        make_directory()
    assert str(fallback) not in directories()


def test_a_link_is_refused(fallback: Path, tmp_path: Path) -> None:
    """Another user may have made it, towards a directory of ours."""
    (tmp_path / "target").mkdir(mode=0o700)
    fallback.symlink_to(tmp_path / "target")
    with pytest.raises(PermissionError):
        make_directory()
    assert str(fallback) not in directories()


def test_a_directory_of_another_user_is_refused(
    fallback: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fallback.mkdir(mode=0o700)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(PermissionError):
        make_directory()
    assert str(fallback) not in directories()


def test_a_variable_names_the_only_directory(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONTROL_DIR, str(tmp_path / "own"))
    assert directories() == []
    assert make_directory() == str(tmp_path / "own")
    assert directories() == [str(tmp_path / "own")]
