"""torch.distributed.elastic.multiprocessing.redirects: the streams of this process to files."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TextIO

__all__ = ["redirect", "redirect_stderr", "redirect_stdout"]

_STREAMS = ("stdout", "stderr")


@contextmanager
def redirect(std: str, to_file: str) -> Iterator[None]:
    """Redirect a standard stream of this process to a file, for a block.

    The descriptor itself goes there, so that C code and child processes write there too.

    Args:
        std: "stdout" or "stderr".
        to_file: path of the file, which is overwritten; its directory exists.

    Raises:
        ValueError: there is no such stream.
        OSError: the file cannot be written.
    """
    if std not in _STREAMS:
        raise ValueError(f"unknown standard stream <{std}>, must be one of {set(_STREAMS)}")
    stream: TextIO = getattr(sys, std)
    number = 1 + _STREAMS.index(std)
    with ExitStack() as stack:
        file = stack.enter_context(open(to_file, "w+b"))
        # Under a test runner, the stream of Python has a descriptor of its own.
        formers = {each: os.dup(each) for each in {number, stream.fileno()}}
        for former in formers.values():
            stack.callback(os.close, former)
        _flush(stream)
        for each in formers:
            os.dup2(file.fileno(), each)
        try:
            yield
        finally:
            _flush(stream)
            for each, former in formers.items():
                os.dup2(former, each)


def _flush(stream: TextIO) -> None:
    """Write what Python and the C library have buffered."""
    ctypes.CDLL(None).fflush(None)
    stream.flush()


def redirect_stdout(to_file: str) -> AbstractContextManager[None]:
    """Redirect stdout of this process to a file, for a block (see `redirect`)."""
    return redirect("stdout", to_file)


def redirect_stderr(to_file: str) -> AbstractContextManager[None]:
    """Redirect stderr of this process to a file, for a block (see `redirect`)."""
    return redirect("stderr", to_file)
