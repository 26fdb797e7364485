"""Which stream goes where."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic_aio.logs.paths import (
    NodeRecord,
    StreamPlan,
    StreamTarget,
    WorkerLogs,
    attempt_directory,
    plan_logs,
    run_prefix,
)
from elastic_aio.spec.logs import LogSpec, Std, StdMap

CONSOLE = StreamPlan(StreamTarget.CONSOLE)
NOWHERE = StreamPlan(StreamTarget.NOWHERE)


def file(name: str, *, is_shown: bool = False) -> StreamPlan:
    return StreamPlan(StreamTarget.FILE, f"/run/attempt_3/1/{name}.log", is_shown)


@pytest.mark.slow
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
def test_redirects_tee_and_filter_decide(
    redirects: int, tee: int, only: list[int], stdout: StreamPlan, stderr: StreamPlan
) -> None:
    spec = LogSpec(
        redirects=StdMap(Std(redirects)),
        tee=StdMap(Std(tee)),
        local_ranks_filter=frozenset(only),
    )
    directory, error_file = "/run/attempt_3/1", "/run/attempt_3/1/error.json"
    assert plan_logs(replace(spec, log_dir="/"), "/run", 3, 1) == WorkerLogs(
        stdout, stderr, directory, error_file
    )
    # Of a temporary directory, a worker without logs has no part.
    logs = (directory, error_file) if redirects or tee else (None, "/run/attempt_3/error_1.json")
    assert plan_logs(spec, "/run", 3, 1) == WorkerLogs(stdout, stderr, *logs)


@pytest.mark.parametrize(
    ("settings", "name", "shown"),
    [
        ({"tee": 3}, "output", True),
        ({"redirects": 3}, "output", False),
        ({"redirects": 1, "tee": 3}, "output", True),
        ({"tee": {0: 3, 1: 3}}, "output", True),
        ({"tee": 3, "local_ranks_filter": [0]}, "output", False),
        ({"tee": 3, "prefix": "${child}: "}, "output", True),
        ({"tee": 3, "prefix": "${stream}: "}, "stdout", True),
        ({"tee": 3, "duplicate_stdout_filters": ["loss"]}, "stdout", True),
        ({"tee": 3, "duplicate_stderr_filters": ["Error"]}, "stdout", True),
        ({"redirects": 2, "tee": 1}, "stdout", True),
        ({"redirects": 1}, "stdout", False),
        ({"tee": 3, "streams": "split"}, "stdout", True),
    ],
)
def test_joined_streams_are_one_file(settings: dict[str, Any], name: str, shown: bool) -> None:
    """Unless they go different ways, or a setting tells them apart."""
    logs = plan_logs(LogSpec(**{"streams": "joined", **settings}), "/run", 3, 1)
    assert logs.stdout == file(name, is_shown=shown)
    assert (logs.stderr == logs.stdout) == (name == "output")


def test_redirects_can_differ_by_rank() -> None:
    spec = LogSpec(redirects=StdMap(by_rank=((0, Std.OUT),)))
    assert plan_logs(spec, "/run", 0, 0).stdout.path == "/run/attempt_0/0/stdout.log"
    assert plan_logs(spec, "/run", 0, 1).stdout == CONSOLE


@pytest.mark.parametrize(
    ("spec", "directory"),
    [
        (LogSpec(log_dir="/dev/null", tee=StdMap(Std.ALL)), "/run"),
        (LogSpec(tee=StdMap(Std.ALL)), None),
    ],
)
def test_without_files_streams_are_inherited(spec: LogSpec, directory: str | None) -> None:
    """Without a run directory, or with log_dir /dev/null."""
    assert plan_logs(spec, directory, 0, 0) == WorkerLogs(CONSOLE, CONSOLE, None, "")


def test_dev_null_leaves_filtered_streams_alone() -> None:
    """As in torchrun."""
    spec = LogSpec(log_dir="/dev/null", local_ranks_filter=frozenset({0}))
    assert plan_logs(spec, None, 0, 1).stdout == CONSOLE


def test_a_filter_works_without_a_directory() -> None:
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
def test_a_run_id_becomes_a_directory_name(run_id: str, prefix: str) -> None:
    assert run_prefix(run_id) == prefix


@pytest.mark.parametrize(
    ("host", "prefix"),
    [
        ("", "r_"),
        ("n07", "r_n07_"),
        ("n07.cluster.example", "r_n07_"),
        ("train-w-0.svc.ns", "r_train-w-0_"),
        ("10.0.0.7", "r_10.0.0.7_"),
        ("fe80::1", "r_fe80::1_"),
        ("a/b c", "r_a_b_c_"),
        ("x" * 300, "r_" + "x" * 63 + "_"),
    ],
)
def test_a_directory_name_has_the_short_name_of_the_host(host: str, prefix: str) -> None:
    assert run_prefix("r", host) == prefix


@pytest.mark.slow
@given(st.text(max_size=300), st.text(max_size=300))
@example("字" * 100, "字" * 100)
@example("𐐷" * 100, "x" * 100)
def test_any_run_id_is_a_safe_path_component(run_id: str, host: str) -> None:
    prefix = run_prefix(run_id, host)
    assert not re.search(r"[/\s\0]", prefix)
    assert not prefix.startswith(".")
    assert len(prefix) <= 165
    # A temporary directory has 12 bytes before it, the random suffix 8; a name may have 255.
    assert len(prefix.encode("utf-8", "surrogatepass")) <= 235


@given(st.builds(NodeRecord, started_at=st.floats(0, 1e12)))
def test_the_record_of_a_node_is_read_as_it_was_written(node: NodeRecord) -> None:
    assert NodeRecord.decode(node.encode()) == node


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"run_id":"r","host":"h"}', b"\xff"])
def test_what_is_no_record_of_a_node(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        NodeRecord.decode(content)


def test_attempts_have_directories() -> None:
    assert attempt_directory("/logs/run_x", 2) == "/logs/run_x/attempt_2"


def test_streams_that_a_full_disk_shall_not_stop() -> None:
    """Those to files pass through the agent; what muted ones lose is not shown."""
    spec = LogSpec(redirects=1, tee=2, local_ranks_filter=[1], on_full="console")
    shown, muted = (plan_logs(spec, "/run", 3, rank) for rank in (1, 0))
    assert shown.stdout == StreamPlan(StreamTarget.FILE, "/run/attempt_3/1/stdout.log", False, True)
    assert shown.stderr == StreamPlan(StreamTarget.FILE, "/run/attempt_3/1/stderr.log", True, True)
    assert [plan.is_muted for plan in (muted.stdout, muted.stderr)] == [True, True]
    console = plan_logs(LogSpec(on_full="console"), "/run", 3, 0)
    assert console.stdout == CONSOLE
