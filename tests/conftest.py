"""Every test runs on both loops and must leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop

from tests.support.clock import VirtualClockLoop
from tests.support.traces import SESSION_VARIABLE, open_descriptors, own_children, strays

# Inherited by everything that a test starts, daemons included: see `strays`.
os.environ[SESSION_VARIABLE] = uuid.uuid4().hex
# Settings of the machine's user must not change what the tests see.
for _name in [name for name in os.environ if name.startswith("PET_")] + [
    "LOGLEVEL",
    "OMP_NUM_THREADS",
    "PYTHON_EXEC",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
]:
    os.environ.pop(_name, None)

# A shell lets what it runs in the background ignore these; the tests' processes shall not.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# libuv opens a pipe for signals with its first loop and keeps it.
uvloop.new_event_loop().close()


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run each async test on the stock loop and on uvloop, or on virtual time.

    A test that only watches other processes gains nothing by a second loop.
    """
    if item.get_closest_marker("black_box"):
        return {"asyncio": asyncio.SelectorEventLoop}
    if item.get_closest_marker("virtual_clock"):
        return {"virtual": VirtualClockLoop}
    return {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, a descriptor or a thread."""
    descriptors, threads, children = open_descriptors(), threading.active_count(), own_children()
    before = strays().keys()  # a fixture of a wider scope may keep a process
    yield
    for thread in threading.enumerate():
        # asyncio's own on Python 3.11, one for each child: done when its child was.
        # A resolver has told its answer, and is about to end.
        if thread.name.startswith(("waitpid-", "asyncio-waitpid-", "resolver")):
            thread.join(timeout=5)
    leaks: dict[str, Any] = {
        "processes": {pid: what for pid, what in strays().items() if pid not in before},
        "children": own_children() - children,
        "descriptors": {
            fd: target for fd, target in open_descriptors().items() if fd not in descriptors
        },
        "threads": threading.active_count() - threads if threading.active_count() > threads else 0,
    }
    left = {name: what for name, what in leaks.items() if what}
    assert not left, f"left behind: {left}"
