"""Functions that workers run; they import this module, so it imports little."""

from __future__ import annotations

import _thread
import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn


def leave_running(*argv: str) -> None:
    """Start a process and leave it behind."""
    subprocess.Popen(argv)


def rank() -> int:
    return int(os.environ["RANK"])


def give(*args: Any) -> Any:
    """Return the arguments."""
    return args


def give_rank() -> int:
    return rank()


def give_after(number: int, value: Any) -> Any:
    """Return a value after a signal to this process, if that has not ended it."""
    os.kill(os.getpid(), number)
    return value


async def give_later(value: Any) -> Any:
    await asyncio.sleep(0)
    return value


async def raise_later() -> NoReturn:
    await asyncio.sleep(0)
    raise ValueError("boom")


async def leave_later(code: int) -> NoReturn:
    await asyncio.sleep(0)
    sys.exit(code)


async def indexed_later(index: int, *args: Any) -> None:
    await asyncio.sleep(0)
    indexed(index, *args)


def put_index(index: int, queue: Any) -> None:
    queue.put(index)


def give_nothing() -> None:
    pass


def give_bytes(size: int) -> bytes:
    return bytes([rank() % 251]) * size


def raise_error(text: str = "boom") -> NoReturn:
    raise ValueError(text)


def raise_and_leave_slowly() -> NoReturn:
    """Rank 0 raises, and then waits for a thread; the others fail as soon as it has raised."""
    if rank() == 0:
        threading.Thread(target=time.sleep, args=(99,)).start()
        raise ValueError("boom")
    own = os.environ["TORCHELASTIC_ERROR_FILE"]
    while not os.path.exists(own.replace(f"error_{rank()}.json", "error_0.json")):
        time.sleep(0.01)
    os._exit(7)


class OddError(Exception):
    """An exception without a pickle and without a text."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __str__(self) -> str:
        raise ZeroDivisionError


class BadNotesError(Exception):
    """An exception that `traceback` cannot format."""

    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]  # that is the mistake
        raise ZeroDivisionError


def raise_bad_notes() -> None:
    """Raise an error that cannot be formatted."""
    raise BadNotesError("text")


def raise_error_or_sleep(text: str) -> None:
    """Raise an error; with an empty text, sleep until a signal ends the process."""
    if text:
        raise_error(text)
    time.sleep(99)


def raise_odd() -> NoReturn:
    raise OddError


class OwnBase(BaseException):
    """A BaseException of the user's."""


def raise_base() -> NoReturn:
    raise OwnBase("deep")


def interrupt() -> NoReturn:
    raise KeyboardInterrupt


def interrupt_from_thread() -> NoReturn:
    """As a watchdog does."""
    threading.Thread(target=_thread.interrupt_main).start()
    while True:
        time.sleep(0.01)


async def interrupt_later() -> None:
    """Get SIGINT in an event loop."""
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(99)


class Interrupting:
    """A value and an argument: SIGINT comes while it is pickled, or unpickled elsewhere."""

    def __init__(self, is_value: bool) -> None:
        self.is_value = is_value

    def __reduce__(self) -> tuple[Any, ...]:
        if self.is_value:
            kill_self(signal.SIGINT)
        return kill_self, (signal.SIGINT,)


def give_interrupting() -> object:
    return Interrupting(is_value=True)


def fork_and_end() -> None:
    """Let a fork leave the function by an error; then die without a result."""
    if (pid := os.fork()) == 0:
        raise_error("of a fork")
    os.waitpid(pid, 0)
    kill_self(signal.SIGKILL)


def leave(*code: Any) -> NoReturn:
    sys.exit(*code)


def leave_hard(code: int) -> NoReturn:
    os._exit(code)


def give_generator() -> Any:
    return (one for one in "")


class CutShort:
    """A value whose pickling ends the process."""

    def __reduce__(self) -> NoReturn:
        os._exit(0)


def give_cut_short() -> Any:
    return [b"x" * 100_000, CutShort()]


class OnlyThere:
    """A value that can be unpickled in a worker only."""

    def __reduce__(self) -> Any:
        return fail_outside_workers, ()


def fail_outside_workers() -> Any:
    if "RANK" not in os.environ:
        raise LookupError("not in a worker")
    return OnlyThere()


def give_only_there() -> Any:
    return OnlyThere()


class Outside:
    """A value whose unpickling outside a worker calls a function of this module."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return call_outside_workers, (self.name,)


def call_outside_workers(name: str) -> Any:
    return Outside(name) if "RANK" in os.environ else globals()[name]()


def give_outside(name: str) -> Any:
    return Outside(name)


RELEASED = threading.Event()
"""Ends `wait_released`."""


def wait_released() -> str:
    RELEASED.wait(60)
    return "released"


def name_thread() -> str:
    return threading.current_thread().name


def say_when_restarted(connection: Any) -> None:
    """Fail in the first attempt; send a text in the next one."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        connection.recv()
        raise_error("the first attempt")
    connection.send("restarted")


