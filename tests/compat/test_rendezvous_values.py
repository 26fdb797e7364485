"""The values of torch's rendezvous: parameters, registry, store info."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_aio.compat.torch.rendezvous import (
    DynamicRendezvousHandler,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandlerRegistry,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    get_rendezvous_handler,
)
from elastic_aio.compat.torch.rendezvous.api import rendezvous_error
from elastic_aio.outcome import EndCause, JobOutcome, JobState
from elastic_aio.spec.job import LaunchSpec


def parameters(**settings: Any) -> RendezvousParameters:
    return RendezvousParameters("mine", "localhost:1", "run", 1, 2, **settings)


def handler(backend: str = "mine") -> Any:
    """Return what a registry asks of a handler."""
    return SimpleNamespace(get_backend=lambda: backend)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1", True), ("Yes", True), (1, True), (True, True), ("f", False), (0, False), (None, None)],
)
def test_a_setting_is_a_bool(value: object, expected: bool | None) -> None:
    assert parameters(flag=value).get_as_bool("flag") is expected


@pytest.mark.parametrize("value", ["maybe", 2, 1.5])
def test_another_value_is_no_bool(value: object) -> None:
    with pytest.raises(ValueError, match=r"flag: .* valid boolean value"):
        parameters(flag=value).get_as_bool("flag")


def test_a_setting_is_an_int() -> None:
    assert parameters(n="7").get_as_int("n") == 7
    assert parameters().get_as_int("n", 5) == 5
    assert parameters().get("n") is None
    with pytest.raises(ValueError, match=r"n: .* valid integer value \(got 'x'\)"):
        parameters(n="x").get_as_int("n")


@pytest.mark.parametrize(("low", "high"), [(0, 1), (3, 2)])
def test_node_counts_are_checked(low: int, high: int) -> None:
    with pytest.raises(ValueError, match="_nodes: must be"):
        RendezvousParameters("c10d", "", "run", low, high)


def test_a_backend_has_one_creator() -> None:
    registry, made = RendezvousHandlerRegistry(), handler()
    registry.register("mine", create := lambda params: made)
    registry.register("mine", create)
    assert registry.create_handler(parameters()) is made
    with pytest.raises(ValueError, match="already registered"):
        registry.register("mine", lambda params: made)


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match="'mine' is not registered"):
        RendezvousHandlerRegistry().create_handler(parameters())


def test_a_handler_of_another_backend_is_refused() -> None:
    registry = RendezvousHandlerRegistry()
    registry.register("mine", lambda params: handler("theirs"))
    with pytest.raises(RuntimeError, match="'theirs' does not match"):
        registry.create_handler(parameters())


@pytest.mark.parametrize("is_host", [True, False])
def test_no_node_serves_the_store_at_etcd(is_host: bool, caplog: pytest.LogCaptureFixture) -> None:
    """As with torch's handlers, `is_host` has no effect there."""
    settings = RendezvousParameters("etcd", "localhost:1", "run", 1, 2, is_host=is_host)
    handler = get_rendezvous_handler(settings)
    assert isinstance(handler, DynamicRendezvousHandler)
    LaunchSpec(["true"], nnodes=(1, 2), rendezvous=handler.rendezvous)
    assert "is_host has no effect: etcd is the store" in caplog.text


@pytest.mark.parametrize("endpoint", ["~", "~:123", "a.com :123", ":123", "-", "_:1"])
@pytest.mark.parametrize("backend", ["c10d", "etcd"])
def test_an_endpoint_names_a_host(backend: str, endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"rendezvous.endpoint: must be HOST:PORT, .* or HOST"):
        get_rendezvous_handler(RendezvousParameters(backend, endpoint, "run", 1, 2))


class DictStore:
    """A torch store as far as `build` uses it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]


def test_rank_0_publishes_where_the_workers_meet() -> None:
    store = DictStore()
    first = RendezvousStoreInfo.build(0, store, "10.0.0.1", server_port=77)
    assert first == RendezvousStoreInfo("10.0.0.1", 77)
    assert RendezvousStoreInfo.build(1, store, "10.0.0.2") == first


def test_rank_0_takes_a_free_port() -> None:
    assert RendezvousStoreInfo.build(0, DictStore(), "10.0.0.1").master_port > 0


@pytest.mark.parametrize(
    ("cause", "error"),
    [
        (None, RendezvousError),
        (EndCause.TOO_FEW_NODES, RendezvousTimeoutError),
        (EndCause.NO_STORE, RendezvousConnectionError),
        (EndCause.RUN_HAD_ENDED, RendezvousClosedError),
    ],
)
def test_the_cause_of_a_failure_chooses_the_error(
    cause: EndCause | None, error: type[RendezvousError]
) -> None:
    """Its text does not matter: the name of a host may have any words."""
    why = "the other nodes refused this one: node store waited 5 s (join_timeout)"
    outcome = JobOutcome(JobState.FAILED, why, 75, is_rendezvous=True, cause=cause)
    assert type(rendezvous_error(outcome)) is error
