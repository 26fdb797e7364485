"""The sites of all versions side by side: `python -m docs.site DIRECTORY --versions`.

`DIRECTORY/0.1.0/` is the site of the tag `v0.1.0`, built by that version's own `docs.site`;
`DIRECTORY/dev/` that of the working tree; `DIRECTORY/index.html` leads to the newest release.  A
release does not change: one that is in DIRECTORY already is not built again.

The versions are listed in each page itself, of old releases too, so that readers need no script:
the templates leave two places, which are filled anew whenever a version is added.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

DEV = "dev"
"""Name of the working tree's version."""

_VERSION = re.compile(r"v(\d+(?:\.\d+)*)((?:a|b|rc)\d+)?")


def build_versions(directory: Path, repository: Path, build_dev: Callable[[Path], int]) -> int:
    """Build what is missing of all versions, and list them in each page; return the exit code.

    OSError, CalledProcessError: the repository, or the directory, cannot be used.
    """
    with tempfile.TemporaryDirectory(prefix="elastic_aio-versions.") as name:
        scratch = Path(name)
        built = [DEV]
        for tag in released_tags(repository):
            version = tag.removeprefix("v")
            if not (directory / version).is_dir():
                print(f"{tag}:", flush=True)
                tree = scratch / f"tree-{version}"
                _extract(repository, tag, tree)
                if not (tree / "docs/site/__main__.py").is_file():
                    print(f"{tag}: has no docs.site, and is left out")
                    continue
                if code := _build_release(tree, scratch / version):
                    return code
                shutil.move(scratch / version, directory / version)
            built.append(version)
        print(f"{DEV}:", flush=True)
        if code := build_dev(scratch / DEV):
            return code
        shutil.rmtree(directory / DEV, ignore_errors=True)
        shutil.move(scratch / DEV, directory / DEV)
    list_versions(directory, built)
    return 0


def released_tags(repository: Path) -> list[str]:
    """Return the tags of versions, the newest first."""
    words = ["git", "-C", str(repository), "tag", "--list", "v*"]
    tags = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
    return sorted(filter(_VERSION.fullmatch, tags), key=_order, reverse=True)


def _order(tag: str) -> tuple[list[int], bool, str, int]:
    """Return the order of a version: `1.10` after `1.9`, and `1.9rc2` before `1.9`."""
    match = _VERSION.fullmatch(tag)
    assert match is not None
    kind = match[2] or ""
    number = kind.lstrip("abcr")
    return (
        [int(part) for part in match[1].split(".")],
        not kind,
        kind.removesuffix(number),
        int(number or 0),
    )


def newest_of(versions: Sequence[str]) -> str:
    """Return the version that readers are led to: the newest final release, if there is one."""
    released = [version for version in versions if version != DEV]
    final = [version for version in released if not re.search("[a-z]", version)]
    return next(iter([*final, *released, DEV]))


def _extract(repository: Path, tag: str, tree: Path) -> None:
    words = ["git", "-C", str(repository), "archive", "--format=tar", tag]
    archive = subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(tree, filter="data")


def _build_release(tree: Path, target: Path) -> int:
    """Build the site of a tree by its own code, in the environment of this process."""
    words = [sys.executable, "-m", "docs.site", str(target)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    return subprocess.run(words, cwd=tree, env=environment, check=False).returncode


def list_versions(directory: Path, versions: Sequence[str]) -> None:
    """Write the list of versions and the banner into each page, and the page that leads on."""
    pages = {version: _pages(directory / version) for version in versions}
    for version in versions:
        for page in pages[version]:
            path = directory / version / page / "index.html"
            path.write_text(with_versions(path.read_text(), page, version, pages))
    start = f"{newest_of(versions)}/"
    (directory / "index.html").write_text(
        f'<!doctype html><meta charset="utf-8"><title>elastic_aio</title>'
        f'<meta http-equiv="refresh" content="0; url={start}"><a href="{start}">elastic_aio</a>\n'
    )


def _pages(site: Path) -> set[str]:
    """Return the pages of a site: `.` is its start page, others are `guides/logs`."""
    return {str(path.parent.relative_to(site)) for path in site.rglob("index.html")}


def with_versions(html: str, page: str, version: str, pages: Mapping[str, set[str]]) -> str:
    """Return a page with the list of versions and, unless it is of the newest, a banner."""
    up = "../" * (1 if page == "." else page.count("/") + 2)

    def link(other: str, text: str) -> str:
        place = f"{page}/" if page != "." and page in pages[other] else ""
        return f'<a href="{up}{other}/{place}">{escape(text)}</a>'

    items = "".join(
        f"<li>{f'<strong>{version}</strong>' if other == version else link(other, other)}</li>"
        for other in pages
    )
    listed = f"<summary>Other versions</summary><ul>{items}</ul>"
    newest = newest_of(list(pages))
    banner = ""
    if version != newest:
        target = "this page" if page in pages[newest] else "the start page"
        see = link(newest, f"{target} of {newest}")
        what = _what(version, list(pages))
        banner = f'<aside class="version-banner">{what} See {see}.</aside>'
    html = _filled(html, "versions", f'<details class="versions">{listed}</details>')
    return _filled(html, "banner", banner)


def _what(version: str, versions: Sequence[str]) -> str:
    """Return a sentence about a version that is not the newest release."""
    if version == DEV:
        return "This is the documentation of the next version, which is not released."
    is_old = versions.index(version) > versions.index(newest_of(versions))
    kind = "an old version" if is_old else "a pre-release"
    return f"This is the documentation of {version}, {kind}."


def _filled(html: str, name: str, content: str) -> str:
    place = re.compile(f"(?<=<!-- {name} -->).*?(?=<!-- /{name} -->)", re.DOTALL)
    return place.sub(lambda _: content, html)
