"""The policy of one host's group of workers, whoever decides what follows its end.

Rules
=====

* One group at a time.  The first worker that fails by itself ends it; so does the
  last one that succeeds.  Either way it is stopped, because workers leave processes
  behind, and it is over when nothing is left.
* Answers carry their attempt.  One that comes late is dropped here, and only here.

::

    phase      happening                     next       effects
    ---------  ----------------------------  ---------  ---------------------------
    STARTING   GroupStarted                  RUNNING
    STARTING   StartFailed                   STOPPING   StopGroup
    STARTING   WorkerEnded, a failure        STOPPING   StopGroup
    RUNNING    WorkerEnded, a failure        STOPPING   StopGroup
    RUNNING    WorkerEnded, the last success STOPPING   StopGroup (leftovers)
    STOPPING   GroupGone                     what the policy of the job says
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum

from elastic_aio.agent.vocabulary import (
    Answer,
    Effect,
    GroupGone,
    GroupStarted,
    Happening,
    News,
    StartFailed,
    StartGroup,
    StopAsked,
    StopGroup,
    WorkerEnded,
)
from elastic_aio.errors import InternalError
from elastic_aio.outcome import Failure
from elastic_aio.signames import SIGTERM, signal_name
from elastic_aio.spec import LaunchSpec

__all__ = ["LIVE", "GroupMachine", "Phase", "why_stopped"]


class Phase(Enum):
    """Where a job is, as far as this node is concerned."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    DECIDING = "deciding"
    WAITING = "waiting"
    IDLE = "idle"
    BARRIER = "barrier"
    LEAVING = "leaving"
    DONE = "done"


LIVE = (Phase.STARTING, Phase.RUNNING)
"""Workers are wanted."""


class GroupMachine(ABC):
    """Decides; performs nothing.

    After each `handle`, perform the effects in their order and hand in what
    happens next.  After `Finish` nothing more is said.
    """

    def __init__(self, spec: LaunchSpec, nproc: int) -> None:
        """Begin with a job of `nproc` workers on this host."""
        self.phase = Phase.NEW
        self.attempt = 0
        self._spec = spec
        self._nproc = nproc
        self._started_at: float | None = None
        self._succeeded: set[int] = set()
        self._start_failure: StartFailed | None = None
        self._failures: tuple[Failure, ...] = ()
        self._gone_at = 0.0
        self._story: list[str] = []

    def handle(self, happening: Happening) -> list[Effect]:
        """Take in what has happened; return what to do about it, in order.

        Raises:
            InternalError: a happening that the present phase cannot have.
        """
        self._story.append(f"{self.phase.value}: {happening}")
        del self._story[:-50]
        if self.phase is Phase.DONE:
            return []
        if not isinstance(happening, Answer):
            return self._on_news(happening)
        return self._on_answer(happening) if happening.attempt == self.attempt else []

    @abstractmethod
    def _on_news(self, news: News) -> list[Effect]:
        """Take in what nobody was asked for."""

    @abstractmethod
    def _on_gone(self, gone: GroupGone) -> list[Effect]:
        """Say what follows the end of the group; its failures are known."""

    @abstractmethod
    def _on_other_answer(self, answer: Answer) -> list[Effect]:
        """Take in an answer that is not about the group."""

    def _on_answer(self, answer: Answer) -> list[Effect]:
        match answer:
            case WorkerEnded():
                return self._on_worker_ended(answer)
            case GroupStarted():
                return self._on_group_started(answer)
            case StartFailed():
                return self._on_start_failed(answer)
            case GroupGone():
                if self.phase is not Phase.STOPPING:
                    raise self._impossible("the end of a group")
                self._gone_at = answer.at
                self._failures = answer.failures
                return self._on_gone(answer)
        return self._on_other_answer(answer)

    def _on_group_started(self, started: GroupStarted) -> list[Effect]:
        self._started_at = started.at
        if self.phase is not Phase.STARTING:
            return []
        self.phase = Phase.RUNNING
        return self._stop_when_all_succeeded()

    def _on_worker_ended(self, ended: WorkerEnded) -> list[Effect]:
        if self.phase not in LIVE:
            return []
        if not ended.status.is_success:
            return self._on_failing(f"local rank {ended.local_rank} failed ({ended.status})")
        self._succeeded.add(ended.local_rank)
        return self._stop_when_all_succeeded()

    def _on_start_failed(self, failed: StartFailed) -> list[Effect]:
        self._start_failure = failed
        return self._on_failing(failed.message) if self.phase is Phase.STARTING else []

    def _on_failing(self, why: str) -> list[Effect]:
        """Say what to do about the first failure of a group."""
        return self._stop_group(why)

    def _stop_when_all_succeeded(self) -> list[Effect]:
        if self.phase is not Phase.RUNNING or not self._all_succeeded:
            return []
        return self._stop_group("all workers have finished", leftovers_only=True)

    def _start_group(self, start: StartGroup) -> list[Effect]:
        self.phase = Phase.STARTING
        self.attempt = start.attempt
        self._started_at = None
        self._succeeded.clear()
        self._start_failure = None
        self._failures = ()
        return [start]

    def _stop_group(
        self, reason: str, signal: int | None = None, *, leftovers_only: bool = False
    ) -> list[Effect]:
        self.phase = Phase.STOPPING
        plan = self._spec.stop if signal is None else self._spec.stop.starting_with(signal)
        return [StopGroup(self.attempt, plan, reason, signal, leftovers_only)]

    @property
    def _all_succeeded(self) -> bool:
        return len(self._succeeded) == self._nproc

    @property
    def _ran(self) -> float:
        """How many seconds the whole group lived; 0 when it was never complete."""
        return 0.0 if self._started_at is None else self._gone_at - self._started_at

    def _exit_code_of_failure(self) -> int:
        if self._start_failure is not None:
            return self._start_failure.exit_code
        return (self._failures[0].status.shell_code or 1) if self._failures else 1

    def _impossible(self, what: str) -> InternalError:
        story = "; ".join(self._story)
        return InternalError(f"{what} cannot happen in {self!r}; please report: {story}")


def why_stopped(asked: StopAsked) -> tuple[str, int]:
    """Return why a job that was asked to stop has ended, and its exit code."""
    if asked.signal is None:
        return asked.reason, 128 + SIGTERM
    return f"{signal_name(asked.signal)} was received", 128 + asked.signal
