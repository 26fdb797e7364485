"""`python -m elastic_aio`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.cli import run_program


@pytest.mark.e2e
def test_a_file_with_the_name_of_a_module_is_not_imported(tmp_path: Path) -> None:
    """As with `aio-elastic`, which has no current directory in its path."""
    for name in ("dis", "random", "token", "socket", "msgspec"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')\n")
    program = [sys.executable, "-m", "elastic_aio", "run", "--no-python", "echo", "hi"]
    ended = run_program(program, cwd=tmp_path)
    assert (ended.code, ended.out) == (0, "hi\n")
