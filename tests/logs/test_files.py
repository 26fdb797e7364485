"""Folders and files of a run."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_aio.errors import SpecError, SurroundingsError
from elastic_aio.logs.files import RunFolder
from elastic_aio.logs.paths import WorkerLogs, plan_logs
from elastic_aio.spec import LogSpec
from elastic_aio.std import Std, StdMap


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that stands for /tmp."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


@pytest.fixture
def nothing() -> Iterator[int]:
    """A descriptor of /dev/null."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    yield descriptor
    os.close(descriptor)


ALL = LogSpec(redirects=StdMap(Std.ALL))


def test_a_chosen_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    """Each run has a new folder in it, named after the run."""
    spec = LogSpec(log_dir=str(tmp_path / "a" / "b"))
    folders = [RunFolder.make(spec, "my/run") for _ in range(2)]
    paths = [Path(str(one.path)) for one in folders]
    assert paths[0] != paths[1]
    assert all(path.parent == tmp_path / "a" / "b" for path in paths)
    assert all(path.name.startswith("my_run_") for path in paths)
    assert all(path.is_dir() for path in paths)
    assert folders[0].announced == str(paths[0])
    assert repr(folders[0]) == f"<RunFolder {paths[0]}>"
    assert folders[0].tidy()
    assert paths[0].is_dir()


def test_a_relative_folder_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers in another directory need the whole path."""
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.make(LogSpec(log_dir="logs"), "r")
    assert str(folder.path).startswith(str(tmp_path / "logs" / "r_"))


@pytest.mark.parametrize("tail", ["", "/deeper"])
def test_a_folder_that_cannot_be_made_is_a_spec_error(tmp_path: Path, tail: str) -> None:
    """A file in the way is named in one line with the system's reason."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match=r"^logs\.log_dir: must be a folder that can be .* \("):
        RunFolder.make(LogSpec(log_dir=f"{tmp_path}/file{tail}"), "r")


def test_dev_null_keeps_nothing(temporary: Path) -> None:
    """No folder is made at all."""
    folder = RunFolder.make(LogSpec(log_dir="/dev/null"), "r")
    folder.make_attempt(0)
    assert (folder.path, folder.announced) == (None, None)
    assert not folder.tidy()
    assert os.listdir(temporary) == []


def test_without_logs_the_temporary_folder_is_not_announced(temporary: Path) -> None:
    """Error files need a place; when nothing came it goes without a trace."""
    folder = RunFolder.make(LogSpec(), "r")
    assert folder.announced is None
    assert Path(str(folder.path)).parent == temporary
    assert repr(folder) == f"<RunFolder {folder.path}, temporary>"
    folder.make_attempt(0)
    folder.make_attempt(1)
    assert not folder.tidy()
    assert os.listdir(temporary) == []


def test_a_temporary_folder_with_something_in_it_stays(temporary: Path, nothing: int) -> None:
    """Empty logs, empty attempts go; what says something stays where it is."""
    folder = RunFolder.make(ALL, "r")
    assert folder.announced == folder.path
    for attempt in range(2):
        folder.make_attempt(attempt)
        for rank in range(2):
            plan = plan_logs(ALL, folder.path, attempt, rank)
            with folder.open_streams(plan, (1, 2), nothing) as (out, _):
                if (attempt, rank) == (1, 0):
                    os.write(out, b"something\n")
    assert folder.tidy()
    left = [str(path.relative_to(temporary)) for path in temporary.rglob("*") if path.is_file()]
    assert left == [f"{Path(str(folder.path)).name}/attempt_1/0/stdout.log"]
    assert not (Path(str(folder.path)) / "attempt_0").exists()


def test_a_folder_that_somebody_removed_is_tidy(temporary: Path) -> None:
    """Tidying up what is gone is no error."""
    folder = RunFolder.make(LogSpec(), "r")
    os.rmdir(str(folder.path))
    assert not folder.tidy()


def test_no_temporary_folder_is_an_error_only_for_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing to log the job goes on; with logs the way out is named."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert RunFolder.make(LogSpec(), "r").path is None
    with pytest.raises(SurroundingsError, match=r"choose one with log_dir$"):
        RunFolder.make(ALL, "r")


def test_streams_are_opened_for_appending_and_closed(tmp_path: Path, nothing: int) -> None:
    """A worker's files are new, private to their opener, and only append."""
    folder = RunFolder.make(LogSpec(log_dir=str(tmp_path)), "r")
    folder.make_attempt(0)
    plan = plan_logs(ALL, folder.path, 0, 0)
    with folder.open_streams(plan, (1, 2), nothing) as (out, err):
        assert os.readlink(f"/proc/self/fd/{out}") == plan.stdout.path
        assert os.readlink(f"/proc/self/fd/{err}") == plan.stderr.path
        assert not os.get_inheritable(out)
        os.write(out, b"one")
        os.lseek(out, 0, os.SEEK_SET)
        os.write(out, b"two")
        assert stat.S_IMODE(os.fstat(out).st_mode) & 0o600 == 0o600
    assert Path(str(plan.stdout.path)).read_bytes() == b"onetwo"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(out)


def test_streams_without_files_are_ours_or_nothing(tmp_path: Path, nothing: int) -> None:
    """Inherited streams are handed on as they are, muted ones are /dev/null."""
    folder = RunFolder.make(LogSpec(log_dir=str(tmp_path)), "r")
    folder.make_attempt(0)
    spec = LogSpec(redirects=StdMap(Std.ERR), local_ranks_filter=frozenset({0}))
    with folder.open_streams(plan_logs(spec, folder.path, 0, 0), (7, 8), nothing) as (out, err):
        assert out == 7
        assert err not in (7, 8, nothing)
    with folder.open_streams(plan_logs(spec, folder.path, 0, 1), (7, 8), nothing) as (out, _):
        assert out == nothing


def test_nothing_is_overwritten(tmp_path: Path, nothing: int) -> None:
    """A folder or file that is there already is an error, and nothing stays open."""
    folder = RunFolder.make(LogSpec(log_dir=str(tmp_path)), "r")
    folder.make_attempt(0)
    with pytest.raises(FileExistsError):
        folder.make_attempt(0)
    plan = plan_logs(ALL, folder.path, 0, 0)
    with folder.open_streams(plan, (1, 2), nothing):
        pass
    with pytest.raises(FileExistsError), folder.open_streams(plan, (1, 2), nothing):
        pass
    unfoldered = WorkerLogs(plan.stdout, plan.stderr, None, "")
    os.unlink(str(plan.stdout.path))
    with pytest.raises(FileExistsError), folder.open_streams(unfoldered, (1, 2), nothing):
        pass
