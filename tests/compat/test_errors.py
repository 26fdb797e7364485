"""torch's error files and `ChildFailedError` over elastic_aio."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from elastic_aio import LaunchSpec, run
from elastic_aio.compat.torch.errors import (
    ChildFailedError,
    ErrorHandler,
    ProcessFailure,
    get_error_handler,
    record,
)
from elastic_aio.errors import JobFailed
from elastic_aio.outcome import ExitStatus, Failure, WorkerError
from elastic_aio.worker.errorfile import WRITER
from tests.support.children import shell

HINT = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"


@pytest.fixture(name="own_file")
def _own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Name an error file for this process."""
    path = tmp_path / "own.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def written(path: Path, document: object) -> str:
    path.write_text(json.dumps(document))
    return str(path)


def failed(path: Path, text: str = "boom", stamp: int = 10, code: int = 1) -> ProcessFailure:
    extra = {"py_callstack": f"Traceback\n  {text}\n", "timestamp": str(stamp)}
    document = {"message": {"message": f"ValueError: {text}", "extraInfo": extra}}
    return ProcessFailure(0, 7, code, written(path, document))


def test_a_failure_with_an_error_file(tmp_path: Path) -> None:
    failure = failed(tmp_path / "e.json")
    assert failure.timestamp == 10
    assert failure.message["message"] == "ValueError: boom"
    assert failure.error_file_data == {"message": failure.message}
    text = ProcessFailure(
        0, 7, 1, written(tmp_path / "t.json", {"message": "text", "timestamp": "9"})
    )
    assert (text.message, text.timestamp) == ("text", 9)


@pytest.mark.parametrize(("time", "expected"), [(10.0, 10), (11.9, 10), (30.5, 30), (5.5, 5)])
def test_the_time_of_an_error_file_counts_if_it_can_be_true(
    tmp_path: Path, time: float, expected: int
) -> None:
    """The file was written up to a second after its own time, which has whole seconds."""
    path = failed(tmp_path / "e.json").error_file
    made = ProcessFailure.from_failure(
        Failure(
            rank=0,
            local_rank=0,
            pid=7,
            host="h",
            status=ExitStatus(1),
            time=time,
            order=0,
            error=WorkerError("ValueError: boom", None, time, path),
        )
    )
    assert made.timestamp == expected


def test_a_failure_without_an_error_file() -> None:
    """The traits of one failure are not those of another."""
    exited = ProcessFailure(0, 7, 138, "missing.json")
    assert (exited.message, exited.error_file, exited.signal_name()) == (HINT, "<N/A>", "<N/A>")
    traits = {"category": "system_terminated_error", "retryability": "False"}
    assert exited.error_file_data == {"message": "<NONE>", "errorTraits": traits}
    killed = ProcessFailure(0, 7, -11, "missing.json")
    assert killed.message == "Signal 11 (SIGSEGV) received by PID 7"
    assert killed.error_file_data == {"message": "<NONE>"}
    assert ProcessFailure(0, 7, -99, "").message == "Signal 99 (<N/A>) received by PID 7"


@pytest.mark.parametrize("content", ["{", '{"unknown": 1}', '{"message": {"message": "x"}}'])
def test_a_broken_error_file_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "e.json").write_text(content)
    with pytest.raises(Exception, match=r"."):
        ProcessFailure(0, 7, 1, str(tmp_path / "e.json"))


