"""Whether what concurrent clients saw of a key can be explained by one order of their operations.

The search is that of Wing and Gong with Lowe's memory of visited configurations: of the
operations that no finished one precedes, take each in turn as the next, and go back where its
result is not that of the sequential model.  Keys are independent, so each is searched alone.

An operation whose outcome is unknown (the store was lost, or the caller was cancelled) may take
effect at any time after its call, or never.  A `set` that a client sends again during a fault may
take effect more than once until it returns; that is what stores on an engine promise.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Awaitable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from elastic_aio.errors import StoreLost
from elastic_aio.store import Store

_MOST: Final = 300_000
"""Configurations of one key that are visited."""

UNKNOWN: Final = object()
"""The result of an operation of which it is unknown whether it has taken effect."""


@dataclass(slots=True)
class Call:
    """One operation on a key; `began` and `ended` are positions in the history."""

    client: int
    op: str
    key: str
    argument: Any
    began: int
    ended: float = math.inf
    result: Any = UNKNOWN
    is_faulty: bool = False
    """Whether there was a fault meanwhile, so that it may have been sent again."""
    repeats: Call | None = None
    """The call of which this is a second effect."""

    @property
    def is_known(self) -> bool:
        """Whether it has returned a result."""
        return self.result is not UNKNOWN

    def apply(self, state: bytes | None) -> tuple[bytes | None, Any]:
        """Return the value afterwards and the result, as the model has them."""
        match self.op, self.argument:
            case "set", value:
                return value, None
            case "peek", _:
                return state, state
            case "add", amount:
                total = int(state or b"0") + amount
                return b"%d" % total, total
            case "cas", (expected, desired):
                if state == expected or (state is None and expected == b""):
                    return desired, desired
                return state, expected if state is None else state
        raise AssertionError(self.op)


@dataclass
class History:
    """The operations of all clients, in the order of their calls and returns."""

    calls: list[Call] = field(default_factory=list)
    faults: int = 0
    """Grows when a fault begins, and when it ends."""
    is_faulty: bool = False
    _positions: Any = field(default_factory=itertools.count)

    async def record(self, client: int, store: Store, op: str, key: str, argument: Any) -> Call:
        """Carry out an operation and record it."""
        call = Call(client, op, key, argument, next(self._positions))
        self.calls.append(call)
        before = self.faults
        is_faulty = self.is_faulty
        try:
            result = await _carry_out(store, op, key, argument)
        except StoreLost:
            pass  # unknown
        else:
            call.result = result
            call.ended = next(self._positions)
        call.is_faulty = is_faulty or self.faults != before
        return call

    def violation(self) -> str:
        """Return the history of a key that no order explains; empty if there is none."""
        keys: dict[str, list[Call]] = defaultdict(list)
        for call in self.calls:
            keys[call.key].append(call)
        for key, calls in keys.items():
            if not is_linearizable([*calls, *_repetitions(calls)]):
                return f"{key}:\n" + "\n".join(map(str, calls))
        return ""


def _carry_out(store: Store, op: str, key: str, argument: Any) -> Awaitable[Any]:
    match op:
        case "set":
            return store.set(key, argument)
        case "peek":
            return store.peek(key)
        case "add":
            return store.add(key, argument)
        case "cas":
            return store.compare_set(key, *argument)
    raise AssertionError(op)


def _repetitions(calls: Iterable[Call]) -> list[Call]:
    """Return the second effects that a `set` during a fault may have."""
    return [
        Call(call.client, "set", call.key, call.argument, call.began, call.ended, repeats=call)
        for call in calls
        if call.op == "set" and call.is_faulty
    ]


def is_linearizable(calls: list[Call]) -> bool:
    """Return whether one order of the calls on a key gives the results that were seen."""
    calls = _without_unseen(sorted(calls, key=lambda call: call.began))
    needed = sum(1 << number for number, call in enumerate(calls) if call.is_known)
    seen: set[tuple[int, bytes | None]] = set()
    stack: list[tuple[int, bytes | None]] = [(0, None)]
    while stack:
        done, state = stack.pop()
        if done & needed == needed:
            return True
        if (done, state) in seen:
            continue
        seen.add((done, state))
        assert len(seen) < _MOST, f"too many configurations: {len(calls)} calls"
        stack += [
            (done | 1 << number, calls[number].apply(state)[0])
            for number in _candidates(calls, done, state)
        ]
    return False


def _candidates(calls: list[Call], done: int, state: bytes | None) -> Iterator[int]:
    """Yield the calls that may be the next to take effect, in the state `state`."""
    rest = [(number, call) for number, call in enumerate(calls) if not done >> number & 1]
    first_end = min(call.ended for _, call in rest if call.is_known)
    last_began = calls[done.bit_length() - 1].began if done else -1
    has_unknown_add = False
    for number, call in rest:
        if call.began > first_end:
            return
        after, result = call.apply(state)
        if call.is_known:
            if result == call.result:
                yield number
            continue
        if after == state or call.ended < last_began:
            continue  # without an effect, or too late for a second one
        if call.op == "add":
            # All have the same amount, so the earliest stands for all.
            if has_unknown_add:
                continue
            has_unknown_add = True
        if call.repeats is None or not any(one is call.repeats for _, one in rest):
            yield number


def _without_unseen(calls: list[Call]) -> list[Call]:
    """Leave out unknown calls whose value no call has seen: they may have had no effect."""
    seen = {call.result for call in calls if call.is_known and call.op != "set"}
    seen |= {call.argument[0] for call in calls if call.op == "cas"}
    values = {id(call): call.argument for call in calls if call.op == "set"}
    values |= {id(call): call.argument[1] for call in calls if call.op == "cas"}
    return [
        call for call in calls if call.is_known or values.get(id(call), UNKNOWN) in {UNKNOWN, *seen}
    ]
