"""Which stream goes where."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic_aio.logs.paths import (
    StreamPlan,
    StreamTarget,
    WorkerLogs,
    attempt_folder,
    plan_logs,
    run_prefix,
)
from elastic_aio.spec import LogSpec
from elastic_aio.std import Std, StdMap

CONSOLE = StreamPlan(StreamTarget.CONSOLE)
NOWHERE = StreamPlan(StreamTarget.NOWHERE)


def file(name: str, *, is_shown: bool = False) -> StreamPlan:
    return StreamPlan(StreamTarget.FILE, f"/run/attempt_3/1/{name}.log", is_shown)


@pytest.mark.parametrize(
    ("redirects", "tee", "only", "stdout", "stderr"),
    [
        (0, 0, [], CONSOLE, CONSOLE),
        (1, 0, [], file("stdout"), CONSOLE),
        (2, 0, [], CONSOLE, file("stderr")),
        (3, 0, [], file("stdout"), file("stderr")),
        (0, 1, [], file("stdout", is_shown=True), CONSOLE),
        (0, 3, [], file("stdout", is_shown=True), file("stderr", is_shown=True)),
        (1, 2, [], file("stdout"), file("stderr", is_shown=True)),
        (3, 1, [], file("stdout", is_shown=True), file("stderr")),
        (0, 0, [0], NOWHERE, NOWHERE),
        (0, 0, [0, 1], CONSOLE, CONSOLE),
        (0, 3, [0], file("stdout"), file("stderr")),
        (0, 1, [0], file("stdout"), NOWHERE),
        (0, 3, [1], file("stdout", is_shown=True), file("stderr", is_shown=True)),
    ],
)
def test_each_choice_has_its_place(
    redirects: int, tee: int, only: list[int], stdout: StreamPlan, stderr: StreamPlan
) -> None:
    """Redirects, tee and the filter of ranks decide for each stream."""
    spec = LogSpec(
        redirects=StdMap(Std(redirects)),
        tee=StdMap(Std(tee)),
        local_ranks_filter=frozenset(only),
    )
    assert plan_logs(spec, "/run", 3, 1) == WorkerLogs(
        stdout, stderr, "/run/attempt_3/1", "/run/attempt_3/1/error.json"
    )


def test_each_rank_has_its_own_choice() -> None:
    """A map of ranks redirects those it names."""
    spec = LogSpec(redirects=StdMap(by_rank=((0, Std.OUT),)))
    assert plan_logs(spec, "/run", 0, 0).stdout.path == "/run/attempt_0/0/stdout.log"
    assert plan_logs(spec, "/run", 0, 1).stdout == CONSOLE


@pytest.mark.parametrize(
    ("spec", "folder"),
    [
        (LogSpec(log_dir="/dev/null", tee=StdMap(Std.ALL)), "/run"),
        (LogSpec(tee=StdMap(Std.ALL)), None),
    ],
)
def test_where_nothing_is_kept_streams_are_inherited(spec: LogSpec, folder: str | None) -> None:
    """Without a folder, or with /dev/null, a worker has no file at all."""
    assert plan_logs(spec, folder, 0, 0) == WorkerLogs(CONSOLE, CONSOLE, None, "")


def test_dev_null_leaves_filtered_streams_alone() -> None:
    """`/dev/null` leaves every stream as it is, the filter included (as in torchrun)."""
    spec = LogSpec(log_dir="/dev/null", local_ranks_filter=frozenset({0}))
    assert plan_logs(spec, None, 0, 1).stdout == CONSOLE


def test_a_filter_works_without_a_folder() -> None:
    """Muting needs no files."""
    spec = LogSpec(local_ranks_filter=frozenset({0}))
    assert plan_logs(spec, None, 0, 1).stdout == NOWHERE
    assert plan_logs(spec, None, 0, 0).stdout == CONSOLE


@pytest.mark.parametrize(
    ("run_id", "prefix"),
    [
        ("run-1", "run-1_"),
        ("a/b", "a_b_"),
        ("../../etc", "_.._etc_"),
        ("two words\n", "two_words__"),
        ("ü@host:1=2+3.x", "ü@host:1=2+3.x_"),
        ("x" * 300, "x" * 100 + "_"),
        ("...", "_"),
    ],
)
def test_a_run_id_makes_a_folder_name(run_id: str, prefix: str) -> None:
    """What a path cannot hold becomes an underscore, and nothing is hidden."""
    assert run_prefix(run_id) == prefix


@given(st.text(max_size=300))
@example("字" * 100)
@example("𐐷" * 100)
def test_no_run_id_leaves_its_folder(run_id: str) -> None:
    """Any text gives one harmless part of a path."""
    prefix = run_prefix(run_id)
    assert not re.search(r"[/\s\0]", prefix)
    assert not prefix.startswith(".")
    assert len(prefix) <= 101
    # The random part takes 8 bytes; a name may have 255.
    assert len(prefix.encode("utf-8", "surrogatepass")) <= 240


def test_attempts_have_folders() -> None:
    """torch's layout."""
    assert attempt_folder("/logs/run_x", 2) == "/logs/run_x/attempt_2"
