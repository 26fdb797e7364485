"""What is known about workers that failed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_aio.agent import failures
from elastic_aio.agent.failures import (
    OomCounts,
    WorkerRecord,
    collect_failures,
    mount_point,
    note_effect,
    note_state,
    reason_now,
)
from elastic_aio.logs.paths import StreamPlan, StreamTarget, WorkerLogs
from elastic_aio.logs.trimmer import free_range
from elastic_aio.outcome import ExitStatus, Failure, WorkerError
from elastic_aio.process import proc
from elastic_aio.process.calls import CallResult
from elastic_aio.process.children import ChildExit
from elastic_aio.ranks import NodeSize, assign_node_ranks
from elastic_aio.worker.errorfile import WRITER

STOPPED_AT = 1_700_000_000.0
CONSOLE = StreamPlan(StreamTarget.CONSOLE)
RANKS = assign_node_ranks([NodeSize("default", 9)])[0].worker_ranks(9)


class Case:
    """Workers with log directories, and their failures."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.workers: list[WorkerRecord] = []

    def worker(
        self,
        status: ExitStatus,
        *,
        ended_at: float = STOPPED_AT - 1,
        is_victim: bool = False,
        error: bytes | None = None,
        error_time: float = STOPPED_AT - 2,
        stderr: bytes | None = None,
    ) -> None:
        rank = len(self.workers)
        directory = self.directory / str(rank)
        directory.mkdir()
        error_file = directory / "error.json"
        if error is not None:
            error_file.write_bytes(error.replace(b"TIME", b"%f" % error_time))
            os.utime(error_file, (error_time, error_time))
        plan = CONSOLE
        if stderr is not None:
            (directory / "stderr.log").write_bytes(stderr)
            plan = StreamPlan(StreamTarget.FILE, str(directory / "stderr.log"))
        self.workers.append(
            WorkerRecord(
                ranks=RANKS[rank],
                pid=100 + rank,
                logs=WorkerLogs(CONSOLE, plan, str(directory), str(error_file)),
                exit=ChildExit(status, at=0.0),
                exited_at=ended_at,
                order=rank,
                stop_signals=frozenset({15, 9} if is_victim else ()),
                had_error=error is not None and error_time <= STOPPED_AT,
            )
        )

    async def failures(
        self, *, oom_before: OomCounts | None = None, call: CallResult | None = None
    ) -> tuple[Failure, ...]:
        return await collect_failures(
            self.workers,
            {} if call is None else {0: call},
            host="h",
            stopped_at=STOPPED_AT,
            oom_before=oom_before or OomCounts(),
        )

    async def failure(self) -> Failure:
        (one,) = await self.failures()
        return one


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """An empty case."""
    return Case(tmp_path)


def said(message: str = "ValueError: x", *, writer: int | None = None, **extra: object) -> bytes:
    """The file has the time `error_time`."""
    extra = {"timestamp": "TIME", **extra}
    document: dict[str, object] = {"message": {"message": message, "extraInfo": extra}}
    if writer is not None:
        document[WRITER] = writer
    return json.dumps(document).encode()


BAD = ExitStatus(code=1)
TERM = ExitStatus(signal=15)


async def test_a_worker_without_error_file_or_output(case: Case) -> None:
    """Its status and the time of its exit are all there is."""
    case.worker(BAD)
    assert await case.failure() == Failure(
        rank=0, local_rank=0, pid=100, host="h", status=BAD, time=STOPPED_AT - 1, order=0
    )


async def test_an_error_file_gives_message_and_time(case: Case) -> None:
    """The time at which the worker recorded it comes before that of the exit."""
    case.worker(BAD, error=said(py_callstack="T", writer=100))
    one = await case.failure()
    assert one.error is not None
    assert (one.error.message, one.error.traceback) == ("ValueError: x", "T")
    assert one.error.path == case.workers[0].logs.error_file
    assert one.time == one.error.timestamp == STOPPED_AT - 2


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\x00", b"[" * 100_000],
    ids=["empty", "truncated", "binary", "deep"],
)
async def test_a_broken_error_file_is_none(case: Case, content: bytes) -> None:
    """The failure is reported without it."""
    case.worker(BAD, error=content)
    one = await case.failure()
    assert one.error is None
    assert one.time == STOPPED_AT - 1


