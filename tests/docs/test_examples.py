"""Every public name has an example, and every cell of docs/examples prints what it says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from docs.site.examples import Example, cells, examples_by_name
from docs.site.names import TORCH, TORCH_MODULES, public_names
from tests.support.cli import CLI, REPOSITORY, run_program

CELLS = [cell for cell in cells() if "os.environ" not in cell.source]
NAMES = [each for each in public_names() if each.is_shown_here]


def first_name(cell: Example) -> str:
    """Return the first name that a cell imports, to tell cells apart."""
    match = re.search(r"import \(?\s*(\w+)", cell.source.partition("from elastic_aio")[2])
    return f"{Path(cell.page).stem}-{match[1] if match else ''}"


def test_every_name_has_an_example() -> None:
    """Of torch's names, each module has: the programs are torch's."""
    found = examples_by_name()
    missing = [each.shown for each in NAMES if each.shown not in found]
    assert not [name for name in missing if not name.startswith(TORCH)]
    for module in TORCH_MODULES:
        assert any(name.startswith(f"{module}.") for name in found), module


@pytest.mark.docs
@pytest.mark.parametrize("cell", CELLS, ids=first_name)
def test_a_cell_prints_what_its_comments_say(cell: Example, tmp_path: Path) -> None:
    check_cell(cell, tmp_path)


@pytest.mark.engine
@pytest.mark.parametrize("name", ["etcd", "redis"])
def test_a_cell_of_an_engine(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    (cell,) = [each for each in cells() if needs(each, name)]
    check_cell(cell, tmp_path, **{name.upper(): request.getfixturevalue(f"{name}_endpoint")})


def needs(cell: Example, *engines: str) -> bool:
    """Return whether a cell needs the server of an engine."""
    return any(f'"{name.upper()}"' in cell.source for name in engines)


def check_cell(cell: Example, tmp_path: Path, **more: str | None) -> None:
    """Run a cell; it ends with 0, and prints what the comments behind its calls say."""
    (tmp_path / "cell.py").write_text(cell.source)
    env: dict[str, str | None] = {
        "PYTHONPATH": str(REPOSITORY),
        "XDG_STATE_HOME": str(tmp_path),
        "TZ": "UTC",
        **more,
    }
    words = [sys.executable, "cell.py"]
    if cell.page.endswith("workers.py"):
        env["TORCHELASTIC_ENABLE_FILE_TIMER"] = "1"
        words = [*CLI, "run", "cell.py"]
    ended = run_program(words, env=env, cwd=tmp_path)
    assert ended.code == 0, ended.err
    printed = ended.out.splitlines()
    for shown in re.findall(r"\)  # (.+)$", cell.source, re.MULTILINE):
        if not shown.startswith("SIGKILL if"):
            assert shown in printed, f"{shown!r} is not in {ended.out}"
