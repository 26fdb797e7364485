"""RunDirectory: directories and files of a run."""

from __future__ import annotations

import fcntl
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from elastic_aio.errors import HostError, SpecError
from elastic_aio.logs.files import RunDirectory
from elastic_aio.logs.paths import NodeRecord, WorkerLogs, plan_logs
from elastic_aio.spec.logs import LogSpec, Std, StdMap
from elastic_aio.text import error_reason


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files."""
    directory = tmp_path / "tmp"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


@pytest.fixture
def devnull() -> Iterator[int]:
    """A descriptor of /dev/null."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    yield descriptor
    os.close(descriptor)


ALL = LogSpec(redirects=StdMap(Std.ALL))


def test_log_dir_is_created_with_its_parents(tmp_path: Path) -> None:
    spec = LogSpec(log_dir=str(tmp_path / "a" / "b"))
    directories = [RunDirectory.make(spec, "my/run") for _ in range(2)]
    paths = [Path(str(directory.path)) for directory in directories]
    assert paths[0] != paths[1]
    assert all(path.parent == tmp_path / "a" / "b" for path in paths)
    assert all(path.name.startswith("my_run_") for path in paths)
    assert all(path.is_dir() for path in paths)
    assert directories[0].log_dir == str(paths[0])
    assert repr(directories[0]) == f"<RunDirectory {paths[0]}>"
    assert directories[0].remove_empty()
    assert paths[0].is_dir()


def test_a_directory_says_which_node_it_is_of(tmp_path: Path, temporary: Path) -> None:
    """Not a temporary one, which no other host sees, and whose removal a file would prevent."""
    node = NodeRecord(run_id="r", host="n1.x", pid=7, started_at=3.5, node_rank=1)
    directory = RunDirectory.make(LogSpec(log_dir=str(tmp_path / "logs")), "r", "n1.x")
    path = Path(str(directory.path))
    assert path.name.startswith("r_n1_")
    for record in (node, msgspec.structs.replace(node, group_rank=1)):
        directory.note_node(record)
        assert NodeRecord.decode((path / "node.json").read_bytes()) == record
        assert os.listdir(path) == ["node.json"]
    (path / "node.json").unlink()
    directory.note_node(record)  # it has not changed
    assert os.listdir(path) == []
    path.rmdir()
    directory.note_node(node)  # no disk takes it: the job goes on
    other = RunDirectory.make(LogSpec(), "r", "n1.x")
    other.note_node(node)
    assert not other.remove_empty()
    assert os.listdir(temporary) == []


def test_a_relative_log_dir_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory.make(LogSpec(log_dir="logs"), "r")
    assert str(directory.path).startswith(str(tmp_path / "logs" / "r_"))


@pytest.mark.parametrize("tail", ["", "/deeper"])
def test_a_log_dir_that_cannot_be_created_is_a_spec_error(tmp_path: Path, tail: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        SpecError, match=r"^logs\.log_dir: cannot create a directory there: .* \(got "
    ):
        RunDirectory.make(LogSpec(log_dir=f"{tmp_path}/file{tail}"), "r")


def test_dev_null_keeps_nothing(temporary: Path) -> None:
    directory = RunDirectory.make(LogSpec(log_dir="/dev/null"), "r")
    directory.make_attempt(0)
    assert (directory.path, directory.log_dir) == (None, None)
    assert not directory.remove_empty()
    assert os.listdir(temporary) == []


def test_without_logs_the_temporary_directory_is_not_reported(temporary: Path) -> None:
    """It is for error files only, and removed if there are none."""
    directory = RunDirectory.make(LogSpec(), "r")
    assert directory.log_dir is None
    assert Path(str(directory.path)).parent == temporary
    assert repr(directory) == f"<RunDirectory {directory.path}, temporary>"
    directory.make_attempt(0)
    directory.make_attempt(1)
    assert not directory.remove_empty()
    assert os.listdir(temporary) == []


def test_a_temporary_directory_with_output_stays(temporary: Path, devnull: int) -> None:
    """Empty files and the directories of other attempts are removed."""
    directory = RunDirectory.make(ALL, "r")
    assert directory.log_dir == directory.path
    for attempt in range(2):
        directory.make_attempt(attempt)
        for rank in range(2):
            plan = plan_logs(ALL, directory.path, attempt, rank)
            with directory.open_streams(plan, (1, 2), devnull) as streams:
                out, _ = streams.descriptors
                if (attempt, rank) == (1, 0):
                    os.write(out, b"something\n")
    assert directory.remove_empty()
    files = [str(path.relative_to(temporary)) for path in temporary.rglob("*") if path.is_file()]
    assert files == [f"{Path(str(directory.path)).name}/attempt_1/0/stdout.log"]
    assert not (Path(str(directory.path)) / "attempt_0").exists()


def test_a_missing_directory_is_removed_already(temporary: Path) -> None:
    directory = RunDirectory.make(LogSpec(), "r")
    os.rmdir(str(directory.path))
    assert not directory.remove_empty()


def test_a_missing_temporary_directory_is_an_error_only_for_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert RunDirectory.make(LogSpec(), "r").path is None
    with pytest.raises(HostError, match=r"set log_dir$"):
        RunDirectory.make(ALL, "r")


