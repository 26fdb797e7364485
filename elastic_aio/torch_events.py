"""This library's events as torch's: the same names, metadata and metrics, with true times.

Pure but for the plug-ins: a `TorchEvents` (or `TorchMetrics`) reads the stream of one node in its
order, since torch repeats in each event what ours say once.

========================  ==================================================================
event here                torch's events
========================  ==================================================================
WorkerStarted, RoundFormed  AGENT RENDEZVOUS and ASSIGN_WORKER_RANKS, once for each attempt
WorkerStarted             AGENT `watchdog started`, once for each attempt of a job with timers;
                          WORKER START
TimerExpired              AGENT `timer expired`, and `kill worker process` if it has a signal
StopRequested, JobFinished  AGENT `watchdog stopped`, once for each attempt of a job with timers
JobFinished               WORKER SUCCEEDED, FAILED or TERMINATED for each worker of the last
                          attempt, at the time of its exit; AGENT SUCCEEDED, or FAILED if not
                          the workers have failed but the launcher or the rendezvous
========================  ==================================================================
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any, Final

from msgspec import Struct

from elastic_aio import events, node_events
from elastic_aio.outcome import Failure, JobState
from elastic_aio.spec.checks import UsageError, invalid_value
from elastic_aio.status import StatusTracker
from elastic_aio.text import redacted

GROUPS: Final = ("elastic_aio.event_handlers", "torchrun.handlers")
"""Entry point groups of handlers, torchrun's own among them; the first wins."""

_OPTION: Final = "--event-log-handler"


class _Worker(Struct):
    """A worker of the present attempt; `exit` is set when it has exited."""

    started: events.WorkerStarted
    exit: events.WorkerExited | None = None


class _Job:
    """The status of the job on this node, and what else torch's events need."""

    def __init__(self) -> None:
        self.status = StatusTracker()
        self.started = events.JobStarted(
            entrypoint="", nproc_per_node=0, nnodes="1", max_restarts=0, agent_pid=0
        )
        self.attempt = -1
        self.joining_since = 0.0
        self.joined_after = 0.0
        self.workers: dict[int, _Worker] = {}
        self.failures: dict[int, Failure] = {}

    @property
    def world_size(self) -> int:
        return self.status.job.world_size or self.status.nproc

    @property
    def remaining(self) -> int:
        return self.status.status(0.0).restarts_left

    def read(self, event: events.Event) -> None:
        self.status(event)
        match event:
            case events.JobStarted():
                self.started = event
                self.joining_since = event.time
            case events.Restarting():
                self.joining_since = event.time + event.delay
            case node_events.MembershipChanged():
                self.joining_since = event.time
            case node_events.RoundFormed():
                self.joined_after = max(0.0, event.time - self.joining_since)
            case events.WorkerStarted():
                if event.attempt != self.attempt:
                    self.attempt = event.attempt
                    self.workers, self.failures = {}, {}
                self.workers[event.rank] = _Worker(event)
            case events.WorkerExited():
                if event.rank in self.workers and event.attempt == self.attempt:
                    self.workers[event.rank].exit = event
            case events.AttemptFailed():
                self.failures = {failure.rank: failure for failure in event.failures}


