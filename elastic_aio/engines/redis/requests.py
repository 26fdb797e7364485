"""Requests to a store on Redis: runs of its script, and what their replies show of its history."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any, Final

from msgspec import Struct

from elastic_aio.aio import random_bytes
from elastic_aio.engines.redis.connection import (
    RedisConnection,
    is_script_unknown,
    pack,
    pack_words,
)
from elastic_aio.engines.redis.link import RedisLink
from elastic_aio.engines.redis.script import DONE, KEYS, LEASE_ENDED, LOST, SCRIPT
from elastic_aio.errors import StoreLost, StoreRefused
from elastic_aio.store.keyspace import OperationRefused, parse_counter, wrap

_SHA: Final = hashlib.sha1(SCRIPT, usedforsecurity=False).hexdigest()
_BY_HASH: Final = pack_words([b"EVALSHA", _SHA.encode()])
_WHOLE: Final = pack_words([b"EVAL", SCRIPT])

_LOST: Final = "Redis has lost changes, by a fail-over or a restart, or has removed all keys"

_SCANNED: Final = b"1000"
"""Keys that Redis visits in one request."""

_UNREPEATABLE: Final = ("add", "swap", "append", "push", "pop")


class KnownHistory(Struct):
    """What a client knows of the store's history: see `engines.redis.script`."""

    id: bytes = b""
    epoch: bytes = b""
    revision: int = 0


class RedisRequests:
    """Runs the script for one store.

    `shortest` is the shortest time to live of the leases, and `due` the time until the next of
    them expires, in seconds as of the last reply; 0 for none.
    """

    def __init__(self, link: RedisLink, tag: bytes, retention: int) -> None:
        """Begin without knowledge; `retention` is in milliseconds, 0 for none."""
        self._link = link
        self._tag = tag
        self._keys = pack_words([b"%d" % len(KEYS), *(tag + name for name in KEYS)])
        self._retention = b"%d" % retention
        self._nonce = random_bytes(8).hex().encode()
        self._runs = itertools.count()
        self.known = KnownHistory()
        self.shortest = 0.0
        self.due = 0.0

    async def run(self, op: str, *arguments: bytes, deadline: float | None = None) -> Any:
        """Run an operation of the script, until `deadline` (of the loop) if given.

        Raises:
            StoreRefused: Redis refuses it, or the lease has ended.
            StoreLost: the store has lost changes, and as for `RedisLink.request`.
            StoreTimeout: as for `RedisLink.request`.
        """

        async def use(connection: RedisConnection) -> Any:
            known = self.known
            nonce = b"%b%x" % (self._nonce, next(self._runs))
            words = (
                op.encode(), self._tag, known.id, known.epoch, b"%d" % known.revision,
                connection.run_id, nonce, self._retention, *arguments,
            )  # fmt: skip
            # The package would encode each key anew, and needs longer than all the rest.
            tail = self._keys + pack_words(words)
            count = 3 + len(KEYS) + len(words)
            try:
                return await connection.ask_packed(b"*%d\r\n%b%b" % (count, _BY_HASH, tail))
            except Exception as error:
                if not is_script_unknown(error):
                    raise
            return await connection.ask_packed(b"*%d\r\n%b%b" % (count, _WHOLE, tail))

        answer, is_repeat = await self._link.request(
            use, is_repeatable=op not in _UNREPEATABLE, deadline=deadline
        )
        status, *state = answer[0].split(b" ")
        if status == LOST:
            self.known = KnownHistory()  # another store enters what is there now
            self._link.fail(StoreLost(_LOST))
            self._link.check()
        identity, epoch, revision, ttl, due = state
        result = answer[1]
        self._learn(KnownHistory(identity, epoch, int(revision)))
        self.shortest, self.due = int(ttl) / 1000, int(due) / 1000
        if status == LEASE_ENDED:
            raise StoreRefused("the lease has ended")
        assert status == DONE
        if is_repeat and op == "cas" and result != arguments[2]:
            # Made by the first request, and replaced since.
            raise StoreLost("the connection to Redis failed; the change may have been made or not")
        return result

    async def scan(self, pattern: bytes) -> list[bytes]:
        """Return the keys of the server that match a pattern, some of them perhaps twice.

        Raises:
            StoreError: as for `RedisLink.request`.
        """
        found: list[bytes] = []
        cursor = b"0"
        while True:
            position = cursor

            async def use(connection: RedisConnection, position: bytes = position) -> Any:
                return await connection.ask_packed(
                    pack(b"SCAN", position, b"MATCH", pattern, b"COUNT", _SCANNED)
                )

            (cursor, keys), _ = await self._link.request(use)
            found += keys
            if cursor == b"0":
                return found

    def _learn(self, found: KnownHistory) -> None:
        """Keep what a reply says; replies of two connections may overtake each other."""
        known = self.known
        if (known.id, known.epoch) == (found.id, found.epoch):
            known.revision = max(known.revision, found.revision)
        elif known.epoch == b"" or found.revision >= known.revision:
            self.known = found

    async def add(self, key: bytes, amount: int) -> int:
        """Add to a counter; the script does so with small numbers, and this client with others."""
        is_done, value = await self.run("add", key, b"%d" % amount)
        while not is_done:
            try:
                total = wrap(parse_counter(value) + amount)
            except OperationRefused as error:
                raise StoreRefused(str(error)) from None
            if value is None:
                if await self.run("cas", key, b"", b"%d" % total, b"") == b"%d" % total:
                    return total
            elif await self.run("swap", key, value, b"%d" % total):
                return total
            is_done, value = await self.run("add", key, b"%d" % amount)
        return int(value)
