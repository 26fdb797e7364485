"""The pure part of the store on etcd: requests, replies, and what errors mean."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from elastic_aio.engines.etcd.http import HttpError, parse_head
from elastic_aio.engines.etcd.operations import ChangeUnknown, EtcdKeys, Operations
from elastic_aio.engines.etcd.wire import (
    KEEP_ALIVE,
    EtcdError,
    EtcdFence,
    Fault,
    Header,
    LeaseReply,
    RangeReply,
    Request,
    TxnReply,
    parse_error,
    parse_reply,
    txn,
    watch_body,
)
from elastic_aio.store import wire
from elastic_aio.store.keyspace import prefix_end

GET = Request("kv/range", {}, RangeReply)


def replied(request: Request, body: str) -> Any:
    return parse_reply(request, 200, body.encode())


def test_a_reply_leaves_out_what_is_zero_or_empty() -> None:
    reply = replied(
        GET, '{"header":{"revision":"7"},"kvs":[{"key":"YQ==","lease":"-3"}],"count":"1"}'
    )
    assert (reply.header.revision, reply.count) == (7, 1)
    assert (reply.kvs[0].key, reply.kvs[0].value, reply.kvs[0].lease) == (b"a", b"", -3)
    assert replied(GET, "{}") == RangeReply()
    alive = replied(Request(KEEP_ALIVE, {}, LeaseReply), '{"result":{"ID":"9","TTL":"5"}}\n')
    assert (alive.ID, alive.TTL) == (9, 5)


@pytest.mark.parametrize("body", ["", "null", "[]", '{"kvs":5}', '{"kvs":[{"key":"%"}]}', "\xff"])
def test_a_reply_of_another_server_is_refused(body: str) -> None:
    with pytest.raises(EtcdError, match="not that of etcd's JSON gateway") as caught:
        parse_reply(GET, 200, body.encode("latin-1"))
    assert caught.value.fault is Fault.REFUSED


@pytest.mark.parametrize(
    ("status", "code", "message", "fault"),
    [
        (401, 16, "etcdserver: invalid auth token", Fault.TOKEN),
        (400, 3, "etcdserver: revision of auth store is old", Fault.TOKEN),
        (404, 5, "etcdserver: requested lease not found", Fault.LEASE_GONE),
        (400, 9, "etcdserver: lease already exists", Fault.LEASE_EXISTS),
        (400, 11, "etcdserver: mvcc: required revision has been compacted", Fault.COMPACTED),
        (503, 14, "etcdserver: no leader", Fault.NOT_DONE),
        (429, 8, "etcdserver: too many requests", Fault.NOT_DONE),
        (503, 14, "etcdserver: request timed out", Fault.UNKNOWN),
        (503, 14, "etcdserver: leader changed", Fault.UNKNOWN),
        (429, 8, "etcdserver: mvcc: database space exceeded", Fault.REFUSED),
        (400, 3, "etcdserver: user name is empty", Fault.REFUSED),
        (403, 7, "etcdserver: permission denied", Fault.REFUSED),
        (400, 3, "something new\nin two lines", Fault.REFUSED),
    ],
)
def test_errors(status: int, code: int, message: str, fault: Fault) -> None:
    """As etcd 3.4 and as etcd 3.6 report them."""
    old = {"error": message, "message": message, "code": code}
    new = {"code": code, "message": message, "details": []}
    for body in (old, new):
        error = parse_error(status, json.dumps(body).encode())
        assert error.fault is fault
        assert "\n" not in str(error)


def test_errors_of_other_servers() -> None:
    assert "gateway is switched off" in str(parse_error(404, b"404 page not found\n"))
    error = parse_error(502, b"<html>bad\ngateway")
    assert (error.fault, str(error)) == (Fault.UNKNOWN, "HTTP 502: <html>bad gateway")


def test_ranges_of_prefixes() -> None:
    assert prefix_end(b"a/") == b"a0"
    assert prefix_end(b"a\xff\xff") == b"b"
    assert prefix_end(b"\xff") == b"\0"  # to the last key of etcd


def test_no_queue_or_note_is_among_the_values() -> None:
    keys = EtcdKeys(b"/p")
    begin, end = keys.values()
    places = [keys.deleted, *keys.queue(b"/q"), *keys.queue(b"/q", b"f")]
    assert not [place for place in places if begin <= place < end]
    assert begin <= keys.value(b"/\xff\xff") < end
    assert keys.key(keys.value(b"/k")) == b"/k"


def test_an_addition_is_not_repeated_when_it_may_have_been_made() -> None:
    """The value has changed since it was read, by this request or by another client."""

    def begin() -> Any:
        operation = Operations(EtcdKeys(b"")).of(wire.ADD, b"/n", 1)
        next(operation)
        operation.send(RangeReply())
        return operation

    with pytest.raises(ChangeUnknown):
        begin().send(TxnReply(is_repeat=True))
    adding = begin()
    body = '{"responses":[{"response_range":{"kvs":[{"value":"NQ==","mod_revision":"8"}]}}]}'
    request = adding.send(replied(txn([], []), body))
    assert b'"mod_revision":"8"' in request.encode()
    with pytest.raises(StopIteration) as stopped:
        adding.send(TxnReply(succeeded=True, is_repeat=True))
    assert stopped.value.value == 6


def test_a_fence_that_is_raised_twice_at_once_has_the_later_revision() -> None:
    """The first attempt was carried out without a reply, or is held back: it has no effect then."""
    fence = EtcdFence(b"/f")
    fence.on_reply(LeaseReply(ID=7))
    assert b'"mod_revision":"0"' in fence.next_request().encode()
    fence.on_reply(TxnReply(header=Header(5), succeeded=True))
    assert (fence.revision, fence.is_up) == (5, True)
    fence.lower(4)  # a change that was sent before the fence was raised
    assert fence.is_up
    fence.lower(5)
    assert b'"mod_revision":"5"' in fence.next_request().encode()
    body = '{"responses":[{"response_range":{"kvs":[{"mod_revision":"6"}]}}]}'
    fence.on_reply(replied(fence.next_request(), body))
    assert (fence.revision, fence.is_up) == (6, True)


def test_a_fence_whose_key_is_gone_is_down_until_it_is_written_anew() -> None:
    fence = EtcdFence(b"/f")
    for reply in (LeaseReply(ID=7), TxnReply(header=Header(5), succeeded=True)):
        fence.on_reply(reply)
    fence.lower(5)
    fence.on_reply(replied(fence.next_request(), '{"responses":[{"response_range":{}}]}'))
    assert (fence.revision, fence.is_up) == (0, False)
    fence.on_reply(TxnReply(header=Header(9), succeeded=True))
    assert (fence.revision, fence.is_up) == (9, True)


def test_a_fenced_transaction_compares_the_fence_in_each_branch_that_writes() -> None:
    pair = (b"", b"new", b"0")
    request = next(Operations(EtcdKeys(b"")).of(wire.LEASED_COMPARE_SET, b"/k", pair))
    fenced = json.loads(request.fenced(b"/f", 5).encode())
    same = {"key": base64.b64encode(b"/f").decode(), "target": "MOD", "mod_revision": "5"}
    assert fenced["compare"][0] == same
    assert fenced["failure"][0]["request_txn"]["compare"][0] == same
    assert fenced["failure"][-1]["request_range"]["key"] == same["key"]


@pytest.mark.parametrize(
    ("body", "is_fenced"),
    [
        ('{"succeeded":true}', False),
        ("{}", True),
        ('{"responses":[{"response_range":{"kvs":[{"mod_revision":"5"}]}}]}', False),
        ('{"responses":[{"response_range":{"kvs":[{"mod_revision":"6"}]}}]}', True),
        ('{"responses":[{"response_range":{}}]}', True),
    ],
)
def test_what_a_fenced_transaction_replies(body: str, *, is_fenced: bool) -> None:
    assert replied(txn([], []), body).is_fenced(5) is is_fenced


@pytest.mark.parametrize(("end", "shown"), [(b"b", "Yg=="), (b"", None)])
def test_a_watch_is_a_request_of_its_own(end: bytes, shown: str | None) -> None:
    request = json.loads(watch_body(b"a", end, 9))["create_request"]
    assert (request["key"], request.get("range_end")) == ("YQ==", shown)
    assert (request["start_revision"], request["progress_notify"]) == ("9", True)


def test_heads_of_replies() -> None:
    status, headers = parse_head(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX: a:b\r\n\r\n")
    assert (status, headers["content-length"], headers["x"]) == (200, "5", "a:b")
    for head in (b"SSH-2.0\r\n\r\n", b"HTTP/1.1 \r\n\r\n", b"HTTP/2 200\r\n\r\n"):
        with pytest.raises(HttpError, match="does not speak HTTP"):
            parse_head(head)
