"""Lines that another process writes, as values to wait for."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Generic, TypeVar

from tests.support.children import DEADLINE_S

T = TypeVar("T")


class Journal(Generic[T]):
    """What stands in a pipe by now, line by line, and what comes next.

    Args:
        name: whose it is, for complaints.
        descriptor: the end to read; closed with the journal.
        parse: makes a value of a line.
    """

    def __init__(self, name: str, descriptor: int, parse: Callable[[bytes], T]) -> None:
        self.name = name
        self.entries: list[T] = []
        self.is_over = False
        """Whether all who could write are gone."""
        self._descriptor = descriptor
        self._parse = parse
        self._begun = b""
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
        """Return the first entry from position `since` on that is wanted, now or later.

        Raises:
            AssertionError: it did not come in time, or can come no more.
        """
        (found,) = await self.wait_for_several(wanted, 1, what, since=since, seconds=seconds)
        return found

    async def wait_for_several(
        self,
        wanted: Callable[[T], bool],
        count: int,
        what: str,
        *,
        since: int = 0,
        seconds: float = DEADLINE_S,
    ) -> list[T]:
        """Return the first `count` entries that are wanted, now or later."""
        found: list[T] = []
        position = since
        try:
            async with asyncio.timeout(seconds):
                while True:
                    if self._problem is not None:
                        raise self._problem
                    found += filter(wanted, self.entries[position:])
                    position = max(position, len(self.entries))
                    if len(found) >= count:
                        return found[:count]
                    assert not self.is_over, f"{self.name} is over, and never said: {what}"
                    await asyncio.shield(self._more)
        except TimeoutError:
            raise AssertionError(f"{self.name} did not say within {seconds:g} s: {what}") from None

    async def over(self, seconds: float = DEADLINE_S) -> None:
        """Wait until all who could write are gone."""
        async with asyncio.timeout(seconds):
            while not self.is_over:
                await asyncio.shield(self._more)

    def finish(self) -> None:
        """Take in what has been written by now, and know that nothing else will be."""
        while not self.is_over and self._read():
            pass
        self._is_over_now()

    def close(self) -> None:
        """Read no more; may be repeated."""
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
        *lines, self._begun = (self._begun + data).split(b"\n")
        try:
            self.entries += map(self._parse, lines)
        except ValueError as problem:
            problem.add_note(f"in what {self.name} said: {data!r}")
            self._problem = problem
        if not data:
            self._is_over_now()
        self._wake()
        return True

    def _is_over_now(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._loop.remove_reader(self._descriptor)
            self._wake()

    def _wake(self) -> None:
        former, self._more = self._more, self._loop.create_future()
        former.set_result(None)
