"""What a bare interpreter sets in a worker's process before it executes the worker's program.

Only the process itself can do it, or would do it too late from outside: `LISTEN_PID` is its pid,
its sockets have to be the descriptors 3 and following (sd_listen_fds(3)), and every process that it
starts has to be in its cgroup and to run as its user.

The interpreter gets the words of `format_words`.  It writes to the descriptor `report`, which the
exec closes: `READY` before the exec, or why that did not happen, `FIELD ERRNO`.

Each start of a worker waits for it, so it imports only what an interpreter has anyway: `os` and
`__future__` would take a tenth of its time.
"""

import _signal  # type: ignore[import-not-found]  # `signal` would make enums
import posix
import sys
from errno import ENOENT

FIRST = 3
"""The number of the first socket."""
READY = b"."
EXEC = "exec"
"""The field of the report of a program that cannot be executed."""
_END = "--"


def format_words(
    settings: dict[str, str], report: int, program: tuple[str, ...] | list[str]
) -> list[str]:
    """Return the arguments of the interpreter, after its options and the source.

    The settings are, in the order in which they are made: `cgroup` (a directory), `oom_score_adj`,
    `nice`, `groups`, `group`, `user` (numbers, separated by commas), `umask`, `sockets`
    (descriptors, separated by commas), `names` (theirs), and `unset` (a variable).
    """
    return [
        f"report={report}",
        *(f"{name}={text}" for name, text in settings.items()),
        _END,
        *program,
    ]


def parse_words(words: list[str]) -> tuple[dict[str, str], int, list[str]]:
    """Return settings, report and program of `format_words`."""
    end = words.index(_END)
    settings = dict(word.split("=", 1) for word in words[:end])
    return settings, int(settings.pop("report")), words[end + 1 :]


def parse_report(report: bytes) -> tuple[str, int] | None:
    """Return the field that could not be set, and the error number; None if all went well."""
    field, _, number = report.removeprefix(READY).decode("ascii", "replace").partition(" ")
    return (field, int(number)) if number.isdecimal() else None


def apply(settings: dict[str, str]) -> None:
    """Set all in this process; an OSError has the name of the setting as its `filename2`."""
    for name, setter in _SETTERS.items():
        if name in settings:
            try:
                setter(settings[name])
            except OSError as error:
                error.filename2 = name
                raise
    if "sockets" in settings:
        posix.putenv("LISTEN_FDNAMES", settings["names"])
    if "unset" in settings:
        posix.unsetenv(settings["unset"])


def _write(path: str, text: str) -> None:
    descriptor = posix.open(path, posix.O_WRONLY)
    try:
        posix.write(descriptor, text.encode())
    finally:
        posix.close(descriptor)


def _pass_sockets(text: str) -> None:
    sockets = [int(number) for number in text.split(",")]
    end = FIRST + len(sockets)
    copies = [_above(number, end) for number in sockets]
    for number in sockets:
        if number >= end:
            posix.close(number)
    for target, copy in enumerate(copies, FIRST):
        posix.dup2(copy, target)  # which is inheritable
        posix.close(copy)
    posix.putenv("LISTEN_FDS", str(len(sockets)))
    posix.putenv("LISTEN_PID", str(posix.getpid()))


def _above(descriptor: int, least: int) -> int:
    """Return a copy of a descriptor with a number of at least `least`."""
    low = []
    while (copy := posix.dup(descriptor)) < least:
        low.append(copy)
    for number in low:
        posix.close(number)
    return copy


_SETTERS = {
    "cgroup": lambda text: _write(f"{text}/cgroup.procs", "0"),
    "oom_score_adj": lambda text: _write("/proc/self/oom_score_adj", text),
    "nice": lambda text: posix.setpriority(posix.PRIO_PROCESS, 0, int(text)),
    "groups": lambda text: posix.setgroups([int(each) for each in text.split(",") if each]),
    "group": lambda text: posix.setresgid(int(text), int(text), int(text)),
    "user": lambda text: posix.setresuid(int(text), int(text), int(text)),
    "umask": lambda text: posix.umask(int(text)),
    "sockets": _pass_sockets,
}


def _execute(program: list[str]) -> None:
    # Not `os.execvp`: it imports a module, whose file the user may not be allowed to read.
    if "/" in program[0]:
        posix.execv(program[0], program)
    refusal: OSError = FileNotFoundError(ENOENT, "")
    name = program[0].encode(sys.getfilesystemencoding(), "surrogateescape")
    for directory in posix.environ.get(b"PATH", b"/bin:/usr/bin").split(b":"):
        try:
            posix.execv(b"%s/%s" % (directory or b".", name), program)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            refusal = error
    raise refusal


def main() -> None:
    settings, report, program = parse_words(sys.argv[1:])
    posix.set_inheritable(report, False)
    if "sockets" in settings:  # which take the numbers from 3 on
        report = _above(report, FIRST + len(settings["sockets"].split(",")))  # not inherited either
    field = EXEC
    try:
        try:
            apply(settings)
        except OSError as error:
            field = error.filename2
            raise
        for number in (_signal.SIGPIPE, _signal.SIGXFSZ):  # the interpreter ignores them
            _signal.signal(number, _signal.SIG_DFL)
        posix.write(report, READY)
        _execute(program)
    except OSError as error:
        posix.write(report, f"{field} {error.errno}".encode())
        posix._exit(127)


if __name__ == "__main__":
    main()
