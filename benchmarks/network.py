"""Many nodes and their network: a silent partition, and what an idle group sends."""

from __future__ import annotations

import math
import statistics
import sys
import time

from benchmarks.agents import born_by_hand, free_ports, new_nodes, start_together
from benchmarks.measure import Contender, compare
from benchmarks.networks import missing_for_networks, two_networks
from benchmarks.sockets import is_counting, traffic_of
from benchmarks.table import Goal, Line

__all__ = ["idle_group", "partition"]

_HEARTBEAT_S = 2
_WATCH_S = 30
_IDLE_S = 20.0
_SETTLE_S = 3.0


def partition(ours: Contender, theirs: Contender | None, rounds: int) -> list[Line]:
    """Cut a node's network in silence, until the other's worker runs alone."""
    if reason := missing_for_networks():
        print(f"partition is left out: {reason}", file=sys.stderr)
        return []

    def measure(contender: Contender) -> float:
        conf = {"heartbeat_timeout": _HEARTBEAT_S} if contender is ours else _QUICKEST
        with two_networks() as (here, there), new_nodes(contender, "1:2", **conf) as nodes:
            nodes.endpoint = f"{here.address}:{free_ports(1)[0]}"
            for name, network in (("n0", here), ("n1", there)):
                nodes.start(
                    name,
                    f"--local-addr={network.address}",
                    prefix=network.prefix,
                    # torchrun cannot tell by an address in a namespace.
                    conf={} if contender is ours else {"is_host": int(network is here)},
                )
            nodes.must_see("ready", 2, size=2)
            at = time.monotonic_ns()
            there.cut()
            born = nodes.seen("born", 1, since=at, size=1, seconds=_WATCH_S)
            return (born[-1].at - at) / 1e6 if born else math.inf

    us, _, limit = compare(max(rounds // 5, 1), measure, ours, None, born_by_hand)
    return [
        Line(
            f"a silent partition → the worker on our side runs alone, at a heartbeat_timeout of"
            f" {_HEARTBEAT_S} s (watched {_WATCH_S} s)",
            "ms",
            statistics.median(us),
            measure(theirs) if theirs else None,
            bound=round(1000 * _HEARTBEAT_S + 500 + statistics.median(limit)),
        )
    ]


# torchrun's own settings for how soon a node counts as lost.
_QUICKEST = {"keep_alive_interval": 1, "keep_alive_max_attempt": 2}


def idle_group(ours: Contender, theirs: Contender | None, rounds: int) -> list[Line]:
    """Count what two agents whose workers say nothing send to the store and get from it."""
    if not is_counting():
        print("idle_group is left out: needs `ss`", file=sys.stderr)
        return []

    def measure(contender: Contender) -> tuple[float, float, float]:
        with new_nodes(contender, "2") as nodes:
            start_together(nodes, 2)
            time.sleep(_SETTLE_S)
            port = int(nodes.endpoint.rpartition(":")[2])
            before, began = traffic_of(port), time.monotonic()
            time.sleep(_IDLE_S)
            added = traffic_of(port) - before
            each = 2 * (time.monotonic() - began)
            both = added.bytes_in + added.bytes_out
            return added.messages_in / each, added.messages_out / each, both / each

    us = measure(ours)
    them = measure(theirs) if theirs else (None, None, None)
    return [
        Line(
            "an idle group, a node: messages to the store",
            "/s",
            us[0],
            them[0],
            Goal(1),
            bound=1,
        ),
        Line(
            "an idle group, a node: messages from the store",
            "/s",
            us[1],
            them[1],
        ),
        Line(
            "an idle group, a node: bytes both ways",
            "B/s",
            us[2],
            them[2],
        ),
    ]
