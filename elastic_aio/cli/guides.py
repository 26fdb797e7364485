"""`aio-elastic help [PAGE]`: the pages of the documentation, which are installed with the package.

::

    aio-elastic help             # the commands, and the pages
    aio-elastic help failures    # a page
    aio-elastic help run         # the options of a command, if no page has its name
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from elastic_aio.cli.local_jobs import JobError, command
from elastic_aio.cli.parser import OptionParser
from elastic_aio.spec.checks import invalid_value
from elastic_aio.text import did_you_mean, error_reason

_BACKGROUND = ("guarantees", "architecture")
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
        description="Print a page of the documentation, or the options of a command. Without a"
        " topic: list them.",
        epilog="Exit codes: 0 success, 1 the pages are not installed, 2 no such topic.",
    )
    parser.add_argument("topic", nargs="?", metavar="PAGE", help="a page, or else a command")
    topic = parser.parse_args(argv).topic
    pages = find_pages()
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
        print(_text(pages[topic]), end="")
    elif topic in ("run", *COMMANDS):
        return main([topic, "--help"])
    elif not pages:
        raise JobError("the pages of the documentation are not installed")
    else:
        meant = did_you_mean(topic, (*pages, "run", *COMMANDS))
        found = ", ".join(_pages_with(topic, pages))
        where = f"; pages with this word: {found}" if found else ""
        problem = f"must be a page or a command: `aio-elastic help` lists them{meant}{where}"
        raise invalid_value("PAGE", problem, topic)
    return 0


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
