"""Processes that the launcher may not signal, as those of another user are to an ordinary user."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

OTHER_UID = 65534
"""The user of these processes."""
AS_OTHER = f"setpriv --reuid={OTHER_UID} --clear-groups"
"""Runs a command of a shell as that user."""
UNPRIVILEGED = ["setpriv", "--bounding-set=-all,+setuid,+setgid"]
"""Runs a program without the right to signal it, nor to read its environment."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
_VERSION_3 = 0x20080522
_KILL = 1 << 5  # CAP_KILL in capabilities(7)


@contextmanager
def without_permission() -> Iterator[None]:
    """Take the right to signal processes of other users from this thread, and from no child."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice
    assert libc.capget(header, sets) == 0
    effective = sets[0]
    sets[0] = effective & ~_KILL
    assert libc.capset(header, sets) == 0
    try:
        yield
    finally:
        sets[0] = effective
        assert libc.capset(header, sets) == 0
