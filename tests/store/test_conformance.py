"""One suite for all stores: in memory, `StoreServer` over TCP, torch's two servers, and engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from elastic_aio.errors import SpecError, StoreClosed, StoreLost, StoreRefused, StoreTimeout
from elastic_aio.store import ChangeKind, MemoryStore, Store
from tests.store.conftest import Pair

pytestmark = pytest.mark.both_loops


async def has_begun(store: Store, waiting: asyncio.Task[object]) -> None:
    """Return once a pending wait has reached the server: later requests are answered."""
    for _ in range(3):
        await store.num_keys()
    assert not waiting.done()


async def test_a_value_is_read_back(pair: Pair) -> None:
    """Empty, binary and large values, and keys that are not ASCII."""
    for value in (b"v", b"", bytes(range(256)), b"x" * 100_000):
        await pair.one.set("k", value)
        await pair.one.check(["k"])
        assert await pair.two.get("k") == value
    await pair.one.set("k\u00e9\0", "text")
    await pair.one.check(["k"])
    assert await pair.two.peek("k\u00e9\0") == b"text"


async def test_get_waits_for_the_key(pair: Pair) -> None:
    """Until another client sets it."""
    task = asyncio.ensure_future(pair.one.get("late"))
    await has_begun(pair.one, task)
    await pair.two.set("late", b"now")
    assert await task == b"now"


async def test_get_times_out(pair: Pair) -> None:
    """The error names the missing keys, and the store stays usable."""
    with pytest.raises(StoreTimeout, match="'absent' not there after"):
        await pair.one.get("absent", timeout=0.05)
    with pytest.raises(StoreTimeout, match="'a', 'b', 'c' and 1 more"):
        await pair.one.wait(["a", "b", "c", "d"], timeout=0.05)
    await pair.one.set("k", b"1")
    assert await pair.one.get("k") == b"1"
    assert await pair.one.peek("absent") is None


async def test_counters(pair: Pair) -> None:
    """A counter starts at zero, wraps at 64 bits, and reads as decimal text."""
    assert await pair.one.add("n", 5) == 5
    assert await pair.two.add("n", -7) == -2
    assert await pair.one.get("n") == b"-2"
    assert await pair.one.add("top", (1 << 63) - 1) == (1 << 63) - 1
    assert await pair.one.add("top", 1) == -(1 << 63)


async def test_compare_set(pair: Pair) -> None:
    """It stores `desired` if the value is `expected`, and returns the present value."""
    assert await pair.one.compare_set("c", "", "one") == b"one"
    assert await pair.one.compare_set("c", "one", "two") == b"two"
    assert await pair.one.compare_set("c", "bad", "three") == b"two"
    assert await pair.one.compare_set("c", "", "four") == b"two"
    assert await pair.one.compare_set("absent", "zzz", "new") == b"zzz"
    assert not await pair.one.check(["absent"])


async def test_check_and_wait_need_every_key(pair: Pair) -> None:
    """Keys may be repeated, or none at all."""
    await pair.one.set("a", b"1")
    assert await pair.one.check(["a"])
    assert await pair.one.check([])
    assert not await pair.one.check(["a", "b"])
    await pair.one.wait([])
    task = asyncio.ensure_future(pair.one.wait(["a", "b", "c", "b"]))
    await has_begun(pair.one, task)
    await pair.two.set("b", b"")
    await has_begun(pair.two, task)
    await pair.two.set("c", b"")
    await task


async def test_delete(pair: Pair) -> None:
    """It returns whether the key had a value."""
    await pair.one.set("d", b"1")
    assert await pair.one.delete("d")
    assert not await pair.one.delete("d")
    assert await pair.one.peek("d") is None


async def test_append_and_multi(pair: Pair) -> None:
    """Append starts empty; multi_get returns values in the order of the keys."""
    await pair.one.append("ap", "ab")
    await pair.one.append("ap", b"cd")
    assert await pair.one.get("ap") == b"abcd"
    await pair.one.multi_set({"m1": "x", "m2": b"yy", "m3": b""})
    assert await pair.one.multi_get(["m2", "m3", "m1"]) == [b"yy", b"", b"x"]
    assert await pair.one.multi_get([]) == []
    await pair.one.multi_set({})
    task = asyncio.ensure_future(pair.two.multi_get(["m1", "m4"]))
    await has_begun(pair.two, task)
    await pair.one.set("m4", b"4")
    assert await task == [b"x", b"4"]


async def test_queues(pair: Pair) -> None:
    """Items are popped in order; a pop waits for an item."""
    if not pair.has_queues:
        # A legacy torch server closes the connection on an unknown opcode.
        with pytest.raises(StoreLost):
            await pair.one.queue_pop("q")
        await pair.one.set("k", b"v")
        assert await pair.one.get("k") == b"v"
        return
    assert await pair.one.queue_pop_nowait("q") is None
    await pair.one.queue_push("q", "1")
    await pair.one.queue_push("q", b"2")
    assert await pair.one.queue_len("q") == 2
    assert await pair.one.check(["q"])
    assert await pair.two.queue_pop("q") == b"1"
    assert await pair.two.queue_pop_nowait("q") == b"2"
    task = asyncio.ensure_future(pair.one.queue_pop("q"))
    await has_begun(pair.one, task)
    await pair.two.queue_push("q", b"3")
    assert await task == b"3"
    with pytest.raises(StoreTimeout):
        await pair.one.queue_pop("q", timeout=0.05)
    await pair.two.queue_push("q", b"4")
    assert await pair.two.queue_len("q") == 1


async def test_a_cancelled_pop_loses_no_item(pair: Pair) -> None:
    """30 items are pushed while pops are cancelled at various points."""
    if not pair.has_queues:
        return
    taken: list[bytes] = []

    async def pop() -> None:
        taken.append(await pair.one.queue_pop("q"))

    for turn in range(30):
        task = asyncio.ensure_future(pop())
        for _ in range(turn % 5):
            await asyncio.sleep(0)  # at another point of the pop each time
        await pair.two.queue_push("q", b"%d" % turn)
        for _ in range(turn % 7):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    while len(taken) < 30:
        taken.append(await pair.one.queue_pop("q", timeout=5))
    assert sorted(map(int, taken)) == list(range(30))


async def test_names(pair: Pair) -> None:
    """Keys are counted, and listed without the leading slash of the protocol."""
    await pair.one.multi_set({"a": b"", "b/c": b"", "": b"x"})
    assert sorted(await pair.one.list_keys()) == ["", "a", "b/c"]
    assert await pair.one.num_keys() == 3


async def test_prefixes(pair: Pair) -> None:
    """Every operation on a prefixed store, with the keys of torch's PrefixStore."""
    inner = pair.one.prefixed("in")
    both = inner.prefixed("out/")
    await both.set("x", b"2")
    assert await pair.one.get("in/out//x") == b"2"
    assert await inner.list_keys() == ["out//x"]
    await both.multi_set({"m": b"1"})
    assert await both.multi_get(["m", "x"]) == [b"1", b"2"]
    assert await both.add("n", 2) == 2
    assert await both.compare_set("c", "", "1") == b"1"
    await both.append("c", "2")
    assert await both.peek("c") == b"12"
    assert await both.check(["m"])
    await both.wait(["m"])
    assert await both.delete("m")
    assert await both.num_keys() == 3
    if pair.has_queues:
        await both.queue_push("q", b"1")
        assert await both.queue_len("q") == 1
        assert await pair.one.queue_pop("in/out//q") == b"1"
        assert await both.queue_pop_nowait("q") is None
    await both.aclose()
    assert await pair.one.get("in/out//x") == b"2"


