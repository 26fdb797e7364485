"""The lines that other processes write into a pipe, parsed, as values to wait for."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Generic, TypeVar

from tests.support.children import DEADLINE_S

T = TypeVar("T")


class LineStream(Generic[T]):
    """The lines of a pipe, past and future, as entries that `parse` makes of them.

    `name` is that of the writer; `descriptor`, the end to read, is closed with the stream.
    """

    def __init__(self, name: str, descriptor: int, parse: Callable[[bytes], T]) -> None:
        self.name = name
        self.entries: list[T] = []
        self.is_over = False
        """Whether all writers are gone."""
        self._descriptor = descriptor
        self._parse = parse
        self._partial = b""
        self._problem: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._more = self._loop.create_future()
        os.set_blocking(descriptor, False)
        self._loop.add_reader(descriptor, self._read)

    def __len__(self) -> int:
        return len(self.entries)

    async def wait_for(
        self, wanted: Callable[[T], bool], what: str, *, since: int = 0, seconds: float = DEADLINE_S
    ) -> T:
        """Return the first wanted entry from position `since` on, now or later.

        Raises:
            AssertionError: it did not come in time, or all writers are gone.
        """
        (entry,) = await self.wait_for_several(wanted, 1, what, since=since, seconds=seconds)
        return entry

    async def wait_for_several(
        self,
        wanted: Callable[[T], bool],
        count: int,
        what: str,
        *,
        since: int = 0,
        seconds: float = DEADLINE_S,
    ) -> list[T]:
        """Return the first `count` wanted entries, now or later."""
        entries: list[T] = []
        position = since
        try:
            async with asyncio.timeout(seconds):
                while True:
                    if self._problem is not None:
                        raise self._problem
                    entries += filter(wanted, self.entries[position:])
                    position = max(position, len(self.entries))
                    if len(entries) >= count:
                        return entries[:count]
                    assert not self.is_over, f"{self.name} ended without {what}"
                    await asyncio.shield(self._more)
        except TimeoutError:
            raise AssertionError(f"{self.name}: not within {seconds:g} s: {what}") from None

    async def over(self, seconds: float = DEADLINE_S) -> None:
        """Wait until all writers are gone."""
        async with asyncio.timeout(seconds):
            while not self.is_over:
                await asyncio.shield(self._more)

    def finish(self) -> None:
        """Read what has been written by now, and expect no more."""
        while not self.is_over and self._read():
            pass
        self._set_over()

    def close(self) -> None:
        """Stop reading.  Idempotent."""
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
            self._more.cancel()

    def _read(self) -> bool:
        try:
            data = os.read(self._descriptor, 1 << 20)
        except BlockingIOError:
            return False
        *lines, self._partial = (self._partial + data).split(b"\n")
        try:
            self.entries += map(self._parse, lines)
        except ValueError as problem:
            problem.add_note(f"in the lines of {self.name}: {data!r}")
            self._problem = problem
        if not data:
            self._set_over()
        self._wake()
        return True

    def _set_over(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._loop.remove_reader(self._descriptor)
            self._wake()

    def _wake(self) -> None:
        former, self._more = self._more, self._loop.create_future()
        former.set_result(None)
