"""All jobs of this user on this host behind one port: those that run, and the latest that ended.

Each job is followed at its control socket, so that most answers are from memory, and a suspended
launcher delays no other job.  The directories of the sockets are watched by inotify: a job is seen
when it begins, and no request is made while nothing changes.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, Final, TypeVar
from urllib.parse import quote

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from elastic_aio.aio import EventHistory, cancel_and_wait, create_task, run_in_thread
from elastic_aio.control.client import JobClient, RunningJob
from elastic_aio.control.sockets import SOCKET_SUFFIX, directories, named_pid, socket_paths
from elastic_aio.errors import ControlError
from elastic_aio.events import JobFinished
from elastic_aio.http.app import FilePage, JobPages, answer, read_only_app, stream_of
from elastic_aio.http.openmetrics import CONTENT_TYPE, format_metrics
from elastic_aio.http.server import AppServer, ListenedJob
from elastic_aio.logs.inotify import InotifyWatcher
from elastic_aio.record import JobRecord, recorded_runs
from elastic_aio.status import JobStatus
from elastic_aio.text import printable
from elastic_aio.value import to_json

T = TypeVar("T")

ANSWER_S: Final = 2.0
"""Seconds in which a launcher answers, or counts as suspended."""
ENDED_MAX: Final = 8
"""Jobs that have ended and whose events are in memory."""

_LIST_S: Final = 0.5  # the same for a list, which people wait for
_RECORDS_S: Final = 1.0  # a disk may not answer
_FOREVER: Final = 1e9  # a suspended launcher answers when it goes on, or is killed
_REMADE_S: Final = 1.0  # a directory is removed in steps
_TURN: Final = 32  # events that are taken in before others have their turn
# inotify(7): a socket appears by a rename.
_IN_MOVED_TO, _IN_MOVE_SELF, _IN_DELETE_SELF = 0x80, 0x800, 0x400
JOBS_PAGE: Final = FilePage("jobs.html")

_PATHS: Final = "/  /healthz  /metrics  /jobs  /changes  /jobs/NAME/"


class _ShownRun(JobPages):
    """A run that can be looked at: its events, and the app with its pages."""

    def __init__(self, name: str, pid: int | None) -> None:
        self.view = ListenedJob()
        super().__init__(self.view)
        self.name = name
        self.pid = pid
        self.ended_at: float | None = None
        self.exit_code: int | None = None

    def known(self, *, usage: bool = False) -> JobStatus:
        """Return what is known; a job that is over without an end has lost its launcher."""
        known = self._last()
        if self.ended_at is None or known.has_ended:
            return known
        return replace(known, phase="failed", reason="the launcher was killed, or is lost")

    def _last(self) -> JobStatus:
        return self.view.status(usage=False)

    @property
    def identity(self) -> object:
        status = self.known()
        return status.identity if status.started_at else self.name

    def is_named(self, name: str) -> bool:
        run_id = self.known().run_id
        return name in (self.name, str(self.pid or self.name), run_id, printable(run_id))

    def row(self, *, answers: bool = False) -> dict[str, object]:
        """Return what the list says of the run."""
        status = self.known()
        workers = [worker for leaf in status.leaves for worker in leaf.workers]
        names = "run_id entrypoint node phase attempt restarts started_at"
        return {
            **{name: getattr(status, name) for name in names.split()},
            **{name: getattr(self, name) for name in ("name", "pid", "ended_at", "exit_code")},
            "answers": answers,
            "reason": status.reason or status.failure,
            "running": sum(worker.state == "running" for worker in workers),
            "workers": len(workers),
            "children": len(status.descendants),
        }


class _RecordedRun(_ShownRun):
    """A run that has ended, as its record says."""

    def __init__(self, record: JobRecord) -> None:
        super().__init__(os.path.basename(record.directory), record.agent_pid)
        self.ended_at, self.exit_code = record.until, record.exit_code
        self._record = record

    def _last(self) -> JobStatus:
        return self._record

    def load(self) -> None:
        """Read the events, which may be gone; called in a thread."""
        with suppress(ValueError):
            for event in self._record.events():
                self.view.add(event)
        self.view.close()


class _FollowedRun(_ShownRun):
    """A run whose events come from its control socket."""

    def __init__(self, path: str) -> None:
        pid = named_pid(path)
        super().__init__(os.path.basename(path).removesuffix(SOCKET_SUFFIX), pid)
        self._socket = RunningJob(path, pid, None)
        self.is_refused = False

    async def follow(self, on_change: Callable[[], None]) -> None:
        """Take in the events up to the end of the job, or of its launcher."""
        client, phase = JobClient(self._socket, timeout=_FOREVER), ""
        try:
            async with aclosing(client.events(follow=True)) as events:
                async for event in events:
                    self.view.add(event)
                    if event.seq % _TURN == 0:
                        await asyncio.sleep(0)
                    if isinstance(event, JobFinished):
                        self.exit_code = event.exit_code
                    if (present := self.known().phase) != phase:
                        phase = present
                        on_change()
        except ControlError as error:  # it was killed, is gone already, or has too many clients
            self.is_refused = type(error) is ControlError
        except ValueError:  # another release has other events
            with suppress(ControlError):
                await client.wait()
        self.ended_at = time.time()
        self.view.close()

    async def ask(self, *, usage: bool = True, makes_files: bool = False) -> JobStatus:
        if self.ended_at is not None:
            return self.known()
        client = JobClient(self._socket, timeout=ANSWER_S)
        return await client.status(usage=usage, makes_files=makes_files)


class HostJobs:
    """The jobs of this user on this host, from `open` to `aclose`."""

    def __init__(self) -> None:
        self.changes: EventHistory[int] = EventHistory(1, lambda _, following: following)
        """A number for each change of the list."""
        self._runs: dict[str, _FollowedRun] = {}  # by socket, the latest last; also ended ones
        self._recorded: list[_RecordedRun] = []  # the latest first
        self._loaded: dict[str, _RecordedRun] = {}  # some of them, with their events
        self._watched: dict[str, tuple[int, int]] = {}  # directory -> its token and inode
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reading: asyncio.Task[list[JobRecord]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: InotifyWatcher | None = None

    def __repr__(self) -> str:
        return f"<HostJobs: {len(self._runs)} runs>"

    def open(self) -> None:
        """Follow the jobs that there are, and those that come."""
        events = _IN_MOVED_TO | _IN_MOVE_SELF | _IN_DELETE_SELF
        self._watcher = InotifyWatcher(self._on_events, events, polls=False)
        self._look()

    async def aclose(self) -> None:
        """Follow no job any more, and end the streams of all pages."""
        if self._watcher is not None:
            self._watcher.close()
        if self._timer is not None:
            self._timer.cancel()
        for run in self._runs.values():
            run.view.close()
        self.changes.close()
        await cancel_and_wait(self._tasks)

    # ------------------------------------------------------------ which jobs there are

    def _on_events(self, events: Mapping[int, int]) -> None:
        if any(event & _IN_MOVED_TO for event in events.values()):
            self._look()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_REMADE_S, self._look)

    def _look(self) -> None:
        """Watch the directories, and follow the jobs that are new there."""
        assert self._watcher is not None
        self._timer = None
        found = directories(makes=True)
        for directory in found:
            token, watched = self._watched.get(directory, (len(self._watched), 0))
            with suppress(OSError):
                if (inode := os.stat(directory).st_ino) != watched:
                    self._watcher.remove(token)
                    self._watcher.add(directory, token)
                    self._watched[directory] = token, inode
        for path in socket_paths(found):
            if path not in self._runs:  # the name of a socket is never used twice
                self._runs[path] = _FollowedRun(path)
                self._start(self._follow(path))

    async def _follow(self, path: str) -> None:
        run = self._runs[path]
        await run.follow(self._notify)
        if run.known().started_at is None:
            del self._runs[path]  # no job was there
            if run.is_refused:
                return  # the next look tries again; a notice would be its cause
        ended = [path for path, run in self._runs.items() if run.ended_at is not None]
        for path in ended[:-ENDED_MAX]:
            del self._runs[path]
        self._notify()

    def _shown(self) -> list[_FollowedRun]:
        """Return the runs, the latest first; of a launcher with a new socket only the new run."""
        return [*{run.identity: run for run in self._runs.values()}.values()][::-1]

    def _notify(self) -> None:
        self.changes.append(self.changes.count)

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _read_records(self) -> None:
        """Read which runs have ended; a disk that does not answer changes nothing."""
        if self._reading is None or self._reading.done():
            self._reading = self._start(run_in_thread(recorded_runs, daemon=True))
        await asyncio.wait([self._reading], timeout=_RECORDS_S)
        if self._reading.done():
            known = {run.identity for run in self._runs.values()}
            records = [one for one in self._reading.result() if one.ended_at or one.is_lost]
            runs = map(_RecordedRun, records)
            self._recorded = [run for run in runs if run.identity not in known]

    # ------------------------------------------------------------ answers

    async def rows(self) -> list[dict[str, object]]:
        """Return the jobs, the latest first."""
        found = await self._ask_all(_LIST_S, usage=False)
        await self._read_records()
        rows = [run.row(answers=found.get(run) is not None) for run in self._shown()]
        return [*rows, *(run.row() for run in self._recorded)]

    async def measure(self) -> list[tuple[dict[str, str], JobStatus | None]]:
        """Return each running job with its labels, and None for a launcher without an answer."""
        found = await self._ask_all(ANSWER_S, usage=True)
        return [
            ({"run_id": run.known().run_id, "pid": str(run.pid)}, status)
            for run, status in found.items()
        ]

    async def _ask_all(
        self, seconds: float, *, usage: bool
    ) -> dict[_FollowedRun, JobStatus | None]:
        """Return the status of each running job, None without an answer in time."""
        self._look()
        running = [run for run in self._shown() if run.ended_at is None]
        asked = [self._start(run.ask(usage=usage)) for run in running]
        if asked:
            await asyncio.wait(asked, timeout=seconds)
        await cancel_and_wait(asked)
        return {
            run: None if task.cancelled() or task.exception() else task.result()
            for run, task in zip(running, asked, strict=True)
        }

    async def find(self, name: str) -> _ShownRun | None:
        """Return the latest run of this name in the list, with this pid, or of this id.

        ControlError: the disk with its events does not answer.
        """
        self._look()
        for run in self._shown():
            if run.is_named(name):
                return run
        await self._read_records()
        for recorded in self._recorded:
            if recorded.is_named(name):
                if recorded.name not in self._loaded:
                    try:
                        async with asyncio.timeout(_RECORDS_S):
                            await run_in_thread(recorded.load, daemon=True)
                    except TimeoutError:
                        raise ControlError("the disk does not answer") from None
                    self._loaded = dict([*self._loaded.items()][1 - ENDED_MAX :])
                    self._loaded[recorded.name] = recorded
                return self._loaded[recorded.name]
        return None


class JobsServer(AppServer):
    """Serves the pages of all jobs of this user on this host: an async context manager."""

    def __init__(self, address: str, *, patience: float = 5.0, keep_alive: float = 15.0) -> None:
        super().__init__(address, patience=patience, keep_alive=keep_alive)
        self.jobs = HostJobs()

    def _app(self) -> ASGIApp:
        routes = [
            Route("/", JOBS_PAGE.answer),
            Route("/healthz", self._health),
            Route("/metrics", self._metrics),
            Route("/jobs", self._list),
            Route("/changes", self._changes),
            Route("/jobs/{name}", self._redirect),
            Mount("/jobs/{name}", self._job),
        ]
        return read_only_app(routes, _PATHS)

    async def __aenter__(self) -> JobsServer:
        await JOBS_PAGE.load()
        await super().__aenter__()
        self.jobs.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.jobs.aclose()
        finally:
            await super().__aexit__()

    async def _health(self, _: Request) -> Response:
        return answer("serving\n")

    async def _metrics(self, _: Request) -> Response:
        return answer(format_metrics(await self.jobs.measure(), time.time()), 200, CONTENT_TYPE)

    async def _list(self, _: Request) -> Response:
        return answer(to_json({"jobs": await self.jobs.rows()}), 200, "application/json")

    async def _changes(self, request: Request) -> Response:
        changes = self.jobs.changes
        latest = changes.read(changes.count - 1)  # so that a client looks at once
        return stream_of(latest, lambda number: b"data: %d\n\n" % number, self._keep_alive, request)

    async def _redirect(self, request: Request) -> Response:
        return answer(b"", 307, Location=quote(request.path_params["name"], safe="") + "/")

    async def _job(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = await self.jobs.find(scope["path_params"]["name"])
        app = answer("no such job: see /jobs\n", 404) if run is None else run.app
        await app(scope, receive, send)