async def test_a_huge_error_file_is_not_read(case: Case) -> None:
    """It would block the loop; the failure says why it has no more."""
    case.worker(ExitStatus(1), error=said("x" * 2_000_000))
    (failure,) = await case.failures()
    assert failure.error is not None
    assert failure.error.message.startswith("its error file is too large (2000")
    assert failure.time == STOPPED_AT - 1


async def test_an_error_file_that_is_no_file_is_none(case: Case) -> None:
    """A directory, or a named pipe without a writer, does not delay the report."""
    case.worker(BAD)
    case.worker(BAD)
    os.mkdir(case.workers[0].logs.error_file)
    os.mkfifo(case.workers[1].logs.error_file)
    assert [one.error for one in await case.failures()] == [None, None]


async def test_the_earliest_recorded_error_is_the_root(case: Case) -> None:
    """Not who exited first, but who failed first."""
    case.worker(BAD, error=said("second", writer=100), error_time=STOPPED_AT - 3)
    case.worker(BAD, error=said("first", writer=101), error_time=STOPPED_AT - 5)
    case.worker(BAD, ended_at=STOPPED_AT - 4)
    assert [one.rank for one in await case.failures()] == [1, 2, 0]


async def test_victims_stand_behind_culprits(case: Case) -> None:
    """A worker that was stopped is no cause, and its last words are not looked for."""
    case.worker(TERM, is_victim=True, ended_at=STOPPED_AT - 9, stderr=b"Terminated\n")
    case.worker(BAD, stderr=b"Traceback\n")
    culprit, victim = await case.failures()
    assert (culprit.rank, culprit.is_victim, culprit.stderr_tail) == (1, False, ("Traceback",))
    assert (victim.rank, victim.is_victim, victim.stderr_tail) == (0, True, ())


async def test_an_error_recorded_before_the_stop_makes_a_culprit(case: Case) -> None:
    """The stop was faster than its exit; one that failed because of the stop stays a victim."""
    case.worker(TERM, is_victim=True, error=said("own"), error_time=STOPPED_AT - 1)
    case.worker(TERM, is_victim=True, error=said("late"), error_time=STOPPED_AT + 1)
    own, late = await case.failures()
    assert (own.rank, own.is_victim) == (0, False)
    assert (late.rank, late.is_victim) == (1, True)


@pytest.mark.parametrize("ended", [TERM, ExitStatus(signal=9), ExitStatus(code=143)], ids=str)
async def test_a_recorded_error_wins_over_the_signal_of_the_stop(
    case: Case, ended: ExitStatus
) -> None:
    """What ended the worker first is its error; the stop met it on its way out."""
    case.worker(ended, is_victim=True, error=said())
    assert (await case.failure()).status == BAD


OWN, OTHER, UNKNOWN = 100, 999, None


