"""Tee'd lines for `sys.stdout` and `sys.stderr` where these are not the process's own.

A notebook, a test and `contextlib.redirect_stdout` put another object there, and torch's agent
writes to it.  Ours writes to descriptors, so a thread copies from a pipe.
"""

from __future__ import annotations

import codecs
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TextIO

__all__ = ["console_descriptors"]


@contextmanager
def console_descriptors() -> Iterator[tuple[int, int]]:
    """Return descriptors for shown stdout and stderr; leaving waits for what was written.

    Raises:
        OSError: no descriptor is left.
    """
    with ExitStack() as stack:
        streams = ((sys.stdout, 1), (sys.stderr, 2))
        first, second = (stack.enter_context(_descriptor(*stream)) for stream in streams)
        yield first, second


@contextmanager
def _descriptor(stream: TextIO | None, number: int) -> Iterator[int]:
    if stream is None or _is_descriptor(stream, number):
        yield number
        return
    reader, writer = os.pipe()
    copier = threading.Thread(target=_copy, args=(reader, stream), daemon=True)
    try:
        copier.start()
        yield writer
    finally:
        os.close(writer)
        if copier.ident is not None:
            copier.join()
        os.close(reader)


def _is_descriptor(stream: TextIO, number: int) -> bool:
    try:
        return stream.fileno() == number
    except (OSError, ValueError, AttributeError):
        return False  # `io.UnsupportedOperation` is both; a notebook's has another or none


def _copy(reader: int, stream: TextIO) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    is_writable = True
    while data := os.read(reader, 1 << 16):
        if not is_writable:
            continue  # the writer must not block
        try:
            stream.write(decoder.decode(data))
            stream.flush()
        except (OSError, ValueError):
            is_writable = False
