"""The engines by their names: the backends, their ports, and where their stores are imported."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from elastic_aio.discovery.engine import load_engine, open_engine
from elastic_aio.engines.etcd import EtcdStore
from elastic_aio.engines.redis import RedisStore
from elastic_aio.errors import SpecError
from elastic_aio.spec.rendezvous import ENGINES, EngineSpec, RendezvousSpec

CASES: list[tuple[str, dict[str, Any], Any, int]] = [
    ("etcd", {}, EtcdStore, 2379),
    ("etcd-v2", {}, EtcdStore, 2379),
    ("redis", {}, RedisStore, 6379),
    ("valkey", {}, RedisStore, 6379),
    ("redis", {"sentinel": "m"}, RedisStore, 26379),
]


@pytest.mark.parametrize(("backend", "settings", "kind", "port"), CASES)
def test_a_backend_opens_the_store_of_its_engine(
    backend: str, settings: dict[str, Any], kind: Any, port: int
) -> None:
    spec = RendezvousSpec(backend=backend, endpoint="node0", engine=EngineSpec(**settings))
    store = open_engine(spec, "run")
    assert (type(store), store.endpoint) == (kind, f"node0:{port}")
    assert kind("node0", **settings).endpoint == store.endpoint


def test_every_name_is_that_of_one_engine() -> None:
    assert [backend for backend, settings, *_ in CASES if not settings] == [*ENGINES]


@pytest.mark.parametrize("backend", ["etcd3", "c10d", "static", "my-plug-in"])
def test_another_backend_is_no_engine(backend: str) -> None:
    with pytest.raises(SpecError, match=r"^rendezvous.backend: must be that of an engine, one of"):
        load_engine(backend)


@pytest.mark.parametrize(
    ("module", "store"),
    [
        ("elastic_aio.engines.etcd.store", EtcdStore),
        ("elastic_aio.store.etcd", EtcdStore),
        ("elastic_aio.engines.redis.store", RedisStore),
    ],
)
def test_a_store_can_be_imported_from_where_it_was(module: str, store: type[Any]) -> None:
    assert getattr(importlib.import_module(module), store.__name__) is store
