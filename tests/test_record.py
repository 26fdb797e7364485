"""The record of a run as values and files: what is written, kept and read."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from elastic_aio import record
from elastic_aio.event_json import event_to_json, read_events
from elastic_aio.events import Event, EventsMissed, JobStarted, OutputLost
from elastic_aio.record import (
    EVENTS_FILE,
    REPORT_FILE,
    RUN_FILE,
    JobRecord,
    RecordFiles,
    recorded_runs,
    run_in,
    runs_directory,
    without_secrets,
)
from elastic_aio.status import JobStatus, WorkerStatus
from tests.spec.test_reference import rows
from tests.support.disk import fill, small_disk

STARTED = JobStarted(
    seq=0, time=1.0, run_id="r", node="h", entrypoint="x", nproc_per_node=1, nnodes="1",
    max_restarts=0, agent_pid=7,
)  # fmt: skip
GOING = JobRecord(run_id="r", node="h", agent_pid=7, started_at=1.0, phase="running")
ENDED = JobRecord(
    run_id="r",
    node="h",
    agent_pid=7,
    started_at=1.0,
    phase="failed",
    workers=(WorkerStatus(0, 0, 8, "failed"),),
    command=("aio-elastic", "run", "x"),
    ended_at=2.0,
    exit_code=3,
    failures=("attempt 0 failed: rank 0: exit code 3",),
)


def lost(number: int, size: int = 1) -> Event:
    return OutputLost(
        seq=number, time=float(number), rank=0, local_rank=0, stream="stdout", path="p",
        why="x" * size,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state directory of the test, which does not exist yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


# --------------------------------------------------------------------------- the value


def test_a_record_can_be_read_again() -> None:
    assert JobRecord.decode(ENDED.encode()) == ENDED
    odd = JobRecord(run_id="\udcff", command=("\udc80", "ä\n"))
    assert JobRecord.decode(odd.encode()) == odd


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"run_id": 1}', b"\xff", b'"' + b"[" * 100_000, b'{"started_at": 1e300}'],
)
def test_other_bytes_are_no_record(content: bytes) -> None:
    with pytest.raises(ValueError, match="is no record of a run"):
        JobRecord.decode(content)


def test_a_newer_record() -> None:
    """Unknown fields are left out; a newer schema means something else."""
    assert JobRecord.decode(b'{"run_id": "r", "later": [1]}').run_id == "r"
    with pytest.raises(ValueError, match="is of schema 2, newer than this reader"):
        JobRecord.decode(b'{"schema": 2}')


def test_a_path_that_no_file_can_have_is_not_valid() -> None:
    """The commands open it."""
    worker = WorkerStatus(0, 0, 1, "failed", stderr_path="/a\0")
    records = JobRecord(log_dir="a\0b"), JobRecord(state_dir="\0"), JobRecord(workers=(worker,))
    for one in records:
        with pytest.raises(ValueError, match="a path has a null byte"):
            JobRecord.decode(one.encode())


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--api-key", "k"], ["--api-key", "***"]),
        (["--api-key=k", "x"], ["--api-key=***", "x"]),
        (["--wandb.token", "k"], ["--wandb.token", "***"]),
        (["HF_TOKEN=k"], ["HF_TOKEN=***"]),
        (
            ["--conf", "user=u,password=p,retention=1"],
            ["--conf", "user=u,password=***,retention=1"],
        ),
        (["--conf", "timeout=5,token=t,a=b"], ["--conf", "timeout=5,token=***,a=b"]),
        (["--password=a,b;c&d e\nf"], ["--password=***"]),
        (["env", "DB_PASSWORD=a,b"], ["env", "DB_PASSWORD=***"]),
        (["sh", "-c", "HF_TOKEN=k x; y"], ["sh", "-c", "HF_TOKEN=***"]),
        (["sh", "-c", "export HF_TOKEN=k; y"], ["sh", "-c", "export HF_TOKEN=***; y"]),
        (['{"api_key": "k", "a": 1}'], ['{"api_key": "***", "a": 1}']),
        (["-H", "Authorization: Bearer k"], ["-H", "Authorization: Bearer ***"]),
        (["-H", "X-Api-Key: k"], ["-H", "X-Api-Key: ***"]),
        (["--tokenizer:x", "a: b"], ["--tokenizer:x", "a: b"]),
        (["--token", "--verbose"], ["--token", "--verbose"]),
        (["redis://u:p@host:1/0"], ["redis://u:***@host:1/0"]),
        (["http://host:1/a@b"], ["http://host:1/a@b"]),
        (["--rdzv-conf", "token_file=/etc/t"], ["--rdzv-conf", "token_file=/etc/t"]),
        (["--max-tokens=9", "--tokenizer", "gpt2"], ["--max-tokens=9", "--tokenizer", "gpt2"]),
        (["--key-prefix", "/a", "--monkey", "b"], ["--key-prefix", "/a", "--monkey", "b"]),
        (["python", "-c", "secret = 1"], ["python", "-c", "secret = 1"]),
    ],
)
def test_secrets_are_not_shown(words: list[str], shown: list[str]) -> None:
    assert without_secrets(words) == tuple(shown)


def test_long_words_take_no_time_for_each_pair_of_characters() -> None:
    """Execve(2) takes 128 KiB; squares of that would block the event loop for minutes."""
    for text in ("-", "a_b-", "token", "token-", "a: ", '"', "://", "://a:", "authorization:", " "):
        word = text * ((1 << 17) // len(text))
        without_secrets([f"{word}="])


# --------------------------------------------------------------------------- the events


def test_an_unfinished_line_is_left_out_and_a_broken_one_named() -> None:
    lines = [event_to_json(one) + b"\n" for one in (STARTED, lost(1), STARTED, lost(2))]
    assert read_events(lines) == [STARTED, lost(2)]  # the last run
    assert read_events([*lines[:2], lines[3][:-1]]) == [STARTED, lost(1)]
    for broken in (b"{}\n", b"\xff\n", b"[" * 100_000 + b"\n", b'{"time":1e300}\n'):
        with pytest.raises(ValueError, match="line 2 is no event: "):
            read_events([lines[0], broken])


@given(sizes=st.lists(st.integers(1, 700), min_size=1, max_size=60), batch=st.integers(1, 5))
def test_a_long_file_of_events_keeps_the_first_and_the_latest(
    sizes: list[int], batch: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("events")
    files = RecordFiles(str(directory))
    added = [STARTED, *(lost(number, size) for number, size in enumerate(sizes, 1))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "EVENTS_MAX", 4_000)
        for index in range(0, len(added), batch):
            files.write(GOING, added[index : index + batch])
    files.close()
    assert (directory / EVENTS_FILE).stat().st_size <= 4_000
    found = run_in(str(directory)).events()
    assert found[0] == STARTED
    assert found[-1] == added[-1]
    if isinstance(missed := found[1] if found[1:] else None, EventsMissed):
        assert found[2:] == added[missed.count + 1 :]
    else:
        assert found == added


def test_events_that_another_program_has_damaged_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "EVENTS_MAX", 1_000)
    files = RecordFiles(str(tmp_path))
    files.write(GOING, [STARTED])
    (tmp_path / EVENTS_FILE).write_bytes(b"\xff\n" * 1_000)
    files.write(GOING, [lost(1)])
    files.close()
    assert files.problem == ""
    assert run_in(str(tmp_path)).events() == [lost(1)]


# --------------------------------------------------------------------------- directories


def test_the_state_directory_is_that_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    assert runs_directory() == "/s/elastic_aio/runs"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert runs_directory() == f"{tmp_path}/.local/state/elastic_aio/runs"
    monkeypatch.setenv("HOME", str(tmp_path / "nonexistent"))  # of a service, and not made by us
    assert runs_directory() is None
    for home in ("", "h"):
        monkeypatch.setenv("HOME", home)
        assert runs_directory() is None


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_state_directory_is_private(state: Path, umask: int) -> None:
    former = os.umask(umask)
    try:
        files = RecordFiles(None)
        files.write(ENDED, [STARTED], "report\n")
        files.close()
    finally:
        os.umask(former)
    for path in (state, state / "elastic_aio", state / "elastic_aio" / "runs"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    (run,) = recorded_runs()
    assert replace(run, state_dir=None, directory="") == ENDED
    assert run.directory == run.state_dir
    assert (run.events(), run.report()) == ([STARTED], "report\n")


def test_a_run_with_a_directory_of_its_own_has_an_entry_too(tmp_path: Path) -> None:
    """The entry leads to the events."""
    own = tmp_path / "own"
    own.mkdir()
    files = RecordFiles(str(own))
    files.write(ENDED, [STARTED], "report\n")
    files.close()
    assert {path.name for path in own.iterdir()} == {RUN_FILE, EVENTS_FILE, REPORT_FILE}
    (entry,) = recorded_runs()
    assert {*os.listdir(entry.directory)} == {RUN_FILE, ".elastic_aio.lock"}
    there = JobRecord.decode((own / RUN_FILE).read_bytes())
    assert there == replace(entry, directory=str(own))
    assert run_in(str(own)).events() == [STARTED]


def test_a_directory_given_twice_has_the_last_run(tmp_path: Path) -> None:
    for pid, end in ((7, 2.0), (8, 3.0)):
        files = RecordFiles(str(tmp_path))
        files.write(replace(ENDED, agent_pid=pid, ended_at=end), [STARTED, lost(pid)])
        files.close()
    run = run_in(str(tmp_path))
    assert (run.agent_pid, run.events()) == (8, [STARTED, lost(8)])
    assert [run.agent_pid for run in recorded_runs()] in ([7, 8], [8, 7])


def test_a_run_is_known_to_go_on_as_long_as_it_has_its_lock(tmp_path: Path) -> None:
    files = RecordFiles(str(tmp_path))
    files.write(GOING, [STARTED])
    assert [run.is_lost for run in recorded_runs()] == [False]
    assert not run_in(str(tmp_path)).is_lost
    files.close()
    assert [run.is_lost for run in recorded_runs()] == [True]
    assert run_in(str(tmp_path)).is_lost


def test_a_home_without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is there, and says what it lacks."""
    monkeypatch.setattr(fcntl, "LOCK_SH", 0)  # which is refused
    files = RecordFiles(None)
    files.write(GOING, [STARTED])
    files.close()
    (run,) = recorded_runs()
    assert (run.run_id, run.is_lost, run.events()) == (GOING.run_id, False, [STARTED])
    files.write(replace(GOING, node=socket.gethostname(), agent_pid=1 << 30), [])
    assert [run.is_lost for run in recorded_runs()] == [True]  # its launcher was killed
    assert files.problem == f"flock: invalid argument: {run.directory}"