# Who wrote the error file, whether the worker was stopped, seconds from the error to the end,
# and whether it is the reason.
@pytest.mark.parametrize(
    ("writer", "is_victim", "age", "counts"),
    [
        (OWN, True, 1.0, True),
        (OWN, True, 900.0, True),
        (OWN, False, 900.0, True),
        (OTHER, True, 1.0, False),
        (OTHER, True, 900.0, False),
        (OTHER, False, 4.0, True),
        (OTHER, False, 9.0, False),
        (OTHER, False, -1.0, False),
        (UNKNOWN, True, 4.0, True),
        (UNKNOWN, True, 9.0, False),
        (UNKNOWN, True, -1.0, False),
        (UNKNOWN, False, 4.0, True),
        (UNKNOWN, False, 9.0, False),
        (UNKNOWN, False, -1.0, False),
    ],
)
async def test_whose_error_counts(
    case: Case, writer: int | None, is_victim: bool, age: float, counts: bool
) -> None:
    """The worker's own; another's only at its end; the rest is a note, whatever the program did.

    The end of a victim is the stop, and not its exit, for which the stop may wait.
    """
    ended = TERM if is_victim else BAD
    case.worker(
        ended,
        is_victim=is_victim,
        ended_at=STOPPED_AT + 30 if is_victim else STOPPED_AT,
        error=said("ValueError: no cache\nyet", writer=writer),
        error_time=STOPPED_AT - age,
        stderr=b"the disk is gone\n",
    )
    one = await case.failure()
    assert (one.error is not None) is counts
    assert one.is_victim is (is_victim and not counts)
    if counts:
        assert (one.notes, one.reason) == ((), "ValueError: no cache")
        assert one.status == (BAD if is_victim else ended)
        assert one.time == STOPPED_AT - (0 if writer is None else age)  # torch's are cut
    else:
        when = "1 s after" if age < 0 else f"{age:.0f} s before"
        who = "" if writer is None else ", by process 999"
        assert one.notes == (f"an error was recorded {when} the end{who}: ValueError: no cache",)
        assert one.reason == ("" if is_victim else "the disk is gone")
        assert one.status == ended
        assert one.time == case.workers[0].exited_at
    assert reason_now(case.workers[0]) == ("" if is_victim else one.reason)


HANDLED = b"Traceback (most recent call last):\n  File 'x'\nValueError: no cache\n"
RAISED = HANDLED + HANDLED.replace(b"ValueError: no cache", b"torch.OutOfMemoryError: own")
WRAPPED = HANDLED + HANDLED.replace(b"ValueError: no cache", b"subprocess.CalledProcessError: x")


# How the worker ended, what it wrote, the error that another process recorded 1 s before, and
# whether that is the reason.
@pytest.mark.parametrize(
    ("ended", "stderr", "recorded", "counts"),
    [
        (ExitStatus(signal=11), None, "ValueError: no cache", False),
        (ExitStatus(signal=11), HANDLED, "ValueError: no cache", False),
        (ExitStatus(signal=11), HANDLED + b"yet\n", "ValueError: no cache\nyet", False),
        (BAD, RAISED, "ValueError: no cache", False),
        (BAD, RAISED, "OutOfMemoryError: own", True),
        (BAD, HANDLED, "ValueError: no cache\nyet", True),
        (BAD, HANDLED + b"logs are uploaded\n", "KeyError: 'lost'", True),
        (BAD, b"stopped\n", "ValueError: no cache", True),
        (BAD, WRAPPED, "ValueError: no cache", True),
        (ExitStatus(code=3), HANDLED + b"bad config: lr\n", "ValueError: no cache", False),
        (ExitStatus(code=3), HANDLED, "ValueError: no cache", True),
        (ExitStatus(code=3), b"", "ValueError: no cache", True),
        (ExitStatus(code=139), b"Segmentation fault\n", "ValueError: no cache", True),
    ],
)
async def test_the_worker_s_own_end_says_more_than_the_error_of_another_process(
    case: Case, ended: ExitStatus, stderr: bytes | None, recorded: str, counts: bool
) -> None:
    """A helper has failed, and the worker by something else; a wrapper says nothing of its own."""
    case.worker(ended, error=said(recorded, writer=OTHER), stderr=stderr)
    one = await case.failure()
    assert (one.error is not None) is counts
    assert bool(one.notes) is not counts
    assert ended.signal is None or one.reason == ""
    assert reason_now(case.workers[0]) == one.reason


async def test_the_error_of_a_helper_hides_no_error_of_a_function(case: Case) -> None:
    """What the function raised comes back with its result."""
    case.worker(BAD, error=said("of a helper", writer=OTHER), error_time=STOPPED_AT - 60)
    own = WorkerError("ValueError: own", "T", STOPPED_AT - 1, "")
    (one,) = await case.failures(call=CallResult(2, error=own))
    assert (one.error, one.reason) == (own, "ValueError: own")
    assert one.notes == ("an error was recorded 59 s before the end, by process 999: of a helper",)
    recent = said("of a helper", writer=OTHER, timestamp=STOPPED_AT - 2)
    Path(case.workers[0].logs.error_file).write_bytes(recent)
    (one,) = await case.failures(call=CallResult(2, error=own))
    assert (one.error, one.notes) == (
        own,
        ("an error was recorded 1 s before the end, by process 999: of a helper",),
    )


