"""The keyspace against a model of it, and the corners that a model would repeat."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from elastic_aio.store.keyspace import PENDING, Client, Keyspace, KeyspaceLimits, Refusal
from elastic_aio.store.replies import CHANGE_DELETED, CHANGE_EXPIRED, CHANGE_SET, RawChange
from elastic_aio.store.watches import LINGER


class Recorder(Client):
    """A client that remembers what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[Any, Any]] = []

    def take(self) -> list[tuple[Any, Any]]:
        told, self.told = self.told, []
        return told

    def on_woken(self, tag: Any) -> None:
        self.told.append((tag, "woken"))

    def on_values(self, tag: Any, values: list[bytes]) -> None:
        self.told.append((tag, values))

    def on_item(self, tag: Any, item: bytes) -> None:
        self.told.append((tag, item))

    def on_change(self, tag: Any, change: RawChange) -> None:
        self.told.append((tag, change))

    def on_lease_ended(self, tag: Any) -> None:
        self.told.append((tag, "ended"))


KEYS = [b"a", b"b", b"c"]
a_key = st.sampled_from(KEYS)
some_keys = st.lists(a_key, max_size=4).map(tuple)
a_value = st.binary(max_size=3)


class KeyspaceModel(RuleBasedStateMachine):
    """Random operations of two clients; what each is told is predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.keyspace = Keyspace()
        self.clients = [Recorder(), Recorder()]
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, deque[bytes]] = {key: deque() for key in KEYS}
        # Waits in the order of their beginning: [client, tag, kind, wanted, missing].
        self.waits: list[list[Any]] = []
        self.expected: dict[int, list[Any]] = {0: [], 1: []}
        self.tags = 0

    def is_there(self, key: bytes) -> bool:
        return key in self.values or bool(self.queues[key])

    def tell(self, wait: list[Any], what: Any) -> None:
        self.waits.remove(wait)
        self.expected[wait[0]].append((wait[1], what))

    def write(self, key: bytes, value: bytes) -> None:
        self.values[key] = value
        for wait in list(self.waits):
            if wait[2] != "item" and key in wait[4]:
                wait[4].discard(key)
                self.complete(wait)

    def complete(self, wait: list[Any]) -> None:
        if wait[4]:
            return
        if wait[2] == "woken":
            self.tell(wait, "woken")
            return
        wait[4] = {key for key in wait[3] if key not in self.values}
        if wait[4]:
            # It begins to wait anew, behind the others.
            self.waits.remove(wait)
            self.waits.append(wait)
        else:
            self.tell(wait, [self.values[key] for key in wait[3]])

    def offer(self, key: bytes) -> None:
        for wait in list(self.waits):
            if key not in wait[4] or wait[2] == "values":
                continue
            if wait[2] == "item":
                self.tell(wait, self.queues[key].popleft())
                if not self.queues[key]:
                    return
                continue
            wait[4].discard(key)
            if not wait[4]:
                self.tell(wait, "woken")
                return

    @rule(key=a_key, value=a_value)
    def set(self, key: bytes, value: bytes) -> None:
        self.keyspace.set(key, value)
        self.write(key, value)

    @rule(pairs=st.lists(st.tuples(a_key, a_value), max_size=3))
    def multi_set(self, pairs: list[tuple[bytes, bytes]]) -> None:
        self.keyspace.multi_set(b"", pairs)
        for key, value in pairs:
            self.write(key, value)

    @rule(key=a_key, value=a_value)
    def append(self, key: bytes, value: bytes) -> None:
        self.keyspace.append(key, value)
        self.write(key, self.values.get(key, b"") + value)

    @rule(key=a_key, expected=a_value, desired=a_value)
    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> None:
        result = self.keyspace.compare_set(key, [expected, desired])
        current = self.values.get(key)
        if (current is None and not expected) or current == expected:
            self.write(key, desired)
            assert result == desired
        else:
            assert result == (expected if current is None else current)

    @rule(key=a_key)
    def delete(self, key: bytes) -> None:
        assert self.keyspace.delete(key) == (1 if key in self.values else 0)
        self.values.pop(key, None)

    @rule(key=a_key, item=a_value)
    def push(self, key: bytes, item: bytes) -> None:
        self.keyspace.queue_push(key, item)
        self.queues[key].append(item)
        self.offer(key)

    @rule(key=a_key, item=a_value)
    def unpop(self, key: bytes, item: bytes) -> None:
        self.keyspace.queue_unpop(key, item)
        self.queues[key].appendleft(item)
        self.offer(key)

    @rule(key=a_key)
    def pop(self, key: bytes) -> None:
        length = len(self.queues[key])
        item = self.queues[key].popleft() if length else b""
        assert self.keyspace.queue_len(key) == length
        assert self.keyspace.queue_pop(key) == (length, item)

    @rule(who=st.sampled_from([0, 1]), keys=some_keys)
    def wait(self, who: int, keys: tuple[bytes, ...]) -> None:
        self.tags += 1
        result = self.keyspace.wait(self.clients[who], self.tags, b"", keys)
        missing = {key for key in keys if not self.is_there(key)}
        assert result == (PENDING if missing else 0)
        if missing:
            self.waits.append([who, self.tags, "woken", keys, missing])

    @rule(who=st.sampled_from([0, 1]), keys=some_keys)
    def get_when_set(self, who: int, keys: tuple[bytes, ...]) -> None:
        self.tags += 1
        result = self.keyspace.get_when_set(self.clients[who], self.tags, b"", keys)
        missing = {key for key in keys if key not in self.values}
        if missing:
            assert result is PENDING
            self.waits.append([who, self.tags, "values", keys, missing])
        else:
            assert result == [self.values[key] for key in keys]

    @rule(who=st.sampled_from([0, 1]), key=a_key)
    def pop_when_pushed(self, who: int, key: bytes) -> None:
        self.tags += 1
        result = self.keyspace.pop_when_pushed(self.clients[who], self.tags, key, None)
        if self.queues[key]:
            assert result == self.queues[key].popleft()
        else:
            assert result is PENDING
            self.waits.append([who, self.tags, "item", (key,), {key}])

    @rule(turn=st.integers(0, 100))
    def cancel(self, turn: int) -> None:
        if self.waits:
            wait = self.waits.pop(turn % len(self.waits))
            assert self.keyspace.cancel(self.clients[wait[0]], wait[1])
            assert not self.keyspace.cancel(self.clients[wait[0]], wait[1])

    @rule(who=st.sampled_from([0, 1]))
    def forget(self, who: int) -> None:
        self.keyspace.forget(self.clients[who], 0.0)
        self.waits = [wait for wait in self.waits if wait[0] != who]

    @invariant()
    def all_is_as_predicted(self) -> None:
        for who, client in enumerate(self.clients):
            told = client.take()
            assert sorted(told, key=repr) == sorted(self.expected[who], key=repr)
            self.expected[who] = []
        keyspace = self.keyspace
        assert {key: keyspace.get(key) for key in keyspace.list_keys()} == self.values
        assert keyspace.num_keys() == len(self.values)
        assert keyspace.wait_count == sum(len(wait[4]) for wait in self.waits)
        for key in KEYS:
            assert keyspace.check(b"", (key,)) == (0 if self.is_there(key) else 1)
            assert keyspace.peek(key) == self.values.get(key)


TestKeyspaceModel = KeyspaceModel.TestCase
TestKeyspaceModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("text", "value"),
    [(b"12abc", 12), (b"  -7", -7), (b"+3", 3), (b"0x10", 0), (b"007", 7), (b"\t\n5", 5)],
)
def test_counters_read_like_strtoll(text: bytes, value: int) -> None:
    """Leading space, a sign, digits; what follows is ignored."""
    keyspace = Keyspace()
    keyspace.set(b"n", text)
    assert keyspace.add(b"n", 0) == value


@pytest.mark.parametrize("text", [b"", b"abc", b"-", b"9223372036854775808", b"1" * 5000])
def test_what_is_no_number_is_refused(text: bytes) -> None:
    """The value stays as it was."""
    keyspace = Keyspace()
    keyspace.set(b"n", text)
    for call in (lambda: keyspace.add(b"n", 1), lambda: keyspace.barrier(Recorder(), 1, b"n", 2)):
        with pytest.raises(Refusal, match="not a 64-bit number"):
            call()
    assert keyspace.get(b"n") == text


def test_barrier() -> None:
    """It opens for all when enough have come, is never reset, and survives a cancel."""
    keyspace, one, two = Keyspace(), Recorder(), Recorder()
    assert keyspace.barrier(one, None, b"b", 2) is PENDING
    assert keyspace.cancel(one, None)
    assert keyspace.barrier(two, None, b"b", 3) is PENDING
    assert keyspace.barrier(one, None, b"b", 3) == 0
    assert two.take() == [(None, "woken")]
    assert keyspace.get(b"b") == b"3"
    assert keyspace.barrier(one, None, b"b", 2) == 0
    assert keyspace.barrier(one, None, b"zero", 0) == 0


def test_a_new_wait_replaces_the_old_one() -> None:
    """On a plain connection there is one wait at a time."""
    keyspace, client = Keyspace(), Recorder()
    assert keyspace.wait(client, None, b"", (b"a",)) is PENDING
    assert keyspace.wait(client, None, b"", (b"b",)) is PENDING
    keyspace.set(b"a", b"")
    assert client.take() == []
    keyspace.set(b"b", b"")
    assert client.take() == [(None, "woken")]
    assert keyspace.wait(client, None, b"", (b"c",)) is PENDING
    assert keyspace.wait(client, None, b"", (b"a",)) == 0
    assert keyspace.wait_count == 0


def test_limits() -> None:
    """What is beyond them is refused and leaves nothing behind."""
    limits = KeyspaceLimits(waits=2, watches=1, leases=1, grown=4)
    keyspace, client = Keyspace(limits), Recorder()
    assert keyspace.wait(client, 1, b"", (b"a", b"b")) is PENDING
    with pytest.raises(Refusal, match="2 keys are being waited for"):
        keyspace.wait(client, 2, b"", (b"c",))
    keyspace.append(b"g", b"1234")
    with pytest.raises(Refusal, match="may grow to 4 bytes"):
        keyspace.append(b"g", b"5")
    assert keyspace.watch_key(client, 3, b"w", -1).is_whole
    with pytest.raises(Refusal, match="too many watches"):
        keyspace.watch_key(client, 4, b"w", -1)
    keyspace.grant_lease(client, 5, b"lease", (2000, 0), 0.0)
    with pytest.raises(Refusal, match="too many leases"):
        keyspace.grant_lease(client, 6, b"other", (2000, 0), 0.0)


def test_a_silent_holder_loses_its_lease() -> None:
    """Whoever is heard of keeps it; a time to live after the last word it ends, with notice."""
    keyspace, holder, watcher = Keyspace(), Recorder(), Recorder()
    keyspace.watch_prefix(watcher, "w", b"", -1)
    keyspace.grant_lease(holder, "l", b"lease", (2000, 0), 10.0)
    keyspace.leased_set(holder, None, b"k", [b"v", b"lease"])
    assert keyspace.next_deadline() == 12.0
    holder.heard_at = 11.5
    keyspace.expire(12.0)
    assert keyspace.next_deadline() == 13.5
    assert keyspace.peek(b"k") == b"v"
    keyspace.expire(13.5)
    assert keyspace.peek(b"k") is None
    assert holder.take() == [("l", "ended")]
    assert [change.kind for _, change in watcher.take()] == [CHANGE_SET, CHANGE_EXPIRED]
    assert keyspace.next_deadline() is None
    with pytest.raises(Refusal, match="the lease has ended"):
        keyspace.leased_set(holder, None, b"k", [b"v", b"lease"])
    with pytest.raises(Refusal, match="the lease has ended"):
        keyspace.leased_compare_set(holder, None, b"k", [b"", b"v", b"lease"])
    assert keyspace.release_lease(holder, None, b"lease", None) == 0
    assert not keyspace.leases.resume(holder, 1, b"lease", 14.0)


def test_a_lease_that_lingers_can_be_resumed() -> None:
    """It outlives its connection by the time agreed, and goes on with the next one."""
    keyspace, holder, next_holder = Keyspace(), Recorder(), Recorder()
    keyspace.grant_lease(holder, 1, b"lease", (10_000, 3000), 0.0)
    keyspace.leased_set(holder, None, b"k", [b"v", b"lease"])
    for turn in range(20):
        keyspace.forget(holder, turn)
        assert keyspace.next_deadline() == turn + 3.0
        assert keyspace.leases.resume(next_holder, 2, b"lease", turn + 1.0)
        holder, next_holder = next_holder, holder
        keyspace.expire(turn + 4.0)
        assert keyspace.peek(b"k") == b"v"
    # A former connection that is forgotten late takes nothing along.
    assert keyspace.leases.resume(next_holder, 3, b"lease", 21.0)
    keyspace.forget(holder, 22.0)
    assert keyspace.peek(b"k") == b"v"
    keyspace.forget(next_holder, 23.0)
    keyspace.expire(26.0)
    assert keyspace.peek(b"k") is None
    assert len(keyspace.leases._heap) <= 1


def test_a_lease_ends_with_its_connection() -> None:
    """Without a linger its keys vanish at once; keys written since without it stay."""
    keyspace, holder = Keyspace(), Recorder()
    keyspace.grant_lease(holder, 1, b"lease", (2000, 0), 0.0)
    assert keyspace.leased_compare_set(holder, None, b"a", [b"", b"v", b"lease"]) == b"v"
    assert keyspace.leased_compare_set(holder, None, b"a", [b"x", b"w", b"lease"]) == b"v"
    keyspace.leased_set(holder, None, b"b", [b"v", b"lease"])
    keyspace.set(b"b", b"mine")
    keyspace.leased_set(holder, None, b"c", [b"v", b"lease"])
    keyspace.delete(b"c")
    keyspace.forget(holder, 1.0)
    assert keyspace.list_keys() == [b"b"]


def test_watches_go_on_where_they_were() -> None:
    """After a broken connection, the changes meanwhile come in order, and only those."""
    keyspace, watcher, again = Keyspace(), Recorder(), Recorder()
    keyspace.set(b"n/0", b"0")
    view = keyspace.watch_prefix(watcher, "w", b"n/", -1)
    assert view.is_whole
    assert view.pairs == ((b"n/0", b"0"),)
    keyspace.set(b"n/1", b"1")
    keyspace.set(b"other", b"")
    [(_, first)] = watcher.take()
    keyspace.forget(watcher, 5.0)
    keyspace.delete(b"n/0")
    keyspace.set(b"n/2", b"2")
    keyspace.watch_key(again, "x", b"other", -1)
    keyspace.set(b"other", b"1")
    view = keyspace.watch_prefix(again, "w", b"n/", first.revision)
    assert not view.is_whole
    missed = keyspace.watches.since(again, "w", first.revision)
    assert [(change.kind, change.key) for change in missed] == [
        (CHANGE_DELETED, b"n/0"),
        (CHANGE_SET, b"n/2"),
    ]
    assert again.take()[0][0] == "x"
    assert keyspace.next_deadline() == 5.0 + LINGER
    keyspace.expire(5.0 + LINGER)
    assert keyspace.cancel(again, "w")
    assert not keyspace.cancel(again, "w")
    view = keyspace.watch_prefix(again, "w", b"n/", first.revision)
    assert view.is_whole


def test_a_watch_that_missed_too_much_begins_anew() -> None:
    """The history is bounded by number and by size; a future revision is not believed."""
    for limits in (KeyspaceLimits(history=2), KeyspaceLimits(history_size=6)):
        keyspace, watcher, again = Keyspace(limits), Recorder(), Recorder()
        keyspace.watch_key(watcher, 1, b"k", -1)
        keyspace.forget(watcher, 0.0)
        for number in range(4):
            keyspace.set(b"k", b"%02d" % number)
        view = keyspace.watch_key(again, 1, b"k", 0)
        assert view.is_whole
        assert view.pairs == ((b"k", b"03"),)
        assert keyspace.watch_key(again, 2, b"k", 99).is_whole
        assert not keyspace.watch_key(again, 3, b"k", 3).is_whole