def test_a_temporary_directory_is_that_of_tempfile_without_its_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the variable names none that can be used."""
    monkeypatch.delitem(sys.modules, "tempfile")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    path = Path(RunDirectory.make(ALL, "r").path or "")
    assert (path.parent, stat.S_IMODE(path.stat().st_mode)) == (tmp_path, 0o700)
    assert path.name.startswith("elastic_aio_r_")
    assert "tempfile" not in sys.modules
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    monkeypatch.setenv("TEMP", str(tmp_path))
    assert Path(RunDirectory.make(ALL, "r").path or "").parent == tmp_path


@pytest.fixture(params=[0o022, 0o077, 0o002])
def mask(request: pytest.FixtureRequest) -> Iterator[int]:
    """The umask of this process."""
    mask: int = request.param
    former = os.umask(mask)
    yield mask
    os.umask(former)


def test_a_lock_file_and_a_temporary_directory_are_private(tmp_path: Path, mask: int) -> None:
    directory = RunDirectory.make(LogSpec(log_dir=str(tmp_path), keep_runs=1), "r")
    assert stat.S_IMODE(os.stat(f"{directory.path}/.elastic_aio.lock").st_mode) == 0o600
    directory.close()
    temporary = RunDirectory.make(ALL, "r").path or ""
    assert stat.S_IMODE(os.stat(temporary).st_mode) == 0o700
    os.rmdir(temporary)


def test_a_name_that_is_taken_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = [b"taken", b"taken", b"other"]
    monkeypatch.setattr(os, "urandom", lambda size: taken.pop(0))
    paths = [RunDirectory.make(LogSpec(log_dir=str(tmp_path)), "r").path for _ in range(2)]
    assert len({*paths}) == 2


def test_streams_are_opened_for_appending_and_closed(tmp_path: Path, devnull: int) -> None:
    directory = RunDirectory.make(LogSpec(log_dir=str(tmp_path)), "r")
    directory.make_attempt(0)
    plan = plan_logs(ALL, directory.path, 0, 0)
    with directory.open_streams(plan, (1, 2), devnull) as streams:
        out, err = streams.descriptors
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


def test_streams_without_files_are_inherited_or_dev_null(tmp_path: Path, devnull: int) -> None:
    directory = RunDirectory.make(LogSpec(log_dir=str(tmp_path)), "r")
    directory.make_attempt(0)
    spec = LogSpec(redirects=StdMap(Std.ERR), local_ranks_filter=frozenset({0}))
    plans = [plan_logs(spec, directory.path, 0, rank) for rank in range(2)]
    with directory.open_streams(plans[0], (7, 8), devnull) as streams:
        out, err = streams.descriptors
        assert out == 7
        assert err not in (7, 8, devnull)
    with directory.open_streams(plans[1], (7, 8), devnull) as streams:
        out, _ = streams.descriptors
        assert out == devnull


def test_existing_files_are_not_overwritten(tmp_path: Path, devnull: int) -> None:
    """And the failed call leaves no descriptor open."""
    directory = RunDirectory.make(LogSpec(log_dir=str(tmp_path)), "r")
    directory.make_attempt(0)
    with pytest.raises(FileExistsError):
        directory.make_attempt(0)
    plan = plan_logs(ALL, directory.path, 0, 0)
    with directory.open_streams(plan, (1, 2), devnull):
        pass
    with pytest.raises(FileExistsError), directory.open_streams(plan, (1, 2), devnull):
        pass
    no_directory = WorkerLogs(plan.stdout, plan.stderr, None, "")
    os.unlink(str(plan.stdout.path))
    with pytest.raises(FileExistsError), directory.open_streams(no_directory, (1, 2), devnull):
        pass


def test_an_attempt_tidies_up_after_the_previous_one(temporary: Path, devnull: int) -> None:
    """A job of many restarts leaves no empty directories, and keeps what workers wrote.

    This may wait until the workers of the next attempt have started.
    """
    directory = RunDirectory.make(ALL, "r")
    assert directory.path is not None
    for attempt in range(3):
        directory.make_attempt(attempt)
        logs = plan_logs(ALL, directory.path, attempt, 0)
        with directory.open_streams(logs, (1, 2), devnull) as streams:
            stdout, _ = streams.descriptors
            if attempt == 1:
                os.write(stdout, b"text")
            directory.tidy()
    files = [path for path in Path(directory.path).rglob("*") if path.is_file()]
    assert sorted(str(path.relative_to(directory.path)) for path in files) == [
        "attempt_1/0/stdout.log",
        "attempt_2/0/stderr.log",
        "attempt_2/0/stdout.log",
    ]
    assert directory.remove_empty()
    assert sorted(os.listdir(directory.path)) == ["attempt_1"]


def test_what_a_killed_worker_was_writing_is_removed(tmp_path: Path, devnull: int) -> None:
    """The temporary file of its error file, in every log directory."""
    spec = LogSpec(log_dir=str(tmp_path), redirects=StdMap(Std.ALL))
    directory = RunDirectory.make(spec, "r")
    assert directory.path is not None
    directory.make_attempt(0)
    logs = plan_logs(spec, directory.path, 0, 0)
    with directory.open_streams(logs, (1, 2), devnull):
        pass
    worker = Path(str(logs.directory))
    for name in ("error.json.4711", "error.json", "error.json.old"):
        (worker / name).write_text("{")
    assert directory.remove_empty()
    left = sorted(path.name for path in worker.iterdir())
    assert left == ["error.json", "error.json.old", "stderr.log", "stdout.log"]


KEPT = LogSpec(log_dir="logs", keep_runs=1)


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log directory of `KEPT`."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "logs"


def make_ended(job: str = "", second: int = 0) -> str:
    """Make the directory of a run that has ended at a second; return its name."""
    directory = RunDirectory.make(KEPT, "r")
    directory.note_job(job)
    directory.note_node(NodeRecord(run_id="r", host="n1", pid=7, started_at=float(second)))
    directory.make_attempt(0)
    directory.close()
    path = str(directory.path)
    os.utime(f"{path}/{LOCK}", (second, second))
    return os.path.basename(path)


LOCK = ".elastic_aio.lock"


def test_old_runs_are_counted_by_job(logs: Path) -> None:
    """A job counts where its last node ended, and stays while a node of it runs."""
    oldest, other, newest = ([make_ended(job, second) for second in seconds] for job, seconds in
                             [("a", (1, 4)), ("b", (5, 2)), ("c", (3, 6))])  # fmt: skip
    alone = [make_ended("", 2), make_ended("", 1)]
    running = RunDirectory.make(KEPT, "r")
    running.note_job("d")
    begun, own = make_ended("d"), make_ended("e")
    directory = RunDirectory.make(KEPT, "r")
    directory.note_job("e")
    left = {os.path.basename(str(one.path)) for one in (running, directory)} | {begun, own}
    directory.remove_old_runs(4)
    assert set(os.listdir(logs)) == {*oldest, *other, *newest, *left}
    directory.remove_old_runs(2)
    assert set(os.listdir(logs)) == {*newest, *left}
    directory.remove_old_runs(1)
    assert set(os.listdir(logs)) == left
    assert set(alone).isdisjoint(os.listdir(logs))
    running.close()
    directory.remove_old_runs(1)
    assert set(os.listdir(logs)) == {os.path.basename(str(directory.path)), own}
    directory.close()


def test_a_file_system_without_locks(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the logs; then nothing is removed, by this run or by another."""
    ended = make_ended("a", 1)
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "LOCK_SH", 0)  # which is refused
        directory = RunDirectory.make(KEPT, "r")
    directory.note_job("b")
    with pytest.raises(OSError, match="Invalid") as caught:
        directory.remove_old_runs(1)
    assert error_reason(caught.value) == "flock: invalid argument"
    own = os.path.basename(str(directory.path))
    assert {*os.listdir(logs)} == {ended, own}
    assert os.listdir(logs / own) == []
    later = RunDirectory.make(KEPT, "r")
    later.remove_old_runs(1)
    assert {*os.listdir(logs)} == {own, os.path.basename(str(later.path))}
    later.close()
    directory.close()


