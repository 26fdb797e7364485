"""Jobs of several nodes whose store speaks TLS, with certificates of every node."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import (
    JobFinished,
    RendezvousStoreRecovered,
    RoundFormed,
    RoundForming,
    StoreRefused,
    TlsSpec,
)
from elastic_aio.store import connect, wire
from tests.support.certificates import Authority
from tests.support.cli import run_cli, run_program
from tests.support.cluster import COMMAND, Cluster
from tests.support.sockets import LOOPBACK, free_port

pytestmark = pytest.mark.black_box


def conf_of(tls: TlsSpec) -> dict[str, Any]:
    """Return the keys of `--rdzv-conf`."""
    names = ("cert", "key", "ca", "client_auth", "server_name")
    return {f"tls_{name}": getattr(tls, name) for name in names}


def options_of(tls: TlsSpec) -> dict[str, Any]:
    """Return the options of a client."""
    return {f"tls_{name}": getattr(tls, name) for name in ("cert", "key", "ca")}


async def test_nodes_meet_over_tls_only(authority: Authority, tmp_path: Path) -> None:
    """Each has its own certificate; strangers get nothing and disturb nothing."""
    port = free_port()
    endpoint = f"{LOOPBACK}:{port}"
    async with Cluster(tmp_path, 2, endpoint=endpoint) as cluster:
        first = await cluster.start_first(conf=conf_of(authority.issue()))
        with pytest.raises(StoreRefused, match="the store speaks TLS"):
            await connect(endpoint, timeout=20).__aenter__()
        with pytest.raises(StoreRefused, match="requires a client certificate"):
            await connect(endpoint, tls=TlsSpec(ca=authority.ca), timeout=20).__aenter__()
        torch_client = socket.create_connection((LOOPBACK, port))
        half_open = socket.create_connection((LOOPBACK, port))
        with torch_client, half_open:
            half_open.sendall(b"\x16\x03\x01\x02\x00\x01")
            torch_client.sendall(wire.OPENING + wire.encode(wire.SET, b"/k", b"v"))
            torch_client.settimeout(20)
            assert torch_client.recv(100) == wire.TLS_ALERT
            second = cluster.start(conf=conf_of(authority.issue()))
            workers = await cluster.workers(first, second)
            for node, worker in zip((first, second), workers, strict=True):
                assert await node.ask(worker, "connect") == "connected"
            tls = authority.issue()
            events = cluster.follow_events(**options_of(tls))
            ping = run_program(
                [*COMMAND, "store", "ping", endpoint, *_words(options_of(tls))], seconds=60
            )
            assert (ping.code, ping.err) == (0, "")
            # Its store ends with the job.
            await events.wait_for(lambda event: isinstance(event, RoundFormed), "the round")
            await cluster.succeed(first, second)
        await events.wait_for(lambda event: isinstance(event, JobFinished), "the end of the job")


async def test_nodes_move_to_another_store_over_tls(authority: Authority, tmp_path: Path) -> None:
    """The store host is killed; another node serves the endpoint, with its own certificate."""
    async with Cluster(tmp_path, "2:3") as cluster:
        nodes = [cluster.start(conf=conf_of(authority.issue()))]
        await nodes[0].event(RoundForming)
        nodes += [cluster.start(conf=conf_of(authority.issue())) for _ in range(2)]
        await cluster.workers(*nodes)
        host = nodes[0]
        host.send(9)
        left = [node for node in nodes if node is not host]
        for node in left:
            await node.event(RendezvousStoreRecovered)
        await cluster.workers(*left, world_size=2)
        await cluster.succeed(*left, world_size=2)


async def test_static_nodes_leave_their_store_to_themselves(
    authority: Authority, tmp_path: Path
) -> None:
    """The workers get another one, because torch's clients do not speak TLS."""
    endpoint = f"localhost:{free_port()}"
    async with Cluster(tmp_path, 2, endpoint=endpoint, rdzv_backend="static") as cluster:
        first = cluster.start(node_rank=0, conf=conf_of(authority.issue()))
        # The node of rank 1 serves no store, and proves with its certificate who it is.
        second = cluster.start(node_rank=1, conf=conf_of(authority.issue(usage="clientAuth")))
        workers = await cluster.workers(first, second)
        assert {worker.master_port for worker in workers} != {int(endpoint.split(":")[1])}
        for node, worker in zip((first, second), workers, strict=True):
            assert await node.ask(worker, "connect") == "connected"
        await cluster.succeed(first, second)


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ("no key", "--rdzv-conf: tls_key: is needed with a certificate (got None)"),
        ("no ca", "--rdzv-conf: tls_ca: is needed to verify the store's certificate (got None)"),
        (
            "no cert",
            "--rdzv-conf: tls_cert: is needed to serve a store, with its private key (got None)",
        ),
        ("missing", "--rdzv-conf: tls_cert: must be a file that can be read: no such file or"),
        ("other key", "--rdzv-conf: tls_key: must be the key of the certificate in"),
        ("passphrase", "--rdzv-conf: tls_key: must not be encrypted"),
        ("expired", "--rdzv-conf: tls_cert: is not accepted by"),
        ("name", "--rdzv-conf: tls_cert: is not for localhost (got"),
        ("switch", "--rdzv-conf: tls_client_auth: must be true or false (got 'maybe')"),
    ],
)
def test_mistakes_are_one_line_before_anything_starts(
    authority: Authority, part: str, line: str
) -> None:
    """With exit code 2."""
    good = authority.issue()
    conf: dict[str, Any] = {
        "no key": {"tls_cert": good.cert},
        "no ca": {"tls_cert": good.cert, "tls_key": good.key},
        "no cert": {"tls_ca": good.ca},
        "missing": conf_of(replace(good, cert="/nowhere")),
        "other key": conf_of(replace(good, key=authority.issue().key)),
        "passphrase": conf_of(authority.issue(passphrase="12345")),
        "expired": conf_of(authority.issue(is_expired=True)),
        "name": {**conf_of(authority.issue("DNS:elsewhere")), "is_host": True},
        "switch": {**conf_of(good), "tls_client_auth": "maybe"},
    }[part]
    pairs = ",".join(f"{key}={value}" for key, value in conf.items() if value is not None)
    ended = run_cli(
        "--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}",
        f"--rdzv-conf={pairs}", "/no/such/script.py",
    )  # fmt: skip
    assert ended.code == 2
    assert len(ended.errors) == 1
    assert ended.errors[0].startswith(f"aio-elastic run: {line}")


def _words(options: dict[str, object]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