async def test_an_error_before_a_hang(case: Case) -> None:
    """A worker that hangs after its own error has failed by it; another's error is a note."""
    for writer in (100, OTHER):
        case.worker(
            ExitStatus(signal=9), is_victim=True, error=said(writer=writer),
            error_time=STOPPED_AT - 60,
        )  # fmt: skip
        case.workers[-1].hang = "no heartbeat for 30 s"
        case.workers[-1].hung_at = STOPPED_AT - 1
    own, other = await case.failures()
    assert (own.rank, own.reason, own.status) == (0, "ValueError: x", BAD)
    assert (other.reason, other.time) == ("no heartbeat for 30 s", STOPPED_AT - 1)
    assert other.notes == (
        "an error was recorded 59 s before the end, by process 999: ValueError: x",
    )


@pytest.mark.parametrize("ended", [ExitStatus(signal=11), ExitStatus(code=7)], ids=str)
async def test_an_exit_that_the_stop_did_not_cause_stays(case: Case, ended: ExitStatus) -> None:
    """A crash in the teardown, or an exit code of its own, is the worker's; so is any signal
    that no stop has sent."""
    case.worker(ended, is_victim=True, error=said())
    case.worker(TERM, error=said())
    assert [one.status for one in await case.failures()] == [ended, TERM]


@pytest.mark.parametrize(
    ("content", "tail"),
    [
        (b"", ()),
        (b"one\ntwo", ("one", "two")),
        (b"one\n\ntwo\n\n\n", ("one", "", "two")),
        (b"10%\r20%\r100%\ndone\r\n", ("100%", "done")),
        (b"caf\xe9\n", ("caf�",)),
        (b"".join(b"%d\n" % n for n in range(50)), tuple(str(n) for n in range(30, 50))),
        (b"x" * 20_000 + b"\nlast\n", ("last",)),
        (b"y" * 20_000 + b"\n", ("y" * (16 * 1024),)),
        (b"z" * 20_000 + b"\r10%\r", ("10%",)),
    ],
)
async def test_the_last_lines_of_stderr(case: Case, content: bytes, tail: tuple[str, ...]) -> None:
    """Twenty lines at most, whole ones, progress bars as they were last."""
    case.worker(BAD, stderr=content)
    one = await case.failure()
    assert one.stderr_tail == tail
    assert one.stderr_path == case.workers[0].logs.stderr.path


@pytest.mark.parametrize("rest", [b"", b"\n", b"\na warning\n"])
async def test_an_exception_with_a_long_message_keeps_its_name(case: Case, rest: bytes) -> None:
    """Its beginning is far from the end of the file."""
    frames = b'Traceback (most recent call last):\n  File "x", line 1\n'
    case.worker(BAD, stderr=b"before\n" + frames + b"ValueError: " + b"x" * 300_000 + rest)
    failure = await case.failure()
    assert failure.reason.startswith("ValueError: xxxx")
    assert reason_now(case.workers[0]) == failure.reason


async def test_the_last_lines_of_a_file_whose_beginning_was_freed(case: Case) -> None:
    """By rotation: what reads as zeros is left out."""
    case.worker(BAD, stderr=b"x" * 9000 + b"\none\ntwo\n")
    path = str(case.workers[0].logs.stderr.path)
    with open(path, "rb+") as file:
        free_range(file.fileno(), 0, 8192)
    assert (await case.failure()).stderr_tail == ("one", "two")


async def test_a_log_that_is_gone_has_no_last_lines(case: Case) -> None:
    """The directory was removed: the report comes without it."""
    case.worker(BAD, stderr=b"x\n")
    os.unlink(str(case.workers[0].logs.stderr.path))
    assert (await case.failure()).stderr_tail == ()