async def test_many_tasks_share_a_store(pair: Pair) -> None:
    """40 tasks read, change and wait concurrently."""

    async def visit(number: int) -> None:
        key = f"t/{number}"
        waiting = asyncio.ensure_future(pair.one.get(key))
        await pair.two.set(key, str(number))
        assert await waiting == b"%d" % number
        assert await pair.one.add("sum", number) >= number
        assert await pair.two.get(key) == b"%d" % number

    await asyncio.gather(*(visit(number) for number in range(40)))
    assert await pair.one.add("sum", 0) == sum(range(40))


async def test_cancelling_leaves_the_store_usable(pair: Pair) -> None:
    """No reply of a cancelled operation is mistaken for another's."""
    await pair.one.set("k", b"v")
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: pair.one.get("k"),
        lambda: pair.one.get("absent"),
        lambda: pair.one.wait(["absent"]),
        lambda: pair.one.add("n"),
        lambda: pair.one.check(["k"]),
        lambda: pair.one.multi_get(["k", "k"]),
    ]
    for turn in range(60):
        task = asyncio.ensure_future(calls[turn % len(calls)]())
        for _ in range(turn % 8):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert await pair.one.get("k") == b"v"
        assert await pair.one.compare_set("k", b"v", b"v") == b"v"


async def test_no_reply_is_mistaken_after_200_cancellations(pair: Pair) -> None:
    """Each key has a value of its own, and operations are cancelled in the middle."""
    keys = {f"k{number}": b"%d" % number for number in range(8)}
    await pair.two.multi_set(keys)
    await pair.two.num_keys()  # torch's servers have no reply for the values; they are set by now
    loop = asyncio.get_running_loop()
    began = loop.time()
    for key, value in keys.items():
        assert await pair.one.peek(key) == value
    trip = (loop.time() - began) / len(keys)
    cancelled = unfinished = 0
    while cancelled < 200:
        tasks = [asyncio.ensure_future(pair.one.peek(key)) for key in keys]
        await asyncio.sleep(trip * (cancelled % 16) / 8)
        for task in tasks[::2]:
            unfinished += task.cancel()
            cancelled += 1
        found = await asyncio.gather(*tasks, return_exceptions=True)
        for one, value in zip(found, keys.values(), strict=True):
            assert isinstance(one, asyncio.CancelledError) or one == value
    assert unfinished or isinstance(pair.one, MemoryStore)  # whose replies are there at once
    assert [await pair.one.peek(key) for key in keys] == list(keys.values())


