"""HTTP/1.1 responses: the head of a request in, the bytes of the answer out.

Pure.  The server reads no body and closes the connection after each answer, so that a
request is nothing but its head.
"""

from __future__ import annotations

from typing import Final

import msgspec

from elastic_aio.http.openmetrics import CONTENT_TYPE, format_metrics
from elastic_aio.status import JobStatus, StatusTracker
from elastic_aio.text import jsonable

HEAD_MAX: Final = 8192
"""Bytes of the head of a request."""

_TEXT: Final = "text/plain; charset=utf-8"
_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
_PATHS: Final = "/healthz  /readyz  /metrics  /status"


def response(head: bytes | None, status: StatusTracker, now: float) -> bytes:
    """Return the whole answer to a request.

    Args:
        head: the request up to its empty line; None if it is longer than `HEAD_MAX`.
        status: what the pages show.
        now: Unix seconds.
    """
    if head is None:
        return _answer(431, f"the head of a request has at most {HEAD_MAX} bytes\n")
    line = head.partition(b"\r\n")[0].decode("latin-1").split(" ")
    if len(line) != 3 or not line[2].startswith("HTTP/1."):
        return _answer(400, "not a request of HTTP/1.1\n")
    method, target, _ = line
    if method not in ("GET", "HEAD"):
        return _answer(405, "all pages are read-only\n", extra="Allow: GET, HEAD\r\n")
    code, body, kind = _page(target.partition("?")[0], status, now)
    return _answer(code, body, kind, has_body=method == "GET")


def _page(path: str, status: StatusTracker, now: float) -> tuple[int, str | bytes, str]:
    match path:
        case "/healthz":
            return 200 if status.is_alive else 503, f"{status.phase}\n", _TEXT
        case "/readyz":
            return 200 if status.is_ready else 503, f"{status.phase}\n", _TEXT
        case "/metrics":
            return 200, format_metrics(status, now), CONTENT_TYPE
        case "/status":
            return 200, _json(status.status(now)), "application/json"
        case "/":
            return 200, f"{_PATHS}\n", _TEXT
    return 404, f"the pages are {_PATHS}\n", _TEXT


def _json(page: JobStatus) -> bytes:
    try:
        return msgspec.json.encode(page) + b"\n"
    except UnicodeEncodeError:  # a path or an argument that is not UTF-8
        return msgspec.json.encode(jsonable(msgspec.to_builtins(page))) + b"\n"


def _answer(
    code: int, body: str | bytes, kind: str = _TEXT, *, has_body: bool = True, extra: str = ""
) -> bytes:
    content = body.encode("utf-8", "backslashreplace") if isinstance(body, str) else body
    head = (
        f"HTTP/1.1 {code} {_REASONS[code]}\r\n"
        f"Content-Type: {kind}\r\n"
        f"Content-Length: {len(content)}\r\n"
        "Cache-Control: no-store\r\n"
        f"{extra}"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (content if has_body else b"")
