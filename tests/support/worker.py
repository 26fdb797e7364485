"""A worker that writes down its environment and obeys orders.

It writes notes, a line of JSON each, into the named pipe `$NODE_DIRECTORY/notes`, and reads
its orders from the named pipe `$NODE_DIRECTORY/<pid>`: `exit CODE`, `raise TEXT`, `connect`
(to the master address; the answer is the outcome), `count` (at the store there, in torch's
protocol; the answer is the sum), `pending` (the answer is the pending change of the
membership), `exclude REASON` and `progress STEP` (reports to the launcher), `ignore_sigterm`
(from now on) and `collective PATH` (connect ranks 0 and 1, then fail when the other one ends).
"""

import json
import os
import signal
import socket
import struct
import sys
import time

NUMBERS = (
    "RANK",
    "LOCAL_RANK",
    "ROLE_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "MASTER_PORT",
)
TEXTS = ("ROLE_NAME", "MASTER_ADDR")

directory = os.environ["NODE_DIRECTORY"]
environment = {
    "node": os.environ["NODE_NAME"],
    "pid": os.getpid(),
    "restart_count": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
    "max_restarts": int(os.environ["TORCHELASTIC_MAX_RESTARTS"]),
    "run_id": os.environ["TORCHELASTIC_RUN_ID"],
    "error_file": os.environ["TORCHELASTIC_ERROR_FILE"],
    **{name.lower(): int(os.environ[name]) for name in NUMBERS},
    **{name.lower(): os.environ[name] for name in TEXTS},
}
notes = os.open(f"{directory}/notes", os.O_WRONLY)


def note(what: str, text: str = "") -> None:
    line = json.dumps({"what": what, "text": text, "time": time.monotonic(), **environment})
    os.write(notes, line.encode() + b"\n")


def on_sigterm(number: int, frame: object) -> None:
    note("signal", signal.Signals(number).name)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def connect() -> str:
    master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.create_connection(master, timeout=10).close()
    except OSError as error:
        return f"failed: {error}"
    return "connected"


def count() -> str:
    """Add 1 to a key, as torch's clients do."""
    master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with socket.create_connection(master, timeout=20) as peer:
        peer.sendall(struct.pack("<BI", 0, 0x3C85F7CE))
        peer.sendall(struct.pack("<BQ", 4, 6) + b"/count" + struct.pack("<q", 1))
        answer = b""
        while len(answer) < 8:
            data = peer.recv(8)
            if not data:
                return "closed"
            answer += data
        return str(struct.unpack("<q", answer)[0])


def pending() -> str:
    from elastic_aio.worker import pending_change

    change = pending_change()
    return "none" if change is None else f"{change.reason} in {change.deadline - time.time()}"


def agree() -> str:
    from elastic_aio.worker import agree_to_change

    return str(agree_to_change())


def exclude(reason: str) -> str:
    from elastic_aio.worker import exclude_node

    return str(exclude_node(reason))


def progress(step: str) -> str:
    from elastic_aio.worker import progress

    return str(progress(step))


def collective(path: str) -> None:
    """Wait for the other rank for ever, and fail when it ends, as a collective call does."""
    if environment["rank"] == 0:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            note("answer", "listening")
            peer, _ = listener.accept()
    else:
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(path)
        note("answer", "connected")
    peer.recv(1)
    os._exit(1)


def obey(word: str, rest: str) -> None:
    match word:
        case "exit":
            os._exit(int(rest))
        case "raise":
            raise ValueError(rest)
        case "connect":
            note("answer", connect())
        case "count":
            note("answer", count())
        case "pending":
            note("answer", pending())
        case "agree":
            note("answer", agree())
        case "exclude":
            note("answer", exclude(rest))
        case "progress":
            note("answer", progress(rest))
        case "collective":
            collective(rest)
        case "ignore_sigterm":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            note("answer", "ignore_sigterm")


if __name__ == "__main__":
    orders = f"{directory}/{os.getpid()}"
    if os.path.exists(orders):  # of a process that had the same pid
        os.unlink(orders)
    os.mkfifo(orders)
    signal.signal(signal.SIGTERM, on_sigterm)
    # For writing too, so that there is never an end to read.
    with open(os.open(orders, os.O_RDWR), "rb", buffering=0) as file:
        note("started")
        for line in file:
            word, _, rest = line.decode().strip().partition(" ")
            obey(word, rest)
    sys.exit("no more orders")
