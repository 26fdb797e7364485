"""Where the workers' output goes, byte by byte."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import resource
import select
import signal
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import (
    Agent,
    AttemptFailed,
    ConsoleLost,
    Event,
    JobFailed,
    LaunchResult,
    LaunchSpec,
    LogDiskFull,
    LogSpec,
    OutputLost,
    launch,
)
from elastic_aio.agent.preflight import hostname
from elastic_aio.logs.paths import NodeRecord
from elastic_aio.logs.tee import Tee
from elastic_aio.spec.logs import LogDestinations, LogLayout, LogLayoutContext, Std
from tests.support.children import DEADLINE_S, file_console, python, shell, until
from tests.support.leaks import open_descriptors
from tests.support.memory import peak_growth
from tests.support.restarts import AT_ONCE

BOTH = 'echo "out $RANK"; echo "err $RANK" >&2'


async def shown(
    directory: Path, entrypoint: list[str], *, nproc: int = 1, restarts: int = 0, **logs: Any
) -> tuple[bytes, bytes, LaunchResult]:
    """Run a job; return what its console got, and the result."""
    logs = {"log_dir": str(directory / "logs"), **logs}
    spec = LaunchSpec(
        entrypoint, nproc_per_node=nproc, max_restarts=restarts, logs=LogSpec(**logs), run_id="run",
        env={"NOTES": str(directory)}, restart=AT_ONCE,
    )  # fmt: skip
    with file_console(directory) as console:
        try:
            result = await launch(spec, console=console)
        except JobFailed as error:
            result = error.result
    return (directory / "out").read_bytes(), (directory / "err").read_bytes(), result


def files(result: LaunchResult) -> dict[str, bytes]:
    """Return the files of the workers of a run by their path in its directory."""
    assert result.log_dir is not None
    root = Path(result.log_dir)
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.parent != root
    }


async def test_redirects_go_to_files_only(tmp_path: Path) -> None:
    """A redirected stream is in its file, and nothing is on the console."""
    out, err, result = await shown(tmp_path, shell(BOTH), nproc=2, redirects=3)
    assert (out, err) == (b"", b"")
    assert files(result) == {
        "attempt_0/0/stdout.log": b"out 0\n",
        "attempt_0/0/stderr.log": b"err 0\n",
        "attempt_0/1/stdout.log": b"out 1\n",
        "attempt_0/1/stderr.log": b"err 1\n",
    }


async def test_tee_goes_to_both(tmp_path: Path) -> None:
    """A tee'd stream is in its file as it was, and on the right console stream with a prefix."""
    out, err, result = await shown(tmp_path, shell(BOTH), nproc=2, tee=3)
    assert sorted(out.splitlines()) == [b"[default0]:out 0", b"[default1]:out 1"]
    assert sorted(err.splitlines()) == [b"[default0]:err 0", b"[default1]:err 1"]
    assert files(result)["attempt_0/1/stderr.log"] == b"err 1\n"


@pytest.mark.parametrize("on_full", ["fail", "console"])
async def test_joined_streams_keep_their_order(on_full: str, tmp_path: Path) -> None:
    """In one file, on standard output, and for a reader, also when a relay takes them."""
    script = "for i in 0 1 2 3 4 5 6 7 8 9; do echo out $i; echo err $i >&2; done"
    logs: dict[str, Any] = {"tee": 3, "streams": "joined", "on_full": on_full}
    out, err, result = await shown(tmp_path, shell(script), **logs)
    lines = [f"{kind} {i}" for i in range(10) for kind in ("out", "err")]
    assert out.decode().splitlines() == [f"[default0]:{line}" for line in lines]
    assert err == b""
    assert files(result) == {"attempt_0/0/output.log": "\n".join([*lines, ""]).encode()}
    (worker,) = result.attempts[0].workers
    assert worker.stdout_path == worker.stderr_path


