"""Every exception of the library, sorted by whose doing it is.

::

    ElasticAioError
    ├── SpecError (ValueError)      the caller: a setting that cannot be accepted
    ├── SurroundingsError           the machine: something a job needs is not there
    ├── SpawnError                  the machine: one worker could not be started
    ├── StoreError                  the store that nodes and workers meet at
    │   ├── StoreClosed             ... we closed it ourselves
    │   ├── StoreLost               ... the connection broke, or the server has gone
    │   ├── StoreTimeout            ... what was waited for has not come in time
    │   └── StoreRefused            ... the peer will not do it, and said why
    ├── JobEnded                    the job ended without success; `.result` tells all
    │   ├── JobFailed               ... because its workers failed
    │   │   └── RendezvousFailed    ... or because its nodes did not come together
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
    "RendezvousFailed",
    "SpawnError",
    "SpecError",
    "StoreClosed",
    "StoreError",
    "StoreLost",
    "StoreRefused",
    "StoreTimeout",
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


class StoreError(ElasticAioError):
    """An operation on the store could not be carried out."""


class StoreClosed(StoreError):
    """This program has closed the store; nothing is wrong with the world."""


class StoreLost(StoreError):
    """The connection broke before the answer came, or the store is gone.

    Only operations that change something fail at once when the connection breaks:
    they may have been carried out or not.  Questions are asked again.
    """


class StoreTimeout(StoreError):
    """What was waited for has not come within the time allowed."""


class StoreRefused(StoreError):
    """The peer will not do what was asked; asking again does not help."""


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


class RendezvousFailed(JobFailed):
    """The nodes of the job did not come together, or could not stay so.

    The message says who was there, who was missing, and who was refused.
    """


class JobStopped(JobEnded):
    """A signal or `Agent.stop()` ended the job before its workers were done."""


class InternalError(ElasticAioError):
    """The library broke one of its own rules; please report the message."""


def counted(number: int, what: str) -> str:
    """Return a number of things in words, for a message."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def shown(value: object, limit: int = 120) -> str:
    """Return `value` as one line of at most `limit` characters, for a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