def test_nothing_of_strangers_is_opened_or_removed(logs: Path, tmp_path: Path) -> None:
    """Named pipes would block, and links lead elsewhere."""
    elsewhere = tmp_path / make_ended()
    (logs / elsewhere.name).rename(elsewhere)
    (logs / "link").symlink_to(elsewhere)
    (logs / "pipe").mkdir()
    os.mkfifo(logs / "pipe" / LOCK)
    (logs / "linked").mkdir()
    (logs / "linked" / LOCK).symlink_to(elsewhere / LOCK)
    (logs / "file").write_text("")
    if os.geteuid() == 0:
        foreign = logs / make_ended()
        os.chown(foreign, 12345, 12345)
        foreign = logs / make_ended()
        os.chown(foreign / LOCK, 12345, 12345)
    before = set(os.listdir(logs))
    directory = RunDirectory.make(KEPT, "r")
    directory.remove_old_runs(1)
    directory.close()
    assert set(os.listdir(logs)) == {*before, os.path.basename(str(directory.path))}
    assert elsewhere.is_dir()


def test_a_link_in_place_of_an_attempt_is_not_followed(tmp_path: Path) -> None:
    """Neither with files there, nor with directories."""
    elsewhere = tmp_path / "elsewhere"
    for number, content in enumerate(("file", "nested/file")):
        (elsewhere / str(number) / content).parent.mkdir(parents=True)
        (elsewhere / str(number) / content).touch()
        (tmp_path / f"attempt_{number}").symlink_to(elsewhere / str(number))
        own = tmp_path / f"attempt_{number + 2}" / content
        own.parent.mkdir(parents=True)
        own.touch()
    os.mkfifo(tmp_path / "attempt_4")  # which no reader waits for
    RunDirectory(str(tmp_path)).remove_attempts(4)
    assert [path.name for path in elsewhere.rglob("file")] == ["file", "file"]
    assert not list(tmp_path.glob("attempt_[23]"))
