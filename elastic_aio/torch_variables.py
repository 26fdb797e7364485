"""The variables of torchrun that a launcher reads, by its command line and by torch's interface."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from elastic_aio.spec.checks import invalid_value, parse_port, parse_seconds
from elastic_aio.worker.context import RUN_ID, SCHEDULERS, TIMER_FILE, is_in_worker

HEALTH_VARIABLE: Final = "TORCHELASTIC_HEALTH_CHECK_PORT"
_TIMERS: Final = "TORCHELASTIC_ENABLE_FILE_TIMER"
_UNINTERRUPTIBLE: Final = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"


def outside_worker(env: Mapping[str, str]) -> tuple[Mapping[str, str], list[str]]:
    """Return the variables that describe a job, and a line if a worker's variables are left out.

    In a worker the scheduler's variables and PET_* describe the job of this worker: another job
    with them would take a rank of it, or wait for one for ever.
    """
    left_out = {name for name in env if name.startswith((*SCHEDULERS, "PET_"))}
    if not left_out or not is_in_worker(env):
        return env, []
    kinds = sorted({f"{name.partition('_')[0]}_*" for name in left_out})
    rest = {name: value for name, value in env.items() if name not in left_out}
    run = env.get(RUN_ID, "another job")
    return rest, [f"inside a worker of {run}: {', '.join(kinds)} are not read, options are"]


def timers_from(env: Mapping[str, str]) -> bool | str:
    """Return where the pipe of the timers is made: False for none."""
    # In a worker the path names the pipe of its own job.
    path = "" if RUN_ID in env else env.get(TIMER_FILE)
    return env.get(_TIMERS) == "1" and (path or True)


def health_address_from(env: Mapping[str, str]) -> str | None:
    """Return the `HOST:PORT` of torch's health check: on loopback; None for none.

    Raises:
        UsageError: the variable is not a port.
    """
    port = env.get(HEALTH_VARIABLE)
    # In a worker the port belongs to its own job.
    if not port or RUN_ID in env:
        return None
    if parse_port(port) is None:
        raise invalid_value(HEALTH_VARIABLE, "must be a port from 1 to 65535", port)
    return f"127.0.0.1:{port}"


def uninterruptible_timeout_from(env: Mapping[str, str]) -> float | None:
    """Return the limit in seconds of uninterruptible system calls; None is no limit."""
    text = env.get(_UNINTERRUPTIBLE, "")
    # As in torch, a number that is not above 0 is no limit.
    if not text or re.fullmatch(r"-\d+(\.\d*)?", text):
        return None
    return parse_seconds(_UNINTERRUPTIBLE, text, limit=1e9) or None
