"""Checks of the host and the process, and what the workers get from them."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_aio.agent import preflight
from elastic_aio.agent.preflight import (
    check_runnable,
    check_start,
    device_env,
    free_port,
    hostname,
    resolve_nproc,
    worker_argv,
    worker_cpus,
)
from elastic_aio.errors import HostError, SpawnError, SpecError
from elastic_aio.hardware import host as hardware
from elastic_aio.hardware.cpus import Cpus, Topology
from elastic_aio.hardware.host import Accelerator
from elastic_aio.process.children import Child, ChildSpec, check_sigchld
from elastic_aio.spec.job import Command, LaunchSpec, Module, Script
from elastic_aio.spec.logs import LogSpec, StdMap

PROCESSORS = len(os.sched_getaffinity(0))


async def test_limits_that_a_worker_would_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are tried by a process; another problem of that says nothing about the worker."""

    async def refuse(spec: ChildSpec) -> Child:
        raise SpawnError(message, permanent=True, exit_code=126)

    spec = LaunchSpec(["sleep", "9"], limits={"nice": 5})
    await check_start(spec)
    monkeypatch.setattr(preflight, "command_spawner", lambda loop: refuse)
    message = "limits.nice: operation not permitted"
    with pytest.raises(SpecError, match=r"^limits: limits.nice: operation not permitted .got 'sle"):
        await check_start(spec)
    message = "cannot run true: command not found"
    await check_start(spec)
    await check_start(spec.replace(limits=None))


def test_a_number_is_a_number() -> None:
    """What was asked for is what is started."""
    assert resolve_nproc(LaunchSpec("x.py", nproc_per_node=5)) == 5


def test_cpu_counts_the_processors_we_may_use() -> None:
    """Not all processors of the host."""
    assert resolve_nproc(LaunchSpec("x.py", nproc_per_node="cpu")) == PROCESSORS


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[Accelerator]:
    """The visible devices of a simulated host, of any kind."""
    found = [Accelerator(f"0000:0{number}:00.0") for number in range(3)]
    monkeypatch.setattr(preflight, "visible_accelerators", lambda spec, word: found)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return found


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("word", ["auto", "gpu", "xpu", "npu"])
def test_words_count_devices(word: str) -> None:
    """With devices there is a worker for each of them."""
    assert resolve_nproc(LaunchSpec("x.py", nproc_per_node=word)) == 3
    assert resolve_nproc(LaunchSpec("x.py", nproc_per_node="cpu")) == PROCESSORS


@pytest.mark.parametrize(
    ("word", "kind"), [("gpu", "NVIDIA or AMD"), ("xpu", "Intel"), ("mlu", "mlu")]
)
def test_without_devices(devices: list[Accelerator], word: str, kind: str) -> None:
    """`auto` takes the processors; other words are refused with the alternatives."""
    devices.clear()
    assert resolve_nproc(LaunchSpec("x.py", nproc_per_node="auto")) == PROCESSORS
    problem = rf"^nproc_per_node: no {kind} device is visible; use a number, .* \(got '{word}'\)$"
    with pytest.raises(SpecError, match=problem):
        resolve_nproc(LaunchSpec("x.py", nproc_per_node=word))


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two plug-ins that count devices: "wave", and "broken"."""
    directory = tmp_path / "wave-1.0.dist-info"
    directory.mkdir()
    (directory / "METADATA").write_text("Metadata-Version: 2.1\nName: wave\nVersion: 1.0\n")
    (directory / "entry_points.txt").write_text(
        f"[{preflight.ACCELERATORS}]\nwave = wave_devices:count\nbroken = wave_devices:fail\n"
    )
    (tmp_path / "wave_devices.py").write_text(
        "def count(): return 5\ndef fail(): raise OSError('no driver')"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("plugins")
def test_plugins_count_other_devices() -> None:
    """A word that is no plug-in is refused with all words that are known."""
    assert resolve_nproc(LaunchSpec("x.py", nproc_per_node="wave")) == 5
    with pytest.raises(SpecError, match=r"the plug-in raised OSError\('no driver'\)"):
        resolve_nproc(LaunchSpec("x.py", nproc_per_node="broken"))
    with pytest.raises(SpecError, match=r"auto, broken, cpu, gpu, .*, wave, xpu"):
        resolve_nproc(LaunchSpec("x.py", nproc_per_node="two"))


@pytest.mark.usefixtures("devices")
def test_ranks_of_the_logs_are_checked_when_the_number_is_known() -> None:
    """A tee of a rank that `auto` did not give is refused."""
    logs = LogSpec(tee=StdMap.parse("tee", "3:1"))
    with pytest.raises(SpecError, match=r"^logs\.tee: local ranks must be from 0 to 2 \(got 3\)$"):
        resolve_nproc(LaunchSpec("x.py", nproc_per_node="auto", logs=logs))


def test_each_virtual_rank_needs_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that is too short is refused before any worker starts."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    spec = LaunchSpec("x.py", nproc_per_node=2, virtual_local_rank=True)
    assert resolve_nproc(spec) == 2
    assert device_env(spec, 1) == {"CUDA_VISIBLE_DEVICES": "7"}
    with pytest.raises(
        SpecError, match=r"^virtual_local_rank: .* local rank 2, and CUDA_VISIBLE_DEVICES is '4,7'"
    ):
        resolve_nproc(spec.replace(nproc_per_node=3))


def test_workers_are_bound_near_their_devices(
    devices: list[Accelerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the NUMA nodes of the devices; without devices only "cpu" can be used."""
    cpus = Cpus(os.sched_getaffinity(0))
    monkeypatch.setattr(hardware, "numa_node", lambda device: 0)
    host = Topology({0: cpus, 1: Cpus({max(cpus) + 1})}, {}, {}, {})
    monkeypatch.setattr(hardware, "read_topology", lambda cpus: host)
    spec = LaunchSpec("x.py", nproc_per_node=3, numa_binding="node")
    assert worker_cpus(spec, 3) == [cpus] * 3
    assert worker_cpus(spec.replace(numa_binding=None), 3) == []
    devices.clear()
    with pytest.raises(SpecError, match=r"^numa_binding: .*'cpu' needs none \(got 'node'\)$"):
        worker_cpus(spec, 3)


