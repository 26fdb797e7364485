"""ReceivedSignals; most tests run in an interpreter of their own."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from elastic_aio.aio import run_in_thread
from elastic_aio.errors import HostError
from elastic_aio.signals import ReceivedSignals, StopSignals
from tests.support.children import until_sync
from tests.support.cli import running

pytestmark = pytest.mark.both_loops

ROOT = Path(__file__).parent.parent

PRELUDE = """
import asyncio, os, signal, sys, time
import uvloop
from elastic_aio.signals import ReceivedSignals

def run(main):
    factory = uvloop.new_event_loop if sys.argv[1] == "uvloop" else asyncio.SelectorEventLoop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main())

async def read(received):
    return await asyncio.wait_for(anext(received), 10)

def send(number):
    os.kill(os.getpid(), number)
"""


def printed_by(loop: str, body: str) -> tuple[list[str], int]:
    """Return the lines that a program printed, and its return code."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(body), loop],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout.split("\n")[:-1], done.returncode


@pytest.mark.parametrize(
    ("received", "meanings"),
    [
        ("0 TERM", "TERM"),
        ("0 TERM, 0.003 TERM, 0.003 HUP", "TERM - -"),
        ("0 TERM, 5 TERM, 5.1 TERM", "TERM TERM -"),  # at the end of each grace of Slurm
        ("0 TERM, 1 HUP, 2 TERM", "TERM HUP KILL"),
        ("0 TERM, 1 HUP, 1.9 TERM, 2 INT, 7 INT", "TERM HUP - - KILL"),
        ("0 TERM, 0.5 TERM, 1 TERM, 1.5 TERM, 2 TERM, 2.5 TERM", "TERM - - - - -"),
        ("0 INT, 1 INT", "INT INT"),
        ("0 USR1, 0 USR1, 0 TERM", "USR1 USR1 TERM"),
    ],
)
def test_what_stop_signals_mean(
    received: str, meanings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those within a second are one; the third one kills."""
    check_meanings(received, meanings, monkeypatch)


@pytest.mark.parametrize(
    ("received", "meanings"),
    [
        ("0 INT, 0.9 INT, 1 INT", "INT - KILL"),
        ("0 INT, 0.5 INT, 0.9 INT, 1.3 INT", "INT - - KILL"),
        ("0 TERM, 0.5 INT, 1.6 INT", "TERM - KILL"),
        ("0 TERM, 1 INT", "TERM INT"),
        ("0 INT, 1 TERM", "INT TERM"),
    ],
)
def test_a_second_interrupt_at_a_terminal(
    received: str, meanings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person means it."""
    monkeypatch.setattr("elastic_aio.signals._is_at_terminal", lambda: True)
    check_meanings(received, meanings, monkeypatch)


def check_meanings(received: str, meanings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stops, found = StopSignals([1, 2, 15]), []
    for one in received.split(", "):
        at, name = one.split()
        monkeypatch.setattr("time.monotonic", lambda at=at: 1e6 + float(at))
        meaning = stops.meaning(getattr(signal, f"SIG{name}"))
        found.append(signal.Signals(meaning).name[3:] if meaning else "-")
    assert " ".join(found) == meanings


@pytest.mark.parametrize(
    "order", [(signal.SIGHUP, signal.SIGTERM), (signal.SIGTERM, signal.SIGHUP)]
)
async def test_of_stop_signals_at_once_sigterm_counts(order: tuple[int, int]) -> None:
    """Of two that are pending, the handler of SIGHUP is called first, whatever came first."""
    with ReceivedSignals(order, order) as received:
        for number in order:
            received.put(number)
        assert await anext(received) == signal.SIGTERM


loops = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])