class TorchEvents:
    """Translates the events of one node, in their order; called with each."""

    def __init__(self) -> None:
        self._job = _Job()
        self._joined_attempt = -1
        self._is_watching = False

    def __call__(self, event: events.Event) -> list[dict[str, Any]]:
        """Return torch's events for an event: `name`, `source`, `timestamp` (ms), `metadata`."""
        self._job.read(event)
        match event:
            case events.WorkerStarted():
                return [*self._joined(event), self._worker(event, event, "START")]
            case events.TimerExpired():
                return self._timer(event)
            case events.StopRequested():
                return self._watchdog_stopped(event)
            case events.JobFinished():
                return [*self._watchdog_stopped(event), *self._finished(event)]
        return []

    def _joined(self, event: events.WorkerStarted) -> list[dict[str, Any]]:
        if self._joined_attempt == event.attempt:
            return []
        self._joined_attempt = event.attempt
        self._is_watching = self._job.started.has_timers
        return [
            self._agent(event, "RENDEZVOUS", duration_ms=self._job.joined_after * 1000),
            self._agent(event, "ASSIGN_WORKER_RANKS", duration_ms=0.0),  # the round has them
            *([self._watchdog(event, "watchdog started")] if self._is_watching else ()),
        ]

    def _watchdog_stopped(self, event: events.Event) -> list[dict[str, Any]]:
        if not self._is_watching:
            return []
        self._is_watching = False
        return [self._watchdog(event, "watchdog stopped")]

    def _timer(self, event: events.TimerExpired) -> list[dict[str, Any]]:
        details = {
            "worker_pid": str(event.pid),
            "scope_id": event.scope,
            "expiration_time": str(event.time - event.age + event.limit),
            "signal": str(event.signal),
        }
        names = ["timer expired", "kill worker process"][: 2 if event.signal else 1]
        return [self._watchdog(event, name, details) for name in names]

    def _watchdog(
        self, event: events.Event, name: str, details: dict[str, str] | None = None
    ) -> dict[str, Any]:
        line = self._agent(event, "RUNNING", {"watchdog_event": name, **(details or {})})
        del line["metadata"]["duration_ms"]
        return line | {"name": name}

    def _finished(self, event: events.JobFinished) -> list[dict[str, Any]]:
        job = self._job
        lines = []
        for rank, worker in job.workers.items():
            at = worker.exit or event
            failure = job.failures.get(rank)
            state = "FAILED"
            if event.state is JobState.SUCCEEDED:
                state = "SUCCEEDED"
            elif failure is None or failure.is_victim:
                state = "TERMINATED"
            lines.append(self._worker(at, worker.started, state, failure))
        if event.state is JobState.SUCCEEDED or (event.state is JobState.FAILED and job.failures):
            return [*lines, self._agent(event, "SUCCEEDED")]
        return [*lines, self._agent(event, "FAILED", raw_error=event.why)]

    def _worker(
        self,
        at: events.Event,
        worker: events.WorkerStarted,
        state: str,
        failure: Failure | None = None,
    ) -> dict[str, Any]:
        job = self._job
        size = worker.role_world_size
        details = {
            "local_rank": [worker.local_rank],
            "role_rank": [worker.rank if worker.role_rank < 0 else worker.role_rank],
            "role_world_size": [job.world_size if size < 0 else size],
            "exit_code": [None if failure is None else failure.status.returncode],
            "worker_pid": [None if failure is None else failure.pid],
        }
        own: dict[str, Any] = {"global_rank": worker.rank, "worker_id": str(worker.pid)}
        if failure is not None:
            own["raw_error"] = json.dumps(_error_data(failure))
        return self._line(at, "WORKER", state, details, own)

    def _agent(
        self,
        at: events.Event,
        state: str,
        details: dict[str, Any] | None = None,
        **own: object,
    ) -> dict[str, Any]:
        return self._line(at, "AGENT", state, details or {}, own)

    def _line(
        self,
        at: events.Event,
        source: str,
        state: str,
        details: dict[str, Any],
        own: dict[str, Any],
    ) -> dict[str, Any]:
        started, job = self._job.started, self._job.status.job
        if state != "RUNNING":  # of a timer
            common = {"group_world_size": job.group_world_size, "entry_point": started.entrypoint}
            details = common | details
        metadata: dict[str, Any] = {
            "run_id": at.run_id,
            "global_rank": None,
            "group_rank": job.group_rank,
            "worker_id": None,
            "role": started.role,
            "hostname": at.node,
            "state": state,
            "total_run_time": int(max(0.0, at.time - started.time)),
            "rdzv_backend": started.rdzv_backend,
            "raw_error": None,
            "metadata": json.dumps(details),
            "agent_restarts": self._job.status.restarts,
            "duration_ms": None,
        }
        return {
            "name": f"torchelastic.worker.status.{state}",
            "source": source,
            "timestamp": int(at.time * 1000),
            "metadata": metadata | own,
        }


