"""Kinds of failures, each run for real, and the table of what the console says about them.

`python -m tests.support.failure_kinds` prints the table, and with `--write` replaces it in
`docs/guides/failures.md`; with words, only the kinds whose names have one of them.
"""

# ruff: noqa: E501  # tables, a row in each line
from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from elastic_aio.control.sockets import CONTROL_DIR
from tests.support.cli import CLI, REPOSITORY, Running, bare_environment, run_program, running
from tests.support.sockets import free_port

PAGE = REPOSITORY / "docs/guides/failures.md"
_HEADER = "| kind | what ran | the line, after the rank and the pid |\n|---|---|---|\n"
_TABLE = re.compile(f"{re.escape(_HEADER)}(?:\\|.*\n)*")


class Missing(Exception):
    """This host lacks what a kind needs."""


@dataclass(frozen=True)
class Kind:
    """A failure: `code` is the text of the program, and `ran` what the table says about it."""

    name: str
    code: str
    ran: str = ""
    program: str = "x.py"
    options: Sequence[str] = ()
    needs: Sequence[str] = ()
    build: Sequence[str] = ()
    """A command that makes the program `x` of the code."""
    before: str = ""
    """Shell code that runs before the launcher, in its place."""
    during: Callable[[Running], object] | None = None
    """What happens to the launcher once a worker has written `ready`."""
    env: dict[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """What the table says: `ran`, or else the code on one line."""
        return self.ran or _code("; ".join(self.code.strip().splitlines()))


def python(name: str, code: str, ran: str = "", *options: str, **more: object) -> Kind:
    return Kind(name, code, ran, "x.py", options, **more)  # type: ignore[arg-type]  # as given


def bash(name: str, code: str, ran: str = "", *options: str, **more: object) -> Kind:
    return Kind(name, code, ran, "x.sh", ("--no-python", *options), **more)  # type: ignore[arg-type]  # as given


def built(name: str, program: str, build: str, code: str, ran: str) -> Kind:
    words = build.split()
    return Kind(name, code, ran, program, ("--no-python",), needs=words[:1], build=words)


def said(name: str, text: str, ran: str, code: int | str = 1) -> Kind:
    """Return a program that has written a text of others, and exits or is ended by a signal."""
    end = f"exit {code}" if isinstance(code, int) else f"kill -{code} $$"
    return bash(name, f"cat >&2 << 'E'\n{text}\nE\n{end}", ran)


# ------------------------------------------------------------------------------ the kinds

LOGGED = "import logging, os\nlogging.basicConfig(level=20)\nlogging.info('step 2')\n"
C = "gcc -g -o x x.c"
CPP = "g++ -o x x.cpp"

PYTHON = [
    python("exception", "raise ValueError('bad batch')"),
    python("exception without a message", "raise KeyError"),
    python("chained exception", "try:\n    1 / 0\nexcept Exception as e:\n"
           "    raise RuntimeError('cannot load') from e", "`raise RuntimeError('cannot load') from e`"),
    python("message of several lines", "raise ValueError('first\\nsecond')"),
    python("message that begins with an empty line", "raise ImportError('\\n\\nPLEASE READ THIS')"),
    python("the same, recorded", "from elastic_aio.worker import record\n@record\ndef main():\n"
           "    raise ImportError('\\n\\nPLEASE READ THIS')\nmain()", "the same under `@record`"),
    python("empty message", "raise ValueError('')"),
    python("message that is not ASCII", "raise ValueError('größe 数')"),
    python("huge message", "raise ValueError('x' * 1_000_000)"),
    python("exception group", "raise ExceptionGroup('two', [ValueError('a'), KeyError('b')])"),
    python("exception of a task", "import asyncio\nasync def bad(): raise OSError('no data')\n"
           "async def main():\n    async with asyncio.TaskGroup() as g: g.create_task(bad())\n"
           "asyncio.run(main())", "a task of an `asyncio.TaskGroup` raises"),
    python("exception in a process pool", "from concurrent.futures import ProcessPoolExecutor\n"
           "if __name__ == '__main__':\n    ProcessPoolExecutor(1).submit(int, 'x').result()",
           "`ProcessPoolExecutor(1).submit(int, 'x').result()`"),
    python("failed command", "import subprocess\nsubprocess.run(['false'], check=True)"),
    python("assertion", "assert 1 == 2, 'ranks differ'"),
    python("syntax error", "def f(:"),
    python("import of a missing module", "import nope"),
    python("import of a missing name", "from os import nope"),
    python("missing file", "open('train.csv')"),
    python("permission", "import os\nos.execv('/etc/passwd', ['x'])"),
    python("recursion", "def f(): f()\nf()"),
    python("no memory", "bytearray(1 << 60)"),
    python("full disk", "open('/dev/full', 'w', 1).write('x\\n')"),
    python("no descriptors", "import resource\nresource.setrlimit(7, (9, 9))\n"
           "files = [open('/dev/null') for _ in range(9)]", "9 files with `ulimit -n 9`"),
    python("input", "input('name? ')"),
    python("port in use", "import socket\na = socket.create_server(('', 0))\n"
           "socket.create_server(a.getsockname())", "two servers at one port"),
    python("exit with a text", "import sys\nsys.exit('no config')"),
    python("exit with a code", "import sys\nsys.exit(3)"),
    python("exit with a code after words", "import sys\nprint('no config', file=sys.stderr)\nsys.exit(3)"),
    python("exit with a code after a log", f"{LOGGED}os._exit(7)", "`logging.info('step 2')`, then `os._exit(7)`"),
    python("KeyboardInterrupt", "raise KeyboardInterrupt"),
    python("fatal error of Python", "import ctypes\nctypes.string_at(0)"),
]  # fmt: skip

SIGNALS = [
    python("SIGKILL by another process", f"{LOGGED}os.kill(os.getpid(), 9)", "SIGKILL after a line of the log"),
    python("SIGTERM by another process", f"{LOGGED}os.kill(os.getpid(), 15)", "SIGTERM after a line of the log"),
    bash("segmentation fault", "kill -SEGV $$"),
    python("abort without words", f"{LOGGED}os.abort()", "`os.abort()` after a line of the log"),
    python("the same, without stacks", f"{LOGGED}os.abort()", "the same with an empty `PYTHONFAULTHANDLER`",
           env={"PYTHONFAULTHANDLER": ""}),
    python("CPU time", "import resource\nresource.setrlimit(0, (1, 9))\nwhile True: pass", "a loop with `ulimit -St 1`"),
    bash("file size", "ulimit -f 1\nexec head -c 9999 /dev/zero > $0.out", "9999 bytes with `ulimit -f 1`"),
    python("truncated mapping", "import mmap\nf = open('f', 'w+')\nf.truncate(9)\n"
           "m = mmap.mmap(f.fileno(), 9)\nf.truncate(0)\nm[0]", "a read beyond the end of a file"),
    python("full /dev/shm", "import os, mmap\nf = os.open('/dev/shm/x', os.O_RDWR | os.O_CREAT)\n"
           "os.truncate(f, 1 << 22)\nmmap.mmap(f, 1 << 22).write(b'x' * (1 << 22))",
           "4 MiB into a `/dev/shm` of 1 MiB", needs=["unshare"],
           before="exec unshare -m bash -c 'mount -t tmpfs -o size=1m none /dev/shm; exec \"$@\"' -"),
    python("OOM kill", "b'x' * (1 << 28)", "256 MiB in a control group of 128 MiB",
           before="echo $$ > $GROUP/cgroup.procs; exec", needs=["unshare"]),
    bash("worker killed below a shell", "python3 -c 'import os; os.kill(os.getpid(), 9)'; exit $?",
         "`python3 ...; exit $?`, and the program gets SIGKILL"),
    bash("killed program that a shell names", "sh -c 'kill -9 $$' || exit $?\n", "`sh -c 'kill -9 $$' || exit $?`"),
]  # fmt: skip

COMMANDS = [
    bash("shell with set -e", "set -e\ncat nope.csv\necho done"),
    bash("command that does not exist, in a shell", "exec nope --epochs 3"),
    bash("command that is no program, in a shell", "exec /etc/passwd"),
    bash("error, then exit 1", "echo 'step 1'\necho 'error: no checkpoint in runs/3' >&2\nexit 1"),
    bash("usage error", "grep --nope"),
    Kind("command that does not exist", "", "`--no-python nope`", "nope", ("--no-python",)),
    Kind("script that does not exist", "", "`nope.py`", "nope.py"),
    Kind("program that must not run", "#!/bin/sh\n", "a file of mode 644", "./x", ("--no-python",), before="chmod 644 x; exec"),
    Kind("bad interpreter", "#!/opt/nope/bin/python\n", "a script with `#!/opt/nope/bin/python`", "./x", ("--no-python",), before="chmod 755 x; exec"),
    Kind("no program at all", "\\x7fELF nonsense", "a file of mode 755 with nonsense", "./x", ("--no-python",), before="printf '\\177ELF' > x; chmod 755 x; exec"),
    Kind("module that does not exist", "", "`-m nope`", "nope", ("-m",)),
    python("preload", "import elastic_aio", "`--preload nope`", "--preload", "nope"),
    python("preload that raises", "import bad", "`--preload bad`, and `bad.py` raises", "--preload", "bad",
           before="echo \"raise ValueError('no GPU')\" > bad.py; export PYTHONPATH=$PWD:$PYTHONPATH; exec"),
]  # fmt: skip

LANGUAGES = [
    built("assertion of C", "./x", C, "#include <assert.h>\nint main(void) { assert(1 == 2); }\n", "`assert(1 == 2)`"),
    built("double free", "./x", C, "#include <stdlib.h>\nint main(void) { void *p = malloc(9); free(p); free(p); }\n",
          "`free(p); free(p);`"),
    built("smashed stack", "./x", f"{C} -fstack-protector-all -O0",
          "#include <string.h>\nint main(int n, char **v) { char b[8]; memset(b, n, 64); return b[n]; }\n",
          "64 bytes into an array of 8"),
    built("exception of C++", "./x", CPP, "#include <stdexcept>\nint main() { throw std::runtime_error(\"bad shape\"); }\n",
          "`throw std::runtime_error(\"bad shape\")`"),
    built("exception of C++ without words", "./x", CPP, "int main() { throw 7; }\n", "`throw 7`"),
    built("no memory in C++", "./x", CPP, "#include <new>\nint main() { throw std::bad_alloc(); }\n", "`throw std::bad_alloc()`"),
    built("panic of Rust", "./x", "rustc -o x x.rs", "fn main() { panic!(\"no config\"); }\n", "`panic!(\"no config\")`"),
    built("exception of Java", "java", "javac x.java", "class x { public static void main(String[] a)"
          " { throw new RuntimeException(\"outer\", new java.io.IOException(\"no config\")); } }\n",
          "an exception with a cause"),
    Kind("exception of JavaScript", "throw new Error('no config')", "", "node", ("--no-python",), needs=["node"]),
    said("panic of Go", "panic: no config\n\ngoroutine 1 [running]:\nmain.main()\n\t/x/main.go:3 +0x18\nexit status 2",
         "the text of `panic(\"no config\")`", 2),
]  # fmt: skip

_WATCHDOG = (
    "[rank0]:[E101 10:00:00.1 ProcessGroupNCCL.cpp:632] Watchdog caught collective operation timeout\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    "  what():  [PG ID 0 PG GUID 0 Rank 0] Process group watchdog thread terminated with exception:"
    " [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)"
    " ran for 600000 milliseconds before timing out.\n"
    "Exception raised from checkTimeout at ProcessGroupNCCL.cpp:632 (most recent call first):\n"
    "frame #0: c10::Error::Error(c10::SourceLocation) + 0x96 (0x7f in libc10.so)\n"
)
_TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 3, in <module>\n'

TORCH = [
    said("out of GPU memory", f"{_TRACEBACK}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.",
         "the text of torch"),
    said("illegal access of a GPU", f"{_TRACEBACK}RuntimeError: CUDA error: an illegal memory access was encountered\n"
         "CUDA kernel errors might be asynchronously reported at some other API call.", "the text of torch"),
    said("timeout of NCCL", _WATCHDOG, "the text of the watchdog of NCCL, then SIGABRT", "ABRT"),
    said("lost peer of NCCL", f"{_TRACEBACK}torch.distributed.DistBackendError: NCCL error in: x.cpp:1970, remote process"
         " exited or there was a network error, NCCL version 2.21.5", "the text of torch"),
    said("lost peer of gloo", f"{_TRACEBACK}RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553]"
         " Connection closed by peer [127.0.0.1]:4711", "the text of torch"),
    said("port of the store in use", f"{_TRACEBACK}torch.distributed.DistNetworkError: The server socket has failed to"
         " listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address"
         " already in use", "the text of torch"),
    said("worker of a data loader killed", f"{_TRACEBACK}RuntimeError: DataLoader worker (pid 4711) is killed by signal:"
         " Killed. ", "the text of torch"),
    said("worker of a data loader without shared memory", f"{_TRACEBACK}RuntimeError: DataLoader worker (pid 4711) is"
         " killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to"
         " raise your shared memory limit.", "the text of torch"),
]  # fmt: skip

NODES = (
    "--nnodes",
    "2",
    "--rdzv-backend",
    "c10d",
    "--rdzv-id",
    "x",
    "--rdzv-endpoint",
    "127.0.0.1:PORT",
)
RECORD = "import os, sys, time\nfrom elastic_aio import worker\n"
READY = "print('ready', flush=True)\nimport time\ntime.sleep(99)"
FUNCTIONS = """
import sys
from elastic_aio import JobFailed, LaunchSpec, run
class Odd(Exception):
    def __init__(self, a, b): super().__init__(f"{a} and {b}")
def work():
    BODY
if __name__ == "__main__":
    try:
        run(LaunchSpec(work))
    except JobFailed as error:
        print("attempt 0 failed: " + str(error).partition("failed, ")[2].partition(";")[0], file=sys.stderr)
"""


def second(job: Running) -> int:
    """Return the pid of what runs beside the launcher."""
    return int(Path(f"/proc/{job.pid}/cwd/second").read_text())


def function(name: str, body: str, ran: str = "") -> Kind:
    return Kind(name, FUNCTIONS.replace("BODY", body), ran or f"`{body}` in a function", "fn.py")


JOBS = [
    function("function that raises", "raise ValueError('bad batch')"),
    function("function with an exception that cannot be pickled", "raise Odd(1, 2)"),
    function("function with a result that cannot be pickled", "return lambda: 1"),
    function("function that ends its process", "import os; os._exit(5)"),
    python("no heartbeat", f"{RECORD}worker.heartbeat()\ntime.sleep(99)", "`worker.heartbeat()`, then a sleep",
           "--heartbeat-timeout", "0.5"),
    python("not ready", "import time\ntime.sleep(99)", "a sleep", "--ready-timeout", "0.5"),
    python("no progress", f"{RECORD}worker.progress(3)\nimport threading\nlock = threading.Lock()\nlock.acquire()\n"
           "lock.acquire()", "`worker.progress(3)`, then a deadlock", "--progress-timeout", "0.5"),
    python("expired timer", f"{RECORD}with worker.expires(0.3, 'load'):\n    time.sleep(99)",
           "`worker.expires(0.3, 'load')`, then a sleep", env={"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}),
    python("worker that goes on alone", "import os, time\nif os.environ['RANK'] == '1': time.sleep(99)",
           "rank 0 exits with 0, rank 1 sleeps", "--nproc-per-node", "2", "--exit-skew-timeout", "0.3"),
    python("one of several workers", "import os, time\nif os.environ['RANK'] == '1': raise ValueError('bad batch')\n"
           "time.sleep(99)", "rank 1 raises, rank 0 is stopped", "--nproc-per-node", "2"),
    python("lost peer in a job", "import os, socket, time\nif os.environ['RANK'] == '0':\n    time.sleep(0.5)\n"
           "    raise ValueError('bad batch')\nraise RuntimeError('[gloo/transport/tcp/pair.cc:553] Connection closed by peer')",
           "rank 1 loses rank 0, which then raises", "--nproc-per-node", "2"),
    python("stop by a signal", READY, "SIGTERM to the launcher", during=lambda job: job.send(signal.SIGTERM)),
    python("stop by a user", READY, "`aio-elastic stop`",
           during=lambda job: run_program([*CLI, "stop", str(job.pid)], env={CONTROL_DIR: None})),
    python("too few nodes", "", "one of two nodes comes", *NODES, "--rdzv-conf", "join_timeout=1"),
    python("no store", "", "no node serves the store", *NODES, "--rdzv-conf", "join_timeout=1,read_timeout=1,is_host=0"),
    python("master port in use", "", "`--master-port` of another program", "--nnodes", "2", "--node-rank", "0",
           "--master-addr", "127.0.0.1", "--master-port", "USED"),
    python("lost node", READY, "the launcher of the second node gets SIGKILL", *NODES, "--rdzv-conf",
           "join_timeout=9,replace_timeout=1", before='"$@" > /dev/null 2>&1 & echo $! > second; exec',
           during=lambda job: os.kill(second(job), signal.SIGKILL)),
    python("lost store", READY, "the store gets SIGKILL", "--nnodes", "1:2", *NODES[2:], "--rdzv-conf",
           "is_host=0,heartbeat_timeout=2,store_grace=0,last_call_timeout=1,join_timeout=2,read_timeout=1",
           before=f"{sys.executable} -m elastic_aio store --port PORT 2> /dev/null & echo $! > second; exec",
           during=lambda job: os.kill(second(job), signal.SIGKILL)),
]  # fmt: skip

KINDS = (*PYTHON, *SIGNALS, *COMMANDS, *LANGUAGES, *TORCH, *JOBS)


# ------------------------------------------------------------------------------ to run them


def line_of(kind: Kind, directory: Path) -> str:
    """Run a kind in an empty directory; return the line of the console about it.

    Raises:
        Missing: this host lacks what it needs.
    """
    if lacks := [name for name in kind.needs if shutil.which(name) is None]:
        raise Missing(f"needs {', '.join(lacks)}")
    with ExitStack() as stack:
        command = _prepare(kind, directory, stack)
        env = bare_environment(PYTHONPATH=str(REPOSITORY), COLUMNS="120", **kind.env)
        env |= {
            "HOME": os.environ.get("HOME", "/"),
            "TMPDIR": str(directory),
            "GROUP": _group(kind, stack),
        }
        with running(command, env=env, cwd=directory) as job:
            if kind.during is not None:
                job.wait_out("ready")
                kind.during(job)
            return _plain(job.ended(60).err, directory)


def _prepare(kind: Kind, directory: Path, stack: ExitStack) -> list[str]:
    source = kind.build[-1] if kind.build else "x.js" if kind.program == "node" else kind.program
    source = next((word for word in kind.build if word.startswith("x.")), source)
    if kind.code:
        (directory / source).write_text(kind.code, encoding="utf-8")
    if kind.build:
        made = run_program(kind.build, cwd=directory, seconds=120.0)
        assert made.code == 0, made.err
    used = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
    ports = {"USED": str(used), "PORT": str(free_port())}

    def with_ports(text: str) -> str:
        return re.sub("USED|PORT", lambda match: ports[match[0]], text)

    options = map(with_ports, kind.options)
    words = {"x.sh": ["bash", "x.sh"], "node": ["node", source], "java": ["java", "x"]}
    program = words.get(kind.program, [kind.program])
    command = (
        [sys.executable, "fn.py"] if program == ["fn.py"] else [*CLI, "run", *options, *program]
    )
    before = with_ports(kind.before) or "exec"
    return ["bash", "-c", f'{before} "$@"', "bash", *command]


def _group(kind: Kind, stack: ExitStack) -> str:
    """Return a control group with a limit of memory, if the kind has a use for it."""
    if "$GROUP" not in kind.before:
        return ""
    group = Path(f"/sys/fs/cgroup/memory/elastic_aio-{os.getpid()}")
    try:
        group.mkdir()
        stack.callback(group.rmdir)
        (group / "memory.limit_in_bytes").write_text(str(128 << 20))
    except OSError as error:
        raise Missing(f"needs a control group: {error}") from error
    return str(group)


def _plain(text: str, directory: Path) -> str:
    """Return the line of a console that says why, without what each run has anew."""
    if match := re.search(r"attempt 0 failed: (?:rank \d+ \(pid \d+\): )?(.*)", text):
        line = match[1]
    else:
        lines = [one for one in text.splitlines() if one.startswith("aio-elastic")]
        line = lines[-1].partition(": ")[2] if lines else f"nothing: {text[:500]}"
    for name, short in ((str(directory), "/x"), (sys.executable, "python")):
        line = line.replace(name, short)
    line = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "node-a", line)
    line = re.sub(r"(?<=in use by ).*? \(pid \d+\)", "PROGRAM (pid 4711)", line)
    line = re.sub(r"/\S+(/\w+\.py\))", r"\1", line)
    # Whether the node that is missing has a name depends on who notices its end first.
    line = re.sub(r"(?<= are left)(?: \(node-a.*?\))*; (?:missing: .*?; )?", "; ", line)
    line = line.replace("requested by python elastic_aio ", "requested by python3 aio-elastic ")
    line = re.sub(r"(?<=expired after )[\d.]+", "0.3", re.sub(r"\buid \d+", "uid 1000", line))
    line = re.sub(r"\bpid \d+|\b\d+ (?=Killed )", lambda m: re.sub(r"\d+", "4711", m[0]), line)
    line = re.sub(r"(?<=port )\d{4,5}|(?<=:)\d{5}\b|(?<=', )\d{4,5}", "29500", line)
    return re.sub(r"x{9,}", "xxx", line)


def row_of(kind: Kind, line: str) -> str:
    return f"| {_cell(kind.name)} | {_cell(kind.shown)} | {_cell(_code(line))} |"


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def rows_of_page() -> dict[str, str]:
    """Return the rows of the page by the names of the kinds."""
    match = _TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert match is not None, f"{PAGE} has no table"
    rows = match[0].removeprefix(_HEADER).splitlines()
    return {row.split(" | ")[0].removeprefix("| "): row for row in rows}


def main(words: Iterable[str]) -> None:
    wanted = [word for word in words if word != "--write"]
    rows = {}
    for kind in KINDS:
        if wanted and not any(word in kind.name for word in wanted):
            continue
        with tempfile.TemporaryDirectory() as name:
            try:
                rows[kind.name] = row_of(kind, line_of(kind, Path(name)))
            except Missing as problem:
                print(f"{kind.name}: {problem}", file=sys.stderr)
                continue
        print(rows[kind.name], flush=True)
    if "--write" in words:
        former = rows_of_page()
        kept = [rows.get(kind.name) or former[kind.name] for kind in KINDS]
        table = _HEADER + "".join(f"{row}\n" for row in kept)
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(_TABLE.sub(lambda _: table, page), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
