"""Text for the console: a line per event, and the failure report."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import (
    AttemptFailed,
    AttemptResult,
    ChildFinished,
    ChildLaunched,
    ChildRemoved,
    ChildRestarting,
    ConsoleLost,
    ControlUnavailable,
    CoordinatorChanged,
    DeadlineMissed,
    Event,
    EventsMissed,
    ExitStatus,
    Failure,
    ForeignAnswer,
    GuardianLost,
    GuardianRestarted,
    JobFinished,
    JobStarted,
    JobState,
    LaunchResult,
    LeftoversFound,
    LogDiskFull,
    LogsNotRemoved,
    LostJobFound,
    MembershipChanged,
    MembershipPending,
    MessageDropped,
    NodeExcluded,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeRefused,
    NodeStandby,
    OutputLost,
    PreemptionNotice,
    ReadinessChanged,
    ReloadFailed,
    ReloadFinished,
    RendezvousStoreAwaited,
    RendezvousStoreLost,
    RendezvousStoreRecovered,
    Restarting,
    RoundFormed,
    RoundForming,
    RoundWaiting,
    Scaled,
    SignalForwarded,
    StacksDumped,
    StandbyPromoted,
    StopEscalated,
    StopRequested,
    TimerExpired,
    TimerRejected,
    WorkerAbandoned,
    WorkerActivity,
    WorkerError,
    WorkerExited,
    WorkerReady,
    WorkersIdle,
    WorkerStarted,
    WorkerStoreRefused,
    WorkersUnfinished,
    format_failure,
)
from elastic_aio.cli.guides import find_pages, sections
from elastic_aio.reasons import LOST_PEER
from elastic_aio.spec.restart import UNLIMITED
from elastic_aio.status import Level

WHEN = time.mktime((2026, 1, 2, 3, 4, 5, 0, 0, -1))


def failed(rank: int, status: ExitStatus, *, host: str = "box", **extra: Any) -> Failure:
    """Return the failure of a worker."""
    return Failure(rank, rank, 100 + rank, host, status, WHEN, 0, **extra)


TRACE = "Traceback (most recent call last):\n  File x, line 1\nValueError: no data\n"
CRASH = failed(
    2,
    ExitStatus(code=1),
    error=WorkerError("ValueError: no data", TRACE, WHEN, "/logs/2/error.json"),
    stderr_tail=("not shown: the traceback says more",),
    stderr_path="/logs/2/stderr.log",
)
VICTIM = failed(0, ExitStatus(signal=15), is_victim=True)
EXIT_7 = failed(
    1,
    ExitStatus(code=7),
    stderr_tail=("loading", "cannot load"),
    stderr_path="/logs/1/stderr.log",
    notes=("the disk of its log file is full: /logs (/logs/1/stderr.log)",),
)
SEGFAULT = failed(3, ExitStatus(signal=11))


def result(*failures: Failure, log_dir: str | None = None) -> LaunchResult:
    """Return the result of a failed job."""
    attempts = (AttemptResult(0, WHEN, 1.0, failures=failures),)
    why = "no restarts allowed (max restarts: 0)"
    return LaunchResult("r", JobState.FAILED, why, 1, 1.0, attempts=attempts, log_dir=log_dir)


def test_the_report_has_torchruns_layout() -> None:
    """The root cause is last, blocks are numbered by rank, victims are marked."""
    assert format_failure(result(CRASH, VICTIM, log_dir="/logs"), "train.py") == (
        """
==========================================================
train.py FAILED
----------------------------------------------------------
Failures:
[0]:
  time      : 2026-01-02_03:04:05
  host      : box
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 100) (SIGTERM)
  error_file: <N/A>
  stopped   : by the supervisor, because of the root cause
  traceback : Signal 15 (SIGTERM) received by PID 100