def _error_data(failure: Failure) -> dict[str, Any]:
    """Return the content of a worker's error file as torch reports it."""
    if failure.error is not None:
        error = failure.error
        extra = {"py_callstack": error.traceback or "", "timestamp": str(int(error.timestamp))}
        return {"message": {"message": error.message, "extraInfo": extra}}
    data: dict[str, Any] = {"message": "<NONE>"}
    if failure.status.code is not None:
        data["errorTraits"] = {
            "category": "system_terminated_error",
            "retryability": "False",
        }
    return data


class TorchMetrics:
    """Translates the events of one node to torch's metrics; called with each in its order.

    torch repeats the state of the workers at each poll; here it is reported when it changes.
    """

    def __init__(self) -> None:
        self._job = _Job()

    def __call__(self, event: events.Event) -> list[tuple[str, int]]:
        """Return names and values of the metrics that an event changes."""
        job, former = self._job, self._job.attempt
        job.read(event)
        match event:
            case events.WorkerStarted() if event.attempt != former:
                return self._named([("remaining_restarts", job.remaining), ("healthy", 1)])
            case events.AttemptFailed():
                return self._named([("remaining_restarts", job.remaining), ("failed", 1)])
            case events.JobFinished():
                return self._named(self._finished(event))
        return []

    def _finished(self, event: events.JobFinished) -> list[tuple[str, int]]:
        is_failed = event.state is not JobState.SUCCEEDED
        has_restarted = event.restarts > 0
        budget = self._job.started.max_restarts + 1
        flakiness = 100.0 if is_failed else 100.0 - 100.0 * (self._job.remaining + 1) / budget
        return [
            *([] if is_failed else [("succeeded", 1)]),
            ("flakiness", int(flakiness)),
            ("run_total", 1),
            ("run_success_with_retries", int(not is_failed and has_restarted)),
            ("run_success_no_retries", int(not is_failed and not has_restarted)),
            ("run_failed_with_retries", int(is_failed and has_restarted)),
            ("run_failed_no_retries", int(is_failed and not has_restarted)),
        ]

    def _named(self, metrics: list[tuple[str, int]]) -> list[tuple[str, int]]:
        return [(f"workers.{self._job.started.role}.{name}", value) for name, value in metrics]


Send = Callable[[str], None]


def load_event_handler(name: str) -> Callable[[Send], Callable[[events.Event], None]]:
    """Load a handler of `--event-log-handler`; return the maker of a listener for events.

    The maker takes a function that writes a line to standard error, which "console" uses.  Another
    name names an entry point: a `logging.Handler`, or a function that returns one.

    Raises:
        UsageError: there is no such handler, or it cannot be loaded.
    """
    plugin = None if name == "console" else _plugin(name)

    def make_listener(print_line: Send) -> Callable[[events.Event], None]:
        send, translate = plugin or print_line, TorchEvents()

        def on_event(event: events.Event) -> None:
            for line in translate(event):
                send(redacted(json.dumps(line)))

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
            raise UsageError(f"{_OPTION}: {name} cannot be loaded: {error!r}") from error
        if not isinstance(handler, logging.Handler):
            raise invalid_value(_OPTION, "must name a logging.Handler", name)
        return _record_sender(name, handler)
    known = ", ".join(sorted({"console", "null", *(entry.name for entry in found)}))
    raise invalid_value(_OPTION, f"must be one of: {known}", name)


def _record_sender(name: str, handler: logging.Handler) -> Send:
    logger = f"torchelastic-events-{name}"

    def send(line: str) -> None:
        handler.handle(logging.LogRecord(logger, logging.INFO, __file__, 0, line, (), None))

    return send
