"""Opens the store of a job on an engine: it is there, so no node serves one.

While the engine is unreachable, agents search on without a limit in time, because their workers
need no store while they run.  Only the first search has a limit.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import math
import random
from collections.abc import Callable
from typing import Final

from elastic_aio.aio import random_bytes
from elastic_aio.discovery.choice import FENCE
from elastic_aio.discovery.locator import DiscoveryError, LocatedStore, Locator
from elastic_aio.discovery.runs import run_prefix
from elastic_aio.errors import SpecError, StoreError, StoreRefused
from elastic_aio.spec.rendezvous import ENGINES, RendezvousSpec
from elastic_aio.spec.restart import Backoff
from elastic_aio.store.engine import EngineStore

INSTANCE: Final = "instance"
"""A key of the run; its value tells an engine from one that has lost its data."""

_NOTICE: Final = 5.0
"""Seconds of a search after which its node reports it."""

_NOTICE_MAX: Final = 60.0
"""Seconds between two such reports, at the most."""

_RETRY: Final = Backoff(initial=0.5, factor=2.0, cap=10.0)
"""Before another attempt at an engine that refuses this node."""


def load_engine(backend: str) -> Callable[..., EngineStore]:
    """Return the class of the stores on an engine, imported by its name.

    A job without this engine loads neither it nor the package that it needs.

    Raises:
        SpecError: no engine has this name, or a package is missing.
    """
    if (entry := ENGINES.get(backend)) is None:
        problem = f"must be that of an engine, one of {', '.join(ENGINES)}"
        raise SpecError("rendezvous.backend", backend, problem)
    module, _, name = entry.store.partition(":")
    made: Callable[..., EngineStore] = getattr(importlib.import_module(module), name)
    return made


def open_engine(spec: RendezvousSpec, run_id: str, *, is_reader: bool = False) -> EngineStore:
    """Return the store of a run on the engine that `spec` names, not yet open.

    A reader does not prolong the retention of the run's keys.

    Raises:
        SpecError: a setting cannot be used, or as for `load_engine`.
    """
    make = load_engine(spec.backend)
    return make(
        ",".join(spec.endpoints),
        key_prefix=spec.engine.key_prefix,
        user=spec.engine.user,
        password=spec.engine.password,
        tls=spec.tls,
        lost_after=spec.heartbeat_timeout - FENCE,
        retention=None if is_reader else spec.engine.retention,
        retained=run_id,
        **{name: getattr(spec.engine, name) for name in ENGINES[spec.backend].settings},
    )


class EngineLocator(Locator):
    """Opens the store of a job on an engine; the first search ends by `read_timeout` or refusal."""

    def __init__(
        self,
        spec: RendezvousSpec,
        run_id: str,
        on_wait: Callable[[str, float | None], None],
    ) -> None:
        """Check the settings; nothing is connected yet.  Raises as `open_engine`.

        `on_wait` is called in a search that takes long, with the reason for each endpoint and the
        seconds until it ends, None for a search without a limit.
        """
        self._spec = spec
        self._run_id = run_id
        self._on_wait = on_wait
        self._store = open_engine(spec, run_id)

    def __repr__(self) -> str:
        return f"<EngineLocator {self._spec.endpoint}: {self._store}>"

    async def locate(
        self, *, is_first: bool, job: str = "", may_serve: Callable[[], bool] = lambda: True
    ) -> LocatedStore:
        loop = asyncio.get_running_loop()
        end = loop.time() + (self._spec.read_timeout if is_first else math.inf)
        notice = _NOTICE
        for attempt in itertools.count():
            await self.aclose()
            former, self._store = self._store, open_engine(self._spec, self._run_id)
            self._store.continue_from(former)
            left = end - loop.time()
            try:
                return await self._open(self._store, min(notice, left))
            except StoreError as error:
                why = str(error)
                if isinstance(error, StoreRefused):
                    if is_first:
                        raise DiscoveryError(f"cannot use {self._spec.backend}: {why}") from None
                    await asyncio.sleep(_RETRY.delay(attempt, random.random))
            except BaseException:  # a cancellation: no connection stays open
                await self.aclose()
                raise
            if left <= notice:
                await self.aclose()
                raise DiscoveryError(
                    f"no server of {self._spec.backend} answered within"
                    f" {self._spec.read_timeout:g} s: {why}"
                )
            self._on_wait(why, None if end == math.inf else end - loop.time())
            notice = min(2 * notice, _NOTICE_MAX)
        raise AssertionError

    async def _open(self, store: EngineStore, timeout: float) -> LocatedStore:
        await store.open(timeout)
        key = f"{run_prefix(self._run_id)}/{INSTANCE}"
        instance = await store.compare_set(key, b"", random_bytes(8).hex())
        return LocatedStore(
            store,
            instance + store.incarnation,
            store.endpoint,
            index=0,
            is_host=False,
            local_address=store.local_address,
            is_engine=True,
        )

    async def aclose(self) -> None:
        await self._store.aclose()
