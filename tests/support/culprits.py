"""Jobs that fail, of which the culprit and the cause are known.

A job is a program for each rank.  `PRELUDE` gives each Python program what real ones use: a
connection between the ranks, a server elsewhere that resets connections, logs.
"""

# ruff: noqa: E501  # tables, a row in each line
from __future__ import annotations

from dataclasses import dataclass, field

from elastic_aio.reasons import LOST_PEER

PRELUDE = """
import logging, os, signal, socket, struct, subprocess, sys, threading, time, traceback, warnings
R = int(os.environ["RANK"])
def peer():
    # A connection between ranks 0 and 1, as of a barrier of the program's own.
    if R == 1:
        server = socket.create_server(("127.0.0.1", 0))
        with open("port.new", "w") as file: file.write(str(server.getsockname()[1]))
        os.rename("port.new", "port")
        return server.accept()[0]
    while not os.path.exists("port"): time.sleep(0.01)
    return socket.create_connection(("127.0.0.1", int(open("port").read())))
def wait(error=EOFError("rank 1 is gone")):
    # Wait for rank 1 for ever, and fail when it ends.
    if not peer().recv(1): raise error
def storage():
    # A connection to a server elsewhere, which resets it.
    server = socket.create_server(("127.0.0.1", 0))
    def serve():
        client = server.accept()[0]
        client.recv(9)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    threading.Thread(target=serve, daemon=True).start()
    return socket.create_connection(server.getsockname())
def logs(): logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
def slow(seconds=1): threading.Thread(target=time.sleep, args=(seconds,)).start()
def say(text): print(text, file=sys.stderr, flush=True)
class AppError(Exception): pass
"""
GLOO = "RuntimeError('[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711')"
NCCL = "RuntimeError('NCCL error in: x.cpp:1970, remote process exited or there was a network error, NCCL version 2.21.5')"


@dataclass(frozen=True)
class Job:
    """A job: the programs by rank, the last one for all further ranks, and what is true of it."""

    name: str
    programs: tuple[str, ...]
    rank: int
    reason: str
    """What the reason begins with, or has after a log's prefix."""
    cause: str = ""
    options: tuple[str, ...] = ()
    shell: bool = False
    extra: dict[str, str] = field(default_factory=dict)


def one(name: str, program: str, reason: str, cause: str = "", *options: str) -> Job:
    return Job(name, (program,), 0, reason, cause, options)


def two(name: str, first: str, second: str, rank: int, reason: str, cause: str = "") -> Job:
    return Job(name, (first, second), rank, reason, cause)


def bash(name: str, program: str, reason: str, cause: str = "") -> Job:
    return Job(name, (program,), 0, reason, cause, shell=True)


HANDLED = "logs()\ntry: open('/nope/cache')\nexcept OSError: logging.exception('no cache yet')\n"
PRINTED = "try: open('/nope/cache')\nexcept OSError: traceback.print_exc()\n"
STEPS = "for step in range(3): logging.info('step %d', step)\n"

