"""What the servers of a store have carried, as they count it themselves."""

from __future__ import annotations

import re
import urllib.request
from typing import NamedTuple

from tests.support import redis
from tests.support.sockets import traffic_of

_HANDLED = re.compile(r"^grpc_server_started_total\{([^}]*)\} (\S+)", re.MULTILINE)


class Load(NamedTuple):
    """Requests, and bytes both ways; of etcd those of the open connections."""

    requests: float
    bytes: float


def load_of(backend: str, endpoints: str) -> Load:
    """Return what the servers have carried since they were started."""
    loads = [_load_of_one(backend, endpoint) for endpoint in endpoints.split(",")]
    return Load(*map(sum, zip(*loads, strict=True)))


def _load_of_one(backend: str, endpoint: str) -> Load:
    port = int(endpoint.rpartition(":")[2])
    if backend == "redis":
        info = redis.ask_all(endpoint, "INFO", "all")
        calls = re.findall(
            r"^cmdstat_(?:evalsha|eval|subscribe|psubscribe|ping):calls=(\d+)", info, re.M
        )
        sizes = re.findall(r"^total_net_(?:input|output)_bytes:(\d+)", info, re.M)
        return Load(sum(map(int, calls)), sum(map(int, sizes)))
    traffic = traffic_of(port)
    size = traffic.bytes_in + traffic.bytes_out
    if backend == "etcd":
        with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        counts = [
            float(count) for labels, count in _HANDLED.findall(text) if "etcdserverpb" in labels
        ]
        return Load(sum(counts), size)
    return Load(traffic.messages_in, size)
