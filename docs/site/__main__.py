"""Build the site: `python -m docs.site [DIRECTORY]`, by default into `site/`.

The pages of docs/ are copied with generated ones (`stage.py`) to a temporary directory, of which
Sphinx makes HTML.  Every warning, every name that cannot be resolved, every link within the site
that leads nowhere, and every row of the reference without its anchor is an error.  With
`--versions` the directory has a site of each released version beside that of the working tree
(`versions.py`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from docs.site.links import dead_links, missing_anchors
from docs.site.names import ROOT
from docs.site.stage import DOCS, external_links, row_anchors, stage
from docs.site.versions import DEV, build_versions
from elastic_aio import __version__


def main() -> int:
    """Build the site; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m docs.site", description="Build the site.")
    parser.add_argument("directory", nargs="?", default="site", help="output (default: site)")
    parser.add_argument(
        "--versions",
        action="store_true",
        help="build the working tree as `dev` and each tag v* beside it, unless it is there",
    )
    parser.add_argument(
        "--external-links",
        action="store_true",
        help="list the links to other sites, and build none",
    )
    chosen = parser.parse_args()
    if chosen.external_links:
        print("\n".join(external_links()))
        return 0
    try:
        import sphinx  # noqa: F401
    except ImportError as error:
        sys.exit(f"{error}: the extra `docs` is missing (pip install '.[docs]')")
    directory = Path(chosen.directory).resolve()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"directory: cannot be made: {error.strerror} (got {chosen.directory!r})")
    try:
        code = build_versions(directory, ROOT, _build_dev) if chosen.versions else build(directory)
    except subprocess.CalledProcessError as error:
        parser.error(f"--versions: git failed with exit code {error.returncode} (got {error.cmd})")
    if dead := list(dead_links(directory)):
        print("dead links:", *dead, sep="\n", file=sys.stderr)
    return code or bool(dead)


def build(directory: Path, version: str = __version__) -> int:
    """Build the site of the working tree; return the exit code of Sphinx."""
    from sphinx.cmd.build import build_main

    with tempfile.TemporaryDirectory(prefix="elastic_aio-docs.") as name:
        source = Path(name) / "source"
        stage(source)
        words = ["-q", "-n", "-W", "--keep-going", "-E", "-b", "dirhtml"]
        words += ["-c", str(ROOT / "docs/site"), "-d", f"{name}/doctrees"]
        words += ["-D", f"html_title=elastic_aio {version}"]
        code: int = build_main([*words, str(source), str(directory)])
    missing = [
        text
        for page in sorted(DOCS.glob("reference/*.md"))
        for text in missing_anchors(
            directory / "reference" / page.stem / "index.html", row_anchors(page.read_text())
        )
    ]
    if missing:
        print("rows without an anchor:", *missing, sep="\n", file=sys.stderr)
    return code or bool(missing)


def _build_dev(directory: Path) -> int:
    return build(directory, f"{DEV} ({__version__})")


if __name__ == "__main__":
    sys.exit(main())
