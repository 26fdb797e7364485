"""Leaders get a signal first, then what they have started; a shell's command gets it with it."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.process import proc
from elastic_aio.process.proc import ProcEntry
from elastic_aio.process.stop_order import Ignored, due_for_signal, foreground_of, receivers_of
from tests.support.children import until_sync

GUARD_MS = 30_000


class Job(NamedTuple):
    """Processes of a job; `owners` are the leaders of those without parents in it."""

    processes: list[ProcEntry]
    leaders: set[int]
    owners: dict[int, int]
    ignoring: frozenset[int] = frozenset()

    def decide(self) -> tuple[set[int], set[int]]:
        """Return the pids that are due, and those that the others wait for."""
        due, holders = due_for_signal(
            self.processes,
            self.leaders,
            lambda process: self.owners.get(process.pid),
            set(self.ignoring),
        )
        assert len({process.pid for process in due}) == len(due)
        return {process.pid for process in due}, holders

    def without(self, ended: set[int]) -> Job:
        """Return the job when some processes have ended, whose children have no parent then."""
        rest = [item for item in self.processes if item.pid not in ended]
        return self._replace(processes=rest, leaders=self.leaders - ended)


def tree(
    parents: dict[int, int],
    leaders: set[int],
    owners: dict[int, int] | None = None,
    ignoring: frozenset[int] = frozenset(),
) -> Job:
    """Return a job of processes with these parents by pid."""
    processes = [ProcEntry(pid, parent, 0, 0) for pid, parent in parents.items()]
    return Job(processes, leaders, owners or {}, ignoring)


@pytest.mark.parametrize(
    ("job", "due", "holders"),
    [
        (tree({}, set()), set(), set()),
        (tree({}, {5}), set(), set()),
        (tree({5: 1, 6: 1}, {5, 6}), {5, 6}, set()),
        # Its parent is a leader, or below one.
        (tree({5: 1, 7: 5}, {5}), {5}, {5}),
        (tree({5: 1, 7: 5, 8: 7}, {5}), {5}, {5, 7}),
        # A parent that is a leader, and has ended, holds its children to the next scan.
        (tree({5: 1, 7: 5, 8: 7}, set()), {5}, {5, 7}),
        (tree({7: 1, 8: 7}, set()), {7}, {7}),
        # No parent in the job: the owner holds it while it runs, and no other leader.
        (tree({5: 1, 6: 1, 7: 1}, {5, 6}, {7: 5}), {5, 6}, {5}),
        (tree({6: 1, 7: 1}, {6}, {7: 5}), {6, 7}, set()),
        # Its owner is not known: every leader may be.
        (tree({5: 1, 6: 1, 7: 1}, {5, 6}), {5, 6}, {5, 6}),
        (tree({7: 1}, set()), {7}, set()),
        # The end of a leader that no scan shows any more is not noticed yet.
        (tree({7: 5}, {5}, {7: 5}), set(), {5}),
        # What ignores the signal passes its turn on: the leader, or what a leader waits for.
        (tree({5: 1, 7: 5, 8: 7}, {5}, ignoring=frozenset({5})), {5, 7}, {7}),
        (tree({5: 1, 7: 5, 8: 7}, {5}, {8: 5}, frozenset({7})), {5}, {5}),
        (tree({7: 1, 8: 7, 9: 8}, set(), ignoring=frozenset({7, 8})), {7, 8, 9}, set()),
        # A leader below a leader: a nested job of this tree.
        (tree({5: 1, 6: 5, 7: 6}, {5, 6}), {5, 6}, {6}),
        # Cycles do not exist, but a scan is no snapshot.
        (tree({7: 8, 8: 7}, set()), set(), {7, 8}),
    ],
)
def test_who_is_due(job: Job, due: set[int], holders: set[int]) -> None:
    assert job.decide() == (due, holders)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Draw a forest, in which a parent may be gone, some leaders, and owners of the rest."""
    count = draw(st.integers(0, 12))
    pids = draw(st.permutations(range(100, 100 + count)))
    parents = {pid: draw(st.sampled_from([1, 50, *pids[:index]])) for index, pid in enumerate(pids)}
    known = [*pids, 60, 61]
    leaders = draw(st.sets(st.sampled_from(known)))
    owners = draw(st.dictionaries(st.sampled_from(known), st.sampled_from(known)))
    return tree(parents, leaders, {pid: owner for pid, owner in owners.items() if pid != owner})


@given(jobs())
def test_a_process_is_due_or_waits_for_a_process_that_runs(job: Job) -> None:
    """Leaders are always due, and the processes of the job do not wait without a reason."""
    due, holders = job.decide()
    pids = {process.pid for process in job.processes}
    assert due <= pids
    assert job.leaders & pids <= due
    assert holders <= pids | job.leaders
    assert bool(pids - due) == bool(holders)
    for process in job.processes:
        owner = job.owners.get(process.pid)
        if process.pid in due:
            assert process.pid in job.leaders or process.parent not in pids
        elif process.parent in pids:
            assert process.parent in holders
        elif owner is None:
            assert job.leaders <= holders
        else:
            assert owner in holders & job.leaders


