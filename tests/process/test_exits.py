"""Waiting for the end of a process by its pidfd."""

from __future__ import annotations

import asyncio
import os
import subprocess

from elastic_aio.process.exits import ExitWatch, has_ended

GUARD = 20.0


def waiting_child() -> subprocess.Popen[bytes]:
    """Start a child that ends when its stdin is closed."""
    return subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)


def let_go(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    child.stdin.close()


async def test_the_end_is_told_once() -> None:
    """The callback runs when the process ends, with the descriptor still open."""
    child = waiting_child()
    told: asyncio.Queue[int] = asyncio.Queue()
    descriptor = os.pidfd_open(child.pid)
    watch = ExitWatch(descriptor, lambda: told.put_nowait(watch.descriptor))
    assert repr(watch) == f"<ExitWatch on {descriptor}>"
    assert told.empty()
    let_go(child)
    async with asyncio.timeout(GUARD):
        assert await told.get() == descriptor
    for _ in range(5):
        await asyncio.sleep(0)
    assert told.empty()
    assert watch.descriptor == -1
    assert repr(watch) == "<ExitWatch done>"
    assert child.wait() == 0
    watch.close()


async def test_a_process_that_is_over_is_told_too() -> None:
    """A zombie is an end like any other."""
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    told = asyncio.Event()
    ExitWatch(os.pidfd_open(child.pid), told.set)
    async with asyncio.timeout(GUARD):
        await told.wait()
    assert child.wait() == 0


async def test_a_closed_watch_is_silent() -> None:
    """After `close` nothing is told, and the descriptor is closed."""
    child = waiting_child()
    told = asyncio.Event()
    watch = ExitWatch(os.pidfd_open(child.pid), told.set)
    watch.close()
    watch.close()
    let_go(child)
    child.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not told.is_set()


async def test_a_stranger_can_be_watched() -> None:
    """The process need not be a child."""
    shell = subprocess.Popen(
        ["sh", "-c", "exec 3<&0; cat <&3 >/dev/null & echo $!; exec 3<&-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert shell.stdout is not None
    grandchild = int(shell.stdout.readline())
    told = asyncio.Event()
    ExitWatch(os.pidfd_open(grandchild), told.set)
    assert not told.is_set()
    let_go(shell)
    async with asyncio.timeout(GUARD):
        await told.wait()
    shell.stdout.close()
    assert shell.wait() == 0


def test_an_end_is_seen_without_reaping() -> None:
    """`has_ended` leaves the status to whoever reaps."""
    child = waiting_child()
    descriptor = os.pidfd_open(child.pid)
    assert not has_ended(descriptor)
    let_go(child)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(descriptor)
    assert has_ended(descriptor)
    assert child.wait() == 0
    assert has_ended(descriptor)
    os.close(descriptor)
