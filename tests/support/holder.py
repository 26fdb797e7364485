"""A leader with a helper that it needs to finish its work."""

from __future__ import annotations

import sys
from pathlib import Path

# A leader and its helper, which print the signals that they get, the helper with the state of
# the leader.  After SIGTERM the leader waits at a gate if it has one (a named pipe), uses its
# helper and exits; with "all" it waits for the signal of its helper instead.  With "once" it
# ignores all signals after the first.
HOLDER = """
import os, select, signal, sys
kind, gate = sys.argv[1:]
me = os.getpid()
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def handle_signals(handle):
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: handle(signal.Signals(number).name))
    signal.set_wakeup_fd(waker)
    return woken
asks, orders = os.pipe()
replies, answers = os.pipe()
if os.fork() == 0:
    leader = os.pidfd_open(me)
    os.close(orders)
    if kind in ("session", "daemon"):
        os.setsid()
    if kind == "daemon" and os.fork():
        os._exit(0)
    def handle(name):
        say("helper", name, "after" if select.select([leader], [], [], 0)[0] else "before")
        os.write(answers, b"s")
    woken = handle_signals(handle)
    say(os.getpid())
    while os.read(asks, 1):
        os.write(answers, b"!")
    os.read(woken, 1)
    os._exit(0)
os.close(answers)
names = []
def note(name):
    if kind == "once":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    names.append(name)
    say("leader", name)
woken = handle_signals(note)
if kind == "daemon":
    os.wait()
say("ready")
while "SIGTERM" not in names:
    os.read(woken, 1)
if gate:
    open(gate).close()
if kind == "all":
    while os.read(replies, 1) != b"s":
        pass
else:
    for _ in range(3):
        os.write(orders, b"!")
        if os.read(replies, 1) != b"!":
            sys.exit("the helper has gone")
    say("served")
os._exit(7)
"""


def holder(kind: str, gate: Path | None = None) -> list[str]:
    """Return the command of a leader with a helper."""
    return [sys.executable, "-I", "-S", "-c", HOLDER, kind, str(gate or "")]
