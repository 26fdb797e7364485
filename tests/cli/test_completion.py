"""`aio-elastic completion`: the scripts, in real shells where they are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from elastic_aio.cli import COMMANDS, main

needs_fish = pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
needs_zsh = pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")


@pytest.fixture
def scripts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Path:
    """A directory with the scripts, named after their shells, and one file."""
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        (tmp_path / shell).write_text(capfd.readouterr().out)
    return tmp_path


def ask(argv: list[str], directory: Path) -> list[str]:
    """Return the lines that a shell prints."""
    ended = subprocess.run(
        argv, cwd=directory, capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stderr == ""
    return ended.stdout.splitlines()


def in_bash(directory: Path, *words: str) -> list[str]:
    """Return what bash offers for the last word."""
    script = (
        'source ./bash; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _aio_elastic;'
        ' [ ${#COMPREPLY[@]} = 0 ] || printf "%s\\n" "${COMPREPLY[@]}"'
    )
    return ask(["bash", "--norc", "-c", script, "bash", *words], directory)


def test_bash(scripts: Path) -> None:
    assert in_bash(scripts, "aio-elastic", "stor") == ["store"]
    assert set(COMMANDS) < set(in_bash(scripts, "aio-elastic", ""))
    run = ["aio-elastic", "run"]
    assert in_bash(scripts, *run, "--nproc") == ["--nproc-per-node"]
    assert "--http" in in_bash(scripts, *run, "--tee", "3", "--")
    assert "--http" in in_bash(scripts, *run, "--tee", "=", "3", "--")
    assert in_bash(scripts, *run, "-m", "fi") == ["fish"]
    # A value, and an argument of the script.
    assert in_bash(scripts, *run, "--events", "fi") == ["fish"]
    assert in_bash(scripts, *run, "--events", "=", "fi") == ["fish"]
    assert in_bash(scripts, *run, "x.py", "--nproc") == []
    assert in_bash(scripts, "aio-elastic", "store", "ping", "--time") == ["--timeout"]
    assert in_bash(scripts, "aio-torchrun", "--max-r") == ["--max-restarts"]


@needs_fish
def test_fish(scripts: Path) -> None:
    def offered(line: str) -> list[str]:
        found = ask(["fish", "--no-config", "-c", f"source ./fish; complete -C '{line}'"], scripts)
        return [entry.split("\t")[0] for entry in found]

    assert offered("aio-elastic stor") == ["store"]
    assert offered("aio-elastic run --nproc") == ["--nproc-per-node"]
    assert offered("aio-elastic events --js") == ["--json"]
    assert offered("aio-torchrun --max-r") == ["--max-restarts"]
    assert offered("aio-elastic run --events ba") == ["bash"]


@needs_zsh
def test_zsh(scripts: Path) -> None:
    """The function of the script; zsh's own `_arguments` does the rest."""
    stubs = "compdef() { :; }; compadd() { print -l -- $@; }; _arguments() { print -l -- $@; }"

    def offered(*words: str) -> list[str]:
        script = f"{stubs}; source ./zsh; words=($@); CURRENT=$#; _aio_elastic"
        return ask(["zsh", "-f", "-c", script, "zsh", *words], scripts)

    assert {"run", *COMMANDS} < set(offered("aio-elastic", ""))
    run = offered("aio-elastic", "run", "")
    assert run[:2] == ["-A", "-*"]
    assert "--nproc-per-node=[workers per node]:value:_files" in run
    assert run[-1] == "*:file:_files"
    assert any(
        line.startswith("--timeout=") for line in offered("aio-elastic", "store", "ping", "")
    )
    assert "--port=[TCP port to listen on]:value:_files" in offered("aio-elastic", "store", "")
    assert "--max-restarts=[restarts of the group after failures]:value:_files" in offered(
        "aio-torchrun", ""
    )


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "the following arguments are required: shell"),
        (["bahs"], "shell: must be 'bash', 'zsh' or 'fish'; did you mean bash? (got 'bahs')"),
    ],
)
def test_mistakes(words: list[str], problem: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", *words]) == 2
    assert capfd.readouterr().err == f"aio-elastic completion: {problem}\n"
