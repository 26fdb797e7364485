"""Scripts and modules run as `__main__` inside an interpreter that has begun otherwise."""

from __future__ import annotations

import os
import sys
from typing import Any

__all__ = ["run_as_interpreter", "run_script"]


def run_script(path: str, *args: str) -> None:
    """Run a script as `__main__`, as `python path args...` does; `--run-path` calls this.

    `${local_rank}` in the arguments is replaced, as for commands.
    """
    rank = os.environ.get("LOCAL_RANK", "")
    _run(path, [one.replace("${local_rank}", rank) for one in args])


def run_as_interpreter(words: list[str]) -> int:
    """Do what `python words...` does; return the exit code.

    Args:
        words: a script's path, or `-m` and a module's name, and the arguments.
    """
    try:
        if words[0] == "-m":
            _run_module(words[1], words[2:])
        else:
            _run(words[0], words[1:])
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)  # noqa: T201  # as the interpreter does
        return 1
    except KeyboardInterrupt as error:
        import signal

        sys.excepthook(type(error), error, _below_us(error))
        # So that whoever waits for us sees what has ended us.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:  # noqa: BLE001  # the script's; told as the interpreter does
        sys.excepthook(type(error), error, _below_us(error))
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
    # The interpreter's own entry for `-m`; `run_module` would leave another `__main__`.
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # as said


def _below_us(error: BaseException) -> Any:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace
