"""How nodes are told to meet, and how what cannot be meant is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic_aio.errors import SpecError
from elastic_aio.rendezvousspec import RendezvousSpec, checked_host, parse_endpoints
from elastic_aio.spec import LaunchSpec


def test_defaults() -> None:
    """Nodes meet at a store on this machine, with torch's timeouts."""
    spec = RendezvousSpec()
    assert (spec.backend, spec.endpoints) == ("c10d", ("localhost:29400",))
    assert (spec.join_timeout, spec.last_call_timeout, spec.close_timeout) == (600, 30, 30)
    assert (spec.heartbeat_timeout, spec.read_timeout, spec.exit_barrier_timeout) == (5, 60, 300)
    assert (spec.store_grace, spec.keeps_workers, spec.is_host) == (None, True, None)


@pytest.mark.parametrize(
    ("backend", "endpoint", "endpoints"),
    [
        ("c10d", "localhost:0", ["localhost:0"]),
        ("c10d", "node0", ["node0:29400"]),
        ("tcp", "node0", ["node0:29400"]),
        ("static", "node0", ["node0:29500"]),
        ("static", "node0:29400", ["node0:29400"]),
        ("mail", "10.0.0.1:080", ["10.0.0.1:80"]),
        ("c10d", "[::1]", ["[::1]:29400"]),
        ("c10d", "[fe80::1%eth0]:7", ["[fe80::1%eth0]:7"]),
        ("c10d", "a:1, [::1]:2 ,c_d.e-f", ["a:1", "[::1]:2", "c_d.e-f:29400"]),
    ],
)
def test_endpoints_are_brought_into_one_form(
    backend: str, endpoint: str, endpoints: list[str]
) -> None:
    """Each has its port and keeps its place; what was given stays as it was."""
    spec = RendezvousSpec(backend=backend, endpoint=endpoint)
    assert spec.endpoints == tuple(endpoints)
    assert spec.endpoint == endpoint
    assert parse_endpoints("x", ",".join(spec.endpoints)) == spec.endpoints


WHERE = "rendezvous.endpoint: must be HOST:PORT, [IPV6]:PORT or HOST"
PORT = "rendezvous.endpoint: must have a port from 0 to 65535"
ADDRESS = "rendezvous.local_addr: must be the name or address of a host, without a port"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": ""}, "rendezvous.backend: must not be empty, not ''"),
        ({"backend": " "}, "rendezvous.backend: must not be empty, not ' '"),
        ({"backend": None}, "rendezvous.backend: must be text without NUL, not None"),
        ({"endpoint": None}, "rendezvous.endpoint: must be text without NUL, not None"),
        ({"endpoint": ""}, WHERE),
        ({"endpoint": "a:1,"}, WHERE),
        ({"endpoint": ":80"}, WHERE),
        ({"endpoint": "::1"}, WHERE),
        ({"endpoint": "[::1"}, WHERE),
        ({"endpoint": "0.0.0.0:80"}, "rendezvous.endpoint: must be an address of one machine"),
        ({"endpoint": "[::]:80"}, "rendezvous.endpoint: must be an address of one machine"),
        ({"endpoint": "[]:1"}, WHERE),
        ({"endpoint": "[localhost]:1"}, WHERE),
        ({"endpoint": "two words:1"}, WHERE),
        ({"endpoint": "http://host:1"}, PORT),
        ({"endpoint": "user@host:1"}, WHERE),
        ({"endpoint": "host\n:1"}, WHERE),
        ({"endpoint": "a:b:1"}, PORT),
        ({"endpoint": "a:"}, PORT),
        ({"endpoint": "a:x"}, PORT),
        ({"endpoint": "a:-1"}, PORT),
        ({"endpoint": "a:65536"}, PORT),
        ({"endpoint": "a:\u0663"}, PORT),
        ({"endpoint": "a:1,b:65536"}, f"{PORT}, not 'b:65536'"),
        ({"is_host": 1}, "rendezvous.is_host: must be a bool, not 1"),
        ({"node_rank": -1}, "rendezvous.node_rank: must be a whole number of at least 0, not -1"),
        ({"node_rank": "0"}, "rendezvous.node_rank: must be a whole number of at least 0"),
        ({"node_rank": True}, "rendezvous.node_rank: must be a whole number of at least 0"),
        ({"local_addr": ""}, ADDRESS),
        ({"local_addr": "host:80"}, ADDRESS),
        ({"local_addr": "[::1]"}, ADDRESS),
        ({"local_addr": "a b"}, ADDRESS),
        ({"local_addr": 5}, "rendezvous.local_addr: must be text without NUL, not 5"),
        ({"join_timeout": 0}, "rendezvous.join_timeout: must be a number above 0, not 0"),
        ({"join_timeout": float("inf")}, "rendezvous.join_timeout: must be a number above 0"),
        ({"read_timeout": -1}, "rendezvous.read_timeout: must be a number above 0, not -1"),
        ({"read_timeout": "60"}, "rendezvous.read_timeout: must be a number above 0, not '60'"),
        ({"last_call_timeout": -1}, "rendezvous.last_call_timeout: must be a number at least 0"),
        ({"close_timeout": float("nan")}, "rendezvous.close_timeout: must be a number at least 0"),
        ({"exit_barrier_timeout": -0.1}, "rendezvous.exit_barrier_timeout: must be a number at"),
        ({"heartbeat_timeout": 1.9}, "rendezvous.heartbeat_timeout: must be a number at least 2"),
        ({"heartbeat_timeout": True}, "rendezvous.heartbeat_timeout: must be a number at least 2"),
        ({"store_grace": -1}, "rendezvous.store_grace: must be a number at least 0, not -1"),
        ({"keeps_workers": None}, "rendezvous.keeps_workers: must be a bool, not None"),
        ({"token": ""}, "rendezvous.token: must not be empty"),
        ({"token": b"secret"}, "rendezvous.token: must be text, not 'bytes'"),
        ({"conf": [("a", "b")]}, "rendezvous.conf: must be a mapping of names to texts"),
        ({"conf": {1: "b"}}, "rendezvous.conf: must be text without NUL, not 1"),
        ({"conf": {"a": 1}}, "rendezvous.conf['a']: must be text without NUL, not 1"),
    ],
)
def test_what_cannot_be_meant_is_one_line(settings: dict[str, Any], message: str) -> None:
    """Field, value and what is accepted."""
    with pytest.raises(SpecError) as caught:
        RendezvousSpec(**settings)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_the_least_that_is_accepted() -> None:
    """The ends of the ranges belong to them."""
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


