"""Programs to which the kernel refuses a system call, as a sandbox does."""

from __future__ import annotations

import os
import sys

import pytest

NUMBERS = {"memfd_create": 319, "pidfd_open": 434, "pidfd_send_signal": 424, "flock": 73}
"""System calls by their number."""

needs_x86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86-64")

# A filter of three instructions (seccomp(2)), and then the program.
_REFUSE = """
import ctypes, os, struct, sys
number, error = int(sys.argv[1]), int(sys.argv[2])
code = b"".join(struct.pack("=HBBI", *one) for one in (
    (0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | error), (0x06, 0, 0, 0x7FFF0000)
))
data = ctypes.create_string_buffer(code)
program = struct.pack("HxxxxxxP", 4, ctypes.addressof(data))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.create_string_buffer(program), 0, 0) == 0
os.execv(sys.argv[3], sys.argv[3:])
"""


def refusing(call: str, error: int, argv: list[str]) -> list[str]:
    """Return a command that runs a program without a system call, which fails with an errno."""
    return [sys.executable, "-c", _REFUSE, str(NUMBERS[call]), str(error), *argv]
