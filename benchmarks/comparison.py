"""Rows of a table: small behaviours, each observed of several peers."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.peers import Installer, Lacks, NotRun, Peer

__all__ = ["Family", "Row", "Table", "between", "cells_of", "observe", "replaced"]

_UNEXPECTED = (OSError, ValueError, LookupError, subprocess.SubprocessError)
"""Raised where a peer does what no behaviour expects: that fails one cell. TimeoutError too."""
_AT_A_TIME = 3
_BEGIN, _END = "<!-- begin of the output -->\n\n", "\n\n<!-- end of the output -->"


@dataclass(frozen=True)
class Row:
    """A behaviour.

    Args:
        title: first cell of the row.
        behaviour: observes a peer, and returns its cell.
        alone: the peers are observed one after the other, as what is measured, or a port of the
            host, needs it.
        varies: two runs may give different cells.
        needs: a program without which ours gives another cell; empty for none.
    """

    title: str
    behaviour: Callable[[Any], str]
    alone: bool = False
    varies: bool = False
    needs: str = ""


@dataclass(frozen=True)
class Family:
    """Peers of the same kind, by name, with the behaviours that are observed of each."""

    title: str
    rows: Mapping[str, Row]
    peers: Mapping[str, Callable[[Installer], Peer]]


@dataclass(frozen=True)
class Table:
    """What was observed of a family."""

    title: str
    peers: Sequence[Peer | NotRun]
    rows: Sequence[Sequence[str]]

    def lines(self) -> Iterator[str]:
        """Yield the table in Markdown, and the peers that did not run."""
        columns = [index for index, peer in enumerate(self.peers) if isinstance(peer, Peer)]
        headings = [f"{peer.name} {peer.version}" for peer in self.peers if isinstance(peer, Peer)]
        yield f"## {self.title}"
        yield ""
        yield "| behaviour | " + " | ".join(headings) + " |"
        yield "|---" * (1 + len(columns)) + "|"
        for title, *cells in self.rows:
            shown = [cells[index].replace("|", "\\|") for index in columns]
            yield f"| {title} | " + " | ".join(shown) + " |"
        absent = [peer for peer in self.peers if isinstance(peer, NotRun)]
        if absent:
            yield ""
        for peer in absent:
            yield f"* {peer.name}: not run here: {peer.reason}"


def observe(family: Family, names: Sequence[str], peers: Sequence[Peer | NotRun]) -> Table:
    """Observe behaviours of a family, of each peer."""
    rows = []
    for name in names:
        began = time.monotonic()
        row = family.rows[name]
        with ThreadPoolExecutor(1 if row.alone else _AT_A_TIME) as pool:
            rows.append([row.title, *pool.map(partial(_cell, row=row), peers)])
        print(f"{name}: {time.monotonic() - began:.0f} s", rows[-1][1:], file=sys.stderr)
    return Table(family.title, peers, rows)


def _cell(peer: Peer | NotRun, row: Row) -> str:
    if isinstance(peer, NotRun):
        return "not run"
    try:
        return row.behaviour(peer)
    except Lacks:
        return "no setting"
    except _UNEXPECTED as error:
        print(f"{peer.name}: {type(error).__name__}: {error}", file=sys.stderr)
        return "not run: " + str(error).partition(":")[0].partition("\n")[0]


def between(page: str) -> str:
    """Return what stands between the marks of a page.

    Raises:
        ValueError: it does not have both of them.
    """
    _, begin, rest = page.partition(_BEGIN)
    output, end, _ = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"no lines {_BEGIN.strip()!r} and {_END.strip()!r} in the page")
    return output


def replaced(page: str, output: str) -> str:
    """Return a page with an output between its marks."""
    old = between(page)
    return page.replace(f"{_BEGIN}{old}{_END}", f"{_BEGIN}{output}{_END}")


def cells_of(page: str, title: str) -> dict[str, list[str]]:
    """Return the cells of a table of the page, by the title of the row; first its headings."""
    section = between(page).partition(f"## {title}\n")[2].partition("\n## ")[0]
    found = [line[2:-2] for line in section.splitlines() if line.startswith("| ")]
    rows = [re.split(r" (?<!\\)\| ", line) for line in found]
    return {row[0]: [cell.replace("\\|", "|") for cell in row[1:]] for row in rows}
