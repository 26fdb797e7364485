"""`aio-elastic run` as a service of systemd: what its notification socket receives."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_aio.cli.sd_notify import ServiceNotifier
from elastic_aio.events import JobStarted
from elastic_aio.node_events import RoundForming
from tests.support.children import DEADLINE_S, until, until_sync
from tests.support.cli import run_cli, running_cli

BASH = ["--no-python", "bash", "-c"]


class Manager:
    """The socket of a service manager."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address.replace("@", "\0", 1))
        self.socket.settimeout(DEADLINE_S)

    def read(self) -> dict[str, str]:
        """Wait for the next message."""
        return dict(line.split("=", 1) for line in self.socket.recv(65536).decode().split("\n"))

    def read_until(self, name: str) -> list[dict[str, str]]:
        """Return the messages up to the first one with a field."""
        messages = [self.read()]
        while name not in messages[-1]:
            messages.append(self.read())
        return messages

    def read_all(self) -> list[dict[str, str]]:
        """Return the messages that are there."""
        messages = []
        while select.select([self.socket], [], [], 0)[0]:
            messages.append(self.read())
        return messages


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    is_path = request.param == "path"
    manager = Manager(str(tmp_path / "n") if is_path else f"@elastic_aio-test-{os.getpid()}")
    with manager.socket:
        yield manager


@pytest.mark.e2e
def test_a_service(manager: Manager) -> None:
    """It is ready when all workers run; the status is what is printed."""
    env = {"NOTIFY_SOCKET": manager.address}
    with running_cli("--nproc-per-node=2", *BASH, "sleep 99", env=env) as job:
        *before, ready = manager.read_until("READY")
        assert [message["STATUS"].split(":")[0].split()[0] for message in before] == ["run"]
        assert ready == {"READY": "1", "STATUS": "running: 2 workers"}
        job.send(signal.SIGTERM)
        assert job.wait() == 128 + signal.SIGTERM
        stopping = manager.read_until("STOPPING")[-1]
        assert stopping["STATUS"].endswith("SIGTERM was received")
        last = manager.read_until("STOPPING")[-1]
        assert last["STATUS"].startswith("job stopped after ")


@pytest.mark.e2e
def test_a_service_whose_workers_have_a_probe(manager: Manager, tmp_path: Path) -> None:
    """It is ready when the probe finds all of them ready."""
    env, is_up = {"NOTIFY_SOCKET": manager.address}, tmp_path / "up"
    options = (
        "--nproc-per-node=2",
        "--ready",
        f"exec:test -e {is_up} || {{ echo $RANK >> {is_up}.asked; exit 1; }}",
    )
    with running_cli(*options, *BASH, "sleep 99", env=env) as job:
        until_sync(lambda: is_up.with_suffix(".asked").exists())
        assert not any("READY" in message for message in manager.read_all())
        is_up.touch()
        assert manager.read_until("READY")[-1]["STATUS"] == "running: 2 workers"
        job.send(signal.SIGTERM)
        job.wait()


@pytest.mark.e2e
def test_a_service_of_a_tree(manager: Manager) -> None:
    """It says that it stops while its workers still run."""
    env = {"NOTIFY_SOCKET": manager.address}
    options = ("--nproc-per-node=2", "--restart-scope=worker", "--shutdown-timeout=99")
    slow = "trap : TERM; while :; do sleep 0.01; done"
    with running_cli(*options, *BASH, slow, env=env) as job:
        manager.read_until("READY")
        job.send(signal.SIGTERM)
        stopping = manager.read_until("STOPPING")[-1]
        assert stopping["STATUS"].endswith("SIGTERM was received")
        job.repeat(signal.SIGTERM)
        assert job.wait() == 128 + signal.SIGTERM


@pytest.mark.e2e
def test_workers_do_not_speak_for_the_service(manager: Manager) -> None:
    env = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "1"}
    ended = run_cli(*BASH, 'echo "<$NOTIFY_SOCKET$WATCHDOG_USEC$WATCHDOG_PID>"', env=env)
    assert ended.out == "<>\n"


@pytest.mark.e2e
def test_the_watchdog(tmp_path: Path) -> None:
    """It gets signs while nothing happens; another process's watchdog gets none."""
    manager = Manager(str(tmp_path / "n"))
    env = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "200000"}
    with manager.socket, running_cli(*BASH, "sleep 99", env=env) as job:
        manager.read_until("READY")
        for _ in range(3):
            assert manager.read() == {"WATCHDOG": "1"}
        job.send(signal.SIGTERM)
        job.wait()


@pytest.mark.e2e
def test_a_manager_that_is_gone(tmp_path: Path) -> None:
    ended = run_cli(*BASH, "echo 1", env={"NOTIFY_SOCKET": str(tmp_path / "gone")})
    assert (ended.code, ended.out) == (0, "1\n")


@pytest.mark.parametrize(
    ("env", "is_watched"),
    [
        ({}, False),
        ({"WATCHDOG_USEC": "3000000"}, True),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "7"}, True),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "8"}, False),
        ({"WATCHDOG_USEC": "x"}, False),
        ({"WATCHDOG_USEC": "0"}, False),
    ],
)
async def test_the_variables_are_taken(
    env: dict[str, str], is_watched: bool, manager: Manager
) -> None:
    """The first sign for the watchdog comes at once."""
    env = {**env, "NOTIFY_SOCKET": manager.address}
    notifier = ServiceNotifier.take(env, pid=7)
    assert notifier is not None
    assert env == {}
    with notifier:
        assert manager.read_all() == ([{"WATCHDOG": "1"}] if is_watched else [])


@pytest.mark.parametrize("address", ["", "vsock:2:1234", "relative"])
def test_other_addresses_are_left_alone(address: str) -> None:
    assert ServiceNotifier.take({"NOTIFY_SOCKET": address}, pid=7) is None


async def test_a_node_that_waits_gets_time(manager: Manager) -> None:
    """And a manager that does not read gets the latest of each field once it reads again."""
    notifier = ServiceNotifier(manager.address, None)
    started = JobStarted(entrypoint="x", nproc_per_node=1, nnodes="2", max_restarts=0, agent_pid=1)
    forming = RoundForming(round=0, joined=1, minimum=2, maximum=2)
    for event in (started, *[forming] * 5000):
        notifier(event)
    first, *_, last = manager.read_all()
    assert first["STATUS"].startswith("run ")
    assert last["EXTEND_TIMEOUT_USEC"] == "120000000"
    assert last["STATUS"].startswith("waiting for nodes: 1 node present")
    (unsent,) = await until(manager.read_all)
    assert unsent["STATUS"] == last["STATUS"]
    notifier.__exit__()
