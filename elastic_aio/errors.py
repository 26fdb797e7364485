"""Every exception of the library, sorted by whose doing it is.

::

    ElasticAioError
    ├── SpecError (ValueError)      the caller: a setting that cannot be accepted
    ├── SurroundingsError           the machine: something a job needs is not there
    ├── SpawnError                  the machine: one worker could not be started
    ├── JobEnded                    the job ended without success; `.result` tells all
    │   ├── JobFailed               ... because its workers failed
    │   └── JobStopped              ... because a signal or `Agent.stop()` ended it
    └── InternalError               us: please report it
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_aio.outcome import Failure, LaunchResult

__all__ = [
    "ElasticAioError",
    "InternalError",
    "JobEnded",
    "JobFailed",
    "JobStopped",
    "SpawnError",
    "SpecError",
    "SurroundingsError",
]


class ElasticAioError(Exception):
    """Base of every exception that the library raises on purpose."""


class SpecError(ElasticAioError, ValueError):
    """A setting cannot be accepted.

    The message is one line: the field, the value, and what is accepted.
    """

    def __init__(self, field: str, value: object, accepted: str) -> None:
        """Name the `field`, the `value` that was given, and what is `accepted`."""
        super().__init__(field, value, accepted)
        self.field = field
        self.value = value
        self.accepted = accepted

    def __str__(self) -> str:
        return f"{self.field}: {self.accepted}, not {shown(self.value)}"


class SurroundingsError(ElasticAioError):
    """The machine or the embedding program lacks something that a job needs.

    Examples: no `pidfd_open`, ignored SIGCHLD, a log folder that cannot be made.
    """


class SpawnError(ElasticAioError):
    """A worker could not be started.

    `permanent` is true when another attempt cannot help (the command is missing,
    is not executable, its folder is gone); `exit_code` is what a shell would
    report: 127 for a missing command, 126 for one that cannot be executed, 1 for
    a lack of resources.
    """

    def __init__(
        self, message: str, *, permanent: bool, exit_code: int, local_rank: int = 0
    ) -> None:
        """Keep the one-line `message`, `permanent`, the shell's `exit_code` and the worker."""
        super().__init__(message)
        self.permanent = permanent
        self.exit_code = exit_code
        self.local_rank = local_rank

    def __reduce__(self) -> tuple[Any, ...]:
        again = partial(
            type(self),
            permanent=self.permanent,
            exit_code=self.exit_code,
            local_rank=self.local_rank,
        )
        return again, self.args


class JobEnded(ElasticAioError):
    """The job ended without success.

    `result` is the whole `LaunchResult`, as on success.
    """

    def __init__(self, message: str, result: LaunchResult) -> None:
        """Keep the one-line `message` and the `result` up to the end."""
        super().__init__(message, result)
        self.result = result

    def __str__(self) -> str:
        return str(self.args[0])


class JobFailed(JobEnded):
    """The workers failed and the restart policy allows no further attempt."""

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Failures of the last attempt, the root cause first."""
        return self.result.failures


class JobStopped(JobEnded):
    """A signal or `Agent.stop()` ended the job before its workers were done."""


class InternalError(ElasticAioError):
    """The library broke one of its own rules; please report the message."""


def shown(value: object, limit: int = 120) -> str:
    """Return `value` as one line of at most `limit` characters, for a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
