"""torch.distributed.elastic.events: events for `logging` handlers, and ours in torch's form.

`event_listener("console")` is a listener for `launch` and `Agent`.  `install` leaves torch's own
module as it is; events of a job go to the handlers of both.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Self, TextIO

from elastic_aio import events as native
from elastic_aio.torch_events import TorchEvents

__all__ = [
    "Event",
    "EventMetadataValue",
    "EventSource",
    "NodeState",
    "RdzvEvent",
    "TorchEvents",
    "construct_and_record_rdzv_event",
    "event_listener",
    "get_logging_handler",
    "record",
    "record_rdzv_event",
    "register_handler",
    "torch_events",
]

EventMetadataValue = str | int | float | bool | None
"""A value of the metadata of an event."""

_TORCHS = "torch.distributed.elastic.events"


class EventSource(StrEnum):
    """Which process an event is about."""

    AGENT = "AGENT"
    WORKER = "WORKER"


class NodeState(StrEnum):
    """The state of a node in the rendezvous."""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


class _Record:
    _enum: ClassVar[tuple[str, type[StrEnum]]]

    def __str__(self) -> str:
        return self.serialize()

    @classmethod
    def deserialize(cls, data: str | Self) -> Self:
        """Read what `serialize` returned."""
        if isinstance(data, cls):
            return data
        fields = json.loads(str(data))
        name, enum = cls._enum
        return cls(**{**fields, name: enum[fields[name]]})

    def serialize(self) -> str:
        """Return the event as JSON."""
        fields: Any = self
        return json.dumps(asdict(fields))


@dataclass
class Event(_Record):
    """An event of a job: its `name`, `source`, `timestamp` (Unix milliseconds) and `metadata`."""

    name: str
    source: EventSource
    timestamp: int = 0
    metadata: dict[str, EventMetadataValue] = field(default_factory=dict)
    _enum: ClassVar[tuple[str, type[StrEnum]]] = ("source", EventSource)


@dataclass
class RdzvEvent(_Record):
    """An event of the rendezvous; `error_trace` is the traceback of a failure."""

    name: str
    run_id: str
    message: str
    hostname: str
    pid: int
    node_state: NodeState
    master_endpoint: str = ""
    rank: int | None = None
    local_id: int | None = None
    error_trace: str = ""
    _enum: ClassVar[tuple[str, type[StrEnum]]] = ("node_state", NodeState)


class _ConsoleHandler(logging.StreamHandler[TextIO]):
    """Writes to the standard error of the moment."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


_log_handlers: dict[str, logging.Handler] = {
    "console": _ConsoleHandler(),
    "dynamic_rendezvous": logging.NullHandler(),
    "null": logging.NullHandler(),
}
_loggers: dict[str, logging.Logger] = {}


def register_handler(destination: str, handler: logging.Handler) -> None:
    """Send the events for a destination to a handler from now on."""
    _log_handlers[destination] = handler
    _loggers.pop(destination, None)


def get_logging_handler(destination: str = "null") -> logging.Handler:
    """Return the handler of a destination, or raise a KeyError."""
    return _log_handlers[destination]


def _get_or_create_logger(destination: str = "null") -> logging.Logger:
    if destination not in _loggers:
        handler = get_logging_handler(destination)
        logger = logging.getLogger(f"torchelastic-events-{destination}")
        logger.setLevel(os.environ.get("LOGLEVEL", "INFO"))
        logger.propagate = False
        for former in list(logger.handlers):
            logger.removeHandler(former)
        logger.addHandler(handler)
        _loggers[destination] = logger
    return _loggers[destination]


def record(event: Event, destination: str = "null") -> None:
    """Send an event to the handler of a destination, as a line of JSON, or raise a KeyError."""
    _get_or_create_logger(destination).info("%s", event.serialize())


def record_rdzv_event(event: RdzvEvent) -> None:
    """Send an event to the handler of "dynamic_rendezvous"."""
    _get_or_create_logger("dynamic_rendezvous").info("%s", event.serialize())


def construct_and_record_rdzv_event(
    run_id: str,
    message: str,
    node_state: NodeState,
    name: str = "",
    hostname: str = "",
    pid: int | None = None,
    master_endpoint: str = "",
    local_id: int | None = None,
    rank: int | None = None,
) -> None:
    """Make a `RdzvEvent` and record it; without a handler for such events, do nothing.

    The name is by default the caller's function's; the host and the process are this one.
    """
    if isinstance(get_logging_handler("dynamic_rendezvous"), logging.NullHandler):
        return
    code = sys._getframe(1).f_code
    record_rdzv_event(
        RdzvEvent(
            name=f"{os.path.basename(code.co_filename)}:{name or code.co_name}",
            run_id=run_id,
            message=message,
            hostname=hostname or socket.getfqdn(),
            pid=pid or os.getpid(),
            node_state=node_state,
            master_endpoint=master_endpoint,
            rank=rank,
            local_id=local_id,
            error_trace=traceback.format_exc() if node_state is NodeState.FAILED else "",
        )
    )


def torch_events() -> Callable[[native.Event], list[str]]:
    """Return a function that translates the events of a node, in their order, to lines of JSON.

    Pure; `TorchEvents` has the same as dicts.
    """
    translate = TorchEvents()
    return lambda event: [json.dumps(line) for line in translate(event)]


def event_listener(destination: str = "null") -> Callable[[native.Event], None]:
    """Return a listener that records the events of a job as torch's, at a destination.

    A destination that only torch's own module knows is torch's, if that has been imported.

    Raises:
        KeyError: there is no such destination.
    """
    home: Any = sys.modules[__name__]
    if destination not in _log_handlers:
        home = sys.modules.get(_TORCHS, home)
    home.get_logging_handler(destination)
    translate = TorchEvents()

    def listen(event: native.Event) -> None:
        for line in translate(event):
            fields: dict[str, Any] = {**line, "source": EventSource[line["source"]]}
            home.record(Event(**fields), destination)

    return listen
