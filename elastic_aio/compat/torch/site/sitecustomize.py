"""Installs `elastic_aio.compat.torch` in every Python that `aio-elastic exec` starts.

The directory of this file is first on PYTHONPATH.  A `sitecustomize` that it hides runs first.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys


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


try:
    _run_hidden()
finally:
    _install()
