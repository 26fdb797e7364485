"""`aio-elastic`: the command line.  docs/reference/exit-codes.md has its exit codes."""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from elastic_aio._version import __version__
from elastic_aio.cli.forced_exit import forced_exit
from elastic_aio.cli.standard_streams import use_standard_streams

_ALL_SIGNALS = signal.valid_signals()

_AS_TORCHRUN = "--torchrun-defaults"

COMMANDS = {
    "up": "elastic_aio.cli.up:main_up",
    "ps": "elastic_aio.cli.local_jobs:main_ps",
    "status": "elastic_aio.cli.local_jobs:main_status",
    "logs": "elastic_aio.cli.logs:main_logs",
    "top": "elastic_aio.cli.top:main_top",
    "why": "elastic_aio.cli.why:main_why",
    "dump": "elastic_aio.cli.local_jobs:main_dump",
    "stop": "elastic_aio.cli.local_jobs:main_stop",
    "restart": "elastic_aio.cli.local_jobs:main_restart",
    "reload": "elastic_aio.cli.local_jobs:main_reload",
    "scale": "elastic_aio.cli.local_jobs:main_scale",
    "preempt": "elastic_aio.cli.local_jobs:main_preempt",
    "signal": "elastic_aio.cli.local_jobs:main_signal",
    "wait": "elastic_aio.cli.local_jobs:main_wait",
    "events": "elastic_aio.cli.events:main_events",
    "jobs": "elastic_aio.cli.store_jobs:main_jobs",
    "gc": "elastic_aio.cli.store_jobs:main_gc",
    "serve": "elastic_aio.cli.serve:main_serve",
    "store": "elastic_aio.cli.store:main_store",
    "exec": "elastic_aio.cli.exec:main_exec",
    "completion": "elastic_aio.cli.completion:main_completion",
    "help": "elastic_aio.cli.guides:main_help",
}
"""The sub-commands beside `run`: functions of their arguments that return the exit code."""

USAGE = """\
usage: aio-elastic run [options] script [arguments of the script]
       aio-elastic up [options] [jobs.toml | Procfile]
       aio-elastic ps [-a] | top | status [JOB] [CHILD] | why [JOB] | dump [JOB] [CHILD]
       aio-elastic logs [-f] [JOB] [RANK | CHILD]
       aio-elastic stop [JOB] [CHILD] | restart [JOB] [CHILD] | reload [JOB] [CHILD]
       aio-elastic scale [JOB] [CHILD] NUMBER
       aio-elastic preempt [JOB] | signal [JOB] SIGNAL | wait [JOB]
       aio-elastic events [JOB] [-f] [--rdzv-endpoint HOST:PORT] [--rdzv-id ID] [--json]
       aio-elastic serve [--http HOST:PORT]
       aio-elastic jobs [--rdzv-endpoint HOST:PORT] [--json]
       aio-elastic gc [--rdzv-endpoint HOST:PORT] [--lost] [--dry-run] | gc --host [--dry-run]
       aio-elastic store [--host HOST] [--port PORT] [--max-mib N] [--token-file FILE]
       aio-elastic store ping ENDPOINT
       aio-elastic completion bash|zsh|fish
       aio-elastic exec program [arguments of the program]
       aio-elastic help [PAGE [SECTION] | NAME | COMMAND]
       aio-elastic --version
       aio-torchrun [options] script [arguments of the script]

`aio-elastic run --help` lists the options of a run; they are torchrun's.  JOB is the id of a run
or its beginning, the pid of a launcher, or what the workers run; with one job it can be left out.
status, why, logs and events also take a run that has ended, or a directory with its record.
"""


def entry() -> int:
    """Run `aio-elastic` with the arguments of this process; return the exit code."""
    return _run_to_exit(main)


def entry_torchrun() -> int:
    """Run `aio-torchrun`, whose arguments are torchrun's; return the exit code."""
    return _run_to_exit(main_torchrun)


def entry_launch() -> int:
    return _run_to_exit(main_launch)


