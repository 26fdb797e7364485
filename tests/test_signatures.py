"""No public signature mentions a type of ours that is not public itself."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.exports import PACKAGES, names_of

# Instances come from the library, so that the parameters of `__init__` are its own.
MADE_BY_US = {
    "EventReader",
    "GroupContext",
    "JobEvents",
    "LogReader",
    "ProcessContext",
    "RemoteStore",
    "SimNode",
    "SyncGroupContext",
    "SyncProcessContext",
}
# `Converted[A, B]` is A to a reader, and B as an argument of the constructor.
TRANSPARENT = {"Converted"}
SPECIAL = {"__aenter__", "__aiter__", "__anext__", "__call__", "__enter__", "__init__"}


def exports(package: str) -> dict[str, object]:
    module = importlib.import_module(package)
    return {name: getattr(module, name) for name in names_of(package)}


PUBLIC = {name for package in PACKAGES for name in exports(package)}


@functools.cache
def parsed(module: str) -> ast.Module:
    return ast.parse(Path(importlib.import_module(module).__file__ or "").read_text())


@functools.cache
def names_of_ours(module: str) -> frozenset[str]:
    """Return the names of a module that stand for types of the package, aliases included."""
    names = set()
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("elastic_aio"):
            names |= {alias.asname or alias.name for alias in node.names}
    for node in parsed(module).body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.Assign) and not _is_type_variable(node.value):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return frozenset(names)


def _is_type_variable(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) in ("TypeVar", "ParamSpec")


def annotated(node: ast.stmt, name: str) -> Iterator[tuple[str, ast.expr]]:
    """Yield what is annotated in a public definition, and its annotation."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        arguments += [extra for extra in (node.args.vararg, node.args.kwarg) if extra is not None]
        for argument in arguments:
            if argument.annotation is not None and not argument.arg.startswith("_"):
                yield f"{name}({argument.arg})", argument.annotation
        if node.returns is not None:
            yield f"{name} ->", node.returns
    elif isinstance(node, ast.ClassDef):
        for item in node.body:
            if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
                is_init = item.name == "__init__" and node.name in MADE_BY_US
                if (item.name in SPECIAL or not item.name.startswith("_")) and not is_init:
                    yield from annotated(item, f"{name}.{item.name}")
            elif isinstance(item, ast.AnnAssign) and not ast.unparse(item.target).startswith("_"):
                yield f"{name}.{ast.unparse(item.target)}", item.annotation


def definitions(value: object) -> Iterator[tuple[str, str]]:
    """Yield the modules and names that define a public value: a class with its bases of ours."""
    for part in value.__mro__ if inspect.isclass(value) else (value,):
        module = getattr(part, "__module__", "")
        if module.startswith("elastic_aio"):
            yield module, getattr(part, "__name__", "")


@pytest.mark.parametrize("package", PACKAGES)
def test_public_signatures_name_public_types(package: str) -> None:
    """Parameters, results and fields; aliases too, since readers look their names up."""
    hidden = set()
    for value in exports(package).values():
        if isinstance(value, (str, int, ModuleType)):
            continue
        for module, name in definitions(value):
            for node in parsed(module).body:
                if getattr(node, "name", None) != name:
                    continue
                for place, annotation in annotated(node, name):
                    used = {part.id for part in ast.walk(annotation) if isinstance(part, ast.Name)}
                    internal = (used & names_of_ours(module)) - PUBLIC - TRANSPARENT
                    hidden |= {f"{module}: {place} mentions {hit}" for hit in internal}
    assert not hidden, "\n".join(sorted(hidden))
