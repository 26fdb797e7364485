"""The engines under test: a server that the tests share, a proxy of it, and one of a test's own."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from elastic_aio import TlsSpec
from elastic_aio.engines.base import EngineClient
from elastic_aio.engines.etcd import EtcdStore
from elastic_aio.engines.redis import RedisStore
from tests.support import etcd, redis
from tests.support.chaos import ChaosProxy
from tests.support.servers import ServerProcess


class EngineKind(NamedTuple):
    """An engine, and what the tests do with its servers."""

    name: str
    """In messages."""
    store: type[EngineClient]
    serve: Callable[[Path], ServerProcess]
    serve_tls: Callable[[Path, TlsSpec], ServerProcess]
    admit_one_user: Callable[[str, str], None]


def _redis_with_tls(directory: Path, tls: TlsSpec) -> ServerProcess:
    server = redis.RedisProcess(directory)
    return server.also(*redis.tls_options(tls, server.port))


KINDS = {
    "etcd": EngineKind(
        "etcd",
        EtcdStore,
        etcd.EtcdProcess,
        lambda path, tls: etcd.EtcdProcess(path, "m0", *etcd.tls_options(tls), tls=True),
        etcd.admit_one_user,
    ),
    "redis": EngineKind(
        "Redis", RedisStore, redis.RedisProcess, _redis_with_tls, redis.admit_one_user
    ),
}


class Engine(NamedTuple):
    """A server that the tests share, a proxy of it, and a key prefix of the test's own."""

    kind: EngineKind
    endpoint: str
    proxy: ChaosProxy
    prefix: str

    def client(self, endpoint: str | None = None, **settings: Any) -> EngineClient:
        """Return a store that is not open yet, by default at the server."""
        settings.setdefault("key_prefix", self.prefix)
        return self.kind.store(endpoint or self.endpoint, **settings)

    def far(self, **settings: Any) -> EngineClient:
        """Return a store that is not open yet, at the proxy."""
        return self.client(self.proxy.endpoint, **settings)


@pytest.fixture
def prefix() -> str:
    """A key prefix of the test's own."""
    return f"/{uuid.uuid4().hex}"


@pytest.fixture(params=KINDS)
async def engine(request: pytest.FixtureRequest, prefix: str) -> AsyncIterator[Engine]:
    """Each engine."""
    endpoint = request.getfixturevalue(f"{request.param}_endpoint")
    async with ChaosProxy(int(endpoint.rpartition(":")[2])) as proxy:
        yield Engine(KINDS[request.param], endpoint, proxy, prefix)


@pytest.fixture
def server(engine: Engine, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server of the test's own of that engine, which keeps its data."""
    with engine.kind.serve(tmp_path) as running:
        yield running