@given(jobs())
def test_each_process_alone_does_not_wait_for_itself(job: Job) -> None:
    for process in job.processes:
        _, holders = job._replace(processes=[process]).decide()
        assert process.pid not in holders


@given(jobs())
def test_without_leaders_the_roots_are_due(job: Job) -> None:
    pids = {process.pid for process in job.processes}
    roots = {process.pid for process in job.processes if process.parent not in pids}
    assert job._replace(leaders=set()).decide()[0] == roots
    assert bool(roots) == bool(pids)


@given(jobs())
def test_the_next_are_due_when_the_first_have_ended(job: Job) -> None:
    """All have been due once, parents before their children."""
    order: list[int] = []
    left = job
    while left.processes:
        ended = left.decide()[0] or left.leaders
        assert ended, "the rest waits for nothing that could end"
        order += [process.pid for process in left.processes if process.pid in ended]
        left = left.without(ended)
    assert sorted(order) == sorted(process.pid for process in job.processes)
    position = {pid: index for index, pid in enumerate(order)}
    for process in job.processes:
        if process.parent in position and process.pid not in job.leaders:
            assert position[process.parent] < position[process.pid]


def test_what_a_process_ignored_before_a_signal_counts() -> None:
    """A mask that is seen when a signal may have reached the process says nothing."""
    ignored = Ignored()
    masks = {7: 1 << 14, 8: 0, 9: 1 << 14}

    def processes(mask: dict[int, int]) -> list[ProcEntry]:
        return [ProcEntry(pid, 1, pid, 0, ignored=each) for pid, each in mask.items()]

    for process in processes(masks):
        ignored.note(process, process.pid)
    ignored.note_signal(8)
    late = ProcEntry(10, 8, 8, 0, ignored=1 << 14)
    unknown = ProcEntry(11, 1, 11, 0, ignored=1 << 14)
    ignored.note(late, 8)
    ignored.note(unknown, None)
    after = processes(dict.fromkeys(masks, 1 << 14))
    for process in after:
        ignored.note(process, process.pid)
    assert ignored.pids([*after, late, unknown], 15) == {7, 9}
    assert ignored.pids(after, 2) == set()
    assert ignored.pids([ProcEntry(7, 1, 7, 99)], 15) == set()  # its pid is used again


# -------------------------------------------------------------- with real shells


