"""RunDirectory: the log directories and files of one run on this host."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from msgspec import Struct

from elastic_aio.errors import HostError, SpecError
from elastic_aio.logs import paths
from elastic_aio.logs.relay import Relay
from elastic_aio.spec.logs import LogSpec
from elastic_aio.text import error_reason
from elastic_aio.worker.errorfile import is_temporary, replace_file

_LOCK = ".elastic_aio.lock"
NODE_FILE = "node.json"
_LOCK_FLAGS = os.O_RDWR | os.O_CLOEXEC  # NFS locks what can be written (flock(2))
_JOB_MAX = 1 << 16
_FULL = {errno.ENOSPC, errno.EDQUOT}
# O_EXCL: no file is ever overwritten.  O_APPEND: a worker that reopens /dev/stdout, or
# a child that shares it, writes at the end.
_NEW_FILE = os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
_FILE_MODE = 0o666  # without the bits of the umask, as for the directories below `log_dir`


class OpenStreams(Struct, frozen=True):
    """A worker's stdout and stderr, open while it is spawned."""

    descriptors: tuple[int, int]
    relays: dict[str, Relay]
    """The streams that pass through this process, by path; the caller removes the streams that it
    closes."""


class RunDirectory:
    """The directory of one run on this host; `path` is None if there is none."""

    def __init__(
        self,
        path: str | None,
        *,
        is_temporary: bool = False,
        has_logs: bool = True,
        root: str | None = None,
        top: str | None = None,
    ) -> None:
        """Use an existing directory, of a child that of the run too; `make` creates one.

        `top` is the first directory on the way to it that was made for the job.
        """
        self.path = path
        self._root = root or path
        self._top = top or self._root
        self._below: list[str] = []  # directories of children, each after that which it is in
        self.job = ""
        """The id that the directories of a job on several nodes share; see `note_job`."""
        self._has_logs = has_logs
        self._is_temporary = is_temporary
        self._created: list[str] = []  # for the present attempt
        self._left: list[str] = []  # of previous attempts
        self.has_captured = False
        """Whether the file of a captured stream was made."""
        self._lock = -1
        self.unlocked: OSError | None = None
        """Why no lock says that the run goes on: then it removes no run, and no run removes it."""
        self.owner: tuple[int, int] | None = None
        """User and group of what is made for the workers, if they run as another user."""
        self._node: paths.NodeRecord | None = None

    def __repr__(self) -> str:
        return f"<RunDirectory {self.path}{', temporary' if self._is_temporary else ''}>"

    @classmethod
    def make(cls, spec: LogSpec, run_id: str, host: str = "") -> RunDirectory:
        """Create a new directory for a run, in `log_dir` or as a temporary directory.

        If no stream is redirected, only the workers' error files need it, and a job runs without.

        Raises:
            SpecError: `log_dir` cannot be used.
            HostError: no temporary directory can be created, and streams are redirected.
        """
        if spec.is_off:
            return cls(None)
        if spec.log_dir is not None:
            try:
                parent = os.path.abspath(spec.log_dir)
                top, above = None, parent
                while not os.path.isdir(above):
                    top, above = above, os.path.dirname(above)
                os.makedirs(parent, exist_ok=True)
                directory = cls(_make_below(parent, paths.run_prefix(run_id, host)), top=top)
                if spec.keep_runs is not None:
                    directory.lock()
                return directory
            except OSError as error:
                reason = error_reason(error)
                problem = f"cannot create a directory there: {reason}"
                raise SpecError("logs.log_dir", spec.log_dir, problem) from error
        has_logs = not (spec.redirects.is_empty and spec.tee.is_empty)
        try:
            path = _make_unique(f"elastic_aio_{paths.run_prefix(run_id, host)}")
        except OSError as error:
            if not has_logs:
                return cls(None)
            raise HostError(
                f"cannot create a temporary directory for the logs ({error}); set log_dir"
            ) from error
        return cls(path, is_temporary=True, has_logs=has_logs)

    def make_child(self, child: str, *, has_logs: bool) -> RunDirectory:
        """Return the directory of a child below this one, made if need be.

        It remains until this one is removed: the child may be started anew.

        Raises:
            OSError: it cannot be made.
        """
        if (path := self.path) is None:
            return RunDirectory(None)
        self._make_again(path)
        for name in filter(None, child.split("/")):
            path = f"{path}/{name}"
            with suppress(FileExistsError):
                os.mkdir(path)
                self._below.append(path)
        kind = self._is_temporary
        return RunDirectory(
            path, is_temporary=kind, has_logs=has_logs, root=self._root, top=self._top
        )

    def give_to(self, owner: tuple[int, int]) -> None:
        """Let workers that run as another user write in their own directories, and reach them."""
        self.owner, path = owner, self.path
        while path is not None:
            os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) | 0o111)
            path = None if path == self._top else os.path.dirname(path)

    def lock(self) -> None:
        """Mark this directory as a running job's, or raise an OSError.

        A file system without locks takes the logs: see `unlocked`.
        """
        path, flags = f"{self.path}/{_LOCK}", os.O_CREAT | os.O_EXCL | _LOCK_FLAGS
        try:
            # Not for other users, whose lock on it would be waited for.
            self._lock = os.open(f"{path}.new", flags, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_SH)
            except OSError as error:
                self.unlocked = error
                self.close()
                os.unlink(f"{path}.new")
                return
            # Not earlier: without the lock it is the directory of a run that has ended.
            os.rename(f"{path}.new", path)
        except OSError:
            self.close()
            _remove(str(self.path))  # which nothing would remove later
            raise

    def is_in_use(self) -> bool | None:
        """Whether the run of this directory goes on; None if it has no lock of this user's."""
        with suppress(OSError), _open_lock(str(self.path)) as lock:
            return _is_held(lock)
        return None

    def note_job(self, job: str) -> None:
        """Note which job this is: the directories of its nodes are kept or removed together.

        `job` is the same on all nodes, and different for another job with the same run id.
        """
        if self._lock >= 0 and job != self.job:
            self.job = job
            with suppress(OSError):  # the disk is full, and takes no logs either
                os.ftruncate(self._lock, 0)
                os.pwrite(self._lock, os.fsencode(job), 0)

    def note_node(self, node: paths.NodeRecord) -> None:
        """Note which node this is, in a directory that several nodes may share."""
        if self.path is None or self._is_temporary or node == self._node:
            return
        self._node = node
        with suppress(OSError):  # as in `note_job`
            replace_file(f"{self.path}/{NODE_FILE}", node.encode())

    @property
    def log_dir(self) -> str | None:
        """The directory to report to users; None if it is for error files only."""
        return self.path if self._has_logs else None

    def make_attempt(self, attempt: int, *, may_be_full: bool = False) -> None:
        """Create the directory of an attempt; `tidy` may follow, once its workers have started.

        Raises:
            OSError: the directory cannot be created; not for a full disk if it `may_be_full`.
        """
        if self.path is not None:
            self._left, self._created = [*self._left, *self._created], []
            self._make(paths.attempt_directory(self.path, attempt), may_be_full=may_be_full)

    def _make(self, directory: str, *, may_be_full: bool, is_own: bool = False) -> None:
        try:
            self._make_again(os.path.dirname(directory))
            os.mkdir(directory)
            if self.owner is not None:
                # Only the launcher may replace the directory of a worker in that of the attempt.
                mode = 0o600 if self._is_temporary else stat.S_IMODE(os.stat(directory).st_mode)
                os.chmod(directory, mode | (0o100 if is_own else 0o111))
                os.chown(directory, *self.owner if is_own else (-1, -1))
        except OSError as error:
            if not may_be_full or error.errno not in _FULL:
                raise
        else:
            self._created.append(directory)

    def _make_again(self, directory: str) -> None:
        """Make a directory that was made before, if a cleaner of old files has removed it."""
        if not os.path.isdir(directory):
            self._make_again(os.path.dirname(directory))
            os.mkdir(directory, 0o700 if self._is_temporary else 0o777)

    @contextmanager
    def open_streams(
        self, logs: paths.WorkerLogs, inherited: tuple[int, int], devnull: int
    ) -> Iterator[OpenStreams]:
        """Create a worker's directory and open its streams; a context that closes them.

        It closes the relays that the caller has left in `relays`.  `inherited` are descriptors of
        the agent's standard output and error.

        Raises:
            OSError: a directory or file cannot be created.
        """
        if logs.directory is not None:
            may_be_full = logs.stdout.is_relayed or logs.stderr.is_relayed
            self._make(logs.directory, may_be_full=may_be_full, is_own=True)
        relays: dict[str, Relay] = {}
        opened: dict[str, int] = {}  # by path: two streams may be one
        with ExitStack() as stack:

            def open_stream(plan: paths.StreamPlan, own: int) -> int:
                if plan.path is None:
                    is_console = plan.target is paths.StreamTarget.CONSOLE
                    return self.give(own, "pipe:") if is_console else devnull
                if plan.path not in opened:
                    if plan.is_relayed:
                        relays[plan.path] = self._open_relay(plan)
                        opened[plan.path] = relays[plan.path].writer
                    else:
                        opened[plan.path] = self._open_new(plan.path, os.O_WRONLY)
                    stack.callback(os.close, opened[plan.path])
                return opened[plan.path]

            try:
                stdout = open_stream(logs.stdout, inherited[0])
                stderr = open_stream(logs.stderr, inherited[1])
                yield OpenStreams((stdout, stderr), relays)
            finally:
                for relay in relays.values():
                    relay.close()

    def _open_relay(self, plan: paths.StreamPlan) -> Relay:
        """Return the relay of a stream, or raise an OSError; a file of the user's is made now."""
        assert plan.path is not None, "a relayed stream has a file"
        make = self._make_captured if plan.is_captured else self._open_new
        relay = Relay(partial(make, plan.path))
        self.give(relay.writer)
        try:
            if not plan.is_captured:
                relay.make_file()
        except OSError as error:
            if error.errno not in _FULL:
                os.close(relay.writer)
                relay.close()
                raise
            relay.error = error
        return relay

    def _make_captured(self, path: str) -> int:
        if self._is_temporary and self.path is not None:
            # A stranger may have made one of this name, after ours was removed as old and empty.
            _check_own(os.lstat(self.path), stat.S_ISDIR)
        with suppress(FileExistsError):
            self._make(os.path.dirname(path), may_be_full=False)
        self.has_captured = True
        return self._open_new(path)

    def _open_new(self, path: str, access: int = os.O_RDWR) -> int:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return self.give(os.open(path, access | _NEW_FILE, _FILE_MODE))

    def give(self, descriptor: int, kind: str = "") -> int:
        """Let the workers open a stream again that they have, as /dev/stdout; return it.

        Only a pipe that is inherited is theirs (`kind`): a file or a terminal keeps its owner.
        """
        with suppress(OSError):  # of a file server that lets no root do so
            if self.owner and os.readlink(f"/proc/self/fd/{descriptor}").startswith(kind):
                os.fchown(descriptor, *self.owner)
        return descriptor

    def remove_files(
        self, find: Callable[[int, int], Iterable[str]], attempts: Container[int]
    ) -> None:
        """Remove some files of each worker of some attempts; blocks.

        `find` returns paths by attempt and local rank.  Empty directories stay below a directory
        that the user has named, as torchrun's do.
        """
        if self.path is None:
            return
        for attempt, directory in _numbered(self.path, "attempt_"):
            for local_rank, own in _numbered(directory) if attempt in attempts else ():
                for path in find(attempt, local_rank):
                    with suppress(OSError):  # it was not made
                        os.unlink(path)
                self._remove_temporary(own)
            if attempt in attempts:
                self._remove_temporary(directory)

    def _remove_temporary(self, directory: str) -> None:
        if self._is_temporary:
            with suppress(OSError):  # not empty
                os.rmdir(directory)

    def remove_attempts(self, last: int) -> None:
        """Remove the directories of the attempts up to `last`; blocks."""
        for attempt, directory in _numbered(self.path or "", "attempt_"):
            if attempt <= last:
                _remove(directory)

    def remove_old_runs(self, keep: int) -> None:
        """Remove the directories of older runs beside this one that have ended; blocks.

        Keeps `keep` runs, this one included.  Only directories of this user with our lock file
        count; the directories of a job count as one run.

        Raises:
            OSError: the directory cannot be read, or its file system has no locks.
        """
        if self.path is None:
            return
        if self.unlocked is not None:
            raise self.unlocked
        parent = os.path.dirname(self.path)
        runs: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
        kept = {self.job, self.path}
        for name in os.listdir(parent):
            path = f"{parent}/{name}"
            with suppress(OSError), _open_lock(path) as lock:  # or it is no directory of ours
                job = os.fsdecode(os.read(lock, _JOB_MAX)) or path
                runs[job].append((os.fstat(lock).st_mtime, path))
                if _is_held(lock):
                    kept.add(job)
        ended = sorted((max(found), found) for job, found in runs.items() if job not in kept)
        for _, found in ended[: max(0, len(ended) - keep + 1)]:
            for _, path in found:
                # The lock file last: a removal that does not come to its end is continued later.
                RunDirectory(path).remove_attempts(sys.maxsize)
                _remove(path)

    def close(self) -> None:
        """Note that the run has ended.  Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def remove_empty(self) -> bool:
        """Remove the empty parts of a temporary run directory; return whether it still exists."""
        self._left, self._created = [*self._left, *self._created], []
        self.tidy()
        if self.path is None or not self._is_temporary:
            return self.path is not None
        if self.path != self._root:
            with suppress(OSError):  # removed by another process
                return bool(os.listdir(self.path))
            return False
        for path in (*reversed(self._below), self.path):
            with suppress(OSError):  # not empty, or removed by another process
                os.rmdir(path)
        return os.path.exists(self.path)

    def tidy(self) -> None:
        """Remove what the workers of previous attempts have left without a use."""
        for directory in reversed(self._left):
            try:
                with os.scandir(directory) as entries:
                    for entry in entries:
                        if self._is_useless(entry):
                            os.unlink(entry.path)
                if self._is_temporary:
                    os.rmdir(directory)
            except OSError:
                continue  # not empty, or removed by another process
        self._left.clear()

    def _is_useless(self, entry: os.DirEntry[str]) -> bool:
        if not entry.is_file(follow_symlinks=False):
            return False
        return is_temporary(entry.name) or (self._is_temporary and not entry.stat().st_size)


def _is_held(lock: int) -> bool:
    """Whether a process has locked the lock file of a run, which this one has opened."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


