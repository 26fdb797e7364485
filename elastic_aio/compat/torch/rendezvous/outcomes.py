"""Failed rendezvous as torch's exceptions."""

from __future__ import annotations

from elastic_aio.compat.torch.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)
from elastic_aio.outcome import JobOutcome
from elastic_aio.rendezvous.base import RUN_HAS_ENDED

__all__ = ["error_of_reason", "rendezvous_error"]


def rendezvous_error(outcome: JobOutcome) -> RendezvousError:
    """Return the exception for the end of a job that a handler takes part in.

    A job that has ended, however it did, has a closed rendezvous.
    """
    if outcome.is_rendezvous:
        return error_of_reason(outcome.why)
    return RendezvousClosedError(f"the rendezvous is closed: {outcome.why}")


def error_of_reason(why: str) -> RendezvousError:
    """Return the exception for a rendezvous that failed because of `why`."""
    if why.startswith(RUN_HAS_ENDED):
        return RendezvousClosedError(why)
    if why.endswith("(join_timeout)"):
        return RendezvousTimeoutError(why)
    return RendezvousConnectionError(why) if "store" in why else RendezvousError(why)