@pytest.fixture
def child_signal() -> Iterator[None]:
    """Put back what SIGCHLD did."""
    former = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, former)


@pytest.mark.usefixtures("child_signal")
def test_ignored_child_signals_are_refused() -> None:
    """Where the kernel reaps, no exit status can be had."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    check_sigchld()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with pytest.raises(HostError, match=r"^SIGCHLD is ignored in this process, so"):
        check_sigchld()


@pytest.mark.parametrize(
    ("entrypoint", "settings", "argv"),
    [
        (Script("x.py"), {}, (sys.executable, "-u", "x.py")),
        (Script("x.py"), {"args": ["a", 1]}, (sys.executable, "-u", "x.py", "a", "1")),
        (Module("m.n"), {"args": ["-v"]}, (sys.executable, "-u", "-m", "m.n", "-v")),
        (Script("x.py"), {"python": "/opt/py"}, ("/opt/py", "-u", "x.py")),
        (Command(("prog", "-x")), {"args": ["y"]}, ("prog", "-x", "y")),
        (
            Command(("prog", "r${local_rank}")),
            {"args": ["--rank=${local_rank}/${local_rank}"]},
            ("prog", "r3", "--rank=3/3"),
        ),
        (
            Command(("${local_rank}", "$$", "$local_rank", "${rank}", "${LOCAL_RANK}")),
            {},
            ("${local_rank}", "$$", "$local_rank", "${rank}", "${LOCAL_RANK}"),
        ),
    ],
)
def test_each_worker_has_its_command(
    entrypoint: Any, settings: dict[str, Any], argv: tuple[str, ...]
) -> None:
    """Only `${local_rank}` in arguments is replaced."""
    assert worker_argv(LaunchSpec(entrypoint, **settings), 3) == argv


def test_a_script_must_be_there(tmp_path: Path) -> None:
    """A script that Python would not find fails before any worker starts, with code 127."""
    spec = LaunchSpec(str(tmp_path / "missing.py"))
    with pytest.raises(SpawnError, match=r"^script not found: .*/missing\.py$") as caught:
        check_runnable(spec)
    assert (caught.value.permanent, caught.value.exit_code) == (True, 127)


def test_a_directory_needs_a_main(tmp_path: Path) -> None:
    """Python runs a directory with __main__.py and nothing else: 126."""
    with pytest.raises(
        SpawnError, match=r"^script is a directory without __main__\.py: "
    ) as caught:
        check_runnable(LaunchSpec(str(tmp_path)))
    assert (caught.value.permanent, caught.value.exit_code) == (True, 126)
    (tmp_path / "__main__.py").write_text("")
    check_runnable(LaunchSpec(str(tmp_path)))


def test_a_relative_script_is_looked_for_where_the_workers_run(tmp_path: Path) -> None:
    """The working directory of the workers counts, not ours."""
    (tmp_path / "x.py").write_text("")
    check_runnable(LaunchSpec("x.py", cwd=tmp_path))
    with pytest.raises(SpawnError, match=r"^script not found: x\.py$"):
        check_runnable(LaunchSpec("x.py", cwd="/"))


def test_a_program_in_the_place_of_a_script(tmp_path: Path) -> None:
    """The message says how it is run."""
    with pytest.raises(SpawnError, match=r"^script not found: sh; .* needs --no-python "):
        check_runnable(LaunchSpec("sh", cwd=tmp_path))


@pytest.mark.parametrize("entrypoint", [Module("no.such.module"), Command(("no-such-program",))])
def test_modules_and_commands_are_left_to_the_spawn(entrypoint: Any) -> None:
    """Only a script's path can be checked without running it."""
    check_runnable(LaunchSpec(entrypoint))


def test_a_missing_working_directory_is_left_to_the_spawn() -> None:
    """Spawning says better what is wrong."""
    check_runnable(LaunchSpec("x.py", cwd="/no/such/directory"))


@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_a_free_port_can_be_bound(family: socket.AddressFamily, address: str) -> None:
    """No process listens there, on IPv4 or IPv6."""
    port = free_port()
    assert 1024 <= port < 65536
    with socket.socket(family) as one:
        if family is socket.AF_INET or socket.has_dualstack_ipv6():
            one.bind((address, port))
            assert one.getsockname()[1] == port


def test_the_name_of_the_node_is_the_hosts() -> None:
    """No name server is asked."""
    assert hostname() == socket.gethostname() != ""
