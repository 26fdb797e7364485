"""The interface of a store on an engine (`elastic_aio.engines`), which serves it outside a job."""

from __future__ import annotations

import abc
from typing import ClassVar

from elastic_aio.store.base import Store


class EngineStore(Store):
    """A store on an engine of several servers, such as etcd or Redis.

    While no server answers, requests are repeated, at one server after the other.  After
    `lost_after` seconds without an answer the store is lost for good.  The methods raise
    `StoreError` as any operation does.
    """

    is_per_run: ClassVar[bool] = False
    """Whether each value of `retained` has a store of its own, without the keys of others."""

    @abc.abstractmethod
    async def open(self, timeout: float) -> None:
        """Connect, within `timeout` seconds; may be called again after StoreTimeout.

        Cancellation: the caller closes the store.

        Raises:
            StoreTimeout: no server answers; the message has the reason for each.
            StoreRefused: a server refuses this client.
        """

    @property
    @abc.abstractmethod
    def endpoint(self) -> str:
        """The server that is used now, as `HOST:PORT`."""

    @property
    @abc.abstractmethod
    def local_address(self) -> str:
        """The address of this host on the connection that was opened last."""

    @property
    @abc.abstractmethod
    def last_received_at(self) -> float:
        """When a server last answered, in the loop's seconds; 0: never."""

    @property
    def last_reply_at(self) -> float:
        """The same, but the end of a connection does not count."""
        return self.last_received_at

    @property
    def incarnation(self) -> bytes:
        """Differs after each loss of data that keys alone do not show; empty if they do."""
        return b""

    def continue_from(self, former: EngineStore) -> None:  # most need nothing
        """Take over the knowledge of changes from a former store of this client; before `open`."""

    @abc.abstractmethod
    async def list_runs(self, begin: str) -> list[str]:
        """Return the names of the runs, in no particular order.

        A name follows `begin` in a key, up to a slash; with `is_per_run` it is a value of
        `retained` at the server.  The work grows with the number of runs, and not of their keys
        (with `is_per_run`: with the number of all keys of the server, in steps).
        """

    @abc.abstractmethod
    async def remove_run(self, begin: str, *, record_key: str, record: bytes, members: str) -> bool:
        """Delete all keys that begin with `begin`, at once, if nothing uses them.

        With `is_per_run` these are all keys of the store, which is lost then.  Return whether
        `record_key` had the value `record`, and no key began with `members`.
        """

    @abc.abstractmethod
    async def end_lease(self, lease_id: bytes) -> None:
        """End a lease of any client as if it had expired; without effect on one that has ended."""
