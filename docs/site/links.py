"""Check the built site: each link leads to a file and an anchor in it, each row has its anchor."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value)
            elif name in ("href", "src", "data"):
                self.links.append(value)


@functools.cache
def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(errors="replace"))
    return page


def dead_links(site: Path) -> Iterator[str]:
    """Yield `page: link` for each link within the site that leads nowhere."""
    for path in sorted(site.rglob("*.html")):
        for link in dict.fromkeys(_read(path).links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            if target.is_dir():
                target /= "index.html"
            fragment = unquote(parts.fragment)
            is_page = target.suffix == ".html"
            if not target.is_file() or (
                is_page and fragment and fragment not in _read(target).anchors
            ):
                yield f"{path.relative_to(site)}: {link}"


def missing_anchors(page: Path, names: Iterable[str]) -> Iterator[str]:
    """Yield `page: #name` for each name that is no anchor of a page of the built site."""
    for name in names:
        if name not in _read(page).anchors:
            yield f"{page.parent.name}: #{name}"
