"""Opens the store of a job for a reader, which is not one of its nodes."""

from __future__ import annotations

import asyncio

from elastic_aio.errors import StoreLost, StoreRefused, StoreTimeout
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.store import Store, connect
from elastic_aio.store.engine import EngineStore
from elastic_aio.store.link import client_context


def check_reader(spec: RendezvousSpec) -> None:
    """Raise `SpecError` if the settings of the store that `spec` names cannot be used."""
    spec.check_with(2)
    client_context(spec.tls)
    if spec.is_on_engine:
        _engine(spec, "")


async def open_job_store(
    spec: RendezvousSpec, run_id: str, timeout: float, turn: float = 2.0
) -> Store:
    """Open the store of a run: on the engine, or at the first endpoint with a store.

    The caller closes it.  It does not reconnect: another endpoint may have a store then.  Each of
    several endpoints is tried for `turn` seconds before the next.

    Cancellation: leaves nothing open.

    Raises:
        StoreTimeout: no store answers within `timeout` seconds.
        StoreRefused: all stores that answer refuse this client.
    """
    if not spec.is_on_engine:
        return await _connect_first(spec, timeout, turn)
    engine = _engine(spec, run_id)
    try:
        await engine.open(timeout)
    except StoreTimeout as error:
        await engine.aclose()
        raise no_store(spec, timeout, str(error)) from None
    except BaseException:  # a cancellation too: no connection stays open
        await engine.aclose()
        raise
    return engine


def _engine(spec: RendezvousSpec, run_id: str) -> EngineStore:
    from elastic_aio.discovery.engine import open_engine  # few jobs are on one

    return open_engine(spec, run_id, is_reader=True)


async def _connect_first(spec: RendezvousSpec, timeout: float, turn: float) -> Store:
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout
    reasons: dict[str, str] = {}
    while True:
        refusal: StoreRefused | None = None
        for endpoint in spec.endpoints:
            left = max(0.0, end - loop.time())
            wait = left if len(spec.endpoints) == 1 else min(left, turn)
            store = connect(endpoint, timeout=wait, reconnect_for=0, token=spec.token, tls=spec.tls)
            try:
                return await store.__aenter__()
            except StoreRefused as error:
                refusal = error
            except (StoreTimeout, StoreLost) as error:
                # Try the next.  The last turn is short and may only add "no answer".
                reason = str(error).rpartition(": ")[2]
                if reason != "no answer" or endpoint not in reasons:
                    reasons[endpoint] = f"{endpoint}: {reason}"
        if refusal is not None:
            raise refusal
        if loop.time() >= end:
            raise no_store(spec, timeout, "; ".join(reasons.values()))


def no_store(spec: RendezvousSpec, timeout: float, why: str) -> StoreTimeout:
    """Return the error that no endpoint has had a store for `timeout` seconds."""
    kind = spec.backend if spec.is_on_engine else "store"
    return StoreTimeout(f"no {kind} at {', '.join(spec.endpoints)} within {timeout:g} s: {why}")