# What ends a program, and what only stands in its output.
ONE = (
    one("exception", "raise ValueError('bad batch')", "ValueError: bad batch"),
    one(
        "exception, then an error of an exit hook",
        "logs()\nimport atexit\natexit.register(lambda: logging.error('3 points are lost'))\nraise AppError('bad batch')",
        "AppError: bad batch",
    ),
    one(
        "exception, then a thread fails",
        "import atexit\ndef f(): t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()\natexit.register(f)\nraise AppError('bad batch')",
        "AppError: bad batch",
    ),
    one("exit with words", "sys.exit('no config')", "no config"),
    one("exit 1 without words", "sys.exit(1)", ""),
    one("exit 1 after a log", "logs()\n" + STEPS + "os._exit(1)", ""),
    one(
        "handled, then words",
        HANDLED + STEPS + "sys.exit('loss is NaN, giving up')",
        "loss is NaN, giving up",
    ),
    one(
        "handled, then an error of the log",
        HANDLED + "logging.error('accuracy 0.1 < 0.9'); sys.exit(1)",
        "accuracy 0.1 < 0.9",
    ),
    one(
        "handled, then another exception",
        HANDLED + "raise AppError('bad shard')",
        "AppError: bad shard",
    ),
    one(
        "handled, then an exit without words", HANDLED + STEPS + "sys.exit(1)", "FileNotFoundError"
    ),
    one(
        "handled, then a code of its own and words",
        PRINTED + "say('quota is used up'); sys.exit(3)",
        "quota is used up",
    ),
    one(
        "printed, then a log and words",
        PRINTED + "logs()\n" + STEPS + "sys.exit('dataset is empty')",
        "dataset is empty",
    ),
    one("handled, then killed", HANDLED + STEPS + "os.kill(os.getpid(), 9)", ""),
    one(
        "thread, then words",
        "t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()\nsay('step 1')\nsys.exit('no data in x')",
        "no data in x",
    ),
    one(
        "thread, then an exception",
        "t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()\nraise KeyError('lr')",
        "KeyError: 'lr'",
    ),
    one(
        "thread, which is the end",
        "def f():\n    try: 1 / 0\n    except Exception: traceback.print_exc(); os._exit(1)\nthreading.Thread(target=f).start()",
        "ZeroDivisionError",
    ),
    one(
        "exception, then a warning of torch",
        "import atexit\natexit.register(say, '[rank0]:[W1129 09:10:10.4 ProcessGroupNCCL.cpp:1538] Warning: WARNING: destroy_process_group() was not called')\nraise ValueError('x')",
        "ValueError: x",
    ),
    one(
        "exception, then lines of a tracker",
        "import atexit\natexit.register(say, 'tracker: synced 5 files')\nraise ValueError('x')",
        "ValueError: x",
    ),
    one("exception, then a leak", "raise MemoryError", "MemoryError", "out of memory"),
    one(
        "chained by from",
        "try: open('/dev/full', 'w', 1).write('x\\n')\nexcept OSError as e: raise AppError('cannot save') from e",
        "AppError: cannot save",
        "a disk is full",
    ),
    one(
        "chained in a handler",
        "try: import nope\nexcept ImportError: raise AppError('no kernels')",
        "AppError: no kernels",
        "module nope is missing",
    ),
    one(
        "optional module",
        "say('WARNING[XFORMERS]: some optimizations are off\\nNo module named triton')\nraise ValueError('x')",
        "ValueError: x",
    ),
    one(
        "optional module of a log",
        "logs()\nlogging.warning('No module named triton, slow kernels')\nraise ValueError('x')",
        "ValueError: x",
    ),
    one(
        "port that was handled",
        "say('[W] port 6006: Address already in use, tensorboard takes 6007')\nraise ValueError('x')",
        "ValueError: x",
    ),
    one(
        "port that was handled, in a log of C++",
        "say('I0000 00:00:17.1 http.cc:12] Address already in use, taking 6007')\nsys.exit(1)",
        "",
    ),
    one(
        "warning of Python, then killed",
        "warnings.warn('the cache directory is not writable: No space left on device'); os.kill(os.getpid(), 9)",
        "",
    ),
    one(
        "warning of Python, then exit",
        "warnings.warn('cannot load the extension'); sys.exit(1)",
        "",
    ),
    one(
        "warning as an error",
        "warnings.simplefilter('error'); warnings.warn('deprecated')",
        "UserWarning: deprecated",
    ),
    one(
        "log of ray, then exit",
        "say('2026-11-29 10:37:58,725\\tWARNING setup.py:73 -- Token authentication is disabled.'); sys.exit(1)",
        "",
    ),
    one(
        "log of celery, then killed",
        "say('/x/platforms.py:841: SecurityWarning: superuser privileges: this is\\nabsolutely not recommended!\\n\\nUser information: uid=0\\n\\n  _warn_or_raise_security_error(egid)'); os.kill(os.getpid(), 9)",
        "",
    ),
    one(
        "json log, then words",
        'say(\'{"level": "info", "msg": "cannot find a cache"}\'); sys.exit(\'bad lr\')',
        "bad lr",
    ),
    one(
        "fatal line of a log",
        "say('2026-11-29 10:00:00 CRITICAL app: no quorum'); os._exit(1)",
        "CRITICAL app: no quorum",
    ),
    one("reset by a storage", "c = storage(); c.send(b'GET'); c.recv(9)", "ConnectionResetError"),
    one(
        "reset by a cache",
        "class ConnectionError(Exception): pass\nraise ConnectionError('Connection closed by server.')",
        "ConnectionError: Connection closed by server.",
    ),
    one(
        "pipe of a helper",
        "p = subprocess.Popen(['false'], stdin=subprocess.PIPE); p.wait(); p.stdin.write(b'x' * 9); p.stdin.flush()",
        "BrokenPipeError",
    ),
    one("failed command", "subprocess.run(['false'], check=True)", "subprocess.CalledProcessError"),
    one(
        "segmentation fault",
        "import ctypes; ctypes.string_at(0)",
        "Fatal Python error: Segmentation fault",
    ),
    one(
        "without records",
        "logs()\nlogging.warning('slow disk')\nraise ValueError('x')",
        "ValueError: x",
        "",
        "--no-record",
    ),
)

SHELL = (
    bash(
        "error of a shell, after a handled exception",
        "python3 -c 'import json; json.loads(\"x\")' || echo 'no cache, goes on' >&2\necho 'step 1' >&2\necho 'error: no GPU left' >&2\nexit 1",
        "error: no GPU left",
    ),
    bash(
        "program below a shell",
        "set -e\npython3 -c 'raise ValueError(1)'\necho done",
        "ValueError: 1",
    ),
    bash(
        "program below make",
        "printf 'all:\\n\\t@python3 -c \"raise ValueError(1)\"\\n' > m; make -s -f m",
        "ValueError: 1",
    ),
    bash(
        "full disk of a tool",
        "echo x > /dev/full",
        "x.sh: line 2: echo: write error: No space left on device",
        "a disk is full",
    ),
    bash(
        "command that is missing",
        "nope --epochs 3",
        "x.sh: line 2: nope: command not found",
        "a command was not found",
    ),
    bash(
        "killed below a shell",
        "python3 -c 'import os; os.kill(os.getpid(), 9)'; exit $?",
        "x.sh: line 2",
    ),
    bash("usage", "grep --nope", "grep: unrecognized option '--nope'"),
    bash("warning, then a code of its own", "echo 'warning: no cache' >&2; exit 4", ""),
    bash(
        "error, then a warning",
        "echo 'fatal: no checkpoint' >&2; echo '[W1129 09:10:10.48 socket.cpp:207] [c10d] no name' >&2; exit 1",
        "fatal: no checkpoint",
    ),
)

