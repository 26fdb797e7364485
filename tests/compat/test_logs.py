"""torch's `Std` and `LogsSpecs`, and the redirects of this process."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import tempfile
from pathlib import Path

import pytest

from elastic_aio.compat.torch.multiprocessing import (
    DefaultLogsSpecs,
    Std,
    redirect,
    redirect_stderr,
    redirect_stdout,
    to_map,
)


@pytest.mark.parametrize(
    ("text", "streams"),
    [
        ("0", Std.NONE),
        ("3", Std.ALL),
        ("0:1,1:2", {0: Std.OUT, 1: Std.ERR}),
        ("12:3", {12: Std.ALL}),
    ],
)
def test_std_from_str(text: str, streams: object) -> None:
    assert Std.from_str(text) == streams


@pytest.mark.parametrize("text", ["", "4", "11", "0:1,", "0:1,1", "1,0:1", "0:4"])
def test_std_from_bad_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"does not match: <\^\[0123\]\$> or <"):
        Std.from_str(text)


def test_to_map() -> None:
    assert to_map(Std.OUT, 2) == {0: Std.OUT, 1: Std.OUT}
    assert to_map({1: Std.OUT}, 2) == {0: Std.NONE, 1: Std.OUT}


def test_paths(tmp_path: Path) -> None:
    """Redirects and tee are united; muted ranks are not shown."""
    logs = DefaultLogsSpecs(
        str(tmp_path / "logs"), {0: Std.ERR}, {0: Std.OUT, 1: Std.ALL}, local_ranks_filter={0, 2}
    )
    env = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2"}
    envs = {rank: dict(env) for rank in range(4)}
    dest = logs.reify(envs)
    directory = Path(dest.stdouts[0]).parents[1]
    assert directory.name == "attempt_2"
    assert directory.parent.name.startswith("job_")
    assert dest.stdouts == {
        0: f"{directory}/0/stdout.log",
        1: f"{directory}/1/stdout.log",
        2: "",
        3: os.devnull,
    }
    assert dest.stderrs[0] == f"{directory}/0/stderr.log"
    assert dest.stderrs[2] == ""
    assert dest.tee_stdouts == {0: dest.stdouts[0]}
    assert dest.tee_stderrs == {}
    assert dest.error_files[3] == f"{directory}/3/error.json"
    assert envs[3]["TORCHELASTIC_ERROR_FILE"] == dest.error_files[3]
    assert dest.filtered_stdout == f"{directory}/filtered_stdout.log"
    assert (directory / "3").is_dir()


def test_an_attempt_keeps_the_logs_of_the_former(tmp_path: Path) -> None:
    """A membership change does not change the restart count."""
    logs = DefaultLogsSpecs(str(tmp_path), Std.OUT)
    first = Path(logs.reify({0: {}}).stdouts[0])
    first.write_text("kept")
    second = Path(logs.reify({0: {}}).stdouts[0])
    assert second.parents[1].name == "attempt_0.1"
    assert first.read_text() == "kept"


def test_nothing_is_kept() -> None:
    envs = {0: {"A": "1"}}
    dest = DefaultLogsSpecs(os.devnull, Std.ALL, Std.ALL).reify(envs)
    assert dest.stdouts == {0: ""}
    assert dest.tee_stdouts == dest.error_files == {0: os.devnull}
    assert envs == {0: {"A": "1", "TORCHELASTIC_ERROR_FILE": ""}}


def test_a_temporary_directory_is_made_when_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    logs = DefaultLogsSpecs()
    assert list(tmp_path.iterdir()) == []
    dest = logs.reify({0: {}})
    assert dest.error_files[0].startswith(logs.root_log_dir)
    logs.tidy()
    assert list(tmp_path.iterdir()) == []
    Path(logs.reify({0: {}}).error_files[0]).write_text("{}")
    logs.tidy()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_is_no_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"log_dir: .*file is a file"):
        DefaultLogsSpecs(str(tmp_path / "file"))
    logs = DefaultLogsSpecs(str(tmp_path))
    assert logs == DefaultLogsSpecs(str(tmp_path))
    assert logs != DefaultLogsSpecs(str(tmp_path), tee=Std.OUT)
    assert repr(logs).startswith(f"DefaultLogsSpecs(root_log_dir={tmp_path}, ")
    with caplog.at_level(logging.WARNING):
        assert logs.reify({}).stdouts == {}
    assert "Empty envs map" in caplog.text


def write_everywhere(stream: str) -> None:
    """Write by Python, by the C library and by a child."""
    libc = ctypes.CDLL(None)
    print("from python", file=getattr(sys, stream))
    libc.fputs(b"from c\n", ctypes.c_void_p.in_dll(libc, stream))
    os.system(f"echo from a child >&{1 if stream == 'stdout' else 2}")


@pytest.mark.parametrize(
    ("stream", "redirected"), [("stdout", redirect_stdout), ("stderr", redirect_stderr)]
)
def test_redirects(
    stream: str, redirected: object, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What was written before and is written after goes where it went."""
    assert callable(redirected)
    write_everywhere(stream)
    with redirected(str(tmp_path / "log")):
        write_everywhere(stream)
    write_everywhere(stream)
    expected = ["from a child", "from c", "from python"]
    assert sorted((tmp_path / "log").read_text().splitlines()) == expected
    ctypes.CDLL(None).fflush(None)
    captured = getattr(capfd.readouterr(), stream.removeprefix("std"))
    assert sorted(captured.splitlines()) == sorted(expected * 2)


def test_an_unknown_stream() -> None:
    with pytest.raises(ValueError, match="unknown standard stream <stdin>"), redirect("stdin", "x"):
        pass
