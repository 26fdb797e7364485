"""What the site needs beyond autodoc: docstrings of this package, public names, examples.

Docstrings are plain text with names between single backticks.  `docstring_lines` makes
reStructuredText of them: a public name becomes a link, anything else is code.
"""

from __future__ import annotations

import builtins
import importlib
import re
import sys
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive, directives
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.napoleon import Config as NapoleonConfig
from sphinx.ext.napoleon.docstring import GoogleDocstring
from sphinx.pycode import ModuleAnalyzer
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging

from docs.site.examples import LONGEST, examples_by_name
from docs.site.names import TORCH, by_place, by_word, public_names

logger = logging.getLogger(__name__)

_CODE = re.compile(r"(?<![`\\:])`([^`\n]+(?:\n *[^`\n]+)?)`(?!`|_)(\w?)")
_MARKUP = re.compile(r"(?<!\\)(?:\*(?=\S)|(?<=\S)\*|\|)|(?<=\w)(?<!\\)_(?![\w:])")


def resolved(name: str, owner: str = "") -> str:
    """Return the full name under which something is documented; empty: it is not public.

    `owner` is the full name of the object in whose docstring the name stands.
    """
    name = name.removesuffix("()")
    if not re.fullmatch(r"[A-Za-z_][\w.]*", name):
        return ""
    if name in by_place():
        return by_place()[name]
    first, _, rest = name.partition(".")
    if (place := by_word().get(first)) is not None:
        return f"{place}.{rest}" if rest and _has(place, rest) else "" if rest else place
    parts = owner.split(".")
    for end in range(len(parts), 1, -1):
        place = ".".join(parts[:end])
        if place in _shown_places() and _has(place, name):
            return f"{place}.{name}"
    return ""


def _shown_places() -> dict[str, Any]:
    return {each.shown: each.value for each in public_names()}


def _has(place: str, member: str) -> bool:
    """Return whether the site describes a member of a public class."""
    owner = _shown_places().get(place)
    if not isinstance(owner, type) or member.startswith("_"):
        return False
    described = vars(owner).keys() | getattr(owner, "__annotations__", {}).keys()
    return member in described and f"{place}.{member}" in _described


_described: set[str] = set()
"""Members that autodoc has found; filled by a first pass over all classes."""


def find_members() -> None:
    """Fill `_described`: own members with a docstring, as autodoc takes them."""
    for each in public_names():
        owner = each.value
        if not isinstance(owner, type):
            continue
        try:
            analyzer = ModuleAnalyzer.for_module(owner.__module__)
            analyzer.analyze()
        except Exception:  # noqa: BLE001  # a module without source has no such docstrings
            continue
        documented = {name for (cls, name) in analyzer.attr_docs if cls == owner.__qualname__}
        documented |= {
            name
            for name, value in vars(owner).items()
            if not name.startswith("_") and getattr(value, "__doc__", None)
            and (callable(value) or isinstance(value, (property, classmethod, staticmethod)))
        }  # fmt: skip
        _described.update(f"{each.shown}.{name}" for name in documented)


def inline(text: str, owner: str = "") -> str:
    """Return a text of a docstring as reStructuredText."""

    def coded(match: re.Match[str]) -> str:
        name, after = " ".join(match[1].split()), match[2]
        after = f"\\ {after}" if after else ""
        if place := resolved(name, owner):
            return f":py:obj:`{name} <{place}>`{after}"
        return f"``{name}``{after}"

    parts, end = [], 0
    for match in _CODE.finditer(text):
        parts += [_MARKUP.sub(r"\\\g<0>", text[end : match.start()]), coded(match)]
        end = match.end()
    return "".join(parts) + _MARKUP.sub(r"\\\g<0>", text[end:])