async def test_a_kill_for_lack_of_memory_is_named(case: Case) -> None:
    """A counter of the kernel rose: that is why workers died by a SIGKILL not sent by us."""
    before = OomCounts.read()
    if before.host is None:
        pytest.skip("this host has no counter of OOM kills")
    case.worker(ExitStatus(signal=9), stderr=b"step 7\n")
    case.worker(BAD)
    case.worker(ExitStatus(signal=9), is_victim=True)
    case.worker(ExitStatus(code=137))
    found = await case.failures(oom_before=OomCounts(host=before.host - 2))
    causes = {one.rank: one.cause for one in found}
    text = "out of memory: the kernel has killed 2 processes of this host during this attempt"
    assert causes == {0: text, 1: "", 2: "", 3: text}
    assert found[0].summary == f"rank 0 (pid 100): killed by SIGKILL: {text}"
    assert {one.cause for one in await case.failures(oom_before=before)} == {""}


@pytest.mark.parametrize(
    ("before", "killed"),
    [
        (OomCounts(2, 9), "1 process of this control group"),
        (OomCounts(3, 8), "1 process of this host"),
        (OomCounts(3, 9), ""),
        (OomCounts(host=9), ""),
        (OomCounts(), ""),
    ],
)
def test_where_the_kernel_has_killed(before: OomCounts, killed: str) -> None:
    text = f"the kernel has killed {killed} during this attempt" if killed else ""
    assert before.kills_until(OomCounts(group=3, host=9)) == text


async def test_a_kill_by_the_limit_of_the_workers_is_named(case: Case, tmp_path: Path) -> None:
    """It stands before what the kernel has killed elsewhere."""
    counts = tmp_path / "memory.events"
    counts.write_text("low 0\nmax 7\noom 3\noom_kill 1\noom_group_kill 0\n")
    case.worker(ExitStatus(signal=9))
    before = OomCounts.read(str(tmp_path))
    assert before.workers == 1
    assert (await case.failures(oom_before=before))[0].cause == ""
    counts.write_text("oom 4\noom_kill 2\n")
    found = await case.failures(oom_before=before)
    assert found[0].cause == "out of memory: killed by the memory limit of its cgroup"


