"""What a coordinator is told once, and what it wants done."""

from __future__ import annotations

from msgspec import Struct

from elastic_aio.events import Event
from elastic_aio.outcome import Failure
from elastic_aio.rendezvous.tickets import Order
from elastic_aio.spec import NodeRange

__all__ = ["Ask", "Command", "Publish", "Raise", "Rules", "Send"]


class Rules(Struct, frozen=True):
    """What a job wants of its rounds; times in seconds.

    `adoption` is how long a new coordinator waits for members of a round that ran
    before its time.  With `keeps_workers` such a round runs on when all have come.
    With `is_ranked` the wishes of members are orders.  With `is_shared` the workers of
    all rounds meet at the same store, so one round has to be over before the next
    begins.  With `asks` the user's callback is asked before each restart.
    """

    minimum: int
    maximum: int
    join_timeout: float = 600.0
    last_call_timeout: float = 30.0
    adoption: float = 0.7
    keeps_workers: bool = True
    is_ranked: bool = False
    is_shared: bool = False
    asks: bool = False

    @property
    def wanted(self) -> str:
        """How many nodes, as it is written on a command line."""
        return str(NodeRange(self.minimum, self.maximum))


class Send(Struct, frozen=True):
    """Write an order for a member."""

    member: str
    order: Order


class Publish(Struct, frozen=True):
    """Tell an event of the job to whoever follows it."""

    event: Event


class Ask(Struct, frozen=True):
    """Ask the user's callback about the root cause; answer with `decided`."""

    attempt: int
    failure: Failure


class Raise(Struct, frozen=True):
    """Announce a higher epoch: somebody has heard of one that is newer than ours."""

    epoch: int


Command = Send | Publish | Ask | Raise
