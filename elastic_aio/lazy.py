"""Public names of a package that are loaded on first use (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_exports(
    package: str, shown: Mapping[str, str], others: Mapping[str, str] = {}, rest: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the `__getattr__`, `__dir__` and `__all__` of a package.

    A name is imported from its module when it is first used, and then kept as an attribute of
    the package.  Type checkers do not see through this: `python -m tests.support.exports` makes
    the imports `if TYPE_CHECKING:` from the tables, and a test compares them.

    Args:
        package: the package's `__name__`.
        shown: full module names, each with the names it defines, separated by spaces.
        others: likewise; names that can be imported, but that `__all__` and `dir()` leave out.
        rest: a module whose classes can be imported too.
    """
    homes = {
        name: module
        for table in (others, shown)
        for module, names in table.items()
        for name in names.split()
    }
    public = sorted(name for names in shown.values() for name in names.split())

    def load(name: str) -> Any:
        home = homes.get(name) or (rest if name[:1].isupper() else "")
        module = importlib.import_module(home) if home else None
        if module is None or not (name in homes or name in module.__all__):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *public})

    return load, list_names, public
