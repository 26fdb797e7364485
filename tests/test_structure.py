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
from tests.cli.test_start import FOR_OTHER_JOBS, STANDARD
from tests.test_layers import CONFINED

PACKAGE = Path(elastic_aio.__file__).parent
REPOSITORY = PACKAGE.parent

MAX_FUNCTION_LINES = 50

# Each exception has its reason.
LONG_FUNCTIONS = {
    "store/wire.py RequestReader.read",  # the hot path of the server: one loop, no calls
}
SINGLE_IMPORTERS_MAX = 37
ARROWS_MAX = 80

OPTIONAL = CONFINED.keys()
# Imports inside functions that `tests/cli/test_start.py` does not explain.
LATE = {
    "agent.agent": "a job without control has no server",
    "agent.preflight": "a job of a command looks for no module",
    "agent.worker_store": "the store of the workers is read by one kind of job only",
    "cli": "the guardian is spawned before anything else is imported",
    "cli.completion": "the table of all commands has this one",
    "cli.up": "the table of all commands has this one",
    "control.client": "a command does without an event loop",
    "cli.printer": "the page about a failure that has happened",
    "cli.guides": "the table of all commands has this one",
    "cli.run_options": "the guardian is spawned before the sockets are imported",
    "compat.torch.site.sitecustomize": "the program may install nothing",
    "engines.redis.link": "a logger is needed once",
    "process.adopted": "a program that adopts no orphans loads no ctypes",
    "process.proc": "few processes are left that hold pipes",
    "process.rusage": "a program that reaps its children otherwise loads no ctypes",
    "text": "the guardian and workers load neither",
}
# What runs in workers, or in the processes that fork them, loads little before it runs.
IN_WORKERS = ("worker.", "process.forkserver_main", "process.guard", "process.guardian_main")
# Of weakref and multiprocessing.
STANDARD_PRIVATES = {"_registry", "_config", "_children"}
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


@cache
def rooms() -> dict[str, str]:
    """Return the room of each module: its directory, or the package itself."""
    return {
        name: name.split(".")[1] if name.count(".") > 1 or path.name == "__init__.py" else ""
        for name, path in module_names().items()
        if name != "elastic_aio"
    }


@cache
def importers() -> dict[str, set[str]]:
    """Return which modules import each module; packages that only show names count too."""
    found: dict[str, set[str]] = {name: set() for name in module_names()}
    for name in module_names():
        for imported in imported_modules(name):
            found[imported].add(name)
    return found


def test_few_modules_have_one_importer() -> None:
    """Such a module is a part of its importer, unless it is another subject, or loaded later."""
    packages = {name for name, path in module_names().items() if path.name == "__init__.py"}
    single = {
        name
        for name, users in importers().items()
        if len(users) == 1 and name not in packages and not users & packages
    }
    assert len(single) <= SINGLE_IMPORTERS_MAX, sorted(single)


def test_rooms_know_few_rooms() -> None:
    """A directory is a room; the modules of the package itself are one more."""
    arrows = {
        (rooms()[name], rooms()[imported])
        for imported, users in importers().items()
        for name in users
        if "elastic_aio" not in (name, imported)
    }
    arrows = {(here, there) for here, there in arrows if here != there}
    assert len(arrows) <= ARROWS_MAX, sorted(arrows)


def own_names(tree: ast.Module) -> set[str]:
    """Return the names that a module defines or sets, in any of its scopes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and is_of(node, "self", "cls"):
            found |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
    return found


def foreign_privates(name: str) -> set[str]:
    """Return the private names of other modules of the package that a module uses."""
    tree = parsed(module_names()[name])
    own = own_names(tree)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("elastic_aio"):
            private = {alias.name for alias in node.names if is_private(alias.name)}
            found |= {one for one in private if f"{node.module}.{one}" not in module_names()}
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            # A subclass may use what its base class keeps for it; os._exit() is public.
            found |= set() if is_of(node, "self", "cls", "os", "posix") else {node.attr}
    return found & (private_names() - STANDARD_PRIVATES)


def is_of(node: ast.Attribute, *names: str) -> bool:
    """Return whether an attribute is that of a variable with one of these names."""
    return isinstance(node.value, ast.Name) and node.value.id in names


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@cache
def private_names() -> frozenset[str]:
    """Return the private names that the package defines."""
    found = {one for path in module_names().values() for one in own_names(parsed(path))}
    return frozenset(filter(is_private, found))


@pytest.mark.slow
@pytest.mark.parametrize("name", module_names())
def test_no_module_uses_the_private_names_of_another(name: str) -> None:
    assert not foreign_privates(name)


def late_imports() -> Iterator[tuple[str, str]]:
    """Yield the modules with imports inside functions, and what they import there."""
    for name, path in module_names().items():
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for inner in ast.walk(node):
                if isinstance(inner, ast.Import):
                    yield from ((name, alias.name) for alias in inner.names)
                elif isinstance(inner, ast.ImportFrom):
                    yield from ((name, f"{inner.module}.{alias.name}") for alias in inner.names)


def test_imports_stand_at_the_top() -> None:
    """Unless a test shows that other jobs do without the module, or a package is optional."""
    unloaded = {f"elastic_aio.{name}" for name in FOR_OTHER_JOBS.split()} | {*STANDARD.split()}
    late = {
        name.removeprefix("elastic_aio.")
        for name, imported in late_imports()
        if not any(imported == one or imported.startswith(f"{one}.") for one in unloaded)
        and imported.partition(".")[0] not in OPTIONAL
    }
    assert {name for name in late if not name.startswith(IN_WORKERS)} == LATE.keys()
