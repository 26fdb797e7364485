"""torch.distributed.elastic.multiprocessing.errors: error files and `ChildFailedError`.

Texts and formats are torch's, because programs read them.  What differs on purpose: only
`ProcessFailure(...)` fails on an error file that cannot be parsed, and neither a group of processes
nor `record`; files are written atomically; `record` takes `async def` functions too, and passes on
the error file of a `JobFailed` as it does for a `ChildFailedError`.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import socket
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

from elastic_aio.errors import JobFailed
from elastic_aio.outcome import Failure
from elastic_aio.report import block_of, report_of
from elastic_aio.worker.context import ERROR_FILE
from elastic_aio.worker.errorfile import WRITER, render_error_file, write_error_file
from elastic_aio.worker.recorder import called_within, worker_error

__all__ = ["ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"]

logger = logging.getLogger(__name__)

_NOT_AVAILABLE = "<N/A>"
_HINT = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"

Wrapped = TypeVar("Wrapped", bound=Callable[..., Any])


@dataclass
class ProcessFailure:
    """A process that failed, with the content of its error file.

    `message` is the text or the dict of the error file; without one, it says how the process
    ended.  `timestamp` is the error file's time, else the present, in whole Unix seconds.

    Raises:
        Exception: the error file has another format.
    """

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    error_file_data: dict[str, Any] = field(init=False)
    message: Any = field(init=False)
    timestamp: int = field(init=False)
    host: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        self.error_file_data = {"message": "<NONE>"}
        self.message = ""
        if os.path.isfile(self.error_file):
            try:
                with open(self.error_file, encoding="utf-8") as file:
                    self.error_file_data = json.load(file)
                self.message = self.error_file_data["message"]
                self.timestamp = _timestamp(self.error_file_data)
            except Exception:  # any content is possible; logged as torch does, and passed on
                logger.exception("Failed to parse reply file: %s", self.error_file)
                raise
        else:
            self.error_file = _NOT_AVAILABLE
            self.timestamp = int(time.time())
        if not self.message:
            self._describe_exit()

    @classmethod
    def from_failure(cls, failure: Failure) -> ProcessFailure:
        """Return the failure of a worker as torch's; a broken error file is left out."""
        path = failure.error.path if failure.error is not None else ""
        code = failure.status.returncode
        arguments = (failure.local_rank, failure.pid or -1, 255 if code is None else code)
        try:
            made = cls(*arguments, path)
        except Exception:  # noqa: BLE001  # the worker's own format
            made = cls(*arguments, "")
        if made.error_file == _NOT_AVAILABLE:
            made._take(failure)
        # The file's time is in whole seconds, and may be older than the file's modification by
        # the time of the writing.  Another difference says that the file's time is wrong.
        if not 0 <= failure.time - made.timestamp < 2:
            made.timestamp = int(failure.time)
        made.host = failure.host
        return made

    def _take(self, failure: Failure) -> None:
        if failure.error is not None:
            self.error_file_data = json.loads(render_error_file(failure.error))
            self.message = self.error_file_data["message"]
        elif failure.message:
            self.message = failure.message

    def _describe_exit(self) -> None:
        if self.exitcode < 0:
            name = self.signal_name()
            self.message = f"Signal {-self.exitcode} ({name}) received by PID {self.pid}"
        else:
            self.error_file_data["errorTraits"] = {
                "category": "system_terminated_error",
                "retryability": "False",
            }
            self.message = _HINT

    def signal_name(self) -> str:
        """Return the name of the signal that ended the process; else `<N/A>`."""
        try:
            return signal.Signals(-self.exitcode).name if self.exitcode < 0 else _NOT_AVAILABLE
        except ValueError:
            return _NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """Return the local time, such as `2024-01-31_23:59:59`."""
        return datetime.fromtimestamp(self.timestamp).isoformat(sep="_")  # noqa: DTZ006  # torch's


def _timestamp(document: dict[str, Any]) -> int:
    message = document["message"]
    if isinstance(message, str):
        return int(document.get("timestamp", 0))
    return int(message["extraInfo"]["timestamp"])


class ChildFailedError(Exception):
    """Processes have failed; `str()` is torchrun's report.

    `record` passes on the error file of the first failure and raises this error again.
    """

    def __init__(self, name: str, failures: dict[int, ProcessFailure]) -> None:
        """Keep the name of what was run, and the failures by global rank; at least one."""
        self.name = name
        self.failures = failures
        if not failures:
            raise AssertionError
        super().__init__(self.format_msg())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.failures)

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """Return the global rank and the failure with the earliest time."""
        rank = min(self.failures, key=lambda rank: self.failures[rank].timestamp)
        return rank, self.failures[rank]

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        """Return the report; the arguments make its outer lines and the lines between its parts."""
        root, _ = self.get_first_failure()
        local = socket.getfqdn()
        blocks = {
            rank: _block(index, rank, failure, failure.host or local)
            for index, (rank, failure) in enumerate(self.failures.items())
        }
        in_order = [blocks.pop(root), *blocks.values()]
        title = f"{self.name} FAILED"
        return report_of(title, in_order, border=boarder_delim, section=section_delim)


