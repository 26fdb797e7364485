"""A small disk of a test's own, which is soon full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(mount_point: Path, kilobytes: int) -> Iterator[Path]:
    """Mount a disk while the block is open; skip the test where that is not allowed.

    `.ci/run` sets ELASTIC_AIO_NETNS where the right to mount is a must: the test fails then.
    """
    mount_point.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={kilobytes}k", "none", str(mount_point)]
    mounted = subprocess.run(["mount", *options], capture_output=True, check=False)
    if mounted.returncode:
        assert "ELASTIC_AIO_NETNS" not in os.environ, mounted.stderr
        pytest.skip("needs the right to mount a disk")
    try:
        yield mount_point
    finally:
        subprocess.run(["umount", str(mount_point)], check=True)


def fill(disk: Path) -> None:
    """Write to a disk until it is full."""
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 512):
                pass
        except OSError:
            return
