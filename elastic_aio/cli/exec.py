"""`aio-elastic exec`: run a program whose torchrun, accelerate or Lightning launches jobs here.

::

    aio-elastic exec accelerate launch train.py

The program replaces this process.  An environment variable carries the replacement of torch's
launcher (see `compat.torch.installation`) into every Python that the program starts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

from elastic_aio.cli.options import print_error
from elastic_aio.cli.parser import OptionParser
from elastic_aio.spec.checks import UsageError
from elastic_aio.text import error_reason

_VARIABLE = "PYTHONPATH"
_PID_VARIABLE = "ELASTIC_AIO_EXEC"
_SITE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "compat", "torch", "site")
"""The directory of the `sitecustomize` that installs the replacement."""


def main_exec(argv: Sequence[str]) -> int:
    """Execute a program; return an exit code only where that is impossible.

    2: the arguments are invalid.  126, 127: the program cannot be executed, or found.
    """
    try:
        program = _parser().parse_args(argv).program
        if program[:1] == ["--"]:
            program = program[1:]
        if not program or not program[0]:
            raise UsageError("a program is required: aio-elastic exec program [arguments]")
    except UsageError as error:
        return print_error("exec", str(error), 2)
    paths = [path for path in os.environ.get(_VARIABLE, "").split(os.pathsep) if path]
    os.environ[_VARIABLE] = os.pathsep.join([_SITE, *(path for path in paths if path != _SITE)])
    # The program has this pid: by its end it says if it has launched nothing.
    os.environ[_PID_VARIABLE] = str(os.getpid())
    names = "torch.distributed.run, .launcher or .elastic"
    print_error("exec", f"what {program[0]} launches by {names} runs in elastic_aio", 0)
    if sys.stdout is not None:
        with contextlib.suppress(OSError):
            sys.stdout.flush()  # what a `sitecustomize` has printed
    try:
        os.execvp(program[0], program)
    except OSError as error:
        code = 127 if isinstance(error, FileNotFoundError) else 126
        reason = error_reason(error)
        return print_error("exec", f"cannot run {program[0]}: {reason}", code)


def _parser() -> OptionParser:
    parser = OptionParser(
        prog="aio-elastic exec",
        usage="aio-elastic exec program [arguments of the program]",
        description="Run a program in which torchrun, torch.distributed.run and"
        " torch.distributed.launcher, and so accelerate and Lightning, launch their jobs with"
        " elastic_aio.",
        epilog="Exit codes: the program's; 126 or 127 if it cannot be executed or found,"
        " 2 invalid arguments.",
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help="the program and its arguments")
    return parser
