"""The API reference: a page for each public module, made from docstrings and types."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path

from docs.site.names import PACKAGES, TORCH, TORCH_MODULES, PublicName, kinds, public_names


def write_pages(target: Path) -> None:
    """Write the pages, in reStructuredText, the language of autodoc."""
    target.mkdir()
    pages = ["elastic_aio", "elastic_aio.events"]
    (target / "elastic_aio.rst").write_text(_main_page())
    (target / "elastic_aio.events.rst").write_text(_events_page())
    for package in (*PACKAGES[1:], *TORCH_MODULES):
        names = [each for each in public_names() if each.package == package]
        pages.append(package)
        (target / f"{package}.rst").write_text(_page(package, names))
    index = [*_title("API reference"), "Every public name, from its docstring and types, each with"]
    index += ["an example that the tests run.  Every other module is internal.", ""]
    index += [".. toctree::", "   :hidden:", "", *(f"   {page}" for page in pages), ""]
    for page in pages:
        index += [f":doc:`{page}`", f"   .. docsummary:: {_summary(page)}", ""]
    (target / "index.rst").write_text("\n".join(index))


_PYTHON = (".. highlight:: python", "")
"""The literal blocks of docstrings are programs."""


def _title(text: str, line: str = "=") -> list[str]:
    return [text, line * len(text), ""]


def _main_page() -> str:
    names = {each.name: each for each in public_names() if each.package == "elastic_aio"}
    lines = [*_title("elastic_aio"), *_PYTHON, ".. py:module:: elastic_aio", ""]
    for kind, members in kinds().items():
        if kind == "events":
            continue
        lines += _title(kind[0].upper() + kind[1:], "-")
        lines += _entries(names[name] for name in members if not names[name].is_event)
    return "\n".join(lines)


def _events_page() -> str:
    elsewhere = {name for kind, names in kinds().items() if kind != "events" for name in names}
    names = [
        each
        for each in public_names()
        if each.package == "elastic_aio" and (each.is_event or each.name not in elsewhere)
    ]
    lines = [*_title("elastic_aio.events"), *_PYTHON, ".. py:module:: elastic_aio.events", ""]
    lines += ["The fields of each event are also in :doc:`/reference/events`.", ""]
    ordered = sorted(names, key=lambda each: (each.name != "Event", each.name))
    return "\n".join([*lines, *_entries(ordered)])


def _page(package: str, names: Iterable[PublicName]) -> str:
    lines = [
        *_title(package),
        *_PYTHON,
        f".. py:module:: {package}",
        "",
        f".. docsummary:: {_summary(package)}",
        "",
    ]
    if package.startswith(TORCH):
        lines += ["What differs from torch: :doc:`/guides/migrate-from-torchrun`.", ""]
    return "\n".join([*lines, *_entries(names)])


def _summary(package: str) -> str:
    return (importlib.import_module(package).__doc__ or "").partition("\n")[0]


def _entries(names: Iterable[PublicName]) -> list[str]:
    lines = []
    for each in names:
        if not each.is_shown_here:
            lines += [f"- ``{each.name}``: see :py:obj:`{each.shown}`", ""]
        elif each.kind == "data":
            lines += [f".. publicdata:: {each.full}", f"   :home: {each.home}", ""]
        else:
            lines += [f".. auto{each.kind}:: {each.full}", ""]
    return lines