----------------------------------------------------------
Root Cause (first observed failure):
[1]:
  time      : 2026-01-02_03:04:05
  host      : box
  rank      : 2 (local_rank: 2)
  exitcode  : 1 (pid: 102)
  error_file: /logs/2/error.json
  traceback : Traceback (most recent call last):
    File x, line 1
  ValueError: no data
==========================================================
Logs: /logs
Help: aio-elastic help failures"""
    )


@pytest.mark.parametrize(
    ("status", "reason", "cause", "guide"),
    [
        (1, "ValueError: x", "", "failures"),
        (1, "TimeoutError: (connect timeout)", "", "failures"),
        (-9, "no progress for 2 s (progress timeout), at step 7", "", "hangs deadlines"),
        (-9, "not ready 60 s after its start (ready timeout)", "", "hangs deadlines"),
        (-9, "phase 'load' has not ended after 3 s", "", "hangs deadlines"),
        (-9, "timer 'load' expired after 0.3 s (limit 0.3 s)", "", "hangs deadlines"),
        (-9, "the worker asked to be ended (WATCHDOG=trigger)", "", "hangs deadlines"),
        (1, "OSError: x", "a port is in use", "failures known-causes"),
        (1, "RuntimeError: x", LOST_PEER, "restarts the-root-cause"),
        (-11, "", "", "failures crashes"),
        (-15, "", "", "failures"),
    ],
)
def test_the_report_names_a_page_and_its_section(
    status: int, reason: str, cause: str, guide: str
) -> None:
    ended = ExitStatus.from_returncode(status)
    root = failed(0, ended, reason=reason, cause=cause)
    assert format_failure(result(root), "x").endswith(f"\nHelp: aio-elastic help {guide}")
    page, _, section = guide.partition(" ")
    text = Path(find_pages()[page]).read_text()
    assert not section or sections(text, section)


def test_a_failure_without_an_error_file() -> None:
    """The last lines of stderr and the notes replace the traceback."""
    assert format_failure(result(EXIT_7), "x") == (
        """
============================================================
x FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-02_03:04:05
  host      : box
  rank      : 1 (local_rank: 1)
  exitcode  : 7 (pid: 101)
  error_file: <N/A>
  note      : the disk of its log file is full: /logs (/logs/1/stderr.log)
  traceback : cannot load
  stderr    : last lines of /logs/1/stderr.log:
    loading
    cannot load
