"""How long a worker may be silent or late, and what follows: `LivenessSpec`."""

from __future__ import annotations

from typing import Literal

from elastic_aio.spec.checks import OneOf, Seconds
from elastic_aio.spec.fields import SpecValue, field

UNFINISHED_S = 60.0
"""Seconds after the first success of a job, after which the workers that run are reported."""


class LivenessSpec(SpecValue, prefix="liveness."):
    """Limits of the time between two messages of a worker, and the action after that.

    Workers report themselves through `ELASTIC_AIO_NOTIFY_FD` (see `elastic_aio.worker`).  Times are
    in seconds, and count from the start of the worker; with `ready_timeout`, the other two count
    from its `READY=1`.  None: no limit.
    """

    heartbeat_timeout: float | None = field(
        default=None,
        check=Seconds(above=0),
        own_option="--heartbeat-timeout SECONDS",
        help="fail the attempt when a worker has sent no message for so long (see"
        " ELASTIC_AIO_NOTIFY_FD in the guide of hangs) (default: no limit)",
    )
    """The longest time without any message of a worker."""
    ready_timeout: float | None = field(
        default=None,
        check=Seconds(above=0),
        own_option="--ready-timeout SECONDS",
        help="fail the attempt when a worker has not sent READY=1 so long after its start (default:"
        " no limit)",
    )
    """The longest time from the start of a worker to its `READY=1`."""
    progress_timeout: float | None = field(
        default=None,
        check=Seconds(above=0),
        own_option="--progress-timeout SECONDS",
        help="fail the attempt when a worker has sent the same PROGRESS, or none, for so long"
        " (default: no limit)",
    )
    """The longest time in which the step of a worker (`PROGRESS=step`) may stay the same."""
    exit_skew_timeout: float | None = field(
        default=None,
        check=Seconds(above=0),
        own_option="--exit-skew-timeout SECONDS",
        help="fail the attempt when a worker still runs so long after the first of its node, or all"
        " of another node, have exited with 0 (default: no limit)",
    )
    """The longest time from the first success of a worker of the node, or of all workers of another
    node, to the end of the others.  Needs nothing of the workers."""
    on_timeout: Literal["fail", "report"] = field(
        default="fail",
        check=OneOf(("fail", "report")),
        own_option="--on-timeout ACTION",
        help="after such a time: 'fail' (the attempt) or 'report' (and go on) (default 'fail')",
    )
    """After a missed deadline: "fail" fails the attempt, "report" only reports it."""
    notify_access: Literal["main", "all"] = field(
        default="main",
        check=OneOf(("main", "all")),
        own_option="--notify-access PROCESSES",
        help="whose messages count: 'main' (of the worker itself) or 'all' (also of processes that"
        " it has started) (default 'main')",
    )
    """Whose messages count: "main": of the process of the worker itself; "all": also of those that
    it has started."""
    idle_report: float | None = field(
        default=None,
        check=Seconds(above=0),
        own_option="--idle-report SECONDS",
        help="report once that no worker has used CPU time or written for so long (default: never)",
    )
    """Report, once, that no worker of the node has used CPU time or written for this long.  Needs
    nothing of the workers, and never ends them."""

    @property
    def deadlines(self) -> tuple[float, ...]:
        """The limits that need messages of the workers."""
        limits = (self.heartbeat_timeout, self.ready_timeout, self.progress_timeout)
        return tuple(limit for limit in limits if limit is not None)