def test_fifty_runs_are_kept_and_those_that_go_on(state: Path) -> None:
    going = RecordFiles(None)
    going.write(GOING, [])
    for number in range(60):
        files = RecordFiles(None)
        files.write(JobRecord(run_id=f"r{number}", started_at=float(number + 2), ended_at=1.0), [])
        files.close()
    names = [run.run_id for run in recorded_runs()]
    assert names == [*(f"r{number}" for number in range(59, 9, -1)), "r"]
    going.close()
    assert len(recorded_runs()) <= 50


def test_without_a_home_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.delenv("HOME")
    files = RecordFiles(None)
    files.write(ENDED, [STARTED])
    files.close()
    assert files.problem == ""
    assert recorded_runs() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a directory of another user")
def test_nothing_is_written_into_the_home_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `sudo`, which keeps HOME."""
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 12345, 12345)
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(home))
    files = RecordFiles(None)
    files.write(ENDED, [STARTED])
    files.close()
    assert list(home.iterdir()) == []


def test_a_directory_that_was_removed(tmp_path: Path) -> None:
    own = tmp_path / "own"
    files = RecordFiles(str(own))
    files.write(ENDED, [STARTED])
    files.close()
    assert files.problem == f"no such file or directory: {own}"
    assert [run.ended_at for run in recorded_runs()] == [2.0]


def test_a_disk_that_became_full_has_the_end_of_the_run(tmp_path: Path) -> None:
    """In place of the former version, which is longer than it needs to be."""
    with small_disk(tmp_path / "disk", 64) as disk:
        files = RecordFiles(str(disk))
        files.write(GOING, [STARTED])
        fill(disk)
        files.write(ENDED, [lost(1, 5_000)], "report\n")
        files.close()
        assert files.problem == f"no space left on device: {disk}"
        run = run_in(str(disk))
        assert replace(run, state_dir=None, directory="") == ENDED
        assert (disk / EVENTS_FILE).read_bytes() == event_to_json(STARTED) + b"\n"
        assert run.report() == ""


def test_a_full_home_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(tmp_path / "disk", 16) as disk:
        monkeypatch.setenv("XDG_STATE_HOME", str(disk))
        fill(disk)
        files = RecordFiles(None)
        files.write(ENDED, [STARTED])
        files.close()
        assert files.problem == ""
        assert recorded_runs() == []


def test_what_is_no_regular_file_is_not_read(tmp_path: Path) -> None:
    """No reader waits for the writer of a named pipe."""
    own = tmp_path / "own"
    own.mkdir()
    os.mkfifo(own / RUN_FILE)
    with pytest.raises(OSError, match="no file of a usual size"):
        run_in(str(own))
    assert recorded_runs(str(tmp_path)) == []


def test_the_reference_has_all_fields() -> None:
    page = (Path(record.__file__).parent.parent / "docs/reference/records.md").read_text()
    own = set(JobRecord.__struct_fields__) - set(JobStatus.__struct_fields__)
    assert {row[0].strip("`") for row in rows(page, "## run.json")} == own
    assert set(re.findall(r"`(\w+\.\w+)`", page)) >= {RUN_FILE, EVENTS_FILE, REPORT_FILE}
