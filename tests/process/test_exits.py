"""PidfdWatch and has_ended: exits seen by pidfd."""

from __future__ import annotations

import asyncio
import os
import subprocess

import pytest

from elastic_aio.process.exits import PidfdWatch, has_ended, open_child_pidfd

pytestmark = pytest.mark.both_loops

GUARD = 20.0


def waiting_child() -> subprocess.Popen[bytes]:
    """Start a child that ends when its stdin is closed."""
    return subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)


def release(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    child.stdin.close()


async def test_the_callback_runs_once() -> None:
    """The descriptor is still open meanwhile."""
    child = waiting_child()
    ends: asyncio.Queue[int] = asyncio.Queue()
    descriptor = os.pidfd_open(child.pid)
    watch = PidfdWatch(descriptor, lambda: ends.put_nowait(watch.descriptor))
    assert repr(watch) == f"<PidfdWatch on {descriptor}>"
    assert ends.empty()
    release(child)
    async with asyncio.timeout(GUARD):
        assert await ends.get() == descriptor
    for _ in range(5):
        await asyncio.sleep(0)
    assert ends.empty()
    assert watch.descriptor == -1
    assert repr(watch) == "<PidfdWatch done>"
    assert child.wait() == 0
    watch.close()


async def test_a_zombie_has_ended() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    ended = asyncio.Event()
    PidfdWatch(os.pidfd_open(child.pid), ended.set)
    async with asyncio.timeout(GUARD):
        await ended.wait()
    assert child.wait() == 0


async def test_a_closed_watch_does_not_call_back() -> None:
    child = waiting_child()
    ended = asyncio.Event()
    watch = PidfdWatch(os.pidfd_open(child.pid), ended.set)
    watch.close()
    watch.close()
    release(child)
    child.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not ended.is_set()


async def test_a_process_that_is_no_child_can_be_watched() -> None:
    shell = subprocess.Popen(
        ["sh", "-c", "exec 3<&0; cat <&3 >/dev/null & echo $!; exec 3<&-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert shell.stdout is not None
    grandchild = int(shell.stdout.readline())
    ended = asyncio.Event()
    PidfdWatch(os.pidfd_open(grandchild), ended.set)
    assert not ended.is_set()
    release(shell)
    async with asyncio.timeout(GUARD):
        await ended.wait()
    shell.stdout.close()
    assert shell.wait() == 0


def test_only_a_child_of_this_process_has_a_pidfd() -> None:
    """The child may have been reaped, and another process may have its pid by now."""
    child = waiting_child()
    descriptor = open_child_pidfd(child.pid)
    assert not has_ended(descriptor)
    os.close(descriptor)
    release(child)
    assert child.wait() == 0
    assert open_child_pidfd(child.pid) == -1
    assert open_child_pidfd(os.getppid()) == -1


def test_has_ended_does_not_reap() -> None:
    child = waiting_child()
    descriptor = os.pidfd_open(child.pid)
    assert not has_ended(descriptor)
    release(child)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(descriptor)
    assert has_ended(descriptor)
    assert child.wait() == 0
    assert has_ended(descriptor)
    os.close(descriptor)