def test_a_spec_is_frozen_and_keeps_its_secret() -> None:
    """What was given can change freely, and the token is not in what may be logged."""
    given = {"a": "b"}
    spec = RendezvousSpec(conf=given, token="secret")
    given["a"] = "c"
    assert spec.conf == {"a": "b"}
    assert "secret" not in repr(LaunchSpec("x", rendezvous=spec))
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.token = None  # type: ignore[misc]  # that is the point
    with pytest.raises(TypeError):
        spec.conf["a"] = "d"  # type: ignore[index]  # that is the point


@pytest.mark.parametrize(
    ("rendezvous", "message"),
    [
        ({"endpoint": "a:1,b:0"}, "rendezvous.endpoint: must have a port other than 0"),
        ({"backend": "static"}, "rendezvous.node_rank: must be from 0 to 2 with the backend"),
        ({"backend": "static", "node_rank": 3}, "rendezvous.node_rank: must be from 0 to 2 with"),
        (
            {"backend": "static", "node_rank": 0, "endpoint": "a:1,b:1"},
            "rendezvous.endpoint: must be a single HOST:PORT with the backend 'static'",
        ),
    ],
)
def test_some_of_it_matters_to_several_nodes_only(rendezvous: dict[str, Any], message: str) -> None:
    """A job of one node takes it, since it meets nobody."""
    spec = RendezvousSpec(**rendezvous)
    assert LaunchSpec("x", rendezvous=spec).rendezvous == spec
    with pytest.raises(SpecError) as caught:
        LaunchSpec("x", rendezvous=spec, nnodes="2:3")
    assert str(caught.value).startswith(message)


def test_several_nodes_have_a_run_to_meet_in() -> None:
    """A name that each node made for itself would keep them apart."""
    assert LaunchSpec("x").run_id is None
    assert LaunchSpec("x", nnodes="1:2").run_id == "none"
    assert LaunchSpec("x", nnodes=2, run_id="mine").run_id == "mine"


@pytest.mark.parametrize("host", ["node0", "10.0.0.1", "::1", "fe80::1%eth0", "a_b.c"])
def test_hosts(host: str) -> None:
    """Names and addresses of both kinds."""
    assert checked_host("x", host) == host
