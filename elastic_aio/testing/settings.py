"""What the workers of a simulated node do."""

from __future__ import annotations

from msgspec import Struct


class WorkerBehavior(Struct, frozen=True):
    """What the workers of one node do in one round.

    Attributes:
        seconds: for how long they run; None (the default): until they are stopped.
        exit_code: with which one of them exits then; 0: all succeed.
        start_duration: seconds until they run.
        stop_duration: seconds that they need to stop.
    """

    seconds: float | None = None
    exit_code: int = 0
    start_duration: float = 0.05
    stop_duration: float = 0.05