def _block(index: int, rank: int, failure: ProcessFailure, host: str) -> str:
    name = failure.signal_name()
    signal_text = "" if name == _NOT_AVAILABLE else f" ({name})"
    fields = {
        "time": failure.timestamp_isoformat(),
        "host": host,
        "rank": f"{rank} (local_rank: {failure.local_rank})",
        "exitcode": f"{failure.exitcode} (pid: {failure.pid}) {signal_text}",
        "error_file": failure.error_file,
        "traceback": _traceback(failure.message),
    }
    return block_of(index, fields.items())


def _traceback(message: Any) -> str:
    if not isinstance(message, dict):
        return str(message)
    extra = message.get("extraInfo", {})
    text = extra.get("py_callstack", message.get("message", _NOT_AVAILABLE))
    return str(text).replace("\n", "\n  ")


class ErrorHandler:
    """Writes error files; a subclass may override `initialize` and `record_exception`."""

    def _get_error_file_path(self) -> str | None:
        return os.environ.get(ERROR_FILE)

    def initialize(self) -> None:
        """Let a crash print its stack."""
        try:
            faulthandler.enable(all_threads=True)
        except Exception as error:  # noqa: BLE001  # stderr is closed, or any object
            text = f"Unable to enable fault handler. {type(error).__name__}: {error}"
            warnings.warn(text, stacklevel=2)

    def _write_error_file(self, file_path: str, error_msg: str) -> None:
        try:
            with open(file_path, "w", encoding="utf-8") as file:
                file.write(error_msg)
        except Exception as error:  # noqa: BLE001  # reported, as torch does
            text = f"Unable to write error to file. {type(error).__name__}: {error}"
            warnings.warn(text, stacklevel=2)

    def record_exception(self, e: BaseException) -> None:
        """Write the error file of an exception, if `TORCHELASTIC_ERROR_FILE` names one."""
        if path := self._get_error_file_path():
            write_error_file(worker_error(e, path))

    def override_error_code_in_rootcause_data(
        self, rootcause_error_file: str, rootcause_error: dict[str, Any], error_code: int = 0
    ) -> None:
        """Add the exit code to the content of an error file, whose path is for the log."""
        message = rootcause_error.get("message")
        if message is None:
            logger.warning(
                "child error file (%s) does not have field `message`. \n"
                "cannot override error code: %s",
                rootcause_error_file,
                error_code,
            )
        elif isinstance(message, str):
            logger.warning(
                "child error file (%s) has a new message format. \nskipping error code override",
                rootcause_error_file,
            )
        else:
            message["errorCode"] = error_code

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Copy the error file of a child to this process's own, with its exit code but 0.

        Raises:
            OSError: the child's file cannot be read.
            ValueError: it is no JSON.
        """
        with open(rootcause_error_file, encoding="utf-8") as file:
            content = json.load(file)
        if error_code:
            self.override_error_code_in_rootcause_data(rootcause_error_file, content, error_code)
        own = self._get_error_file_path()
        if not own:
            text = "no error file defined for parent, to copy child error file (%s)"
            logger.error(text, rootcause_error_file)
            return
        self._rm(own)
        if WRITER in content:  # not in torch's
            content[WRITER] = os.getpid()
        self._write_error_file(own, json.dumps(content))
        logger.info("dumped error file to parent's %s", own)

    def _rm(self, my_error_file: str) -> None:
        if not os.path.isfile(my_error_file):
            return
        exists = f"{my_error_file} already exists and will be overwritten."
        try:
            with open(my_error_file, encoding="utf-8") as file:
                original = json.dumps(json.load(file), indent=2)
            logger.warning("%s Original contents:\n%s", exists, original)
        except ValueError:
            logger.warning("%s Unable to load original contents:\n", exists)
        os.remove(my_error_file)


def get_error_handler() -> ErrorHandler:
    """Return a new `ErrorHandler`."""
    return ErrorHandler()


def record(fn: Wrapped, error_handler: ErrorHandler | None = None) -> Wrapped:
    """Decorate a main function, so that it records why it failed.

    An Exception is recorded by `error_handler` and raised again; the error file of the first
    failure of a `ChildFailedError` or a `JobFailed` is passed on.  `SystemExit(0)` becomes a return
    of None.  The function may be `async def`.
    """
    return called_within(_Recording(error_handler or get_error_handler()), fn)


class _Recording:
    """Hands an Exception to an `ErrorHandler`, and suppresses `SystemExit(0)`."""

    def __init__(self, handler: ErrorHandler) -> None:
        self._handler = handler

    def __enter__(self) -> None:
        self._handler.initialize()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, ChildFailedError):
            rank, failure = error.get_first_failure()
            self._pass_on(rank, failure)
        elif isinstance(error, JobFailed) and error.root_cause is not None:
            root = error.root_cause
            self._pass_on(root.rank, ProcessFailure.from_failure(root))
        elif isinstance(error, Exception):
            self._handler.record_exception(error)
        return isinstance(error, SystemExit) and error.code == 0

    def _pass_on(self, rank: int, failure: ProcessFailure) -> None:
        if failure.error_file == _NOT_AVAILABLE:
            logger.info(
                "local_rank %s FAILED with no error file."
                " Decorate your entrypoint fn with @record for traceback info."
                " See: https://pytorch.org/docs/stable/elastic/errors.html",
                rank,
            )
            return
        try:
            self._handler.dump_error_file(failure.error_file, failure.exitcode)
        except (OSError, ValueError):  # the error that is being raised goes on
            logger.exception("cannot pass on the error file %s", failure.error_file)
