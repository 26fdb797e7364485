"""The core file of a worker that has crashed, and its stacks."""

from __future__ import annotations

import os
import resource
import struct
from pathlib import Path

import pytest

from elastic_aio import JobFailed, LaunchSpec, LogSpec, launch
from elastic_aio.agent import core_file
from elastic_aio.agent.core_file import core_note, expand
from tests.support.children import python, shell

PATTERN = Path("/proc/sys/kernel/core_pattern")


@pytest.mark.parametrize(
    ("pattern", "has_pid", "names"),
    [
        ("core", False, "core"),
        ("core", True, "core.42"),
        ("core.%p", True, "core.42"),
        ("core.%%p", True, "core.%p.42"),
        ("/var/crash/%e-%p-%t.core", False, "/var/crash/*-42-*.core"),
        ("%E/%P%", False, "*/*"),
        ("a*[b]?", False, "a[*][[]b][?]"),
    ],
)
def test_the_names_of_core_files(pattern: str, has_pid: bool, names: str) -> None:
    assert expand(pattern, 42, has_pid=has_pid) == names


@pytest.fixture
def pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in place of core_pattern; core_uses_pid is off."""
    path, uses_pid = tmp_path / "pattern", tmp_path / "uses_pid"
    uses_pid.write_text("0\n")
    monkeypatch.setattr(core_file, "_PATTERN", str(path))
    monkeypatch.setattr(core_file, "_USES_PID", str(uses_pid))
    return path


def core_of(pid: int) -> bytes:
    """Return a core file as the kernel begins it: one segment of notes, of which the second one is
    NT_PRPSINFO."""
    status = struct.pack("<3I8s", 5, 4, 1, b"CORE") + b"\0" * 4
    about = struct.pack("<3I8s", 5, 32, 3, b"CORE") + b"\0" * 24 + struct.pack("<2I", pid, 0)
    notes = status + about
    segment = struct.pack("<2I6Q", 4, 0, 120, 0, 0, len(notes), 0, 0)
    return (
        b"\x7fELF\2\1".ljust(32, b"\0") + struct.pack("<Q", 64).ljust(32, b"\0") + segment + notes
    )


def test_only_a_file_of_this_process_is_named(tmp_path: Path, pattern: Path) -> None:
    """The latest of this user; a name without the pid may be an earlier process's."""
    directory = tmp_path / "[50%p]"
    directory.mkdir()
    assert core_note(42, str(directory)) == ""
    pattern.write_text("core-%e\n")
    assert core_note(42, str(directory)) == ""
    for number, (name, pid) in enumerate((("old", 42), ("new", 42), ("other", 43))):
        (directory / f"core-{name}").write_bytes(core_of(pid))
        os.utime(directory / f"core-{name}", (number, number))
    (directory / "core-link").symlink_to(pattern)
    (directory / "core-directory").mkdir()
    (directory / "core-text").write_text("x" * 99)
    (directory / "core-cut").write_bytes(core_of(42)[:150])
    assert core_note(42, str(directory)) == f"core file: {directory}/core-new"
    assert core_note(44, str(directory)) == ""


@pytest.mark.parametrize(
    ("content", "note"),
    [
        ("|/usr/lib/systemd/systemd-coredump %P %u", "core dump: coredumpctl info 42"),
        ("|/usr/share/apport/apport %p", ""),
        ("", ""),
    ],
)
def test_a_program_takes_the_core(tmp_path: Path, pattern: Path, content: str, note: str) -> None:
    pattern.write_text(f"{content}\n")
    assert core_note(42, str(tmp_path)) == note


@pytest.mark.skipif(PATTERN.read_text().startswith(("|", "/")), reason="cores go elsewhere")
@pytest.mark.parametrize("limit", ["unlimited", "0"])
async def test_a_failure_names_the_core_file(tmp_path: Path, limit: str) -> None:
    if limit != "0" and resource.getrlimit(resource.RLIMIT_CORE)[1] != resource.RLIM_INFINITY:
        pytest.skip("the limit cannot be raised")
    spec = LaunchSpec(shell(f"ulimit -c {limit}; kill -SEGV $$"), cwd=tmp_path)
    with pytest.raises(JobFailed) as caught:
        await launch(spec)
    assert caught.value.root_cause is not None
    notes = [note for note in caught.value.root_cause.notes if note.startswith("core ")]
    files = [f"core file: {path}" for path in tmp_path.glob("core*")]
    assert notes == files
    assert bool(notes) == (limit != "0")


@pytest.mark.parametrize("setting", [None, "", "1"])
@pytest.mark.parametrize("signal", ["SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT"])
async def test_a_crash_leaves_a_stack(tmp_path: Path, signal: str, setting: str | None) -> None:
    """Unless the user wants none."""
    code = f"import os, signal\ndef crash(): os.kill(os.getpid(), signal.{signal})\ncrash()"
    env = {} if setting is None else {"PYTHONFAULTHANDLER": setting}
    spec = LaunchSpec(python(code), env=env, logs=LogSpec(log_dir=tmp_path, redirects=2))
    with pytest.raises(JobFailed) as caught:
        await launch(spec)
    assert caught.value.root_cause is not None
    tail = "\n".join(caught.value.root_cause.stderr_tail)
    assert ("in crash" in tail) == (setting != "")
