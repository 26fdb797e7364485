"""Signals as an iterator; each case has an interpreter of its own to be shot at."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from elastic_aio.errors import SurroundingsError
from elastic_aio.signals import ReceivedSignals

ROOT = Path(__file__).parent.parent

PRELUDE = """
import asyncio, os, signal, sys
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


loops = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])


@loops
def test_signals_are_items(loop: str) -> None:
    """Signals come in order of their arrival, as plain numbers."""
    lines, code = printed_by(
        loop,
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
    )
    assert lines == ["[10, 15]", "10", "15", "10", "[]"]
    assert code == 0


@loops
def test_former_handlers_return(loop: str) -> None:
    """A Python handler, the default one and Python's own for Ctrl-C are put back."""
    lines, _ = printed_by(
        loop,
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
    )
    assert lines == ["True", "True", "own 10"]


@loops
def test_the_default_action_returns(loop: str) -> None:
    """After the block, a signal ends the process as before."""
    lines, code = printed_by(
        loop,
        """
        async def main():
            with ReceivedSignals([signal.SIGUSR1]):
                pass
            print("still here", flush=True)
            send(signal.SIGUSR1)
            await asyncio.sleep(10)
        run(main)
        """,
    )
    assert lines == ["still here"]
    assert code == -signal.SIGUSR1


@loops
def test_what_is_ignored_stays_ignored(loop: str) -> None:
    """Under nohup, SIGHUP neither arrives as an item nor does anything, then or later."""
    lines, code = printed_by(
        loop,
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
    )
    assert lines == ["[15]", "15", "True"]
    assert code == 0


@loops
def test_an_unread_signal_goes_to_the_former_handler(loop: str) -> None:
    """What nobody has read when the block ends is delivered again, not lost."""
    lines, _ = printed_by(
        loop,
        """
        async def main():
            signal.signal(signal.SIGUSR1, lambda number, frame: print("own", number))
            with ReceivedSignals([signal.SIGUSR1]) as received:
                send(signal.SIGUSR1)
                while received._queue.empty():
                    await asyncio.sleep(0)
                print("leaving")
            print("left")
        run(main)
        """,
    )
    assert lines == ["leaving", "own 10", "left"]


@loops
def test_an_unread_sigterm_ends_the_process(loop: str) -> None:
    """A SIGTERM between the last read and the end of the block still does its work."""
    lines, code = printed_by(
        loop,
        """
        async def main():
            with ReceivedSignals([signal.SIGTERM]) as received:
                send(signal.SIGTERM)
                while received._queue.empty():
                    await asyncio.sleep(0)
                print("leaving", flush=True)
            print("not reached", flush=True)
        run(main)
        """,
    )
    assert lines == ["leaving"]
    assert code == -signal.SIGTERM


@loops
def test_handlers_return_after_an_error(loop: str) -> None:
    """An exception inside the block passes, and the handlers are back."""
    lines, _ = printed_by(
        loop,
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
    )
    assert lines == ["True"]


@loops
def test_a_signal_that_cannot_be_handled_changes_nothing(loop: str) -> None:
    """When entering fails half-way, what was replaced before it is put back."""
    lines, _ = printed_by(
        loop,
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
    )
    assert lines == ["refused", "True"]


@loops
def test_cancelling_a_read_loses_no_signal(loop: str) -> None:
    """A read that was given up leaves the next signal to the next read."""
    lines, _ = printed_by(
        loop,
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
    )
    assert lines == ["10"]


async def test_another_thread_is_refused() -> None:
    """Signals belong to the main thread; elsewhere the reason is one line."""

    def enter() -> str:
        async def main() -> None:
            with ReceivedSignals([signal.SIGUSR1]):
                raise AssertionError("entered")

        with pytest.raises(SurroundingsError) as caught:
            asyncio.run(main())
        return str(caught.value)

    executor_said = await _in_thread(enter)
    assert executor_said == "signals can only be handled on the main thread"


async def _in_thread(work: object) -> str:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as executor:
        assert callable(work)
        said: str = await asyncio.get_running_loop().run_in_executor(executor, work)
        return said


async def test_nothing_is_installed_before_the_block() -> None:
    """Making the object touches no handler."""
    before = signal.getsignal(signal.SIGUSR1)
    received = ReceivedSignals([signal.SIGUSR1])
    assert signal.getsignal(signal.SIGUSR1) is before
    assert received.handled == frozenset()
