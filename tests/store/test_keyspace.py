"""The keyspace against a model of it, and cases the model does not cover."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from elastic_aio.store.keyspace import LINGER, PENDING, Client, Keyspace
from elastic_aio.store.limits import KeyspaceLimits, OperationRefused, Work
from elastic_aio.store.replies import CHANGE_DELETED, CHANGE_EXPIRED, CHANGE_SET, RawChange
from tests.support.usage import counted, occupied


class RecordingClient(Client):
    """A client that records its notifications."""

    def __init__(self) -> None:
        super().__init__()
        self.notified: list[tuple[Any, Any]] = []

    def take(self) -> list[tuple[Any, Any]]:
        notified, self.notified = self.notified, []
        return notified

    def on_woken(self, tag: Any) -> None:
        self.notified.append((tag, "woken"))

    def on_values(self, tag: Any, values: list[bytes]) -> None:
        self.notified.append((tag, values))

    def on_item(self, tag: Any, item: bytes) -> None:
        self.notified.append((tag, item))

    def on_refused(self, tag: Any, why: str) -> None:
        self.notified.append((tag, why))

    def on_change(self, tag: Any, change: RawChange) -> None:
        self.notified.append((tag, change))

    def on_lease_ended(self, tag: Any) -> None:
        self.notified.append((tag, "ended"))

    def on_released(self, tag: Any) -> None:
        self.notified.append((tag, "released"))


KEYS = [b"a", b"b", b"c"]
a_key = st.sampled_from(KEYS)
some_keys = st.lists(a_key, max_size=4).map(tuple)
a_value = st.binary(max_size=3)


class KeyspaceModel(RuleBasedStateMachine):
    """Random operations of two clients; the model predicts the notifications of each."""

    def __init__(self) -> None:
        super().__init__()
        self.keyspace = Keyspace()
        self.clients = [RecordingClient(), RecordingClient()]
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, deque[bytes]] = {key: deque() for key in KEYS}
        # Pending waits, oldest first: [client, tag, kind, keys, missing keys].
        self.waits: list[list[Any]] = []
        self.expected: dict[int, list[Any]] = {0: [], 1: []}
        self.tags = 0

    def is_there(self, key: bytes) -> bool:
        return key in self.values or bool(self.queues[key])

    def notify(self, wait: list[Any], message: Any) -> None:
        self.waits.remove(wait)
        self.expected[wait[0]].append((wait[1], message))

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
            self.notify(wait, "woken")
            return
        wait[4] = {key for key in wait[3] if key not in self.values}
        if wait[4]:
            # It waits again, behind the others.
            self.waits.remove(wait)
            self.waits.append(wait)
        else:
            self.notify(wait, [self.values[key] for key in wait[3]])

    def offer(self, key: bytes) -> None:
        for wait in list(self.waits):
            if key not in wait[4] or wait[2] == "values":
                continue
            if wait[2] == "item":
                self.notify(wait, self.queues[key].popleft())
                if not self.queues[key]:
                    return
                continue
            wait[4].discard(key)
            if not wait[4]:
                self.notify(wait, "woken")
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

    @rule(client_index=st.sampled_from([0, 1]), keys=some_keys)
    def wait(self, client_index: int, keys: tuple[bytes, ...]) -> None:
        self.tags += 1
        result = self.keyspace.wait(self.clients[client_index], self.tags, b"", keys)
        missing = {key for key in keys if not self.is_there(key)}
        assert result == (PENDING if missing else 0)
        if missing:
            self.waits.append([client_index, self.tags, "woken", keys, missing])

    @rule(client_index=st.sampled_from([0, 1]), keys=some_keys)
    def get_when_set(self, client_index: int, keys: tuple[bytes, ...]) -> None:
        self.tags += 1
        result = self.keyspace.get_when_set(self.clients[client_index], self.tags, b"", keys)
        missing = {key for key in keys if key not in self.values}
        if missing:
            assert result is PENDING
            self.waits.append([client_index, self.tags, "values", keys, missing])
        else:
            assert result == [self.values[key] for key in keys]

    @rule(client_index=st.sampled_from([0, 1]), key=a_key)
    def pop_when_pushed(self, client_index: int, key: bytes) -> None:
        self.tags += 1
        result = self.keyspace.pop_when_pushed(self.clients[client_index], self.tags, key, None)
        if self.queues[key]:
            assert result == self.queues[key].popleft()
        else:
            assert result is PENDING
            self.waits.append([client_index, self.tags, "item", (key,), {key}])

    @rule(turn=st.integers(0, 100))
    def cancel(self, turn: int) -> None:
        if self.waits:
            wait = self.waits.pop(turn % len(self.waits))
            assert self.keyspace.cancel(self.clients[wait[0]], wait[1])
            assert not self.keyspace.cancel(self.clients[wait[0]], wait[1])

    @rule(client_index=st.sampled_from([0, 1]))
    def forget(self, client_index: int) -> None:
        self.keyspace.forget(self.clients[client_index], 0.0)
        self.waits = [wait for wait in self.waits if wait[0] != client_index]

    @invariant()
    def state_is_as_predicted(self) -> None:
        for client_index, client in enumerate(self.clients):
            notified = client.take()
            assert sorted(notified, key=repr) == sorted(self.expected[client_index], key=repr)
            self.expected[client_index] = []
        keyspace = self.keyspace
        assert {key: keyspace.get(key) for key in keyspace.list_keys()} == self.values
        assert keyspace.num_keys() == len(self.values)
        assert keyspace.waits.count == sum(len(wait[4]) for wait in self.waits)
        for key in KEYS:
            assert keyspace.check(b"", (key,)) == (0 if self.is_there(key) else 1)
            assert keyspace.peek(key) == self.values.get(key)
        assert occupied(keyspace) == counted(keyspace)


KeyspaceModel.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestKeyspaceModel = pytest.mark.slow(KeyspaceModel.TestCase)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b"12abc", 12),
        (b"  -7", -7),
        (b"+3", 3),
        (b"0x10", 0),
        (b"007", 7),
        (b"\t\n5", 5),
        (b" " * 40 + b"+17 ", 17),
    ],
)
def test_counters_read_like_strtoll(text: bytes, value: int) -> None:
    """Leading space, a sign, digits; the rest is ignored."""
    keyspace = Keyspace()
    keyspace.set(b"n", text)
    assert keyspace.add(b"n", 0) == value


@pytest.mark.parametrize(
    "text", [b"", b"abc", b"-", b"9223372036854775808", b"1" * 5000, b" " * 100 + b"1"]
)
def test_adding_to_text_is_refused(text: bytes) -> None:
    """The value is unchanged."""
    keyspace = Keyspace()
    keyspace.set(b"n", text)
    for call in (
        lambda: keyspace.add(b"n", 1),
        lambda: keyspace.barrier(RecordingClient(), 1, b"n", 2),
    ):
        with pytest.raises(OperationRefused, match="not a 64-bit number"):
            call()
    assert keyspace.get(b"n") == text


def test_a_barrier_that_is_refused_does_not_count() -> None:
    keyspace, client = Keyspace(KeyspaceLimits(waits_each=1)), RecordingClient()
    keyspace.get_when_set(client, 1, b"", (b"k",))
    before = occupied(keyspace)
    with pytest.raises(OperationRefused, match="too many waits of one client"):
        keyspace.barrier(client, 2, b"b", 2)
    assert keyspace.peek(b"b") is None
    assert occupied(keyspace) == before


def test_barrier() -> None:
    """It opens at the given count, stays open, and counts cancelled arrivals."""
    keyspace, one, two = Keyspace(), RecordingClient(), RecordingClient()
    assert keyspace.barrier(one, None, b"b", 2) is PENDING
    assert keyspace.cancel(one, None)
    assert keyspace.barrier(two, None, b"b", 3) is PENDING
    assert keyspace.barrier(one, None, b"b", 3) == 0
    assert two.take() == [(None, "woken")]
    assert keyspace.get(b"b") == b"3"
    assert keyspace.barrier(one, None, b"b", 2) == 0
    assert keyspace.barrier(one, None, b"zero", 0) == 0


def test_a_new_wait_replaces_the_pending_one() -> None:
    """Of the same tag, as on a plain connection."""
    keyspace, client = Keyspace(), RecordingClient()
    assert keyspace.wait(client, None, b"", (b"a",)) is PENDING
    assert keyspace.wait(client, None, b"", (b"b",)) is PENDING
    keyspace.set(b"a", b"")
    assert client.take() == []
    keyspace.set(b"b", b"")
    assert client.take() == [(None, "woken")]
    assert keyspace.wait(client, None, b"", (b"c",)) is PENDING
    assert keyspace.wait(client, None, b"", (b"a",)) == 0
    assert keyspace.waits.count == 0


def test_limits() -> None:
    """An operation beyond a limit is refused."""
    limits = KeyspaceLimits(waits=2, watches=1, leases=1, grown=4)
    keyspace, client = Keyspace(limits), RecordingClient()
    assert keyspace.wait(client, 1, b"", (b"a", b"b")) is PENDING
    with pytest.raises(OperationRefused, match="2 keys are being waited for"):
        keyspace.wait(client, 2, b"", (b"c",))
    keyspace.append(b"g", b"1234")
    with pytest.raises(OperationRefused, match="may grow to 4 bytes"):
        keyspace.append(b"g", b"5")
    assert keyspace.watch(client, 3, b"w", -1, is_prefix=False).is_whole
    with pytest.raises(OperationRefused, match="too many watches"):
        keyspace.watch(client, 4, b"w", -1, is_prefix=False)
    keyspace.grant_lease(client, 5, b"lease", (2000, 0), 0.0)
    with pytest.raises(OperationRefused, match="too many leases"):
        keyspace.grant_lease(client, 6, b"other", (2000, 0), 0.0)


def test_the_stored_bytes_are_limited() -> None:
    """What would exceed the limit is refused and changes nothing; what frees bytes never is."""
    keyspace, client = Keyspace(KeyspaceLimits(stored=10_000)), RecordingClient()
    keyspace.set(b"k", bytes(8000))
    keyspace.queue_push(b"q", b"item")
    full = occupied(keyspace)
    operations: list[Callable[[], object]] = [
        lambda: keyspace.set(b"l", bytes(2000)),
        lambda: keyspace.append(b"k", bytes(2000)),
        lambda: keyspace.compare_set(b"l", [b"", bytes(2000)]),
        lambda: keyspace.multi_set(b"", [(b"a", b"1"), (b"l", bytes(2000))]),
        lambda: keyspace.queue_push(b"q", bytes(2000)),
        lambda: keyspace.queue_unpop(b"q", bytes(2000)),
        lambda: keyspace.wait(client, 1, b"", (b"w" * 2000,)),
        lambda: keyspace.get_when_set(client, 1, b"", (b"k",) * 50 + (b"l",)),
        lambda: keyspace.pop_when_pushed(client, 1, b"w" * 2000, None),
        lambda: keyspace.watch(client, 1, b"w" * 2000, -1, is_prefix=True),
    ]
    for operation in operations:
        with pytest.raises(OperationRefused, match="the store is full: its limit is 10000 bytes"):
            operation()
    assert occupied(keyspace) == counted(keyspace) == full
    assert keyspace.list_keys() == [b"k"]
    # A key may be there twice, and another one may shrink.
    keyspace.multi_set(b"", [(b"k", bytes(8900)), (b"k", bytes(100)), (b"l", bytes(8000))])
    assert keyspace.queue_pop(b"q") == (1, b"item")
    assert [keyspace.delete(key) for key in (b"k", b"l")] == [1, 1]
    assert occupied(keyspace) == counted(keyspace) == 0


def test_waits_and_watches_that_end_free_their_bytes() -> None:
    """However they end."""
    keyspace, client = Keyspace(), RecordingClient()
    for tag in range(8):
        keyspace.get_when_set(client, tag, b"", (b"a%d" % tag, b"b", b"a%d" % tag))
        keyspace.wait(client, f"w{tag}", b"", (b"a%d" % tag, b"c"))
        keyspace.watch(client, f"s{tag}", b"t%d" % tag, -1, is_prefix=False)
    assert occupied(keyspace) == counted(keyspace) > 0
    keyspace.set(b"a0", b"")
    keyspace.set(b"b", b"")
    keyspace.delete(b"a0")
    keyspace.cancel(client, 1)
    assert occupied(keyspace) == counted(keyspace)
    keyspace.forget(client, 0.0)
    keyspace.expire(LINGER)
    keyspace.delete(b"b")
    assert occupied(keyspace) == counted(keyspace) == 0


def test_a_client_that_is_gone_takes_no_item() -> None:
    """Nor the one wake-up for an item; both are for the next one that waits."""
    keyspace = Keyspace()
    gone, pops, waits = RecordingClient(), RecordingClient(), RecordingClient()
    keyspace.pop_when_pushed(gone, 1, b"q", None)
    keyspace.wait(gone, 2, b"", (b"p",))
    gone.is_gone = True
    keyspace.pop_when_pushed(pops, 3, b"q", None)
    keyspace.wait(waits, 4, b"", (b"p",))
    keyspace.queue_push(b"q", b"item")
    keyspace.queue_push(b"p", b"item")
    assert pops.take() == [(3, b"item")]
    assert waits.take() == [(4, "woken")]
    assert not gone.take()
    assert not keyspace.forget(gone, 0.0)
    assert keyspace.waits.count == 0


def test_many_waiters_for_a_key_are_notified_in_parts() -> None:
    """Oldest first; a wait that has ended or begun since the key was written is left out."""
    keyspace, waits, values = Keyspace(), RecordingClient(), RecordingClient()
    for tag in range(5_000):
        client = values if tag % 2 else waits
        handler = keyspace.get_when_set if tag % 2 else keyspace.wait
        assert handler(client, tag, b"", (b"k",)) is PENDING
    keyspace.set(b"k", b"1")
    assert keyspace.waits.count == 5_000 - 1024
    keyspace.delete(b"k")
    assert keyspace.cancel(waits, 3_000)
    assert keyspace.wait(waits, "new", b"", (b"k",)) is PENDING
    steps = [keyspace.work.step()]
    assert len(waits.notified) == 1024
    while steps[-1]:
        steps.append(keyspace.work.step())
    assert steps == [True, True, True, False]
    assert waits.take() == [(tag, "woken") for tag in range(0, 5_000, 2) if tag != 3_000]
    # Those whose turn came after the end of the key wait for it again.
    assert values.take() == [(tag, [b"1"]) for tag in range(1, 1024, 2)]
    keyspace.set(b"k", b"2")
    while keyspace.work.step():
        pass
    assert waits.take() == [("new", "woken")]
    assert values.take() == [(tag, [b"2"]) for tag in range(1025, 5_000, 2)]
    assert keyspace.waits.count == 0


def test_replies_are_limited() -> None:
    """Those with several keys or values, before they are built."""
    keyspace, client = Keyspace(KeyspaceLimits(reply=1000)), RecordingClient()
    keyspace.set(b"k", bytes(400))
    operations: list[Callable[[], object]] = [
        lambda: keyspace.multi_get(b"", (b"k",) * 3),
        lambda: keyspace.get_when_set(client, 1, b"", (b"k",) * 3),
    ]
    for operation in operations:
        with pytest.raises(OperationRefused, match="the reply has 1224 bytes: the limit is 1000"):
            operation()
    assert keyspace.get_when_set(client, 1, b"", (b"k", b"k", b"k", b"l")) is PENDING
    keyspace.set(b"l", b"")
    assert client.take() == [(1, "the reply has 1232 bytes: the limit is 1000 bytes")]
    keyspace.multi_set(b"", [(b"key/%d" % number, bytes(10)) for number in range(100)])
    with pytest.raises(OperationRefused, match="the limit is 1000 bytes"):
        keyspace.list_keys()
    assert keyspace.get(b"k") == bytes(400)
    keyspace.append(b"k", bytes(2000))
    assert len(keyspace.get(b"k")) == 2400, "a single value has limits of its own"


def test_a_watch_replaces_one_of_the_same_tag() -> None:
    """It leaves nothing of the former."""
    keyspace, client = Keyspace(), RecordingClient()
    for number in range(100):
        keyspace.watch(client, 1, b"k%d" % number, -1, is_prefix=False)
    assert len(keyspace.watches.targets) == 1
    keyspace.forget(client, 0.0)
    keyspace.expire(LINGER)
    assert not keyspace.watches.targets
    assert occupied(keyspace) == 0


def test_watches_of_ended_connections_are_limited() -> None:
    """A new one takes the place of the oldest, whose reader then gets a whole snapshot."""
    keyspace = Keyspace(KeyspaceLimits(watches=10))
    keyspace.watch(stays := RecordingClient(), 1, b"stays", -1, is_prefix=False)
    for number in range(50):
        client = RecordingClient()
        keyspace.watch(client, 1, b"k%d" % number, -1, is_prefix=False)
        keyspace.forget(client, float(number))
    assert len(keyspace.watches.targets) == 10
    keyspace.set(b"stays", b"")
    assert len(stays.take()) == 1
    assert not keyspace.watch(client, 1, b"k49", 0, is_prefix=False).is_whole
    assert keyspace.watch(client, 2, b"k0", 0, is_prefix=False).is_whole


def test_a_lease_expires() -> None:
    """`ttl` seconds after the last frame of its holder; holder and watches are notified."""
    keyspace, holder, watcher = Keyspace(), RecordingClient(), RecordingClient()
    keyspace.watch(watcher, "w", b"", -1, is_prefix=True)
    keyspace.grant_lease(holder, "l", b"lease", (2000, 0), 10.0)
    keyspace.leased_set(holder, None, b"k", [b"v", b"lease"])
    assert keyspace.next_deadline() == 12.0
    holder.last_received_at = 11.5
    keyspace.expire(12.0)
    assert keyspace.next_deadline() == 13.5
    assert keyspace.peek(b"k") == b"v"
    keyspace.expire(13.5)
    assert keyspace.peek(b"k") is None
    assert holder.take() == [("l", "ended")]
    assert [change.kind for _, change in watcher.take()] == [CHANGE_SET, CHANGE_EXPIRED]
    assert keyspace.next_deadline() is None
    with pytest.raises(OperationRefused, match="the lease has ended"):
        keyspace.leased_set(holder, None, b"k", [b"v", b"lease"])
    with pytest.raises(OperationRefused, match="the lease has ended"):
        keyspace.leased_compare_set(holder, None, b"k", [b"", b"v", b"lease"])
    assert keyspace.release_lease(holder, None, b"lease", None) == 0
    assert not keyspace.leases.resume(holder, 1, b"lease", 14.0)


def test_a_lease_that_the_server_does_not_read_from_lives() -> None:
    keyspace, holder = Keyspace(), RecordingClient()
    keyspace.grant_lease(holder, "l", b"lease", (2000, 0), 10.0)
    holder.is_unread = lambda: True  # type: ignore[method-assign]
    keyspace.expire(20.0)
    assert keyspace.next_deadline() == 22.0
    del holder.is_unread
    keyspace.expire(22.0)
    assert holder.take() == [("l", "ended")]


def test_the_keys_of_a_lease_are_gone_when_its_end_is_reported() -> None:
    """A hundred keys, ten at once."""
    for ends_by_itself in (False, True):
        keyspace, holder = Keyspace(work=Work(10)), RecordingClient()
        keyspace.grant_lease(holder, "l", b"lease", (2000, 0), 10.0)
        for number in range(100):
            keyspace.leased_set(holder, None, b"%d" % number, [b"", b"lease"])
        if ends_by_itself:
            keyspace.expire(12.0)
        else:
            assert keyspace.release_lease(holder, "r", b"lease", None) is PENDING
        while keyspace.num_keys():
            assert holder.take() == []
            keyspace.work.step()
        keyspace.work.step()
        assert holder.take() == [("l", "ended") if ends_by_itself else ("r", "released")]


def test_a_lease_that_is_resumed_does_not_linger() -> None:
    keyspace, former, holder = Keyspace(), RecordingClient(), RecordingClient()
    keyspace.grant_lease(former, 1, b"lease", (1000, 30_000), 0.0)
    keyspace.forget(former, 1.0)
    keyspace.leases.resume(holder, 2, b"lease", 2.0)
    assert keyspace.next_deadline() == 3.0


def test_a_lease_that_lingers_can_be_resumed() -> None:
    """Within its linger, on another connection."""
    keyspace, holder, next_holder = Keyspace(), RecordingClient(), RecordingClient()
    keyspace.grant_lease(holder, 1, b"lease", (10_000, 3000), 0.0)
    keyspace.leased_set(holder, None, b"k", [b"v", b"lease"])
    for turn in range(20):
        keyspace.forget(holder, turn)
        assert keyspace.next_deadline() == turn + 3.0
        assert keyspace.leases.resume(next_holder, 2, b"lease", turn + 1.0)
        holder, next_holder = next_holder, holder
        keyspace.expire(turn + 4.0)
        assert keyspace.peek(b"k") == b"v"
    # The end of a former connection, noticed late, does not end the lease.
    assert keyspace.leases.resume(next_holder, 3, b"lease", 21.0)
    keyspace.forget(holder, 22.0)
    assert keyspace.peek(b"k") == b"v"
    keyspace.forget(next_holder, 23.0)
    keyspace.expire(26.0)
    assert keyspace.peek(b"k") is None
    assert len(keyspace.leases._heap) <= 1


def test_a_former_connection_of_a_lease_writes_nothing() -> None:
    """What it has sent arrives late, and the holder has written a newer value since."""
    keyspace, former, holder = Keyspace(), RecordingClient(), RecordingClient()
    keyspace.grant_lease(former, 1, b"lease", (10_000, 3000), 0.0)
    assert keyspace.leases.resume(holder, 2, b"lease", 1.0)
    keyspace.leased_set(holder, None, b"k", [b"new", b"lease"])
    with pytest.raises(OperationRefused, match="the lease has moved to another connection"):
        keyspace.leased_set(former, None, b"k", [b"old", b"lease"])
    with pytest.raises(OperationRefused, match="the lease has moved to another connection"):
        keyspace.leased_compare_set(former, None, b"k", [b"new", b"old", b"lease"])
    assert keyspace.peek(b"k") == b"new"


def test_a_lease_ends_with_its_connection() -> None:
    """Without a linger, except for keys that were written without the lease since."""
    keyspace, holder = Keyspace(), RecordingClient()
    keyspace.grant_lease(holder, 1, b"lease", (2000, 0), 0.0)
    assert keyspace.leased_compare_set(holder, None, b"a", [b"", b"v", b"lease"]) == b"v"
    assert keyspace.leased_compare_set(holder, None, b"a", [b"x", b"w", b"lease"]) == b"v"
    keyspace.leased_set(holder, None, b"b", [b"v", b"lease"])
    keyspace.set(b"b", b"mine")
    keyspace.leased_set(holder, None, b"c", [b"v", b"lease"])
    keyspace.delete(b"c")
    keyspace.forget(holder, 1.0)
    assert keyspace.list_keys() == [b"b"]


def test_a_watch_continues_after_its_last_revision() -> None:
    """The changes made since are returned in order, and no others."""
    keyspace, watcher, again = Keyspace(), RecordingClient(), RecordingClient()
    keyspace.set(b"n/0", b"0")
    snapshot = keyspace.watch(watcher, "w", b"n/", -1, is_prefix=True)
    assert snapshot.is_whole
    assert tuple(snapshot.pairs) == ((b"n/0", b"0"),)
    keyspace.set(b"n/1", b"1")
    keyspace.set(b"other", b"")
    [(_, first)] = watcher.take()
    keyspace.forget(watcher, 5.0)
    keyspace.delete(b"n/0")
    keyspace.set(b"n/2", b"2")
    keyspace.watch(again, "x", b"other", -1, is_prefix=False)
    keyspace.set(b"other", b"1")
    snapshot = keyspace.watch(again, "w", b"n/", first.revision, is_prefix=True)
    assert not snapshot.is_whole
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
    snapshot = keyspace.watch(again, "w", b"n/", first.revision, is_prefix=True)
    assert snapshot.is_whole


def test_a_watch_beyond_the_history_restarts() -> None:
    """The history is bounded in number and size; so does one with a future revision."""
    for limits in (KeyspaceLimits(history=2), KeyspaceLimits(history_size=6)):
        keyspace, watcher, again = Keyspace(limits), RecordingClient(), RecordingClient()
        keyspace.watch(watcher, 1, b"k", -1, is_prefix=False)
        keyspace.forget(watcher, 0.0)
        for number in range(4):
            keyspace.set(b"k", b"%02d" % number)
        snapshot = keyspace.watch(again, 1, b"k", 0, is_prefix=False)
        assert snapshot.is_whole
        assert snapshot.pairs == ((b"k", b"03"),)
        assert keyspace.watch(again, 2, b"k", 99, is_prefix=False).is_whole
        assert not keyspace.watch(again, 3, b"k", 3, is_prefix=False).is_whole


_OPERATIONS = st.lists(st.tuples(st.booleans(), st.text("/ab", min_size=1, max_size=3)))


@given(_OPERATIONS, st.lists(_OPERATIONS), st.text("/ab", max_size=2))
def test_a_watched_prefix_is_read_in_parts_while_it_changes(
    before: list[tuple[bool, str]], between: list[list[tuple[bool, str]]], prefix: str
) -> None:
    """The snapshot is that of its end, and the watch has every change after, once."""
    keyspace, client = Keyspace(), RecordingClient()
    state: dict[bytes, bytes] = {}
    values = (b"%d" % number for number in itertools.count())

    def apply(operations: list[tuple[bool, str]]) -> None:
        for is_set, name in operations:
            key = name.encode()
            if is_set:
                state[key] = next(values)
                keyspace.set(key, state[key])
            else:
                state.pop(key, None)
                keyspace.delete(key)

    def watched() -> dict[bytes, bytes]:
        return {key: value for key, value in state.items() if key.startswith(prefix.encode())}

    apply(before)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("elastic_aio.store.limits.KEYS_AT_ONCE", 2)
        parts = keyspace.watch_in_parts(client, 1, prefix.encode(), -1, is_prefix=True)
        changes = iter(between)
        while True:
            try:
                assert next(parts) <= 2
            except StopIteration as end:
                snapshot = end.value
                break
            apply(next(changes, []))
    seen = dict(snapshot.pairs)
    assert seen == watched()
    assert not client.take()
    for operations in changes:
        apply(operations)
    for _, change in client.take():
        snapshot = snapshot._replace(revision=snapshot.revision + 1)
        assert change.revision == snapshot.revision
        if change.kind == CHANGE_SET:
            assert seen.get(change.key) != change.value
            seen[change.key] = change.value
        else:
            del seen[change.key]
    assert seen == watched()


def test_watches_of_many_keys_begin_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads a copy of all keys."""
    monkeypatch.setattr("elastic_aio.store.keyspace._LISTED", 5_000)
    keyspace = Keyspace()
    keyspace.multi_set(b"", [(b"%d" % number, b"") for number in range(3_000)])
    one, two = (
        keyspace.watch_in_parts(RecordingClient(), 1, b"", -1, is_prefix=True) for _ in range(2)
    )
    for parts in (one, two, two):
        assert next(parts) == 2048
        assert keyspace._listed == 3_000
    one.close()
    assert [next(two), next(two)] == [2048, 952]
    two.close()
    assert keyspace._listed == 0


def test_watches_of_long_prefixes_are_work() -> None:
    keyspace, client = Keyspace(), RecordingClient()
    pairs = [(b"%d" % number, b"") for number in range(2_000)]
    assert not keyspace.is_long(pairs)
    for length in range(7_000, 7_100):
        keyspace.watch(client, length, bytes(length), -1, is_prefix=True)
    assert not keyspace.is_long(pairs[:50])
    assert keyspace.is_long([(bytes(8_000), b"")] * 50)
    keyspace.work.begin()
    keyspace.set(b"1" * 8_000, b"")
    assert keyspace.work.left < 1_024 - 100


def test_a_watch_that_is_given_up_leaves_nothing() -> None:
    keyspace, client = Keyspace(), RecordingClient()
    keyspace.multi_set(b"", [(b"%d" % number, b"") for number in range(5_000)])
    before = occupied(keyspace)
    parts = keyspace.watch_in_parts(client, 1, b"", -1, is_prefix=True)
    assert next(parts) == 2048
    parts.close()
    assert not keyspace.watches.targets
    assert occupied(keyspace) == before