def close_and_sleep(connection: Any) -> None:
    connection.close()
    time.sleep(99)


def signal_state() -> tuple[str, ...]:
    """Return the masks of blocked, ignored and handled signals (proc_pid_status(5))."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return tuple(line for line in lines if line.startswith(("SigBlk", "SigIgn", "SigCgt")))


def kill_self(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)


def crash() -> None:
    ctypes.string_at(0)


def fail_after_peers(directory: str) -> int:
    """Fail as rank 1, sleep as any other."""
    if rank() == 1:
        raise_error("I am rank 1")
    time.sleep(60)
    return rank()


def write_everywhere() -> None:
    """Write to both streams, from Python, from C and from a child."""
    print("python out")
    print("python err", file=sys.stderr)
    libc = ctypes.CDLL(None)
    libc.puts(b"C out")
    libc.fflush(None)
    os.write(2, b"descriptor err\n")
    subprocess.run(["sh", "-c", "echo child out; echo child err >&2"], check=True)


def surroundings() -> dict[str, Any]:
    """Return the environment of the worker."""
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
    """Run an event loop, with a child."""

    async def main() -> str:
        process = await asyncio.create_subprocess_exec("true")
        await process.wait()
        await asyncio.sleep(0.001)
        return "looped"

    return asyncio.run(main())


def leave_grandchild_holding() -> int:
    """Return at once, while a child holds all descriptors."""
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


def note_and_sleep(directory: str) -> None:
    with open(f"{directory}/.{rank()}", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{directory}/.{rank()}", f"{directory}/{rank()}")
    time.sleep(99)


def indexed(index: int, *args: Any) -> None:
    """Note the index and the arguments."""
    directory, *rest = args
    with open(f"{directory}/{index}", "w") as file:
        file.write(repr((index, rest)))


def indexed_end(index: int, ending: str, *args: Any) -> None:
    """End the process of index 1 by `ending`; sleep in the others."""
    if index != 1:
        time.sleep(99)
    {
        "raise": raise_error,
        "exit": lambda: leave(3),
        "text": lambda: leave("said"),
        "signal": lambda: kill_self(signal.SIGTERM),
        "unknown": lambda: kill_self(40),
        "base": raise_base,
    }[ending]()


def indexed_interrupt(index: int) -> None:
    raise KeyboardInterrupt


def indexed_generator(index: int) -> Any:
    return give_generator()


def indexed_ignoring_sigterm(index: int, directory: str, seconds: float) -> None:
    """Ignore SIGTERM; the process of index 0 fails once the other is ready."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if index:
        with open(f"{directory}/ready", "w"):
            pass
        time.sleep(seconds)
        with open(f"{directory}/done", "w"):
            pass
        return
    while not os.path.exists(f"{directory}/ready"):
        time.sleep(0.01)
    leave(2)


def indexed_sleep(index: int, seconds: float) -> None:
    time.sleep(seconds * index)


def indexed_polite(index: int, directory: str) -> None:
    """Note the process id; on SIGTERM or SIGINT note the index, and succeed."""

    def stop(number: int, frame: object) -> None:
        with open(f"{directory}/stopped", "a") as file:
            file.write(f"{index}\n")
        leave(0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    indexed_wait(index, directory)


def indexed_wait(index: int, directory: str) -> None:
    """Note the process id, and wait for a signal."""
    with open(f"{directory}/.{index}", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{directory}/.{index}", f"{directory}/{index}")
    signal.pause()


def indexed_daemon(index: int, directory: str) -> None:
    """Note whether this process is a daemon of multiprocessing."""
    from multiprocessing import current_process

    with open(f"{directory}/{index}", "w") as file:
        file.write(str(current_process().daemon))


def report(*args: Any) -> Any:
    """Return the arguments and the environment of a group's worker."""
    print("out", *args)
    return args, os.environ.get("OWN"), os.environ.get("RANK")


class Exits:
    """A value, or the argument of an exit, whose methods exit."""

    def __reduce__(self) -> NoReturn:
        sys.exit(0)

    __str__ = __repr__ = __reduce__


class ExitsError(Exception):
    """An exception whose text exits."""

    def __str__(self) -> str:
        sys.exit(0)


class ExitsThere:
    """An argument whose unpickling exits a worker."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, (0,)


def give_exiting() -> object:
    return Exits()


def leave_with_exiting() -> NoReturn:
    sys.exit(Exits())  # type: ignore[arg-type]  # what is tested


def raise_exiting() -> NoReturn:
    raise ExitsError
