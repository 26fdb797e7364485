"""The table "For a scheduler" of docs/reference/exit-codes.md, against real exit codes."""

from __future__ import annotations

import re
import signal
import socket
from pathlib import Path

import pytest

from tests.support.cli import REPOSITORY, run_cli, running_cli
from tests.support.sockets import free_port

pytestmark = pytest.mark.e2e

BASH = ("--no-python", "bash", "-c")


def advice(code: int) -> str:
    """Return what the table says of an exit code, without its reason."""
    page = (REPOSITORY / "docs/reference/exit-codes.md").read_text()
    table = page.partition("### For a scheduler")[2].partition("\n\n## ")[0]
    rows = re.findall(r"^\| ([\d, ]+|others) \| ([^:|]+)", table, re.MULTILINE)
    said: dict[str, str] = {
        key.strip(): text.strip() for keys, text in rows for key in keys.split(",")
    }
    return said.get(str(code), said["others"])


def test_jobs_that_cannot_succeed(tmp_path: Path) -> None:
    """A mistake of the command line, and programs that cannot be run: not again."""
    (tmp_path / "data").write_text("no program")
    for args in (["--nnodes=x", "a.py"], ["missing.py"], ["--no-python", tmp_path / "data"]):
        ended = run_cli(*args)
        assert ended.code in (2, 126, 127)
        assert advice(ended.code) == "no"
        assert str(ended.code) in fail_job_codes()


def test_nodes_that_do_not_meet() -> None:
    endpoint = f"localhost:{free_port()}"
    options = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-conf=join_timeout=1"]
    ended = run_cli(*options, "--rdzv-endpoint", endpoint, *BASH, "true")
    assert ended.code == 75
    assert advice(ended.code) == "yes"
    assert str(ended.code) in requeued_codes()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_job_that_was_stopped(number: signal.Signals) -> None:
    with running_cli(*BASH, "echo it runs; sleep 600") as program:
        program.wait_out("it runs")
        program.send(number)
        code = program.wait()
    assert code == 128 + number
    assert advice(code) == "yes"
    assert str(code) not in requeued_codes()  # after scancel; Slurm requeues others itself


def test_a_worker_that_was_killed() -> None:
    ended = run_cli(*BASH, "kill -9 $$")
    assert ended.code == 137
    assert advice(ended.code) == "often"


def test_a_host_that_lacks_something() -> None:
    """No worker is reported."""
    with socket.create_server(("0.0.0.0", 0)) as taken:
        ended = run_cli("--master-port", taken.getsockname()[1], *BASH, "true")
    assert ended.code == 1
    assert advice(ended.code) == "on another host"
    assert "rank" not in ended.err


@pytest.mark.parametrize(("script", "code"), [("true", 0), ("exit 3", 3)])
def test_programs_that_end(script: str, code: int) -> None:
    ended = run_cli(*BASH, script)
    assert ended.code == code
    assert advice(ended.code) == "no"
    assert str(code) not in requeued_codes()


def requeued_codes() -> list[str]:
    """Return the codes after which the example for Slurm runs the job again."""
    text = (REPOSITORY / "examples/slurm.sbatch").read_text()
    match = re.search(r"\$code =~ \^\(([\d|]+)\)", text)
    assert match is not None
    return match[1].split("|")


def fail_job_codes() -> list[str]:
    """Return the codes after which the example for Kubernetes gives the job up."""
    text = (REPOSITORY / "examples/jobset.yaml").read_text()
    match = re.search(r"action: FailJob.*?values: \[([\d, ]+)\]", text, re.DOTALL)
    assert match is not None
    return match[1].split(", ")
