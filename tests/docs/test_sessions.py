"""The sessions of the pages, `$ COMMAND` and what it prints: run again, and compared."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from docs.site.blocks import Block, blocks
from tests.docs.test_blocks import place, prepare
from tests.support.children import DEADLINE_S
from tests.support.cli import run_program
from tests.support.doc_outputs import lines_pattern
from tests.support.doc_sessions import DIFFERS, SESSIONS
from tests.support.doc_setups import Setup

__all__ = ["place"]

SHOWN = [block for block in blocks() if block.is_run and block.language == "console"]
_MARK = "----- end of a command"


def session_of(block: Block) -> Setup:
    (setup,) = [
        setup
        for (page, part), setup in SESSIONS.items()
        if block.page.endswith(page) and part in block.text
    ]
    return setup


def commands_of(text: str) -> list[tuple[str, list[str]]]:
    """Return each command, and the lines that it prints."""
    commands: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            commands.append((line[2:], []))
        elif line or commands[-1][1]:
            commands[-1][1].append(line)
    return commands


@pytest.mark.docs
@pytest.mark.parametrize("block", SHOWN, ids=lambda block: block.name)
def test_a_session_prints_what_the_page_shows(block: Block, place: Path) -> None:
    check_session(block, session_of(block), place)


def check_session(block: Block, setup: Setup, place: Path, *, seconds: float = DEADLINE_S) -> None:
    """Run the commands of a session with its setup; compare what each of them prints."""
    env = prepare(setup, place)
    commands = commands_of(block.text)
    script = [setup.beside, f"echo '{_MARK}'"]
    for command, _ in commands:
        for name, used in setup.replaced.items():
            command = command.replace(name, used)
        script += [f"{command}", f"code=$?; echo '{_MARK}'; (exit $code)"]
    script += ["true", setup.beside_end]
    ended = run_program(
        ["bash", "-c", "exec 2>&1\n" + "\n".join(script)], env=env, cwd=place, seconds=seconds
    )
    printed = ended.out.split(f"{_MARK}\n")[1:]
    names = {
        **DIFFERS,
        "vm": re.escape(os.uname().nodename),
        "gpu-3": re.escape(os.uname().nodename),
        "/home/me": re.escape(str(place)),
        "/srv": re.escape(str(place)),
    }
    assert len(printed) == len(commands) + 1, ended.out
    for (command, shown), text in zip(commands, printed, strict=False):
        while shown and not shown[-1]:
            shown.pop()
        pattern = lines_pattern(shown, **names)
        assert pattern.fullmatch(text), "\n".join([command, *shown, "--- printed:", text])


def test_no_session_is_for_nothing() -> None:
    for page, part in SESSIONS:
        assert any(block.page.endswith(page) and part in block.text for block in SHOWN), page
