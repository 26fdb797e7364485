"""Why a worker failed, from its last lines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio import reasons
from elastic_aio.reasons import (
    LOST_PEER,
    REASON_MAX,
    exception_line,
    has_sign_of_lost_peer,
    known_cause,
    plain_lines,
    reason_of,
)

LOST = "ncclRemoteError"
RAISED = """
def raised(error):
    try:
        raise error
    except Exception as caught:
        return caught
"""
SCRIPTS = {
    "one line": ("raise ValueError('x')", "ValueError: x"),
    "no message": ("raise KeyError", "KeyError"),
    "many lines": ("raise ValueError('first\\nsecond\\n  third')", "ValueError: first"),
    "an empty first line": ("raise ValueError('\\n\\n====\\ntext\\n')", "ValueError: text"),
    "a local class": (
        "def f():\n class E(Exception): pass\n raise E('a: b')\nf()",
        "f.<locals>.E: a: b",
    ),
    "a cause": (
        "try:\n 1/0\nexcept Exception as e:\n raise RuntimeError('outer') from e",
        "RuntimeError: outer",
    ),
    "a context": (
        "try:\n 1/0\nexcept Exception:\n raise RuntimeError('outer')",
        "RuntimeError: outer",
    ),
    "a note": ("e = ValueError('x'); e.add_note('a note'); raise e", "ValueError: x"),
    "a group": (
        f"{RAISED}\nraise ExceptionGroup('two', [raised(ValueError('a\\nb')), KeyError('k')])",
        "ExceptionGroup: two (2 sub-exceptions): ValueError: a",
    ),
    "a group never raised": (
        "raise ExceptionGroup('two', [ExceptionGroup('in', [ValueError('a')]), KeyError('k')])",
        "ExceptionGroup: two (2 sub-exceptions): ValueError: a",
    ),
    "nested groups": (
        f"{RAISED}\ninner = raised(ExceptionGroup('in', [raised(ValueError('a'))]))\n"
        "raise ExceptionGroup('out', [inner, raised(KeyError('k'))])",
        "ExceptionGroup: out (2 sub-exceptions): ValueError: a",
    ),
    "a task group": (
        "import asyncio\nasync def bad(): raise OSError(98, 'Address already in use')\n"
        "async def main():\n async with asyncio.TaskGroup() as g: g.create_task(bad())\n"
        "asyncio.run(main())",
        "ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception):"
        " OSError: [Errno 98] Address already in use",
    ),
    "compiled text": ("compile('x = (', 'q', 'exec')", "SyntaxError: '(' was never closed"),
    "an exception of a __del__ at the end": (
        "class A:\n def __del__(self): raise ValueError('no')\na = A()\nraise TypeError('main')",
        "TypeError: main",
    ),
    "a recursion": ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
    "a crash": (
        "import faulthandler; faulthandler.enable(); faulthandler._sigsegv()",
        "Fatal Python error: Segmentation fault",
    ),
}  # fmt: skip
WITHOUT_A_HEADER = {
    "a syntax error": ("import sys\ndef f(:\n  pass", "SyntaxError: invalid syntax"),
    "an indentation": ("if 1:\nx", "IndentationError: expected an indented block"),
    "an exit": ("import sys; sys.exit('no config')", "no config"),
}


def stderr_of(script: str, directory: Path) -> list[str]:
    """Run a script; return what it has written."""
    path = directory / "script.py"
    path.write_text(script)
    ended = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    return plain_lines(ended.stderr)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_exception_of_a_script(name: str, tmp_path: Path) -> None:
    """Also behind the prefixes of launchers and of times."""
    script, expected = SCRIPTS[name]
    lines = stderr_of(script, tmp_path)
    assert exception_line(lines) == expected
    assert reason_of("", ["before", *lines, ""]) == expected
    assert exception_line([f"[rank0]: {line}" for line in lines]) == expected
    stamped = [f"2026-01-02 03:04:{n % 60:02} ERROR {line}" for n, line in enumerate(lines)]
    assert exception_line(stamped) == expected


@pytest.mark.parametrize("name", WITHOUT_A_HEADER)
def test_what_has_no_traceback(name: str, tmp_path: Path) -> None:
    script, expected = WITHOUT_A_HEADER[name]
    assert reason_of("", ["before", *stderr_of(script, tmp_path)]).startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("\n \n", ""),
        ("a\nlast words\n\n", "last words"),
        ("10%\r 90%\r100%\n", "100%"),
        (
            "grep: unrecognized option '--nope'\nUsage: grep [OPTION]... PATTERNS\n"
            "Try 'grep --help' for more information.\n",
            "grep: unrecognized option '--nope'",
        ),
        ("Try 'x --help' for help.\n\nError: No such option\n", "Error: No such option"),
        ("Usage: x\nTry 'x --help' for more.\n", "Try 'x --help' for more."),
        ("\x1b[31mred\x1b[0m \x1b]0;title\x07end", "red end"),
        ("terminate called after throwing\n  what():  bad fit\nAborted", "C++ exception: bad fit"),
        (
            "ERROR:root:failed Traceback (most recent call last):\n  File x\nValueError: y\n",
            "ValueError: y",
        ),
        (
            "Traceback (most recent call last):\n  File x\n12:00 a thread\nValueError: y\n",
            "ValueError: y",
        ),
        (
            "╭──── Traceback (most recent call last) ────╮\n│ x │\n╰───╯\nValueError: y\nmore\n",
            "ValueError: y",
        ),
        ("Traceback (most recent call last):\n  File x\n", "File x"),
    ],
)
def test_other_texts(text: str, expected: str) -> None:
    assert reason_of("", plain_lines(text)) == expected


RUST = (
    "\nthread 'main' (4711) panicked at src/main.rs:3:5:\nno config\n"
    "note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace\n"
)
GO = (
    "panic: no config\n\ngoroutine 1 [running]:\nmain.main()\n\t/x/main.go:3 +0x18\nexit status 2\n"
)
GO_NIL = (
    "panic: runtime error: invalid memory address\n[signal SIGSEGV: segmentation violation]\n\n"
    "goroutine 1 [running]:\nmain.main()\n\t/x/main.go:5 +0x4\n"
)
JAVA = (
    'Exception in thread "main" java.lang.IllegalStateException: x\n\tat Main.main(Main.java:3)\n'
)
JAVA_CAUSE = (
    f"{JAVA}Caused by: java.io.IOException: no config\n\tat Main.a(Main.java:9)\n\t... 1 more\n"
)
JAVA_ELIDED = f"{JAVA}Caused by: java.io.IOException: no config\n\t... 1 more\n"
NODE = (
    "/x/main.js:1\nthrow new Error('no config')\n^\n\nError: no config\n"
    "    at Object.<anonymous> (/x/main.js:1:7)\n    at node:internal/main:23\n\nNode.js v20.1.0\n"
)


@pytest.mark.parametrize(
    ("text", "code", "expected"),
    [
        (RUST, 101, "panicked at src/main.rs:3:5: no config"),
        (RUST, None, "panicked at src/main.rs:3:5: no config"),
        (GO, 2, "panic: no config"),
        (GO_NIL, 2, "panic: runtime error: invalid memory address"),
        ("panic: at the disco\nthe last words\n", 2, "the last words"),
        (JAVA, 1, "java.lang.IllegalStateException: x"),
        (JAVA_CAUSE, 1, "java.io.IOException: no config"),
        (JAVA_CAUSE, 3, "java.io.IOException: no config"),
        (f"{JAVA}the last words\n", 3, "the last words"),
        (NODE, 1, "Error: no config"),
        ("meet\n    at noon\n", 1, "meet"),
        (JAVA_ELIDED, 1, "java.io.IOException: no config"),
    ],
)
def test_exceptions_of_other_languages(text: str, code: int | None, expected: str) -> None:
    lines = plain_lines(text)
    assert reason_of("", lines, code=code, signal=None if code else 6) == expected
    assert has_sign_of_lost_peer(f"{text}{LOST}".replace("no config", LOST).encode())


@pytest.mark.parametrize(
    ("last", "is_reason"),
    [
        ("INFO:root:step 2, loss 0.31", False),
        ("2026-01-02 03:04 INFO no errors, 0 failed", False),
        ("step 2: 31%|███▏ | 31/100 [00:03<00:07, 9.9it/s]", False),
        ("saving the checkpoint", False),
        ("UserWarning: the backend cannot be imported", False),
        ("free(): invalid pointer", True),
        ("free(): double free detected in tcache 2", True),
        ("malloc(): unaligned tcache chunk detected", True),
        ("double free or corruption (fasttop)", True),
        ("*** stack smashing detected ***: terminated", True),
        ("a.out: a.c:3: main: Assertion `x == 1' failed.", True),
        ("terminate called without an active exception", True),
        ("run.sh: line 3: 4711 Killed ./solver", True),
        ("ERROR:root:cannot read shard 3", True),
        ("CUDA error: an illegal memory access was encountered", True),
    ],
)
def test_the_last_line_of_a_process_that_a_signal_ended(last: str, is_reason: bool) -> None:
    """It may be any line of a log; an exit code says that the program has chosen to end."""
    is_log = last.startswith(("INFO", "2026"))
    traceback = ["Traceback (most recent call last):", " F", "E: y"]
    for ended in ({"signal": 9}, {"signal": 6}, {"code": 137}):
        assert reason_of("", ["first", last, ""], **ended) == (last if is_reason else "")
        found = "E: y" if ("signal", 6) in ended.items() else ""
        assert reason_of("", [*traceback, last], **ended) == (last if is_reason else found)
    for chosen in (1, 3, 255):
        assert reason_of("", ["first", last, ""], code=chosen) == ("first" if is_log else last)
    assert reason_of("E: recorded", [last], signal=9) == "E: recorded"


def test_a_recorded_message_may_begin_with_an_empty_line() -> None:
    numpy = "ImportError: \n\nIMPORTANT: PLEASE READ THIS\n\nOriginal error was: libx.so\n"
    assert reason_of(numpy) == "ImportError: IMPORTANT: PLEASE READ THIS"
    assert reason_of("ImportError:\n\n---\n") == "ImportError"
    assert reason_of("\n\nbad batch\nmore") == "bad batch"


def test_a_message_counts_more_than_stderr() -> None:
    """It was recorded by the worker, or is known about it."""
    assert reason_of("ValueError: x\nmore", ["last words"]) == "ValueError: x"
    nested = (
        "ProcessRaisedException: \n\n-- Process 1\nTraceback (most recent call last):\n  F\nE: y"
    )
    assert reason_of(nested) == "E: y"


@given(st.lists(st.text(st.characters(), max_size=40), max_size=12), st.text(max_size=200))
def test_a_reason_is_one_short_line(lines: list[str], message: str) -> None:
    """Whatever the texts are, and it is never empty when they say anything."""
    header = "Traceback (most recent call last):"
    headers = [
        header,
        f"  + Exception Group {header}",
        f"    | {header}",
        f"+{'-' * 9} 1 {'-' * 9}",
    ]
    for stderr in (
        lines,
        [*headers, *lines],
        [*lines, *headers],
        [*headers[:1], *lines, *headers[1:]],
    ):
        reason = reason_of(message, stderr)
        assert len(reason) <= REASON_MAX
        assert reason.isprintable()
        if any(line.strip() and line.strip().isascii() and line.isprintable() for line in stderr):
            assert reason


@given(
    st.sampled_from(["ValueError", "a.b.Error", "f.<locals>.E"]),
    st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=20),
    st.sampled_from(["", "[rank3]: ", "12:59:01 | ", "\t"]),
    st.lists(st.text(st.characters(categories=["L", "N"]), max_size=9), max_size=6),
)
def test_what_follows_an_exception_does_not_hide_it(
    name: str, message: str, prefix: str, rest: list[str]
) -> None:
    """As long as it is no traceback itself."""
    traceback = ["Traceback (most recent call last):", '  File "x", line 1', f"{name}: {message}"]
    lines = [f"{prefix}{line}" for line in [*traceback, *rest]]
    assert exception_line(lines) == f"{name}: {message}"


MESSAGES_OF_SOME_LINES = ("many lines", "an empty first line", "a note", "a group")
MORE_AT_THE_END = ("an exception of a __del__ at the end", "a crash")


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_exit_after_an_exception_that_was_handled(name: str, tmp_path: Path) -> None:
    """The last line says why a program chose to exit, unless it belongs to the traceback."""
    script, expected = SCRIPTS[name]
    lines = stderr_of(script, tmp_path)
    for prefix in ("", "[rank0]: "):
        shown = [f"{prefix}{line}" for line in lines]
        later = [*shown, f"{prefix}the last words"]
        if name not in MORE_AT_THE_END:
            assert reason_of("", later, code=3) == f"{prefix}the last words"
        assert reason_of("", later, code=1) == expected
    if name not in (*MESSAGES_OF_SOME_LINES, *MORE_AT_THE_END):
        assert reason_of("", lines, code=3) == expected
    assert reason_of("E: recorded", [*lines, "the last words"], code=3) == "E: recorded"


@pytest.mark.parametrize(
    ("facts", "cause", "is_proven"),
    [
        ({"signal": 9, "oom_kills": "k"}, "out of memory: k", True),
        ({"code": 137, "oom_kills": "k"}, "out of memory: k", True),
        ({"signal": 9}, "", False),
        ({"code": 1, "oom_kills": "k"}, "", False),
        ({"signal": 7, "is_shm_full": True}, "/dev/shm is full", True),
        ({"code": 135, "is_shm_full": True}, "/dev/shm is full", True),
        ({"signal": 7}, "", False),
        ({"signal": 24}, "the limit of CPU time was exceeded", True),
        ({"signal": 25}, "the limit of file size was exceeded", True),
        ({"code": 127}, "a command was not found", False),
        ({"code": 126}, "a command cannot be executed", False),
        ({"code": 1}, "", False),
        ({}, "", False),
    ],
)
def test_causes_that_a_status_shows(facts: dict[str, object], cause: str, is_proven: bool) -> None:
    assert known_cause("", **facts) == (cause, is_proven)  # type: ignore[arg-type]  # a table


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to", "out of GPU memory"),
        ("RuntimeError: CUDA error: out of memory", "out of GPU memory"),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible"
         " that dataloader's workers are out of shared memory.", "/dev/shm is full"),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/nccl-x'", "/dev/shm is full"),
        ("ValueError: /dev/shm/data has no label", ""),
        ("OSError: [Errno 28] No space left on device", "a disk is full"),
        ("bash: echo: write error: No space left on device", "a disk is full"),
        ("OSError: [Errno 122] Disk quota exceeded", "a disk quota is exceeded"),
        ("ModuleNotFoundError: No module named 'a.b'", "module a.b is missing"),
        ("/usr/bin/python: No module named train", "module train is missing"),
        ("OSError: [Errno 98] Address already in use", "a port is in use"),
        ("Error: listen EADDRINUSE: address already in use :::80", "a port is in use"),
        ("MemoryError", "out of memory"),
        ("OSError: [Errno 12] Cannot allocate memory", "out of memory"),
        ("C++ exception: std::bad_alloc", "out of memory"),
        ("EOFError: EOF when reading a line", "standard input is at its end (--stdin rank0 gives"
         " rank 0 that of the launcher)"),
        ("bdb.BdbQuit", "the debugger has ended, as it does without input (--stdin rank0 gives"
         " rank 0 that of the launcher)"),
        ("EOFError: Ran out of input", ""),
        ("EOFError", ""),
        ("ValueError: x", ""),
    ],
)  # fmt: skip
def test_causes_that_a_text_names(reason: str, cause: str) -> None:
    assert known_cause(reason, code=1) == (cause, False)
    assert known_cause("RuntimeError: failed", ["x", reason], code=1) == (cause, False)


@pytest.mark.parametrize(
    "reason",
    [
        "RuntimeError: [/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:4004.",
        "RuntimeError: [/x/pair.cc:537] Read error [::1]:3: Connection reset by peer.",
        "torch.distributed.DistBackendError: NCCL error in: x.cpp:1970, remote process exited or",
        "C++ exception: Process group watchdog thread terminated: ncclRemoteError: A call failed",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
        "RuntimeError: Connection was likely closed. Did the remote server shutdown or crash?",
        "[W socket.cpp:464] sendBytes failed on SocketImpl(fd=9, remote=[h]:29500): Broken pipe",
    ],
)
def test_a_lost_peer_is_a_cause_of_a_reason_only(reason: str) -> None:
    """Neither of other lines, nor of a signal but the abort of NCCL's watchdog."""
    assert known_cause(reason, code=1) == known_cause(reason, signal=6) == (LOST_PEER, False)
    assert known_cause(reason, ["OSError: [Errno 28] x"], code=1) == (LOST_PEER, False)
    assert known_cause("ValueError: bad batch", [reason], code=1) == ("", False)
    assert known_cause(reason, signal=9) == known_cause(reason, code=137) == ("", False)
    assert known_cause(f"{reason} EADDRINUSE", code=1) == ("a port is in use", False)


