"""HTTP/1.1 responses: the head of a request in, the bytes of the answer out.

Pure.  The server reads no body and closes the connection after each answer, so that a
request is nothing but its head.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from elastic_aio.event_json import event_to_json
from elastic_aio.events import Event
from elastic_aio.http.openmetrics import CONTENT_TYPE, format_metrics
from elastic_aio.ranks import format_ranks
from elastic_aio.status import JobStatus, StatusTracker, WorkerStatus
from elastic_aio.text import jsonable

HEAD_MAX: Final = 8192
"""Bytes of the head of a request."""

LOG_MAX: Final = 64 * 1024
"""Bytes of the end of a log file that a page shows."""

STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\n"
    b"Content-Type: text/event-stream\r\n"
    b"Cache-Control: no-store\r\n"
    b"X-Content-Type-Options: nosniff\r\n"
    b"Connection: close\r\n\r\n"
    b"retry: 2000\n\n"
)
"""What precedes the events of a stream; a client that loses it comes back after 2 s."""

STREAM_ALIVE: Final = b":\n\n"
"""A comment: nothing has happened, and the connection exists."""

_TEXT: Final = "text/plain; charset=utf-8"
_HTML: Final = "text/html; charset=utf-8"
_REASONS: Final = {
    200: "OK",
    204: "No Content",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
_PATHS: Final = "/  /healthz  /readyz  /metrics  /status  /events  /logs/RANK/stdout|stderr"
_POLICY: Final = (
    "Content-Security-Policy: default-src 'none'; connect-src 'self'; script-src 'unsafe-inline';"
    " style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n"
)


class HttpRequest(Struct, frozen=True):
    """A request that can be answered.

    Attributes:
        is_head: whether only the head of the answer is asked for.
        path: without the query.
        last_event: the header `Last-Event-ID`; -1 without one.
    """

    is_head: bool
    path: str
    last_event: int = -1


def parse_request(head: bytes | None, *, is_loopback: bool = False) -> HttpRequest | bytes:
    """Return a request, or the whole answer to one that is refused.

    Args:
        head: the request up to its empty line; None if it is longer than `HEAD_MAX`.
        is_loopback: whether the server listens for this host only.  Then another name in
            `Host` is that of a web site, which a browser here was led to (DNS rebinding).
    """
    if head is None:
        return answer(431, f"the head of a request has at most {HEAD_MAX} bytes\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    line = first.split(" ")
    if len(line) != 3 or not line[2].startswith("HTTP/1."):
        return answer(400, "not a request of HTTP/1.1\n")
    method, target, _ = line
    if method not in ("GET", "HEAD"):
        return answer(405, "all pages are read-only\n", extra="Allow: GET, HEAD\r\n")
    fields = {
        name.strip().lower(): value.strip()
        for name, _, value in (one.partition(":") for one in lines)
    }
    if is_loopback and not _is_local(fields.get("host", "")):
        return answer(403, "this server is for its own host: use localhost or an address\n")
    last = fields.get("last-event-id", "")
    number = int(last) if last.isascii() and last.isdigit() and len(last) < 19 else -1
    return HttpRequest(method == "HEAD", target.partition("?")[0], number)


def _is_local(host: str) -> bool:
    """Return whether the `Host` of a request is an address, `localhost` or missing."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    is_address = name.startswith("[") or name.replace(".", "").isdigit()
    return not name or is_address or name.lower().rstrip(".").split(".")[-1] == "localhost"


def response(
    request: HttpRequest,
    status: StatusTracker,
    now: float,
    page: bytes = b"",
    workers: tuple[WorkerStatus, ...] | None = None,
) -> bytes:
    """Return the whole answer to a request for what is in memory.

    Args:
        request: the request.
        status: what the pages show.
        now: Unix seconds.
        page: the page for people, at `/`.
        workers: those of `status` with what they have used and reported; None: as in `status`.
    """
    present = status.status(now)
    if workers is not None:
        present = replace(present, workers=workers)
    code, body, kind = _page(request.path, status, now, page, present)
    extra = _POLICY if kind == _HTML else ""
    return answer(code, body, kind, has_body=not request.is_head, extra=extra)


def _page(
    path: str, status: StatusTracker, now: float, page: bytes, present: JobStatus
) -> tuple[int, str | bytes, str]:
    match path:
        case "/healthz":
            return 200 if status.is_alive else 503, f"{status.phase}\n", _TEXT
        case "/readyz":
            return 200 if status.is_ready else 503, f"{status.phase}\n", _TEXT
        case "/metrics":
            return 200, format_metrics(status, now, present.workers), CONTENT_TYPE
        case "/status":
            return 200, _json(present), "application/json"
        case "/":
            return 200, page, _HTML
    return 404, _not_found(path, status), _TEXT


def _not_found(path: str, status: StatusTracker) -> str:
    match path.split("/"):
        case ["", "logs", rank, ("stdout" | "stderr") as stream] if rank.isdecimal():
            if int(rank[:9]) in status.workers:
                return f"{stream} of rank {int(rank[:9])} is in no file (see --tee, --redirects)\n"
            known = format_ranks(status.workers) or "none"
            return f"no worker of this node has rank {rank[:9]}; it has: {known}\n"
    return f"the pages are {_PATHS}\n"


def log_path(path: str, status: StatusTracker) -> str | None:
    """Return the log file that `/logs/RANK/STREAM` stands for; None for another path.

    The path comes from the job, and never from the request.
    """
    match path.split("/"):
        case ["", "logs", rank, ("stdout" | "stderr") as stream] if rank.isdecimal():
            worker = status.workers.get(int(rank[:9]))
            if worker is not None:
                return worker.stdout_path if stream == "stdout" else worker.stderr_path
    return None


def server_sent(event: Event) -> bytes:
    """Return an event as a message of a stream; its `id` is the cursor."""
    return b"id: %d\ndata: %b\n\n" % (event.seq, event_to_json(event))


def _json(page: JobStatus) -> bytes:
    try:
        return msgspec.json.encode(page) + b"\n"
    except UnicodeEncodeError:  # a path or an argument that is not UTF-8
        return msgspec.json.encode(jsonable(msgspec.to_builtins(page))) + b"\n"


def answer(
    code: int, body: str | bytes, kind: str = _TEXT, *, has_body: bool = True, extra: str = ""
) -> bytes:
    """Return a whole answer; `extra` are further lines of its head."""
    content = body.encode("utf-8", "backslashreplace") if isinstance(body, str) else body
    # RFC 9110, 8.6: none in an answer that never has a body.
    length = "" if code == 204 else f"Content-Length: {len(content)}\r\n"
    head = (
        f"HTTP/1.1 {code} {_REASONS[code]}\r\n"
        f"Content-Type: {kind}\r\n"
        f"{length}"
        "Cache-Control: no-store\r\n"
        "X-Content-Type-Options: nosniff\r\n"
        f"{extra}"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (content if has_body else b"")
