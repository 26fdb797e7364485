"""The public names of packages: what type checkers are shown is made from the lazy tables.

`python -m tests.support.exports` writes the imports below `if TYPE_CHECKING:` anew.
"""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

PACKAGES = [
    "elastic_aio",
    "elastic_aio.control",
    "elastic_aio.multiprocessing",
    "elastic_aio.plugins",
    "elastic_aio.store",
    "elastic_aio.sync",
    "elastic_aio.testing",
    "elastic_aio.worker",
]
LAZY = [
    "elastic_aio",
    "elastic_aio.compat.torch",
    "elastic_aio.control",
    "elastic_aio.engines.etcd",
    "elastic_aio.engines.redis",
    "elastic_aio.http",
    "elastic_aio.multiprocessing",
    "elastic_aio.plugins",
    "elastic_aio.store",
    "elastic_aio.testing",
    "elastic_aio.worker",
]

_BLOCK = re.compile(r"^if TYPE_CHECKING:\n.*?^else:\n", re.MULTILINE | re.DOTALL)


def source_of(package: str) -> Path:
    return Path(importlib.import_module(package).__file__ or "")


def table_of(package: str) -> tuple[dict[str, str], str]:
    """Return the home of each name that can be imported, and the module of further classes."""
    for node in ast.walk(ast.parse(source_of(package).read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "lazy_exports":
            tables = [ast.literal_eval(each) for each in node.args[1:]]
            rest = [ast.literal_eval(each.value) for each in node.keywords if each.arg == "rest"]
            homes = {
                name: module
                for table in tables
                for module, names in table.items()
                for name in names.split()
            }
            return homes, "".join(rest)
    raise AssertionError(f"{package} is not lazy")


def names_of(package: str) -> set[str]:
    """Return all names that can be imported from a package, shown or not."""
    if package not in LAZY:
        return set(importlib.import_module(package).__all__)
    homes, rest = table_of(package)
    return homes.keys() | (set(dir(importlib.import_module(rest))) if rest else set())


def block_of(package: str) -> str:
    """Return the imports that type checkers see."""
    homes, rest = table_of(package)
    whole = {home for home in homes.values() if home == rest or is_whole(home, homes)}
    lines = {f"    from {home} import *  # noqa: F403": (home, 0, "") for home in whole}
    for name, home in homes.items():
        if home not in whole:
            # As ruff sorts: constants, classes, functions.
            kind = 0 if name.isupper() else 1 if name[0].isupper() else 2
            line = f"    from {home} import {name} as {name}"
            if len(line) > 100:
                line = f"    from {home} import (\n        {name} as {name},\n    )"
            lines[line] = (home, kind, name.lower())
    return "\n".join(["if TYPE_CHECKING:", *sorted(lines, key=lambda line: lines[line]), "else:\n"])


def is_whole(module: str, homes: dict[str, str]) -> bool:
    """Return whether a package has all names that a module shows, and no other of its names."""
    shown = {*getattr(importlib.import_module(module), "__all__", ())}
    return {name for name, home in homes.items() if home == module} <= shown <= homes.keys()


def has_block(package: str) -> bool:
    return block_of(package) in source_of(package).read_text()


def write_block(package: str) -> None:
    path = source_of(package)
    path.write_text(_BLOCK.sub(lambda _: block_of(package), path.read_text()))


if __name__ == "__main__":
    for each in LAZY:
        write_block(each)
