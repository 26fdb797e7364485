"""Probes, sockets and limits of a spec: their forms, and what is refused in one line."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from elastic_aio import (
    Exec,
    Http,
    LaunchSpec,
    LimitSpec,
    LogMatch,
    Notify,
    PolledProbe,
    Probe,
    SocketSpec,
    SpecError,
    Tcp,
)
from elastic_aio.cli.run_options import parse_run
from elastic_aio.spec.checks import UsageError
from elastic_aio.spec.probe import HttpTarget, http_target

WEB = "http://127.0.0.1:800${local_rank}/health?full"


@pytest.mark.parametrize(
    ("given", "probe"),
    [
        ("notify", Notify()),
        ("tcp://[::1]:80", Tcp("[::1]:80")),
        ("https://h/x", Http("https://h/x")),
        ("exec:test -e /x", Exec(["/bin/sh", "-c", "test -e /x"])),
        ("log:Uvicorn running on", LogMatch("Uvicorn running on")),
        ({"http": WEB, "period": 0.5, "expects": 204}, Http(WEB, period=0.5, expects=(204, 204))),
        ({"tcp": "h:1", "timeout": 2.0, "threshold": 2}, Tcp("h:1", timeout=2.0, threshold=2)),
        ({"exec": ["a", "b"], "initial_delay": 3}, Exec(["a", "b"], initial_delay=3)),
        ({"log": "up", "stream": "stdout"}, LogMatch("up", stream="stdout")),
        (Http("http://h", expects=range(200, 300)), Http("http://h", expects=(200, 299))),
    ],
)
def test_a_probe_is_a_value_a_text_or_a_table(given: Any, probe: Probe) -> None:
    assert LaunchSpec(["x"], ready=given).ready == probe


def test_a_mistyped_field_is_named() -> None:
    """The base has fields by keyword only, which precede the address in the class."""
    assert next(iter(inspect.signature(Http).parameters)) == "url"
    make: Any = Http
    with pytest.raises(TypeError, match=r"Http\(\) got an unexpected keyword argument 'perod'"):
        make("http://h", perod=1)


def test_a_probe_knows_each_worker() -> None:
    assert http_target(Http(WEB), 3) == HttpTarget(False, "127.0.0.1", 8003, "/health?full")
    assert http_target(Http("https://[::1]"), 0) == HttpTarget(True, "::1", 443, "/")
    assert http_target(Http("http://h?a"), 0).path == "/?a"
    assert [http_target(Http(url), 0).authority for url in ("http://h:80", "https://[::1]:80")] == [
        "h",
        "[::1]:80",
    ]
    assert Tcp("h:1${local_rank}").host_port(2) == ("h", 12)
    assert Exec(["test", "${local_rank}"]).command(7) == ("test", "7")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("ready", 3, "ready: must be a URL, tcp://HOST:PORT, exec:COMMAND,"),
        ("ready", "web", "ready: must be a URL"),
        ("ready", "ftp://h", "ready: must be a URL"),
        ("ready", Probe(), "ready: must be a URL"),
        ("ready", "http://", "ready: must be http://HOST:PORT/PATH or https://... (got 'http://')"),
        ("ready", "http://h:0/", "ready: must have a port from 1 to 65535 (got 'http://h:0/')"),
        ("ready", "http://h/a b", "ready: must be http://HOST:PORT/PATH"),
        ("ready", "http://u@h/", "ready: must be HOST:PORT, [IPV6]:PORT or HOST"),
        ("ready", "tcp://h", "ready: must be HOST:PORT or [IPV6]:PORT (got 'tcp://h')"),
        ("ready", "exec:", "ready: must be a command (got 'exec:')"),
        ("ready", "log:(", "ready: must be a regular expression: missing )"),
        ("ready", {"http": "http://h", "tcp": "h:1"}, "ready: must be a URL"),
        ("ready", {"http": "http://h", "perod": 1}, "ready: has no such key; there are http, pe"),
        (
            "ready",
            {"http": "http://h", "url": "x"},
            "ready: has no such key; there are http, perio",
        ),
        ("ready", {"tcp": "h:1", "period": 0}, "ready.period: must be a number of at least 0.01"),
        ("ready", {"http": "http://h", "expects": (500, 200)}, "ready.expects: must be a pair of"),
        ("ready", {"http": "http://h", "headers": {"a b": "c"}}, "ready.headers: must hold names"),
        (
            "ready",
            {"http": "http://h", "headers": {"a": "b\r\nc: d"}},
            "ready.headers: must hold v",
        ),
        ("ready", "tcp://h:6553${local_rank}", "ready: must have a port from 1 to 65535"),
        ("alive", "notify", "alive: must not be notify: see liveness.heartbeat_timeout"),
        ("alive", "log:x", "alive: must be a probe that can be asked again"),
        ("sockets", "tcp://h:1", "sockets: must be a list (got 'tcp://h:1')"),
        ("sockets", ["h:1"], "sockets: must be tcp://HOST:PORT, tcp://*:PORT or unix:///PATH"),
        ("sockets", ["tcp://h:0"], "sockets: must have a port from 1 to 65535 (got 'tcp://h:0')"),
        ("sockets", ["unix://x"], "sockets: must be tcp://HOST:PORT, tcp://*:PORT or unix:///PA"),
        ("sockets", ["unix:///" + "x" * 107], "sockets: must have a path of at most 107 bytes"),
        ("sockets", ["tcp://h:1", "a=tcp://h:1"], "sockets: must not hold an address twice"),
        ("sockets", [{"address": "tcp://h:1", "mode": "0600"}], "sockets.mode: needs a path (addr"),
        (
            "sockets",
            [{"address": "unix:///s", "mode": "9"}],
            "sockets.mode: must be a mode such as",
        ),
        (
            "sockets",
            [{"address": "unix:///s", "mode": 0o1777}],
            "sockets.mode: must be a mode such",
        ),
        ("sockets", [{"adress": "tcp://h:1"}], "sockets: has no such key; there are address,"),
        ("limits", "1G", "limits: must be a LimitSpec or a table of its fields (got '1G')"),
        ("limits", {"memory": 1}, "limits: has no such key; there are memory_max, memory_high,"),
        ("limits", {"memory_max": "lots"}, "limits.memory_max: must be a size such as '512M'"),
        ("limits", {"nice": 20}, "limits.nice: must be a whole number from -20 to 19 (got 20)"),
        ("limits", {"umask": "9"}, "limits.umask: must be a mask such as '0027' or 0o027"),
        ("limits", {"user": ""}, "limits.user: must not be empty"),
        ("limits", {"cpu_max": 0}, "limits.cpu_max: must be a number of at least 0.01"),
    ],
)
def test_a_wrong_value_is_one_line(field: str, value: Any, message: str) -> None:
    arguments: dict[str, Any] = {field: value}
    with pytest.raises(SpecError) as caught:
        LaunchSpec(["x"], nproc_per_node=8, **arguments)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", [{"sockets": ["tcp://h:1"]}, {"limits": {"nice": 3}}])
def test_what_is_set_before_a_program_needs_a_program(given: dict[str, Any]) -> None:
    """A forked worker executes none; a command is executed in any case."""
    for method in ("fork", "forkserver"):
        with pytest.raises(SpecError, match="needs start method 'spawn', not "):
            LaunchSpec(print, start_method=method, **given)
        LaunchSpec(["x"], start_method=method, **given)
    assert LaunchSpec("x.py", start_method="fork", **given).is_executed


def test_limits_are_files_of_a_cgroup() -> None:
    limits = LimitSpec(memory_max="1G", memory_high=5, cpu_max=1.5, pids_max=7, nice=3)
    assert limits.cgroup == {
        "memory.max": str(1 << 30),
        "memory.high": "5",
        "pids.max": "7",
        "cpu.max": "150000 100000",
    }
    assert LimitSpec(umask="0027").umask == LimitSpec(umask=0o27).umask == 0o27
    assert LimitSpec(user="1000", group="www").user == 1000


def test_options_set_probes_and_sockets() -> None:
    argv = ["--ready", "http://h:1/x", "--alive=exec:true", "--socket", "tcp://h:1,a=unix:///x"]
    spec = parse_run([*argv, "x.py"], {}).spec
    assert (spec.ready, spec.alive) == (Http("http://h:1/x"), Exec("true"))
    assert spec.sockets == (SocketSpec("tcp://h:1"), SocketSpec("unix:///x", name="a"))
    assert isinstance(spec.alive, PolledProbe)
    for option, text in (("--ready", "x"), ("--alive", "notify"), ("--socket", "h:1")):
        with pytest.raises(UsageError, match=f"^{option}: must "):
            parse_run([option, text, "x.py"], {})
