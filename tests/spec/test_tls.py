"""What a `TlsSpec` accepts, and how it refuses the rest."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_aio.errors import SpecError
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.spec.tls import TlsSpec

NODE: dict[str, Any] = {"cert": "/c", "key": "/k", "ca": "/a"}


@pytest.mark.parametrize(
    ("settings", "is_required"),
    [
        ({"ca": "/a"}, True),
        ({"cert": "/c", "key": "/k"}, False),
        (NODE, True),
        ({**NODE, "client_auth": True}, True),
        ({**NODE, "client_auth": False}, False),
    ],
)
def test_a_ca_means_that_clients_need_certificates(
    settings: dict[str, Any], is_required: bool
) -> None:
    """Unless `client_auth` says otherwise."""
    assert TlsSpec(**settings).requires_client_cert == is_required


def test_the_name_of_the_server_is_the_host_unless_it_is_set() -> None:
    assert TlsSpec(ca="/a").for_host("node0").server_name == "node0"
    assert TlsSpec(ca="/a", server_name="store").for_host("node0").server_name == "store"


@pytest.mark.parametrize(
    ("tls", "rendezvous", "message"),
    [
        (TlsSpec(cert="/c", key="/k"), {}, "tls.ca: is needed to verify the store's certificate"),
        (TlsSpec(ca="/a"), {}, "tls.cert: is needed to serve a store, with its private key"),
        (TlsSpec(ca="/a"), {"is_host": False}, None),
        (TlsSpec(ca="/a"), {"backend": "static", "node_rank": 0}, "tls.cert: is needed to serve"),
        (TlsSpec(ca="/a"), {"backend": "static", "node_rank": 1}, None),
        (TlsSpec(**NODE), {}, None),
        ("/a", {}, "rendezvous.tls: must be a TlsSpec or None (got '/a')"),
    ],
)
def test_a_node_needs_what_its_part_needs(
    tls: Any, rendezvous: dict[str, Any], message: str | None
) -> None:
    """Each connects, and each that may serve the store needs a certificate."""

    def make() -> LaunchSpec:
        return LaunchSpec("x.py", nnodes=2, rendezvous=RendezvousSpec(tls=tls, **rendezvous))

    if message is None:
        make()
        return
    with pytest.raises(SpecError) as raised:
        make()
    assert str(raised.value).startswith(message)
