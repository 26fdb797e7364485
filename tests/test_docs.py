"""The documentation: its programs, names, links and options."""

from __future__ import annotations

import ast
import contextlib
import importlib
import re
from logging import INFO
from pathlib import Path

import pytest

from elastic_aio import child_events, events, node_events
from elastic_aio.cli import COMMANDS, main
from elastic_aio.cli.guides import anchors_of
from elastic_aio.status import Event

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PATH = re.compile(r"`((?:tests|elastic_aio|examples|benchmarks|docs)/[\w./*-]*)`")

all_pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def anchors(page: Path) -> set[str]:
    """The anchors of the page's headings, made as GitHub makes them."""
    return {each.anchor for each in anchors_of(page.read_text()) if each.level}


@all_pages
def test_python_programs_compile_and_their_names_exist(page: Path) -> None:
    """A block may be a fragment with `async with` at its top level."""
    for language, source in _FENCE.findall(page.read_text()):
        if language != "python":
            continue
        compile(source, str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("elastic_aio"):
                module = importlib.import_module(node.module or "")
                assert all(hasattr(module, alias.name) for alias in node.names)


@all_pages
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in _LINK.findall(_FENCE.sub("", page.read_text())):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@all_pages
def test_named_files_exist(page: Path) -> None:
    for path in _PATH.findall(page.read_text()):
        assert list(ROOT.glob(path.rstrip("/"))), path


@all_pages
def test_prose_has_at_most_120_columns(page: Path) -> None:
    """Outside of code and tables, whose lines cannot be broken."""
    for line in _FENCE.sub("", page.read_text()).splitlines():
        assert len(line) <= 120 or line.startswith("|"), line


def test_files_of_packages_exist() -> None:
    """In docs/architecture.md a paragraph begins with its package; the files follow."""
    text = (ROOT / "docs/architecture.md").read_text()
    for package, paragraph in re.findall(r"^\*\*(\w+)/\*\* (.+?)\n\n", text, re.M | re.S):
        for name in re.findall(r"`(\w+\.py)`", paragraph):
            assert [*(ROOT / "elastic_aio" / package).rglob(name)], f"{package}/{name}"


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= 9_000


def options_in(text: str) -> set[str]:
    return set(re.findall(r"(?<!\w)--[a-z][\w-]+", text))


def test_the_command_line_is_documented_completely(capsys: pytest.CaptureFixture[str]) -> None:
    """Each command's section names all its options; the page names no unknown option."""

    def options_of(*command: str) -> set[str]:
        with contextlib.suppress(SystemExit):
            main([*command, "--help"])
        return options_in(capsys.readouterr().out) - {
            "--help",
            "--rdzv_backend",
            "--rdzv_conf",
            "--rdzv_endpoint",
            "--rdzv_id",
        }

    options = {name: options_of(name) for name in ("run", *COMMANDS)}
    options["store"] |= options_of("store", "ping")
    page = (ROOT / "docs/reference/command-line.md").read_text()
    sections = dict(re.findall(r"^## aio-elastic (\w+)$(.*?)(?=^## |\Z)", page, re.M | re.S))
    assert sections.keys() == options.keys()
    for command, section in sections.items():
        assert options[command] <= options_in(section), command
    launch = {"--use-env", "--local-rank"}  # of `python -m elastic_aio.launch`
    assert options_in(page) <= set().union(launch, *options.values(), options_of())


def test_the_reference_lists_the_levels_of_events() -> None:
    """Those that are always of level INFO come first, then those that have both levels."""
    text = " ".join((ROOT / "docs/reference/events.md").read_text().split())
    always, sometimes = text.split("`INFO` are ")[1].split(". ")[0].split("; also")
    kinds = {kind for kind in vars(events).values() if isinstance(kind, type)}
    for module in (node_events, child_events):
        kinds |= {kind for kind in vars(module).values() if isinstance(kind, type)}
    found = {kind for kind in kinds if issubclass(kind, Event) and kind is not Event}
    info = {kind.__name__ for kind in found if kind._level == INFO}
    both = {kind.__name__ for kind in found if "level" in vars(kind)}
    assert set(re.findall(r"`(\w+)`", always)) == info
    assert set(re.findall(r"`([A-Z]\w+)`", sometimes)) == both


def test_no_entry_and_no_command_stands_twice() -> None:
    """A merge of two branches may leave both forms of a line."""
    entries = re.findall(r"^- (.{24})", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    page = (ROOT / "docs/reference/command-line.md").read_text()
    commands = re.findall(r"^aio-elastic ([\w| ]+)", _FENCE.findall(page)[0][1], re.MULTILINE)
    names = [name for line in commands for name in line.split(" | ")]
    for words in (entries, names):
        assert len(set(words)) == len(words) > 10, words
