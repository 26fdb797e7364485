"""A rendezvous in which every node is told its rank, and where rank 0 is.

The node of rank 0 serves the store at the address and port that all were given.  Its
workers meet at the same store and port, because that is the one that firewalls and
services know; the keys of a former attempt's workers are removed before the next.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_aio.rendezvous.base import Listener, NodeCard, Rendezvous
from elastic_aio.rendezvous.dynamic import Dynamic
from elastic_aio.spec import LaunchSpec

__all__ = ["make_static"]


def make_static(spec: LaunchSpec, card: NodeCard, run_id: str, listener: Listener) -> Rendezvous:
    """Return the rendezvous of backend "static"."""
    rank = spec.rendezvous.node_rank or 0
    meeting = replace(spec.rendezvous, node_rank=rank, is_host=rank == 0)
    return Dynamic(spec.replaced(rendezvous=meeting), card, run_id, listener, is_ranked=True)
