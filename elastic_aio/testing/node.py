"""A simulated node: what it runs, as the invariants and the scenarios see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic_aio.agent.multi_node_driver import MultiNodeDriver
from elastic_aio.outcome import JobOutcome
from elastic_aio.rendezvous.base import Placement
from elastic_aio.testing.process import SimProcess
from elastic_aio.testing.trace import Trace


class SimNode:
    """One node of the job: one process of an agent."""

    def __init__(self, process: SimProcess, number: int, trace: Trace) -> None:
        """Begin; `number` is the pid of the process, and no other has it."""
        self.name = f"{process.host.name}.{number}"
        self.host = process.host
        self.process = process
        self.number = number
        self.outcome: JobOutcome | None = None
        """How the job has ended here."""
        self.placement: Placement | None = None
        """That of the newest round that the rendezvous has ordered."""
        self.running: Placement | None = None
        """The placement whose workers run here."""
        self.has_succeeded = False
        """Whether all workers of the newest round have succeeded here."""
        self.is_standing_by = False
        self.is_ending = False
        """Whether the rendezvous has ordered the end of the job."""
        self.is_over = False
        """Whether the process has ended, or was killed."""
        self.driver: MultiNodeDriver | None = None
        self.end: Callable[[int], None] = lambda exit_code: None
        """Lets one worker of the newest group fail with an exit code, or all succeed with 0."""
        self._trace = trace

    def __repr__(self) -> str:
        runs = "nothing" if self.running is None else f"round {self.running.round}"
        return f"<SimNode {self.name}: runs {runs}, {self.driver}>"

    @property
    def coordinator(self) -> Any:
        """What coordinates the job here, if this node is the coordinator."""
        rendezvous: Any = None if self.driver is None else self.driver._rendezvous
        session = None if rendezvous is None else rendezvous._session
        return None if session is None else session._runner

    @property
    def is_live(self) -> bool:
        """Whether the job has not ended here."""
        return not self.is_over

    @property
    def has_place(self) -> bool:
        """Whether its workers run, or have succeeded in the newest round."""
        return self.running is not None or self.has_succeeded

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self._trace.note(self.name, text)

    def add_fault(self, text: str) -> None:
        """Add a line to the trace, about something that may change the round."""
        self._trace.add_fault(self.name, text)

    def kill(self) -> None:
        """End the process and the workers without notice."""
        self.is_over = True
        self.running = None
        self.process.kill()

    def request_stop(self) -> None:
        """Stop the job on this node, as a user does; called in the process."""
        assert self.driver is not None, "it was started before"
        self.driver.request_stop("it was stopped")

    def end_workers(self, exit_code: int) -> None:
        """Let one worker fail with `exit_code`, or all succeed with 0."""
        self.process.inject(self.end, exit_code)