@pytest.mark.parametrize(
    "reason",
    [
        "BrokenPipeError: [Errno 32] Broken pipe",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "redis.exceptions.ConnectionError: Connection closed by server.",
        "OSError: [Errno 104] reset",
        "Error: read ECONNRESET",
        "botocore.exceptions.ConnectionClosedError: Connection was closed before we received",
    ],
)
def test_a_connection_that_may_lead_anywhere_is_no_lost_peer(reason: str) -> None:
    """The other end may be a storage, a data base or a helper of the worker."""
    assert known_cause(reason, code=1) == ("", False)


@given(st.from_regex(reasons._LOST_PEER, fullmatch=True), st.text())
def test_each_text_of_a_lost_peer_has_a_sign(text: str, before: str) -> None:
    assert has_sign_of_lost_peer(f"{before}{text}".encode("utf-8", "replace"))
    assert not has_sign_of_lost_peer(b"ConnectionRefusedError: [Errno 111] Connection refused")


_PIECES = [LOST, "text", "\n", "\r", " ", "\t", "\x01", "\x1b[0m", "é", '  File "x", line 1']
_PIECES += ["Traceback (most recent call last):\n", "Fatal Python error: ", "what():", "E: "]


@given(st.lists(st.sampled_from(_PIECES), max_size=60), st.sampled_from([1, 3, None]))
def test_each_reason_that_is_a_lost_peer_has_a_sign(pieces: list[str], code: int | None) -> None:
    """A text without an exception gives a reason in its last line, and only that is searched."""
    text = "".join(pieces)
    if LOST in reason_of("", plain_lines(text), code=code):
        assert has_sign_of_lost_peer(text.encode())


