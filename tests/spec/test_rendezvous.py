"""What a `RendezvousSpec` accepts, and how it refuses the rest."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_aio.errors import SpecError
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.rendezvous import EngineSpec, RendezvousSpec, parse_endpoints
from elastic_aio.spec.tls import TlsSpec


def test_the_defaults() -> None:
    """A store on this host, with torch's timeouts."""
    spec = RendezvousSpec()
    assert (spec.backend, spec.endpoints) == ("c10d", ("localhost:29400",))
    assert (spec.join_timeout, spec.last_call_timeout, spec.close_timeout) == (600, 30, 30)
    assert (spec.heartbeat_timeout, spec.read_timeout, spec.exit_barrier_timeout) == (30, 60, None)
    assert spec.replace_timeout is None
    assert (spec.store_grace, spec.keep_workers, spec.is_host) == (None, True, None)


@pytest.mark.parametrize(
    ("backend", "endpoint", "endpoints"),
    [
        ("c10d", "localhost:0", ["localhost:0"]),
        ("c10d", "node0", ["node0:29400"]),
        ("tcp", "node0", ["node0:29400"]),
        ("static", "node0", ["node0:29500"]),
        ("static", "node0:29400", ["node0:29400"]),
        ("etcd", "node0,node1:1", ["node0:2379", "node1:1"]),
        ("etcd-v2", "[::1]", ["[::1]:2379"]),
        ("redis", "node0,node1:1", ["node0:6379", "node1:1"]),
        ("valkey", "[::1]", ["[::1]:6379"]),
        ("mail", "10.0.0.1:080", ["10.0.0.1:80"]),
        ("c10d", "[::1]", ["[::1]:29400"]),
        ("c10d", "[fe80::1%eth0]:7", ["[fe80::1%eth0]:7"]),
        ("c10d", "a:1, [::1]:2 ,c_d.e-f", ["a:1", "[::1]:2", "c_d.e-f:29400"]),
    ],
)
def test_endpoints_are_normalised(backend: str, endpoint: str, endpoints: list[str]) -> None:
    """Each gets its port and keeps its position; `endpoint` stays as given."""
    spec = RendezvousSpec(backend=backend, endpoint=endpoint)
    assert spec.endpoints == tuple(endpoints)
    assert spec.endpoint == endpoint
    assert parse_endpoints("x", ",".join(spec.endpoints)) == spec.endpoints


def test_the_lowest_accepted_values() -> None:
    spec = RendezvousSpec(
        node_rank=0,
        join_timeout=0.001,
        last_call_timeout=0,
        close_timeout=0,
        heartbeat_timeout=2,
        exit_barrier_timeout=0,
        store_grace=0,
        local_addr="fe80::1",
        is_host=False,
    )
    assert spec.local_addr == "fe80::1"


def test_a_spec_is_frozen_and_hides_its_token() -> None:
    """Changing the mapping passed as `conf` has no effect; the repr may be logged."""
    conf = {"a": "b"}
    spec = RendezvousSpec(conf=conf, token="secret-of-this-test")
    conf["a"] = "c"
    assert spec.conf == {"a": "b"}
    assert "secret" not in repr(LaunchSpec("x", rendezvous=spec))
    with pytest.raises(AttributeError):
        spec.token = None  # type: ignore[misc]  # that is the point
    with pytest.raises(TypeError):
        spec.conf["a"] = "d"  # type: ignore[index]  # that is the point


@pytest.mark.parametrize(
    ("rendezvous", "message"),
    [
        ({"endpoint": "a:1,b:0"}, "rendezvous.endpoint: needs a port other than 0"),
        ({"backend": "static"}, "rendezvous.node_rank: must be from 0 to 2 with the backend"),
        ({"backend": "static", "node_rank": 3}, "rendezvous.node_rank: must be from 0 to 2 with"),
        (
            {"backend": "static", "node_rank": 0, "endpoint": "a:1,b:1"},
            "rendezvous.endpoint: must be a single HOST:PORT with the backend 'static'",
        ),
    ],
)
def test_some_settings_are_checked_for_several_nodes(
    rendezvous: dict[str, Any], message: str
) -> None:
    """A job of one node accepts them: it has no rendezvous."""
    spec = RendezvousSpec(**rendezvous)
    assert LaunchSpec("x", rendezvous=spec).rendezvous == spec
    with pytest.raises(SpecError) as caught:
        LaunchSpec("x", rendezvous=spec, nnodes="2:3")
    assert str(caught.value).startswith(message)


def test_the_default_run_id_of_several_nodes_is_none() -> None:
    """A random id on each node would keep them apart."""
    assert LaunchSpec("x").run_id is None
    assert LaunchSpec("x", nnodes="1:2").run_id == "none"
    assert LaunchSpec("x", nnodes=2, run_id="mine").run_id == "mine"


def test_static_needs_one_number_of_nodes() -> None:
    """The command line uses the maximum, with a warning."""
    spec = RendezvousSpec(backend="static", node_rank=0)
    assert LaunchSpec("x", rendezvous=spec, nnodes=4).nnodes.minimum == 4
    with pytest.raises(SpecError) as caught:
        LaunchSpec("x", rendezvous=spec, nnodes="2:4")
    assert str(caught.value) == (
        "nnodes: must be one number with the backend 'static', which waits for all nodes"
        " (got '2:4')"
    )


def test_the_port_of_sentinels() -> None:
    spec = RendezvousSpec(backend="redis", endpoint="a,b:1", engine=EngineSpec(sentinel="m"))
    assert spec.endpoints == ("a:26379", "b:1")
    spec.check_with(2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"is_host": True}, "rendezvous.is_host: must be None: no node serves the store"),
        ({"token": "x" * 16}, "rendezvous.token: is not for the backend 'etcd'"),
        ({"tls": TlsSpec(cert="c", key="k")}, "tls.ca: is needed to verify"),
        (
            {"engine": EngineSpec(sentinel="m")},
            "rendezvous.engine.sentinel: is not for the backend 'etcd' (got 'm')",
        ),
    ],
)
def test_settings_that_an_engine_does_not_have(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        RendezvousSpec(backend="etcd", **settings).check_with(2)
    assert str(caught.value).startswith(message)


def test_a_health_check_needs_another_node() -> None:
    """On one node, no other would take over."""
    settings = RendezvousSpec(health_check="./check")
    with pytest.raises(SpecError, match=r"rendezvous\.health_check: needs a job of several nodes"):
        LaunchSpec("x.py", rendezvous=settings)
    assert LaunchSpec("x.py", nnodes=2, rendezvous=settings).rendezvous is settings
