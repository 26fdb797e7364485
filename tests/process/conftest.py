"""Descriptors that children get."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture
def devnull() -> Iterator[int]:
    """A descriptor of /dev/null."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def output() -> Iterator[tuple[int, int]]:
    """A pipe for what children print."""
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)