@pytest.mark.parametrize(
    ("mask", "chosen"),
    [
        ("1", {"stdout": range(12), "stderr": []}),
        ("2", {"stdout": [], "stderr": range(12)}),
        ("0-3:3,10:1", {"stdout": [0, 1, 2, 3, 10], "stderr": [0, 1, 2, 3]}),
        ("11:2", {"stdout": [], "stderr": [11]}),
    ],
)
async def test_masks_for_any_rank(mask: str, chosen: dict[str, list[int]], tmp_path: Path) -> None:
    """Masks choose streams of ranks of any size, by single ranks and ranges."""
    out, err, _ = await shown(tmp_path, shell(BOTH), nproc=12, redirects="3", tee=mask)
    assert sorted(re.findall(rb"^\[default(\d+)\]:", out, re.MULTILINE), key=int) == [
        b"%d" % rank for rank in chosen["stdout"]
    ]
    assert sorted(re.findall(rb"^\[default(\d+)\]:", err, re.MULTILINE), key=int) == [
        b"%d" % rank for rank in chosen["stderr"]
    ]


async def test_redirects_and_tee_are_a_union(tmp_path: Path) -> None:
    """`-t 1 -r 2`: stdout is shown and kept, stderr is kept."""
    out, err, result = await shown(tmp_path, shell(BOTH), tee=1, redirects=2)
    assert (out, err) == (b"[default0]:out 0\n", b"")
    assert set(files(result)) == {"attempt_0/0/stdout.log", "attempt_0/0/stderr.log"}


async def test_the_filter_mutes_ranks(tmp_path: Path) -> None:
    """Ranks out of the filter are kept in full, but not shown."""
    out, err, result = await shown(
        tmp_path, shell(BOTH), nproc=3, tee=3, local_ranks_filter=frozenset({1})
    )
    assert (out, err) == (b"[default1]:out 1\n", b"[default1]:err 1\n")
    assert files(result)["attempt_0/2/stdout.log"] == b"out 2\n"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, r"\[default1\]:x"),
        ("", r"\[default1\]:x"),
        ("<${role_name}/${role}/${rank}/${local_rank}>", r"<default/default/1/1>x"),
        ("${attempt} ${stream} ${nope} $$ ", r"0 stdout \${nope} \$ x"),
        ("${host}|", r"[^|]+\|x"),
        ("${timestamp} ", r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} x"),
    ],
)
async def test_prefix_templates(template: str | None, expected: str, tmp_path: Path) -> None:
    """The template's variables are replaced, unknown ones stay, `$$` is a dollar."""
    out, _, _ = await shown(tmp_path, ["echo", "x"], nproc=2, tee="1:1", prefix=template)
    lines = out.decode().splitlines()
    assert any(re.fullmatch(expected, line) for line in lines), lines


async def test_nothing_is_overwritten_by_restarts(tmp_path: Path) -> None:
    """Three attempts have three directories with their own files, error files included."""
    script = 'echo "attempt $TORCHELASTIC_RESTART_COUNT"; '
    script += 'echo junk > "$TORCHELASTIC_ERROR_FILE"; exit 1'
    out, _, result = await shown(tmp_path, shell(script), restarts=2, tee=1)
    assert files(result) == {
        f"attempt_{number}/0/{name}": content
        for number in range(3)
        for name, content in [("stdout.log", b"attempt %d\n" % number), ("error.json", b"junk\n")]
    }
    assert out.splitlines() == [b"[default0]:attempt %d" % number for number in range(3)]
    assert [attempt.log_dir for attempt in result.attempts] == [
        f"{result.log_dir}/attempt_{number}" for number in range(3)
    ]


async def test_two_runs_of_one_name_have_two_directories(tmp_path: Path) -> None:
    """The same run id twice in one log directory overwrites nothing."""
    _, _, first = await shown(tmp_path, ["echo", "1"], redirects=1)
    _, _, second = await shown(tmp_path, ["echo", "2"], redirects=1)
    assert first.log_dir != second.log_dir
    host = hostname().partition(".")[0]
    assert Path(first.log_dir or "").name.startswith(f"run_{host}_")
    assert files(first) == {"attempt_0/0/stdout.log": b"1\n"}


