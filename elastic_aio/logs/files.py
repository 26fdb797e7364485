"""Making the folders and files that a plan names, and removing what stayed empty."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from elastic_aio.errors import SpecError, SurroundingsError
from elastic_aio.logs.paths import StreamPlan, StreamTarget, WorkerLogs, attempt_folder, run_prefix
from elastic_aio.spec import LogSpec

__all__ = ["RunFolder"]


class RunFolder:
    """The folder of one run on this host; `path` is None when there is none."""

    def __init__(
        self, path: str | None, *, is_temporary: bool = False, has_logs: bool = True
    ) -> None:
        """Take an existing folder; use `make` to get one."""
        self.path = path
        self._has_logs = has_logs
        self._is_temporary = is_temporary
        self._made: list[str] = [] if path is None else [path]

    def __repr__(self) -> str:
        return f"<RunFolder {self.path}{', temporary' if self._is_temporary else ''}>"

    @classmethod
    def make(cls, spec: LogSpec, run_id: str) -> RunFolder:
        """Make a new folder for a run, in the chosen place or among temporary files.

        Without a wish for logs the folder only serves the workers' error files; if
        it cannot be made then, the job goes on without them.

        Raises:
            SpecError: the chosen `log_dir` cannot be used.
            SurroundingsError: no temporary folder can be made, and logs are wanted.
        """
        if spec.is_off:
            return cls(None)
        if spec.log_dir is not None:
            place = os.path.abspath(spec.log_dir)
            try:
                os.makedirs(place, exist_ok=True)
                return cls(tempfile.mkdtemp("", run_prefix(run_id), place))
            except OSError as error:
                said = (error.strerror or str(error)).lower()
                accepted = f"must be a folder that can be written to ({said})"
                raise SpecError("logs.log_dir", spec.log_dir, accepted) from error
        has_logs = not (spec.redirects.is_empty and spec.tee.is_empty)
        try:
            path = tempfile.mkdtemp("", f"elastic_aio_{run_prefix(run_id)}")
        except OSError as error:
            if not has_logs:
                return cls(None)
            raise SurroundingsError(
                f"cannot make a temporary folder for the logs ({error}); choose one with log_dir"
            ) from error
        return cls(path, is_temporary=True, has_logs=has_logs)

    @property
    def announced(self) -> str | None:
        """The folder to tell users about; None while only error files would be there."""
        return self.path if self._has_logs else None

    def make_attempt(self, attempt: int) -> None:
        """Make the folder of an attempt.

        Raises:
            OSError: it cannot be made.
        """
        if self.path is not None:
            folder = attempt_folder(self.path, attempt)
            os.mkdir(folder)
            self._made.append(folder)

    @contextmanager
    def open_streams(
        self, logs: WorkerLogs, inherited: tuple[int, int], nothing: int
    ) -> Iterator[tuple[int, int]]:
        """Make a worker's folder and open its streams; closes what it opened.

        Args:
            logs: the plan.
            inherited: descriptors of our own standard output and error.
            nothing: descriptor of `/dev/null`.

        Raises:
            OSError: a folder or file cannot be made.
        """
        if logs.folder is not None:
            os.mkdir(logs.folder)
            self._made.append(logs.folder)
        with ExitStack() as opened:

            def descriptor(plan: StreamPlan, own: int) -> int:
                if plan.path is None:
                    return own if plan.target is StreamTarget.CONSOLE else nothing
                # O_EXCL: nothing is ever overwritten.  O_APPEND: a worker that opens
                # /dev/stdout anew, or a child that shares it, adds at the end.
                os.makedirs(os.path.dirname(plan.path), exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
                file = os.open(plan.path, flags, 0o644)
                opened.callback(os.close, file)
                return file

            yield descriptor(logs.stdout, inherited[0]), descriptor(logs.stderr, inherited[1])

    def tidy(self) -> bool:
        """Remove a temporary folder as far as it is empty; tell whether anything is left."""
        if not self._is_temporary:
            return self.path is not None
        for folder in reversed(self._made):
            try:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        if entry.is_file(follow_symlinks=False) and not entry.stat().st_size:
                            os.unlink(entry.path)
                os.rmdir(folder)
            except OSError:
                continue  # something was logged there, or somebody has removed it
        return self.path is not None and os.path.exists(self.path)
