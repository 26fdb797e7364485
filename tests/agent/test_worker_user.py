"""Workers of another user: what the launcher makes for them is theirs."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_aio import (
    Agent,
    Exec,
    JobFailed,
    LaunchSpec,
    LimitSpec,
    LogSpec,
    RestartPolicy,
    launch,
)
from tests.agent.test_probes import FAST, answer_of
from tests.support.children import shell, until

pytestmark = [
    pytest.mark.both_loops,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]


@pytest.fixture(autouse=True)
def _reachable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the log directories be where another user can reach them."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o711)
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield


OTHER = LimitSpec(user="daemon")
REOPEN = "echo one > /dev/stderr && echo two > /proc/self/fd/2 && echo three >> /dev/stdout"


@pytest.mark.parametrize(
    "logs",
    [
        LogSpec(redirects=3),
        LogSpec(tee=3),
        LogSpec(tee=3, on_full="console"),
        LogSpec(redirects=3, log_dir="logs"),
        LogSpec(redirects=1),  # and a captured standard error
    ],
)
async def test_a_worker_opens_its_streams_again(
    logs: LogSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As servers do whose log is /dev/stdout."""
    monkeypatch.chdir(tmp_path)
    await launch(LaunchSpec(shell(f"set -e; {REOPEN}"), limits=OTHER, logs=logs))


@pytest.mark.parametrize("logs", [LogSpec(), LogSpec(redirects=3), LogSpec(log_dir="made/here")])
async def test_a_worker_writes_its_error_file(
    logs: LogSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a directory of its own, in which other users see nothing, whatever the umask."""
    monkeypatch.chdir(str(tempfile.tempdir))
    umask = os.umask(0o077 if logs.log_dir else 0o022)
    look = "import os, stat; d = os.path.dirname(os.environ['TORCHELASTIC_ERROR_FILE'])"
    look += "; s = os.stat(d); assert (s.st_uid, s.st_mode & 0o777) == (os.getuid(), 0o700), s"
    look += "; assert not os.access(os.path.dirname(d), os.W_OK)"
    write = """; open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('{"message": "own"}')"""
    command = ["/usr/bin/env", "python3", "-c", f"{look}{write}; raise SystemExit(3)"]
    try:
        with pytest.raises(JobFailed) as caught:
            await launch(LaunchSpec(command, limits=OTHER, logs=logs))
    finally:
        os.umask(umask)
    assert caught.value.failures[0].reason == "own"


async def test_a_link_in_the_place_of_a_log_file_is_not_read(tmp_path: Path) -> None:
    """The worker of another user may put one there."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o600)
    script = f"f=$(readlink /proc/self/fd/2); f=${{f%/*}}/stderr.log; rm $f; ln -s {secret} $f"
    spec = LaunchSpec(shell(f"{script}; exit 3"), limits=OTHER, logs=LogSpec(redirects=3))
    with pytest.raises(JobFailed) as caught:
        await launch(spec)
    assert caught.value.failures[0].message != "secret"
    assert "secret" not in caught.value.result.attempts[0].workers[0].stderr_tail


async def test_a_probe_runs_as_its_worker() -> None:
    probe = Exec("test $(id -u) = 1 && test $HOME = ~daemon && test $(umask) = 0027", **FAST)
    limits = LimitSpec(user="daemon", umask="0027")
    spec = LaunchSpec(shell("exec sleep 99"), limits=limits, ready=probe)
    async with Agent(spec) as agent:
        await until(lambda: answer_of(agent))
        assert answer_of(agent) == "exit code 0"


async def test_the_path_of_a_socket_belongs_to_the_user_after_a_reload() -> None:
    path = f"{tempfile.tempdir}/socket"
    specs = [
        LaunchSpec(
            ["sleep", "99"],
            sockets=[f"unix://{path}"],
            limits=limits,
            restart=RestartPolicy(scope="worker"),
        )
        for limits in (None, OTHER)
    ]
    async with Agent(specs[0]) as agent:
        await until(lambda: agent.status().is_ready)
        assert os.stat(path).st_uid == 0
        assert await agent.reload(spec=specs[1])
        assert os.stat(path).st_uid == pwd.getpwnam("daemon").pw_uid


@pytest.mark.e2e
def test_a_worker_opens_an_inherited_pipe_again() -> None:
    """As that of a container's runtime."""
    script = "import asyncio, elastic_aio as e; asyncio.run(e.launch(e.LaunchSpec("
    script += "['sh', '-c', 'cat /dev/stdin >> /dev/stdout'], limits={'user': 'daemon'},"
    script += " stdin='rank0')))"
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, input=b"one\n", capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, b"one\n"), ended.stderr
