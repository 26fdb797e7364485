"""Directories of control sockets and of records that no other test uses."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_aio.control.client import Channel, run_blocking, wait_blocking
from elastic_aio.control.protocol import ControlRequest, EventReply, Reply
from elastic_aio.control.sockets import CONTROL_DIR


@contextmanager
def own_control_dir() -> Iterator[Path]:
    """Use new directories, in this process and its children; yield that of the sockets."""
    with (
        tempfile.TemporaryDirectory(prefix="ctl-", dir="/tmp") as path,
        tempfile.TemporaryDirectory(prefix="state-", dir="/tmp") as state,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv(CONTROL_DIR, path)
        patch.setenv("XDG_STATE_HOME", state)
        yield Path(path)


def sockets(directory: Path) -> list[str]:
    """Return the names in a directory, of which each is a socket."""
    return sorted(os.listdir(directory))


def open_channel(path: str) -> Channel:
    """Connect to an agent as a command does."""
    return Channel(path, wait_blocking)


def ask(path: str, request: ControlRequest, timeout: float | None = None) -> Reply:
    """Return the first reply to a request."""
    with open_channel(path) as channel:
        channel.send(request)
        reply = run_blocking(channel.receive(timeout))
    assert reply is not None, "the agent has closed the connection"
    return reply


def replies(path: str, request: ControlRequest) -> list[Reply]:
    """Return all replies to a request; the last one is no event."""
    with open_channel(path) as channel:
        channel.send(request)
        found: list[Reply] = []
        while (reply := run_blocking(channel.receive())) is not None:
            found.append(reply)
            if not isinstance(reply, EventReply):
                break
        return found
