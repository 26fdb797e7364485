"""The decisions that led to the state of a job: from events alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elastic_aio.cli import main
from elastic_aio.cli.why import format_steps
from elastic_aio.event_json import event_to_json
from elastic_aio.events import (
    AttemptFailed,
    DeadlineMissed,
    Event,
    EventsMissed,
    JobFinished,
    JobStarted,
    Restarting,
    StopEscalated,
    StopRequested,
    WorkerExited,
    WorkerStarted,
)
from elastic_aio.explanation import Step, explain
from elastic_aio.node_events import MembershipChanged, NodeLost, RoundForming
from elastic_aio.outcome import ExitStatus, Failure, JobState, WorkerError

STARTED = JobStarted(
    time=1.0, run_id="r", node="h", entrypoint="x", nproc_per_node=2, nnodes="1", max_restarts=3,
    agent_pid=7,
)  # fmt: skip
ROOT = Failure(
    rank=1,
    local_rank=1,
    pid=101,
    host="h",
    status=ExitStatus(code=3),
    time=5.0,
    order=0,
    stderr_tail=("one", "two", "three", "four"),
    stderr_path="/logs/stderr.log",
    notes=("the kernel killed it",),
)
VICTIM = Failure(
    rank=0, local_rank=0, pid=100, host="h", status=ExitStatus(signal=15), time=6.0, order=1,
    is_victim=True,
)  # fmt: skip


def step_of(event: Event) -> Step:
    """Return the only step of an event."""
    (step,) = explain([event])
    return step


def test_a_failure_and_what_followed() -> None:
    """Each decision has its rule, and the failure its evidence."""
    steps = explain(
        [
            STARTED,
            WorkerStarted(time=2.0, rank=0, local_rank=0, pid=100),
            WorkerExited(time=5.0, rank=1, local_rank=1, pid=101, status=ROOT.status, duration=3.0),
            StopRequested(time=5.0, reason="local rank 1 failed (exit code 3)", plan="SIGTERM"),
            AttemptFailed(time=6.0, root=ROOT, failures=(ROOT, VICTIM)),
            Restarting(
                time=7.0, attempt=1, why="restart 1 of 3 (max restarts)", delay=2.0, restarts=1
            ),
        ]
    )
    assert [step.time for step in steps] == [1.0, 5.0, 6.0, 7.0]
    assert steps[1] == Step(
        5.0, "the workers are stopped (SIGTERM)", "local rank 1 failed (exit code 3)"
    )
    assert steps[2] == Step(
        6.0,
        "attempt 0 failed",
        "",
        (
            f"{ROOT.summary} (on h)",
            "the kernel killed it",
            "stderr: two",
            "stderr: three",
            "stderr: four",
            "stderr in /logs/stderr.log",
        ),
    )
    assert steps[3] == Step(
        7.0, "attempt 1 follows after 2 s", "restart 1 of 3 (max restarts)", ("1 restart so far",)
    )


def test_another_failure_is_counted_and_an_error_file_named() -> None:
    error = WorkerError("ValueError: x", None, 5.0, "/logs/error.json")
    root = Failure(
        rank=1, local_rank=1, pid=101, host="h", status=ExitStatus(code=1), time=5.0, order=0,
        error=error,
    )  # fmt: skip
    step = step_of(AttemptFailed(root=root, failures=(root, ROOT, VICTIM)))
    assert "error file /logs/error.json" in step.evidence
    assert step.evidence[-1] == "1 other worker failed too"


def test_decisions_about_nodes() -> None:
    steps = explain(
        [
            NodeLost(name="b", member="b.1", why="its lease has ended"),
            MembershipChanged(attempt=1, why="b is lost", round=1, nodes=3),
        ]
    )
    assert steps[0].text == "node b is lost: its lease has ended"
    assert steps[1] == Step(
        0.0,
        "attempt 1 follows with 3 nodes",
        "the membership changed: no restart counts",
        ("b is lost",),
    )


def test_what_is_waited_for_counts_as_long_as_it_is() -> None:
    """Of many reports of one wait the last is the present state."""
    waits = [
        RoundForming(time=float(time), round=0, joined=time, minimum=3, maximum=3)
        for time in (1, 2)
    ]
    assert [step.time for step in explain([STARTED, *waits])] == [1.0, 2.0]
    ran = WorkerStarted(time=3.0, rank=0, local_rank=0, pid=100)
    assert [step.time for step in explain([STARTED, *waits, ran])] == [1.0]
    end = JobFinished(
        time=3.0, state=JobState.FAILED, why="too few", exit_code=75, duration=2.0, restarts=0
    )
    assert [step.time for step in explain([STARTED, *waits, end])] == [1.0, 3.0]


def test_the_end_and_the_rest() -> None:
    end = JobFinished(
        state=JobState.FAILED, why="no restart", exit_code=3, duration=1.0, restarts=0
    )
    assert step_of(end) == Step(0.0, "the job ended: failed, exit code 3", "no restart")
    escalated = StopEscalated(signal=9, pids=(1,))
    assert step_of(escalated).rule == "the grace period of the stop plan"
    assert step_of(EventsMissed(count=7)).text == "7 events missed"
    assert DeadlineMissed in Event.__subclasses__()  # a warning: it has a step without a rule


def test_the_lines_of_steps() -> None:
    """Text from a worker cannot break a line."""
    lines = format_steps([Step(0.0, "a\nb", "c\x1b[2J", ("d",))])
    assert lines[0].endswith("  a b")
    assert lines[1:] == ["    rule:     c [2J", "    evidence: d"]


def test_a_file_without_a_line_is_no_evidence() -> None:
    """A captured file that stayed empty has been removed."""
    root = replace(ROOT, stderr_tail=())
    step = step_of(AttemptFailed(time=6.0, root=root, failures=(root,)))
    assert step.evidence == (f"{root.summary} (on h)", "the kernel killed it")


def test_a_rotated_file_of_events_says_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the start of the job there is no status, and no line that looks like a status."""
    file = tmp_path / "events.jsonl"
    later = Restarting(seq=7, run_id="a", node="n", attempt=1, why="it failed", delay=0, restarts=1)
    file.write_bytes(event_to_json(later) + b"\n")
    assert main(["why", "--from", str(file)]) == 0
    head, empty, *steps = capsys.readouterr().out.splitlines()
    assert (head, empty) == ("run a on n: what precedes its event 7 is not in this file", "")
    assert "attempt 1 follows" in steps[0]
