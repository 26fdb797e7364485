"""`aio-elastic store` as a process: its output, errors and exit codes."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import uvloop

from elastic_aio.cli.options import choose_loop
from elastic_aio.cli.store import main_store
from elastic_aio.errors import StoreRefused
from elastic_aio.store import StoreServer, connect
from tests.support.certificates import Authority
from tests.support.children import DEADLINE_S, line_from
from tests.support.cli import CLI, Ended, Running, run_beside, run_program, running


def serve(*words: object, host: str = "127.0.0.1", **options: Any) -> Any:
    """Run a store at a free port while the block is open."""
    return running([*CLI, "store", "--host", host, "--port", 0, *words], **options)


def announced(store: Running) -> tuple[str, str]:
    """Return the endpoint of a store, and who has access."""
    match = store.wait_out(r"^store listening on (\S+) \((.*)\)$")
    return match[1], match[2]


def ping(*words: object) -> Ended:
    return run_program([*CLI, "store", "ping", *map(str, words)])


def send_request(endpoint: str) -> None:
    """Send what no client of a store sends, and wait until the store has dropped it."""
    host, _, port = endpoint.rpartition(":")
    with socket.create_connection((host, int(port)), DEADLINE_S) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        try:
            assert sock.recv(1) == b""
        except ConnectionError:
            pass


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_serves_until_a_signal(tmp_path: Path, number: int) -> None:
    """It prints its endpoint, serves clients, and exits with code 0."""
    token = tmp_path / "token"
    token.write_text("secret-of-this-test\n")
    with serve("--token-file", token) as program:
        endpoint, access = announced(program)
        assert access == "with a token"
        async with connect(endpoint, token="secret-of-this-test", reconnect_for=0) as store:
            assert await store.add("n") == 1
            probe = ping(endpoint, "--token-file", token)
            assert (probe.code, probe.err) == (0, "")
            assert "(elastic_aio)" in probe.out
            line = "aio-elastic store ping: the store asks for a token\n"
            assert ping(endpoint) == Ended(1, "", line)
            program.send(number)
            ended = program.ended()
    assert (ended.code, ended.out.count("\n"), ended.err) == (0, 1, "")


@pytest.mark.e2e
def test_dropped_connections_are_printed() -> None:
    """One line for each connection that violates the protocol."""
    with serve(host="*") as program:
        endpoint, _ = announced(program)
        send_request("127.0.0.1:" + endpoint.rpartition(":")[2])
        program.wait_err("does not begin like a TCPStore client")


@pytest.mark.e2e
async def test_an_unread_stderr_blocks_nothing() -> None:
    """Connections whose lines do not fit into the pipe are counted, and the store serves on."""
    reading, writing = os.pipe()
    try:
        with serve("--max-mib", 1, stderr=writing) as program:
            os.close(writing)
            endpoint, _ = announced(program)
            for _ in range(2000):
                send_request(endpoint)
            async with connect(endpoint, timeout=5, reconnect_for=0) as store:
                assert await store.add("n") == 1
                with pytest.raises(StoreRefused, match="its limit is 1048576 bytes"):
                    await store.set("k", bytes(1 << 20))
            for _ in range(100):
                assert "does not begin like a TCPStore client" in line_from(reading)
            program.send(signal.SIGTERM)
            assert program.wait() == 0
    finally:
        os.close(reading)


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (["--port", "99999"], 2, "--port: must be a port from 0 to 65535"),
        (["--bogus"], 2, "unrecognized arguments: --bogus"),
        (
            ["--token-file", "/no/such/file"],
            2,
            "--token-file: must be a file that can be read: no such file",
        ),
        (["--token-file", "/dev/null"], 2, "--token-file: must not be an empty file"),
        (["--host", "no.such.host.invalid"], 2, "no address for host"),
        (["ping"], 2, "required: endpoint"),
        (["ping", "nonsense"], 2, "must be HOST:PORT"),
        (
            ["ping", "127.0.0.1:1", "--timeout", "x"],
            2,
            "--timeout: must be a number of seconds above 0 (got 'x')",
        ),
        (["ping", "127.0.0.1:1", "--timeout", "0.2"], 1, "no store at 127.0.0.1:1 within 0.2 s"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], code: int, problem: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """An error is one line on stderr, without a traceback."""
    assert main_store(arguments) == code
    captured = capfd.readouterr()
    assert problem in captured.err
    command = "store ping" if arguments[0] == "ping" else "store"
    assert captured.err.startswith(f"aio-elastic {command}: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


async def test_a_port_in_use() -> None:
    """The error is one line, and no endpoint is printed."""
    async with StoreServer("127.0.0.1") as server:
        ended = await run_beside("store", "--host", "127.0.0.1", "--port", server.port)
        where = f"127.0.0.1:{server.port}"
    problem = f"cannot listen on {where}: Address already in use"
    assert ended == Ended(2, "", f"aio-elastic store: {problem}\n")


def test_the_loop_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store runs on uvloop, and on asyncio's loop where uvloop is not installed."""
    assert choose_loop("auto", serves_store=True) is uvloop.new_event_loop
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert choose_loop("auto", serves_store=True) is None


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("client_auth", "access"), [(None, "with TLS and a client certificate"), ("no", "with TLS")]
)
def test_serves_over_tls(authority: Authority, client_auth: str | None, access: str) -> None:
    """A probe with the options of a client reaches it; dropped ones are printed."""
    tls = authority.issue()
    files = [f"--tls-{name}={getattr(tls, name)}" for name in ("cert", "key", "ca")]
    more = [] if client_auth is None else ["--tls-client-auth", client_auth]
    with serve(*files, *more) as program:
        endpoint, shown = announced(program)
        assert shown == access
        probe = ping(endpoint, *(files[2:] if client_auth else files))
        assert (probe.code, probe.err) == (0, "")
        assert "(elastic_aio)" in probe.out
        probe = ping(endpoint)
        assert (probe.code, probe.out) == (1, "")
        assert probe.err.startswith("aio-elastic store ping: the store speaks TLS: give tls_ca")
        program.wait_err("does not speak TLS, which this store requires")


@pytest.mark.parametrize("command", [[], ["ping", "localhost:1"]])
def test_mistakes_in_certificates_are_one_line(
    capfd: pytest.CaptureFixture[str], authority: Authority, command: list[str]
) -> None:
    """Before anything is bound or connected."""
    name = "store ping" if command else "store"
    tls = authority.issue()
    missing = "--tls-key: is needed with a certificate (got None)"
    no_file = "--tls-ca: must be a file that can be read: no such file or directory (got '/no')"
    both = [f"--tls-cert={tls.cert}", f"--tls-key={tls.key}"]
    for options, problem in (
        ([f"--tls-cert={tls.cert}"], missing),
        ([*both, "--tls-ca=/no"], no_file),
    ):
        assert main_store([*command, *options]) == 2
        assert capfd.readouterr().err == f"aio-elastic {name}: {problem}\n"
