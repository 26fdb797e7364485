"""`aio-elastic help [PAGE]`: the pages of the documentation, which are installed with the package.

::

    aio-elastic help             # the commands, and the pages
    aio-elastic help failures    # a page
    aio-elastic help failures known-causes    # a section of it; also failures#known-causes
    aio-elastic help --tee       # the rows of an option, a field, an event, a variable, a code
    aio-elastic help run         # the options of a command, if no page has its name
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from elastic_aio.cli.local_jobs import JobError, command
from elastic_aio.cli.parser import OptionParser
from elastic_aio.spec.checks import invalid_value
from elastic_aio.text import did_you_mean, error_reason

_BACKGROUND = ("guarantees", "architecture")
TABLES = ("spec", "command-line", "events-reference", "exit-codes", "worker-environment")
"""Pages whose tables have a row for each name that an error may begin with."""
_FOUND_MAX = 3
_HEADING = 10
"""How many lines with a word a heading with it is worth."""


@command("help")
def main_help(argv: Sequence[str]) -> int:
    """Run `aio-elastic help`; return the exit code.

    0: the text was printed.  1: the pages are not installed.  2: there is no such topic.
    """
    from elastic_aio.cli import COMMANDS, USAGE, main

    parser = OptionParser(
        prog="aio-elastic help",
        description="Print a page of the documentation, a section of it, the rows of a name that an"
        " error begins with, or the options of a command. Without a topic: list them.",
        epilog="Exit codes: 0 success, 1 the pages are not installed, 2 no such topic.",
    )
    parser.add_argument(
        "topic", nargs="?", metavar="PAGE", help="a page, an option, a field, an event, a command"
    )
    parser.add_argument("section", nargs="?", metavar="SECTION", help="a heading, or a name")
    is_option = len(argv) == 1 and argv[0].startswith("--") and argv[0] not in ("--", "--help")
    arguments = parser.parse_args(["--", *argv] if is_option else argv)
    topic, section = arguments.topic, arguments.section
    pages = find_pages()
    if topic is not None and section is None:
        topic, hash_, anchor = topic.partition("#")
        section = anchor if hash_ else None
    if topic is None:
        width = max(map(len, pages), default=0)
        titles = [f"  {name.ljust(width)}  {_title(path)}" for name, path in pages.items()]
        print(
            "\n".join(
                [
                    USAGE,
                    "Pages for `aio-elastic help PAGE` (another word: the pages that have it):",
                    *titles,
                ]
            )
        )
    elif topic in pages:
        _print_page(_text(pages[topic]), section)
    elif topic in ("run", *COMMANDS):
        return main([topic, "--help"])
    elif not pages:
        raise JobError("the pages of the documentation are not installed")
    else:
        rows = [text for name in TABLES for text in sections(_text(pages[name]), topic)]
        found = ", ".join(_pages_with(topic, pages))
        if not rows:
            meant = did_you_mean(topic, (*pages, "run", *COMMANDS))
            where = f"; pages with this word: {found}" if found else ""
            problem = f"must be a page or a command: `aio-elastic help` lists them{meant}{where}"
            raise invalid_value("PAGE", problem, topic)
        print("\n".join([*rows, f"Pages with this word: {found}"]))
    return 0


def _print_page(text: str, section: str | None) -> None:
    found = [text] if section is None else sections(text, section)
    if not found:
        known = [*dict.fromkeys(each.anchor for each in anchors_of(text))]
        problem = "must be a heading of the page, or a name in its tables{}"
        raise invalid_value("SECTION", problem.format(did_you_mean(section or "", known)), section)
    print("\n".join(found), end="")


class Anchor(NamedTuple):
    """A place of a page: a heading, or a row of a table by the names in its first cell."""

    anchor: str
    line: int
    """Its line, from 0."""
    level: int
    """Of a heading; 0 for a row."""
    head: int
    """The first line of the row's table."""


