"""Which event loops a test runs on, and the check that it leaves nothing behind."""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import uvloop

from tests.support import etcd, redis
from tests.support.certificates import Authority, can_make_certificates
from tests.support.clock import VirtualClockLoop
from tests.support.leaks import Resources, begin_session
from tests.support.netns import why_impossible

# Each worker of pytest-xdist imports this file, so that each has a session of its own.
begin_session()
# The user's settings must not change what the tests see.  Without bytecode files each of some
# thousand processes would compile the package again.
sys.dont_write_bytecode = False
for _name in [name for name in os.environ if name.startswith("PET_")] + [
    "LOGLEVEL",
    "OMP_NUM_THREADS",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONUNBUFFERED",
    "PYTHON_EXEC",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
]:
    os.environ.pop(_name, None)

# A shell starts background jobs with these signals ignored; the tests' processes must not
# inherit that.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# A busy host may take any time for an example.
hypothesis.settings.register_profile(
    "any host", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any host")

# Control sockets of the tests' jobs, apart from those of the user's.  The paths must be short.
_control_dir = tempfile.mkdtemp(prefix="ctl-", dir="/tmp")
os.environ["ELASTIC_AIO_CONTROL_DIR"] = _control_dir
atexit.register(shutil.rmtree, _control_dir, ignore_errors=True)

# The records of the tests' runs, likewise.
_state_dir = tempfile.mkdtemp(prefix="state-", dir="/tmp")
os.environ["XDG_STATE_HOME"] = _state_dir
atexit.register(shutil.rmtree, _state_dir, ignore_errors=True)

# libuv opens a pipe for signals with its first loop and keeps it.
uvloop.new_event_loop().close()


_LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.SelectorEventLoop,
    "uvloop": uvloop.new_event_loop,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--loop`."""
    parser.addoption(
        "--loop",
        choices=[*_LOOPS, "both"],
        help="run every async test on this loop, those marked both_loops too",
    )


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return the loops that an async test runs on: asyncio's alone, unless it is marked."""
    if item.get_closest_marker("virtual_clock"):
        return {"virtual": VirtualClockLoop}
    chosen = config.getoption("loop")
    if item.get_closest_marker("black_box"):
        # It only watches other processes, so another loop would prove nothing.
        chosen = "asyncio"
    elif not chosen:
        chosen = "both" if item.get_closest_marker("both_loops") else "asyncio"
    return {name: make for name, make in _LOOPS.items() if chosen in (name, "both")}


_ENDING_THREADS = ("waitpid-", "asyncio-waitpid-", "run_in_thread", "rendezvous handler")


@pytest.fixture(autouse=True, scope="session")
def _temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the logs that failed jobs leave for their users among the files of the tests."""
    former, former_variable = tempfile.tempdir, os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("t"))
    yield
    tempfile.tempdir = former
    if former_variable is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = former_variable


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """Fail a test that leaves a process, a descriptor or a thread."""
    before = Resources()
    yield
    for thread in threading.enumerate():
        # asyncio's own on Python 3.11, one per child: it ends after its child.
        # A thread of `run_in_thread`, or one that calls a handler of torch, has delivered its
        # last result and is about to end.
        if thread.name.startswith(_ENDING_THREADS):
            thread.join(timeout=5)
    leaks = before.leaks()
    assert not leaks, f"left behind: {leaks}"


@pytest.fixture(autouse=True)
def _netns(request: pytest.FixtureRequest) -> Iterator[None]:
    """Skip the tests that are marked `netns` where they cannot run; serialize the others.

    The names of all namespaces are in one directory, which some tests compare, so the workers
    of pytest-xdist take turns.
    """
    if request.node.get_closest_marker("netns") is None:
        yield
        return
    reason = why_impossible()
    # `.ci/run` sets the variable where they must work: then the test fails instead.
    if reason and "ELASTIC_AIO_NETNS" not in os.environ:
        pytest.skip(reason)
    with Path("/tmp/elastic_aio-netns.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """A certificate authority of the test run."""
    if not can_make_certificates():
        pytest.skip("needs the openssl command")
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def etcd_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of an etcd that the tests share; each has a key prefix of its own."""
    if etcd.ETCD is None:
        pytest.skip(etcd.WHY_NOT)
    with etcd.EtcdProcess(tmp_path_factory.mktemp("etcd")) as server:
        yield server.endpoint


@pytest.fixture(scope="session")
def redis_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same for a Redis."""
    if redis.REDIS is None:
        pytest.skip(redis.WHY_NOT)
    with redis.RedisProcess(tmp_path_factory.mktemp("redis"), appends=False) as server:
        yield server.endpoint


@pytest.fixture(scope="session", autouse=True)
def _engines_first(request: pytest.FixtureRequest) -> None:
    """Start them before the first test, whose leak check they would fail otherwise."""
    for name, command in (("etcd", etcd.ETCD), ("redis", redis.REDIS)):
        is_wanted = any(
            f"{name}_endpoint" in getattr(item, "fixturenames", ())
            or name in getattr(getattr(item, "callspec", None), "params", {}).values()
            for item in request.session.items
        )
        if is_wanted and command is not None:
            request.getfixturevalue(f"{name}_endpoint")
