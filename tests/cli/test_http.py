"""`--http` and TORCHELASTIC_HEALTH_CHECK_PORT: the pages of a running command."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from elastic_aio.cli.run_options import parse_run
from elastic_aio.spec.checks import UsageError
from tests.support.children import until_sync
from tests.support.cli import run_cli, run_program, running_cli
from tests.support.sockets import free_port

VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"


def read(address: str, path: str) -> str:
    with urlopen(f"http://{address}{path}", timeout=30) as answer:  # a 503 raises an error
        return str(answer.read().decode())


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A worker that says that it runs, and waits."""
    path = tmp_path / "worker.py"
    path.write_text("import time\nprint('it runs')\ntime.sleep(600)\n")
    return path


@pytest.mark.e2e
def test_the_pages_of_a_job(script: Path) -> None:
    with running_cli("--http", "localhost:0", script) as program:
        address = program.wait_err(r"--http: listening at http://(\S+)$")[1]
        program.wait_out("it runs")
        assert read(address, "/readyz") == "running\n"
        assert json.loads(read(address, "/status"))["workers"][0]["state"] == "running"
        assert 'elastic_aio_workers{state="running"} 1' in read(address, "/metrics")
        program.send(signal.SIGTERM)
        assert program.wait() == 128 + signal.SIGTERM


@pytest.mark.e2e
def test_the_usage_and_the_steps_of_workers(tmp_path: Path) -> None:
    """What no event says: it is read when it is asked for."""
    script = tmp_path / "script.sh"
    script.write_text("echo PROGRESS=17/90 >&$ELASTIC_AIO_NOTIFY_FD; echo sent; sleep 600\n")
    options = ["--http", "localhost:0", "--progress-timeout=600", "--no-python", "bash"]
    with running_cli(*options, script) as program:
        address = program.wait_err(r"--http: listening at http://(\S+)$")[1]
        program.wait_out("sent")
        step = 'elastic_aio_worker_step{rank="0",local_rank="0"} 17\n'
        until_sync(lambda: step in read(address, "/metrics"), "the step")
        metrics = read(address, "/metrics")
        assert re.search(r'worker_cpu_seconds_total\{rank="0",local_rank="0"\} \d', metrics)
        assert re.search(r'worker_progress_age_seconds\{rank="0",local_rank="0"\} \d', metrics)
        (worker,) = json.loads(read(address, "/status"))["workers"]
        assert worker["usage"]["max_rss_bytes"] > 0
        assert worker["step"] == "17/90"
        program.send(signal.SIGTERM)
        assert program.wait() == 128 + signal.SIGTERM


@pytest.mark.e2e
def test_the_health_check_of_torch(script: Path) -> None:
    """On loopback only."""
    port = free_port()
    with running_cli(script, env={VARIABLE: str(port)}) as program:
        program.wait_out("it runs")
        assert read(f"127.0.0.1:{port}", "/healthz") == "running\n"
        program.send(signal.SIGTERM)
        program.wait()


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--http", VARIABLE])
def test_a_port_in_use_is_one_line(option: str, tmp_path: Path) -> None:
    """Of the option it is an error, and nothing is started; of torch's variable a warning."""
    script = tmp_path / "worker.py"
    script.write_text(f"open({str(tmp_path / 'started')!r}, 'w')")
    is_error = option == "--http"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = [f"--http=127.0.0.1:{port}"] if is_error else []
        ended = run_cli(*options, script, env={} if is_error else {VARIABLE: str(port)})
    line = f"{option}: cannot listen: address already in use (got '127.0.0.1:{port}')"
    assert [one.partition(": ")[2] for one in ended.errors if is_error or option in one] == [line]
    assert ended.code == (2 if is_error else 0)
    assert (tmp_path / "started").exists() != is_error


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--http", VARIABLE])
def test_a_missing_extra_is_one_line(option: str, tmp_path: Path) -> None:
    """Of the option it is an error, and nothing is started; of torch's variable a warning."""
    script = tmp_path / "worker.py"
    script.write_text(f"open({str(tmp_path / 'started')!r}, 'w')")
    is_error = option == "--http"
    argv = ["run", *(["--http=localhost:8080"] if is_error else []), str(script)]
    program = (
        f"import sys; sys.modules['hypercorn'] = None; sys.argv[1:] = {argv!r}\n"
        "from elastic_aio.cli import entry; sys.exit(entry())"
    )
    env = {} if is_error else {VARIABLE: "8080"}
    ended = run_program([sys.executable, "-c", program], env=env)
    address = "localhost:8080" if is_error else "127.0.0.1:8080"
    line = f"{option}: needs the extra http: pip install 'elastic_aio[http]' (got '{address}')"
    assert [one.partition(": ")[2] for one in ended.errors if option in one] == [line]
    assert ended.code == (2 if is_error else 0)
    assert (tmp_path / "started").exists() != is_error


def test_what_is_parsed() -> None:
    assert parse_run(["x.py"], {}).http is None
    assert parse_run(["x.py"], {VARIABLE: "8080"}).http == "127.0.0.1:8080"
    assert parse_run(["--http=a:1", "x.py"], {VARIABLE: "8080"}).http == "a:1"
    # In a worker the port is that of its own job.
    assert parse_run(["x.py"], {VARIABLE: "8080", "TORCHELASTIC_RUN_ID": "outer"}).http is None


@pytest.mark.parametrize(
    ("argv", "env", "message"),
    [
        (["--http=9000"], {}, "--http: must be HOST:PORT or [IPV6]:PORT (got '9000')"),
        (["--http=a:-1"], {}, "--http: must have a port from 0 to 65535 (got 'a:-1')"),
        ([], {VARIABLE: "x"}, f"{VARIABLE}: must be a port from 1 to 65535 (got 'x')"),
    ],
)
def test_mistakes(argv: list[str], env: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_run([*argv, "x.py"], env)
    assert str(caught.value) == message
