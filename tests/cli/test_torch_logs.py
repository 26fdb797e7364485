"""Plug-ins of torchrun's entry point group that lay out logs, with torch itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_aio.cli import main

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

PLUGIN = """
import os
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest, LogsSpecs, Std

class Flat(LogsSpecs):
    @property
    def root_log_dir(self):
        return self._root_log_dir

    def reify(self, envs):
        assert self._tee == {1: Std.OUT} and self._redirects == Std.ERR
        attempt = envs[0]["TORCHELASTIC_RESTART_COUNT"]
        names = {rank: f"{self._root_log_dir}/{attempt}-{rank}" for rank in envs}
        return LogsDest(
            stdouts={rank: f"{name}.out" for rank, name in names.items()},
            stderrs={rank: os.devnull for rank in names},
            tee_stdouts={1: f"{names[1]}.out"},
            error_files={rank: f"{name}.json" for rank, name in names.items()},
        )

class Usual(DefaultLogsSpecs):
    pass
"""


@pytest.fixture(autouse=True)
def _plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "usual-1.0.dist-info"
    directory.mkdir()
    (directory / "METADATA").write_text("Metadata-Version: 2.1\nName: usual\nVersion: 1.0\n")
    (directory / "entry_points.txt").write_text(
        "[torchrun.logs_specs]\nflat = torch_layouts:Flat\nusual = torch_layouts:Usual\n"
    )
    (tmp_path / "torch_layouts.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_layout_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All workers of an attempt are planned at once, and each attempt anew."""
    script = 'echo "r$RANK $TORCHELASTIC_ERROR_FILE"; exit $((1 - ELASTIC_AIO_ATTEMPT))'
    logs = tmp_path / "logs"
    code = main(["run", "--logs-specs=flat", "--nproc-per-node=2", "--max-restarts=1", "-r2",
                 "-t1:1", "--log-dir", str(logs), "--no-python", "bash", "-c", script])  # fmt: skip
    assert code == 0
    assert (logs / "1-0.out").read_text() == f"r0 {logs}/1-0.json\n"
    assert f"[default1]:r1 {logs}/1-1.json" in capfd.readouterr().out


def test_torchs_own_layout(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    code = main(["run", "--logs-specs=usual", "--nproc-per-node=2", "-r3", "--rdzv-id=mine",
                 "--log-dir", str(logs), "--no-python", "echo", "said"])  # fmt: skip
    assert code == 0
    files = [*logs.glob("mine_*/attempt_0/[01]/stdout.log")]
    assert [file.read_text() for file in files if file.stat().st_size] == ["said\n"] * 2
