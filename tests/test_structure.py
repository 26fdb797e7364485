"""The package is small and says one thing by one name: circles, lengths, class names, words."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import elastic_aio

PACKAGE = Path(elastic_aio.__file__).parent
REPOSITORY = PACKAGE.parent

MAX_FUNCTION_LINES = 50

# Each exception has its reason.
LONG_FUNCTIONS = {
    "store/wire.py RequestReader.read",  # the hot path of the server: one loop, no calls
}
# A sentence names its subject, and a directory is called one (CONTRIBUTING.md, Prose).
BANNED_WORDS = re.compile(
    r"\b(whoever|somebody|nobody|everybody|anybody|those who|told|heed(s|ed|ing)?|in vain"
    r"|hear of|folders?)\b",
    re.IGNORECASE,
)


@cache
def module_names() -> dict[str, Path]:
    """Return the modules of the package by dotted name."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("elastic_aio", *path.relative_to(PACKAGE).with_suffix("").parts)
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported_modules(name: str) -> set[str]:
    """Return the modules of the package that one imports, for typing only included."""
    known = module_names()
    found = set()
    for node in ast.walk(parsed(known[name])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in known}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found |= {full if full in known else node.module} & known.keys()
    return found - {name, "elastic_aio"}


def qualified_functions(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the functions of a module and the methods of its classes by qualified name."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{node.name}.{method.name}", method


def code_lines(node: ast.stmt) -> int:
    """Return the length of a function without its decorators and docstring."""
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    assert node.end_lineno is not None
    length = node.end_lineno - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        assert first.end_lineno is not None
        length -= first.end_lineno - first.lineno + 1
    return length


@pytest.mark.slow
def test_modules_import_each_other_without_a_circle() -> None:
    """Imports under TYPE_CHECKING and inside functions count too; `__init__` files do not."""
    packages = {name for name, path in module_names().items() if path.name == "__init__.py"}
    below = {name: imported_modules(name) - packages for name in module_names().keys() - packages}
    while below:
        free = {name for name, others in below.items() if not others & below.keys()}
        assert free, f"a circle among {sorted(below)}"
        below = {name: others for name, others in below.items() if name not in free}


def test_class_names_are_unique() -> None:
    """A name means one thing in the whole package; compat bears the names of others."""
    homes = defaultdict(list)
    for name, path in module_names().items():
        if name.startswith("elastic_aio.compat."):
            continue
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(name)
    assert not {name: found for name, found in homes.items() if len(found) > 1}


def test_functions_are_short() -> None:
    """Docstrings do not count."""
    too_long = {
        f"{path.relative_to(PACKAGE)} {name}": code_lines(node)
        for path in module_names().values()
        for name, node in qualified_functions(parsed(path))
        if code_lines(node) > MAX_FUNCTION_LINES
    }
    assert too_long.keys() == LONG_FUNCTIONS, too_long


def test_no_file_name_is_a_gerund() -> None:
    """Except those of compat, whose modules have the names of other packages."""
    paths = {name: path for name, path in module_names().items() if ".compat." not in name}
    stems = {path.stem for path in paths.values()}
    assert not {stem for stem in stems if stem.endswith("ing")}


def text_files() -> list[Path]:
    """Return all code and prose of the project, except the two files that list the words."""
    names = ("elastic_aio", "tests", "examples", "benchmarks", "docs")
    found = {path for name in names for path in (REPOSITORY / name).rglob("*.py")}
    found |= {path for name in names for path in (REPOSITORY / name).rglob("*.md")}
    found |= set(REPOSITORY.glob("*.md"))
    return sorted(found - {Path(__file__).resolve(), REPOSITORY / "CONTRIBUTING.md"})


def test_no_banned_word_is_used() -> None:
    """Comments, docstrings, messages, help texts and names have a noun as their subject."""
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()}"
        for path in text_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if BANNED_WORDS.search(line.replace("_", " "))
    ]
    assert not found, "\n".join(found)
