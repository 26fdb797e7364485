"""Scripts and modules that run as `__main__` in an interpreter started for other code."""

from __future__ import annotations

import os
import sys
from typing import Any

from elastic_aio.worker.bootstrap import exit_code_of


def run_script(path: str, *args: str) -> None:
    """Run a script as `__main__`, like `python path args...`; for `--run-path`.

    `${local_rank}` in the arguments is replaced, as for commands.
    """
    rank = os.environ.get("LOCAL_RANK", "")
    _run(path, [arg.replace("${local_rank}", rank) for arg in args])


def run_as_interpreter(arguments: list[str]) -> int:
    """Run a script or a module like the interpreter; return the exit code.

    Args:
        arguments: a script's path, or `-m` and a module's name; then its arguments.
    """
    try:
        if arguments[0] == "-m":
            _run_module(arguments[1], arguments[2:])
        else:
            _run(arguments[0], arguments[1:])
    except SystemExit as error:
        return exit_code_of(error)
    except BaseException as error:  # noqa: BLE001  # the script's; printed as the interpreter does
        trace = error.__traceback__
        own_files = (__file__, "<frozen runpy>")
        while trace is not None and trace.tb_frame.f_code.co_filename in own_files:
            trace = trace.tb_next
        sys.excepthook(type(error), error, trace)
        if isinstance(error, KeyboardInterrupt):
            import signal

            # The exit status shall be the signal.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def _run(path: str, args: list[str]) -> None:
    main: Any = type(sys)("__main__")
    sys.argv[:] = [path, *args]
    if os.path.isdir(path) or path.endswith((".zip", ".pyz")):
        import runpy

        runpy.run_path(path, run_name="__main__")
        return
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    sys.modules["__main__"] = main
    main.__file__ = path
    main.__builtins__ = sys.modules["builtins"]
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _run_module(name: str, args: list[str]) -> None:
    import runpy

    sys.path.insert(0, os.getcwd())
    sys.argv[:] = [name, *args]
    sys.modules["__main__"] = type(sys)("__main__")
    # The interpreter's own function for `-m`; `run_module` would keep another `__main__`.
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # as explained
