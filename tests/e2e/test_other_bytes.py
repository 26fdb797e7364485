"""Names and paths with bytes that are not UTF-8: each is used as it is, or refused in one line."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from elastic_aio.event_json import read_events
from elastic_aio.events import AttemptFailed, JobFinished, JobStarted
from tests.support.cli import CLI, Ended, run_cli, run_program, running, running_cli
from tests.support.control import own_control_dir
from tests.support.sockets import free_port

pytestmark = pytest.mark.e2e

ODD = os.fsdecode(b"caf\xe9\xff")
SHOWN = r"caf\udce9\udcff"

TRAINER = """
import os, signal, sys
from elastic_aio.worker import record
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
@record
def main():
    here = [os.environb[b"ODD"], os.environb[b"TORCHELASTIC_RUN_ID"], os.getcwdb()[-5:]]
    here += [os.fsencode(sys.argv[0])[-8:-3], os.fsencode(sys.argv[1])]
    print(here, flush=True)
    if sys.argv[2:] == ["fail"]:
        raise ValueError(f"cannot read {sys.argv[1]}")
    while sys.argv[2:] == ["wait"]:
        signal.pause()
main()
"""
SEEN = f"{[os.fsencode(ODD)] * 5}"
NAMED = "import ctypes, os, sys\nname = os.fsencode(sys.argv[1])\n" + (
    "assert ctypes.CDLL(None).sethostname(name, len(name)) == 0\n"
    "os.execv(sys.argv[2], sys.argv[2:])"
)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of such a name with a trainer, where commands know only the jobs of the test."""
    directory = tmp_path / ODD
    directory.mkdir()
    (directory / f"{ODD}.py").write_text(TRAINER)
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8:strict")  # as of most consoles
    monkeypatch.setenv("ODD", ODD)
    monkeypatch.chdir(directory)
    with own_control_dir():
        monkeypatch.setenv("XDG_STATE_HOME", str(directory / "state"))
        yield directory


def options(directory: Path, *more: object) -> list[object]:
    logs = [
        "--log-dir",
        directory / "logs",
        "--redirects=3",
        "--events",
        directory / f"{ODD}.jsonl",
    ]
    return ["--rdzv-id", ODD, *logs, *more, f"{ODD}.py", ODD]


def read_url(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as reply:
        content: bytes = reply.read()
    return content.decode()


def command(*words: str) -> Ended:
    return run_program([*CLI, *words])


def check(ended: Ended, code: int = 0) -> Ended:
    assert ended.code == code, ended.err
    assert "internal error" not in ended.err
    assert "surrogates not allowed" not in ended.err
    return ended


def test_a_job_and_its_record(directory: Path) -> None:
    """What is read back from files can be opened."""
    ended = check(run_cli(*options(directory)))
    assert f"run {SHOWN}: 1 worker of {SHOWN}.py on " in ended.err
    with open(directory / f"{ODD}.jsonl", "rb") as file:
        started, *_, finished = read_events(file)
    assert isinstance(started, JobStarted)
    assert isinstance(finished, JobFinished)
    assert (started.run_id, started.entrypoint) == (ODD, f"{ODD}.py")
    assert os.listdir(str(started.log_dir))
    status = json.loads(check(command("status", "--json", ODD)).out)
    assert (status["run_id"], status["cwd"]) == (ODD, str(directory))
    assert status["command"][-2:] == [f"{ODD}.py", ODD]
    assert Path(status["workers"][0]["stdout_path"]).read_text() == f"{SEEN}\n"
    assert json.loads((Path(status["log_dir"]) / "node.json").read_bytes())["run_id"] == ODD
    for name in ODD, SHOWN, str(directory / "logs"):
        assert check(command("logs", name)).out == f"{SEEN}\n"
        assert check(command("why", name)).out.startswith(f"run {SHOWN}: {SHOWN}.py on ")
    for words in ["status", ODD], ["ps", "-a"], ["why", "--from", f"{ODD}.jsonl"]:
        assert SHOWN in check(command(*words)).out


def test_a_job_that_runs(directory: Path) -> None:
    """Its pages and commands name it as it is, as JSON does, or escaped, for people."""
    with running_cli(*options(directory, "--http=127.0.0.1:0"), "wait") as job:
        address = job.wait_err(r"listening at (http://\S+)")[1]
        job.wait_err(r"1 worker of")
        (status,) = (json.loads(line) for line in check(command("ps", "--json")).out.splitlines())
        assert status["status"]["run_id"] == ODD
        page = json.loads(read_url(f"{address}/status"))
        assert page["log_dir"] == status["status"]["log_dir"]
        assert f'run_id="{SHOWN}"'.replace("\\", r"\\") in read_url(f"{address}/metrics")
        for words in ["status"], ["top", "--once"], ["events"], ["why"], ["dump"]:
            assert SHOWN in check(command(*words, ODD)).out + SHOWN * (words == ["dump"])
        stopped = check(command("stop", "--reason", ODD, ODD))
        assert f"stopped, exit code 143: {SHOWN}, requested by" in stopped.out
        ended = check(job.ended(), 143)
    assert f"{SHOWN}.py was stopped: {SHOWN}, requested by" in ended.err
    assert "saved" in check(command("logs", ODD)).out


def test_a_failure(directory: Path) -> None:
    ended = check(run_cli(*options(directory), "fail"), 1)
    assert f"ValueError: cannot read {SHOWN}" in ended.err
    with open(directory / f"{ODD}.jsonl", "rb") as file:
        failed = next(one for one in read_events(file) if isinstance(one, AttemptFailed))
    assert failed.root.error is not None
    assert failed.root.error.message == f"ValueError: cannot read {ODD}"
    assert json.loads(Path(failed.root.error.path).read_bytes())["message"]["message"]
    assert f"ValueError: cannot read {SHOWN}" in check(command("why", ODD)).out


@pytest.mark.slow
@pytest.mark.parametrize(("what", "code"), [("", 0), ("fail", 1)])
def test_two_nodes(directory: Path, what: str, code: int) -> None:
    """Both know the same; the texts of the other node are as it has written them."""
    endpoint = f"--rdzv-endpoint=localhost:{free_port()}"
    words = options(directory, "--nnodes=2", "--rdzv-backend=c10d", endpoint)
    with ExitStack() as stack:
        job = [stack.enter_context(running_cli(*words, *filter(None, [what]))) for _ in range(2)]
        ended = [check(node.ended(), code) for node in job]
    for node in ended:
        assert f"run {SHOWN}: 1 worker of {SHOWN}.py" in node.err
        if what:
            assert f"ValueError: cannot read {SHOWN}" in node.err
    for name in os.listdir(directory / "logs"):
        record = json.loads((directory / "logs" / name / "run.json").read_bytes())
        assert record["run_id"] == ODD
        for line in (directory / "logs" / name / "events.jsonl").read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "AttemptFailed":
                assert all(os.path.exists(one["error"]["path"]) for one in event["failures"])


@pytest.mark.slow
def test_the_name_of_the_host(directory: Path) -> None:
    namespace = ["unshare", "--uts", sys.executable, "-c", NAMED, ODD]
    if run_program([*namespace, "/bin/true"]).code:
        pytest.skip("no namespace with a name of its own")
    nodes = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}"]
    several = [*nodes, "--rdzv-conf=last_call_timeout=1"]
    for more in [], several, ["--standalone"]:
        ended = check(run_program([*namespace, *CLI, "run", *map(str, options(directory, *more))]))
        assert f" on {SHOWN}, " in ended.err
    status = json.loads(check(command("status", "--json", ODD)).out)
    assert status["node"] == ODD


