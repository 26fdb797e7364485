"""A directory of control sockets that no other test uses."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_aio.control.sockets import CONTROL_DIR


@contextmanager
def own_control_dir() -> Iterator[Path]:
    """Use a new directory, in this process and its children."""
    with (
        tempfile.TemporaryDirectory(prefix="ctl-", dir="/tmp") as path,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv(CONTROL_DIR, path)
        yield Path(path)


def sockets(directory: Path) -> list[str]:
    """Return the names in a directory, of which each is a socket."""
    return sorted(os.listdir(directory))
