"""Which tested example shows a public name: blocks of pages that tests run, and example files."""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Iterator
from dataclasses import dataclass

from docs.site.blocks import blocks
from docs.site.names import ROOT, public_names

LONGEST = 60
"""Lines of an example that is shown beside a name; a longer one is linked to only."""


@dataclass(frozen=True)
class Example:
    """A program that a test runs: a block of a page, or a file."""

    source: str
    page: str
    """Path of the page or the file, from the root."""

    @property
    def lines(self) -> int:
        return self.source.count("\n")


def examples() -> Iterator[Example]:
    """Yield all examples that tests run, those that are for a name before others."""
    yield from cells()
    for block in blocks():
        if block.language == "python" and block.is_run:
            yield Example(block.text, block.page)
    for path in sorted(ROOT.glob("examples/**/*.py")):
        yield Example(path.read_text(), str(path.relative_to(ROOT)))


def cells() -> Iterator[Example]:
    """Yield the programs of docs/examples: `# %%` begins each."""
    for path in sorted(ROOT.glob("docs/examples/*.py")):
        for text in path.read_text().split("# %%\n")[1:]:
            yield Example(text.strip() + "\n", str(path.relative_to(ROOT)))


def used_names(source: str) -> set[str]:
    """Return the public names that a program uses, by where they are documented.

    A name counts if the program does more than import it.
    """
    tree = ast.parse(source)
    bound: dict[str, str] = {}
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("elastic_aio"):
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("elastic_aio"):
                    modules[alias.asname or alias.name] = alias.name
    # As in `from elastic_aio import worker`.
    modules |= {local: full for local, full in bound.items() if _is_module(full)}
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in bound:
            used.add(bound[node.id])
        elif isinstance(node, ast.Attribute):
            used |= {f"{full}.{node.attr}" for name, full in modules.items()
                     if ast.unparse(node.value) == name}  # fmt: skip
    return {shown for name in used if (shown := _shown().get(name))}


def _is_module(name: str) -> bool:
    if name in _shown():
        return False
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


@functools.cache
def _shown() -> dict[str, str]:
    return {each.full: each.shown for each in public_names()} | {
        f"{each.home}.{each.name}": each.shown for each in public_names()
    }


@functools.cache
def examples_by_name() -> dict[str, list[Example]]:
    """Return the examples of each name, the shortest first, files made for it before others."""
    found: dict[str, list[Example]] = {}
    for example in examples():
        for name in used_names(example.source):
            found.setdefault(name, []).append(example)
    return {
        name: sorted(those, key=lambda one: (one.lines > LONGEST, one.lines))
        for name, those in found.items()
    }