def test_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchrun's, byte for byte, except the time."""
    monkeypatch.setattr("socket.getfqdn", lambda: "host")
    monkeypatch.setattr(ProcessFailure, "timestamp_isoformat", lambda self: f"T{self.timestamp}")
    killed = ProcessFailure(1, 8, -9, "")
    killed.timestamp = 99
    path = tmp_path / "e.json"
    error = ChildFailedError("train.py", {1: killed, 0: failed(path)})
    assert error.get_first_failure() == (0, error.failures[0])
    border, section = "=" * 60, "-" * 60
    assert str(error) == (
        f"\n{border}\ntrain.py FAILED\n{section}\nFailures:\n"
        "[0]:\n  time      : T99\n  host      : host\n  rank      : 1 (local_rank: 1)\n"
        "  exitcode  : -9 (pid: 8)  (SIGKILL)\n  error_file: <N/A>\n"
        "  traceback : Signal 9 (SIGKILL) received by PID 8\n"
        f"{section}\nRoot Cause (first observed failure):\n"
        "[1]:\n  time      : T10\n  host      : host\n  rank      : 0 (local_rank: 0)\n"
        f"  exitcode  : 1 (pid: 7) \n  error_file: {path}\n"
        f"  traceback : Traceback\n    boom\n  \n{border}"
    )
    alone = str(ChildFailedError("x", {0: ProcessFailure(0, 7, 2, "")}))
    assert "\nFailures:\n  <NO_OTHER_FAILURES>\n" in alone
    with pytest.raises(AssertionError):
        ChildFailedError("x", {})
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_record(own_file: Path) -> None:
    """What is raised is written; values, exits and successes are not."""

    @record
    def fail(error: BaseException) -> object:
        raise error

    assert record(lambda: 3)() == 3
    assert fail(SystemExit(0)) is None
    for error in (SystemExit(2), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            fail(error)
    assert not own_file.exists()
    with pytest.raises(ValueError, match="boom"):
        fail(ValueError("boom"))
    message = json.loads(own_file.read_text())["message"]
    assert message["message"] == "ValueError: boom"
    assert "in fail" in message["extraInfo"]["py_callstack"]


def test_record_of_a_coroutine(own_file: Path) -> None:
    @record
    async def fail() -> NoReturn:
        raise ValueError("async")

    with pytest.raises(ValueError, match="async"):
        asyncio.run(fail())
    assert "async" in own_file.read_text()


def test_the_root_cause_is_passed_on(own_file: Path, tmp_path: Path) -> None:
    """With the exit code; this process's own traceback is not recorded."""

    @record
    def fail(failure: ProcessFailure) -> NoReturn:
        raise ChildFailedError("x", {3: failure})

    with pytest.raises(ChildFailedError):
        fail(ProcessFailure(0, 7, 5, ""))
    assert not own_file.exists()
    with pytest.raises(ChildFailedError):
        fail(failed(tmp_path / "e.json", code=-11))
    message = json.loads(own_file.read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("ValueError: boom", -11)


def test_the_writer_of_a_passed_on_file_is_this_process(own_file: Path, tmp_path: Path) -> None:
    """To its launcher it is the worker; a file of torch's has no writer."""
    for document in ({"message": "m", WRITER: 7}, {"message": "m"}):
        get_error_handler().dump_error_file(written(tmp_path / "e.json", document))
        own = json.loads(own_file.read_text())
        assert own == {**document, **({WRITER: os.getpid()} if WRITER in document else {})}


def test_a_broken_file_does_not_hide_the_error(own_file: Path, tmp_path: Path) -> None:
    failure = failed(tmp_path / "e.json")
    (tmp_path / "e.json").write_text("{")

    @record
    def fail() -> NoReturn:
        raise ChildFailedError("x", {0: failure})

    with pytest.raises(ChildFailedError):
        fail()
    assert not own_file.exists()


def test_an_existing_file_is_overwritten_with_a_warning(
    own_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failed(tmp_path / "e.json")
    own_file.write_text('{"message": "older"}')
    with caplog.at_level(logging.WARNING):
        get_error_handler().dump_error_file(str(tmp_path / "e.json"))
    assert "already exists and will be overwritten" in caplog.text
    assert "older" in caplog.text
    assert own_file.read_text() == (tmp_path / "e.json").read_text()


def test_a_text_gets_no_exit_code(
    own_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handler = get_error_handler()
    for document, problem in (({"message": "text"}, "new message format"), ({}, "`message`")):
        handler.dump_error_file(written(tmp_path / "e.json", document), 3)
        assert problem in caplog.text
        assert json.loads(own_file.read_text()) == document


def test_a_handler_of_the_users(own_file: Path) -> None:
    seen: list[Any] = []

    class Handler(ErrorHandler):
        def initialize(self) -> None:
            seen.append("initialized")

        def record_exception(self, e: BaseException) -> None:
            seen.append(e)

    def fail() -> NoReturn:
        raise LookupError

    with pytest.raises(LookupError):
        record(fail, Handler())()
    assert seen[0] == "initialized"
    assert isinstance(seen[1], LookupError)
    assert not own_file.exists()


RAISING = (
    "from elastic_aio.worker import record\n"
    "@record\ndef main():\n    raise ValueError('in the worker')\nmain()\n"
)


def test_a_job_of_this_library_passes_its_root_cause_on(own_file: Path) -> None:
    """`record` around `run()`."""
    with pytest.raises(JobFailed):
        record(run)(LaunchSpec([sys.executable, "-c", RAISING]))
    message = json.loads(own_file.read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("ValueError: in the worker", 1)
    own_file.unlink()
    with pytest.raises(JobFailed):
        record(run)(LaunchSpec(shell("exit 3")))
    assert not own_file.exists()