@pytest.mark.slow
async def test_bad_keys_and_values_are_refused(pair: Pair) -> None:
    """In one line, before a request is sent."""
    for call in (
        lambda: pair.one.set("k" * 8192, b""),
        lambda: pair.one.set(5, b""),  # type: ignore[arg-type]  # on purpose
        lambda: pair.one.set("k", 5),  # type: ignore[arg-type]  # on purpose
        lambda: pair.one.set("k", b"x" * (8 << 20) + b"x"),
        lambda: pair.one.wait("abc"),
        lambda: pair.one.get("k", timeout=-1),
        lambda: pair.one.add("k", 1 << 63),
        lambda: pair.one.multi_set({str(number): b"" for number in range(131_073)}),
        lambda: pair.one.check(map(str, range(131_073))),
        lambda: pair.one.prefixed("p").get(5),  # type: ignore[arg-type]  # on purpose
    ):
        with pytest.raises(SpecError) as caught:
            await call()
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 300


async def test_closing_ends_pending_operations(pair: Pair) -> None:
    """Pending and later operations raise StoreClosed."""
    task = asyncio.ensure_future(pair.one.get("never"))
    await has_begun(pair.one, task)
    await pair.one.aclose()
    with pytest.raises(StoreClosed):
        await task
    with pytest.raises(StoreClosed):
        await pair.one.set("k", b"")
    await pair.one.aclose()
    await pair.two.set("k", b"1")


async def test_a_counter_that_is_text(pair: Pair) -> None:
    """Adding is refused; a peer that cannot report it closes the connection."""
    await pair.one.set("t", b"text")
    if not pair.reports_refusals:
        with pytest.raises(StoreLost):
            await pair.one.add("t")
        assert await pair.one.get("t") == b"text"
        return
    with pytest.raises(StoreRefused, match="not a 64-bit number"):
        await pair.one.add("t")
    await pair.one.set("t", b" +12abc")
    assert await pair.one.add("t") == 13


async def test_leases_and_watches(pair: Pair) -> None:
    """Keys are deleted with their lease, and watches report changes in order."""
    if not pair.has_extensions:
        with pytest.raises(StoreRefused, match="plain TCPStore server"):
            async with pair.one.lease(5):
                pass
        with pytest.raises(StoreRefused, match="plain TCPStore server"):
            async with pair.one.watch("w"):
                pass
        return
    await pair.one.set("w/0", b"here")
    nodes = pair.two.prefixed("w")
    async with nodes.watch("", is_prefix=True) as watch:
        assert watch.present == {"0": b"here"}
        async with pair.one.lease(5) as lease:
            assert [lease.is_alive] == [True]
            await lease.set("w/1", "me")
            assert await lease.compare_set("w/2", "", "leader") == b"leader"
            assert await lease.compare_set("w/0", "", "leader") == b"here"
            await pair.one.set("w/1", "freed")
            await pair.one.set("elsewhere", b"")
        assert [lease.is_alive] == [False]
        changes = [await anext(watch) for _ in range(4)]
        assert [(str(change.kind), change.key, change.value) for change in changes] == [
            ("set", "1", b"me"),
            ("set", "2", b"leader"),
            ("set", "1", b"freed"),
            ("deleted", "2", None),
        ]
        with pytest.raises(StoreRefused, match="the lease has ended"):
            await lease.set("w/3", b"")
        async with pair.one.lease(5) as lease:
            await lease.set_all({"w/5": "a", "w/4": b"b"})
            await pair.one.set("w/4", "freed")
        changes = [await anext(watch) for _ in range(4)]
        assert [(str(change.kind), change.key, change.value) for change in changes] == [
            ("set", "5", b"a"),
            ("set", "4", b"b"),
            ("set", "4", b"freed"),
            ("deleted", "5", None),
        ]
        with pytest.raises(StoreRefused, match="the lease has ended"):
            await lease.set_all({"w/5": b"", "w/4": b""})
    async with pair.two.prefixed("w").lease(5) as prefixed, pair.one.watch("w/x") as exact:
        await prefixed.set("x", b"1")
        assert await prefixed.compare_set("y", "", "2") == b"2"
        assert prefixed.is_alive
        assert (await anext(exact)).value == b"1"
        ending = asyncio.ensure_future(prefixed.wait_ended())
        await pair.two.aclose()
        assert (await anext(exact)).kind is ChangeKind.EXPIRED
        await ending
    with pytest.raises(SpecError, match="ttl"):
        pair.one.lease(0.5)
