"""Settings of Sphinx for the site, see `__main__.py`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from elastic_aio import __version__

project = "elastic_aio"
author = "elastic_aio contributors"
copyright = author
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "docs.site.extension"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
root_doc = "index"

nitpicky = True
myst_heading_anchors = 6

html_theme = "furo"
html_title = f"elastic_aio {release}"
templates_path = [str(Path(__file__).parent / "templates")]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/versions.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_static_path = [str(Path(__file__).parent / "static")]
html_css_files = ["site.css"]
html_js_files = ["cast.js"]
html_search_scorer = str(Path(__file__).parent / "scorer.js")
html_copy_source = False
html_show_copyright = False
highlight_language = "text"  # a block that names no language is none

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
