"""The fence of a client of etcd: a change that etcd holds back never replaces a later one.

A member of etcd that is suspended keeps the requests that it was sent, and carries them out when
it goes on.  By then the client has repeated them at another member, and has made later changes.
So each change compares the revision of a key of the client's own.  A change that got no reply
lowers the fence: before its next request the client writes the key, at any member, and then no
request that was sent before has an effect any more.

The key is under a lease, which no client renews.  When it has gone, changes are not made until
it is written anew, and it has another revision then: no revision is used twice.
"""

from __future__ import annotations

from typing import Final

from elastic_aio.engines.etcd.wire import (
    GRANT,
    LeaseReply,
    Request,
    TxnReply,
    compare,
    put_op,
    read_op,
    txn,
)

_TTL: Final = 3600
"""Seconds after which the key of a killed client is gone; others write theirs anew so often."""


class EtcdFence:
    """A fence; it is up while each change that compares `revision` has a reply or waits for it."""

    def __init__(self, key: bytes) -> None:
        """Begin without the key."""
        self.key = key
        self.lease = self.revision = 0
        self.is_up = False

    def lower(self, revision: int) -> None:
        """Note that a change which compares `revision` has no reply, or was not made."""
        if revision == self.revision:
            self.is_up = False

    def next_request(self) -> Request:
        """Return the next request that raises the fence; it may be sent again."""
        if not self.lease:
            return Request(GRANT, {"TTL": str(_TTL)}, LeaseReply)
        # Compared too: held back, it must not lower what has been raised since.
        same = [compare(self.key, "mod_revision", self.revision)]
        return txn(same, [put_op(self.key, b"", self.lease)], [read_op(self.key)])

    def on_reply(self, reply: LeaseReply | TxnReply) -> None:
        """Take the reply to that request."""
        if isinstance(reply, LeaseReply):
            self.lease = reply.ID
        elif reply.succeeded:
            self.revision, self.is_up = reply.header.revision, True
        else:
            # Written by a former attempt, which nothing has compared; or gone with its lease.
            found = reply.ranges[0].kvs
            self.revision = found[0].mod_revision if found else 0
            self.is_up = bool(found)
