"""Build the site: `python -m docs.site [DIRECTORY]`, by default into `site/`.

The pages of docs/ are copied with generated ones (`stage.py`) to a temporary directory, of which
Sphinx makes HTML.  Every warning, every name that cannot be resolved, and every link within the
site that leads nowhere is an error.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from docs.site.links import dead_links
from docs.site.names import ROOT
from docs.site.stage import external_links, stage


def main() -> int:
    """Build the site; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m docs.site", description="Build the site.")
    parser.add_argument("directory", nargs="?", default="site", help="output (default: site)")
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
        from sphinx.cmd.build import build_main
    except ImportError as error:
        sys.exit(f"{error}: the extra `docs` is missing (pip install '.[docs]')")
    try:
        Path(chosen.directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"directory: cannot be made: {error.strerror} (got {chosen.directory!r})")
    with tempfile.TemporaryDirectory(prefix="elastic_aio-docs.") as directory:
        source = Path(directory) / "source"
        stage(source)
        words = ["-q", "-n", "-W", "--keep-going", "-E", "-b", "dirhtml"]
        conf = ["-c", str(ROOT / "docs/site"), "-d", f"{directory}/doctrees"]
        code: int = build_main([*words, *conf, str(source), chosen.directory])
    if dead := list(dead_links(Path(chosen.directory).resolve())):
        print("dead links:", *dead, sep="\n", file=sys.stderr)
    return code or bool(dead)


if __name__ == "__main__":
    sys.exit(main())
