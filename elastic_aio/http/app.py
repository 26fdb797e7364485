"""The state of a job as an ASGI app: read-only pages for probes, Prometheus and people.

`StatusServer` serves the app, or another app mounts it.  It answers from memory, except the page
and the logs: files are read off the loop, a few at a time, because a disk may not answer.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import count
from typing import Final, TypeVar

from msgspec import Struct

from elastic_aio.aio import EventReader, read_file, run_in_thread
from elastic_aio.control.session import ViewedJob
from elastic_aio.errors import ControlError
from elastic_aio.event_json import event_to_json
from elastic_aio.events import Event
from elastic_aio.explanation import WAITS, Step, step_of
from elastic_aio.http.openmetrics import CONTENT_TYPE, format_metrics
from elastic_aio.logs.log_file import read_end
from elastic_aio.ranks import format_ranks
from elastic_aio.status import JobStatus
from elastic_aio.text import shown_bytes
from elastic_aio.value import to_json

try:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import BaseRoute, Route
    from starlette.types import ASGIApp as ASGIApp
    from starlette.types import Receive, Scope, Send
except ImportError as error:
    problem = "status_app needs the extra http: pip install 'elastic_aio[http]'"
    raise ImportError(problem) from error

T = TypeVar("T")

LOG_MAX: Final = 64 * 1024
"""Bytes of the end of a log file that a page shows."""

READERS_MAX: Final = 4
"""Log files that are read at a time."""

_HEADERS: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_POLICY: Final = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline';"
    " style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}
_TURN: Final = 32
"""Kept events that are sent to a client before others have their turn: a millisecond or three."""

_PATHS: Final = "/  /healthz  /readyz  /metrics  /status  /events  /logs/[CHILD/]RANK/stdout|stderr"


def status_app(job: ViewedJob, *, keep_alive: float = 15.0) -> Starlette:
    """Return the pages of a job as an ASGI app, for an app of Starlette or FastAPI.

    ::

        app = FastAPI()
        app.mount("/job", status_app(agent))

    The pages are `StatusServer`'s.  They are read-only and need no password: the app that mounts
    them decides who can read them.

    Args:
        job: an `Agent`; it may be started later.
        keep_alive: seconds without an event after which a stream of events has a comment.
    """
    return JobPages(job, keep_alive=keep_alive).app


def read_only_app(routes: Sequence[BaseRoute], paths: str) -> Starlette:
    """Return an app of pages; its answer to an unknown path names the `paths`."""

    async def no_page(_: Request, __: Exception) -> Response:
        return answer(f"the pages are {paths}\n", 404)

    async def no_method(_: Request, __: Exception) -> Response:
        return answer("all pages are read-only\n", 405, Allow="GET, HEAD")

    async def no_answer(_: Request, error: Exception) -> Response:
        return answer(f"{error}\n", 503)

    handlers = {404: no_page, 405: no_method, ControlError: no_answer}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


class FilePage:
    """A page for people, which is a file of this package."""

    def __init__(self, name: str) -> None:
        self._path = os.path.join(os.path.dirname(__file__), name)
        self._content = b""

    async def load(self) -> None:
        """Read the file, once: a server does so before an upgrade can replace it."""
        self._content = self._content or await read_file(self._path)

    async def answer(self, _: Request) -> Response:
        await self.load()
        return answer(self._content, 200, "text/html", **_POLICY)


JOB_PAGE: Final = FilePage("page.html")


class LocalHostOnly:
    """Refuses requests for other hosts than this one, for a server on a loopback address.

    Another name in `Host` belongs to a web site that a browser here was led to (DNS rebinding).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields = dict(scope.get("headers", ()))
        if scope["type"] == "http" and not _is_local(fields.get(b"host", b"").decode("latin-1")):
            refusal = answer("this server is for its own host: use localhost or an address\n", 403)
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _is_local(host: str) -> bool:
    """Return whether the `Host` of a request is an address, `localhost` or missing."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    is_address = name.startswith("[") or name.replace(".", "").isdigit()
    return not name or is_address or name.lower().rstrip(".").split(".")[-1] == "localhost"


class JobPages:
    """The pages of a job; a subclass may have another process say its present status."""

    def __init__(self, job: ViewedJob, *, keep_alive: float = 15.0) -> None:
        self._job = job
        self._keep_alive = keep_alive
        self._readers = threading.BoundedSemaphore(READERS_MAX)

    @cached_property
    def app(self) -> Starlette:
        routes = [
            Route("/", JOB_PAGE.answer),
            Route("/healthz", self._health),
            Route("/readyz", self._readiness),
            Route("/metrics", self._metrics),
            Route("/status", self._status),
            Route("/events", self._events),
            Route("/logs/{rank}/{stream}", self._log),
            Route("/logs/{child:path}/{rank}/{stream}", self._log),
        ]
        return read_only_app(routes, _PATHS)

    def known(self, *, usage: bool = False) -> JobStatus:
        """Return what is known of the job at once."""
        try:
            return self._job.status(usage=usage)
        except RuntimeError:  # it has not begun
            return JobStatus()

    async def ask(self, *, usage: bool = True, makes_files: bool = False) -> JobStatus:
        """Return the present status, or raise a ControlError: the launcher does not answer.

        With `usage` it has what the workers have used; with `makes_files` their log files exist.
        """
        if makes_files:
            self._job.make_log_files()
        return self.known(usage=usage)

    async def _health(self, _: Request) -> Response:
        status = await self.ask(usage=False)
        goes_on = not status.has_ended or status.phase == "succeeded"
        return answer(f"{status.phase}\n", 200 if goes_on else 503)

    async def _readiness(self, _: Request) -> Response:
        status = await self.ask(usage=False)
        return answer(f"{status.phase}\n", 200 if status.is_ready else 503)

    async def _metrics(self, _: Request) -> Response:
        text = format_metrics([({}, await self.ask())], time.time())
        return answer(text, 200, CONTENT_TYPE)

    async def _status(self, _: Request) -> Response:
        try:
            status, code = await self.ask(), 200
        except ControlError:
            status, code = self.known(), 503
        return answer(to_json(status) + b"\n", code, "application/json")

    async def _events(self, request: Request) -> Response:
        query = request.query_params.get("after", "")
        last = request.headers.get("last-event-id", query)
        after = int(last) if last.isascii() and last.isdigit() and len(last) < 19 else -1
        try:
            events = self._job.events(after)
        except RuntimeError as error:
            return answer(f"{error}\n", 503)
        if events.is_over:
            return answer(b"", 204)  # a browser does not come back
        return stream_of(events, _message, self._keep_alive, request)

    async def _log(self, request: Request) -> Response:
        rank, stream = request.path_params["rank"], request.path_params["stream"]
        if not rank.isdecimal() or stream not in ("stdout", "stderr"):
            return answer(f"the pages are {_PATHS}\n", 404)
        part = self.known().find(request.path_params.get("child", ""))
        leaves = () if part is None else part.leaves
        workers = {worker.rank: worker for leaf in leaves for worker in leaf.workers}
        worker = workers.get(int(rank[:9]))
        if worker is None:
            known = format_ranks(workers) or "none"
            return answer(f"no worker of this node has rank {rank[:9]}; it has: {known}\n", 404)
        number = worker.rank
        having = [leaf.child for leaf in leaves if any(one.rank == number for one in leaf.workers)]
        if len(having) > 1:
            return answer(f"rank {number} is of several children: {', '.join(having)}\n", 404)
        # The path comes from the job, and never from the request.
        path = worker.stdout_path if stream == "stdout" else worker.stderr_path
        if path is None:
            problem = f"{stream} of rank {worker.rank} is in no file (see --tee, --redirects)\n"
            return answer(problem, 404)
        with suppress(ControlError):  # what was written can be read without the launcher
            await self.ask(usage=False, makes_files=True)
        return await self._end_of(path)

    async def _end_of(self, path: str) -> Response:
        if not self._readers.acquire(blocking=False):
            return answer("too many log files are being read\n", 503)
        try:
            end = await run_in_thread(_read_end, path, self._readers, daemon=True)
        except FileNotFoundError:
            return answer("nothing was written, or the log was removed\n", 404)
        except OSError as error:
            return answer(f"the log cannot be read: {error.strerror}\n", 404)
        return answer(end)


def _read_end(path: str, readers: threading.BoundedSemaphore) -> bytes:
    """Return the end of a file, from the beginning of a line; called in a thread."""
    try:
        return read_end(path, LOG_MAX)
    finally:
        readers.release()


class _Words(Struct, frozen=True):
    """What the classes of events say, for readers that do not have them: fields of the JSON."""

    sentence: str
    level: int
    explanation: Step | None
    is_wait: bool


def _message(event: Event) -> bytes:
    """Return an event as JSON, with its sentence, and its step if it explains something."""
    words = _Words(event.sentence, event.level, step_of(event), isinstance(event, WAITS))
    shown = event_to_json(event)[:-1] + b"," + to_json(words)[1:]
    return b"id: %d\ndata: %b\n\n" % (event.seq, shown)


def stream_of(
    items: EventReader[T], message: Callable[[T], bytes], keep_alive: float, request: Request
) -> Response:
    """Return the answer that is a stream of server-sent events, one `message` for each item."""
    headers = _HEADERS | {"Content-Type": "text/event-stream"}
    if request.method == "HEAD":
        return Response(headers=headers)
    return StreamingResponse(_messages(items, message, keep_alive), headers=headers)


async def _messages(
    items: EventReader[T], message: Callable[[T], bytes], keep_alive: float
) -> AsyncIterator[bytes]:
    """Yield the messages of a stream.

    A stream is a position among the kept items and no queue, so that a slow client costs no memory.
    """
    yield b"retry: 2000\n\n"  # a client that loses the stream comes back after 2 s
    for number in count():
        if number % _TURN == _TURN - 1:
            await asyncio.sleep(0)  # kept items come without a pause
        try:
            async with asyncio.timeout(keep_alive):
                item = await anext(items)
        except TimeoutError:
            yield b":\n\n"
        except StopAsyncIteration:
            return
        else:
            yield message(item)


def answer(body: str | bytes, code: int = 200, kind: str = "text/plain", **fields: str) -> Response:
    """Return an answer that no cache keeps, with further header `fields`."""
    content = shown_bytes(body) if isinstance(body, str) else body
    return Response(content, code, _HEADERS | fields, kind)
