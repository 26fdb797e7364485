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


WHERE = "rendezvous.endpoint: must be HOST:PORT, [IPV6]:PORT or HOST"


PORT = "rendezvous.endpoint: must have a port from 0 to 65535"


ADDRESS = "rendezvous.local_addr: must be the name or address of a host, without a port"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "etcd"}, "rendezvous.engine: must be a EngineSpec (got 'etcd')"),
        ({"backend": ""}, "rendezvous.backend: must not be empty (got '')"),
        ({"backend": " "}, "rendezvous.backend: must not be empty (got ' ')"),
        ({"backend": None}, "rendezvous.backend: must be text without NUL (got None)"),
        ({"endpoint": None}, "rendezvous.endpoint: must be text without NUL (got None)"),
        ({"endpoint": ""}, WHERE),
        ({"endpoint": "a:1,"}, WHERE),
        ({"endpoint": ":80"}, WHERE),
        ({"endpoint": "::1"}, WHERE),
        ({"endpoint": "[::1"}, WHERE),
        ({"endpoint": "0.0.0.0:80"}, "rendezvous.endpoint: must be the address of one host"),
        ({"endpoint": "[::]:80"}, "rendezvous.endpoint: must be the address of one host"),
        ({"endpoint": "[]:1"}, WHERE),
        ({"endpoint": "[localhost]:1"}, WHERE),
        ({"endpoint": "two words:1"}, WHERE),
        ({"endpoint": "http://host:1"}, "rendezvous.endpoint: must be HOST:PORT, "),
        ({"endpoint": "user@host:1"}, WHERE),
        ({"endpoint": "host\n:1"}, WHERE),
        ({"endpoint": "a:b:1"}, PORT),
        ({"endpoint": "a:"}, PORT),
        ({"endpoint": "a:x"}, PORT),
        ({"endpoint": "a:-1"}, PORT),
        ({"endpoint": "a:65536"}, PORT),
        ({"endpoint": "a:\u0663"}, PORT),
        ({"endpoint": "a:1,b:65536"}, f"{PORT} (got 'b:65536')"),
        ({"is_host": 1}, "rendezvous.is_host: must be a bool (got 1)"),
        ({"node_rank": -1}, "rendezvous.node_rank: must be a whole number of at least 0 (got -1)"),
        ({"node_rank": "0"}, "rendezvous.node_rank: must be a whole number of at least 0"),
        ({"node_rank": True}, "rendezvous.node_rank: must be a whole number of at least 0"),
        ({"local_addr": ""}, ADDRESS),
        ({"local_addr": "host:80"}, ADDRESS),
        ({"local_addr": "[::1]"}, ADDRESS),
        ({"local_addr": "a b"}, ADDRESS),
        ({"local_addr": 5}, "rendezvous.local_addr: must be text without NUL (got 5)"),
        ({"join_timeout": 0}, "rendezvous.join_timeout: must be a number above 0 (got 0)"),
        ({"join_timeout": float("inf")}, "rendezvous.join_timeout: must be a number above 0"),
        ({"read_timeout": -1}, "rendezvous.read_timeout: must be a number above 0 (got -1)"),
        ({"read_timeout": "60"}, "rendezvous.read_timeout: must be a number above 0 (got '60')"),
        ({"last_call_timeout": -1}, "rendezvous.last_call_timeout: must be a number of at least 0"),
        (
            {"scale_up": "never"},
            "rendezvous.scale_up: must be 'delay' or 'checkpoint' (got 'never')",
        ),
        ({"scale_up_limit": 0}, "rendezvous.scale_up_limit: must be a number above 0 (got 0)"),
        ({"scale_up_delay": -1}, "rendezvous.scale_up_delay: must be a number of at least 0"),
        (
            {"close_timeout": float("nan")},
            "rendezvous.close_timeout: must be a number of at least 0",
        ),
        ({"exit_barrier_timeout": -0.1}, "rendezvous.exit_barrier_timeout: must be a number of at"),
        (
            {"heartbeat_timeout": 1.9},
            "rendezvous.heartbeat_timeout: must be a number of at least 2",
        ),
        (
            {"heartbeat_timeout": True},
            "rendezvous.heartbeat_timeout: must be a number of at least 2",
        ),
        ({"store_grace": -1}, "rendezvous.store_grace: must be a number of at least 0 (got -1)"),
        ({"keep_workers": None}, "rendezvous.keep_workers: must be a bool (got None)"),
        ({"token": "15 characters.."}, "rendezvous.token: must have at least 16 characters"),
        ({"token": b"secret"}, "rendezvous.token: must be text or None (got 'bytes')"),
        ({"conf": [("a", "b")]}, "rendezvous.conf: must be a mapping of names to texts"),
        ({"conf": {1: "b"}}, "rendezvous.conf: must be text without NUL (got 1)"),
        ({"conf": {"a": 1}}, "rendezvous.conf['a']: must be text without NUL (got 1)"),
    ],
)
def test_an_invalid_setting_is_one_line(settings: dict[str, Any], message: str) -> None:
    """Field, problem and value."""
    with pytest.raises(SpecError) as caught:
        RendezvousSpec(**settings)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"key_prefix": 5}, "engine.key_prefix: must be text without NUL (got 5)"),
        ({"retention": 59}, "engine.retention: must be a number of at least 60"),
        ({"user": 5}, "engine.user: must be text without NUL (got 5)"),
        ({"user": "a", "password": 5}, "engine.password: must be text without NUL (got 5)"),
        ({"password": "secret"}, "engine.user: is needed with engine.password (got None)"),
    ],
)
def test_an_invalid_engine_is_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        EngineSpec(**settings)
    assert str(caught.value).startswith(message)
    assert "secret" not in repr(EngineSpec(user="a", password="secret"))


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
