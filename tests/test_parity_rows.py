"""docs/reference/torchrun-parity.md: every row has tests that exist, or a difference."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from benchmarks.__main__ import ROWS
from benchmarks.parity_cases import CASES, REASONS

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs/reference/torchrun-parity.md"


def table(title: str) -> list[list[str]]:
    """Return the rows of the tables of a section, as stripped cells."""
    section = PAGE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if re.match(r"\| (?!row |name )", line)]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


BEHAVIOURS = {row[0]: row[1:] for row in table("Behaviours")}
DIFFERENCES = {row[0]: row[1:] for row in table("Deliberate differences")}


@cache
def functions_of(path: Path) -> set[str]:
    """Return the names of the test functions of a file."""
    tree = ast.parse(path.read_text())
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def missing_tests(cell: str) -> list[str]:
    """Return the tests that a cell names and that do not exist."""
    missing = []
    cases = {case.name for case in CASES}
    for name in re.findall(r"`([^`]+)`", cell):
        path, _, function = name.partition("::")
        kind, _, rest = name.partition(": ")
        if kind in ("parity", "benchmark"):
            exists = rest in (cases if kind == "parity" else ROWS)
        else:
            exists = (TESTS / path).exists() and function in functions_of(TESTS / path)
        if not exists:
            missing.append(name)
    return missing


def test_every_row_is_there_once() -> None:
    assert [row[0] for row in table("Behaviours")] == [f"F{n:03}" for n in range(1, 176)]
    names = [row[0] for row in table("Deliberate differences")]
    assert names[:50] == [f"D{n}" for n in range(1, 51)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("row", BEHAVIOURS)
def test_a_row_has_tests_or_a_difference(row: str) -> None:
    _, tests, difference = BEHAVIOURS[row]
    assert tests or difference
    assert not difference or difference in DIFFERENCES
    assert not missing_tests(tests)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_has_tests(name: str) -> None:
    _, _, tests = DIFFERENCES[name]
    assert tests
    assert not missing_tests(tests)


def test_a_declared_reason_is_a_difference() -> None:
    """Of the cases of `benchmarks.parity`."""
    assert set(REASONS) <= set(DIFFERENCES)
    used = {declared.reason for case in CASES for declared in case.differs.values()}
    assert used == set(REASONS)


def test_names_of_cases_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