def anchors_of(text: str) -> Iterator[Anchor]:
    """Yield the anchors of a page, in order: the site has the first of each name.

    The anchor of a heading is made as GitHub makes it.  A table whose first column is `field of
    NAME` has the rows of NAME.FIELD, as errors name the fields of a part.
    """
    fence, head, prefix = "", 0, ""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if fence or line.lstrip().startswith("```"):
            mark = line.strip().rstrip("abcdefghijklmnopqrstuvwxyz")
            fence = "" if mark == fence else fence or mark
        elif heading := re.match(r"(#+) (.+)", line):
            slug = re.sub(r"[^\w\- ]", "", heading[2].lower()).replace(" ", "-")
            yield Anchor(slug, number, len(heading[1]), 0)
        elif line.startswith("|"):
            cell = line.split(" | ")[0].removeprefix("| ")
            if not lines[number - 1].startswith("|"):
                head = number
                of = re.match(r"field of `(\w+)`", cell)
                prefix = f"{of[1]}." if of else ""
            elif number > head + 1:
                for name in _names_in(cell):
                    yield Anchor(prefix + name, number, 0, head)


def _names_in(cell: str) -> list[str]:
    names = [word.split()[0] for word in re.findall(r"`([^`]+)`", cell) if word.strip()]
    return re.findall(r"\b\d+\b", cell) if re.fullmatch(r"[\d, ]+", cell) else names


def sections(text: str, anchor: str) -> list[str]:
    """Return the sections of a heading, and the rows of a name with heading and table head."""
    lines = text.rstrip("\n").split("\n")
    found = [*anchors_of(text)]
    headings = [each for each in found if each.level]
    texts: dict[int, list[str]] = {}
    for each in found:
        if each.anchor != anchor:
            continue
        if each.level:
            ends = (one.line for one in headings if one.line > each.line)
            ends = (end for end in ends if lines[end].index(" ") <= each.level)
            texts[each.line] = lines[each.line : next(ends, len(lines))]
        elif each.head in texts:
            texts[each.head].append(lines[each.line])
        else:
            above = [one.line for one in headings if one.line < each.line]
            title = [lines[above[-1]], ""] if above else []
            texts[each.head] = [*title, *lines[each.head : each.head + 2], lines[each.line]]
    return ["\n".join(part).rstrip("\n") + "\n" for part in texts.values()]


def find_pages() -> dict[str, str]:
    """Return the paths of the pages by topic: the guides, the reference, and the background.

    A page of the reference that shares its name with a guide is `NAME-reference`.
    """
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    pages: dict[str, str] = {}
    # An installed package has them inside, a checkout beside it.
    for directory in (f"{package}/docs", f"{os.path.dirname(package)}/docs"):
        for part in ("guides", "reference"):
            for name in _names(f"{directory}/{part}"):
                topic = f"{name}-reference" if name in pages else name
                pages[topic] = f"{directory}/{part}/{name}.md"
        background = {name: f"{directory}/{name}.md" for name in _BACKGROUND}
        pages |= {name: path for name, path in background.items() if os.path.exists(path)}
        if pages:
            break
    return pages


def _pages_with(word: str, pages: Mapping[str, str]) -> list[str]:
    """Return the pages that have a word most often, in headings above all; the first has most."""
    lower = word.lower()
    weights: dict[str, int] = {}
    for name, path in pages.items() if lower.strip() else ():
        lines = [line.lower() for line in _text(path).splitlines() if lower in line.lower()]
        weights[name] = sum(_HEADING if line.startswith("#") else 1 for line in lines)
    found = sorted(weights, key=lambda name: -weights[name])
    return [name for name in found if weights[name]][:_FOUND_MAX]


def _names(directory: str) -> list[str]:
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return []
    return [name.removesuffix(".md") for name in names if name.endswith(".md")]


def _title(path: str) -> str:
    return _text(path).partition("\n")[0].removeprefix("# ")


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error_reason(error)}") from None
