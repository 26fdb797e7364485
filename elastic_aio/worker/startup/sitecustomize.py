"""Lets a script write whole lines, survive a notice, record what ends it and offer its stacks.

A script or module starts with this directory in front of PYTHONPATH, so that `site` imports this
module first.  The module undoes that: the script and the processes that it starts find everything
as without it; a `sitecustomize` of its own is imported in this one's place.  A worker whose stderr
is a terminal, or that has deadlines, has ELASTIC_AIO_STARTUP: only such a one records and offers.

An exception that nothing has caught ends the script, but exit hooks and threads may take long.  So
`sys.excepthook` calls the former one, and then notes in the error file that the script has failed,
and when: standard error says why.  The interpreter also stores the exception (`sys.last_value`): an
exit hook, which is the last one to run, writes that to the error file.  Others store exceptions
there that they have caught (pytest, `code`): those have no frame of the script's module, where an
exception that nothing catches ends.

The interpreter may be any, also one without this package: nothing here is new, and a problem leaves
no more than the error file out.
"""

import os
import sys
import time

_OWN = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_OWN)))


def _undo() -> None:
    paths = os.environ.pop("PYTHONPATH", _OWN).split(os.pathsep)
    if _OWN in paths:  # not the first, if a program between has set the variable
        paths.remove(_OWN)
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    if _OWN in sys.path:
        sys.path.remove(_OWN)
    sys.path_importer_cache.pop(_OWN, None)
    sys.modules.pop("sitecustomize", None)


def _record(path: str, pid: int) -> None:
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    # A fork has inherited the hook.
    if os.getpid() != pid or not isinstance(error, Exception) or not _has_ended_main(error):
        return
    sys.path.insert(0, _ROOT)
    try:
        from elastic_aio.worker.recorder import record_end

        record_end(error, path)
    except Exception:  # noqa: BLE001  # another version of Python, a full disk
        pass  # stderr has the exception


def _note_failure(path: str, pid: int) -> None:
    """Note the failure of this process in its error file, once its exception is printed."""
    show = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: object) -> None:
        failed_at = time.time()
        show(kind, error, trace)  # type: ignore[arg-type]
        if os.getpid() != pid or not isinstance(error, Exception) or not _has_ended_main(error):
            return
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            says = '{"message": "", "writer_pid": %d, "writer_time": %.6f}'
            os.write(file, (says % (pid, failed_at)).encode())
            os.close(file)
        except OSError:
            pass  # something has recorded more, or the disk is full

    sys.excepthook = note


def _has_ended_main(error: Exception) -> bool:
    """Whether an exception has left the main module; without frames it has not run."""
    trace = error.__traceback__
    if trace is None:
        return isinstance(error, SyntaxError)
    code = trace.tb_frame.f_code
    return code.co_name == "<module>" or code.co_filename == "<frozen runpy>"


def _start() -> None:
    """Write whole lines; in a watched worker, record at the end and offer the stacks."""
    _undo()
    is_watched = os.environ.pop("ELASTIC_AIO_STARTUP", "")
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    modules, neighbours = {*sys.modules}, os.path.dirname(_OWN)
    sys.path.insert(0, neighbours)
    try:
        import lines  # type: ignore[import-not-found]  # the package need not be importable

        lines.write_lines()
        if error_file:
            _note_failure(error_file, os.getpid())
        if is_watched and error_file:
            import atexit

            atexit.register(_record, error_file, os.getpid())
        if is_watched or "ELASTIC_AIO_NOTICE_SIGNAL" in os.environ:
            import interpreter  # type: ignore[import-not-found]  # likewise

            interpreter.survive_notice()
            if is_watched:
                interpreter.offer_stacks()
    except Exception:  # noqa: BLE001  # another version of Python
        pass  # nothing is buffered; the launcher sees what the kernel shows
    finally:
        sys.path.remove(neighbours)
        sys.path_importer_cache.pop(neighbours, None)
        for name in {*sys.modules} - modules:
            del sys.modules[name]


_start()
# In place of this module.  `site` ignores that there is none.
import sitecustomize  # type: ignore[import-not-found]  # noqa: E402, F401  # the script's own
