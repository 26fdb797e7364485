"""Scripts and modules that run as `__main__` in an interpreter started for other code.

They find the same as under `python -u script.py` and `python -u -m module`: the attributes of
`__main__`, `sys.path[0]`, `sys.argv` and `sys.orig_argv`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from elastic_aio.worker import interpreter
from elastic_aio.worker.context import ERROR_FILE, REAL_LOCAL_RANK


def run_script(path: str, *args: str) -> None:
    """Run a script as `__main__`, like `python path args...`; for `--run-path`.

    `${local_rank}` in the arguments is replaced, as for commands.
    """
    rank = os.environ.get(REAL_LOCAL_RANK) or os.environ.get("LOCAL_RANK", "")
    if not sys.flags.safe_path:
        del sys.path[0]  # the launcher's own script or working directory
    _run([path, *(arg.replace("${local_rank}", rank) for arg in args)])


def run_as_interpreter(arguments: list[str]) -> int:
    """Run a script, or `-m` and a module, as the interpreter does; return the exit code."""
    interpreter.offer_stacks()
    interpreter.survive_notice()
    try:
        _run(arguments)
        return 0
    except BaseException as raised:  # noqa: BLE001  # the script's
        error = raised
    code = interpreter.report_error(error)
    path = os.environ.get(ERROR_FILE)
    if path and isinstance(error, Exception):
        try:
            from elastic_aio.worker.recorder import record_end

            record_end(error, path)
        except (ImportError, OSError):
            pass  # stderr has the exception
    return code


def first_path(arguments: list[str]) -> list[str]:
    """Return the entry that the interpreter puts in front of `sys.path` for a script or module."""
    is_module = arguments[0] == "-m"
    path = _absolute("" if is_module else arguments[0])
    if not is_module and _has_importer(path):
        return [path]  # with PYTHONSAFEPATH too
    if sys.flags.safe_path or not os.path.isabs(path):
        return []
    return [path if is_module else os.path.dirname(os.path.realpath(path))]


def _absolute(path: str) -> str:
    # Not `abspath`, which also removes "..": another file, if that follows a link.
    if os.path.isabs(path):
        return path
    try:
        return os.path.join(os.getcwd(), path).removesuffix("/")
    except FileNotFoundError:  # the working directory was deleted
        return path


def _has_importer(path: str) -> bool:
    """Return whether a script is a directory or an archive, which has a `__main__` module."""
    for hook in sys.path_hooks:
        try:
            hook(path)
        except ImportError:
            continue
        return True
    return False


def _run(arguments: list[str]) -> None:
    sys.orig_argv[:] = [sys.orig_argv[0], "-u", *arguments]
    sys.path[:0] = first_path(arguments)
    main: Any = type(sys)("__main__")
    main.__builtins__ = sys.modules["builtins"]
    main.__annotations__ = {}
    sys.modules["__main__"] = main
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        _run_module(arguments[1], alters_argv=True)
        return
    sys.argv[:] = arguments
    path = _absolute(arguments[0])
    if _has_importer(path):
        _run_module("__main__", alters_argv=False)
    else:
        _run_file(path, main)


def _run_module(name: str, *, alters_argv: bool) -> None:
    import runpy

    # The interpreter's own function; `run_module` would keep another `__main__`.
    runpy._run_module_as_main(name, alters_argv)  # type: ignore[attr-defined]  # as explained


def _run_file(path: str, main: Any) -> None:
    from importlib.machinery import SourceFileLoader, SourcelessFileLoader

    is_compiled = path.endswith(".pyc")
    loader = (SourcelessFileLoader if is_compiled else SourceFileLoader)("__main__", path)
    main.__file__ = path
    main.__cached__ = None
    main.__loader__ = loader
    if is_compiled:
        code: Any = loader.get_code("__main__")
    else:
        code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)
