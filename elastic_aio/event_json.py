"""The JSON form of events: one object per line.

`schema` is the version of the form, `event` the name of the type; the rest are the fields.  Readers
must ignore unknown fields.  A job without children has no `child`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import msgspec

from elastic_aio import events
from elastic_aio.events import Event
from elastic_aio.text import one_line, os_bytes
from elastic_aio.value import from_json, to_json

SCHEMA = 1
"""Version of the JSON form; incremented when a field changes its meaning."""

TIME_MAX = 1e11
"""Unix seconds: a later time is no time, and cannot be shown as a date."""


def event_to_json(event: Event) -> bytes:
    """Return an event as one JSON object, without a newline."""
    body = to_json(event)
    if not event.child:
        body = body.replace(b'"child":"",', b"", 1)
    return b'{"schema":%d,' % SCHEMA + body[1:]


def event_from_json(line: bytes | str) -> Event:
    """Read what `event_to_json` wrote, or raise ValueError: it is no event, or a newer schema."""
    return event_from_fields(from_json(os_bytes(line) if isinstance(line, str) else line, dict))


def event_from_fields(fields: Any) -> Event:
    """Read the same as `event_from_json` of the object that its JSON has."""
    head = msgspec.convert(fields, _Head)
    if head.schema > SCHEMA:
        raise ValueError(f"events of schema {head.schema} are newer than this reader ({SCHEMA})")
    if (kind := _kinds().get(head.event)) is None:
        raise ValueError(f"{head.event!r} is no event of this release")
    decoded: Event = msgspec.convert(fields, kind, str_keys=True)
    return decoded


def read_events(lines: Iterable[bytes]) -> list[Event]:
    """Return the events of the last run in lines of JSON, or raise a ValueError.

    An unfinished last line, which is being written, is left out.
    """
    history: list[Event] = []
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            break
        try:
            event = event_from_json(line)
            if abs(event.time) >= TIME_MAX:
                raise ValueError("its time is too large")
        except ValueError as error:
            raise ValueError(f"line {number} is no event: {one_line(str(error))}") from None
        if isinstance(event, events.JobStarted):
            history.clear()
        history.append(event)
    return history


class _Head(msgspec.Struct):
    schema: int
    event: str


@functools.cache
def _kinds() -> dict[str, type[Event]]:
    from elastic_aio import child_events, node_events  # a launcher only encodes

    ours = events.__name__, node_events.__name__, child_events.__name__
    kinds = [kind for kind in Event.__subclasses__() if kind.__module__ in ours]
    return {kind.__name__: kind for kind in kinds}
