"""Blocks of the pages by a text in them, and patterns of the output that they show."""

from __future__ import annotations

import re
from collections.abc import Iterable

from docs.site.blocks import Block, blocks

DURATION = r"(?:(?:\d+ h )?\d+ m(?: \d+ s)?|[\d.]+ s)"


def block_of(page: str, part: str) -> Block:
    """Return the block of a page with a text."""
    (found,) = [one for one in blocks() if one.page.endswith(page) and part in one.text]
    return found


def pattern_of(text: str, **names: str) -> re.Pattern[str]:
    """Return what fits the output that a page shows, where another run has printed it.

    Times, numbers and columns may differ, `...` is any text, and `names` are patterns of what
    differs too: hosts, ids.
    """
    words = {**names, "...": ".*"}
    parts = [re.escape(word) for word in sorted(words, key=len, reverse=True)]
    special = re.compile(rf"({'|'.join(parts)})|({DURATION})(?!\w)|( {{2,}})|(\d+)")
    pattern, end = "", 0
    for match in special.finditer(text):
        pattern += re.escape(text[end : match.start()])
        word, duration, spaces, _ = match.groups()
        known = words[word] if word else DURATION if duration else r" +" if spaces else r"\d+"
        pattern, end = pattern + known, match.end()
    return re.compile(pattern + re.escape(text[end:]))


def lines_pattern(lines: Iterable[str], **names: str) -> re.Pattern[str]:
    """Return what fits these lines, where the line `...` is any number of lines."""
    patterns = [
        r"(?:.*\n)*?" if line == "..." else pattern_of(line, **names).pattern + r"\n"
        for line in lines
    ]
    return re.compile("".join(patterns))
