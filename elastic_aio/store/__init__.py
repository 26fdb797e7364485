"""The store that nodes and workers meet at: torch's TCPStore protocol, on asyncio.

The names load on first use: a launcher binds a store's port for every job, and needs
the rest of it only when somebody connects.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_aio.store.base import Change as Change
    from elastic_aio.store.base import ChangeKind as ChangeKind
    from elastic_aio.store.base import Lease as Lease
    from elastic_aio.store.base import Store as Store
    from elastic_aio.store.base import Watch as Watch
    from elastic_aio.store.client import RemoteStore as RemoteStore
    from elastic_aio.store.client import connect as connect
    from elastic_aio.store.connection import Dropped as Dropped
    from elastic_aio.store.connection import ServerLimits as ServerLimits
    from elastic_aio.store.memory import MemoryStore as MemoryStore
    from elastic_aio.store.server import StoreServer as StoreServer

_HOME_OF = {
    "Change": "base",
    "ChangeKind": "base",
    "Dropped": "connection",
    "Lease": "base",
    "MemoryStore": "memory",
    "RemoteStore": "client",
    "ServerLimits": "connection",
    "Store": "base",
    "StoreServer": "server",
    "Watch": "base",
    "connect": "client",
}

__all__ = [
    "Change",
    "ChangeKind",
    "Dropped",
    "Lease",
    "MemoryStore",
    "RemoteStore",
    "ServerLimits",
    "Store",
    "StoreServer",
    "Watch",
    "connect",
]


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value
