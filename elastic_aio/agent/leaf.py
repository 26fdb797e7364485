"""Where the leaf of a tree is: what its parents have opened for it, and keep for the next start."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from elastic_aio.logs.files import RunDirectory
from elastic_aio.logs.streams import LoggedStreams
from elastic_aio.ranks import WorkerRanks
from elastic_aio.spec.logs import LogSpec

if TYPE_CHECKING:
    from elastic_aio.process.listeners import Listeners


class LeafPlace(Struct, frozen=True):
    """What distinguishes a leaf from a job of its own."""

    path: str
    """Of the leaf in its tree; empty if the job is this leaf alone."""
    make_directory: Callable[[LogSpec], RunDirectory]
    """Returns the log directory of the leaf, or raises SpecError or HostError."""
    logged: LoggedStreams
    """The streams of all leaves of the job."""
    listeners: Listeners | None = None
    """The sockets of the leaf, which are open already; None: it has none."""
    worker: WorkerRanks | None = None
    """The ranks of the only worker, if that is one of several independent workers."""
    is_beside: bool = False
    """Whether it is a replacement, beside which the old worker runs."""