# Programs by what they show, with the lines that they print, and their return code.
PROGRAMS: dict[str, tuple[str, list[str], int]] = {
    # In order of arrival, as plain numbers.
    "signals_are_items": (
        """
        async def main():
            with ReceivedSignals([signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM]) as received:
                print(sorted(map(int, received.handled)))
                for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
                    send(number)
                    print(await read(received))
            print(sorted(map(int, received.handled)))
        run(main)
        """,
        ["[10, 15]", "10", "15", "10", "[]"],
        0,
    ),
    # A Python handler, the default action, and Python's own for SIGINT.
    "previous_handlers_are_restored": (
        """
        def own(number, frame):
            print("own", number)
        async def main():
            signal.signal(signal.SIGUSR1, own)
            numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
            before = {n: signal.getsignal(n) for n in numbers}
            with ReceivedSignals(before) as received:
                during = {n: signal.getsignal(n) for n in before}
                print(all(during[n] != before[n] for n in before))
            print({n: signal.getsignal(n) for n in before} == before)
            send(signal.SIGUSR1)
            await asyncio.sleep(0)
        run(main)
        """,
        ["True", "True", "own 10"],
        0,
    ),
    "the_default_action_is_restored": (
        """
        async def main():
            with ReceivedSignals([signal.SIGUSR1]):
                pass
            print("still here", flush=True)
            send(signal.SIGUSR1)
            await asyncio.sleep(10)
        run(main)
        """,
        ["still here"],
        -signal.SIGUSR1,
    ),
    # SIGHUP under nohup, inside the block and after it.
    "an_ignored_signal_stays_ignored": (
        """
        async def main():
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            with ReceivedSignals([signal.SIGHUP, signal.SIGTERM]) as received:
                print(sorted(map(int, received.handled)))
                send(signal.SIGHUP)
                send(signal.SIGTERM)
                print(await read(received))
            print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)
            send(signal.SIGHUP)
        run(main)
        """,
        ["[15]", "15", "True"],
        0,
    ),
    "an_unread_signal_goes_to_the_previous_handler": (
        """
        async def main():
            signal.signal(signal.SIGUSR1, lambda number, frame: print("own", number))
            with ReceivedSignals([signal.SIGUSR1]) as received:
                send(signal.SIGUSR1)
                print("leaving")  # without a turn of the loop
            print("left")
        run(main)
        """,
        ["leaving", "own 10", "left"],
        0,
    ),
    # It arrives between the last read and the end of the block.
    "an_unread_sigterm_ends_the_process": (
        """
        async def main():
            with ReceivedSignals([signal.SIGTERM]) as received:
                send(signal.SIGTERM)
                print("leaving", flush=True)
            print("not reached", flush=True)
        run(main)
        """,
        ["leaving"],
        -signal.SIGTERM,
    ),
    "handlers_are_restored_after_an_error": (
        """
        async def main():
            before = signal.getsignal(signal.SIGTERM)
            try:
                with ReceivedSignals([signal.SIGTERM]):
                    raise KeyError("x")
            except KeyError:
                print(signal.getsignal(signal.SIGTERM) == before)
        run(main)
        """,
        ["True"],
        0,
    ),
    # SIGKILL cannot be handled.
    "a_failed_entry_restores_the_handlers": (
        """
        async def main():
            before = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGHUP)
            try:
                with ReceivedSignals([signal.SIGHUP, signal.SIGKILL, signal.SIGUSR1]):
                    print("entered")
            except Exception as error:
                print("refused")
            print((signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGHUP)) == before)
        run(main)
        """,
        ["refused", "True"],
        0,
    ),
    "cancelling_a_read_loses_no_signal": (
        """
        async def main():
            with ReceivedSignals([signal.SIGUSR1]) as received:
                waiting = asyncio.ensure_future(anext(received))
                await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.wait([waiting])
                send(signal.SIGUSR1)
                print(await read(received))
        run(main)
        """,
        ["10"],
        0,
    ),
    # Two receivers have received one SIGUSR1, and neither has read it.
    "what_the_last_receiver_leaves_unread_is_delivered_once": (
        """
        async def main():
            signal.signal(signal.SIGUSR1, lambda number, frame: print("own", number))
            with ReceivedSignals([signal.SIGUSR1]):
                inner = ReceivedSignals([signal.SIGUSR1]).__enter__()
                send(signal.SIGUSR1)
                inner.__exit__()
                print("leaving")
        run(main)
        """,
        ["leaving", "own 10"],
        0,
    ),
    # A block entered before the loop runs; the program and its loop install handlers.
    "a_handler_that_was_installed_meanwhile_stays": (
        """
        def own(number, frame):
            print("own", number)
        async def main(received):
            signal.signal(signal.SIGUSR1, own)
            heard = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, heard.set)
            for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
                send(number)
            await heard.wait()
            print(await read(received))
        with ReceivedSignals([signal.SIGTERM, signal.SIGUSR1]) as received:
            run(lambda: main(received))
        print(signal.getsignal(signal.SIGUSR1) is own)
        print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, signal.set_wakeup_fd(-1))
        """,
        ["own 10", "15", "True", "True -1"],
        0,
    ),
    # The loop learns of its own signals through a descriptor that the block replaces.
    "a_handler_of_the_loop_is_called_inside_the_block": (
        """
        async def main():
            called = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, called.set)
            with ReceivedSignals([signal.SIGTERM]):
                send(signal.SIGUSR2)
                await asyncio.wait_for(called.wait(), 10)
                print("called")
        run(main)
        """,
        ["called"],
        0,
    ),
    # `terminate()` of a child of multiprocessing ends it.
    "a_forked_process_has_the_previous_handlers": (
        """
        async def main():
            with ReceivedSignals([signal.SIGTERM]) as received:
                if not (pid := os.fork()):
                    send(signal.SIGTERM)
                    os._exit(0)
                print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                send(signal.SIGTERM)
                print(await read(received))
        run(main)
        """,
        ["-15", "15"],
        0,
    ),
}


