"""Installs `elastic_aio.compat.torch` in every Python that `aio-elastic exec` starts.

The directory of this file is first on PYTHONPATH.  A `sitecustomize` that it hides runs first.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import os
import sys

_VARIABLE = "ELASTIC_AIO_EXEC"


def _run_hidden() -> None:
    """Run the next `sitecustomize` on the path, as Python would have done."""
    here = os.path.dirname(os.path.abspath(__file__))
    path = [entry for entry in sys.path if os.path.abspath(entry) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _install() -> None:
    try:
        from elastic_aio.compat.torch.installation import install
    except ImportError:
        return  # another Python, which does not have this package
    install(is_quiet=True, control=True)
    # Of the program itself, which has replaced `aio-elastic exec`: not of what it starts.
    if os.environ.get(_VARIABLE) == str(os.getpid()):
        del os.environ[_VARIABLE]
        program = " ".join(sys.orig_argv[:3]).partition("\n")[0]
        atexit.register(_report, program, os.getpid())


def _report(program: str, pid: int) -> None:
    from elastic_aio.compat.torch.installation import report_unused

    if os.getpid() == pid:  # not in a fork
        report_unused(program)


try:
    _run_hidden()
finally:
    _install()
