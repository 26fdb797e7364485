"""Functions that workers run; imported by them, so it imports little."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any, NoReturn


def rank() -> int:
    return int(os.environ["RANK"])


def give(*args: Any) -> Any:
    """Return the arguments."""
    return args


def give_rank() -> int:
    return rank()


def give_nothing() -> None:
    pass


def give_bytes(size: int) -> bytes:
    return bytes([rank() % 251]) * size


def raise_error(text: str = "boom") -> NoReturn:
    raise ValueError(text)


class OddError(Exception):
    """Cannot be pickled, nor shown."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __str__(self) -> str:
        raise ZeroDivisionError


def raise_odd() -> NoReturn:
    raise OddError


class OwnBase(BaseException):
    """Neither an Exception nor an exit."""


def raise_base() -> NoReturn:
    raise OwnBase("deep")


def interrupt() -> NoReturn:
    raise KeyboardInterrupt


def leave(*code: Any) -> NoReturn:
    sys.exit(*code)


def leave_hard(code: int) -> NoReturn:
    os._exit(code)


def give_generator() -> Any:
    return (one for one in "")


def give_lambda() -> Any:
    return lambda: 1


class CutShort:
    """Ends the process in the middle of being pickled."""

    def __reduce__(self) -> NoReturn:
        os._exit(0)


def give_cut_short() -> Any:
    return [b"x" * 100_000, CutShort()]


class OnlyThere:
    """Can be made in a worker, and not where its value is read."""

    def __reduce__(self) -> Any:
        return fail_outside_workers, ()


def fail_outside_workers() -> Any:
    if "RANK" not in os.environ:
        raise LookupError("not in a worker")
    return OnlyThere()


def give_only_there() -> Any:
    return OnlyThere()


def kill_self(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)


def crash() -> None:
    ctypes.string_at(0)


def fail_after_peers(folder: str) -> int:
    """Rank 1 fails; the others would sleep."""
    if rank() == 1:
        raise_error("I am rank 1")
    time.sleep(60)
    return rank()


def write_everywhere() -> None:
    """Write by Python, by C and by a child, to both streams."""
    print("python out")
    print("python err", file=sys.stderr)
    libc = ctypes.CDLL(None)
    libc.puts(b"C out")
    libc.fflush(None)
    os.write(2, b"descriptor err\n")
    subprocess.run(["sh", "-c", "echo child out; echo child err >&2"], check=True)


def surroundings() -> dict[str, Any]:
    """Return what a worker finds."""
    return {
        "session": os.getsid(0) == os.getpid(),
        "env": dict(os.environ),
        "cwd": os.getcwd(),
        "argv": list(sys.argv),
        "stdin": sys.stdin.read(),
        "main": type(sys.modules["__main__"]).__name__,
        "signals": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    }


def run_a_loop() -> str:
    """Run a loop of one's own, with a child."""

    async def main() -> str:
        process = await asyncio.create_subprocess_exec("true")
        await process.wait()
        await asyncio.sleep(0.001)
        return "looped"

    return asyncio.run(main())


def leave_grandchild_holding() -> int:
    """Return at once while a child holds every descriptor that can be inherited."""
    for name in os.listdir("/proc/self/fd"):
        try:
            os.set_inheritable(int(name), True)
        except OSError:
            continue
    return subprocess.Popen(["sleep", "99"], close_fds=False).pid


def use_queue(queue: Any, event: Any, lock: Any) -> str:
    """Wait for the event and put into the queue under the lock, through a feeder thread."""
    assert event.wait(30)
    with lock:
        queue.put((rank(), b"x" * 100_000))
    return "put"


def fail_once() -> int:
    """Fail on the first attempt."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise_error("first attempt")
    return rank()


def sleep() -> None:
    time.sleep(99)


def note_and_sleep(folder: str) -> None:
    with open(f"{folder}/.{rank()}", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{folder}/.{rank()}", f"{folder}/{rank()}")
    time.sleep(99)


def indexed(index: int, *args: Any) -> None:
    """Note the index and the arguments."""
    folder, *rest = args
    with open(f"{folder}/{index}", "w") as file:
        file.write(repr((index, rest)))


def indexed_end(index: int, how: str, *args: Any) -> None:
    """The process of index 1 ends somehow; the others wait."""
    if index != 1:
        time.sleep(99)
    {
        "raise": raise_error,
        "exit": lambda: leave(3),
        "text": lambda: leave("said"),
        "signal": lambda: kill_self(signal.SIGTERM),
        "unknown": lambda: kill_self(40),
        "base": raise_base,
    }[how]()


def indexed_interrupt(index: int) -> None:
    raise KeyboardInterrupt


def indexed_generator(index: int) -> Any:
    return give_generator()


def indexed_deaf(index: int, folder: str, seconds: float) -> None:
    """Ignore SIGTERM; the process of index 0 fails once the other is ready."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if index:
        with open(f"{folder}/ready", "w"):
            pass
        time.sleep(seconds)
        with open(f"{folder}/done", "w"):
            pass
        return
    while not os.path.exists(f"{folder}/ready"):
        time.sleep(0.01)
    leave(2)


def indexed_sleep(index: int, seconds: float) -> None:
    time.sleep(seconds * index)


def indexed_daemon(index: int, folder: str) -> None:
    """Note whether multiprocessing takes us for a daemon."""
    from multiprocessing import current_process

    with open(f"{folder}/{index}", "w") as file:
        file.write(str(current_process().daemon))


def report(*args: Any) -> Any:
    """Return what a member of a group finds."""
    print("out", *args)
    return args, os.environ.get("OWN"), os.environ.get("RANK")
