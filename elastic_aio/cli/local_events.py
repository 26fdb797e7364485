"""The events of a job on this host, from its control socket."""

from __future__ import annotations

import argparse

from elastic_aio.cli.local_jobs import JobError, choose_job, run_command
from elastic_aio.cli.status_text import local_time
from elastic_aio.control.client import ControlClient
from elastic_aio.control.protocol import DoneReply, ErrorReply, EventReply, GetEvents
from elastic_aio.event_json import event_from_json, event_to_json
from elastic_aio.events import Event


def main_local_events(arguments: argparse.Namespace) -> int:
    """Print the events of a job on this host; return the exit code."""
    return run_command("events", lambda _: _print_events(arguments), ())


def print_event(event: Event, *, is_json: bool) -> None:
    """Print an event as a line; the text begins with its time at this host."""
    if is_json:
        line = event_to_json(event).decode()
    else:
        node = f"{event.node}: " if event.node else ""
        line = f"{local_time(event.time)}  {node}{event.sentence}"
    print(line, flush=True)


def _print_events(arguments: argparse.Namespace) -> int:
    request = GetEvents(after=arguments.after, follow=arguments.follow)
    reply = None
    with ControlClient(choose_job(arguments.job).path) as client:
        for reply in client.replies(request):
            if isinstance(reply, ErrorReply):
                raise JobError(reply.problem)
            if isinstance(reply, EventReply):
                print_event(event_from_json(bytes(reply.event)), is_json=arguments.json)
    if not isinstance(reply, DoneReply):
        raise JobError("the connection to the agent is lost: more events may have followed")
    return 0
