"""torch's error files and ours are compatible."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic_aio.worker.errorfile import parse_error_file, with_exit_code, write_error_file
from elastic_aio.worker.recorder import worker_error

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parent.parent.parent


def recorded_by_torch(body: str, path: Path) -> subprocess.CompletedProcess[str]:
    code = (
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        f"@record\ndef main():\n    {body}\nmain()\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_torchs_error_files_are_read(tmp_path: Path) -> None:
    """Of an unmodified worker with torch's decorator."""
    path = tmp_path / "error.json"
    began = time.time()
    done = recorded_by_torch("raise ValueError('from torch')", path)
    assert done.returncode == 1
    error = parse_error_file(path.read_bytes(), str(path))
    assert error is not None
    assert error.message == "ValueError: from torch"
    assert error.traceback is not None
    assert error.traceback.startswith("Traceback (most recent call last):")
    assert "raise ValueError('from torch')" in error.traceback or "in main" in error.traceback
    assert began - 1 <= error.timestamp <= time.time() + 1


def test_torch_leaves_no_file_for_an_exit(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    assert recorded_by_torch("raise SystemExit(0)", path).returncode == 0
    assert recorded_by_torch("raise SystemExit(3)", path).returncode == 3
    assert not path.exists()


def write_error(path: Path) -> None:
    try:
        raise ValueError("from here")
    except ValueError as error:
        write_error_file(worker_error(error, str(path)))


def test_torch_reads_our_error_files(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    path = tmp_path / "error.json"
    write_error(path)
    failure = ProcessFailure(local_rank=1, pid=7, exitcode=1, error_file=str(path))
    assert failure.message == failure.error_file_data["message"]
    assert failure.message["message"] == "ValueError: from here"
    assert abs(failure.timestamp - time.time()) < 60
    assert failure.error_file_data["message"]["extraInfo"]["py_callstack"].startswith("Traceback")


def test_torch_formats_our_failure(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    path = tmp_path / "error.json"
    write_error(path)
    failure = ProcessFailure(local_rank=0, pid=7, exitcode=1, error_file=str(path))
    report = str(ChildFailedError("job", {0: failure}))
    assert "from here" in report


def test_an_added_exit_code_is_where_torch_puts_it(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    error_file, with_code = tmp_path / "error.json", tmp_path / "with_code.json"
    write_error(error_file)
    handler = ErrorHandler()
    document = json.loads(error_file.read_bytes())
    handler.override_error_code_in_rootcause_data("root", document, 3)
    with_code.write_bytes(with_exit_code(error_file.read_bytes(), 3))
    assert json.loads(with_code.read_bytes()) == document