def test_a_connection_that_was_lost_before_other_lines_is_no_reason() -> None:
    assert not has_sign_of_lost_peer(b"ncclRemoteError: tried again\ngone on\n\n")
    assert has_sign_of_lost_peer(b"text\nncclRemoteError\n\x1b[0m\n \n")


@pytest.mark.parametrize(
    "line",
    [
        "[" + " \t" * 100 + "]",
        "[rank1]:" + " " * 100 + "^^^^",
        "<" + "a " * 100,
        "1 " * 100,
        *(text * (60_000 // len(text)) for text in ('  File "x", line 3', "*** [", "code 1 ")),
    ],
)
def test_no_line_takes_more_than_an_instant(line: str) -> None:
    """Where a pattern tried each division of a line, it took minutes to hours."""
    traceback = ["Traceback (most recent call last):", '  File "x", line 1', "ValueError: x"]
    for code, signal in ((1, None), (3, None), (None, 6)):
        assert len(reason_of("", [*traceback, line], code=code, signal=signal)) <= REASON_MAX


@pytest.mark.parametrize("header", ["  + Exception Group Traceback", "| Traceback", "Traceback"])
def test_few_of_many_headers_are_read(header: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may lead through all lines, and reasons are read on the event loop."""
    reads: list[int] = []
    read_end = reasons._read_end

    def count(lines: Sequence[str], index: int) -> str:
        reads.append(index)
        return read_end(lines, index)

    monkeypatch.setattr(reasons, "_read_end", count)
    assert exception_line([f"{header} (most recent call last):"] * 2000) == ""
    assert len(reads) < 200
