"""The state of a job as OpenMetrics text, which Prometheus reads.

Pure.  The format: https://prometheus.io/docs/specs/om/open_metrics_spec/
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from elastic_aio._version import __version__
from elastic_aio.status import PHASES, WORKER_STATES, JobStatus, WorkerStatus
from elastic_aio.text import shown_bytes

CONTENT_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_UNITS: Final = ("seconds", "bytes")
# Such as `17` or `17/1000`.
_STEP: Final = re.compile(r"(\d{1,15})(?![\d.])", re.ASCII)

_Samples = Sequence[tuple[Mapping[str, str], float]]
_ESCAPES: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class _Family(Struct, frozen=True):
    kind: str
    name: str
    text: str
    values: _Samples | float

    @property
    def samples(self) -> _Samples:
        return [({}, self.values)] if isinstance(self.values, int | float) else self.values


_gauge = partial(_Family, "gauge")
_counter = partial(_Family, "counter")


def format_metrics(jobs: Sequence[tuple[Mapping[str, str], JobStatus | None]], now: float) -> str:
    """Return all metrics of jobs on this node; `now` in Unix seconds.

    A job has the labels of all of its samples, and None if it does not answer; the only job of a
    server has no labels.
    """
    families = [
        _Family("info", "build", "Version of the launcher.", [({"version": __version__}, 1)])
    ]
    if any(labels for labels, _ in jobs):
        answers = [(labels, int(job is not None)) for labels, job in jobs]
        families.append(_gauge("up", "Whether the launcher of a job answers.", answers))
    merged = {family.name: family for family in families}
    for labels, job in jobs:
        for part in () if job is None else (job, *job.descendants):
            child = {"child": part.child} if part.child else {}
            for family in _families(part, now):
                before = merged[family.name].samples if family.name in merged else ()
                own = [({**labels, **child, **ours}, value) for ours, value in family.samples]
                merged[family.name] = replace(family, values=[*before, *own])
    lines = [line for family in merged.values() for line in _lines(family)]
    return "\n".join([*lines, "# EOF", ""])


def _families(job: JobStatus, now: float) -> list[_Family]:
    names = () if job.started_at is None else ("run_id", "node", "role", "entrypoint")
    identity = {name: str(getattr(job, name)) for name in names}
    phases = [({"elastic_aio_phase": phase}, int(phase == job.phase)) for phase in PHASES]
    states = [worker.state for worker in job.workers]
    counts = [({"state": state}, states.count(state)) for state in WORKER_STATES]
    changes, spent = job.membership_changes, job.goodput
    return [
        _Family("info", "job", "The job and its node.", [(identity, 1)]),
        _Family("stateset", "phase", "What the job on this node is doing.", phases),
        _gauge("workers", "Workers of this node in the latest attempt, by state.", counts),
        _gauge("attempt", "Number of the latest attempt.", job.attempt),
        _gauge("round", "Number of the rendezvous round, -1 before.", job.round),
        _counter("restarts", "Restarts after failures.", job.restarts),
        _counter(
            "membership_changes", "Restarts because nodes joined, left or were lost.", changes
        ),
        _counter("elapsed_seconds", "Time since the start.", job.elapsed),
        _counter(
            "goodput_seconds", "Time in which all workers of this node ran.", spent.productive
        ),
        _counter(
            "restarting_seconds",
            "Time from the end of attempts to the next starts.",
            spent.restarting,
        ),
        _counter(
            "waiting_seconds", "Time until the first start, and of waits for nodes.", spent.waiting
        ),
        *_workers(job.workers, now),
    ]


def _workers(workers: Sequence[WorkerStatus], now: float) -> list[_Family]:
    """Return the metrics of single workers; metrics of the next attempt begin at zero."""
    ranked = [({"rank": str(one.rank), "local_rank": str(one.local_rank)}, one) for one in workers]
    used = [(labels, one.usage) for labels, one in ranked if one.usage is not None]
    cpu = [(labels, usage.user_s + usage.system_s) for labels, usage in used]
    peak = [(labels, usage.max_rss_bytes) for labels, usage in used]
    resident = [(labels, one.rss_bytes) for labels, one in ranked if one.rss_bytes is not None]
    silent = [
        (labels, max(0.0, now - one.heartbeat))
        for labels, one in ranked
        if one.heartbeat is not None
    ]
    stepping = [
        (labels, max(0.0, now - one.step_since))
        for labels, one in ranked
        if one.step_since is not None
    ]
    steps = [(labels, int(found[1])) for labels, one in ranked if (found := _STEP.match(one.step))]
    return [
        _counter("worker_cpu_seconds", "CPU time of a worker and its reaped children.", cpu),
        _gauge("worker_resident_memory_bytes", "Resident memory of a worker.", resident),
        _gauge("worker_max_rss_bytes", "Largest resident memory of a worker so far.", peak),
        _gauge("worker_heartbeat_age_seconds", "Time since the last message of a worker.", silent),
        _gauge(
            "worker_progress_age_seconds", "Time since the last step of a worker began.", stepping
        ),
        _gauge("worker_step", "Number of the last step of a worker.", steps),
    ]


def _lines(family: _Family) -> list[str]:
    """Return the lines of a metric; a counter and an info have their suffix in each sample."""
    name = f"elastic_aio_{family.name}"
    suffix = {"counter": "_total", "info": "_info"}.get(family.kind, "")
    unit = [f"# UNIT {name} {one}" for one in _UNITS if family.name.endswith(f"_{one}")]
    return [
        f"# TYPE {name} {family.kind}",
        *unit,
        f"# HELP {name} {family.text}",
        *(f"{name}{suffix}{_labels(labels)} {_number(value)}" for labels, value in family.samples),
    ]


def _labels(labels: Mapping[str, str]) -> str:
    pairs = ",".join(
        f'{name}="{shown_bytes(text).decode().translate(_ESCAPES)}"'
        for name, text in labels.items()
    )
    return f"{{{pairs}}}" if pairs else ""


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}"
