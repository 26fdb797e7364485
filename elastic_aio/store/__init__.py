"""The store that nodes and workers meet at: torch's TCPStore protocol, on asyncio."""

from elastic_aio.store.base import Change, ChangeKind, Lease, Store, Watch
from elastic_aio.store.client import RemoteStore, connect
from elastic_aio.store.connection import Dropped, ServerLimits
from elastic_aio.store.memory import MemoryStore
from elastic_aio.store.server import StoreServer

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
