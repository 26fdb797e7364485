"""torch's error files: written, read, and any content accepted; `record`."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.outcome import ExitStatus, Failure, WorkerError
from elastic_aio.worker.errorfile import (
    NEAR_S,
    WRITER,
    is_temporary,
    parse_error_file,
    pass_on_error_file,
    render_error_file,
    with_exit_code,
    write_error_file,
)
from elastic_aio.worker.recorder import record, worker_error
from tests.support import functions

ROOT = Path(__file__).parent.parent.parent
NOW = 1_700_000_000.25


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the environment names for `record`."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001  # returned
        return caught


def read(path: Path) -> WorkerError:
    error = parse_error_file(path.read_bytes(), str(path))
    assert error is not None
    return error


def test_the_format_is_torchs(tmp_path: Path) -> None:
    """One line of ASCII; the time is whole seconds as text."""
    path = tmp_path / "error.json"
    write_error_file(worker_error(raised(ValueError("naïve\n\udcff")), str(path)))
    content = path.read_bytes()
    assert content.isascii()
    assert b"\n" not in content
    message = json.loads(content)["message"]
    assert message["message"] == "ValueError: naïve\n\udcff"
    assert message["extraInfo"]["py_callstack"].startswith("Traceback (most recent call last):\n")
    assert "in raised" in message["extraInfo"]["py_callstack"]
    assert message["extraInfo"]["timestamp"] == str(int(message["extraInfo"]["timestamp"]))
    assert abs(float(message["extraInfo"]["timestamp"]) - path.stat().st_mtime) < 2


def test_an_error_that_cannot_be_formatted_is_recorded(error_file: Path) -> None:
    """With its frames; and it is raised again."""
    with pytest.raises(functions.BadNotesError):
        record(functions.raise_bad_notes)()
    written = read(error_file)
    assert written.message == "BadNotesError: text"
    assert written.traceback is not None
    assert "in raise_bad_notes\n" in written.traceback
    last = "\nBadNotesError: text\n"
    if sys.version_info >= (3, 13):  # which formats it itself
        last = "\ntests.support.functions.BadNotesError: text\nIgnored error getting __notes__: "
        last += "ZeroDivisionError()\n"
    assert written.traceback.endswith(last)


def test_an_error_file_survives_a_round_trip(tmp_path: Path) -> None:
    """With the time at which it was raised, which the timestamp of torch cuts."""
    path = tmp_path / "error.json"
    written = worker_error(raised(KeyError("x")), str(path))
    write_error_file(written)
    error = read(path)
    assert error.message == "KeyError: 'x'"
    assert error.traceback is not None
    assert "KeyError: 'x'" in error.traceback
    assert (error.path, error.timestamp) == (str(path), written.timestamp)
    assert error.pid == os.getpid()


@pytest.mark.parametrize(
    ("writer", "age", "error", "is_kept"),
    [
        ("itself", 900.0, ValueError("x"), True),
        ("another", NEAR_S - 2, ValueError("x"), False),
        ("another", NEAR_S - 2, CalledProcessError(1, "x"), True),
        ("another", NEAR_S + 2, CalledProcessError(1, "x"), False),
        (None, NEAR_S - 2, ValueError("x"), True),
        (None, NEAR_S + 2, ValueError("x"), False),
    ],
)
def test_what_the_end_of_a_script_overwrites(
    tmp_path: Path, writer: str | None, age: float, error: Exception, is_kept: bool
) -> None:
    """What a helper has recorded says nothing about the end, unless its failure is the end."""
    path = tmp_path / "error.json"
    pid = {"itself": os.getpid(), "another": os.getppid(), None: None}[writer]
    past = time.time() - age
    path.write_text(json.dumps({"message": "older", "timestamp": past, WRITER: pid}))
    own = worker_error(error, str(path))
    write_error_file(own, keeps_reason=True)
    written = read(path)
    assert written.message == ("older" if is_kept else own.message)


@pytest.mark.parametrize("pid", [True, "7", 7.0, None, []])
def test_an_invalid_process_is_none(pid: object) -> None:
    """The file does not say who wrote it."""
    error = parse_error_file(json.dumps({"message": "m", WRITER: pid}).encode(), "p")
    assert error == WorkerError("m", None, 0.0, "p", None)


def test_writing_is_atomic(tmp_path: Path) -> None:
    """50 reads while the file is written again and again."""
    path = tmp_path / "error.json"
    error = raised(ValueError("x" * 200_000))
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            write_error_file(worker_error(error, str(path)))

    writer = threading.Thread(target=write)
    writer.start()
    reads = 0
    try:
        while reads < 50:
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                continue
            parsed = parse_error_file(content, str(path))
            assert parsed is not None
            assert len(parsed.message) == 16 * 1024
            reads += 1
    finally:
        stop.set()
        writer.join()
    assert os.listdir(tmp_path) == ["error.json"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("error.json.123", True),
        ("error_12.json.123", True),
        ("error.json", False),
        ("error_12.json", False),
        ("error_a.json.1", False),
        ("my-error.json.123", False),
    ],
)
def test_what_a_killed_writer_leaves_is_known_by_its_name(name: str, *, expected: bool) -> None:
    assert is_temporary(name) is expected


def test_a_file_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    """The directory is missing."""
    with pytest.raises(OSError, match="No such file"):
        write_error_file(worker_error(ValueError(), str(tmp_path / "missing" / "error.json")))
    assert os.listdir(tmp_path) == []


def test_a_failed_write_leaves_no_unfinished_file(tmp_path: Path) -> None:
    """The rename fails."""
    path = tmp_path / "error.json"
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        write_error_file(worker_error(ValueError("x"), str(path)))
    assert os.listdir(tmp_path) == ["error.json"]


def document(**extra: Any) -> bytes:
    return json.dumps({"message": {"message": "m", "extraInfo": extra}}).encode()


@pytest.mark.parametrize(
    ("content", "message", "traceback", "timestamp"),
    [
        (document(py_callstack="T", timestamp="1600000000"), "m", "T", 1_600_000_000.0),
        (document(py_callstack="T", timestamp=1600000000.5), "m", "T", 1_600_000_000.5),
        (document(timestamp="1700000000"), "m", None, 1_700_000_000.0),
        (document(timestamp=1700000001), "m", None, 1_700_000_001.0),
        (document(timestamp="soon"), "m", None, 0.0),
        (document(timestamp=None), "m", None, 0.0),
        (document(timestamp=[]), "m", None, 0.0),
        (document(py_callstack=5), "m", None, 0.0),
        (b'{"message": "plain text"}', "plain text", None, 0.0),
        (b'{"message": "plain", "timestamp": 1600000000}', "plain", None, 1_600_000_000.0),
        (b'{"message": {"message": "m"}}', "m", None, 0.0),
        (b'{"message": {"message": "m", "extraInfo": []}}', "m", None, 0.0),
        (b'{"message": {"message": "m", "errorCode": 3}}', "m", None, 0.0),
        (
            b'{"message": {"message": "", "extraInfo": {"py_callstack": "T"}}}',
            "",
            "T",
            0.0,
        ),
        ('{"message": "ü"}'.encode(), "ü", None, 0.0),
    ],
)
def test_every_known_format_is_read(
    content: bytes, message: str, traceback: str | None, timestamp: float
) -> None:
    """torch's two formats; invalid details are ignored."""
    assert parse_error_file(content, "p") == WorkerError(message, traceback, timestamp, "p")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"3",
        b'"text"',
        b"{}",
        b'{"message": null}',
        b'{"message": ""}',
        b'{"message": []}',
        b'{"message": {}}',
        b'{"message": {"message": null}}',
        b'{"message": {"message": ""}}',
        b'{"message": {"message": 5}}',
        b'{"message": {"message": "m", "extraInfo": {"py_callst',
        b'{"message": "m"} {"message": "n"}',
        b"\xff\xfe\x00",
        b"\x00" * 100,
        b'{"message": "\xff"}',
        b"[" * 500_000,
        b'{"message":' * 200_000,
        b'{"message": ' + b"9" * 10_000 + b"}",
    ],
    ids=lambda content: str(content[:16]),
)
def test_malformed_content_is_none(content: bytes) -> None:
    """Truncated, foreign, huge or deeply nested."""
    assert parse_error_file(content, "p") is None


