"""The public names: where each is documented, and what it is."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_aio.status import Event
from tests.support.exports import LAZY, names_of, source_of, table_of

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "elastic_aio",
    "elastic_aio.control",
    "elastic_aio.worker",
    "elastic_aio.store",
    "elastic_aio.engines.etcd",
    "elastic_aio.engines.redis",
    "elastic_aio.http",
    "elastic_aio.multiprocessing",
    "elastic_aio.sync",
    "elastic_aio.plugins",
    "elastic_aio.testing",
)
TORCH = "elastic_aio.compat.torch"
TORCH_MODULES = tuple(
    f"{TORCH}.{name}"
    for name in (
        "launch",
        "agent",
        "rendezvous",
        "multiprocessing",
        "errors",
        "timers",
        "events",
        "metrics",
        "installation",
    )
)


@dataclass(frozen=True)
class PublicName:
    """A name of a package, documented under `shown`: the first package that has it."""

    package: str
    name: str
    shown: str
    home: str
    """The module that defines it."""
    value: Any

    @property
    def full(self) -> str:
        return f"{self.package}.{self.name}"

    @property
    def is_shown_here(self) -> bool:
        return self.full == self.shown

    @property
    def kind(self) -> str:
        """The directive of autodoc; `data` for an alias of a type, or a constant."""
        if isinstance(self.value, type):
            return "exception" if issubclass(self.value, BaseException) else "class"
        return "function" if inspect.isroutine(self.value) else "data"

    @property
    def is_event(self) -> bool:
        return isinstance(self.value, type) and issubclass(self.value, Event)


def home_of(package: str, name: str, value: Any) -> str:
    """Return the module that defines a name; of an alias or a constant, from the imports."""
    if isinstance(value, type) or inspect.isroutine(value):
        return str(value.__module__)
    if package in LAZY:
        return home_of(table_of(package)[0][name], name, value)
    for node in ast.walk(ast.parse(source_of(package).read_text())):
        if isinstance(node, ast.ImportFrom) and any(name == each.name for each in node.names):
            return home_of(node.module or "", name, value)
    return package


@functools.cache
def public_names() -> tuple[PublicName, ...]:
    """Return all names of all public packages, in their order."""
    return tuple(_all_names())


def _all_names() -> Iterator[PublicName]:
    shown: dict[object, str] = {}
    for package in (*PACKAGES, *TORCH_MODULES):
        module = importlib.import_module(package)
        names = set(module.__all__) if package in TORCH_MODULES else names_of(package)
        for name in sorted(names, key=str.lower):
            value = getattr(module, name)
            home = home_of(package, name, value)
            # Equal constants, and aliases of types, differ by their names.
            key = value if isinstance(value, type) or inspect.isroutine(value) else (home, name)
            full = shown.setdefault(key, f"{package}.{name}")
            yield PublicName(package, name, full, home, value)


@functools.cache
def by_place() -> dict[str, str]:
    """Return where a name is documented, by the place of its definition and by its full name."""
    found: dict[str, str] = {}
    for each in public_names():
        found.setdefault(f"{each.home}.{each.name}", each.shown)
        found.setdefault(each.full, each.shown)
        if isinstance(each.value, type) or inspect.isroutine(each.value):
            found.setdefault(f"{each.value.__module__}.{each.value.__qualname__}", each.shown)
    return found


@functools.cache
def by_word() -> dict[str, str]:
    """Return where a name is documented, by the bare name; without names with two meanings."""
    found: dict[str, set[str]] = {}
    for each in public_names():
        if not each.package.startswith(TORCH):
            found.setdefault(each.name, set()).add(each.shown)
    for each in public_names():
        if each.package.startswith(TORCH) and each.name not in found:
            found.setdefault(each.name, set()).add(each.shown)
    return {name: min(places) for name, places in found.items() if len(places) == 1}


@functools.cache
def kinds() -> dict[str, list[str]]:
    """Return the names of the package by the kinds of docs/reference/modules.md."""
    page = (ROOT / "docs/reference/modules.md").read_text()
    section = page.partition("\n## elastic_aio\n")[2].partition("\n## ")[0]
    found: dict[str, list[str]] = {}
    for kind, names in re.findall(r"^\| ([a-z][\w ]+) \| (.*) \|$", section, re.MULTILINE):
        if kind != "kind":
            known = found.setdefault(kind, [])
            listed = re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", names))
            known += [name for name in listed if not any(name in each for each in found.values())]
    return found
