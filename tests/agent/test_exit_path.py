"""From a worker's exit to the signals for its siblings, and to the next attempt: what runs."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.cli import CLI, run_program
from tests.support.injuries import strace_missing
from tests.support.system_calls import TIMED_OUT, calls_of_restarts

PROGRAM = Path(__file__).parents[1] / "support" / "exit_path.py"
WORKER = """
[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0
if [ $RANK = 0 ]; then until [ -e $NOTES/idle ]; do sleep 0.01; done; exit 1; fi
"""
RESTARTS = 5
FAILING = f"""
[ $TORCHELASTIC_RESTART_COUNT = {RESTARTS} ] && exit 0
[ $RANK = 0 ] && sleep 0.3 && exit 1
"""
# How the sibling of the failed worker stays: as a program without a handler; and as a trainer with
# a child, which saves on SIGTERM, and then exits with 0 or 143.
STAYS = "exec sleep 99"
TRAINS = "trap 'kill $!; wait $!; : > $NOTES/saved; exit {}' TERM; sleep 99 & wait"
SIBLINGS: dict[str, str] = {
    "no handler": STAYS,
    "saves, 0": TRAINS.format(0),
    "saves, 143": TRAINS.format(143),
}
# Modules of the package that run: those of today, and that of signals, which SIGCHLD may run.
SIGNAL_MODULES_MAX = 17
START_MODULES_MAX = 45
# System calls of the quickest of several restarts of two workers: those of today, 187, and those of
# two more scans, which depend on how fast the siblings end.
CALLS_MAX = 210


@pytest.fixture(scope="module", params=[*SIBLINGS.values()], ids=[*SIBLINGS])
def trace(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[set[str], int]]:
    """What a launcher runs when a worker fails, by stage: modules, iterations of the loop."""
    directory = tmp_path_factory.mktemp("trace")
    job = ["run", "--nproc-per-node=2", "--max-restarts=1", "--no-python", "sh", "-c"]
    job.append(WORKER + request.param)
    argv = [sys.executable, str(PROGRAM), str(directory), *job]
    ended = run_program(argv, env={"NOTES": str(directory)})
    assert ended.code == 0, ended.err
    notes = json.loads((directory / "trace").read_text())
    return {stage: (set(modules), count) for stage, (modules, count) in notes.items()}


def own(modules: set[str]) -> set[str]:
    return {name for name in modules if name.startswith("elastic_aio")}


def test_siblings_are_signalled_before_anything_explains_the_exit(
    trace: dict[str, tuple[set[str], int]],
) -> None:
    modules, iterations = trace["signal"]
    assert iterations == 0
    assert not modules & {"re", "re._compiler", "threading"}
    assert not own(modules) & {"elastic_aio.text", "elastic_aio.status", "elastic_aio.report"}
    assert len(own(modules)) <= SIGNAL_MODULES_MAX, sorted(own(modules))


def test_a_restart_starts_no_thread_and_compiles_no_pattern(
    trace: dict[str, tuple[set[str], int]],
) -> None:
    """The files of the usual failure are small, and its patterns were compiled before."""
    modules, _ = trace["start"]
    assert not modules & {"re._compiler", "threading"}
    assert len(own(modules)) <= START_MODULES_MAX, sorted(own(modules))


@pytest.fixture(scope="module", params=[*SIBLINGS.values()], ids=[*SIBLINGS])
def restarts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Counter[str]]:
    """The system calls of each of several restarts."""
    if reason := strace_missing():
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("calls")
    job = ["--nproc-per-node=2", f"--max-restarts={RESTARTS}", "--restart-delay=0"]
    job += ["--no-python", "sh", "-c", FAILING + request.param]
    strace = ["strace", "-qq", "-o", str(directory / "trace")]
    ended = run_program([*strace, *CLI, "run", *job], env={"NOTES": str(directory)})
    assert ended.code == 0, ended.err
    trace = (directory / "trace").read_text().splitlines()
    found = [*map(Counter, calls_of_restarts(trace, workers=2))]
    assert len(found) == RESTARTS
    return found


@pytest.mark.slow
def test_a_restart_makes_few_system_calls(restarts: list[Counter[str]]) -> None:
    calls = min(restarts, key=lambda counter: counter.total())
    assert calls.total() <= CALLS_MAX, calls.most_common()


@pytest.mark.slow
def test_a_restart_waits_for_events_and_never_for_the_clock(
    restarts: list[Counter[str]],
) -> None:
    """A timer that ends a wait is a time that each restart takes longer."""
    assert min(calls[TIMED_OUT] for calls in restarts) == 0