async def test_a_log_directory_says_which_node_it_is_of(tmp_path: Path) -> None:
    """Nodes of one job may share a file system."""
    began = time.time()
    _, _, result = await shown(tmp_path, ["echo", "1"], redirects=1)
    node = NodeRecord.decode((Path(result.log_dir or "") / "node.json").read_bytes())
    assert (node.run_id, node.host, node.pid) == ("run", hostname(), os.getpid())
    assert (node.node_rank, node.group_rank) == (None, 0)
    assert began <= node.started_at <= time.time()
    spec = LaunchSpec(["echo", "1"], logs=LogSpec(redirects=1))
    result = await launch(spec)
    assert not (Path(result.log_dir or "") / "node.json").exists()  # a temporary directory


@pytest.fixture
def temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make temporary files in a directory of the test's own."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


@pytest.mark.parametrize("entrypoint", [["true"], ["false"], ["no_such_program_here"]])
async def test_no_temporary_directory_is_left(
    entrypoint: list[str], temporary_directory: Path
) -> None:
    """Nothing stays among the temporary files when nothing was logged."""
    spec = LaunchSpec(entrypoint, nproc_per_node=3, max_restarts=1)
    try:
        await launch(spec)
    except JobFailed:
        pass
    assert list(temporary_directory.iterdir()) == []


async def test_empty_temporary_logs_are_removed(temporary_directory: Path) -> None:
    """Redirected streams that stayed empty leave no directory either."""
    result = await launch(LaunchSpec(["true"], logs=LogSpec(redirects=3)))
    assert list(temporary_directory.iterdir()) == []
    assert (result.log_dir, result.attempts[0].log_dir) == (None, None)


async def test_temporary_logs_stay_when_there_are_some(temporary_directory: Path) -> None:
    """What was logged without a chosen directory is kept, and the result says where."""
    result = await launch(LaunchSpec(["echo", "x"], logs=LogSpec(redirects=3)))
    (directory,) = temporary_directory.iterdir()
    assert result.log_dir == str(directory)


async def test_an_error_file_without_logs_is_kept(temporary_directory: Path) -> None:
    """The report's error file is still there after the job."""
    script = 'echo \'{"message": "sad"}\' > $TORCHELASTIC_ERROR_FILE; exit 1'
    with pytest.raises(JobFailed) as caught:
        await launch(LaunchSpec(shell(script)))
    error = caught.value.failures[0].error
    assert error is not None
    assert error.message == "sad"
    assert Path(error.path).exists()
    assert Path(error.path).is_relative_to(temporary_directory)


async def test_whole_lines_only(tmp_path: Path) -> None:
    """Two ranks that write lines in pieces never break or glue each other's lines."""
    script = python(
        """
import os, time
rank = os.environ["RANK"]
for number in range(200):
    for piece in (f"rank {rank} ", f"says {number} ", "and ", "ends\\n"):
        os.write(1, piece.encode())
        if number % 50 == 0:
            time.sleep(0.002)
"""
    )
    out, _, _ = await shown(tmp_path, script, nproc=2, tee=1)
    lines = out.decode().splitlines()
    for rank in range(2):
        assert [line for line in lines if line.startswith(f"[default{rank}]:")] == [
            f"[default{rank}]:rank {rank} says {number} and ends" for number in range(200)
        ]
    assert len(lines) == 400