async def test_a_full_disk_is_named(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log on a disk without room explains why lines are missing."""
    case.worker(BAD, stderr=b"x\n")
    real = os.statvfs(case.directory)
    path = str(case.workers[0].logs.stderr.path)
    values = [*real]
    values[4] = 0  # f_bavail
    full = os.statvfs_result(values)
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    assert (await case.failure()).notes == (
        f"the disk of its log file is full: {mount_point(path)} ({path});"
        " the file ends after 2 bytes, what followed is lost",
    )


@pytest.mark.parametrize(
    ("ends", "note"),
    [
        ([], ()),
        ([(0, 1.2)], ("rank 0 exited with 0, 1.2 s before",)),
        ([(0, 3.0), (0, 1.2)], ("rank 0 exited with 0, 3 s before; so did 1 other later",)),
        ([(0, 130.0)], ("rank 0 exited with 0, 2 m 10 s before",)),
        ([(0, -0.5)], ()),  # after it
        ([(1, 1.2)], ()),
    ],
)
async def test_a_failure_notes_who_had_succeeded_before(
    case: Case, ends: list[tuple[int, float]], note: tuple[str, ...]
) -> None:
    """The others may wait for a worker that has left too early."""
    for code, seconds in ends:
        case.worker(ExitStatus(code=code), ended_at=STOPPED_AT - 1 - seconds)
    case.worker(BAD)
    assert (await case.failures())[-1].notes == note


LOST = b"RuntimeError: [/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:4\n"


def is_lost_peer(worker: WorkerRecord) -> bool:
    note_effect(worker)
    return worker.is_lost_peer


async def test_a_lost_peer_is_known_at_its_exit(case: Case) -> None:
    case.worker(BAD, stderr=LOST)
    case.worker(BAD, stderr=b"ValueError: x\n", ended_at=STOPPED_AT - 0.5)
    assert [*map(is_lost_peer, case.workers)] == [True, False]
    assert [one.rank for one in await case.failures()] == [1, 0]


@pytest.mark.parametrize(
    "end",
    [
        {"status": BAD, "stderr": LOST, "is_victim": True},
        {"status": ExitStatus(signal=11), "stderr": LOST},
        {"status": ExitStatus(code=0), "stderr": LOST},
        {"status": BAD, "stderr": b"ValueError: x\n"},
        {"status": BAD, "stderr": LOST + b"loss 0.1\n" * 8192},
        {"status": BAD},
    ],
    ids=["victim", "signal", "success", "no sign", "long before", "no output"],
)
def test_without_a_sign_of_a_lost_peer_nothing_is_explained(
    case: Case, end: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The siblings of a worker wait for the answer."""
    monkeypatch.setattr(failures, "_explain_now", None)
    case.worker(**end)
    assert not is_lost_peer(case.workers[0])


@pytest.mark.parametrize(
    ("end", "unkept"),
    [
        ({"stderr": b"loss 0.1\n" * 4096 + LOST}, b""),
        ({"error": said(LOST.decode(), writer=100), "stderr": b"x\n" * 9}, b""),
        ({"stderr": b""}, LOST),
    ],
    ids=["stderr", "error file", "on a full disk"],
)
def test_a_lost_peer_is_known_wherever_it_is_said(case: Case, end: Any, unkept: bytes) -> None:
    case.worker(BAD, **end)
    case.workers[0].unkept = unkept
    assert is_lost_peer(case.workers[0])


# ------------------------------------------------------------------ the first sign of a failure

TRACEBACK = "Traceback (most recent call last):\n  File 'x'\n{}\n"
CAUSE, EFFECT = "ValueError: bad batch", "EOFError: rank 1 is gone"


# What rank 0, which exits first, and rank 1, which is stopped then, have written at their ends, how
# many seconds after it rank 1 has done so, and who is the culprit.
@pytest.mark.parametrize(
    ("first", "second", "since", "culprit"),
    [
        (EFFECT, CAUSE, 0.0, 1),
        (EFFECT, CAUSE, 0.001, 1),
        (EFFECT, CAUSE, 0.15, 0),
        (EFFECT, CAUSE, -3.0, 1),
        (EFFECT, CAUSE, 0.5, 0),
        (EFFECT, "ConnectionResetError: [Errno 104] x", -0.002, 1),
        (EFFECT, "ConnectionResetError: [Errno 104] x", 0.002, 0),
        ("TimeoutError: no answer", CAUSE, -3.0, 1),
        (CAUSE, EFFECT, 0.0, 0),
        (CAUSE, "KeyError: 'x'", -3.0, 0),
        (EFFECT, "", -3.0, 0),
    ],
)
async def test_a_worker_that_fails_first_and_is_slow_to_end_is_the_culprit(
    case: Case, first: str, second: str, since: float, culprit: int
) -> None:
    """A thread of it still runs, or its devices are closed.  The times are those of two files."""
    case.worker(BAD, ended_at=STOPPED_AT, stderr=TRACEBACK.format(first).encode())
    said = TRACEBACK.format(second) if second else "step 1\n"
    case.worker(TERM, is_victim=True, ended_at=STOPPED_AT + 1, stderr=said.encode())
    for worker, at in zip(case.workers, (0.0, since), strict=True):
        os.utime(str(worker.logs.stderr.path), (STOPPED_AT + 900 + at,) * 2)
    note_effect(case.workers[0])
    for worker in case.workers:
        note_state(worker)
    with open(str(case.workers[1].logs.stderr.path), "a") as file:
        file.write("Terminated\n")
    found = await case.failures()
    assert (found[0].rank, found[0].is_victim) == (culprit, False)
    if culprit:
        assert (found[0].reason, found[0].status) == (second, BAD)


@pytest.mark.parametrize("said", [EFFECT, "RuntimeError: [pair.cc:1] Connection closed by peer"])
async def test_a_worker_that_dumps_its_core_meanwhile_is_the_culprit(
    case: Case, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel writes it before anything notices the exit."""
    case.worker(BAD, ended_at=STOPPED_AT, stderr=TRACEBACK.format(said).encode())
    case.worker(ExitStatus(signal=6), is_victim=True, ended_at=STOPPED_AT + 1, stderr=b"")
    note_effect(case.workers[0])
    ended, case.workers[1].exit = case.workers[1].exit, None
    monkeypatch.setattr(proc, "read_status", lambda *_: {b"CoreDumping": b"1"})
    note_state(case.workers[1])
    case.workers[1].exit = ended
    found = await case.failures()
    assert [(one.rank, one.is_victim) for one in found] == [(1, False), (0, False)]
    assert found[0].status == ExitStatus(signal=6)


async def test_of_two_that_have_exited_the_first_sign_counts(case: Case) -> None:
    """The interpreter of the culprit took longer to end."""
    for said, at in ((EFFECT, 0.25), (CAUSE, 0.0)):
        case.worker(BAD, stderr=TRACEBACK.format(said).encode())
        os.utime(str(case.workers[-1].logs.stderr.path), (STOPPED_AT + at,) * 2)
        note_state(case.workers[-1])
    assert [one.reason for one in await case.failures()] == [CAUSE, EFFECT]


@pytest.mark.parametrize(
    ("ended", "said", "reason"),
    [
        (BAD, TRACEBACK.format("OSError: [Errno 28] No space left on device"), True),
        (ExitStatus(code=2), "tar: x: Cannot write: No space left on device\n", True),
        (BAD, "stopped by SIGTERM\n", False),
        (TERM, TRACEBACK.format("ValueError: x"), False),
        (ExitStatus(code=143), TRACEBACK.format("ValueError: x"), False),
        (BAD, "", False),
    ],
)
def test_a_save_that_fails_while_the_worker_is_stopped_has_a_reason(
    case: Case, ended: ExitStatus, said: str, reason: bool
) -> None:
    """What the worker had written before the stop is none, nor what the stop has ended."""
    case.worker(ended, is_victim=True, stderr=TRACEBACK.format("KeyError: 'handled'").encode())
    note_state(case.workers[0])
    with open(str(case.workers[0].logs.stderr.path), "a") as file:
        file.write(said)
    assert bool(reason_now(case.workers[0])) is reason


@pytest.mark.parametrize(("size", "threads"), [(9, 0), (100_000, 1)], ids=["small", "large"])
async def test_small_files_are_read_in_the_loop(
    case: Case, size: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []

    async def run(function: Callable[..., Any], *args: Any, daemon: bool) -> Any:
        started.append(function)
        return function(*args)

    monkeypatch.setattr(failures, "run_in_thread", run)
    case.worker(BAD, stderr=b"x\n" * size)
    assert (await case.failure()).reason == "x"
    assert len(started) == threads


def test_the_place_of_a_disk(tmp_path: Path) -> None:
    """A path's file system is named by the directory at which it is mounted."""
    assert mount_point("/proc/self/stat") == "/proc"
    place = mount_point(str(tmp_path))
    assert os.path.ismount(place)
    assert str(tmp_path).startswith(place)


DUMP = b"""Fatal Python error: Aborted

Current thread 0x00007f4f6587bb80 (most recent call first):
  File "train.py", line 4 in crash
"""
WHAT = b"""terminate called after throwing an instance of 'c10::DistBackendError'
  what():  NCCL watchdog: ncclRemoteError
frame #0: here
"""


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (WHAT, "C++ exception: NCCL watchdog: ncclRemoteError"),
        (b"malloc(): corrupted top size\n", "malloc(): corrupted top size"),
    ],
)
async def test_stacks_do_not_hide_why_a_library_aborts(
    tmp_path: Path, said: bytes, reason: str
) -> None:
    case = Case(tmp_path)
    case.worker(ExitStatus(signal=6), stderr=said + DUMP)
    (failure,) = await case.failures()
    assert failure.reason == reason_now(case.workers[0]) == reason
    assert is_lost_peer(case.workers[0]) == (said == WHAT)
    assert "line 4 in crash" in failure.stderr_tail[-1]


async def test_an_abort_without_words_has_its_stacks(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.worker(ExitStatus(signal=6), stderr=DUMP)
    (failure,) = await case.failures()
    assert failure.summary.endswith(": killed by SIGABRT: Fatal Python error: Aborted")
