"""The state of a job as OpenMetrics text, which Prometheus reads.

Pure.  The format: https://prometheus.io/docs/specs/om/open_metrics_spec/
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from elastic_aio._version import __version__
from elastic_aio.status import PHASES, WORKER_STATES, JobStatus, WorkerStatus

CONTENT_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_UNITS: Final = ("seconds", "bytes")
# Such as `17` or `17/1000`.
_STEP: Final = re.compile(r"(\d{1,15})(?![\d.])", re.ASCII)

_ESCAPES: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def format_metrics(status: JobStatus, now: float) -> str:
    """Return all metrics of a job on this node; `now` in Unix seconds."""
    states = [worker.state for worker in status.workers]
    lines = [
        *_family("build", "info", "Version of the launcher.", [({"version": __version__}, 1)]),
        *_family("job", "info", "The job and its node.", [(_identity(status), 1)]),
        *_family(
            "phase",
            "stateset",
            "What the job on this node is doing.",
            [({"elastic_aio_phase": phase}, int(phase == status.phase)) for phase in PHASES],
        ),
        *_family(
            "workers",
            "gauge",
            "Workers of this node in the latest attempt, by state.",
            [({"state": state}, states.count(state)) for state in WORKER_STATES],
        ),
        *_value("attempt", "gauge", "Number of the latest attempt.", status.attempt),
        *_value("round", "gauge", "Number of the rendezvous round, -1 before.", status.round),
        *_value("restarts", "counter", "Restarts after failures.", status.restarts),
        *_value(
            "membership_changes",
            "counter",
            "Restarts because nodes joined, left or were lost.",
            status.membership_changes,
        ),
        *_value("elapsed_seconds", "counter", "Time since the start.", status.elapsed),
        *_value(
            "goodput_seconds",
            "counter",
            "Time in which all workers of this node ran.",
            status.goodput.productive,
        ),
        *_value(
            "restarting_seconds",
            "counter",
            "Time from the end of attempts to the next starts.",
            status.goodput.restarting,
        ),
        *_value(
            "waiting_seconds",
            "counter",
            "Time until the first start, and of waits for nodes.",
            status.goodput.waiting,
        ),
        *_workers(status.workers, now),
    ]
    return "\n".join([*lines, "# EOF", ""])


def _identity(status: JobStatus) -> dict[str, str]:
    if status.started_at is None:
        return {}
    return {name: getattr(status, name) for name in ("run_id", "node", "role", "entrypoint")}


def _workers(workers: Sequence[WorkerStatus], now: float) -> list[str]:
    """Return what is known of single workers; those of the next attempt begin at zero."""
    usages = [(_rank(one), one.usage) for one in workers if one.usage is not None]
    resident = [(_rank(one), one.rss_bytes) for one in workers if one.rss_bytes is not None]
    beats = [(_rank(one), one.heartbeat) for one in workers if one.heartbeat is not None]
    steps = [(_rank(one), one.step_since) for one in workers if one.step_since is not None]
    numbers = [(_rank(one), found) for one in workers if (found := _STEP.match(one.step))]
    families = [
        _family(
            "worker_cpu_seconds",
            "counter",
            "CPU time of a worker and its reaped children.",
            [(labels, usage.user_s + usage.system_s) for labels, usage in usages],
        ),
        _family(
            "worker_resident_memory_bytes",
            "gauge",
            "Resident memory of a worker.",
            resident,
        ),
        _family(
            "worker_max_rss_bytes",
            "gauge",
            "Largest resident memory of a worker so far.",
            [(labels, usage.max_rss_bytes) for labels, usage in usages],
        ),
        _family(
            "worker_heartbeat_age_seconds",
            "gauge",
            "Time since the last message of a worker.",
            [(labels, max(0.0, now - at)) for labels, at in beats],
        ),
        _family(
            "worker_progress_age_seconds",
            "gauge",
            "Time since the last step of a worker began.",
            [(labels, max(0.0, now - at)) for labels, at in steps],
        ),
        _family(
            "worker_step",
            "gauge",
            "Number of the last step of a worker.",
            [(labels, int(found[1])) for labels, found in numbers],
        ),
    ]
    return [line for family in families for line in family]


def _rank(worker: WorkerStatus) -> dict[str, str]:
    return {"rank": str(worker.rank), "local_rank": str(worker.local_rank)}


def _value(name: str, kind: str, text: str, value: float) -> list[str]:
    return _family(name, kind, text, [({}, value)])


def _family(
    name: str, kind: str, text: str, samples: Iterable[tuple[Mapping[str, str], float]]
) -> list[str]:
    """Return the lines of one metric; a counter and an info have their suffix in each sample."""
    family = f"elastic_aio_{name}"
    suffix = {"counter": "_total", "info": "_info"}.get(kind, "")
    unit = [f"# UNIT {family} {one}" for one in _UNITS if name.endswith(f"_{one}")]
    return [
        f"# TYPE {family} {kind}",
        *unit,
        f"# HELP {family} {text}",
        *(f"{family}{suffix}{_labels(labels)} {_number(value)}" for labels, value in samples),
    ]


def _labels(labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{name}="{text.translate(_ESCAPES)}"' for name, text in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}"
