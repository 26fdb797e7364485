"""The site: its links, the names in docstrings, its navigation."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from docs.site.api import write_pages
from docs.site.links import dead_links, missing_anchors
from docs.site.names import public_names
from docs.site.stage import (
    DOCS,
    external_links,
    row_anchors,
    toctrees,
    with_links,
    with_row_anchors,
)
from elastic_aio.cli.guides import find_pages

needs_sphinx = pytest.mark.skipif(
    importlib.util.find_spec("sphinx") is None, reason="needs the extra `docs`"
)


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b/index.html").write_text('<p id="here"><a href="../a.html#x">a</a>')
    links = ["b/#here", "b/", "b/#gone", "c/", "https://h/", "#self", "b/index.html?q#here"]
    text = "".join(f'<a href="{link}">x</a>' for link in links)
    (tmp_path / "a.html").write_text(text)
    assert list(dead_links(tmp_path)) == [
        "a.html: b/#gone", "a.html: c/", "a.html: #self", "b/index.html: ../a.html#x"
    ]  # fmt: skip


def test_the_rows_of_the_reference_have_anchors(tmp_path: Path) -> None:
    """The first row of a name has it, unless a heading has it; another page may lack them."""
    head = "| field of `stop` | meaning |\n|---|---|\n"
    page = f"# Title\n\n{head}| `linger`, `plan` | x |\n| `linger` | y |\n| `a b` | z |\n"
    assert row_anchors(page) == {"stop.linger": 4, "stop.plan": 4, "stop.a": 6}
    lines = with_row_anchors(page).split("\n")
    anchors = '<a id="stop.linger"></a><a id="stop.plan"></a>'
    assert lines[4:6] == [f"| {anchors}`linger`, `plan` | x |", "| `linger` | y |"]
    (tmp_path / "a.html").write_text(lines[4])
    assert [*missing_anchors(tmp_path / "a.html", row_anchors(page))] == [
        f"{tmp_path.name}: #stop.a"
    ]


def test_links_of_pages_lead_to_the_site() -> None:
    page = DOCS / "guides/logs.md"
    text = "[a](../../examples/hello.py) [b](store.md#x) [c](../README.md) [d](#e)"
    moved = "[a](../examples/hello.py.md) [b](../guides/store.md#x) [c](../index.md) [d](#e)"
    assert with_links(text, page, Path("guides/logs.md")) == moved
    with pytest.raises(ValueError, match=r"logs\.md: the site has no \.\./\.\./pyproject\.toml"):
        with_links("[x](../../pyproject.toml)", page, Path("guides/logs.md"))
    named = with_links("[logs.md](logs.md) [logs.md](logs.md#files)", page, Path("guides/logs.md"))
    assert named == "[Logs and tee](../guides/logs.md) [logs.md](../guides/logs.md#files)"
    fenced = "```\n[x](../../nothing)\n```\n"
    assert with_links(fenced, page, Path("guides/logs.md")) == fenced


def test_all_pages_of_the_command_are_in_the_navigation() -> None:
    listed = toctrees((DOCS / "README.md").read_text())
    for path in find_pages().values():
        assert f"\n{Path(path).relative_to(DOCS).with_suffix('')}\n" in listed


def test_the_navigation_has_the_sections_of_the_start_page() -> None:
    index = "# a\n\n## Guides\n\n### One\n\n| x, y | [logs.md](guides/logs.md) |\n\n### Two\n\n"
    index += "| z | [trees.md](guides/trees.md), [store.md](guides/store.md) |\n"
    found = toctrees(index)
    one, two, more = re.findall(r":caption: (.*)\n\n((?:[^`\n].*\n)+)", found)
    assert one == ("One", "guides/logs\n")
    assert two == ("Two", "guides/trees\nguides/store\n")
    assert more[0] == "More"


def test_every_public_name_is_in_the_reference(tmp_path: Path) -> None:
    write_pages(tmp_path / "api")
    text = "".join(path.read_text() for path in (tmp_path / "api").glob("*.rst"))
    described = re.findall(r"^\.\. (?:auto\w+|publicdata):: (\S+)$", text, re.MULTILINE)
    shown = [each.shown for each in public_names() if each.is_shown_here]
    assert sorted(described) == sorted(shown)


def test_links_to_other_sites_are_listed() -> None:
    assert any(
        line.startswith("https://keepachangelog.com/en/1.1.0/  CHANGELOG.md")
        for line in external_links()
    )


@needs_sphinx
def test_a_cancellation_is_a_section() -> None:
    from docs.site.extension import with_cancellation

    text = ["Do.", "", "Cancellation: it stops,", "then ends.", "", "Args:", "    a: b"]
    section = ["Cancellation:", "    it stops,", "    then ends."]
    assert with_cancellation(text) == ["Do.", "", *section, "", "Args:", "    a: b"]


@needs_sphinx
def test_a_field_of_several_lines_is_shown_whole() -> None:
    from docs.site.extension import docstring_lines

    assert docstring_lines([":raises ValueError: a\n    `b`", ""], "") == [
        ":raises ValueError: a", "    ``b``", ""
    ]  # fmt: skip


@needs_sphinx
def test_names_in_docstrings() -> None:
    from docs.site.extension import exists, find_members, inline, resolved

    find_members()
    assert resolved("StopPlan.within") == "elastic_aio.StopPlan.within"
    assert resolved("grace", "elastic_aio.StopPlan.within") == "elastic_aio.StopPlan.grace"
    assert resolved("StopPlan.nothing") == resolved("nothing") == ""
    assert inline("See `launch`s, `x=1` and *a.") == (
        r"See :py:obj:`launch <elastic_aio.launch>`\ s, ``x=1`` and \*a."
    )
    assert exists("elastic_aio.launcher.launch", "")
    assert not exists("elastic_aio.launcher.nothing", "")