@contextmanager
def _open_lock(directory: str) -> Iterator[int]:
    """Open the lock file of a run's directory, both this user's; a context that closes it.

    Opens nothing else, since another user's named pipe would block.  OSError: there is none.
    """
    path = f"{directory}/{_LOCK}"
    for one, is_kind in ((directory, stat.S_ISDIR), (path, stat.S_ISREG)):
        _check_own(os.lstat(one), is_kind)
    lock = os.open(path, os.O_NONBLOCK | os.O_NOFOLLOW | _LOCK_FLAGS)
    try:
        _check_own(os.fstat(lock), stat.S_ISREG)  # it may be another one by now
        yield lock
    finally:
        os.close(lock)


def _check_own(status: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    if not is_kind(status.st_mode) or status.st_uid != os.geteuid():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def _numbered(directory: str, prefix: str = "") -> list[tuple[int, str]]:
    """Return the numbers and paths of the directories `<prefix><number>` in a directory."""
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    numbers = [(name.removeprefix(prefix), name) for name in names if name.startswith(prefix)]
    return [(int(text), f"{directory}/{name}") for text, name in numbers if text.isdecimal()]


def _make_below(parent: str, prefix: str, mode: int = 0o777) -> str:
    while True:  # until a name is not taken
        with suppress(FileExistsError):
            path = os.path.abspath(f"{parent}/{prefix}{os.urandom(4).hex()}")
            os.mkdir(path, mode)
            return path


def _make_unique(prefix: str) -> str:
    """Do the same as `tempfile.mkdtemp`, whose import takes as long as ten of our modules."""
    if "tempfile" not in sys.modules:  # else the program may have set `tempfile.tempdir`
        variables = map(os.environ.get, ("TMPDIR", "TEMP", "TMP"))
        with suppress(OSError):
            return _make_below(next(filter(None, variables), "/tmp"), prefix, 0o700)
    import tempfile

    return tempfile.mkdtemp("", prefix)


def _remove(directory: str) -> None:
    """Remove a directory as `shutil.rmtree`, whose import takes longer than that of some files."""
    with suppress(OSError):
        # Of a named pipe, it would wait for a writer.
        found = os.fwalk(directory, topdown=False) if os.path.isdir(directory) else ()
        for _, directories, files, opened in found:
            for name in (*files, *directories):
                for remove in (os.unlink, os.rmdir):  # a link to a directory is a link
                    with suppress(OSError):
                        remove(name, dir_fd=opened)
        os.rmdir(directory)
