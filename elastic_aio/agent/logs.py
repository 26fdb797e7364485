"""The output of the workers of a job on this host, and what of it the console shows.

`Capture` passes on standard error that would go to a pipe or a file, and keeps it for a while,
since the last lines of a worker say why it failed.  A terminal is left alone, since programs look
for one.  A captured stream is a pipe to this process, which passes its bytes on unchanged and at
once, and writes them to a file in the run's directory, made by the first byte:

* A worker does not wait for the console: output that the console does not take stays in the file.
* A full disk fails no worker: output that the file does not take stays in memory (see `relay`).
* `echo text > /dev/stderr` opens a pipe anew, as before; it would truncate a file.

While this process is suspended, a worker waits if it writes more than the pipe holds, which is a
megabyte where the host allows it.

If standard output and standard error of this process are one file (`2>&1`), both streams of a
worker are one pipe, so that their order stays.  They are then one text for the report too.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from elastic_aio.agent.failures import is_full, mount_point
from elastic_aio.aio import run_in_thread
from elastic_aio.errors import HostError, SpawnError, SpecError
from elastic_aio.events import ConsoleLost, Event, LogDiskFull, OutputLost
from elastic_aio.logs import paths
from elastic_aio.logs.console import STYLES, ConsoleStreams, ConsoleTarget, LineFeeder, Sink
from elastic_aio.logs.files import RunDirectory
from elastic_aio.logs.lines import PrefixFields, fixed_prefix, make_prefix
from elastic_aio.logs.relay import Relay
from elastic_aio.logs.streams import LoggedStream, LoggedStreams, check_ranks
from elastic_aio.logs.tee import StreamView, Tee
from elastic_aio.outcome import AttemptResult, with_paths
from elastic_aio.process.descriptors import StandardStreams
from elastic_aio.ranks import WorkerRanks
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.logs import LogLayout, Std
from elastic_aio.text import error_reason

if TYPE_CHECKING:
    from elastic_aio.agent.leaf import LeafPlace
    from elastic_aio.logs.line_filter import LineFilter
    from elastic_aio.logs.reader import LogReader
    from elastic_aio.logs.trimmer import LogTrimmer

# The most that a user may set by default (pipe-max-size in pipe(7)).
_PIPE_SIZE = 1 << 20
_ORDERED = (stat.S_ISFIFO, stat.S_ISREG, stat.S_ISSOCK)
# Seconds without progress after which a blocked console is given up, once the workers are gone:
# their output is in the files.
_PATIENCE_S = 5.0

_LOOK_UP_S = 10.0  # for the files that results name
_IN_NO_FILE = "is in no file, so that it cannot be read; use redirects or tee"
_PLANS_KEPT = 100  # attempts whose plans are kept: a job may restart for months


class JobOutput:
    """The log directory, the log files that the console shows, and the console of a job."""

    def __init__(
        self,
        spec: LaunchSpec,
        *,
        run_id: str,
        host: str,
        nproc: int,
        publish: Callable[[Event], None],
        console: ConsoleTarget | None,
        on_pipes: Callable[[list[int]], None] = lambda pipes: None,
        may_capture: bool = True,
        place: LeafPlace | None = None,
    ) -> None:
        """Prepare; nothing is opened before `open`.

        `console` None is this process's stdout and stderr.  `on_pipes` is called with the
        descriptors of all pipes of workers that are read here, when all workers of an attempt have
        started, and when a pipe was closed early.  `may_capture`: streams may be captured, if the
        spec says so.  `place` is of a leaf in a tree, whose directory and streams outlive this.
        """
        self.directory = RunDirectory(None)
        self._spec = spec
        self._run_id = run_id
        self._host = host
        self._nproc = nproc
        rank, now = spec.rendezvous.node_rank, time.time()
        self._node = paths.NodeRecord(
            run_id=run_id, host=host, pid=os.getpid(), started_at=now, node_rank=rank
        )
        self._publish = publish
        self.capture = Capture()
        self._place = place
        self._child = "" if place is None else place.path
        # An independent worker of a job without children has its rank as its path.
        self._is_named = place is not None and (place.worker is None or "/" in place.path)
        self.logged = LoggedStreams()
        self._on_pipes = on_pipes
        self._may_capture = may_capture and spec.logs.capture
        self._console_target = console
        self._console: ConsoleStreams | None = None
        self._feeder: LineFeeder | None = None
        self._trimmer: LogTrimmer | None = None
        self._tee: Tee | None = None
        self._streams: StandardStreams | None = None
        self._attempt = 0
        self._plans: dict[tuple[int, int], paths.WorkerLogs] = {}  # by attempt and local rank
        self._tokens: defaultdict[int, list[int]] = defaultdict(list)  # by attempt
        self._directories: defaultdict[int, set[str]] = defaultdict(set)  # by attempt
        self._full: set[tuple[int, str]] = set()  # attempts and disks that were reported

    def __repr__(self) -> str:
        return f"<JobOutput in {self.directory!r}, {self._tee}>"

    def open(self, streams: StandardStreams) -> None:
        """Make the run's directory, or raise SpecError, HostError; `streams` are this process's."""
        self._streams = streams
        if self._place is None:
            self.directory = RunDirectory.make(self._spec.logs, self._run_id, self._host)
            self.directory.note_node(self._node)
        else:
            self.directory = self._place.make_directory(self._spec.logs)
        inherited = streams.inherited(1), streams.inherited(2)
        self._console = ConsoleStreams(self._console_target, inherited)
        if self._may_capture and self.directory.path is not None:
            self.capture.open(inherited, self._console)
        if self._console.callback is not None:
            from elastic_aio.logs.reader import LogReader

            reader = LogReader(self.logged, lambda stream: stream.is_shown, follow=True)
            self._feeder = LineFeeder(reader, self._console.callback, self._on_callback_lost)

    async def aclose(self) -> None:
        """Show the rest while the console takes anything, and close the console.  Idempotent."""
        self.logged.close()
        if self._feeder is not None:
            await self._feeder.aclose()
        if self._tee is not None:
            for sink, unshown in (await self._tee.drain(_PATIENCE_S)).items():
                self._on_console_lost(sink, "it was not read since the workers ended", unshown)
            await self._tee.aclose()
            self._tee = None
        if self._trimmer is not None:
            self._trimmer.close()
            self._trimmer = None
        self.capture.close()
        if self._console is not None:
            self._console.close()

    async def remove_captured(self, attempts: Collection[int]) -> None:
        """Remove captured files of some attempts."""
        if self.directory.has_captured:
            # In a thread: a job may have had thousands of attempts.
            await run_in_thread(self.directory.remove_files, self._captured_paths, attempts)

    async def drop_missing(
        self, attempts: tuple[AttemptResult, ...], *, has_logs: bool
    ) -> tuple[AttemptResult, ...]:
        """Return results that name only files and directories of this host that exist.

        Without `has_logs` the directory of the run was removed.  If a file system does not answer
        for 10 s, the names stay.
        """
        removed = () if has_logs or self.directory.path is None else f"{self.directory.path}/"

        def existing(path: str | None) -> str | None:
            is_kept = path is not None and not path.startswith(removed) and os.path.exists(path)
            return path if is_kept else None

        drop = partial(with_paths, attempts, self._host, existing)
        if not has_logs and not isinstance(self._spec.logs, LogLayout):
            return drop()  # no path is looked up
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_UP_S):
                return await run_in_thread(drop, daemon=True)
        return attempts

    def _captured_paths(self, attempt: int, local_rank: int) -> set[str]:
        logs = self.plan(attempt, local_rank)
        return {plan.path for plan in (logs.stdout, logs.stderr) if plan.is_captured and plan.path}

    def remove_empty(self) -> bool:
        """Remove the empty parts of a temporary directory; return whether a directory remains."""
        return self.directory.remove_empty()

    def read_logs(
        self, ranks: Collection[int] | None, names: Collection[str], *, follow: bool, since: float
    ) -> LogReader:
        """Return a reader of the lines of some streams, or raise SpecError (see `Agent.logs`)."""
        local: Collection[int] = range(self._nproc)
        if ranks is not None and self._spec.nnodes.maximum == 1:
            check_ranks(ranks, local)
            local = ranks
        elif ranks is not None and (self.logged.is_closed or not follow):
            # Until then a later round may bring them.
            check_ranks(ranks, {stream.rank for stream in self.logged})
        chosen = [name for name in ("stdout", "stderr") if name in names]
        if all(self._is_in_no_file(local_rank, chosen) for local_rank in local):
            raise SpecError("logs", chosen, _IN_NO_FILE)
        from elastic_aio.logs.reader import LogReader  # few jobs are read in their own program

        return LogReader(
            self.logged, lambda one: one.is_one_of(ranks, names), follow=follow, since=since
        )

    def check_readable(self, name: str, streams: Collection[str]) -> None:
        """Raise the SpecError of a field that reads streams of workers, if it cannot.

        HostError: the `LogLayout` raised.
        """
        try:
            ranks = range(self._nproc)
            missing = [
                one for one in streams if any(self._is_in_no_file(rank, [one]) for rank in ranks)
            ]
            if missing:
                raise SpecError(name, missing, _IN_NO_FILE)
        except SpawnError as error:
            raise HostError(str(error)) from error

    def _is_in_no_file(self, local_rank: int, streams: Collection[str]) -> bool:
        plan = self.plan(0, local_rank)
        return all(getattr(plan, name).path is None for name in streams)

    # ------------------------------------------------------------ an attempt

    def attempt_directory(self, attempt: int) -> str | None:
        path = self.directory.path
        return None if path is None else paths.attempt_directory(path, attempt)

    def begin_attempt(self, attempt: int, group_rank: int) -> None:
        """Make the directory of an attempt, or raise SpawnError; `group_rank` is this node's."""
        self._attempt = attempt
        may_be_full = self._spec.logs.on_full == "console"
        if self._place is None:
            self.directory.note_node(replace(self._node, group_rank=group_rank))
        try:
            self.directory.make_attempt(attempt, may_be_full=may_be_full)
            for path in self._filtered_logs(attempt).values():
                with suppress(*[OSError] if may_be_full else []):
                    open(path, "ab").close()
        except OSError as error:
            raise _log_error(error) from error

    def _filtered_logs(self, attempt: int) -> dict[str, str]:
        return paths.filtered_logs(self._spec.logs, self.directory.path, attempt)

    def plan(self, attempt: int, local_rank: int) -> paths.WorkerLogs:
        """Return where one worker's output goes, or raise SpawnError: the `LogLayout` raised."""
        key = attempt, local_rank
        if key not in self._plans:  # a layout is asked once: it may count
            try:
                directory, is_given = self.directory.path, self.directory.owner is not None
                self._plans[key] = paths.plan_logs(
                    self._spec.logs, directory, *key, self.capture.streams, is_given=is_given
                )
            except Exception as error:
                message = f"the plan of the logs failed: {type(error).__name__}: {error}"
                raise SpawnError(message, permanent=True, exit_code=1) from error
            self._plans.pop((attempt - _PLANS_KEPT, local_rank), None)
        return self._plans[key]

    def needs_record(self, logs: paths.WorkerLogs) -> bool:
        """Whether a worker's stderr is in no file, so that it has to record why it fails."""
        return self._may_capture and logs.stderr.path is None

    @contextmanager
    def open_streams(
        self, logs: paths.WorkerLogs, attempt: int, ranks: WorkerRanks
    ) -> Iterator[tuple[int, int]]:
        """Open a worker's stdout and stderr while it is being spawned, or raise SpawnError."""
        # The console follows those that it shows until `end_attempt`.
        standard = self._streams
        assert standard is not None, "open() comes first"
        inherited = standard.inherited(1), standard.inherited(2)
        with ExitStack() as stack:
            try:
                opened = self.directory.open_streams(logs, inherited, standard.null)
                streams = stack.enter_context(opened)
                plans = {logs.stdout.path: (logs.stdout, "stdout")}
                plans.setdefault(logs.stderr.path, (logs.stderr, "stderr"))
                for plan, name in plans.values():  # two streams may be one
                    if plan.path is not None:
                        fields = PrefixFields(
                            self._spec.role,
                            ranks.rank,
                            ranks.local_rank,
                            attempt,
                            self._host,
                            name,
                            self._child if self._is_named else "",
                        )
                        relay = streams.relays.pop(plan.path, None)
                        logged = LoggedStream(
                            ranks.rank,
                            ranks.local_rank,
                            attempt,
                            name if len(plans) == 2 else "output",
                            plan.path,
                            plan.is_shown,
                            child=self._child,
                        )
                        self._follow(plan, logged, relay, fields, logs.prefix)
                        self.logged.add(logged)
                        if self._place is not None:
                            self._place.logged.add(logged)
            except OSError as error:
                raise _log_error(error) from error
            yield streams.descriptors

    def end_attempt(self, attempt: int) -> None:
        """Note that the logs of an attempt grow no more: their rest is shown.  Idempotent."""
        if self._tee is not None:
            self._tee.finish(self._tokens.pop(attempt, []))
        self.logged.complete(attempt, self._child)
        if self._place is not None:
            self._place.logged.complete(attempt, self._child)
        for directory in self._directories.pop(attempt, set()):
            if is_full(directory):
                self._report_full_disk(attempt, directory, os.strerror(errno.ENOSPC).lower())

    def on_group_started(self) -> None:
        """Report the pipes of the workers, which have all been started."""
        if self._tee is not None:
            self._on_pipes(self._tee.pipes())

    # -------------------------------------------------------------- a stream

    def _follow(
        self,
        plan: paths.StreamPlan,
        logged: LoggedStream,
        relay: Relay | None,
        fields: PrefixFields,
        own_prefix: str | None,
    ) -> None:
        """Show a stream as it grows; of a relayed stream, show what its file does not take."""
        attempt, path = fields.attempt, logged.path
        if relay is None and not plan.is_shown:
            self._directories[attempt].add(os.path.dirname(path))
            self._trim(fields, path, None)
            return
        if self._tee is None:
            self._tee = Tee(self._on_console_lost)
        on_lost = partial(self._report_loss, fields, path)
        if relay is not None and plan.is_captured:
            token = self.capture.follow(self._tee, relay, plan, fields.stream, on_lost, logged)
            self._tokens[attempt].append(token)
            return
        self._directories[attempt].add(os.path.dirname(path))
        assert self._console is not None, "open() comes first"
        sink = self._console.sink(fields.stream)
        prefix = make_prefix(self._spec.logs.prefix, fields, _timestamp)
        if own_prefix is not None:
            prefix = fixed_prefix(own_prefix)
        line_filter = self._line_filter(fields, on_lost) if plan.is_shown else None
        color = self._spec.logs.color
        is_colored = color == "always" or (color == "auto" and sink.is_terminal)
        style = STYLES[fields.rank % len(STYLES)] if is_colored else b""
        view = StreamView(sink, prefix, on_lost, line_filter, style, times=logged.times)
        if relay is None:
            token = self._tee.follow(path, view)
        else:
            relay.on_full = lambda: self._report_full_disk(attempt, path, relay.why)
            relay.on_closed = partial(_report_rest, relay, on_lost)
            token = self._tee.follow_relay(
                relay, None if plan.is_muted else view, is_shown=plan.is_shown
            )
            if relay.error is not None:
                self._report_full_disk(attempt, path, relay.why)
        self._tokens[attempt].append(token)
        self._trim(fields, path, token)

    def _trim(self, fields: PrefixFields, path: str, token: int | None) -> None:
        """Keep a file small that is shown with this token of the tee, if at all."""
        if (max_bytes := self._spec.logs.max_bytes) is None:
            return
        if self._trimmer is None:
            from elastic_aio.logs.trimmer import LogTrimmer  # most jobs have none

            self._trimmer = LogTrimmer(max_bytes)

        def needed() -> int | None:
            return None if self._tee is None or token is None else self._tee.needed(token)

        def on_error(why: str) -> None:
            self._report_loss(fields, path, f"max_bytes has no effect on its log file: {why}", 0)

        self._trimmer.add(path, needed, on_error)

    def _report_loss(self, fields: PrefixFields, path: str, why: str, lost: int | None) -> None:
        self._publish(
            OutputLost(
                attempt=fields.attempt,
                rank=fields.rank,
                local_rank=fields.local_rank,
                stream=fields.stream,
                path=path,
                why=why,
                lost=lost,
            )
        )

    def _line_filter(
        self, fields: PrefixFields, on_lost: Callable[[str, int | None], None]
    ) -> LineFilter | None:
        """Return a filter that copies the selected lines of a stream; None for no filter."""
        logs = self._spec.logs
        is_out = fields.stream == "stdout"
        texts = logs.duplicate_stdout_filters if is_out else logs.duplicate_stderr_filters
        path = self._filtered_logs(fields.attempt).get(fields.stream)
        if path is None:
            return None
        from elastic_aio.logs.line_filter import LineFilter

        def on_error(error: OSError) -> None:
            reason = error_reason(error)
            on_lost(f"its selected lines cannot be written to {path}: {reason}", None)

        return LineFilter(path, texts, on_error)

    def _on_console_lost(self, sink: Sink, why: str, unshown: int | None = None) -> None:
        self.capture.on_console_lost(sink)
        self.on_group_started()
        self._publish(
            ConsoleLost(attempt=self._attempt, stream=sink.name, why=why, unshown=unshown)
        )

    def _on_callback_lost(self, why: str) -> None:
        self._publish(ConsoleLost(attempt=self._attempt, stream="stdout", why=why))

    def _report_full_disk(self, attempt: int, path: str, why: str) -> None:
        place = mount_point(path)
        if (attempt, place) not in self._full:
            self._full.add((attempt, place))
            is_shown = self._spec.logs.on_full == "console"
            self._publish(
                LogDiskFull(attempt=attempt, mount_point=place, is_shown=is_shown, why=why)
            )


