"""Every exception of the library, sorted by its cause.

::

    ElasticAioError
    ├── SpecError (ValueError)      the caller: a setting cannot be accepted
    ├── HostError                   the host lacks something that a job needs
    ├── SpawnError                  the host: a worker could not be started
    ├── StoreError                  the store of nodes and workers
    │   ├── StoreClosed             ... was closed by this process
    │   ├── StoreLost               ... broke the connection, or is unreachable
    │   ├── StoreTimeout            ... did not have a key in time
    │   └── StoreRefused            ... refused the operation
    ├── ControlError                a job refused a request on its control socket
    │   ├── AgentUnreachable        ... or its agent does not answer
    │   └── JobNotFound             ... or there is no such job
    ├── JobEnded                    the job ended without success; see `.result`
    │   ├── JobFailed               ... because its workers failed
    │   │   └── RendezvousFailed    ... because its nodes formed no round
    │   └── JobStopped              ... because of a signal or `Agent.stop()`
    └── InternalError               a defect of the library; please report it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_aio.text import format_value

if TYPE_CHECKING:
    from elastic_aio.outcome import Failure, LaunchResult


class ElasticAioError(Exception):
    """Base of every exception that the library raises on purpose."""


class SpecError(ElasticAioError, ValueError):
    """A setting cannot be accepted; the message is one line: `field: problem (got value)`."""

    def __init__(self, field: str, value: object, problem: str) -> None:
        """Name the `field` as the caller wrote it, its `value`, and the `problem` with it."""
        super().__init__(field, value, problem)
        self.field = field
        self.value = value
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.field}: {self.problem} (got {format_value(self.value)})"


class HostError(ElasticAioError):
    """The host or the embedding program lacks something that a job needs.

    Examples: no `pidfd_open`, an ignored SIGCHLD, a log directory that cannot be created.
    """


class SpawnError(ElasticAioError):
    """A worker could not be started."""

    def __init__(self, message: str, permanent: bool, exit_code: int, local_rank: int = 0) -> None:
        """Keep the parts of the error.

        Args:
            message: one line.
            permanent: whether another attempt cannot help: the command is missing or not
                executable, or its directory is gone.
            exit_code: a shell's code: 127 for a missing command, 126 for a command that cannot be
                executed, 1 for a lack of resources.
            local_rank: the worker.
        """
        super().__init__(message, permanent, exit_code, local_rank)
        self.permanent = permanent
        self.exit_code = exit_code
        self.local_rank = local_rank

    def __str__(self) -> str:
        return str(self.args[0])


class StoreError(ElasticAioError):
    """An operation on the store could not be carried out."""


class StoreClosed(StoreError):
    """The store was closed by this process."""


class StoreLost(StoreError):
    """The connection broke before the reply arrived, or the store is unreachable.

    Only operations that modify the store fail as soon as the connection breaks: they may have been
    carried out or not.  Reads are sent again.
    """


class StoreTimeout(StoreError):
    """The awaited key or reply did not arrive within the timeout."""


class StoreRefused(StoreError):
    """The server refuses the operation; a retry does not help."""


class ControlError(ElasticAioError):
    """A request on a control socket is not valid, or was refused; the message is one line."""


class AgentUnreachable(ControlError):
    """The agent of a job does not answer in time, or the connection to it is lost."""


class JobNotFound(ControlError):
    """No job of this user on this host has this name, or several have it."""


class JobEnded(ElasticAioError):
    """The job ended without success."""

    def __init__(self, message: str, result: LaunchResult) -> None:
        """Keep the one-line `message` and the whole `result`, as on success."""
        super().__init__(message, result)
        self.result = result

    def __str__(self) -> str:
        return str(self.args[0])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({format_value(self.args[0], 300)})"


class JobFailed(JobEnded):
    """The workers failed and the restart policy allows no further attempt."""

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Failures of the last attempt, the root cause first; empty if no worker failed."""
        return self.result.failures

    @property
    def root_cause(self) -> Failure | None:
        """The first of `failures`; None where the job failed without a failed worker.

        The rendezvous of a `RendezvousFailed`, for example, may fail before workers start.
        """
        return next(iter(self.failures), None)


class RendezvousFailed(JobFailed):
    """The nodes of the job did not form a round, or could not keep it.

    The message names the nodes that were present, missing and refused.
    """


class JobStopped(JobEnded):
    """A signal or `Agent.stop()` ended the job before its workers were done."""


class JobPreempted(JobStopped):
    """The job was preempted: its workers had notice, and have ended; run the job again."""


class InternalError(ElasticAioError):
    """The library violated one of its own invariants; please report the message."""
