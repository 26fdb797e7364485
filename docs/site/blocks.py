"""The fenced code blocks of the pages, and what a test does with each.

A block of Python is a program; a block of a shell is a script.  `tests/docs/test_blocks.py` runs
them as `SETUPS` says, compares what is printed where the next block, or the page, shows that, and
parses blocks of data.  A block in `NOT_RUN` is not run, for the reason there.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^( *)```([\w-]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: `page` is the path from the root, `line` that of its first line."""

    page: str
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def why_not_run(self) -> str:
        """The reason why it is not run; empty if it is."""
        for (page, part), why in NOT_RUN.items():
            if self.page.endswith(page) and part in self.text:
                return why
        return ""

    @property
    def is_run(self) -> bool:
        return not self.why_not_run


def pages() -> list[Path]:
    """Return the Markdown files that people read."""
    found = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
    return [*found, *sorted(ROOT.glob("docs/**/*.md"))]


@functools.cache
def blocks() -> tuple[Block, ...]:
    """Return all blocks, by page and in their order."""
    found = []
    for page in pages():
        text = page.read_text()
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start(3)) + 1
            found.append(Block(str(page.relative_to(ROOT)), line, match[2], match[3]))
    return tuple(found)


NOT_RUN: dict[tuple[str, str], str] = {}
"""Why a block is not run, by the end of its page's path and a text in the block."""