def docstring_lines(lines: list[str], owner: str) -> list[str]:
    """Return a docstring as reStructuredText, its literal blocks and field names unchanged."""
    found: list[str] = []
    paragraph: list[str] = []
    literal: int | None = None

    def flush() -> None:
        if paragraph:
            found.extend(inline("\n".join(paragraph), owner).split("\n"))
            paragraph.clear()

    for line in "\n".join(lines).split("\n"):  # napoleon leaves several lines of `:raises:` in one
        indent = len(line) - len(line.lstrip())
        if literal is not None and line.strip() and indent <= literal:
            literal = None
        if (
            literal is not None
            or not line.strip()
            or re.match(r"\s*(\.\. |:\w+( [^:]+)?:( |$))", line)
        ):
            flush()
            match = re.match(r"(\s*:\w+(?: [^:]+)?: )(.*)", line)
            found.append(match[1] + inline(match[2], owner) if match and literal is None else line)
            if re.match(r"\s*\.\. code-block", line):
                literal = indent
        else:
            paragraph.append(line)
            if line.rstrip().endswith("::"):
                flush()
                literal = indent
    flush()
    return found


_SECTIONS = NapoleonConfig(
    napoleon_use_rtype=False, napoleon_custom_sections=[("Cancellation", "Cancellation")]
)


def with_cancellation(lines: list[str]) -> list[str]:
    """Make a section of a paragraph that begins with `Cancellation:`, as the others have one."""
    found: list[str] = []
    is_inside = False
    for line in lines:
        match = re.match(r"( *)Cancellation: (\S.*)", line)
        if match is not None:
            found += [f"{match[1]}Cancellation:", f"{match[1]}    {match[2]}"]
            is_inside = True
            continue
        is_inside = is_inside and bool(line.strip())
        found.append(f"    {line}" if is_inside else line)
    return found


