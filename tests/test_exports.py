"""The public surface, name by name."""

from __future__ import annotations

import importlib
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest

import elastic_aio
from tests.support.exports import LAZY, PACKAGES, has_block, names_of

REFERENCE = Path(elastic_aio.__file__).parent.parent / "docs" / "reference"
ALIASES = {"ConsoleTarget", "Decide", "EventListener", "NumaMode", "StartMethod", "StopScope"}
ALIASES |= {"AnySpec", "RestartScope", "RestartWhen", "Strategy"}
NAMES = {package: names_of(package) for package in PACKAGES}


@pytest.mark.parametrize("package", LAZY)
def test_type_checkers_see_the_names_that_are_loaded(package: str) -> None:
    assert has_block(package), "run `python -m tests.support.exports`"


def documented_in(section: str) -> set[str]:
    """Return the names in a section of the reference."""
    text = (REFERENCE / "modules.md").read_text()
    return set(re.findall(r"`(\w+)`", text.split(f"## {section}\n", 1)[1].split("\n## ")[0]))


def test_the_reference_has_each_name_of_the_package() -> None:
    """And no other, so that none is removed by accident."""
    page = (REFERENCE / "events.md").read_text()
    kinds = set(re.findall(r"^\| `([A-Z]\w+)` \| (?!`code`)", page, re.MULTILINE))
    assert documented_in("elastic_aio") | kinds == NAMES["elastic_aio"]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_has_each_name_of_a_module(package: str) -> None:
    assert package == "elastic_aio" or NAMES[package] <= documented_in(package)


def test_the_package_shows_few_names() -> None:
    """Others can be imported; `elastic_aio.events` shows all events."""
    shown = vars(elastic_aio)["__all__"]
    assert len(shown) <= 45
    assert set(shown) < NAMES["elastic_aio"]


@pytest.mark.parametrize("name", sorted(NAMES["elastic_aio"] - ALIASES))
def test_every_name_is_documented(name: str) -> None:
    value = getattr(elastic_aio, name)
    assert value.__name__ == name
    assert value.__module__.startswith("elastic_aio.")
    text = value.__doc__
    assert text
    assert not text.startswith(f"{name}("), "the docstring is the one that dataclass makes up"


def test_dir_lists_public_names() -> None:
    """Completion in a shell finds names that are not loaded yet."""
    printed = run_python("import elastic_aio; print(' '.join(dir(elastic_aio)))")
    assert set(vars(elastic_aio)["__all__"]) <= set(printed.stdout.split())


@pytest.mark.parametrize("name", ["lunch", "Struct", "StatusTracker"])
def test_an_unknown_name_is_an_attribute_error(name: str) -> None:
    """Also one that a module of events imports."""
    with pytest.raises(AttributeError, match=f"module 'elastic_aio' has no attribute '{name}'"):
        getattr(elastic_aio, name)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(elastic_aio.__file__).parent.parent,
    )


def test_another_platform_is_one_sentence() -> None:
    """Raised before an import that fails there."""
    ended = run_python("import sys; sys.platform = 'darwin'; import elastic_aio")
    message = "ImportError: elastic_aio needs Linux 5.3 or newer (this is darwin)"
    assert ended.stderr.splitlines()[-1] == message


@pytest.mark.parametrize(
    "start",
    [
        "elastic_aio.launch(spec)",
        "elastic_aio.launch(spec, signals=True)",
        "elastic_aio.Agent(spec).__aenter__()",
        "elastic_aio.follow_job('localhost:1', 'r').__aenter__()",
        "store.connect('localhost:1').__aenter__()",
        "store.StoreServer('localhost').__aenter__()",
        "multiprocessing.spawn(print)",
        "multiprocessing.start_processes('g', 'true', {0: ()}, {0: {}}).__aenter__()",
    ],
)
def test_another_loop_is_one_sentence(start: str) -> None:
    """Trio runs coroutines without asyncio, as `send` does."""
    names = {
        "elastic_aio": elastic_aio,
        "multiprocessing": importlib.import_module("elastic_aio.multiprocessing"),
        "store": importlib.import_module("elastic_aio.store"),
        "spec": elastic_aio.LaunchSpec(["true"]),
    }
    with pytest.raises(
        RuntimeError, match=r"^elastic_aio runs on asyncio only; a portal .* runs it beside trio$"
    ):
        eval(start, names).send(None)


def test_all_names_can_be_imported_at_once() -> None:
    """In a fresh interpreter; tests/typing/star.py is the half of a type checker."""
    code = (
        "import elastic_aio; from elastic_aio import *; print(set(elastic_aio.__all__) - {*dir()})"
    )
    assert run_python(code).stdout == "set()\n"


def test_help_lists_the_public_modules() -> None:
    text = elastic_aio.__doc__ or ""
    named = re.findall(r"^(elastic_aio[.\w]*)  +\S", text, re.MULTILINE)
    assert len(named) == 9
    for name in named:
        assert importlib.import_module(name).__all__


CLASSES = [
    pytest.param(value, id=f"{package}.{name}")
    for package, names in NAMES.items()
    for name in sorted(names)
    if isinstance(value := getattr(importlib.import_module(package), name), type)
]


@pytest.mark.slow
@pytest.mark.parametrize("owner", CLASSES)
def test_help_shows_every_class(owner: type) -> None:
    """Classes whose metaclass has a docstring of its own among them: `Enum`, `Struct`, `ABC`."""
    summary = pydoc.getdoc(owner).partition("\n")[0]
    assert summary
    assert summary in pydoc.plain(pydoc.render_doc(owner))


def test_the_version_is_valid() -> None:
    """Packaging tools accept it."""
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?", elastic_aio.__version__)


def test_the_package_is_typed() -> None:
    assert (Path(elastic_aio.__file__).parent / "py.typed").is_file()


def test_workers_get_few_names() -> None:
    worker = importlib.import_module("elastic_aio.worker")
    assert len(worker.__all__) <= 12
    assert all(getattr(worker, name).__doc__ for name in worker.__all__)
