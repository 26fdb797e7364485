"""Failed rendezvous as torch's exceptions."""

from __future__ import annotations

from elastic_aio.compat.torch.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)
from elastic_aio.outcome import EndCause, JobOutcome

__all__ = ["error_of_cause", "rendezvous_error"]

_ERRORS = {
    EndCause.TOO_FEW_NODES: RendezvousTimeoutError,
    EndCause.NO_STORE: RendezvousConnectionError,
    EndCause.RUN_HAD_ENDED: RendezvousClosedError,
    EndCause.NODES_NOT_REPLACED: RendezvousTimeoutError,
    EndCause.OTHER_JOB: RendezvousClosedError,
}


def rendezvous_error(outcome: JobOutcome) -> RendezvousError:
    """Return the exception for the end of a job that a handler takes part in.

    A job that has ended, however it did, has a closed rendezvous.
    """
    if outcome.is_rendezvous:
        return error_of_cause(outcome.cause, outcome.why)
    return RendezvousClosedError(f"the rendezvous is closed: {outcome.why}")


def error_of_cause(cause: EndCause | None, why: str) -> RendezvousError:
    """Return the exception for a rendezvous that `cause` has ended."""
    return RendezvousError(why) if cause is None else _ERRORS[cause](why)
