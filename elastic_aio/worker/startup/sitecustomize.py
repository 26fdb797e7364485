"""Lets a script record the exception that ends it, and offer its stacks, by itself.

A worker whose stderr is a terminal, or that has deadlines, starts with this directory in front of
PYTHONPATH, so that `site` imports this module before the script.  The module first undoes that: the
script finds the variable, `sys.path` and `sys.modules` as without it, and so do the processes that
it starts; a `sitecustomize` of its own is imported in this one's place.

`sys.excepthook` stays as it is, since a script may look at it.  The interpreter itself stores an
exception that nothing has caught (`sys.last_value`) before it ends: an exit hook, which is the last
one to run, writes that to the error file.  Others store exceptions there that they have caught
(pytest, `code`): those have no frame of the script's module, where an exception that nothing
catches ends.

The interpreter may be any, also one without this package: nothing here is new, and a problem leaves
no more than the error file out.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_OWN = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_OWN)))


def _undo() -> None:
    first, separator, rest = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
    if first == _OWN:
        if separator:
            os.environ["PYTHONPATH"] = rest
        else:
            del os.environ["PYTHONPATH"]
    if _OWN in sys.path:
        sys.path.remove(_OWN)
    sys.path_importer_cache.pop(_OWN, None)
    sys.modules.pop("sitecustomize", None)


def _record_at_exit(path: str) -> None:
    is_loaded = "atexit" in sys.modules
    import atexit

    if not is_loaded:
        del sys.modules["atexit"]
    atexit.register(_make_hook(path, os.getpid()))


def _make_hook(path: str, pid: int) -> "Callable[[], None]":
    def record() -> None:
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        # A fork has inherited the hook.
        if os.getpid() != pid or not isinstance(error, Exception):
            return
        if not _has_ended_main(error):
            return
        sys.path.insert(0, _ROOT)
        try:
            from elastic_aio.worker.recorder import record_end

            record_end(error, path)
        except Exception:  # noqa: BLE001  # another version of Python, a full disk
            pass  # stderr has the exception

    return record


def _has_ended_main(error: Exception) -> bool:
    """Whether an exception has left the main module; without frames it has not run."""
    trace = error.__traceback__
    if trace is None:
        return isinstance(error, SyntaxError)
    code = trace.tb_frame.f_code
    return code.co_name == "<module>" or code.co_filename == "<frozen runpy>"


def _offer_stacks() -> None:
    """Let the launcher read the stacks of this process (see `interpreter.offer_stacks`)."""
    modules, directory = {*sys.modules}, os.path.dirname(_OWN)
    sys.path.insert(0, directory)
    try:
        import interpreter  # type: ignore[import-not-found]  # the package need not be importable

        interpreter.offer_stacks()
    except Exception:  # noqa: BLE001  # another version of Python
        pass  # the launcher sees what the kernel shows
    finally:
        sys.path.remove(directory)
        sys.path_importer_cache.pop(directory, None)
        for name in {*sys.modules} - modules:
            del sys.modules[name]


def _start() -> None:
    _undo()
    if "ELASTIC_AIO_NOTIFY_FD" in os.environ:
        _offer_stacks()
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        _record_at_exit(path)


_start()
# In place of this module.  `site` ignores that there is none.
import sitecustomize  # type: ignore[import-not-found]  # noqa: E402, F401  # the script's own
