"""Why a worker failed, in one line: read from its output and its status.

Pure: texts in, texts out.  `exception_line` knows the layouts of Python (chained tracebacks,
exception groups, syntax errors), of rich, of aborts of the interpreter and of C++, of panics of
Rust and Go, and of stacks of `at` lines (Java, JavaScript).  Lines may have prefixes, such as
torch's `[rank0]: ` or a time, as long as the prefixes of one traceback differ in their digits only.

The order of evidence for one worker (that for several is in `elastic_aio.agent.failures`)::

    evidence                                             says why       names the cause
    ---------------------------------------------------  -------------  ---------------
    its status: the OOM killer's counter, a limit        always         always
    what the worker has recorded, or a missed deadline   always         yes
    an exception that nothing has caught, as noted       always         yes
    an exception at the end of standard error            always         yes
    the last line, of a code from 2 to 127               if it is text  yes
    the last line, after an exception that was handled   if it is text  yes
    the last line, which names itself an error           code 1, signal yes
    an exception above other lines                       code 1, crash  yes
    the last line                                        code 1         yes
    lines of a log below the level of errors, warnings   never          never
    any other line before the reason                     never          never

An exception was handled if a log, a thread or a task has written it, or the log goes on after it.
Its causes are the exceptions that the same traceback names before it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from elastic_aio.text import ESCAPES, one_line

REASON_MAX: Final = 500  # characters

_HEADER = "Traceback (most recent call last):"
_HEADER_START = "Traceback (most recent"
_RICH_HEADER = "Traceback (most recent call last) ─"
_GROUP = "Exception Group "
_CHAINED = "above exception"
# Frames of a traceback that is cut by other output: so many lines of it are skipped.
_FOREIGN_MAX = 20
# Headers without an exception: each may lead through all lines.
_TRIED_MAX = 50

# Frames of Java and JavaScript; the first words of Go, and the lines in which its frames begin.
_AT = ("\tat ", "\t... ", "    at ")
_GO_PANIC = ("panic: ", "fatal error: ")
_GO_LINES = 4

_NAME = r"[^\W\d]\w*(?:\.(?:[^\W\d]\w*|<locals>))*"
_EXCEPTION = rf"{_NAME}(?:: .*|:?)$"

_STDIN: Final = "--stdin rank0 gives rank 0 that of the launcher"
# What a text says about the cause, the most specific first.
KNOWN_TEXTS: Final = (
    (
        r"CUDA out of memory|CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY"
        r"|cudaErrorMemoryAllocation|OutOfMemoryError: (?:CUDA|HIP)",
        "out of GPU memory",
    ),
    (
        r"(?:Errno 28\]|ENOSPC|No space left).*/dev/shm|/dev/shm.*(?:ENOSPC|No space left|is full)"
        r"|out of shared memory|insufficient shared memory|shared memory limit",
        "/dev/shm is full",
    ),
    (r"No module named '?([\w.]+)", "module {} is missing"),
    (r"\[Errno 98\]|EADDRINUSE|[Aa]ddress already in use", "a port is in use"),
    (r"EOFError: EOF when reading a line", f"standard input is at its end ({_STDIN})"),
    (r"\bBdbQuit\b", f"the debugger has ended, as it does without input ({_STDIN})"),
    (r"\[Errno 28\]|ENOSPC|No space left on device", "a disk is full"),
    (r"\[Errno 122\]|EDQUOT|[Dd]isk quota exceeded", "a disk quota is exceeded"),
    (
        r"MemoryError|\[Errno 12\]|ENOMEM|Cannot allocate memory|std::bad_alloc"
        r"|DefaultCPUAllocator: (?:can't|not enough)",
        "out of memory",
    ),
)
LOST_PEER: Final = "the connection to another worker was lost"
"""The known cause of a worker that failed because another one has ended."""
# Said by gloo, by NCCL and by torch's store: the connection of a program may lead anywhere.  Only
# the reason counts: a worker may write it about a connection that matters no more.
_LOST_PEER: Final = (
    r"\.cc:\d+\].*(?:Connection closed by peer|Connection reset by peer|Broken pipe)"
    r"|Connection was likely closed|ncclRemoteError|remote process exited|DistNetworkError"
    r"|(?:NCCL|SocketImpl|TCPStore).*(?:Connection (?:closed|reset)|Broken pipe)"
)
# Each such text has one of these, which are looked for first: that takes microseconds.
_LOST_PEER_SIGNS: Final = (
    b"Connection closed",
    b"likely closed",
    b"Connection reset",
    b"Broken pipe",
    b"ncclRemote",
    b"remote process",
    b"DistNetwork",
)
# Exceptions that the end of another process may cause, and their signs.
_EFFECT: Final = (
    r"(?:\w+\.)*(?:Connection\w*Error|BrokenPipeError|EOFError|IncompleteReadError|\w*Timeout\w*"
    r"|OSError: \[Errno (?:32|104|110)\])(?::|$)"
)
_EFFECT_SIGNS: Final = (b"Connection", b"Pipe", b"EOFError", b"Incomplete", b"Timeout", b"OSError")
# How a log begins a line, by the first letter of its level: in full, as glog and torch do, and in
# logfmt or JSON.  Times, names and brackets stand before it.
_LEVELS: Final = "TRACE|DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|CRITICAL|FATAL|SEVERE|PANIC"
_LEVEL: Final = (
    r"(?:[\d\[<(](?:\S*+\s++){0,5}?|(?:(?=\S*[^\sA-Za-z])\S++\s++){0,4}?)(?:\S*?[|:\[(<])?"
    rf"(?:({_LEVELS})(?=[\s\]):|>\"',/\[-]|$)|((?i:{_LEVELS}))(?=[:\]]))"
    r"|(?:\[rank\d+\]:)?\s*\[?([TDIWEFC])\d{4} \d\d:|\[([TDIWEFC])[ \]]|[\d:. -]+: ([TDIWEFC]) "
    rf"|.*\blevel(?:name)?\"?[=:]\s*\"?((?i:{_LEVELS}))\b"
)
_LEVEL_MAX: Final = 200  # characters of a line in which its level is looked for
_BELOW_ERROR: Final = "TDINW"
_WARNING: Final = r"\S+:\d+: \w*Warning: "  # of Python; a line of the source follows
_WARNING_LINES: Final = 10
# What stands before the traceback of an exception that has not ended the program.
_HANDLED: Final = (
    r"Exception in thread |Task exception was never retrieved|future: <|--- Logging error ---"
)
# Signs of an exception, see `_read_end`.  A text without them says why in its last line.
_EXCEPTION_SIGNS: Final = tuple(
    b"Traceback|Fatal|what()|File| panicked at |goroutine |\tat |\t... |    at |--help".split(b"|")
)
# What a process may write about the signal that ends it: a program logs other lines until then.
_ERROR_LINE: Final = (
    r"(?i)(?!.*(?:\b(?:info|debug)\b|warning)).*(?:error|fatal|panic|abort|assert|terminat|kill"
    r"|corrupt|invalid|fault|fail|alloc\(\):|free\(\):|exception|overflow|exceed|smash|cannot|can't"
    r"|denied|no such|not found|out of)"
)
# A line that names itself an error, and one that says only that another program has failed.
_SAYS_ERROR: Final = r"(?i)(?:[\w./-]+: )*(?:error|fatal|panic)\b ?[:\[(!]"
_OF_PROGRAM: Final = (
    r"(?i).*\b(?:exit(?:ed)?|return(?:ed)?|status|code)\b[^:]*\d\W*$|.*\*\*\* \[.*\] Error \d"
)
_HINT: Final = r"(?i)(?:try|see) .*--help\b"  # by programs of getopt(3), after the error
_CAUSE_LINES: Final = 10  # of a message in which a known cause is looked for
# Lines in which the last one with a text is looked for: others have escape sequences only.
_LAST_LINES: Final = 20
KNOWN_CODES: Final = {
    126: "a command cannot be executed",
    127: "a command was not found",
}
_SIGNALED: Final = 128  # from here on, an exit code is a shell's for a signal
_SIGNALS: Final = 64  # numbers of signals
_SIGABRT, _SIGBUS, _SIGKILL, _SIGXCPU, _SIGXFSZ = 6, 7, 9, 24, 25
_CRASHES: Final = (4, 5, _SIGABRT, _SIGBUS, 8, 11, 31)  # signals by which a program ends itself


def plain_lines(text: str) -> list[str]:
    """Return the lines of a text as a terminal shows them: no colours, the last frames only."""
    lines = text.rstrip("\n").split("\n") if text else []
    return [_plain(line) for line in lines]


def _plain(line: str) -> str:
    line = line.rstrip("\r").rpartition("\r")[2]
    return re.sub(ESCAPES, "", line) if "\x1b" in line else line


def reason_of(
    message: str, stderr: Sequence[str] = (), *, code: int | None = None, signal: int | None = None
) -> str:
    """Return in one line why a worker failed; empty if the texts do not say it.

    `message` is recorded by the worker, or known about it: the exception is in its first line,
    unless it holds a traceback.  `stderr` has the last lines written there.
    """
    return read_reason(message, stderr, code=code, signal=signal)[0]


def read_reason(
    message: str,
    stderr: Sequence[str] = (),
    *,
    code: int | None = None,
    signal: int | None = None,
    is_uncaught: bool = False,
) -> tuple[str, list[str]]:
    """Return what `reason_of` does, and the other lines that may name the cause.

    `is_uncaught`: the worker has noted that nothing has caught an exception.
    """
    lines = plain_lines(message)
    if any(_HEADER in line for line in lines) and (found := exception_line(lines)):
        return one_line(found, REASON_MAX), lines[:_CAUSE_LINES]
    if said := [*filter(_has_text, lines)]:
        is_name = said[0].rstrip().endswith(":")  # and the message begins with an empty line
        text = one_line(" ".join(said[: 1 + is_name]), REASON_MAX)
        is_name = re.fullmatch(f"{_NAME}:", text) is not None  # of an exception without a text
        return text.removesuffix(":") if is_name else text, lines[:_CAUSE_LINES]
    lines = [_plain(line) for line in stderr]
    found, index = _find_exception(lines)
    if found and (is_uncaught or _is_last(lines, index, code, signal)):
        return one_line(found, REASON_MAX), [*_causes(lines, index), *_after(lines, index)]
    if found and not _has_more(lines, index):
        return "", []
    last = _last_text(_without_logs(lines))
    number = _signal_of(code, signal)
    is_killed = number is not None and 0 < number <= _SIGNALS
    return one_line("" if is_killed and not re.match(_ERROR_LINE, last) else last, REASON_MAX), []


def last_words(lines: Sequence[str], *, code: int | None) -> str:
    """Return the exception at the end of stderr, or the line that explains `code`; else empty."""
    found, index = _find_exception(lines)
    if found and not _has_more(lines, index):
        return "" if code is None and _is_handled(lines, index) else found
    return _last_text(_without_logs(lines)) if code is not None and 1 < code < _SIGNALED else ""


def _is_last(lines: Sequence[str], index: int, code: int | None, signal: int | None) -> bool:
    """Whether an exception says why its program ended, and not what follows: see the table."""
    number = _signal_of(code, signal)
    is_killed = number is not None and 0 < number <= _SIGNALS and number not in _CRASHES
    if not _has_more(lines, index):
        return not (is_killed and _is_handled(lines, index))
    last = _last_text(_without_logs(lines[index + 1 :]))[-REASON_MAX:]
    if is_killed or number in _CRASHES:
        return not is_killed and not re.match(_ERROR_LINE, last)
    is_chosen = code is not None and 1 < code < _SIGNALED
    if is_chosen or _is_handled(lines, index):
        return not last or bool(re.match(_OF_PROGRAM, last))
    says_error = _level_of(last) in tuple("ECFSP") or re.match(_SAYS_ERROR, last)
    return not says_error or bool(re.match(_OF_PROGRAM, last))


def _is_handled(lines: Sequence[str], index: int) -> bool:
    """Whether a program has gone on after an exception, as far as its output shows."""
    if _HEADER_START not in lines[index]:
        return False
    before = lines[index - 1] if index else ""
    levels = _level_of(before), _level_of(lines[index])
    if any(level in tuple("WECFS") for level in levels) or re.match(_HANDLED, before):
        return True
    return any(_level_of(line) in tuple("DI") for line in lines[index + 1 :])


def _level_of(line: str) -> str:
    """Return the first letter of the level of a line of a log; empty for another line."""
    match = re.match(_LEVEL, line[:_LEVEL_MAX])
    return next(filter(None, match.groups()))[0].upper() if match else ""


def _without_logs(lines: Sequence[str]) -> list[str]:
    """Leave out what a log says below the level of errors, and warnings of Python."""
    kept: list[str] = []
    start = left = 0
    prefix = ""
    for line in lines:
        if (match := re.search(_WARNING, line[:_LEVEL_MAX])) is not None:
            start, left, prefix = len(kept), _WARNING_LINES, line[: match.start()]
            continue
        left = 0 if _HEADER_START in line else max(0, left - 1)
        if left and line.removeprefix(prefix).startswith("  "):
            del kept[start:]  # the line of the source: what is between belongs to the warning
            left = 0
        elif not (level := _level_of(line)) or level not in _BELOW_ERROR:
            kept.append(line)
    return kept


def is_effect(reason: str) -> bool:
    """Return whether the end of another process may have caused an exception."""
    return re.match(_EFFECT, reason) is not None


def known_cause(
    reason: str,
    output: Sequence[str] = (),
    *,
    code: int | None = None,
    signal: int | None = None,
    oom_kills: str = "",
    is_shm_full: bool = False,
) -> tuple[str, bool]:
    """Return the name of a known cause and whether the status proves it; ("", False) for none.

    `reason` and `output` are from `read_reason`; `code` may be a shell's for a signal.
    `oom_kills` is what the kernel says about processes that it has killed in the time of the
    worker, `is_shm_full` whether /dev/shm has no space left.
    """
    number = _signal_of(code, signal)
    if number == _SIGKILL and oom_kills:
        return f"out of memory: {oom_kills}", True
    if number == _SIGBUS and is_shm_full:
        return "/dev/shm is full", True
    if number in (_SIGXCPU, _SIGXFSZ):
        limit = "CPU time" if number == _SIGXCPU else "file size"
        return f"the limit of {limit} was exceeded", True
    is_lost = may_be_lost_peer(code, signal) and re.search(_LOST_PEER, reason)
    for text in (reason, "" if is_lost else "\n".join(output)):
        for pattern, cause in KNOWN_TEXTS:
            if match := re.search(pattern, text):
                return cause.format(*match.groups()), False
    if is_lost:
        return LOST_PEER, False
    return KNOWN_CODES.get(code if code is not None else -1, ""), False


def compile_patterns() -> None:
    """Compile the patterns that a usual failure needs, which takes milliseconds."""
    lines = [_HEADER, '  File "train.py", line 1, in <module>', "ValueError", "text"]
    known_cause(reason_of("", lines, code=1))


def may_be_lost_peer(code: int | None, signal: int | None) -> bool:
    """Return whether the loss of a peer may be the cause of an exit."""
    # NCCL's watchdog aborts; another signal is a cause of its own.
    return _signal_of(code, signal) in (None, _SIGABRT)


def has_sign_of_lost_peer(written: bytes) -> bool:
    """Return whether the reason that a text gives may be a lost peer: a sign is needed."""
    if written and not any(sign in written for sign in _EXCEPTION_SIGNS):
        written = written[_last_text_at(written) :]
    return bool(written) and any(sign in written for sign in _LOST_PEER_SIGNS)


def has_sign_of_effect(written: bytes) -> bool:
    """Return whether the reason that a text gives may be an effect (see `is_effect`)."""
    return any(sign in written for sign in _EFFECT_SIGNS)


def _last_text_at(written: bytes) -> int:
    """Return where the last line with a text begins, or a position before it."""
    begin = len(written)
    for _ in range(_LAST_LINES):
        begin, end = written.rfind(b"\n", 0, max(begin - 1, 0)) + 1, begin
        line = written[begin:end]
        is_plain = b"\x1b" not in line and b"\r" not in line
        if begin == 0 or (is_plain and any(33 <= byte < 127 for byte in line)):
            return begin
    return 0


def _signal_of(code: int | None, signal: int | None) -> int | None:
    """Return the signal that has ended a worker, or a command of its shell; None for none."""
    return code - 128 if signal is None and code is not None and code > 128 else signal


# ------------------------------------------------------------------ the exception


def _has_more(lines: Sequence[str], index: int) -> bool:
    """Whether other lines follow an exception that was found at a line."""
    if _HEADER_START not in lines[index]:
        has_frames = any(line.startswith(_AT) for line in lines)
        return has_frames and not _last_text(_without_logs(lines)).startswith(("\t", " "))
    start = index
    head = lines[start].partition(_HEADER)[0] if _HEADER in lines[start] else ""
    group = _group_of(lines, start + 1) if head.endswith(("| ", _GROUP)) else None
    if group is not None:
        start, head = group, lines[group].partition(f"  + {_GROUP}")[0]
    prefix = re.compile(re.sub(r"\d+", r"\\d+", re.escape(head)))
    count = 0
    for line in _without_logs(lines[start + 1 :]):
        match = prefix.match(line)
        body = line[match.end() :] if match else line
        count += bool(one_line(body)) and body[0] not in " \t│╰"
    return count > (group is None)


def error_of(lines: Sequence[str]) -> str:
    """Return the exception, or the line about an error, with which a text ends; empty for none."""
    last = _last_text(_without_logs(lines))
    found = last_words(lines, code=None) or (last if re.match(_ERROR_LINE, last) else "")
    return one_line(found, REASON_MAX)


def chained(lines: Sequence[str]) -> list[str]:
    """Return the exceptions that the last traceback of a text names before its own."""
    headers = (n for n in range(len(lines) - 1, -1, -1) if _HEADER in lines[n])
    return _causes(lines, next(headers, 0)) if lines else []


def _causes(lines: Sequence[str], index: int) -> list[str]:
    """Return the exceptions that a traceback at a line names before its own."""
    head = lines[index].partition(_HEADER)[0]
    start = index
    while any(_CHAINED in line for line in lines[max(0, start - 3) : start]):
        above = (n for n in range(start - 3, -1, -1) if _HEADER in lines[n])
        if (first := next(above, None)) is None:
            break
        start = first
    prefix = re.compile(re.sub(r"\d+", r"\\d+", re.escape(head)))
    bodies = (prefix.sub("", line, count=1) for line in lines[start:index])
    return [body for body in bodies if body and body[0] not in " \t"]


def _after(lines: Sequence[str], index: int) -> list[str]:
    """Return the lines of an exception: its frames say nothing about its cause."""
    below = [line for line in _without_logs(lines[index + 1 :]) if not line.startswith(" ")]
    return below[:_CAUSE_LINES]


def exception_line(lines: Sequence[str]) -> str:
    """Return the line of the exception that a text ends with; empty if there is none.

    The last traceback counts.  The line of an exception group is followed by the line of its first
    exception.  `lines` have no escape sequences.
    """
    return _find_exception(lines)[0]


def _find_exception(lines: Sequence[str]) -> tuple[str, int]:
    """Return what `exception_line` does, and the line at which it begins; ("", 0) for none."""
    tried, last = 0, ("", 0)
    for index in range(len(lines) - 1, -1, -1):
        if found := _read_end(lines, index):
            above = index  # of a syntax error in a traceback, to the header
            while above and '  File "' in lines[index] and _HEADER not in lines[above]:
                above -= 1
            at = above if _HEADER in lines[above] else index
            # Threads and logs fail too when an exception ends the program.
            if not (at and re.match(_HANDLED, lines[at - 1])):
                return found, at
            last = last if last[0] else (found, at)
        tried += _HEADER_START in lines[index]
        if tried >= _TRIED_MAX:
            break
    return last


def _read_end(lines: Sequence[str], index: int) -> str:
    """Return the exception that begins at a line; empty if none does."""
    line = lines[index]
    if _HEADER in line:
        head, _, rest = line.partition(_HEADER)
        is_ignored = index > 0 and "Exception ignored " in lines[index - 1]
        return "" if rest.strip() or is_ignored else _read_traceback(lines, index, head)
    if _RICH_HEADER in line:
        return _read_rich(lines, index)
    if "Fatal Python error: " in line:
        return line[line.index("Fatal Python error: ") :]
    if match := re.match(r"\s*what\(\):\s*(.*\S)", line):
        return f"C++ exception: {match[1]}"
    below = lines[index + 1 : index + 1 + _GO_LINES]
    if below and below[0].startswith(_AT) and not line.startswith(_AT):
        return re.sub(r'^(?:Caused by: |Exception in thread ".*?" )', "", line)
    if line.startswith(_GO_PANIC) and any(one.startswith("goroutine ") for one in below):
        return line
    if " panicked at " in line and (match := re.search(r"panicked at \S+:\d+:\d+:$", line)):
        return f"{match[0]} {_first_text(below)}"
    head, is_frame, rest = line.partition('  File "')
    if is_frame and re.match(r'.*", line \d+$', rest):
        return _read_syntax_error(lines, index, head)
    return ""


def _read_traceback(lines: Sequence[str], index: int, head: str) -> str:
    if head.endswith(_GROUP):
        return _read_group(lines, index, head.removesuffix(_GROUP))
    if re.search(r"\| $", head) and (group := _group_of(lines, index)) is not None:
        return _read_end(lines, group)
    found = _after_frames(lines, index + 1, head)
    return found or (_after_frames(lines, index + 1, "") if head else "")


def _read_rich(lines: Sequence[str], index: int) -> str:
    below = range(index + 1, len(lines))
    end = next((number for number in below if lines[number].lstrip().startswith("╰")), None)
    return "" if end is None else _first_text(lines[end + 1 :])


def _read_syntax_error(lines: Sequence[str], index: int, head: str) -> str:
    """Read the error of a script that cannot be compiled, which has no header."""
    for line in lines[index + 1 : index + 5]:
        body = line.removeprefix(head)
        if re.match(r"(?:Syntax|Indentation|Tab)Error: ", body):
            return body
        if not body.startswith("    "):
            break
    return ""


def _after_frames(lines: Sequence[str], start: int, head: str) -> str:
    """Return the first line with a prefix that is no frame, but an exception."""
    prefix = re.compile(re.sub(r"\d+", r"\\d+", re.escape(head)))
    foreign = 0
    for index in range(start, len(lines)):
        match = prefix.match(lines[index])
        body = lines[index][match.end() :] if match else ""
        if match and (not body or body[0] in " \t"):
            continue
        if match and re.match(_EXCEPTION, body):
            return _with_message(lines, index, body, prefix)
        foreign += 1
        if foreign > _FOREIGN_MAX:
            break
    return ""


def _with_message(lines: Sequence[str], index: int, body: str, prefix: re.Pattern[str]) -> str:
    """Add the first words of a message that begins with an empty line."""
    if not body.rstrip().endswith(":"):
        return body
    below = [line[match.end() :] for line in lines[index + 1 :] if (match := prefix.match(line))]
    return f"{body.rstrip()} {_first_text(below)}".rstrip()


def _read_group(lines: Sequence[str], index: int, head: str) -> str:
    if head.endswith("| ") and (outer := _group_of(lines, index)) is not None:
        return _read_end(lines, outer)
    own = _after_frames(lines, index + 1, f"{head.removesuffix('+ ')}| ")
    first = _first_of_group(lines, index + 1)
    return f"{own}: {first}" if own and first else own


def _group_of(lines: Sequence[str], index: int) -> int | None:
    """Return the line at which the outermost group around a line begins."""
    above = range(index - 1, -1, -1)
    return next((n for n in above if f"+ {_GROUP}{_HEADER}" in lines[n]), None)


def _first_of_group(lines: Sequence[str], start: int) -> str:
    """Return the first exception of a group that is no group itself."""
    for index in range(start, len(lines)):
        if not re.search(r"\+-{5,} \d+ -{5,}$", lines[index]):
            continue
        head, _, body = lines[index + 1].rpartition("| ") if index + 1 < len(lines) else ("",) * 3
        if body == _HEADER:
            return _after_frames(lines, index + 2, f"{head}| ")
        if re.match(_EXCEPTION, body) and "ExceptionGroup: " not in body:
            return body  # it was never raised
    return ""


def _first_text(lines: Sequence[str]) -> str:
    return next((line.strip() for line in lines if _has_text(line)), "")


def _has_text(line: str) -> bool:
    return any(map(str.isalnum, line))


def _last_text(lines: Sequence[str]) -> str:
    """Return the last line with more than white space, control characters, and a hint."""
    texts = (line for line in reversed(lines) if one_line(line))
    last = next(texts, "")
    if "--help" not in last or not re.match(_HINT, last):
        return last  # without a pattern to compile
    return next((line for line in texts if not re.match(r"(?i)usage: ", line)), last)


def before_dump(lines: Sequence[str]) -> Sequence[str]:
    """Leave out the stacks of an abort: C++ and libc say why before Python writes them."""
    starts = (n for n, line in enumerate(lines) if line == "Fatal Python error: Aborted")
    return lines[: next(starts, None)]
