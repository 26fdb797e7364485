"""What is set in a process before its program is executed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.process import exec_main

TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)


@given(st.dictionaries(st.sampled_from(["nice", "cgroup", "names", "umask"]), TEXT), st.lists(TEXT))
def test_words_are_read_as_they_were_written(settings: dict[str, str], program: list[str]) -> None:
    """Also a program whose arguments look like settings."""
    words = exec_main.format_words(settings, 7, ["--", "a=b", *program])
    assert exec_main.parse_words(words) == (settings, 7, ["--", "a=b", *program])


@pytest.mark.parametrize(
    ("report", "read"),
    [(b"", None), (b".", None), (b".exec 2", ("exec", 2)), (b"nice 13", ("nice", 13))],
)
def test_reports(report: bytes, read: tuple[str, int] | None) -> None:
    assert exec_main.parse_report(report) == read


def executed(*settings: str, program: list[str], env: dict[str, str] | None = None) -> str:
    """Return what a program prints that was started by `exec_main`, and its report after that."""
    reader, writer = os.pipe()
    try:
        words = [f"report={writer}", *settings, "--", *program]
        ended = subprocess.run(
            [sys.executable, "-I", "-S", exec_main.__file__, *words],
            pass_fds=[writer],
            env=env,
            stdout=subprocess.PIPE,
            timeout=60,
        )
    finally:
        os.close(writer)
    with open(reader, "rb") as file:
        return f"{ended.stdout.decode().strip()} {file.read().decode()}"


def test_the_program_inherits_what_was_set_and_no_trace_of_the_interpreter() -> None:
    """The interpreter ignores SIGPIPE, and sets LC_CTYPE in an environment without a locale."""
    show = 'umask; nice; echo "${LC_CTYPE-none}"; sed -n "s/SigIgn:/0x/p" /proc/self/status'
    env = {"PATH": os.environ["PATH"]}
    found = executed("nice=3", "umask=23", "unset=LC_CTYPE", program=["sh", "-c", show], env=env)
    nice = os.getpriority(os.PRIO_PROCESS, 0) + 0
    *shown, prefix, ignored, report = found.split()
    assert (shown, report) == (["0027", "3", "none"], ".")
    assert not int(prefix + ignored, 16) & 1 << (signal.SIGPIPE - 1)
    assert nice == os.getpriority(os.PRIO_PROCESS, 0)


def test_it_imports_what_an_interpreter_has_anyway(tmp_path: Path) -> None:
    """Each start of a worker with limits or sockets waits for it."""
    python = [sys.executable, "-I", "-S", "-X", "importtime"]
    found = []
    for words in (["-c", "pass"], [exec_main.__file__, "report=2", "nice=0", "--", "/bin/true"]):
        ended = subprocess.run([*python, *words], stderr=subprocess.PIPE, text=True, timeout=60)
        found.append({line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()})
    assert found[1] - found[0] <= {"errno", "."}


@pytest.mark.parametrize(
    ("settings", "program", "report"),
    [
        ([], ["/no/such/program"], ".exec 2"),
        (["cgroup=/no/such/directory"], ["true"], "cgroup 2"),
        (["oom_score_adj=5000"], ["true"], "oom_score_adj 22"),
        (["sockets=2000", "names=x"], ["true"], "sockets 9"),
    ],
)
def test_what_cannot_be_set_is_reported(
    settings: list[str], program: list[str], report: str
) -> None:
    assert executed(*settings, program=program) == f" {report}"


def test_sockets_become_the_descriptors_from_three_on(tmp_path: Path) -> None:
    """In any order, also if they have each other's numbers."""
    show = "import os; print(os.environ['LISTEN_PID'] == str(os.getpid()))\n"
    show += "print([os.read(number, 9) for number in (3, 4, 5)])\n"
    show += "print(sum(os.path.exists(f'/proc/self/fd/{n}') for n in range(6, 99)))"
    (tmp_path / "run.py").write_text(
        "import os, sys\n"
        "from elastic_aio.process import exec_main\n"
        "for number, text in ((3, 'c'), (4, 'a'), (5, 'b')):\n"
        "    reader, writer = os.pipe(); os.write(writer, text.encode())\n"
        "    os.dup2(reader, 50 + number, inheritable=False)\n"
        "for number in (3, 4, 5): os.dup2(50 + number, number)\n"
        "report = os.dup(os.pipe()[1])\n"
        "os.set_inheritable(report, True)\n"
        "words = exec_main.format_words({'sockets': '4,5,3', 'names': 'a:b:c'}, report,\n"
        "    [sys.executable, '-c', sys.argv[1]])\n"
        "sys.argv[1:] = words\n"
        "exec_main.main()\n"
    )
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "run.py"), show], capture_output=True, timeout=60
    )
    assert ended.stdout.decode() == "True\n[b'a', b'b', b'c']\n0\n", ended.stderr.decode()
