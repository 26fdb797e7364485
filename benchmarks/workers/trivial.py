"""Functions that do almost nothing."""

import time


def nothing(index: int) -> None:
    """Do nothing."""


def give(size: int) -> tuple[int, bytes]:
    """Return the time of the return and as many bytes."""
    data = b"x" * size
    return time.monotonic_ns(), data
