"""The wait of a node that has succeeded, while other nodes' workers use a store that it serves.

While the nodes' store is lost, a node knows nothing of the others.  A node that lost the same
store comes to the next one within the time of a lease, or stops its workers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from elastic_aio.aio import Notifier
from elastic_aio.errors import StoreError
from elastic_aio.rendezvous.member import Member
from elastic_aio.rendezvous.session import StoreSession


class Barrier:
    """Knows the present session of a member, and waits until no other node needs it.

    Attributes:
        session: the session at the present store; None while there is none.
    """

    def __init__(self, member: Member, lease_time: float) -> None:
        """Begin without a session; a lease ends `lease_time` seconds after the last message."""
        self.session: StoreSession | None = None
        self._member = member
        self._lease_time = lease_time
        self._settled_at = 0.0
        self._changed = Notifier()

    def begin(self, session: StoreSession) -> None:
        """Take a new session."""
        self.session = session
        self._changed.notify_all()

    def end(self) -> None:
        """Take the end of the session."""
        self.session = None
        self._settled_at = asyncio.get_running_loop().time() + self._lease_time
        self._changed.notify_all()

    async def wait_unneeded(self, on_wait: Callable[[StoreSession], None]) -> None:
        """Wait until no other node runs workers, if this one serves a store to them.

        `on_wait` is called once, if they are waited for.
        """
        is_reported = False
        while (session := self.session) is not None or self._member.is_lead:
            if session is None:
                await self._changed.wait()
                continue
            if not session.serves_others:
                return
            if not is_reported:
                on_wait(session)
                is_reported = True
            left = self._settled_at - asyncio.get_running_loop().time()
            if left <= 0 or not await self._changed.wait(left):
                with contextlib.suppress(StoreError):
                    await session.wait_alone()
                    return
                if session is self.session:
                    await self._changed.wait()
