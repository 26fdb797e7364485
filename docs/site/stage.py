"""The source of the site: the pages of docs/ with their links, and the generated pages."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from docs.site.names import ROOT
from elastic_aio.cli.guides import anchors_of

DOCS = ROOT / "docs"
PROJECT = ("CONTRIBUTING.md", "CHANGELOG.md")
"""Pages of the root that the site has too."""

_LINK = re.compile(r"\[([^\[\]]*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_EXTERNAL = re.compile(r"https?://[^\s)`\"'<>\]]+")
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".toml": "toml"}


def stage(target: Path) -> None:
    """Write the source of the site into a new directory."""
    from docs.site import api, casts

    target.mkdir(parents=True)
    for page in [*DOCS.glob("*.md"), *DOCS.glob("guides/*.md"), *DOCS.glob("reference/*.md")]:
        place = page.relative_to(DOCS)
        if page == DOCS / "README.md":
            continue
        text = with_links(page.read_text(), page, place)
        _write(target / place, with_row_anchors(text) if place.parts[0] == "reference" else text)
    for name in PROJECT:
        _write(
            target / name.lower(), with_links((ROOT / name).read_text(), ROOT / name, Path(name))
        )
    shutil.copytree(DOCS / "images", target / "images")
    _write_examples(target / "examples")
    api.write_pages(target / "api")
    recordings = target / "recordings.md"
    recordings.write_text(
        re.sub(
            r"^\[[\w-]+\.cast\]\(.*?recordings/([\w-]+)\.cast\)$",
            lambda match: f"```{{raw}} html\n{casts.player(match[1])}\n```",
            recordings.read_text(),
            flags=re.MULTILINE,
        )
    )
    index = DOCS / "README.md"
    text = with_links(index.read_text(), index, Path("index.md"))
    _write(target / "index.md", text + toctrees(index.read_text()))


def row_anchors(text: str) -> dict[str, int]:
    """Return the line of each row of a page that has an anchor, from 0: the first of its name."""
    found: dict[str, int] = {}
    for each in anchors_of(text):
        if re.fullmatch(r"[\w.-]+", each.anchor):
            found.setdefault(each.anchor, -1 if each.level else each.line)
    return {name: line for name, line in found.items() if line >= 0}


def with_row_anchors(text: str) -> str:
    """Return a page of the reference whose rows can be linked to, as `aio-elastic help` finds them.

    The name that an error begins with is an anchor: `reference/spec/#stop.linger`.
    """
    lines = text.split("\n")
    for name, line in reversed(row_anchors(text).items()):
        lines[line] = f'| <a id="{name}"></a>{lines[line].removeprefix("| ")}'
    return "\n".join(lines)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def place_of(target: Path) -> Path | None:
    """Return where the site has a file or directory of the repository; None: nowhere."""
    if target == DOCS / "README.md":
        return Path("index.md")
    if target.suffix == ".md" and target.name in PROJECT and target.parent == ROOT:
        return Path(target.name.lower())
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS)
    if target.is_relative_to(ROOT / "examples"):
        place = target.relative_to(ROOT)
        return (
            place.with_name(f"{place.name}.md") if target.is_file() else Path("examples/index.md")
        )
    return None


def with_links(text: str, page: Path, place: Path) -> str:
    """Return a page whose relative links lead to where the site has their targets.

    A link that has the name of a page as its text gets the title of that page.

    ValueError: a link leads to a file that the site does not have.
    """

    def moved(match: re.Match[str]) -> str:
        text, (target, hash_, anchor) = match[1], match[2].partition("#")
        if "://" in target or not target:
            return match[0]
        path = (page.parent / target).resolve()
        found = place_of(path)
        if found is None:
            raise ValueError(f"{page.name}: the site has no {target}")
        if text == path.name and path.suffix == ".md" and not anchor:
            text = path.read_text().partition("\n")[0].removeprefix("# ")
        up = "../" * (len(place.parts) - 1)
        return f"[{text}]({up}{found}{hash_}{anchor})"

    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(moved, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join(parts) + _LINK.sub(moved, text[end:])


def toctrees(index: str) -> str:
    """Return the navigation: the pages in the order of the tables of docs/README.md."""
    found = ""
    for title, section in re.findall(
        r"^###? ([^\n]+)\n(.*?)(?=^###? |\Z)", index, re.MULTILINE | re.DOTALL
    ):
        rows = "".join(re.findall(r"^\|.*", section, re.MULTILINE))
        pages = re.findall(r"\]\(([^()]+?)\.md\)", rows)
        pages = [page for page in pages if (DOCS / f"{page}.md").is_file()]
        pages = [page.removeprefix("../").lower() for page in pages]
        if title == "Reference":
            pages.append("api/index")
        if pages:
            found += _toctree(title, pages)
    named = set(re.findall(r"\]\((.+?)\.md\)", index))
    rest = [page.stem for page in sorted(DOCS.glob("*.md")) if page.stem not in named | {"README"}]
    more = ["examples/index", *rest, "contributing", "changelog"]
    listed = re.findall(r"^(?!:)(\S+)$", found, re.MULTILINE)
    return found + _toctree("More", [page for page in more if page not in listed])


def _toctree(title: str, pages: list[str]) -> str:
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```", ""])


def _write_examples(target: Path) -> None:
    """Write a page for each file in examples/, with its text."""
    target.mkdir()
    names = []
    for path in sorted((ROOT / "examples").rglob("*")):
        if not path.is_file() or "__pycache__" in path.parts or path.suffix == ".pyc":
            continue
        place = path.relative_to(ROOT / "examples")
        names.append(f"{place}")
        page = target / place.with_name(f"{place.name}.md")
        language = LANGUAGES.get(path.suffix, "json" if path.suffix == ".ipynb" else "text")
        text = path.read_text()
        fence = "`" * 6
        _write(page, f"# examples/{place}\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n")
    lines = ["# Examples", "", "The programs in `examples/`; `.ci/examples` runs them.", ""]
    lines += ["```{toctree}", *names, "```", ""]
    _write(target / "index.md", "\n".join(lines))


def external_links() -> list[str]:
    """Return the links of the pages and docstrings that lead to other sites, with their pages."""
    found: dict[str, set[str]] = {}
    files = [ROOT / "README.md", *(ROOT / name for name in PROJECT), *DOCS.rglob("*.md")]
    for path in [*files, *(ROOT / "elastic_aio").rglob("*.py")]:
        for link in _EXTERNAL.findall(path.read_text()):
            if re.match(r"https?://[\w-]+(\.[\w-]+)*\.(org|com|io|net|dev)\b", link):
                found.setdefault(link.rstrip(".,;:"), set()).add(str(path.relative_to(ROOT)))
    return [f"{link}  {', '.join(sorted(pages))}" for link, pages in sorted(found.items())]