@loops
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_program_receives(loop: str, name: str) -> None:
    program, lines, code = PROGRAMS[name]
    assert printed_by(loop, program) == (lines, code)


@loops
@pytest.mark.parametrize(
    ("leaves", "expected"),
    [
        # It has not read SIGUSR1, which no other receiver handles.
        ("first", ["own 10", "one has left", "15"]),
        ("second", ["one has left", "10"]),
    ],
)
def test_two_receivers_share_the_handlers(loop: str, leaves: str, expected: list[str]) -> None:
    """Both receive a signal; the last one to leave restores, whichever of them it is."""
    lines, code = printed_by(
        loop,
        f"""
        def own(number, frame):
            print("own", number, flush=True)
        async def main():
            signal.signal(signal.SIGUSR1, own)
            wakeup = signal.set_wakeup_fd(-1)
            signal.set_wakeup_fd(wakeup)
            first = ReceivedSignals([signal.SIGUSR1, signal.SIGTERM]).__enter__()
            second = ReceivedSignals([signal.SIGTERM, signal.SIGUSR2]).__enter__()
            send(signal.SIGTERM)
            print(await read(first), await read(second))
            send(signal.SIGUSR1)
            send(signal.SIGTERM)
            leaves, stays = (first, second) if {leaves!r} == "first" else (second, first)
            leaves.__exit__()
            print("one has left", flush=True)
            print(await read(stays))
            stays.discard([signal.SIGTERM])  # the other one had not read it
            stays.__exit__()
            print(signal.set_wakeup_fd(-1) == wakeup)
            send(signal.SIGUSR1)
            send(signal.SIGTERM)
        run(main)
        """,
    )
    assert lines == ["15 15", *expected, "True", "own 10"]
    assert code == -signal.SIGTERM


def test_one_sigtstp_suspends_the_process_once() -> None:
    """The first of two receivers does it for both."""
    program = """
    async def main():
        with ReceivedSignals([signal.SIGTSTP]) as first, ReceivedSignals([20]) as second:
            since = time.monotonic()
            first.suspend_process(since)
            second.suspend_process(since)
            print("resumed")
    run(main)
    """
    argv = [sys.executable, "-c", PRELUDE + textwrap.dedent(program), "asyncio"]
    with running(argv, cwd=ROOT) as process:
        until_sync(lambda: state_of(process.pid) == "T")
        process.send(signal.SIGCONT)
        assert process.wait() == 0
        assert process.out == "resumed\n"


SUSPENDED = """
async def main(received):
    # No handler in Python can be called meanwhile.
    os.system(f"for one in {sys.argv[3]}; do kill -$one $PPID; {sys.argv[4]}; done")
    assert await read(received) == signal.SIGTSTP
    since = time.monotonic()
    await asyncio.sleep(0)
    received.suspend_process(since)
    received.suspend_process(since)

async def enter():
    with ReceivedSignals([signal.SIGTSTP]) as received:
        await main(received)

signal.signal(signal.SIGCONT, lambda *_: print("continued", flush=True))
if sys.argv[2] == "inside":
    run(enter)
else:
    with ReceivedSignals([signal.SIGTSTP]) as received:
        run(lambda: main(received))
os.kill(os.getpid(), signal.SIGCONT)
"""
ARRIVED = "while grep -q 'ShdPnd:.*[1-9a-f]' /proc/$PPID/status; do :; done"


@loops
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("sent", ["TSTP", "TSTP CONT"])
def test_sigcont_cancels_a_sigtstp_before_it(loop: str, where: str, sent: str) -> None:
    """It may arrive before the process has suspended itself; the program's handler is called."""
    argv = [sys.executable, "-c", PRELUDE + SUSPENDED, loop, where, sent, ARRIVED]
    with running(argv, cwd=ROOT) as process:
        if sent == "TSTP":
            until_sync(lambda: state_of(process.pid) == "T", "the suspension")
            process.send(signal.SIGCONT)
        assert process.wait() == 0
        assert process.out == "continued\n" * 2


def state_of(pid: int) -> str:
    """Return the state letter of a process (proc(5))."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_another_thread_is_an_error() -> None:

    def enter() -> str:
        async def main() -> None:
            with ReceivedSignals([signal.SIGUSR1]):
                raise AssertionError("entered")

        with pytest.raises(HostError) as caught:
            asyncio.run(main())
        return str(caught.value)

    assert await run_in_thread(enter) == "signals can only be handled on the main thread"


async def test_nothing_is_installed_before_the_block() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    received = ReceivedSignals([signal.SIGUSR1])
    assert signal.getsignal(signal.SIGUSR1) is before
    assert received.handled == frozenset()
