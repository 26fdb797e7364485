"""Public names of a package that are loaded on first use (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, SupportsIndex


def lazy_exports(
    package: str, exports: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the `__getattr__`, `__dir__` and `__all__` of a package.

    A name is imported from its module when it is first used, and then kept as an
    attribute of the package.  Type checkers do not see through this: the package also
    imports the names below `if TYPE_CHECKING:`, and calls this function in the `else:`.

    Args:
        package: the package's `__name__`.
        exports: full module names, each with the names it defines, separated by spaces.
    """
    homes = {name: module for module, names in exports.items() for name in names.split()}
    public = sorted(homes)

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        document_fields(value)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *public})

    return load, list_names, public


class _ClassDoc(str):
    """The docstring of a class, and of its fields: Python drops those, editors show them.

    The fields are added when the docstring is read, by `help()` for example: that needs the
    source.  A metaclass with a docstring of its own hides the descriptor from pydoc, which
    then calls `expandtabs` of the text that it finds in the class.
    """

    _owner: type

    def __get__(self, instance: object, owner: type) -> str:
        return self.expandtabs()

    def expandtabs(self, tabsize: SupportsIndex = 8) -> str:
        import inspect
        import textwrap

        summary = inspect.cleandoc(super().expandtabs(tabsize))
        fields: dict[str, str] = {}
        if "\nArgs:\n" not in summary and "\nAttributes:\n" not in summary:
            for base in reversed(self._owner.__mro__):
                if base.__module__.startswith("elastic_aio."):
                    fields |= _field_docs(base)
        if not fields:
            return summary
        return f"{summary}\n\nFields:\n{textwrap.indent(chr(10).join(fields.values()), '    ')}\n"


def document_classes(namespace: dict[str, Any]) -> None:
    """Add the docstrings of fields to the docstrings of a module's public classes."""
    for name in namespace["__all__"]:
        document_fields(namespace[name])


def document_fields(value: object) -> None:
    """Add the docstrings of its fields to the docstring of a class."""
    if isinstance(value, type) and (summary := vars(value).get("__doc__")):
        text = _ClassDoc(summary)
        text._owner = value
        value.__doc__ = text


def _field_docs(owner: type) -> dict[str, str]:
    """Return the source of each public field of a class, followed by its indented docstring."""
    import ast
    import inspect
    import textwrap

    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    except (OSError, SyntaxError, ValueError):
        return {}  # the source is not installed
    docs: dict[str, str] = {}
    name = "_"
    for item in getattr(tree, "body", []):
        if isinstance(item, (ast.AnnAssign, ast.Assign)):  # a field, or a member of an enum
            target = item.target if isinstance(item, ast.AnnAssign) else item.targets[0]
            name = ast.unparse(target)
            docs[name] = ast.unparse(item)
        elif not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)):
            break  # the fields are above the methods
        elif name in docs:
            docs[name] += "\n" + textwrap.indent(inspect.cleandoc(str(item.value.value)), " " * 4)
    return {name: text for name, text in docs.items() if not name.startswith("_")}
