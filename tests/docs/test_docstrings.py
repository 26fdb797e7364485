"""The names in the docstrings of public names exist: a reference of the site would lead nowhere."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

from docs.site.names import ROOT, PublicName, public_names
from docs.site.reference import field_docs

pytestmark = pytest.mark.slow  # reads all of the package

ELSEWHERE = {
    "stacks.txt",  # a file
    "elastic_aio.accelerators",  # groups of entry points
    "elastic_aio.rendezvous",
    "NumaOptions",  # torch's
    "RendezvousBackend",
}
NAMES = [each for each in public_names() if each.is_shown_here and each.kind != "data"]


@functools.cache
def defined() -> frozenset[str]:
    """Return all words that are names somewhere in the package, or text that is one."""
    found = set(dir(builtins))
    for path in (ROOT / "elastic_aio").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                    found.add(name)
                case ast.AsyncFunctionDef(name=name) | ast.Name(id=name) | ast.Attribute(attr=name):
                    found.add(name)
                case ast.alias(name=name, asname=other):
                    found.add((other or name).rpartition(".")[2])
                case ast.Constant(value=str(name)):
                    found.add(name)
    return frozenset(found)


def docstrings(each: PublicName) -> Iterator[str]:
    """Yield the docstrings of a public name, of its members and of its fields."""
    yield inspect.getdoc(each.value) or ""
    if isinstance(each.value, type):
        yield from (str(value.__doc__ or "") for value in vars(each.value).values())
        yield from field_docs(each.value).values()


def unknown_names(text: str) -> Iterator[str]:
    """Yield the code between backticks that looks like a name, and is none."""
    for code in re.findall(r"(?<!`)`([A-Za-z_][\w.]*\w)(?:\(\))?`(?!`)", text):
        first, *rest = code.split(".")
        is_name = re.match(r"[A-Z][a-z]", first) or rest or re.fullmatch(r"[a-z]+(_[a-z]+)+", first)
        if is_name and code not in ELSEWHERE and not _exists(first, rest):
            yield code


def _exists(first: str, rest: list[str]) -> bool:
    owners: list[Any] = [each.value for each in public_names() if each.name == first]
    if owners and len(rest) == 1 and all(isinstance(owner, type) for owner in owners):
        return any(
            hasattr(owner, rest[0]) or rest[0] in field_docs(owner) or rest[0] in _hints(owner)
            for owner in owners
        )
    return {first, *rest} <= defined()


def _hints(owner: type) -> set[str]:
    return {name for base in owner.__mro__ for name in getattr(base, "__annotations__", ())}


@pytest.mark.parametrize("each", NAMES, ids=lambda each: each.shown)
def test_names_in_docstrings_exist(each: PublicName) -> None:
    assert not [code for text in docstrings(each) for code in unknown_names(text)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`LaunchSpec.nprocs`", ["LaunchSpec.nprocs"]),
        ("`LaunchSpec.nproc_per_node`, `StopPlan.within()`", []),
        ("`NoSuchThing` and `no_such_name`", ["NoSuchThing", "no_such_name"]),
        ("`--tee`, `x=1`, `word`, ``NoSuchThing``", []),
    ],
)
def test_a_name_that_does_not_exist_is_found(text: str, found: list[str]) -> None:
    assert list(unknown_names(text)) == found