async def test_a_line_that_is_not_finished_yet_is_not_shown(tmp_path: Path) -> None:
    """An unfinished line waits for its end; a finished one is shown at once."""
    script = 'echo whole; printf half; until [ -e "$NOTES/go" ]; do sleep 0.01; done; echo " done"'
    logs = LogSpec(log_dir=str(tmp_path / "logs"), tee=1)
    spec = LaunchSpec(shell(script), logs=logs, env={"NOTES": str(tmp_path)})
    with file_console(tmp_path) as console:
        async with Agent(spec, console=console) as agent:
            await until(lambda: (tmp_path / "out").read_bytes() == b"[default0]:whole\n")
            log = next((tmp_path / "logs").rglob("stdout.log"))
            await until(lambda: log.read_bytes() == b"whole\nhalf")
            assert (tmp_path / "out").read_bytes() == b"[default0]:whole\n"
            (tmp_path / "go").touch()
            await agent.wait()
    assert (tmp_path / "out").read_bytes() == b"[default0]:whole\n[default0]:half done\n"


async def test_a_last_line_without_newline_gets_one(tmp_path: Path) -> None:
    """It is shown as a line of its own; the file stays as it was written."""
    out, _, result = await shown(tmp_path, shell("printf 'a\\nb'"), nproc=2, tee=1)
    assert sorted(out.splitlines(keepends=True)) == [
        b"[default0]:a\n", b"[default0]:b\n", b"[default1]:a\n", b"[default1]:b\n",
    ]  # fmt: skip
    assert files(result)["attempt_0/0/stdout.log"] == b"a\nb"


async def test_characters_are_never_split(tmp_path: Path) -> None:
    """A character written byte by byte arrives as one."""
    script = python(
        """
import os, time
for byte in "naïve 漢字 🚀\\n".encode():
    os.write(1, bytes([byte]))
    time.sleep(0.001)
"""
    )
    out, _, _ = await shown(tmp_path, script, tee=1)
    assert out.decode() == "[default0]:naïve 漢字 🚀\n"


async def test_any_bytes_will_do(tmp_path: Path) -> None:
    """What is no text is shown and kept byte for byte."""
    script = python("import os; os.write(1, bytes(b for b in range(256) if b != 13) + b'\\n')")
    raw = bytes(b for b in range(256) if b != 13) + b"\n"
    out, _, result = await shown(tmp_path, script, tee=1)
    assert files(result)["attempt_0/0/stdout.log"] == raw
    assert out.replace(b"[default0]:", b"") == raw


async def test_carriage_returns_into_a_file(tmp_path: Path) -> None:
    """Of a progress bar the last state is shown, and few of those before."""
    script = python(
        """
import os, time
for number in range(300):
    os.write(1, b"\\r%3d%%" % (number // 3))
    time.sleep(0.001)
os.write(1, b"\\r100%\\n")
"""
    )
    out, _, result = await shown(tmp_path, script, tee=1)
    lines = out.decode().splitlines()
    assert lines[-1] == "[default0]:100%"
    assert 1 <= len(lines) <= 4
    assert all(re.fullmatch(r"\[default0\]:\s*\d+%", line) for line in lines)
    assert files(result)["attempt_0/0/stdout.log"].count(b"\r") == 301


TEE = """
import os
from elastic_aio import LaunchSpec, LogSpec, launch

async def main(log_dir, *argv):
    out = os.open("out", os.O_WRONLY | os.O_CREAT)
    await launch(LaunchSpec([*argv], logs=LogSpec(log_dir=log_dir, tee=1)), console=(out, 2))
"""


@pytest.mark.slow
def test_a_very_long_line(tmp_path: Path) -> None:
    """A line of 64 MiB arrives whole, without being held in memory."""
    size = 64 * 2**20
    script = python(
        "import os; block = b'x' * 2**20\n"
        "for _ in range(64): os.write(1, block)\n"
        "os.write(1, b'\\nafter\\n')"
    )
    assert peak_growth(TEE, tmp_path / "logs", *script, cwd=tmp_path) < 8 * 2**20
    shown_size = (tmp_path / "out").stat().st_size
    assert shown_size == len("[default0]:") + size + 1 + len("[default0]:after\n")
    with (tmp_path / "out").open("rb") as file:
        assert file.read(12) == b"[default0]:x"
        file.seek(-19, os.SEEK_END)
        assert file.read() == b"x\n[default0]:after\n"


