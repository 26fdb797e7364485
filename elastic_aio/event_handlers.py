"""`--event-log-handler`: the events in torch's format, on the console or for a plug-in.

A plug-in is an entry point of the group `elastic_aio.event_handlers`, or of torchrun's own
`torchrun.handlers`: a `logging.Handler`, or a function without arguments that returns one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Final

from elastic_aio.events import Event
from elastic_aio.spec.checks import UsageError, invalid_value
from elastic_aio.torch_events import TorchEvents

Send = Callable[[str], None]

GROUPS: Final = ("elastic_aio.event_handlers", "torchrun.handlers")
"""Entry point groups of handlers; the first one wins."""


def load_event_handler(name: str) -> Callable[[Send], Callable[[Event], None]]:
    """Load a handler; return what makes a listener for events.

    That function takes what writes a line to standard error, which "console" uses.

    Args:
        name: "console" or the name of a plug-in.

    Raises:
        UsageError: there is no such handler, or it cannot be loaded.
    """
    plugin = None if name == "console" else _plugin(name)

    def make_listener(print_line: Send) -> Callable[[Event], None]:
        send, translate = plugin or print_line, TorchEvents()

        def on_event(event: Event) -> None:
            for line in translate(event):
                send(json.dumps(line))

        return on_event

    return make_listener


def _plugin(name: str) -> Send:
    from importlib.metadata import entry_points  # searching for plug-ins takes a while

    found = [entry for group in GROUPS for entry in entry_points(group=group)]
    for entry in found:
        if entry.name != name:
            continue
        try:
            loaded = entry.load()
            handler = loaded if isinstance(loaded, logging.Handler) else loaded()
        except Exception as error:
            problem = f"{name} cannot be loaded: {error!r}"
            raise UsageError(f"--event-log-handler: {problem}") from error
        if not isinstance(handler, logging.Handler):
            raise invalid_value("--event-log-handler", "must name a logging.Handler", name)
        return _record_sender(name, handler)
    known = ", ".join(sorted({"console", "null", *(entry.name for entry in found)}))
    raise invalid_value("--event-log-handler", f"must be one of: {known}", name)


def _record_sender(name: str, handler: logging.Handler) -> Send:
    logger = f"torchelastic-events-{name}"

    def send(line: str) -> None:
        handler.handle(logging.LogRecord(logger, logging.INFO, __file__, 0, line, (), None))

    return send
