"""`aio-elastic store` as a process: its output, errors and exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest
import uvloop

from elastic_aio.cli.options import choose_loop
from elastic_aio.cli.store import main_store
from elastic_aio.errors import StoreRefused
from elastic_aio.store import StoreServer, connect
from tests.support.certificates import Authority

PROGRAM = (
    "import sys; from elastic_aio.cli.store import main_store; sys.exit(main_store(sys.argv[1:]))"
)


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_serves_until_a_signal(tmp_path: Path, number: int) -> None:
    """It prints its endpoint, serves clients, and exits with code 0."""
    token = tmp_path / "token"
    token.write_text("secret-of-this-test\n")
    process = await start("--host", "127.0.0.1", "--port", "0", "--token-file", str(token))
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    assert line.endswith("(with a token)\n")
    endpoint = line.split()[3]
    async with connect(endpoint, token="secret-of-this-test", reconnect_for=0) as store:
        assert await store.add("n") == 1
        probe = await start("ping", endpoint, "--token-file", str(token))
        out, err = await probe.communicate()
        assert (probe.returncode, err) == (0, b"")
        assert b"(elastic_aio)" in out
        wrong = await start("ping", endpoint)
        out, err = await wrong.communicate()
        assert (wrong.returncode, out) == (1, b"")
        assert err == b"aio-elastic store ping: the store asks for a token\n"
        os.kill(process.pid, number)
        out, err = await process.communicate()
    assert (process.returncode, out, err) == (0, b"", b"")


@pytest.mark.e2e
async def test_dropped_connections_are_printed() -> None:
    """One line for each connection that violates the protocol."""
    process = await start("--port", "0", "--host", "*")
    assert process.stdout is not None
    assert process.stderr is not None
    port = (await process.stdout.readline()).decode().split()[3].rpartition(":")[2]
    reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    line = await process.stderr.readline()
    assert b"does not begin like a TCPStore client" in line
    writer.close()
    process.terminate()
    await process.communicate()
    assert reader is not None


@pytest.mark.e2e
async def test_an_unread_stderr_blocks_nothing() -> None:
    """Connections whose lines do not fit into the pipe are counted, and the store serves on."""
    process = await start("--port", "0", "--host", "127.0.0.1", "--max-mib", "1")
    assert process.stdout is not None
    assert process.stderr is not None
    endpoint = (await process.stdout.readline()).decode().split()[3]
    process.stderr._transport.pause_reading()  # type: ignore[attr-defined]  # a read transport
    for _ in range(2000):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.split(":")[1]))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
    async with connect(endpoint, timeout=5, reconnect_for=0) as store:
        assert await store.add("n") == 1
        with pytest.raises(StoreRefused, match="its limit is 1048576 bytes"):
            await store.set("k", bytes(1 << 20))
        process.stderr._transport.resume_reading()  # type: ignore[attr-defined]
        lines = [await process.stderr.readline() for _ in range(100)]
        assert all(b"does not begin like a TCPStore client" in line for line in lines)
    process.terminate()
    await process.communicate()
    assert process.returncode == 0


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
        process = await start("--host", "127.0.0.1", "--port", str(server.port))
        out, err = await process.communicate()
        where = f"127.0.0.1:{server.port}"
    assert (process.returncode, out) == (2, b"")
    assert err.decode() == f"aio-elastic store: cannot listen on {where}: Address already in use\n"


def test_the_loop_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store runs on uvloop, and on asyncio's loop where uvloop is not installed."""
    assert choose_loop("auto", serves_store=True) is uvloop.new_event_loop
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert choose_loop("auto", serves_store=True) is None


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("client_auth", "access"), [(None, "with TLS and a client certificate"), ("no", "with TLS")]
)
async def test_serves_over_tls(authority: Authority, client_auth: str | None, access: str) -> None:
    """A probe with the options of a client reaches it; dropped ones are printed."""
    tls = authority.issue()
    files = [f"--tls-{name}={getattr(tls, name)}" for name in ("cert", "key", "ca")]
    more = [] if client_auth is None else ["--tls-client-auth", client_auth]
    process = await start("--host", "127.0.0.1", "--port", "0", *files, *more)
    assert process.stdout is not None
    assert process.stderr is not None
    line = (await process.stdout.readline()).decode()
    assert line.endswith(f"({access})\n")
    endpoint = line.split()[3]
    own = files[2:] if client_auth else files
    probe = await start("ping", endpoint, *own)
    out, err = await probe.communicate()
    assert (probe.returncode, err) == (0, b"")
    assert b"(elastic_aio)" in out
    probe = await start("ping", endpoint)
    out, err = await probe.communicate()
    assert (probe.returncode, out) == (1, b"")
    assert err.startswith(b"aio-elastic store ping: the store speaks TLS: give tls_ca")
    assert b"does not speak TLS, which this store requires" in await process.stderr.readline()
    process.terminate()
    await process.communicate()


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