def _run_to_exit(main: Callable[[], int]) -> int:
    atexit.register(forced_exit.close)  # first, so that it is called last
    try:
        # The mask is inherited: signals that the parent has blocked could not stop a job.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ALL_SIGNALS)
        use_standard_streams()
        code = main()
        print(end="", flush=True)
    except OSError as error:
        from elastic_aio.cli.options import print_output_error  # for errors only

        code = print_output_error("", error)
    except KeyboardInterrupt:
        # The modules were still being imported, or the sub-command handles no signals.
        code = 128 + signal.SIGINT
        forced_exit.note(signal.SIGINT)
    forced_exit.handle_late()
    # The shutdown collects garbage several times; without this each collection traverses
    # all live objects (10 ms).
    gc.freeze()
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, by default the process's; return the exit code."""
    # Imported here, one sub-command at a time: `elastic_aio.cli.options` must not load the
    # launcher, and a run must not load the store's client.
    from elastic_aio.cli.options import print_error
    from elastic_aio.text import did_you_mean

    arguments = _start(argv)
    match arguments:
        case ["run", *rest]:
            return _run(rest, owns_process=argv is None)
        case ["up", *rest]:
            from elastic_aio.cli.up import main_up

            return main_up(rest, owns_process=argv is None)
        case [name, *rest] if name in COMMANDS:
            module, function = COMMANDS[name].split(":")
            main_command: Callable[[list[str]], int] = getattr(import_module(module), function)
            return main_command(rest)
        case ["--version" | "-V"]:
            print(f"aio-elastic {__version__}")
            return 0
        case ["--help" | "-h"]:
            print(USAGE, end="")
            return 0
        case []:
            return print_error("", "a command is required: aio-elastic run [options] script", 2)
    name = arguments[0]
    *others, last = (repr(known) for known in ("run", *COMMANDS))
    meant = did_you_mean(name, ("run", *COMMANDS, "--help", "--version"))
    if not meant and (name.startswith("-") or os.path.isfile(name)):
        meant = "; did you mean aio-elastic run [options] script?"
    problem = f"must be {', '.join(others)} or {last}{meant}"
    return print_error("", f"command: {problem} (got {name!r})", 2)


def main_torchrun(argv: Sequence[str] | None = None) -> int:
    """Run `aio-torchrun`: `aio-elastic run --torchrun-defaults`; return the exit code."""
    words = [_AS_TORCHRUN, *_start(argv)]
    return _run(words, owns_process=argv is None, prog="aio-torchrun")


def main_launch(argv: Sequence[str] | None = None) -> int:
    """Run `python -m elastic_aio.launch`, as torch.distributed.launch; return the exit code.

    Scripts get `--local-rank=N` as their first argument, except with `--use-env`.
    """
    words, prog = [_AS_TORCHRUN, *_start(argv)], "python -m elastic_aio.launch"
    return _run(words, owns_process=argv is None, prog=prog, is_launch=True)


def _run(
    argv: list[str], *, owns_process: bool, prog: str = "aio-elastic run", is_launch: bool = False
) -> int:
    """Run `aio-elastic run`; the guardian starts while the launcher is being imported."""
    if owns_process:
        gc.disable()  # the modules that are imported are no garbage
    from elastic_aio.cli.options import print_error
    from elastic_aio.cli.run_options import parse_run
    from elastic_aio.process.guardian_process import spawned_early
    from elastic_aio.spec.checks import UsageError

    try:
        request = parse_run(argv, os.environ, prog=prog, is_launch=is_launch)
    except UsageError as error:
        return print_error("run", str(error), 2)
    if request.is_dry_run:
        from elastic_aio.cli.dry_run import main_dry_run

        return main_dry_run(request)
    with spawned_early(request.spec.stop, request.spec.python):
        from elastic_aio.cli.run import main_run

        if owns_process:
            gc.freeze()
            gc.enable()
        return main_run(request, owns_process=owns_process)


def _start(argv: Sequence[str] | None) -> list[str]:
    """Mend what this process has inherited; return its arguments, or those that are given.

    Otherwise the next opened file would become a closed standard stream, and the kernel would
    discard the exit statuses of the workers while SIGCHLD is ignored (wait(2)).
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may know few characters
        sys.stdout.reconfigure(errors="backslashreplace")
    return sys.argv[1:] if argv is None else list(argv)