async def test_output_of_a_grandchild(tmp_path: Path) -> None:
    """What a grandchild writes after its parent's exit is shown as well."""
    script = "(trap 'echo late; exit' TERM; : > $NOTES/ready; sleep 99 & wait) &"
    script += ' until [ -e "$NOTES/ready" ]; do :; done; echo early'
    out, _, _ = await shown(tmp_path, shell(script), tee=1)
    assert out == b"[default0]:early\n[default0]:late\n"


async def test_the_last_output_of_a_crashing_worker(tmp_path: Path) -> None:
    """Everything that a worker wrote before it died is shown when the job is over."""
    script = python(
        "import os, signal\n"
        "os.write(2, b''.join(b'line %d\\n' % n for n in range(20000)) + b'last words')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    _, err, result = await shown(tmp_path, script, tee=2)
    lines = err.splitlines()
    assert len(lines) == 20001
    assert lines[-1] == b"[default0]:last words"
    assert result.failures[0].stderr_tail[-2:] == ("line 19999", "last words")
    assert len(result.failures[0].stderr_tail) <= 20


async def test_much_output_of_many(tmp_path: Path) -> None:
    """Nothing is lost when four workers write as fast as they can."""
    script = shell('for ((i = 0; i < 5000; i++)); do echo "$RANK $i"; done')
    out, _, _ = await shown(tmp_path, script, nproc=4, tee=1)
    lines = out.decode().splitlines()
    for rank in range(4):
        prefix = f"[default{rank}]:"
        assert [line.removeprefix(prefix) for line in lines if line.startswith(prefix)] == [
            f"{rank} {i}" for i in range(5000)
        ]


async def test_a_closed_console_changes_nothing(tmp_path: Path) -> None:
    """With a console that takes nothing the job ends as ever, and its files are complete."""
    reading, writing = os.pipe()
    os.close(reading)
    logs = LogSpec(log_dir=str(tmp_path / "logs"), tee=3)
    spec = LaunchSpec(shell(BOTH), nproc_per_node=2, logs=logs)
    try:
        async with Agent(spec, console=(writing, writing)) as agent:
            result = await agent.wait()
            events = [event async for event in agent.events()]
    finally:
        os.close(writing)
    assert result.exit_code == 0
    assert files(result)["attempt_0/0/stdout.log"] == b"out 0\n"
    lost = [event for event in events if type(event).__name__ == "ConsoleLost"]
    # Both streams go to one pipe, which is lost once.
    assert [event.stream for event in lost] == ["stdout"]  # type: ignore[attr-defined]  # ConsoleLost


def in_use(path: Path) -> Callable[[], bool]:
    """Return a condition: the file has some content."""
    return lambda: path.exists() and path.stat().st_size > 0


async def test_a_worker_that_truncates_its_own_log(tmp_path: Path) -> None:
    """A log that starts over is followed from its new start."""
    script = 'echo one; until [ -s "$NOTES/out" ]; do sleep 0.01; done;'
    script += " : > /proc/$$/fd/1; echo 2; sleep 0.1"
    out, _, _ = await shown(tmp_path, shell(script), tee=1)
    assert out == b"[default0]:one\n[default0]:2\n"


async def test_lines_that_replace_the_log_are_shown(tmp_path: Path) -> None:
    """`echo text > /dev/stdout` truncates the log each time: every text is shown, once.

    The worker waits for each line, since a text that is replaced too early is gone.
    """
    script = """
shown=0
for line in "line 1" "line 2" "line 2" x "line 3"; do
  echo "$line" > /dev/stdout; shown=$((shown + 1))
  until [ "$(wc -l < "$NOTES/out")" -ge $shown ]; do sleep 0.01; done
done
"""
    events: list[Event] = []
    spec = LaunchSpec(
        shell(script), logs=LogSpec(log_dir=tmp_path / "logs", tee=1), env={"NOTES": str(tmp_path)}
    )
    with file_console(tmp_path) as console:
        async with asyncio.timeout(DEADLINE_S):
            await launch(spec, console=console, listeners=[events.append])
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines == [f"[default0]:{text}" for text in ("line 1", *["line 2"] * 2, "x", "line 3")]
    (lost,) = (event for event in events if isinstance(event, OutputLost))
    assert (lost.stream, lost.rank, lost.lost) == ("stdout", 0, None)
    assert lost.path.endswith("attempt_0/0/stdout.log")


@pytest.mark.parametrize(
    ("last", "lines"), [("touch", ["text"]), ("echo text >", ["text", "text"])]
)
async def test_a_log_that_changes_at_the_end(last: str, lines: list[str], tmp_path: Path) -> None:
    """Its time alone, or its content too: only the second is a truncation."""
    script = f'echo text; until [ -s "$NOTES/out" ]; do sleep 0.01; done; {last} /proc/$$/fd/1'
    events: list[Event] = []
    spec = LaunchSpec(
        shell(script), logs=LogSpec(log_dir=tmp_path / "logs", tee=1), env={"NOTES": str(tmp_path)}
    )
    with file_console(tmp_path) as console:
        await launch(spec, console=console, listeners=[events.append])
    assert (tmp_path / "out").read_text() == "".join(f"[default0]:{line}\n" for line in lines)
    assert sum(isinstance(event, OutputLost) for event in events) == len(lines) - 1


@pytest.mark.both_loops
async def test_a_console_that_blocks_when_no_descriptor_is_left(tmp_path: Path) -> None:
    """All lines are shown as soon as the console takes them."""
    reader, writer = os.pipe()
    script = 'until [ -e "$NOTES/go" ]; do sleep 0.01; done; for ((i = 0; i < 5000; i++)); do'
    script += ' printf "%0100d\n" $i; done; : > "$NOTES/written"'
    logs = LogSpec(log_dir=tmp_path / "logs", tee=1)
    spec = LaunchSpec(shell(script), logs=logs, env={"NOTES": str(tmp_path)})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    loop = asyncio.get_running_loop()
    shown_bytes = bytearray()
    try:
        async with Agent(spec, console=(writer, 2)) as agent:
            await until(lambda: agent.forward_signal(signal.SIGCONT))
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            try:
                (tmp_path / "go").mkdir()
                await until((tmp_path / "written").exists)
                await until(lambda: is_full(writer), "the pipe is full")
                loop.add_reader(reader, lambda: shown_bytes.extend(os.read(reader, 65536)))
                await until(lambda: shown_bytes.count(b"\n") == 5000)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await agent.wait()
            events = [event async for event in agent.events()]
    finally:
        loop.remove_reader(reader)
        os.close(reader)
        os.close(writer)
    lines = bytes(shown_bytes).splitlines()
    assert lines == [b"[default0]:%0100d" % number for number in range(5000)]
    assert not any(isinstance(event, ConsoleLost | OutputLost) for event in events)


def is_full(writer: int) -> bool:
    """Whether a pipe takes no more bytes."""
    poller = select.poll()
    poller.register(writer, select.POLLOUT)
    return not poller.poll(0)


def say(text: str) -> None:
    """A function whose worker prints a line."""
    print(text, flush=True)


@pytest.mark.slow
@pytest.mark.both_loops
@pytest.mark.parametrize("start_method", ["command", "spawn", "fork", "forkserver"])
async def test_relayed_streams(start_method: Any, tmp_path: Path) -> None:
    """With `on_full="console"` and a disk that is not full, nothing else changes."""
    logs = LogSpec(log_dir=tmp_path, tee=1, redirects=2, on_full="console")
    if start_method == "command":
        spec = LaunchSpec(shell(BOTH), nproc_per_node=2, logs=logs)
    else:
        spec = LaunchSpec(
            say, args=("out",), start_method=start_method, nproc_per_node=2, logs=logs
        )
    events: list[Event] = []
    with file_console(tmp_path) as console:
        result = await launch(spec, console=console, listeners=[events.append])
    lines = sorted(line[:14] for line in (tmp_path / "out").read_text().splitlines())
    assert lines == ["[default0]:out", "[default1]:out"]
    assert (tmp_path / "err").read_bytes() == b""
    assert files(result)["attempt_0/1/stdout.log"].startswith(b"out")
    assert not any(isinstance(event, LogDiskFull | OutputLost) for event in events)


async def test_inherited_streams_are_the_very_same(tmp_path: Path) -> None:
    """Without redirects, tee and capture a worker writes to our own open files."""
    script = python(
        "import os, sys\n"
        "same = [os.fstat(n).st_ino == os.stat(f'/proc/{os.getppid()}/fd/{n}').st_ino"
        " for n in (1, 2)]\n"
        "sys.exit(same != [True, True])"
    )
    result = await launch(LaunchSpec(script, logs=LogSpec(capture=False)))
    assert result.exit_code == 0


async def test_a_stderr_that_cannot_be_followed_leaves_no_tailer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor is left for each attempt's second file: the first one is closed with it."""
    follow = Tee.follow

    def refuse_stderr(tee: Tee, path: str, *args: Any) -> int:
        if path.endswith("stderr.log"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return follow(tee, path, *args)

    monkeypatch.setattr(Tee, "follow", refuse_stderr)
    open_logs = []

    def count_logs(event: Event) -> None:
        if isinstance(event, AttemptFailed):
            targets = open_descriptors().values()
            open_logs.append(sum(target.endswith("stdout.log") for target in targets))

    spec = LaunchSpec(
        shell("true"), max_restarts=3, logs=LogSpec(log_dir=tmp_path / "logs", tee=3)
    )  # fmt: skip
    with file_console(tmp_path) as console, pytest.raises(JobFailed, match="too many open files"):
        await launch(spec, console=console, listeners=[count_logs])
    assert len(open_logs) == 4
    assert max(open_logs) <= 1


async def test_nothing_of_a_directory_of_the_user_is_removed(tmp_path: Path) -> None:
    """Not what is empty either, in a directory that was made for its logs."""
    directory = tmp_path / "own"

    class Elsewhere(LogLayout):
        __slots__ = ()

        def plan(self, worker: LogLayoutContext) -> LogDestinations:
            return LogDestinations(f"{directory}/out.log", f"{directory}/err.log")

    logs = Elsewhere(on_full="console")
    await launch(LaunchSpec(shell(f"echo text; touch {directory}/done"), logs=logs))
    assert sorted(os.listdir(directory)) == ["done", "err.log", "out.log"]


def modes(directory: str) -> set[int]:
    """Return the modes of a directory and of all that is below it."""
    paths = [Path(directory), *Path(directory).rglob("*")]
    return {stat.S_IMODE(path.stat().st_mode) for path in paths}


@pytest.mark.parametrize("on_full", ["fail", "console"])
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
async def test_the_umask_decides_who_may_read_logs(tmp_path: Path, mask: int, on_full: Any) -> None:
    """Below a directory that the user names; but others could lock the lock file."""
    logs = LogSpec(
        log_dir=tmp_path / "logs",
        tee={0: Std.OUT, 1: Std.ERR},
        redirects=Std.ERR,
        keep_runs=9,
        on_full=on_full,
        duplicate_stdout_filters=("x",),
    )
    former = os.umask(mask)
    try:
        result = await launch(LaunchSpec(shell("echo x"), nproc_per_node=2, logs=logs))
    finally:
        os.umask(former)
    path = result.log_dir or ""
    (Path(path) / ".elastic_aio.lock").unlink()
    assert modes(path) == {0o777 & ~mask, 0o666 & ~mask}
    assert stat.S_IMODE(os.stat(tmp_path / "logs").st_mode) == 0o777 & ~mask
    assert os.path.exists(f"{path}/attempt_0/filtered_stdout.log")