TWO = (
    two(
        "peer at once",
        "wait()",
        "c = peer()\nraise ValueError('bad batch')",
        1,
        "ValueError: bad batch",
    ),
    two(
        "slow end",
        "wait()",
        "slow()\nwith peer(): raise ValueError('bad batch')",
        1,
        "ValueError: bad batch",
    ),
    two(
        "slow end, reset",
        "wait(ConnectionResetError(104, 'reset'))",
        "slow()\nwith peer(): raise ValueError('bad batch')",
        1,
        "ValueError: bad batch",
    ),
    two(
        "slow end with closing lines",
        f"time.sleep(0.7); raise {GLOO}",
        "import atexit\natexit.register(lambda: [say('uploading'), time.sleep(3)])\nraise ValueError('bad batch')",
        1,
        "ValueError: bad batch",
    ),
    two(
        "slow end, NCCL",
        f"time.sleep(0.7); raise {NCCL}",
        "slow(3)\nraise ValueError('bad batch')",
        1,
        "ValueError: bad batch",
    ),
    two(
        "handled by one, the end of the other",
        "time.sleep(0.5); raise TimeoutError('storage')",
        PRINTED + "for step in range(99): time.sleep(0.1)",
        0,
        "TimeoutError: storage",
    ),
    two(
        "slow end, timeout",
        "peer(); time.sleep(0.7); raise TimeoutError('no answer of rank 1')",
        "slow(3)\nc = peer(); raise ValueError('bad batch')",
        1,
        "ValueError: bad batch",
    ),
    two(
        "slow end of the other",
        "c = peer(); slow(); raise EOFError('end of shard 3')",
        "c = peer()\ntime.sleep(0.3); raise ValueError('bad batch')",
        0,
        "EOFError: end of shard 3",
    ),
    two(
        "reset by a storage, and a peer",
        "wait()",
        "c = peer(); s = storage(); s.send(b'GET'); s.recv(9)",
        1,
        "ConnectionResetError",
    ),
    two(
        "reset by a storage, and words of a peer",
        "wait(AppError('rank 1 is gone'))",
        "c = peer(); s = storage(); s.send(b'GET'); time.sleep(0.1); s.recv(9)",
        1,
        "ConnectionResetError",
    ),
    two(
        "cache, and a peer that waits",
        "time.sleep(1.5); sys.exit(9)",
        "time.sleep(0.3)\nclass ConnectionError(Exception): pass\nraise ConnectionError('Connection closed by server.')",
        1,
        "ConnectionError: Connection closed by server.",
    ),
    two(
        "pipe of a helper, and a watchdog",
        "time.sleep(1.5); say('watchdog: no heartbeat of rank 1'); sys.exit(3)",
        "p = subprocess.Popen(['false'], stdin=subprocess.PIPE); p.wait(); p.stdin.write(b'x' * 9); p.stdin.flush()",
        1,
        "BrokenPipeError",
    ),
    two("killed, and a peer", "wait()", "c = peer(); os.kill(os.getpid(), 9)", 1, ""),
    two(
        "lost peer of gloo",
        f"raise {GLOO}",
        "time.sleep(0.4); raise ValueError('bad batch')",
        1,
        "ValueError: bad batch",
    ),
    two(
        "lost peer of NCCL",
        f"raise {NCCL}",
        "slow(); time.sleep(0.4); raise ValueError('bad batch')",
        1,
        "ValueError: bad batch",
    ),
    two(
        "lost peer alone", f"raise {GLOO}", "time.sleep(9)", 0, "RuntimeError: [/pytorch", LOST_PEER
    ),
    two(
        "handled by the other, long ago",
        "time.sleep(0.5); raise ValueError('bad batch')",
        HANDLED + "time.sleep(9)",
        0,
        "ValueError: bad batch",
    ),
    two(
        "handled by the other, then a peer",
        "c = peer(); time.sleep(0.3); raise ValueError('bad batch')",
        HANDLED + "c = peer()\nif not c.recv(1): raise EOFError('rank 0 is gone')",
        0,
        "ValueError: bad batch",
    ),
    two(
        "stopped with a traceback",
        "time.sleep(0.3); raise ValueError('bad batch')",
        "def stop(*a): raise AppError('stopped')\nsignal.signal(15, stop)\ntime.sleep(9)",
        0,
        "ValueError: bad batch",
    ),
)

JOBS = (*ONE, *SHELL, *TWO)
