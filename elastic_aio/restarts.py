"""May there be another attempt, when, and by which rule."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from elastic_aio.outcome import Failure
from elastic_aio.policy import Action, RestartPolicy

__all__ = ["RestartBook", "Verdict"]


class Verdict(Struct, frozen=True):
    """Whether to restart, why, and after how many seconds."""

    restart: bool
    why: str
    delay: float = 0.0


class RestartBook:
    """Keeps count of the restarts of one job and judges each failure."""

    def __init__(
        self, max_restarts: int, policy: RestartPolicy, random: Callable[[], float]
    ) -> None:
        """Begin with no restart; `random` gives numbers from 0 to 1 for the jitter."""
        self._max_restarts = max_restarts
        self._policy = policy
        self._random = random
        self._restarts_at: list[float] = []
        self._resumed = 0
        self._consecutive = 0

    def __repr__(self) -> str:
        return f"<RestartBook: {self.restarts} of {self._max_restarts} restarts used>"

    @property
    def restarts(self) -> int:
        """How many restarts there were."""
        return self._resumed + len(self._restarts_at)

    @property
    def is_used_up(self) -> bool:
        """Whether `max_restarts` allows no further one."""
        return self.restarts >= self._max_restarts

    def judge(self, root: Failure, action: Action, ran: float, now: float) -> Verdict:
        """Decide about a failure; a restart that is granted is not yet counted.

        The rules, in order: a callback that gives up, `max_restarts`, the exit codes
        (a callback that says RESTART passes over them), the window.

        Args:
            root: the root cause.
            action: what the callback said, or BY_POLICY.
            ran: seconds that the attempt lived.
            now: clock seconds.
        """
        policy, code = self._policy, root.status.shell_code
        if action is Action.GIVE_UP:
            return Verdict(False, "restart.decide said to give up")
        if self.is_used_up:
            return Verdict(False, self._used_up())
        if action is Action.BY_POLICY:
            if code in policy.never_on:
                return Verdict(False, f"exit code {code} is in restart.never_on")
            if policy.restart_on is not None and code not in policy.restart_on:
                return Verdict(False, f"exit code {code} is not in restart.restart_on")
        if policy.window and policy.window.is_exhausted(self._restarts_at, now):
            count, seconds = policy.window.count, policy.window.seconds
            return Verdict(False, f"{count} restarts within {seconds:g} s (restart.window)")
        why = f"restart {self.restarts + 1} of {self._max_restarts} (max_restarts)"
        if action is Action.RESTART:
            why += ", restart.decide said so"
        return Verdict(True, why, self._delay(ran))

    def resume(self, restarts: int) -> None:
        """Go on where another book has counted that many; when they were is not known."""
        self._resumed = max(0, restarts - len(self._restarts_at))

    def count(self, now: float) -> None:
        """Count a restart that is going to happen."""
        self._restarts_at.append(now)

    def _used_up(self) -> str:
        if not self._max_restarts:
            return "no restarts allowed (max_restarts is 0)"
        return f"all {self._max_restarts} restarts are used up (max_restarts)"

    def _delay(self, ran: float) -> float:
        backoff, healthy_after = self._policy.backoff, self._policy.healthy_after
        if backoff is None:
            return 0.0
        if healthy_after is not None and ran >= healthy_after:
            self._consecutive = 0
        delay = backoff.delay(self._consecutive, self._random)
        self._consecutive += 1
        return delay