def test_a_plan(directory: Path) -> None:
    plan = check(command("run", "--dry-run", *map(str, options(directory)))).out
    assert f"run id: {SHOWN}\n" in plan
    assert f"-u {SHOWN}.py {SHOWN}" in plan.replace("'", "")


def test_a_tree(directory: Path) -> None:
    """Its file stands in such a directory; a file with such a byte is refused."""
    (directory / "serve.py").write_text(TRAINER.replace("sys.argv[2:]", '["wait"]'))
    file = directory / f"{ODD}.toml"
    file.write_text(f'[children.a]\ncommand = ["{sys.executable}", "serve.py", "x"]\n')
    with running([*CLI, "up", file]) as job:
        job.wait_out(r"^\[a:0\]:")
        (line,) = check(command("ps", "--json")).out.splitlines()
        pid = str(json.loads(line)["pid"])
        check(command("reload", pid, "a"))
        check(command("stop", pid))
        check(job.ended(), 143)
    other = directory / f"{ODD}.Procfile"
    other.write_bytes(b"web: echo \xff\n")
    refused = command("up", str(other))
    assert refused.code == 2
    assert refused.errors == [
        f"aio-elastic up: FILE: must be text in UTF-8 (got '{directory}/{ODD}.Procfile')".encode(
            "utf-8", "backslashreplace"
        ).decode()
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["--local-addr", ODD],
        ["--nnodes=2", "--rdzv-endpoint", f"{ODD}:1"],
        ["--nnodes=2", "--node-rank=0", "--master-addr", ODD],
        ["--nnodes=1:2", "--rdzv-backend", ODD],
        ["--nnodes=1:2", "--rdzv-backend=etcd", "--rdzv-conf", f"user={ODD}"],
        ["--http", f"{ODD}:1"],
        ["--ready", f"http://localhost:1/{ODD}"],
        ["--preload", ODD],
        ["--max-restarts", ODD],
        [f"--{ODD}"],
        ["-m", ODD],
    ],
    ids=lambda words: words[-2] if len(words) > 1 else "option",
)
def test_where_a_format_forbids_it(words: list[Any], directory: Path) -> None:
    ended = run_cli(*words, f"{ODD}.py", ODD)
    assert (ended.code, ended.out) == (2, "")
    assert len(ended.errors) == 1
    assert ended.err.startswith("aio-elastic run: ")