class Shell:
    """A program whose descendants print the pids of which a test wants to know."""

    def __init__(self, *argv: str) -> None:
        self.process = subprocess.Popen(
            argv,
            env={**os.environ, "NAP": "echo $$; exec sleep 99"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        self.pid = self.process.pid
        self._stdout = self.process.stdout

    def line(self) -> str:
        assert self._stdout is not None
        poller = select.poll()
        poller.register(self._stdout, select.POLLIN)
        assert poller.poll(GUARD_MS), "nothing was printed"
        return self._stdout.readline().decode().strip()

    def below(self) -> set[int]:
        return {process.pid for process in proc.iter_descendants(self.pid)}

    def foreground(self) -> set[int]:
        return {process.pid for process in foreground_of(self.pid)}

    def end(self) -> None:
        assert self._stdout is not None
        self._stdout.close()
        self.process.send_signal(signal.SIGSTOP)  # it starts nothing more
        pidfds = []
        for pid in [self.pid, *self.below()]:
            with suppress(ProcessLookupError):  # its end is that of what it waited for
                pidfds.append(os.pidfd_open(pid))
        for pidfd in pidfds:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        for pidfd in pidfds:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            assert poller.poll(GUARD_MS), "it still runs"
            os.close(pidfd)
        self.process.wait()


MakeShell = Callable[..., Shell]


@pytest.fixture
def run() -> Iterator[MakeShell]:
    """Run programs; all their processes are killed afterwards."""
    shells: list[Shell] = []

    def start(*argv: str) -> Shell:
        shells.append(Shell(*argv))
        return shells[-1]

    yield start
    for shell in shells:
        shell.end()


SHELLS = [
    name
    for name in ("bash", "dash", "sh", "busybox", "ksh", "mksh", "zsh")
    if shutil.which(name) is not None
]
# Prints its pid, and stays; a shell would replace itself by the last command of its script.
NAP = 'sh -c "$NAP"'


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> list[str]:
    """The shells of this host."""
    return ["busybox", "sh", "-c"] if request.param == "busybox" else [request.param, "-c"]


@pytest.mark.parametrize(
    "script",
    [
        f"{NAP}; true",
        f"trap 'exit 3' TERM; {NAP}; true",
        f"exec 3>&1; x=$({NAP} >&3; true); true",
        f"sleep 99 & {NAP}; true",
    ],
)
def test_a_command_in_the_foreground(shell: list[str], script: str, run: MakeShell) -> None:
    parent = run(*shell, script)
    command = int(parent.line())
    if script.startswith("sleep 99 &"):  # which is the shell itself until its execve
        until_sync(lambda: any(map(is_of_background, parent.below())))
    assert command in parent.foreground()
    assert not any(is_of_background(pid) for pid in parent.foreground())


def is_of_background(pid: int) -> bool:
    """Return whether a process is one that a script of these tests starts with `&`."""
    arguments = proc.read(pid, "cmdline") or b""
    return arguments == b"sleep\x0099\0" and bool(
        int(proc.read_status(pid)[b"SigIgn"], 16) & 1 << signal.SIGINT - 1
    )


@pytest.mark.parametrize(
    "script",
    [
        f"{NAP} & wait",
        f"trap 'kill -TERM $!' TERM; {NAP} & wait $!; wait",
        f"( {NAP}; true ) & wait",
        f"{NAP} & {NAP} & wait; wait",
    ],
)
def test_a_command_in_the_background(shell: list[str], script: str, run: MakeShell) -> None:
    """The shell runs a trap at once, and may pass the signal on."""
    parent = run(*shell, script)
    for _ in range(script.count(NAP)):  # each has been started
        int(parent.line())
    assert parent.below()
    assert parent.foreground() == set()


@pytest.mark.parametrize(
    "script",
    [
        f"( {NAP}; true ); true",
        f"bash -c '{NAP}; true'; true",
        f"sh -c '( {NAP}; true ); true'; true",
    ],
)
def test_shells_in_the_foreground_of_shells(shell: list[str], script: str, run: MakeShell) -> None:
    """Each of them waits, so all get the signal."""
    parent = run(*shell, script)
    command = int(parent.line())
    assert command in parent.foreground()
    assert parent.foreground() == parent.below()
    assert len(parent.below()) > 1


def test_a_background_below_a_foreground(run: MakeShell) -> None:
    """The shell between handles the signal at once."""
    parent = run("bash", "-c", f"(echo $BASHPID; {NAP} & wait); true")
    between, command = int(parent.line()), int(parent.line())
    assert parent.foreground() == {between}
    assert command in parent.below()


def test_a_pipeline(shell: list[str], run: MakeShell) -> None:
    """All of its commands are in the foreground."""
    parent = run(*shell, f"{NAP} | cat; true")
    command = int(parent.line())
    assert len(parent.below()) >= 2
    assert command in parent.foreground()
    assert parent.foreground() == parent.below()


# Changes the action of SIGINT, and prints its pid.
CHANGING = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN if sys.argv[1] == "ignore" else print)
print(os.getpid(), flush=True)
time.sleep(99)
"""


@pytest.mark.parametrize("action", ["ignore", "handle"])
@pytest.mark.parametrize("end", ["; true", "& wait"])
def test_a_command_that_changes_the_action_of_sigint(
    shell: list[str], action: str, end: str, run: MakeShell
) -> None:
    """It is in the foreground or in the background as before."""
    parent = run(*shell, f"{sys.executable} -I -S -c '{CHANGING}' {action} {end}")
    command = int(parent.line())
    assert parent.foreground() == ({command} if end == "; true" else set())


def test_a_shell_that_ignores_sigint(shell: list[str], run: MakeShell) -> None:
    """As each does below a command of the background: its own command may be any."""
    parent = run(*shell, f"trap '' INT QUIT; {shell[0]} -c 'echo $$; {NAP}; true'; true")
    between, command = int(parent.line()), int(parent.line())
    assert parent.foreground() == {between, command}


def test_what_a_command_has_started_is_not_in_the_foreground(run: MakeShell) -> None:
    """Its parent is no shell."""
    code = "import os, subprocess; subprocess.call(['sh', '-c', os.environ['NAP']])"
    parent = run("sh", "-c", f'{sys.executable} -I -S -c "{code}"; true')
    helper = int(parent.line())
    assert helper in parent.below()
    assert parent.foreground() == parent.below() - {helper}
    (program,) = parent.foreground()
    assert foreground_of(program) == []


def test_a_process_that_is_gone() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
        assert foreground_of(process.pid) == []


def test_a_zombie_of_a_shell() -> None:
    """It has no children, and its program cannot be read."""
    with subprocess.Popen(["bash", "-c", "true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert foreground_of(process.pid) == []


@pytest.mark.parametrize(
    ("is_ended", "receivers"),
    [
        ({1: False}, []),  # the leader handles it: only the leader gets it
        ({1: False, 2: False}, []),
        ({1: None}, []),
        ({1: True}, None),
        ({1: True, 2: False}, [2]),  # a shell that runs a program
        ({1: True, 2: True}, None),
        ({1: True, 2: None}, None),  # a program that has ended
        ({1: True, 2: True, 3: False}, [3]),  # a shell in a shell, or both sides of a pipe
    ],
)
def test_which_processes_of_a_worker_get_a_forwarded_signal(
    is_ended: dict[int, bool | None], receivers: list[int] | None
) -> None:
    """1 is the leader, and waits for the others."""
    found = receivers_of(1, is_ended.__getitem__, lambda _: map(entry, list(is_ended)[1:]))
    assert (found if found is None else [one.pid for one in found]) == receivers


def entry(pid: int) -> ProcEntry:
    return ProcEntry(pid, 1, 1, 0, "S")