def convert(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Make reStructuredText of a docstring: its sections, names and code.

    The list of fields that `help()` shows is left out: the site describes each field.
    """
    if "Fields:" in lines and isinstance(obj, type):
        del lines[lines.index("Fields:") :]
    found = with_cancellation(lines)
    if what not in ("attribute", "data", "property", "module"):  # whose first colon is no type
        found = GoogleDocstring(found, _SECTIONS, app, what, name, obj, options).lines()
    lines[:] = docstring_lines(found, name)


def plain_defaults(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returned: str
) -> tuple[str, str] | None:
    """Write defaults without angle brackets, so that the signature can be parsed with its types."""
    if signature is None:
        return None
    text = re.sub(r"<(\w+(?:\.\w+)+): [^<>]*>", r"\1", signature)
    return re.sub(r"<[^<>]*>", "...", text), returned


def add_example(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Append the shortest tested example of a public name, and where others are."""
    if name in _shown_places():
        lines += ["", *example_lines(name)]


def example_lines(name: str) -> list[str]:
    if not (found := examples_by_name().get(name)):
        if name.startswith(TORCH):  # whose modules have one each
            return []
        logger.warning("%s has no tested example", name)
        return []
    first, *more = found
    lines = [".. rubric:: Example", ""]
    if first.lines <= LONGEST:
        lines += [".. code-block:: python", ""]
        lines += [f"   {line}" for line in first.source.splitlines()] + [""]
        lines += [f"From {_link(first.page)}."]
    else:
        more = found
    pages = [page for page in dict.fromkeys(each.page for each in more) if page != first.page]
    if pages := [page for page in pages if not page.startswith("docs/examples/")][:5]:
        lines += [f"Also in {', '.join(map(_link, pages))}."]
    return [*lines, ""]


def _link(page: str) -> str:
    if page.startswith("docs/examples/") or not page.startswith(("docs/", "examples/")):
        return f"``{page}``"
    if page.startswith("examples/"):
        return f":doc:`/{page}`"
    return f":doc:`/{page.removeprefix('docs/').removesuffix('.md')}`"


class PublicData(Directive):
    """`.. publicdata:: elastic_aio.StopScope`: an alias of a type, or a constant."""

    required_arguments = 1
    has_content = False
    option_spec: ClassVar = {"home": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        full = self.arguments[0]
        home, name = self.options["home"], full.rpartition(".")[2]
        analyzer = ModuleAnalyzer.for_module(home)
        analyzer.analyze()
        text = analyzer.attr_docs.get(("", name), [])
        if not text:
            logger.warning("%s: %s has no docstring", home, name)
        value = re.sub(r"\b(?:typing|collections\.abc|elastic_aio)(?:\.\w+)*\.(?=\w)", "",
                       repr(getattr(importlib.import_module(home), name)))  # fmt: skip
        lines = [f".. py:data:: {full}", f"   :value: {value}" if len(value) < 200 else "", ""]
        shown = [*docstring_lines([*text], full), "", *example_lines(full)]
        lines += [f"   {line}" if line else "" for line in shown]
        node = nodes.section()
        node.document = self.state.document
        self.state.nested_parse(StringList(lines, source=home), self.content_offset, node)
        return list(node.children)


class DocSummary(Directive):
    """`.. docsummary:: text`: a line of a docstring."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        node = nodes.section()
        node.document = self.state.document
        lines = StringList([inline(self.arguments[0])], source="docstring")
        self.state.nested_parse(lines, self.content_offset, node)
        return list(node.children)


def exists(name: str, module: str) -> bool:
    """Return whether a name of an annotation can be imported: from its module or any other."""
    candidates = [name, f"{module}.{name}" if module else name]
    for full in candidates:
        parts = full.split(".")
        for end in range(len(parts) - 1, 0, -1):
            try:
                found: Any = importlib.import_module(".".join(parts[:end]))
            except ImportError:
                continue
            for part in parts[end:]:
                found = getattr(found, part, None)
            if found is not None:
                return True
    return hasattr(builtins, name.partition(".")[0]) or name in sys.modules


def missing_reference(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, contnode: nodes.TextElement
) -> nodes.Node | None:
    """Find a public name by the place of its definition; leave other names that exist as text."""
    if node.get("refdomain") != "py":
        return None
    target, module = node["reftarget"], node.get("py:module") or ""
    place = resolved(target, node.get("py:class") or "")
    domain = env.domains.python_domain
    if place and (entry := domain.objects.get(place)) is not None:
        reference = nodes.reference("", "", internal=True)
        uri = app.builder.get_relative_uri(env.current_document.docname, entry.docname)
        reference["refuri"] = f"{uri}#{entry.node_id}"
        reference["reftitle"] = place
        reference += contnode
        return reference
    homes = [module, *(each.home for each in public_names() if each.shown.startswith(f"{module}."))]
    if any(exists(target, home) for home in dict.fromkeys(homes)):
        return contnode
    return None


class LinkNames(SphinxPostTransform):
    """Make links of public names in the code of Markdown pages, outside of headings and links."""

    default_priority = 5

    def run(self, **kwargs: Any) -> None:
        docname = self.env.current_document.docname
        if docname.startswith(("api/", "examples/")):
            return
        for literal in list(self.document.findall(nodes.literal)):
            text = literal.astext()
            if isinstance(literal.parent, (nodes.title, nodes.reference, addnodes.pending_xref)):
                continue
            word = text.partition("(")[0]
            if not re.match(r"[A-Z]\w+[a-z]", word) or not (place := resolved(word)):
                continue
            entry = self.env.domains.python_domain.objects.get(place)
            if entry is None or literal.get("classes"):
                continue
            uri = self.app.builder.get_relative_uri(docname, entry.docname)
            reference = nodes.reference("", "", internal=True, refuri=f"{uri}#{entry.node_id}")
            literal.replace_self(reference)
            reference += literal


def setup(app: Sphinx) -> dict[str, Any]:
    find_members()
    app.add_directive("publicdata", PublicData)
    app.add_directive("docsummary", DocSummary)
    app.add_post_transform(LinkNames)
    app.connect("autodoc-process-docstring", convert, priority=600)
    app.connect("autodoc-process-docstring", add_example, priority=700)
    app.connect("autodoc-process-signature", plain_defaults)
    app.connect("missing-reference", missing_reference)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
