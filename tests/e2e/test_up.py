"""`aio-elastic up`: the jobs of a file, as processes of their own."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.children import until_sync
from tests.support.cli import CLI, Ended, Running, run_program, running
from tests.support.leaks import alive, leaked_processes

pytestmark = pytest.mark.e2e

JOBS = """
run_id = "files"
ends_with = "trainer"
[children.server]
command = ["sh", "-c", "echo $$ > server.$TORCHELASTIC_RESTART_COUNT; exec sleep 99"]
restart = "always"
[children.trainer]
command = ["sh", "-c", "until [ -e go ]; do sleep 0.02; done; exit 7"]
after = ["server"]
[children.web]
command = ["sh", "-c", "echo $$ > web.$RANK; exec sleep ${SECONDS_:-99}"]
nproc_per_node = 2
max_restarts = 2
restart = { scope = "worker" }
[children.sidecar]
command = ["sh", "-c", "exit 5"]
essential = false
"""


def cli(*words: object, env: dict[str, str]) -> Ended:
    return run_program([*CLI, *map(str, words)], env=env)


@contextmanager
def up(directory: Path, *words: object) -> Iterator[tuple[Running, dict[str, str]]]:
    """Run the jobs of `jobs.toml` in a directory, until all of them run."""
    env = {"ELASTIC_AIO_CONTROL_DIR": str(directory), "XDG_STATE_HOME": str(directory)}
    os.chmod(directory, 0o700)
    (directory / "jobs.toml").write_text(JOBS)
    with running([*CLI, "up", *words], env=env, cwd=directory) as job:
        noted = ("server.0", "web.0", "web.1")
        until_sync(lambda: all((directory / name).exists() for name in noted) or job.process.poll())
        yield job, env


def pid_in(path: Path) -> int:
    return int(until_sync(lambda: path.exists() and path.read_text().strip()))


def tree(env: dict[str, str]) -> dict[str, Any]:
    """Return the status of each child, by its path."""
    status = json.loads(cli("status", "files", "--json", env=env).out)
    below = [status]
    for one in below:
        below += one["children"]
    return {one["child"]: one for one in below}


def test_the_children_of_a_file(tmp_path: Path) -> None:
    """The server restarts alone; the trainer ends the job with its code; the sidecar does not."""
    with up(tmp_path) as (job, env):
        until_sync(lambda: tree(env)["sidecar"]["phase"] == "failed")
        os.kill(pid_in(tmp_path / "server.0"), signal.SIGKILL)
        server = pid_in(tmp_path / "server.1")
        until_sync(lambda: tree(env)["server"]["phase"] == "running")
        found = tree(env)
        assert found["server"]["workers"][0]["pid"] == server
        assert found["server"]["restarts"] == 1
        assert found["trainer"]["phase"] == found[""]["phase"] == "running"
        assert [*found] == ["", "server", "trainer", "web", "sidecar", "web/0", "web/1"]
        (tmp_path / "go").touch()
        assert job.wait() == 7, job.err
        assert "trainer FAILED" in job.err
    why = cli("why", "files", env=env)
    assert "sidecar: it has failed, exit code 5, and is not essential" in why.out
    assert not leaked_processes()


def test_requests_name_a_child(tmp_path: Path) -> None:
    """Those that are not named keep their processes."""
    with up(tmp_path) as (job, env):
        web = pid_in(tmp_path / "web.0")
        ended = cli("restart", "files", "web/1", env=env)
        assert (ended.code, ended.out) == (0, f"job files (pid {job.pid}) web/1 restarted\n")
        assert cli("stop", "files", "server", env=env).code == 0
        found = tree(env)
        assert found["server"]["phase"] == "stopped"
        assert found["web/0"]["workers"][0]["pid"] == web
        assert found["web/1"]["attempt"] == 1
        assert cli("restart", "files", "server", env=env).code == 0
        assert cli("scale", "files", "web", 3, env=env).code == 0
        assert "web/2" in tree(env)
        refused = cli("restart", "files", "db", env=env)
        assert refused.code == 2
        assert refused.err.startswith("aio-elastic restart: CHILD: must be one of: server, ")
        shown = cli("status", "files", "web", env=env)
        assert "web/2" in shown.out
        assert "trainer" not in shown.out
        for command in ("why", "events"):  # a child alone, and after its job
            shown = cli(command, "web", env=env)
            assert (shown.code, shown.err) == (0, "")
            assert "web/1" in shown.out
            assert "sidecar: " not in shown.out
            assert (
                cli(command, "files", "web", env=env).out.splitlines()[-2:]
                == (shown.out.splitlines()[-2:])
            )
        refused = cli("preempt", "web", env=env)
        assert refused.code == 2
        assert "JOB: must be a job, and this is a child of files (pid" in refused.err
        assert cli("stop", "files", env=env).code == 0
        assert job.wait() == 143


def test_sighup_reloads_the_file(tmp_path: Path) -> None:
    """What the file has changed is replaced; a file that is wrong changes nothing."""
    with up(tmp_path, "--reload-on-hup") as (job, env):
        server = pid_in(tmp_path / "server.0")
        before = pid_in(tmp_path / "web.0")
        changed = JOBS.replace("sleep ${SECONDS_:-99}", "sleep 98")
        (tmp_path / "jobs.toml").write_text(changed)
        job.send(signal.SIGHUP)
        until_sync(lambda: not alive(before))
        until_sync(lambda: tree(env)["web/1"]["generation"] == 1)
        assert alive(server)
        (tmp_path / "jobs.toml").write_text(changed.replace("[children.web]", "[children.w/b]"))
        job.send(signal.SIGHUP)
        job.wait_err("nothing is reloaded: jobs.toml: ")
        typo = changed.replace('command = ["sh", "-c", "exit 5"]', 'command = "uvicornn app"')
        for text, problem in (
            (typo, "children.sidecar.command: cannot run uvicornn: command not found"),
            (changed.replace('run_id = "files"', 'run_id = "other"'), "run_id: must stay 'files'"),
        ):
            (tmp_path / "jobs.toml").write_text(text)
            job.send(signal.SIGHUP)
            job.wait_err(f"nothing is reloaded: {problem}")
        assert alive(server)
        job.send(signal.SIGTERM)
        assert job.wait() == 143


def test_a_killed_launcher_leaves_nothing(tmp_path: Path) -> None:
    """The guardians end each child."""
    with up(tmp_path) as (job, _):
        pids = [pid_in(tmp_path / name) for name in ("server.0", "web.0", "web.1")]
        job.send(signal.SIGKILL)
        job.wait()
        until_sync(lambda: not any(map(alive, pids)))
    until_sync(lambda: not leaked_processes())


def test_a_dry_run_starts_nothing(tmp_path: Path) -> None:
    """It prints the children in the order of their starts."""
    (tmp_path / "jobs.toml").write_text(JOBS)
    ended = run_program([*CLI, "up", "--dry-run"], cwd=tmp_path)
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert lines[0] == "job: 4 children, one_for_one, ends with trainer"
    children = [one.partition(":")[0].strip() for one in lines[1:] if one[2] != " "]
    assert children == ["server", "trainer", "web", "sidecar"]
    place = lines.index(
        "  trainer: 1 worker, 0 restarts, stop: SIGTERM 25 s, SIGKILL; after server"
    )
    assert lines[place + 1] == ("    command: sh -c 'until [ -e go ]; do sleep 0.02; done; exit 7'")
    assert "    restart scope: worker" in lines[place + 2 :]
    assert not (tmp_path / "server.0").exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[children.a]\ncommand = []", "jobs.toml: "),
        ("[children", "jobs.toml: "),
        ('[children.a]\ncommand = ["true"]\nafter = ["b"]', "jobs.toml: "),
    ],
)
def test_a_wrong_file_is_one_line(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "jobs.toml").write_text(text)
    ended = run_program([*CLI, "up"], cwd=tmp_path)
    assert ended.code == 2
    (line,) = ended.errors
    assert line.startswith(f"aio-elastic up: {problem}")


@pytest.mark.parametrize(
    ("logs", "shown"),
    [("", "[pair/0:0]:a\n[pair/1:0]:a\n[solo:0]:b\n"), ("logs = { redirects = 1 }\n", "")],
)
def test_lines_have_the_names_of_their_children(logs: str, shown: str, tmp_path: Path) -> None:
    """Unless the file says where they go."""
    group = '[children.pair]\ncommand = "echo a"\nreplicas = 2\n'
    (tmp_path / "jobs.toml").write_text(f'{logs}{group}[children.solo]\ncommand = "printf b"\n')
    ended = run_program([*CLI, "up"], cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert "".join(sorted(ended.out.splitlines(keepends=True))) == shown
    assert ", logs in /" in ended.err


TALK = "for i in 0 1 2 3 4 5 6 7; do echo out $i; echo err $i >&2; done; exit 3"
TALKS = {
    "Procfile": f"a: {TALK}\n",
    "jobs.toml": 'run_id = "talk"\nlogs = { log_dir = "logs", tee = 3 }\n[children.a]\n'
    f'command = ["sh", "-c", "{TALK}"]\n',
}


@pytest.mark.parametrize("name", TALKS)
def test_the_order_of_both_streams_of_a_child(name: str, tmp_path: Path) -> None:
    """On the console, for `logs`, and in the last lines of a failure."""
    tmp_path.chmod(0o700)
    (tmp_path / name).write_text(TALKS[name])
    env = {"ELASTIC_AIO_CONTROL_DIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    ended = run_program([*CLI, "up", name], env=env, cwd=tmp_path)
    lines = [f"{kind} {i}" for i in range(8) for kind in ("out", "err")]
    assert ended.code == 3
    assert ended.out.splitlines() == [f"[a:0]:{line}" for line in lines]
    assert "".join(f"    {line}\n" for line in lines) + "=" in ended.err
    if name == "jobs.toml":  # its files stay
        assert cli("logs", "talk", env=env).out.splitlines() == lines
        assert "evidence: stderr: err 7" in cli("why", "talk", env=env).out


def test_a_failure_names_its_child_and_its_rule_once(tmp_path: Path) -> None:
    """And the plan of a dry run has what is set of a probe."""
    text = '[children.once]\ncommand = ["sh", "-c", "exit 3"]\nready = { http = "http://h/" }\n'
    (tmp_path / "jobs.toml").write_text(text)
    ended = run_program([*CLI, "up"], cwd=tmp_path)
    assert ended.code == 3
    assert ended.err.count("no restarts allowed") == 1
    assert "\n  child     : once\n" in ended.err
    plan = run_program([*CLI, "up", "--dry-run"], cwd=tmp_path).out
    assert plan.endswith("    ready: Http(url='http://h/')\n")


@pytest.mark.parametrize("name", ["jobs.toml", "Procfile"])
def test_a_byte_order_mark_is_no_text(name: str, tmp_path: Path) -> None:
    """Of the file, and of `.env`: editors of other systems write one."""
    texts = {"jobs.toml": '[children.a]\ncommand = "echo"\n', "Procfile": "a: echo", ".env": "A=1"}
    for file, text in texts.items():
        (tmp_path / file).write_text(f"\ufeff{text}\r\n")
    ended = cli("up", "--dry-run", tmp_path / name, env={})
    assert (ended.code, ended.err) == (0, "")
    assert ("A=1" in ended.out) == (name == "Procfile")


def test_a_procfile(tmp_path: Path) -> None:
    """Each type has its port; the first process that ends ends all."""
    (tmp_path / "Procfile").write_text("web: echo $PORT; exec sleep 99\nend: sleep 0.5; exit 3\n")
    ended = run_program([*CLI, "up", "--concurrency", "web=2"], cwd=tmp_path)
    assert ended.code == 3, ended.err
    assert sorted(ended.out.split()) == ["[web/0:0]:5000", "[web/1:1]:5001"]
    assert not leaked_processes()