============================================================
Help: aio-elastic help failures"""
    )


def test_each_block_names_its_host() -> None:
    far = dataclasses.replace(CRASH, host="far")
    text = format_failure(result(far, VICTIM), "x")
    first, _, root = text.partition("Root Cause")
    assert "host      : box" in first
    assert "host      : far" in root


LUCK = WorkerError("out of luck\ntwice", None, WHEN, "/e")


@pytest.mark.parametrize(
    ("failure", "shown"),
    [
        # A signal is named twice, as in torchrun.
        (SEGFAULT, "exitcode  : -11 (pid: 103) (SIGSEGV)\n"),
        (SEGFAULT, "traceback : Signal 11 (SIGSEGV) received by PID 103\n"),
        # Another part of the program reaped the worker.
        (failed(1, ExitStatus()), "exitcode  : ? (pid: 101)\n"),
        # Of a message without a traceback, later lines are indented.
        (failed(0, ExitStatus(code=1), error=LUCK), "traceback : out of luck\n  twice\n"),
    ],
)
def test_a_block_says_how_a_worker_ended(failure: Failure, shown: str) -> None:
    assert shown in format_failure(result(failure), "x")


def test_a_job_without_workers_is_one_line() -> None:
    assert format_failure(result(), "x") == "x FAILED: no restarts allowed (max restarts: 0)"


def test_rules_are_as_wide_as_the_text() -> None:
    """Up to 60 characters."""
    lines = format_failure(result(SEGFAULT), "x").splitlines()
    longest = max(len(line) for line in lines if line[:1] not in "=-")
    assert lines[1] == "=" * min(60, longest)


INFO, WARNING = Level.INFO, Level.WARNING

# fmt: off
EVENTS: list[tuple[Event, int, str]] = [
    (JobStarted(run_id="r7", node="box", entrypoint="train.py", nproc_per_node=4, nnodes="1",
     max_restarts=2, agent_pid=1, log_dir="/logs/r7_x"), WARNING,
     "run r7: 4 workers of train.py on box, 2 restarts, logs in /logs/r7_x"),
    (JobStarted(run_id="r", node="box", entrypoint="x", nproc_per_node=1, nnodes="1",
     max_restarts=0, agent_pid=1), WARNING,
     "run r: 1 worker of x on box, 0 restarts, logs kept only if it fails"),
    (JobStarted(run_id="r", node="box", entrypoint="x", nproc_per_node=2, nnodes="1:4",
     max_restarts=0, agent_pid=1), WARNING,
     "run r: 2 workers of x on box, one of 1 to 4 nodes, 0 restarts, logs kept only if it fails"),
    (JobStarted(run_id="r", node="box", entrypoint="x", nproc_per_node=1, nnodes="1",
     max_restarts=UNLIMITED, agent_pid=1, keeps_logs=False), WARNING,
     "run r: 1 worker of x on box, unlimited restarts, no logs"),
    (JobStarted(run_id="r", node="box", entrypoint="a, b", nproc_per_node=0, nnodes="1",
     max_restarts=0, agent_pid=1, children=("a", "b")), WARNING,
     "run r: 2 children (a, b) on box, logs kept only if it fails"),
    (WorkerStarted(rank=1, local_rank=1, pid=7), INFO, "rank 1 started (pid 7)"),
    (WorkerExited(rank=1, local_rank=1, pid=7, status=ExitStatus(code=3), duration=1.5), INFO,
     "rank 1 (pid 7): exit code 3, after 1.5 s"),
    (WorkerExited(rank=1, local_rank=1, pid=7, status=ExitStatus(signal=15), duration=2,
     is_victim=True), INFO,
     "rank 1 (pid 7): killed by SIGTERM, stopped by the supervisor, after 2 s"),
    (AttemptFailed(attempt=1, root=EXIT_7, failures=(EXIT_7,)), WARNING,
     "attempt 1 failed: rank 1 (pid 101): exit code 7: cannot load"),
    (AttemptFailed(attempt=0, root=CRASH, failures=(CRASH,)), WARNING,
     "attempt 0 failed: rank 2 (pid 102): exit code 1: ValueError: no data"),
    (Restarting(attempt=1, why="restart 1 of 2 (max restarts)", delay=0.25, restarts=1), WARNING,
     "restarting as attempt 1 in 0.25 s: restart 1 of 2 (max restarts)"),
    (Restarting(attempt=1, why="restart 1 of 2 (max restarts)", delay=0, restarts=1), WARNING,
     "restarting as attempt 1: restart 1 of 2 (max restarts)"),
    (Restarting(attempt=3, why="restart 1 of 2 (max restarts)", delay=0, restarts=3, returned=2),
     WARNING,
     "restarting as attempt 3: restart 1 of 2 (max restarts), 2 former restarts returned"),
    (StopRequested(reason="SIGTERM was received", plan="SIGTERM 25 s, SIGKILL", signal=15),
     WARNING, "stopping the workers (SIGTERM 25 s, SIGKILL): SIGTERM was received"),
    (StopRequested(reason="b is leaving", plan="SIGTERM 25 s, SIGKILL", is_ordered=True),
     WARNING, "stopping the workers (SIGTERM 25 s, SIGKILL): b is leaving"),
    (StopRequested(reason="local rank 1 failed", plan="SIGTERM 25 s, SIGKILL"), INFO,
     "stopping the workers (SIGTERM 25 s, SIGKILL): local rank 1 failed"),
    (PreemptionNotice(why="SIGUSR1 was received", time_left=90.0), WARNING,
     "preemption: the workers are stopped in 90 s: SIGUSR1 was received"),
    (StopEscalated(signal=9, pids=(5,)), WARNING,
     "1 process did not stop in time, sending SIGKILL (pid 5)"),
    (StopEscalated(signal=9, pids=tuple(range(1, 11))), WARNING,
     "10 processes did not stop in time, sending SIGKILL (pid 1, 2, 3, 4, 5, 6, 7, 8, ...)"),
    (StopEscalated(signal=9, pids=(5, 6), reason="a second SIGINT was received"), WARNING,
     "a second SIGINT was received, sending SIGKILL to 2 processes (pid 5, 6)"),
    (StopEscalated(signal=9, pids=(), reason="a second SIGINT was received"), WARNING,
     "a second SIGINT was received, sending SIGKILL"),
    (StopEscalated(signal=9, pids=()), WARNING,
     "processes may not have stopped in time, sending SIGKILL"),
    (WorkerAbandoned(pid=5, state="D in nfs_wait"), WARNING,
     "process 5 did not exit after SIGKILL (state D in nfs_wait), left behind"),
    (WorkerAbandoned(pid=5, state="S, of uid 7, no permission to signal it", program="sleep 9"),
     WARNING, "process 5 (sleep 9) did not exit after SIGKILL"
     " (state S, of uid 7, no permission to signal it), left behind"),
    (WorkerAbandoned(pid=0, state="/proc could not be read"), WARNING,
     "processes may be left behind: /proc could not be read"),
    (SignalForwarded(signal=10, pids=(5, 6)), INFO, "SIGUSR1 forwarded to 2 workers"),
    (SignalForwarded(signal=10, pids=(5,), unhandled=(5,)), WARNING,
     "SIGUSR1 forwarded to 1 worker; 1 has no handler for it and will be ended by it (pid 5)"),
    (SignalForwarded(signal=10, pids=(7,), unhandled=(5, 6)), WARNING,
     "SIGUSR1 forwarded to 1 worker; 2 have no handler for it and did not get it (pid 5, 6)"),
    (SignalForwarded(signal=10, pids=tuple(range(1, 20)), unhandled=tuple(range(1, 11))),
     WARNING,
     "SIGUSR1 forwarded to 19 workers; 10 have no handler for it and will be ended by it "
     "(pid 1, 2, 3, 4, 5, 6, 7, 8, ...)"),
    (TimerExpired(rank=1, local_rank=0, pid=7, scope="s", age=60.012, limit=60.0, signal=9),
     WARNING, "timer 's' of rank 1 (pid 7) expired after 60.01 s (limit 60 s), sending SIGKILL"),
    (TimerExpired(rank=-1, local_rank=-1, pid=7, scope="s", age=1.5, limit=1.0, signal=0),
     WARNING, "timer 's' of process 7 expired after 1.5 s (limit 1 s)"),
    (TimerRejected(why="a line of more than 4096 bytes"), WARNING,
     "the pipe of the timers got a line of more than 4096 bytes"),
    (MessageDropped(pid=7, program="redis-server"), WARNING,
     "a message of redis-server (7) is dropped: it is no worker (notify access: main)"),
    (WorkerReady(rank=1, local_rank=0, pid=7, duration=2.5), INFO,
     "rank 1 (pid 7) is ready after 2.5 s"),
    (DeadlineMissed(rank=1, local_rank=0, pid=7, deadline="ready", limit=5.0, age=5.1,
     why="not ready"), WARNING, "rank 1 (pid 7): not ready"),
    (WorkersIdle(seconds=60.0, workers=(WorkerActivity(rank=0, local_rank=0, pid=7, state="S",
     syscall="futex"), WorkerActivity(rank=1, local_rank=1, pid=8, state="D", wchan="nfs_wait"),
     WorkerActivity(rank=2, local_rank=2, pid=9))), WARNING,
     "no worker has used CPU time or written anything for 60 s: rank 0 futex, rank 1 "
     "nfs_wait, rank 2 unknown"),
    (WorkersUnfinished(seconds=60.2, finished=1, running=(1,)), WARNING,
     "1 of 2 workers have finished, the first 60 s ago; still running: rank 1"),
    (WorkersUnfinished(seconds=60.2, finished=2, running=tuple(range(2, 12))), WARNING,
     "2 of 12 workers have finished, the first 60 s ago; still running: ranks 2, 3, 4, 5, 6, "
     "7, 8, 9, ..."),
    (WorkersUnfinished(seconds=60.2, finished=8, running=(8, 9), world_size=16), WARNING,
     "8 of 16 workers have finished, the first 60 s ago; still running here: ranks 8, 9"),
    (StacksDumped(why="no heartbeat", summary="rank 0 waits in barrier", path="/logs/s"),
     WARNING, "stacks (no heartbeat): rank 0 waits in barrier (/logs/s)"),
    (LeftoversFound(pids=(7,), programs=("tar",), linger=0.0), WARNING,
     "the workers have succeeded and left 1 process behind, it is stopped now: tar (7)"),
    (LeftoversFound(pids=(7,), programs=("python3 up.py",), linger=8.0), WARNING,
     "the workers have succeeded and left 1 process behind, it may run for another 8 s: "
     "python3 up.py (7)"),
    (LeftoversFound(pids=tuple(range(1, 7)), programs=("sh",) * 6, linger=30.0), WARNING,
     "the workers have succeeded and left 6 processes behind, they may run for another 30 s: "
     "sh (1), sh (2), sh (3), sh (4), sh (5), ..."),
    (ForeignAnswer(rank=1, local_rank=0, pid=7, why="connected to nc (pid 3)"), WARNING,
     "rank 1 (pid 7): its probe cannot ask it: connected to nc (pid 3)"),
    (GuardianRestarted(pid=9), WARNING, "guardian process exited, restarted as pid 9"),
    (GuardianLost(why="no process left"), WARNING,
     "guardian process exited, the job is unguarded: no process left"),
    (LostJobFound(lost_run_id="old\n", pids=(8, 9), since=-90.0), WARNING,
     "2 processes of run old, whose launcher was killed, still run on this host (pid 8, 9; for "
     "1 m 30 s); aio-elastic gc --host ends them"),
    (ControlUnavailable(why="permission denied"), WARNING,
     "no control socket for this job: permission denied"),
    (LogsNotRemoved(why="stale file handle"), WARNING,
     "logs of old runs are not removed: stale file handle"),
    (ConsoleLost(stream="stdout", why="broken pipe"), WARNING,
     "stdout accepts no more output (broken pipe); see the logs"),
    (ConsoleLost(stream="stdout", why="it was not read", unshown=7), WARNING,
     "stdout accepts no more output (it was not read); 7 bytes not shown, see the logs"),
    (LogDiskFull(mount_point="/mnt", is_shown=True, why="input/output error"), WARNING,
     "writes to the log files fail (input/output error), the console shows the rest: /mnt"),
    (LogDiskFull(mount_point="/mnt", is_shown=False), WARNING,
     "writes to the log files fail (no space left on device), they may be incomplete: /mnt"),
    (OutputLost(rank=3, local_rank=1, stream="stderr", path="/logs/x", why="it is gone"),
     WARNING, "output of stderr of rank 3 lost: it is gone (/logs/x)"),
    (OutputLost(rank=3, local_rank=1, stream="stderr", path="/x", why="it is gone", lost=1),
     WARNING, "1 byte of stderr of rank 3 lost: it is gone (/x)"),
    (OutputLost(rank=3, local_rank=1, stream="stderr", path="/x", why="it grows", lost=0),
     WARNING, "stderr of rank 3: it grows (/x)"),
    (AttemptFailed(attempt=1, node="box", root=EXIT_7, failures=(EXIT_7,)), WARNING,
     "attempt 1 failed: rank 1 (pid 101): exit code 7: cannot load"),
    (AttemptFailed(attempt=1, node="other", root=EXIT_7, failures=(EXIT_7,)), WARNING,
     "attempt 1 failed on box: rank 1 (pid 101): exit code 7: cannot load"),
    (NodeJoined(name="a", member="a_1", address="10.0.0.1", nproc=1, role="default"), INFO,
     "node a joined with 1 worker (10.0.0.1)"),
    (NodeJoined(name="a", member="", address="b", nproc=1, role="r", differs=("x is 1",)),
     WARNING, "node a joined with 1 worker (b); x is 1"),
    (NodeLeft(name="a", member="a_1", why="it is done"), INFO, "node a left: it is done"),
    (NodeLost(name="a", member="a_1", why="silent for 5 s"), WARNING,
     "node a is lost: silent for 5 s"),
    (NodeRefused(name="e", member="e_1", why="another role"), WARNING,
     "node e was refused: another role"),
    (NodeExcluded(name="e", member="e_1", why="rank 3: ECC"), WARNING,
     "node e is excluded: rank 3: ECC"),
    (NodeExcluded(name="e", member="e_1", why="rank 3: ECC", seconds=300.0, is_own=True), WARNING,
     "this node is excluded for 300 s: rank 3: ECC"),
    (RoundForming(round=3, joined=3, minimum=4, maximum=4, present=("a", "b", "d"), missing=("c",),
     refused=("e: wrong role",), time_left=12.3), WARNING,
     "workers stopped, waiting for nodes: 3 nodes present (a, b, d), minimum 4, maximum 4, "
     "missing c, fails in 12 s; refused e: wrong role"),
    (RoundForming(round=0, joined=20, minimum=16, maximum=32, present=("a", "b"), time_left=600),
     WARNING,
     "waiting for nodes: 20 nodes present (a, b, ...), minimum 16, maximum 32, starts in 600 s"),
    (RoundForming(round=0, joined=0, minimum=1, maximum=2), WARNING,
     "waiting for nodes: 0 nodes present, minimum 1, maximum 2"),
    (RoundFormed(round=1, group_rank=0, group_world_size=2, world_size=8, master_addr="10.0.0.1",
     master_port=7), INFO, "round 1: group rank 0 of 2, 8 workers in all, master at 10.0.0.1:7"),
    (RoundFormed(round=1, group_rank=-1, group_world_size=1, world_size=1, master_addr="10.0.0.1",
     master_port=7), INFO, "round 1: 1 node, 1 worker in all, master at 10.0.0.1:7"),
    (MembershipChanged(attempt=2, why="c was lost", round=3, nodes=1), WARNING,
     "membership changed, attempt 2 has 1 node: c was lost"),
    (MembershipPending(round=3, why="d joined", time_left=29.6), WARNING,
     "the membership is about to change in 30 s, unless others join: d joined"),
    (MembershipPending(round=3, why="no node is about to join any more", time_left=None), INFO,
     "the membership stays as it is: no node is about to join any more"),
    (RoundWaiting(phase="stopping", what="b: not stopped its workers", waited=9, time_left=61),
     WARNING, "stopping: b: not stopped its workers (waited 9 s, 61 s left)"),
    (NodeStandby(round=1, maximum=4), WARNING, "on standby: the job has its maximum of 4 nodes"),
    (StandbyPromoted(round=2, group_rank=3), INFO, "promoted from standby to group rank 3"),
    (CoordinatorChanged(name="b", term=2), INFO, "node b is the coordinator (term 2)"),
    (WorkerStoreRefused(peer="a:1", why="sent a request that is refused: the store is full"),
     WARNING,
     "the store of the workers closed the connection of a:1: it sent a request that is "
     "refused: the store is full"),
    (RendezvousStoreAwaited(why="a:1: connection refused", time_left=55.2), WARNING,
     "waiting for the rendezvous store, 55 s left: a:1: connection refused"),
    (RendezvousStoreLost(endpoint="a:1", why="connection reset"), WARNING,
     "rendezvous store at a:1 lost: connection reset"),
    (RendezvousStoreRecovered(endpoint="b:1", is_host=True), WARNING,
     "rendezvous store recovered at b:1, served by this node"),
    (RendezvousStoreRecovered(endpoint="b:1", is_host=False), WARNING,
     "rendezvous store recovered at b:1"),
    (ChildLaunched(child="a", generation=1, entrypoint="x.py", nproc_per_node=2), INFO,
     "a: start 1: 2 workers of x.py"),
    (ChildLaunched(child="a", generation=0, entrypoint="b, c", nproc_per_node=0), INFO,
     "a: start 0: children of b, c"),
    (ReadinessChanged(child="a/b", is_ready=True), INFO, "a/b: ready"),
    (ReadinessChanged(child="a/b", is_ready=False), INFO, "a/b: not ready any more"),
    (ChildRestarting(child="a", why="restart 1 of 3 (max restarts)", delay=2.0, restarts=1),
     WARNING, "a: restarting in 2 s: restart 1 of 3 (max restarts)"),
    (ChildRestarting(child="a", why="a request", delay=0.0, restarts=1), WARNING,
     "a: restarting: a request"),
    (ChildFinished(child="a", state=JobState.FAILED, why="rule", exit_code=3), WARNING,
     "a: failed (exit code 3): rule"),
    (ChildFinished(child="a", state=JobState.SUCCEEDED, why="rule", exit_code=0), INFO,
     "a: succeeded: rule"),
    (ReloadFailed(child="a/1", why="exit code 1", replaced=1), WARNING,
     "a/1: the reload has failed, after 1 worker: exit code 1; the old worker is kept"),
    (ReloadFinished(child="a", replaced=4), INFO, "a: reloaded, 4 workers replaced"),
    (ChildRemoved(child="a", name="b"), INFO, "a: b is removed"),
    (Scaled(child="a", former=1, number=3), INFO, "a: scaled from 1 to 3 workers"),
    (EventsMissed(count=3), WARNING, "3 events missed"),
    (EventsMissed(count=0), WARNING, "some events missed"),
    (EventsMissed(count=0, why="too late"), WARNING, "some events missed: too late"),
    (JobFinished(state=JobState.FAILED, why="rule", exit_code=1, duration=2.5, restarts=0), INFO,
     "job failed after 2.5 s: rule"),
]
# fmt: on


@pytest.mark.parametrize(("event", "level", "text"), EVENTS, ids=lambda value: type(value).__name__)
def test_each_event_has_a_level_and_a_line(event: Event, level: int, text: str) -> None:
    assert (event.level, event.sentence) == (level, text)
    assert "\n" not in text


def test_every_type_of_event_is_described() -> None:
    """The table above is complete."""
    described = {type(event) for event, _, _ in EVENTS}
    assert described == set(Event.__subclasses__())


def test_an_event_without_a_sentence() -> None:
    """For debugging only."""
    assert Event().sentence == repr(Event())


def test_control_characters_reach_no_terminal() -> None:
    """Neither those of a traceback, which another host may have sent, nor those of a name."""
    trace = "Traceback:\n\tValueError: \x1b]0;title\x07\x1b[2J\x9b31m\u202eboom"
    error = WorkerError(message="boom", traceback=trace, timestamp=1.0, path="")
    failure = dataclasses.replace(CRASH, error=error)
    text = format_failure(result(failure), "a\x1b[31mb\x07.py")
    assert "traceback : Traceback:\n  \tValueError:  31m boom\n" in text
    assert text.startswith("\n===")
    assert "ab .py FAILED" in text
    assert all(line.replace("\t", "").isprintable() for line in text.split("\n"))
    restarting = Restarting(attempt=1, delay=0.0, restarts=1, why="\x1b[2Jhost\nx")
    assert restarting.sentence == "restarting as attempt 1:  [2Jhost x"
