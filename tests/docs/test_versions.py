"""The sites of several versions: their list in each page, the banner, and what is built anew."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from docs.site.links import dead_links
from docs.site.names import ROOT
from docs.site.versions import build_versions, newest_of, released_tags, with_versions

PAGE = "<!-- versions --><!-- /versions --><h1>x</h1><!-- banner --><!-- /banner -->"
PAGES = {"dev": {".", "guides/a", "guides/b"}, "0.2.0": {".", "guides/a"}, "0.1.0": {"."}}

BUILD = """
import sys
from pathlib import Path
from sphinx.cmd.build import build_main

root = Path(__file__).parents[2]
code = build_main(["-q", "-W", "-b", "dirhtml", str(root / "docs"), sys.argv[1]])
sys.exit(code)
"""
CONF = f"""
project = "small"
html_title = "small VERSION"
extensions = ["myst_parser"]
html_theme = "furo"
templates_path = ["{ROOT}/docs/site/templates"]
html_sidebars = {{"**": ["sidebar/versions.html", "sidebar/navigation.html"]}}
"""


def git(repository: Path, *words: str) -> None:
    names = {
        f"GIT_{role}_{what}": "a" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    command = ["git", "-c", "commit.gpgsign=false", *words]
    subprocess.run(command, cwd=repository, env=os.environ | names, check=True, capture_output=True)


def make_repository(path: Path) -> None:
    path.mkdir()
    git(path, "init", "-q")


def release(repository: Path, version: str, files: dict[str, str]) -> None:
    for name, text in files.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)
    git(repository, "add", "-A")
    git(repository, "commit", "-q", "-m", version)
    git(repository, "tag", f"v{version}")


def test_a_page_lists_the_versions_and_leads_to_itself() -> None:
    text = with_versions(PAGE, "guides/a", "0.2.0", PAGES)
    assert '<li><a href="../../../dev/guides/a/">dev</a></li><li><strong>0.2.0</strong>' in text
    assert '<a href="../../../0.1.0/">0.1.0</a>' in text  # which has no such page
    assert "banner --><!-- /banner" in text
    assert with_versions(text, "guides/a", "0.2.0", PAGES) == text


def test_a_banner_leads_to_the_newest_release() -> None:
    dev = with_versions(PAGE, "guides/a", "dev", PAGES)
    assert 'not released. See <a href="../../../0.2.0/guides/a/">this page of 0.2.0</a>.' in dev
    gone = with_versions(PAGE, "guides/b", "dev", PAGES)
    assert '<a href="../../../0.2.0/">the start page of 0.2.0</a>' in gone
    old = with_versions(PAGE, ".", "0.1.0", PAGES)
    assert 'of 0.1.0, an old version. See <a href="../0.2.0/">this page of 0.2.0</a>' in old
    early = with_versions(PAGE, ".", "0.3.0rc1", {"0.3.0rc1": {"."}, **PAGES})
    assert "of 0.3.0rc1, a pre-release." in early


def test_the_newest_version_is_the_last_final_release(tmp_path: Path) -> None:
    make_repository(tmp_path / "r")
    (tmp_path / "r/a").write_text("")
    names = ("0.9", "0.10", "0.10rc2", "0.10rc10", "0.10b1", "1.0a1", "x")
    for name in names:
        release(tmp_path / "r", name, {"a": name})
    versions = [tag.removeprefix("v") for tag in released_tags(tmp_path / "r")]
    assert versions == ["1.0a1", "0.10", "0.10rc10", "0.10rc2", "0.10b1", "0.9"]
    assert newest_of(["dev", *versions]) == "0.10"
    assert newest_of(["dev", "1.0a1"]) == "1.0a1"
    assert newest_of(["dev"]) == "dev"


@pytest.mark.docs
@pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="needs the extra `docs`")
def test_each_release_is_built_once_by_its_own_code(tmp_path: Path) -> None:
    repository, site = tmp_path / "repository", tmp_path / "site"
    make_repository(repository)
    release(repository, "0.0.1", {"README": "without a site"})
    files = {"docs/site/__init__.py": "", "docs/site/__main__.py": BUILD}
    files |= {"docs/index.md": "# Start\n\n```{toctree}\nold\n```\n"}
    files |= {"docs/old.md": "# Old\n", "docs/conf.py": CONF.replace("VERSION", "0.1.0")}
    release(repository, "0.1.0", files)
    files |= {"docs/index.md": "# Start\n\n```{toctree}\nold\nnew\n```\n", "docs/new.md": "# New\n"}
    release(repository, "0.2.0", files | {"docs/conf.py": CONF.replace("VERSION", "0.2.0")})

    def build_dev(directory: Path) -> int:
        words = [sys.executable, "-m", "docs.site", str(directory)]
        return subprocess.run(words, cwd=repository, check=False).returncode

    site.mkdir()
    assert build_versions(site, repository, build_dev) == 0
    assert sorted(path.name for path in site.iterdir()) == ["0.1.0", "0.2.0", "dev", "index.html"]
    assert 'url=0.2.0/"' in (site / "index.html").read_text()
    assert list(dead_links(site)) == []
    old = (site / "0.1.0/old/index.html").read_text()
    assert "<title>Old - small 0.1.0</title>" in old
    assert 'an old version. See <a href="../../0.2.0/old/">this page of 0.2.0</a>' in old
    assert "version-banner" not in (site / "0.2.0/new/index.html").read_text()

    (site / "0.1.0/kept").touch()
    release(repository, "0.3.0", {"docs/old.md": "# Old\n\nMore.\n"})
    assert build_versions(site, repository, build_dev) == 0
    assert (site / "0.1.0/kept").exists()
    old = (site / "0.1.0/old/index.html").read_text()
    assert old.count("<details") == 1
    assert 'See <a href="../../0.3.0/old/">' in old
    assert '"../../0.2.0/old/"' in old
