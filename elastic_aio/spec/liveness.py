"""How long a worker may be silent or late, and what follows: `LivenessSpec`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elastic_aio.errors import SpecError
from elastic_aio.spec.checks import check_number, set_fields

UNFINISHED_S = 60.0
"""Seconds after the first success of a job, after which the workers that run are reported."""


@dataclass(frozen=True, slots=True, init=False)
class LivenessSpec:
    """Limits of the time between two messages of a worker, and what happens after that.

    Workers report themselves through `ELASTIC_AIO_NOTIFY_FD` (see `elastic_aio.worker`).  Times
    are in seconds, and count from the start of the worker; with `ready_timeout`, the other two
    count from its `READY=1`.  None: no limit.
    """

    heartbeat_timeout: float | None = None
    """The longest time without any message of a worker."""
    ready_timeout: float | None = None
    """The longest time from the start of a worker to its `READY=1`."""
    progress_timeout: float | None = None
    """The longest time in which the step of a worker (`PROGRESS=step`) may stay the same."""
    exit_skew_timeout: float | None = None
    """The longest time from the first success of a worker of the node to the end of the others.

    The success of all workers of another node counts too.  Needs nothing of the workers.
    """
    idle_report: float | None = None
    """Report, once, that no worker of the node has used CPU time or written for this long.

    Needs nothing of the workers, and never ends them.
    """
    on_timeout: Literal["fail", "report"] = "fail"
    """After a missed deadline: "fail" fails the attempt, "report" only reports it."""

    def __init__(
        self,
        *,
        heartbeat_timeout: float | None = None,
        ready_timeout: float | None = None,
        progress_timeout: float | None = None,
        exit_skew_timeout: float | None = None,
        idle_report: float | None = None,
        on_timeout: Literal["fail", "report"] = "fail",
    ) -> None:
        """Check and keep every setting; the fields say what they mean."""
        seconds = {
            "heartbeat_timeout": heartbeat_timeout,
            "ready_timeout": ready_timeout,
            "progress_timeout": progress_timeout,
            "exit_skew_timeout": exit_skew_timeout,
            "idle_report": idle_report,
        }
        for name, value in seconds.items():
            if value is not None:
                check_number(f"liveness.{name}", value, above=0)
        if on_timeout not in ("fail", "report"):
            raise SpecError("liveness.on_timeout", on_timeout, "must be 'fail' or 'report'")
        set_fields(self, **seconds, on_timeout=on_timeout)

    @property
    def deadlines(self) -> tuple[float, ...]:
        """The limits that need messages of the workers."""
        limits = (self.heartbeat_timeout, self.ready_timeout, self.progress_timeout)
        return tuple(limit for limit in limits if limit is not None)
