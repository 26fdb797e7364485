"""Every code block of the pages is run, with its setup; what is printed is compared."""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
import textwrap
from pathlib import Path

import pytest

from docs.site.blocks import NOT_RUN, Block, blocks
from tests.support.certificates import Authority, can_make_certificates
from tests.support.cli import CLI, REPOSITORY, Ended, run_program
from tests.support.doc_setups import SETUPS, Setup, setup_of
from tests.support.sockets import free_port

SHELLS = ("sh", "bash")
SESSION = "console"
DATA = ("json", "toml", "ini", "yaml")
TRAIN = "import sys\n\nprint('trained', *sys.argv[1:])\n"
NO_OUTPUT = ("None: it does not answer", "it has ended since;")
"""Beginnings of comments behind a `print` that are not what it prints."""
SECONDS = 120

ALL = [block for block in blocks() if block.is_run and block.language in ("python", *SHELLS)]
RUN = [block for block in ALL if not setup_of(block).engine]
AT_ENGINES = [(block, setup_of(block).engine) for block in ALL if setup_of(block).engine]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with the commands, the examples and a `train.py`."""
    commands = tmp_path / "bin"
    commands.mkdir()
    words = " ".join(CLI)
    dry = f'if [ "$1" = run ] && [ -n "$DRY" ]; then shift; exec {words} run --dry-run "$@"; fi\n'
    write_program(commands / "aio-elastic", f'{dry}exec {words} "$@"\n')
    write_program(commands / "aio-torchrun", f'exec {words} run --torchrun-defaults "$@"\n')
    for name in ("accelerate", "torchrun"):
        write_program(commands / name, f'echo {name} "$@"\n')
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text(TRAIN)
    (work / "examples").symlink_to(REPOSITORY / "examples")
    return work


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}")
    path.chmod(0o755)


def source_of(text: str) -> str:
    """Return a block of Python by a text of it: the file of a plug-in."""
    return next(block.text for block in blocks() if text in block.text)


def prepare(setup: Setup, place: Path) -> dict[str, str | None]:
    """Write the files of a setup; return the environment."""
    for name, text in setup.files.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(source_of(text[1:]) if text.startswith("@") else text)
    if setup.with_certificates:
        if not can_make_certificates():
            pytest.skip("openssl is not installed")
        authority = Authority(place)
        side = authority.issue()
        for name in ("store", "me", "node"):
            shutil.copy(side.cert or "", place / f"{name}.pem")
            shutil.copy(side.key or "", place / f"{name}.key")
    for name in ("run", "state", "home"):
        (place.parent / name).mkdir()
    return {
        "PATH": f"{place.parent}/bin:{os.environ['PATH']}",
        "PYTHONPATH": f"{REPOSITORY}:{place}",
        "PORT": str(free_port()),
        "PORT2": str(free_port()),
        "DRY": "1" if setup.is_dry else "",
        "HOME": f"{place.parent}/home",
        "XDG_STATE_HOME": f"{place.parent}/state",
    }


def program_of(block: Block, setup: Setup) -> str:
    """Return the text that runs: the block with what is before and after it."""
    text = block.text
    for shown, used in setup.replaced.items():
        assert shown in text, f"{block.name}: no {shown!r}"
        text = text.replace(shown, used)
    if block.language == "python" and has_top_level_await(text):
        text = f"async def _main() -> None:\n{textwrap.indent(text, '    ')}\n"
        text += "import asyncio\nasyncio.run(_main())\n"
    return f"{setup.before}{text}{setup.after}"


def has_top_level_await(text: str) -> bool:
    try:
        compile(text, "block", "exec")
    except SyntaxError:
        compile(text, "block", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        return True
    return False


def script_of(block: Block, setup: Setup, place: Path, port: str) -> str:
    """Return the shell script that runs a block, with the jobs beside it."""
    program = program_of(block, setup)
    if block.language == "python":
        (place / "block.py").write_text(program.replace("$PORT", port))
        command = "python block.py"
        if setup.worker is not None:
            command = f"aio-elastic run {setup.worker} block.py"
        command = command.replace("python ", f"{sys.executable} ", 1)
    elif setup.worker is not None:
        write_program(place / "block.sh", program)
        command = f"aio-elastic run {setup.worker} ./block.sh"
    else:
        command = program
    return f"set -euo pipefail\n{setup.beside}\n{command}\n{setup.beside_end}"


@pytest.mark.docs
@pytest.mark.parametrize("block", RUN, ids=lambda block: block.name)
def test_a_block_runs(block: Block, place: Path) -> None:
    run_block(block, place)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("block", "engine"), AT_ENGINES, ids=lambda value: getattr(value, "name", value)
)
def test_a_block_runs_at_an_engine(
    block: Block, engine: str, place: Path, request: pytest.FixtureRequest
) -> None:
    run_block(block, place, ENGINE=request.getfixturevalue(f"{engine}_endpoint"))


def run_block(block: Block, place: Path, **more: str) -> None:
    """Run a block with its setup; compare what it prints."""
    setup = setup_of(block)
    if setup.needs and not shutil.which(setup.needs):
        pytest.skip(f"{setup.needs} is not installed")
    env = prepare(setup, place) | more
    script = script_of(block, setup, place, env["PORT"] or "")
    ended = run_program(["bash", "-c", script], env=env, cwd=place, seconds=SECONDS)
    assert ended.code == setup.code, f"{script}\n{ended.out}\n{ended.err}"
    if setup.code == 0 and "Error" not in block.text and "fail" not in str(setup.files):
        assert "Traceback" not in ended.err, ended.err
    for shown in (*setup.prints, *shown_by_comments(block)):
        assert is_printed(shown, ended), f"{shown}\n---\n{ended.out}\n---\n{ended.err}"


def shown_by_comments(block: Block) -> list[str]:
    """Return what the comments behind `print` say that it prints."""
    if block.language != "python":
        return []
    found = re.findall(r"^ *print\(.*\)  # (.+)$", block.text, re.MULTILINE)
    return [text for text in found if not text.startswith(NO_OUTPUT)]


def is_printed(shown: str, ended: Ended) -> bool:
    """Return whether a line of the output has the form of `shown`, where `...` is any text."""
    pattern = ".*".join(map(re.escape, shown.split("...")))
    return any(re.fullmatch(pattern, line) for line in f"{ended.out}\n{ended.err}".splitlines())


def test_every_block_is_run_or_says_why_not() -> None:
    """A drawing, or what a command prints, is not run, and has a reason that says so."""
    known = ("python", SESSION, *SHELLS, *DATA)
    unknown = [block.name for block in blocks() if block.is_run and block.language not in known]
    assert not unknown, "add it to NOT_RUN of docs/site/blocks.py, with the test that compares it"


def test_no_reason_and_no_setup_is_for_nothing() -> None:
    for page, part in (*NOT_RUN, *SETUPS):
        found = [each for each in blocks() if each.page.endswith(page) and part in each.text]
        assert found, (page, part)


def test_a_reason_that_names_a_test_names_one_that_exists() -> None:
    for why in NOT_RUN.values():
        for path, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", why):
            assert f"def {name}(" in (REPOSITORY / path).read_text(), why