def test_every_truncation_is_none(tmp_path: Path) -> None:
    """A writer may be killed."""
    path = tmp_path / "error.json"
    write_error_file(worker_error(ValueError("x"), str(path)))
    content = path.read_bytes()
    for length in range(len(content)):
        assert parse_error_file(content[:length], "p") is None


@given(st.binary(max_size=200))
def test_any_bytes_are_accepted(content: bytes) -> None:
    error = parse_error_file(content, "p")
    assert error is None or error.message or error.traceback


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["message", "extraInfo", "py_callstack", "timestamp", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@pytest.mark.slow
@given(json_values)
def test_any_json_is_accepted(value: Any) -> None:
    error = parse_error_file(json.dumps({"message": value}).encode(), "p")
    if error is not None:
        assert isinstance(error.message, str)
        assert error.traceback is None or isinstance(error.traceback, str)
        assert isinstance(error.timestamp, float)
        assert math.isfinite(error.timestamp)


@pytest.mark.parametrize("timestamp", ["inf", "-inf", "nan", float("inf"), "1e400", 10**400])
def test_an_invalid_time_is_replaced(timestamp: object) -> None:
    """Infinity would order failures wrongly, and JSON has none."""
    error = parse_error_file(document(timestamp=timestamp), "p")
    assert error == WorkerError("m", None, 0.0, "p")


def test_the_exit_code_is_added_as_torch_does() -> None:
    """A launcher inside a launcher adds `errorCode`."""
    added = json.loads(with_exit_code(document(timestamp="1"), 3))
    assert added == {
        "message": {"message": "m", "extraInfo": {"timestamp": "1"}, "errorCode": 3},
    }
    assert json.loads(with_exit_code(document(), 0)) == json.loads(document())
    assert json.loads(with_exit_code(b'{"message": "plain"}', 3)) == {"message": "plain"}


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 500_000], ids=len)
def test_an_exit_code_needs_an_error_file(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        with_exit_code(content, 3)


# ------------------------------------------------------------------------- record


class Awkward(Exception):
    """An exception whose text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


Raising = Callable[[BaseException], None]


@pytest.fixture(params=["sync", "async"])
def call_raising(request: pytest.FixtureRequest) -> Raising:
    """A function that raises an error inside a recorded function of either kind."""

    def call(error: BaseException) -> None:
        @record
        def function() -> None:
            raise error

        @record
        async def coroutine_function() -> None:
            await asyncio.sleep(0)
            raise error

        if request.param == "async":
            asyncio.run(coroutine_function())
        else:
            function()

    return call


def test_an_exception_is_recorded_and_raised(call_raising: Raising, error_file: Path) -> None:
    error = ValueError("x")
    with pytest.raises(ValueError, match="x") as caught:
        call_raising(error)
    assert caught.value is error
    recorded = read(error_file)
    assert recorded.message == "ValueError: x"
    assert os.listdir(error_file.parent) == ["error.json"]


def test_exit_zero_is_a_return(call_raising: Raising, error_file: Path) -> None:
    call_raising(SystemExit(0))
    assert not error_file.exists()


@pytest.mark.parametrize("code", [1, "message", None])
def test_other_exits_leave_no_file(call_raising: Raising, error_file: Path, code: object) -> None:
    with pytest.raises(SystemExit) as caught:
        call_raising(SystemExit(code))
    assert caught.value.code == code
    assert not error_file.exists()


def test_an_interrupt_leaves_no_file(call_raising: Raising, error_file: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        call_raising(KeyboardInterrupt())
    assert not error_file.exists()


def test_a_cancellation_leaves_no_file(error_file: Path) -> None:

    @record
    async def main() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert not error_file.exists()


@pytest.mark.parametrize("path", [None, "", "/nonexistent/error.json"])
def test_an_exception_is_raised_if_it_cannot_be_recorded(
    call_raising: Raising, monkeypatch: pytest.MonkeyPatch, path: str | None
) -> None:
    """Without the variable, or if the file cannot be written."""
    if path is None:
        monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    else:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
    with pytest.raises(KeyError, match="x"):
        call_raising(KeyError("x"))


@pytest.mark.usefixtures("error_file")
def test_an_exception_without_a_text_is_still_raised(call_raising: Raising) -> None:
    """The error of its `__str__` does not replace it."""
    with pytest.raises(Awkward):
        call_raising(Awkward())


def test_a_recorded_function_keeps_its_signature() -> None:

    @record
    def main(a: int, *, b: int = 2) -> int:
        """Say what it is."""
        return a + b

    @record
    async def main_async(a: int) -> int:
        return a

    assert (main.__name__, main.__doc__, main(3, b=4)) == ("main", "Say what it is.", 7)
    assert list(inspect.signature(main).parameters) == ["a", "b"]
    assert inspect.iscoroutinefunction(main_async)
    assert asyncio.run(main_async(5)) == 5


def child(body: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", body],
        env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_worker_process_fails_with_file_traceback_and_code(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    done = child(
        "from elastic_aio.worker import record\n@record\ndef main(): 1 / 0\nmain()\n", path
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ZeroDivisionError: division by zero")
    assert read(path).message == "ZeroDivisionError: division by zero"


def test_a_crash_shows_a_stack(tmp_path: Path) -> None:
    """`record` enables the fault handler."""
    body = (
        "import os, signal\nfrom elastic_aio.worker import record\n"
        "@record\ndef crashing(): os.kill(os.getpid(), signal.SIGSEGV)\ncrashing()\n"
    )
    done = child(body, tmp_path / "error.json")
    assert done.returncode == -11
    assert "in crashing" in done.stderr


def test_a_worker_without_stderr_still_records(tmp_path: Path) -> None:
    """Only the fault handler is missing."""
    path = tmp_path / "error.json"
    body = (
        "import os, sys\nos.close(2)\nsys.stderr = None\n"
        "from elastic_aio.worker import record\n"
        "@record\ndef main(): raise ValueError('x')\nmain()\n"
    )
    assert child(body, path).returncode == 1
    assert read(path).message == "ValueError: x"


def test_the_time_is_in_the_content(tmp_path: Path) -> None:
    """The clock of a network file system is another one, or has whole seconds."""
    path = tmp_path / "error.json"
    before = time.time()
    write_error_file(worker_error(ValueError("x"), str(path)))
    os.utime(path, (1, 1))
    assert before <= read(path).timestamp <= time.time()


@pytest.mark.parametrize("stack", ["Traceback ...\nValueError: x\n", None])
def test_a_rendered_error_file_can_be_read(stack: str | None) -> None:
    """Of an error on another host."""
    error = WorkerError("ValueError: x \udcff", stack, 1_700_000_000.0, "/far/error.json")
    content = render_error_file(error)
    assert parse_error_file(content, "/far/error.json") == WorkerError(
        error.message, stack, 1_700_000_000.0, "/far/error.json"
    )


def test_long_texts_are_abridged(tmp_path: Path) -> None:
    """By the writer, and by the reader, since torch writes such files too."""
    path = tmp_path / "error.json"
    write_error_file(worker_error(ValueError("x" * 1_000_000), str(path)))
    assert path.stat().st_size < 100_000
    document = {"message": "y" * 100_000, "extraInfo": {"py_callstack": "z\n" * 100_000}}
    error = parse_error_file(json.dumps({"message": document}).encode(), "p")
    assert error is not None
    assert error.traceback is not None
    for text in (error.message, error.traceback):
        assert len(text) < 70_000
        assert "are left out" in text


RECORDED = (
    "from elastic_aio.worker import record\n"
    "@record\ndef main(): raise ValueError('inner')\nmain()\n"
)
NESTED = """
import sys
from elastic_aio import LaunchSpec, run
from elastic_aio.worker import record
@record
def main(): run(LaunchSpec([sys.executable, "-c", sys.argv[1]]))
main()
"""


@pytest.mark.slow
def test_a_launcher_in_a_worker_passes_the_root_cause_on(tmp_path: Path) -> None:
    """With the exit code; what was there before is named in a warning."""
    path = tmp_path / "error.json"
    path.write_text("older")
    program = [sys.executable, "-c", NESTED, RECORDED]
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(path)}
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    message = json.loads(path.read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("ValueError: inner", 1)
    assert f"{path} exists already and is overwritten; it held: older" in done.stderr


def failure_with(path: Path, message: str = "m", code: int = 3) -> Failure:
    error = WorkerError(message, "stack", 1_700_000_000.0, str(path))
    return Failure(0, 0, 7, "h", ExitStatus(code=code), 1_700_000_000.0, 0, error=error)


def test_an_error_file_is_passed_on_whole(tmp_path: Path) -> None:
    """Also what another tool has added; a file of another host is rendered.

    The writer is the launcher, which is the worker of its own launcher.
    """
    path, own = tmp_path / "theirs.json", tmp_path / "own.json"
    extra = {"py_callstack": "stack", "timestamp": "1700000000", "more": "kept"}
    document = {"message": {"message": "m", "extraInfo": extra}, "errorTraits": {"a": "b"}}
    document[WRITER] = 7
    path.write_text(json.dumps(document))
    assert pass_on_error_file(failure_with(path), str(own)) is None
    passed = json.loads(own.read_text())
    assert passed["errorTraits"] == {"a": "b"}
    assert passed[WRITER] == os.getpid()
    assert passed["message"]["extraInfo"] == extra
    assert passed["message"]["errorCode"] == 3
    warning = pass_on_error_file(failure_with(path, "of another host"), str(own))
    assert warning is not None
    assert "errorTraits" in warning
    assert json.loads(own.read_text())["message"]["message"] == "of another host"
    pass_on_error_file(failure_with(tmp_path / "missing"), str(own))
    assert json.loads(own.read_text())["message"]["message"] == "m"
    with pytest.raises(OSError, match="nowhere"):
        pass_on_error_file(failure_with(path), "/nowhere/error.json")


def test_pipes_in_place_of_error_files_block_nothing(tmp_path: Path) -> None:
    """The worker's own is rendered again; that of the launcher is replaced."""
    path, own = tmp_path / "theirs.json", tmp_path / "own.json"
    os.mkfifo(path)
    os.mkfifo(own)
    assert pass_on_error_file(failure_with(path), str(own)) is None
    assert json.loads(own.read_text())["message"]["message"] == "m"
