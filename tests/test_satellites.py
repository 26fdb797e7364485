"""The core does without its satellites: each can be deleted with its tests."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.test_layers import MODULES, SATELLITES, package_of

ROOT = Path(__file__).parents[1]

CORE_TESTS = ("tests/spec", "tests/discovery", "tests/store", "tests/rendezvous")
"""Of all that uses an engine by its name; half a minute on two idle cores."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the repository"),
]


def copy_without(satellites: Iterable[str], target: Path) -> None:
    """Copy the files that git knows, without satellites and the tests that import them."""
    named = "|".join(satellites)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().splitlines():
        source, copy = ROOT / name, target / name
        is_part = re.match(rf"(elastic_aio|tests)/({named})/", name)
        is_test = re.match(r"tests/.*/test_\w+\.py$", name) and re.search(
            rf"^ *(from|import) (elastic_aio|tests)\.({named})\b", source.read_text(), re.M
        )
        if source.is_file() and not is_part and not is_test:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)


def run(directory: Path, *argv: str) -> None:
    done = subprocess.run(
        [sys.executable, *argv], cwd=directory, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.mark.parametrize("satellite", SATELLITES)
def test_every_other_module_can_be_imported_without_a_satellite(
    satellite: str, tmp_path: Path
) -> None:
    copy_without([satellite], tmp_path)
    # Programs are not imported, nor what only the path of a program finds.
    programs = {"__main__", "worker.bootstrap_main", "worker.startup.sitecustomize"}
    left_out = programs | {"process.guard"}
    names = [name for name in MODULES if package_of(name) != satellite and name not in left_out]
    code = "; ".join(f"import elastic_aio.{name}" for name in names if name != "__init__")
    run(tmp_path, "-c", f"{code}; assert elastic_aio.__file__.startswith({str(tmp_path)!r})")


def test_the_core_passes_its_tests_without_all_satellites(tmp_path: Path) -> None:
    copy_without(SATELLITES, tmp_path)
    for name in ("conftest.py", "support"):  # shared by the tests of the core
        assert (tmp_path / "tests" / name).exists()
    run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CORE_TESTS)