def _report_rest(relay: Relay, on_lost: Callable[[str, int | None], None]) -> None:
    """Report output that a relay has not written to its file, or not shown either."""
    if relay.unkept:
        on_lost(f"its log file does not take them ({relay.why})", relay.unkept)
    if relay.lost:
        on_lost("neither its log file nor the console took them", relay.lost)


def _log_error(error: OSError) -> SpawnError:
    where = f": {error.filename}" if error.filename else ""
    reason = error_reason(error)
    return SpawnError(f"cannot make the log files ({reason}){where}", permanent=False, exit_code=1)


def _timestamp() -> str:
    now = time.time()
    clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now))
    return f"{clock}.{int(now % 1 * 1000):03d}"


# ---------------------------------------------------------------------------- capture


class Capture:
    """The captured streams of a job's workers; must be closed after their tee."""

    def __init__(self) -> None:
        self.streams: paths.CapturedStreams = paths.NOT_CAPTURED
        self._relays: dict[str, Relay] = {}  # those that are being read, by path
        self._joined: dict[str, Sink] = {}  # where both streams of a worker go, by path
        self._unkept: dict[str, bytes] = {}  # the end of closed streams that no file has
        self._console: ConsoleStreams | None = None
        self._makes_files = False

    def __repr__(self) -> str:
        return f"<Capture of {len(self._relays)} streams>"

    def open(self, inherited: tuple[int, int], shown: ConsoleStreams) -> None:
        """Choose captured streams among those that workers would inherit."""
        # Text streams where tee'd output is `shown` get captured streams too.
        objects = [None if isinstance(item, int) else item for item in (shown.out, shown.err)]
        self.streams = _choose(inherited, *objects)
        out, err = (
            own if item is None else item for own, item in zip(inherited, objects, strict=True)
        )
        self._console = ConsoleStreams((out, err), inherited)

    def follow(
        self,
        tee: Tee,
        relay: Relay,
        plan: paths.StreamPlan,
        stream: str,
        on_lost: Callable[[str, int | None], None],
        logged: LoggedStream,
    ) -> int:
        """Pass a stream on as it comes; return its token of the tee, or raise OSError."""
        assert plan.path is not None, "a captured stream has a file"
        self._relays[plan.path] = relay
        logged.make = partial(_make_file, relay)
        with suppress(OSError):  # the limit of the user is reached
            fcntl.fcntl(relay.writer, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        if self._makes_files:
            _make_file(relay)
        assert self._console is not None, "open() comes first"
        sink = None if plan.is_muted else self._console.sink(stream)
        if sink is not None and sink.lost:
            if self.streams.is_joined and sink.has_descriptor:
                relay.finish()  # its reader has gone, see `on_console_lost`
            sink = None  # this process has no such stream
        if sink is not None and self.streams.is_joined:
            self._joined[plan.path] = sink
        report = None if sink is None else on_lost
        relay.on_closed = partial(self._on_closed, relay, plan.path, report)
        view = None
        if sink is not None:
            view = StreamView(sink, fixed_prefix(""), on_lost, is_raw=True, times=logged.times)
        return tee.follow_relay(relay, view, is_shown=view is not None)

    def make_files(self) -> None:
        """Make the files of the present streams, and of later streams when they begin."""
        self._makes_files = True
        for relay in self._relays.values():
            _make_file(relay)

    def read_now(self, path: str | None) -> bytes:
        """Read what a worker has written by now; return the end of what its file has not taken."""
        if path is None or (relay := self._relays.get(path)) is None:
            return b""
        relay.read_now()
        return relay.unkept_end

    def taken_at(self, path: str | None) -> float:
        """Return when a worker has last written to a captured stream, in Unix seconds; else 0."""
        return 0.0 if path is None or path not in self._relays else self._relays[path].taken_at

    def pop_unkept(self, path: str | None) -> bytes:
        """Return the end of what the file of a closed stream has not taken, and forget it."""
        return b"" if path is None else self._unkept.pop(path, b"")

    def on_console_lost(self, sink: Sink) -> None:
        """Close the pipes of workers whose standard output went there."""
        # The reader has gone, as in `2>&1 | head`: they get SIGPIPE, as without capture.
        for path, own in [*self._joined.items()]:
            if own is sink and sink.has_descriptor and path in self._relays:
                self._relays[path].finish()

    def close(self) -> None:
        if self._console is not None:
            self._console.close()

    def _on_closed(
        self, relay: Relay, path: str, on_lost: Callable[[str, int | None], None] | None
    ) -> None:
        self._relays.pop(path, None)
        self._joined.pop(path, None)
        if relay.unkept_end:
            self._unkept[path] = relay.unkept_end
        if relay.is_made:
            with suppress(OSError):  # it was removed
                if not os.stat(path).st_size:
                    os.unlink(path)
        if relay.lost and on_lost is not None:
            on_lost("neither its log file nor the console took them", relay.lost)


def _make_file(relay: Relay) -> bool:
    """Make the file for a reader; return whether it can be opened now, if ever."""
    with suppress(OSError):  # the next reader, or the first byte, tries again
        relay.make_file()
    return relay.is_made or relay.error is not None


def _choose(inherited: tuple[int, int], out: object, err: object) -> paths.CapturedStreams:
    """Return what is captured; `out` and `err` are text streams in place of inherited streams."""
    if out is not None or err is not None:
        streams = Std.ERR
        if out is not None:
            streams = Std.OUT if err is None and os.isatty(inherited[1]) else Std.ALL
        return paths.CapturedStreams(streams, is_joined=out is err, has_muted=True)
    if os.isatty(inherited[1]):
        return paths.CapturedStreams(has_muted=True)
    out_file, err_file = map(os.fstat, inherited)
    is_joined = os.path.samestat(out_file, err_file) and any(
        has_kind(err_file.st_mode) for has_kind in _ORDERED
    )
    streams = Std.ALL if is_joined else Std.ERR
    return paths.CapturedStreams(streams, is_joined=is_joined, has_muted=True)
