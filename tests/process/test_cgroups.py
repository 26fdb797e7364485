"""Cgroups of workers: where they are made, in directories that look like the kernel's."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic_aio.errors import HostError
from elastic_aio.process import cgroups, proc
from elastic_aio.process.cgroups import Cgroup, own_directory
from tests.support.leaks import alive

LIMITS = {"memory.max": "1000", "pids.max": "7"}


class Kernel:
    """A cgroup in a directory; `refuses` are files of it that cannot be written, and why."""

    def __init__(self, path: Path, available: str, enabled: str = "") -> None:
        self.path = path
        self.procs = [os.getpid(), 4242]
        self.written: list[tuple[str, str]] = []
        self.refuses: dict[str, int] = {}
        path.mkdir()
        (path / "cgroup.controllers").write_text(f"{available}\n")
        (path / "cgroup.subtree_control").write_text(f"{enabled}\n")

    def write(self, path: str, text: str) -> None:
        name = os.path.relpath(path, self.path)
        name = re.sub(r"elastic_aio-\d+-\d+", "group", name)
        if number := self.refuses.get(name):
            raise OSError(number, os.strerror(number), path)
        if name == "cgroup.subtree_control" and self.procs:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        if name.endswith("cgroup.procs"):
            self.procs.remove(int(text))
        self.written.append((name, text))

    def make(self, files: dict[str, str] = LIMITS, own: str = "") -> Cgroup:
        child = SimpleNamespace(pid=4242)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cgroups, "own_directory", lambda: str(self.path / own))
            patch.setattr(proc, "iter_descendants", lambda pid: [child])
            return Cgroup.make(files)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A delegated cgroup with this process and a child."""
    made = Kernel(tmp_path / "delegated", "cpu memory pids")
    monkeypatch.setattr(cgroups, "_write", made.write)
    return made


async def test_the_launcher_makes_room_for_the_workers(kernel: Kernel) -> None:
    """The kernel refuses controllers below a cgroup with processes."""
    group = kernel.make()
    assert kernel.written == [
        ("launcher/cgroup.procs", "4242"),
        ("launcher/cgroup.procs", str(os.getpid())),
        ("cgroup.subtree_control", "+memory +pids"),
        ("group/memory.max", "1000"),
        ("group/pids.max", "7"),
    ]
    assert os.path.dirname(group.path) == str(kernel.path)
    await group.aclose()
    assert not os.path.exists(group.path)


def test_what_is_enabled_stays_as_it_is(kernel: Kernel) -> None:
    (kernel.path / "cgroup.subtree_control").write_text("memory pids\n")
    kernel.make()
    assert [name for name, _ in kernel.written] == ["group/memory.max", "group/pids.max"]


def test_a_launcher_that_has_moved_aside_stays_there(kernel: Kernel) -> None:
    """The next job of the program, and a job of its worker, are beside it."""
    (kernel.path / "cgroup.subtree_control").write_text("memory pids\n")
    (kernel.path / "launcher").mkdir()
    assert os.path.dirname(kernel.make(own="launcher").path) == str(kernel.path)


@pytest.mark.parametrize(
    ("name", "number", "message"),
    [
        ("cgroup.subtree_control", errno.EACCES, "limits.memory_max: cannot write {}: permission"),
        ("launcher/cgroup.procs", errno.EACCES, "limits.memory_max: cannot write {}: permission"),
        ("group/pids.max", errno.EINVAL, "limits.pids_max: cannot write "),
    ],
)
def test_a_refusal_names_the_file(kernel: Kernel, name: str, number: int, message: str) -> None:
    """And what delegates a cgroup; nothing is left."""
    kernel.refuses = {name: number}
    with pytest.raises(HostError) as caught:
        kernel.make()
    assert str(caught.value).startswith(message.format(kernel.path / name))
    assert "systemd-run --user --scope -p Delegate=yes" in str(caught.value)
    assert not [*kernel.path.glob("elastic_aio-*")]


def test_other_processes_in_the_cgroup_are_left_alone(kernel: Kernel) -> None:
    """A shell, for example, whose cgroup was never delegated."""
    kernel.procs.append(1)
    with pytest.raises(HostError, match=r"cgroup\.subtree_control: device or resource busy"):
        kernel.make()
    assert kernel.procs == [1]


def test_a_controller_that_is_missing(kernel: Kernel) -> None:
    with pytest.raises(HostError, match=r"^limits\.io_max: the controller 'io' is not in /"):
        kernel.make({"io.max": "1"})


def test_cgroups_of_killed_launchers_are_removed(kernel: Kernel) -> None:
    """With what their workers have made in them; not those of launchers that run."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    for name in (f"elastic_aio-{gone.pid}-0/inner", f"elastic_aio-{os.getpid()}-x", "mine"):
        (kernel.path / name).mkdir(parents=True)
    kernel.make()
    left = {path.name for path in kernel.path.iterdir()} - {"launcher"}
    assert f"elastic_aio-{gone.pid}-0" not in left
    assert {"mine", f"elastic_aio-{os.getpid()}-x"} <= left


async def test_the_kernel_kills_what_is_in_a_cgroup() -> None:
    """A process that hides in a session of its own, without parent and environment, too."""
    try:
        group = Cgroup.make({})
    except HostError as error:
        pytest.skip(str(error))
    hiding = f"echo $$ > {group.path}/cgroup.procs; (setsid env -i sleep 99 > /dev/null & echo $!)"
    pid = int(subprocess.run(["sh", "-c", hiding], stdout=subprocess.PIPE, check=True).stdout)
    os.mkdir(f"{group.path}/inner")
    assert str(pid) in Path(group.path, "cgroup.procs").read_text().split()
    await group.aclose()
    assert not os.path.exists(group.path)
    assert not alive(pid)
    assert own_directory() == os.path.dirname(group.path)
    await asyncio.sleep(0)
