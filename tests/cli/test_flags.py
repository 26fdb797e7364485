"""Options of torchrun with an effect on workers, logs and events, as real jobs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_aio.agent.preflight import hostname
from elastic_aio.cli import main, main_launch, main_torchrun
from elastic_aio.cli.dry_run import plan_lines
from elastic_aio.cli.run_options import parse_run
from elastic_aio.hardware.cpus import format_cpus
from elastic_aio.spec.checks import UsageError
from elastic_aio.spec.job import Function, LaunchSpec, Script
from tests.support.cli import CLI, Ended, run_program
from tests.support.sockets import free_port

HOST = hostname().partition(".")[0]
CPUS = format_cpus(sorted(os.sched_getaffinity(0))[:1])
RunHere = Callable[..., Ended]


@pytest.fixture
def run_here(capfd: pytest.CaptureFixture[str]) -> RunHere:
    """Return a function that runs a command line in this process."""

    def run(*args: object, command: Callable[[list[str]], int] | None = None) -> Ended:
        words = [str(arg) for arg in args]
        code = main(["run", *words]) if command is None else command(words)
        return Ended(code, *capfd.readouterr())

    return run


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A worker that writes its ranks, arguments and CPUs into a file of its own."""
    path = tmp_path / "worker.py"
    path.write_text(
        "import json, os, sys\n"
        "names = ('RANK', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'CUDA_VISIBLE_DEVICES',\n"
        "         'ELASTIC_AIO_LOCAL_RANK', 'ELASTIC_AIO_ATTEMPT', 'ELASTIC_AIO_ROUND',\n"
        "         'MASTER_ADDR')\n"
        "noted = {name: os.environ.get(name) for name in names}\n"
        "noted |= {'argv': sys.argv[1:], 'cpus': sorted(os.sched_getaffinity(0))}\n"
        f"open({str(tmp_path)!r} + '/' + os.environ['RANK'] + '.json', 'w')"
        ".write(json.dumps(noted))\n"
    )
    return path


def noted(script: Path) -> list[dict[str, Any]]:
    """Return what the workers have noted, by rank."""
    return [json.loads(path.read_text()) for path in sorted(script.parent.glob("*.json"))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        [],
        ["--loop=uvloop"],
        ["--start-method=forkserver"],
        ["--run-path"],
        ["--run-path", "--start-method=fork"],
        ["--run-path", "--start-method=forkserver"],
    ],
    ids=" ".join,
)
def test_workers_are_bound_before_they_run(
    method: list[str], script: Path, run_here: RunHere
) -> None:
    """However they are started; the launcher itself is not bound."""
    own = os.sched_getaffinity(0)
    ended = run_here("--nproc-per-node", 2, "--numa-binding", "cpu", *method, script)
    assert ended.code == 0, ended.err
    first, second = (set(worker["cpus"]) for worker in noted(script))
    assert first | second == own
    assert not first & second or len(own) == 1
    assert os.sched_getaffinity(0) == own


def test_virtual_local_ranks(
    script: Path, run_here: RunHere, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Logs and `${local_rank}` keep the real rank, which has a variable of its own."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,GPU-7,8")
    options = ["--nproc-per-node=2", "--virtual-local-rank", "-t3", "--log-dir", tmp_path / "logs"]
    assert run_here(*options, script, "--rank=${local_rank}").code == 0
    first, second = noted(script)
    assert (first["LOCAL_RANK"], first["CUDA_VISIBLE_DEVICES"]) == ("0", "6")
    assert (second["LOCAL_RANK"], second["CUDA_VISIBLE_DEVICES"]) == ("0", "GPU-7")
    assert second["ELASTIC_AIO_LOCAL_RANK"] == "1"
    assert (second["LOCAL_WORLD_SIZE"], second["argv"]) == ("2", ["--rank=1"])
    assert len(list(tmp_path.glob("logs/*/attempt_0/1/stdout.log"))) == 1
    assert run_here("--run-path", *options, script, "--rank=${local_rank}").code == 0
    assert noted(script)[1]["argv"] == ["--rank=1"]


def test_attempts_and_rounds_are_numbered(script: Path, run_here: RunHere) -> None:
    """On one node each attempt is a round."""
    with script.open("a") as file:
        file.write("sys.exit(os.environ['ELASTIC_AIO_ATTEMPT'] == '0')\n")
    assert run_here("--max-restarts=1", script).code == 0
    (worker,) = noted(script)
    assert (worker["ELASTIC_AIO_ATTEMPT"], worker["ELASTIC_AIO_ROUND"]) == ("1", "1")


def test_the_master_address_of_one_node(script: Path, run_here: RunHere) -> None:
    """As in torchrun it has an effect together with the port only."""
    options = ["--master-addr", "127.0.0.2"]
    assert run_here(*options, script).code == 0
    assert noted(script)[0]["MASTER_ADDR"] == "127.0.0.1"
    assert run_here(*options, "--master-port", free_port(), script).code == 0
    assert noted(script)[0]["MASTER_ADDR"] == "127.0.0.2"


LINES = """
import sys, time
for text in ("an apple", "a pear, or two", "x" * 200000 + " apple", "apple " + "y" * 200000):
    print(text)
print("apple stem", file=sys.stderr)
print("10%\\r20% apple", end="")
"""


@pytest.mark.parametrize("mode", ["fail", "console"])
def test_duplicate_filters(mode: str, tmp_path: Path, run_here: RunHere) -> None:
    """Shown lines with one of the texts go to a further file, with the prefix of the console."""
    script = tmp_path / "lines.py"
    script.write_text(LINES)
    ended = run_here("--nproc-per-node", 3, "-t", "0:3,1:1", "--local-ranks-filter=0,2",
                     "--duplicate-stdout-filters", "apple,r,, or", "--on-full", mode,
                     "--log-dir", tmp_path / "logs", script)  # fmt: skip
    assert ended.code == 0
    (directory,) = tmp_path.glob("logs/*/attempt_0")
    assert not (directory / "filtered_stderr.log").exists()
    lines = (directory / "filtered_stdout.log").read_text().splitlines()
    assert lines[:2] == ["[default0]:an apple", "[default0]:a pear, or two"]
    # Of a line that is not kept in memory, the beginning is searched and copied.
    assert [line[:16] for line in lines[2:]] == ["[default0]:apple", "[default0]:20% a"]
    assert 60_000 < len(lines[2]) < 70_000


def test_filters_without_tee_leave_an_empty_file(tmp_path: Path, run_here: RunHere) -> None:
    ended = run_here("--duplicate-stderr-filters=a", "--log-dir", tmp_path, "--no-python", "true")
    assert ended.code == 0
    (file,) = tmp_path.glob("*/attempt_0/filtered_*")
    assert (file.name, file.read_text()) == ("filtered_stderr.log", "")


def test_filters_without_files(tmp_path: Path, run_here: RunHere) -> None:
    """torchrun fails here."""
    ended = run_here("-t3", "--log-dir=/dev/null", "--duplicate-stdout-filters=a", "--no-python",
                     "echo", "a")  # fmt: skip
    assert (ended.code, ended.out) == (0, "a\n")
    assert "no effect of --tee and --duplicate-stdout-filters" in ended.err


def test_a_filtered_file_that_cannot_be_written_is_reported_once(
    tmp_path: Path, run_here: RunHere
) -> None:
    """The console goes on."""
    block = (
        f"for d in {tmp_path}/*/attempt_0; do rm $d/filtered*; mkdir $d/filtered_stdout.log; done"
    )
    ended = run_here("-t1", "--log-dir", tmp_path, "--duplicate-stdout-filters=a", "--no-python",
                     "bash", "-c", f"{block}; echo a; sleep 0.2; echo a")  # fmt: skip
    assert (ended.code, ended.out) == (0, "[default0]:a\n" * 2)
    (line,) = [line for line in ended.errors if "filtered_stdout.log" in line]
    assert "is a directory" in line


def test_the_notice_of_omp_num_threads(run_here: RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, once, although the group starts twice.

    Not for one worker, not with the variable, and not for a program that may be no Python.
    """
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    two = ["--nproc-per-node", 2]
    ended = run_here("--max-restarts", 1, *two, "-m", "no.such.module")
    (line,) = [line for line in ended.errors if "OMP_NUM_THREADS" in line]
    assert line.startswith("aio-elastic: OMP_NUM_THREADS is not set: each worker gets 1")
    assert "***" not in ended.err
    assert "OMP_NUM_THREADS" not in run_here("-m", "this").err
    quiet = run_here("-t1", *two, "--no-python", "sh", "-c", "echo threads=$OMP_NUM_THREADS")
    assert "OMP_NUM_THREADS" not in quiet.err
    assert quiet.out.count("threads=1") == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in run_here(*two, "-m", "this").err


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Handlers of events as plug-ins; the file of what they get."""
    directory = tmp_path / "wave-1.0.dist-info"
    directory.mkdir()
    (directory / "METADATA").write_text("Metadata-Version: 2.1\nName: wave\nVersion: 1.0\n")
    (directory / "entry_points.txt").write_text(
        "[elastic_aio.event_handlers]\nmine = wave:Handler\nnone = wave:nothing\n"
        "[torchrun.handlers]\ntheirs = wave:handler\n"
    )
    (tmp_path / "wave.py").write_text(
        "import logging, pathlib\n"
        "class Handler(logging.Handler):\n"
        "    def emit(self, record):\n"
        f"        with open({str(tmp_path / 'events')!r}, 'a') as file:\n"
        "            print(record.name, record.levelname, record.getMessage(), file=file)\n"
        "handler = Handler()\n"
        "def nothing(): return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    return tmp_path / "events"


@pytest.mark.parametrize("name", ["mine", "theirs"])
def test_plugins_get_the_events(name: str, plugins: Path, run_here: RunHere) -> None:
    ended = run_here("--event-log-handler", name, "--no-python", "true")
    assert ended.code == 0
    lines = plugins.read_text().splitlines()
    logger, level, first = lines[0].split(maxsplit=2)
    assert (logger, level) == (f"torchelastic-events-{name}", "INFO")
    assert json.loads(first)["metadata"]["state"] == "RENDEZVOUS"
    assert '"state": "SUCCEEDED"' in lines[-1]


@pytest.mark.usefixtures("plugins")
def test_the_console_gets_the_events(run_here: RunHere) -> None:
    """One line of JSON each, on stderr."""
    ended = run_here("--event-log-handler", "console", "--no-python", "true")
    lines = [json.loads(line) for line in ended.errors if line.startswith("{")]
    assert [(line["source"], line["metadata"]["state"]) for line in lines] == [
        ("AGENT", "RENDEZVOUS"),
        ("AGENT", "ASSIGN_WORKER_RANKS"),
        ("WORKER", "START"),
        ("WORKER", "SUCCEEDED"),
        ("AGENT", "SUCCEEDED"),
    ]


@pytest.mark.usefixtures("plugins")
def test_event_handlers_are_checked(run_here: RunHere) -> None:
    ended = run_here("--event-log-handler", "none", "--no-python", "true")
    assert ended.code == 2
    assert "--event-log-handler: must name a logging.Handler (got 'none')" in ended.err
    ended = run_here("--event-log-handler", "other", "--no-python", "true")
    assert "must be one of: console, mine, none, null, theirs (got 'other')" in ended.err


def test_a_dry_run_starts_nothing(
    script: Path, run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prints commands, CPUs, log files and variables."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    logs = script.parent / "logs"
    ended = run_here("--dry-run", "--nproc-per-node=2", "--numa-binding=cpu", "-t1:1",
                     "--rdzv-id=mine", "--log-dir", logs, "--duplicate-stdout-filters=a",
                     "--virtual-local-rank", script, "-x${local_rank}")  # fmt: skip
    assert (ended.code, ended.err) == (0, "")
    for text in (
        "run id: mine\nnodes: 1\nworkers on this node: 2\n",
        f"selected lines of stdout: {logs}/mine_{HOST}_<random>/attempt_0/filtered_stdout.log\n",
        "  LOCAL_RANK=0\n",
        "  OMP_NUM_THREADS=1\n",
        "  MASTER_PORT=<a free port>\n",
        f"worker 0:\n  command: {sys.executable} -u {script} -x0\n  cpus: {CPUS}\n",
        "  stdout: this console\n",
        f"  stdout: {logs}/mine_{HOST}_<random>/attempt_0/1/stdout.log and this console\n",
        "CUDA_VISIBLE_DEVICES=1 ELASTIC_AIO_LOCAL_RANK=1 RANK=1",
    ):
        assert text in ended.out
    assert not logs.exists()
    assert noted(script) == []


def test_a_dry_run_shows_probes_sockets_and_restarts(run_here: RunHere) -> None:
    ended = run_here("--dry-run", "--restart-scope=worker", "--restart=always",
                     "--ready=tcp://127.0.0.1:1", "--alive=http://127.0.0.1:1/a",
                     "--socket=web=tcp://127.0.0.1:1", "--no-python", "true")  # fmt: skip
    assert (ended.code, ended.err) == (0, "")
    for line in (
        "restart scope: worker",
        "restart: always",
        "ready: Tcp(address='127.0.0.1:1')",
        "alive: Http(url='http://127.0.0.1:1/a')",
        "sockets: SocketSpec(address='tcp://127.0.0.1:1', name='web')",
    ):
        assert f"\n{line}\n" in ended.out
    assert "limits" not in ended.out


def test_the_plan_shows_what_each_worker_gets() -> None:
    own = {"worker_args": [["--a"], ["--b"]], "worker_env": [{"A": "1"}, {"A": "2"}]}
    fields: dict[str, Any] = {"limits": {"nice": 3}, **own}
    lines = [*plan_lines(LaunchSpec(["x", "y"], nproc_per_node=2, **fields), 2, [], {})]
    assert "limits: LimitSpec(nice=3)" in lines
    assert [one for one in lines if "command:" in one] == [f"  command: x y --{o}" for o in "ab"]
    assert [" A=1 " in one for one in lines if "environment:" in one] == [True, False]


def test_a_dry_run_of_several_nodes(run_here: RunHere) -> None:
    """What only the rendezvous knows is named so."""
    ended = run_here("--dry-run", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=a,b:7",
                     "--no-python", "true")  # fmt: skip
    assert ended.code == 0
    assert "rendezvous: c10d at a:29400, b:7, group rank of this node: any\n" in ended.out
    assert "  RANK=<from the rendezvous>\n" in ended.out


def test_a_dry_run_finds_what_a_run_would(tmp_path: Path, run_here: RunHere) -> None:
    ended = run_here("--dry-run", tmp_path / "missing.py")
    assert (ended.code, ended.out) == (127, "")
    ended = run_here("--dry-run", "--numa-binding=node", "--nproc-per-node=99", "--no-python", "x")
    assert (ended.code, ended.errors[0][:33]) == (2, "aio-elastic run: --numa-binding: ")
    for option in ("--loop", "--event-log-handler"):
        ended = run_here("--dry-run", f"{option}=none of these", "--no-python", "x")
        assert (ended.code, ended.out) == (2, "")
        assert ended.errors[0].startswith(f"aio-elastic run: {option}: ")


def test_torchruns_own_command(script: Path, run_here: RunHere) -> None:
    """`aio-torchrun` has no word before its options."""
    ended = run_here("--nproc_per_node=2", script, "--lr", "0.1", command=main_torchrun)
    assert ended.code == 0
    assert [worker["argv"] for worker in noted(script)] == [["--lr", "0.1"]] * 2
    ended = run_here(command=main_torchrun)
    assert ended.code == 2
    assert "a script is required: aio-torchrun [options] script" in ended.err


@pytest.mark.parametrize("command", [main_torchrun, main_launch])
def test_torchruns_own_commands_have_its_defaults(run_here: RunHere, command: Any) -> None:
    """No delay of the second restart, for example."""
    words = ["--max-restarts=2", "--no-python", "false"]
    ended = run_here(*["--use-env"][: command is main_launch], *words, command=command)
    assert ended.code == 1
    assert "restarting as attempt 2: restart 2 of 2 (max restarts)" in ended.err


def test_the_legacy_launcher_passes_the_local_rank(script: Path, run_here: RunHere) -> None:
    """As the first argument; not with --use-env."""
    ended = run_here("--nproc_per_node=2", script, "a", command=main_launch)
    assert ended.code == 0
    assert [worker["argv"] for worker in noted(script)] == [
        ["--local-rank=0", "a"],
        ["--local-rank=1", "a"],
    ]
    assert run_here("--use_env", script, "a", command=main_launch).code == 0
    assert noted(script)[0]["argv"] == ["a"]
    ended = run_here("--no-python", "true", command=main_launch)
    assert (ended.code, "--no-python: needs --use-env" in ended.err) == (2, True)


def test_the_legacy_launcher_is_a_module() -> None:
    ended = run_program([*CLI[:-1], "elastic_aio.launch", "--help"])
    assert ended.code == 0
    assert "usage: python -m elastic_aio.launch [options] script" in ended.out
    assert "--use-env" in ended.out


def test_use_env_belongs_to_the_legacy_launcher() -> None:
    with pytest.raises(UsageError, match="--use-env: is not an option"):
        parse_run(["--use-env", "x"], {})
    assert parse_run(["-m", "x"], {}, is_launch=True).spec.args == ("--local-rank=${local_rank}",)
    spec = parse_run(["--run-path", "--no-python", "x", "a"], {}, is_launch=True).spec
    assert isinstance(spec.entrypoint, Function)
    assert spec.args == ("x", "--local-rank=${local_rank}", "a")


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        (["--start-method=fork"], "--start-method fork has no effect without --run-path"),
        (
            ["--start-method=forkserver", "--no-python"],
            "--start-method forkserver has no effect with --no-python",
        ),
        (["--preload=json", "--no-python"], "--preload has no effect with --no-python"),
    ],
)
def test_start_methods_without_effect(options: list[str], warning: str) -> None:
    (found,) = parse_run([*options, "x"], {}).warnings
    assert found.startswith(warning)
    assert parse_run(["--run-path", options[0], "x"], {}).warnings == ()
    assert parse_run(["x"], {}).spec.entrypoint == Script("x")


def test_the_signals_of_torchs_variable() -> None:
    """The option overrides it."""
    env = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGINT"}
    assert parse_run(["x"], env).signals.stop == {2}
    assert parse_run(["--signals-to-handle=SIGTERM", "x"], env).signals.stop == {15}


# posix_spawn(3) suspends its caller like vfork(2) until the child executes a program, and
# the child waits for a writer of the pipe first.
HANGING = """
import os, sys
fifo = sys.argv[1] + os.environ["RANK"]
os.mkfifo(fifo)
opening = (os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0)
os.posix_spawn("/bin/true", ["true"], {}, file_actions=[opening])
"""


@pytest.mark.slow
def test_a_worker_that_hangs_in_the_kernel_fails_the_job(
    tmp_path: Path, run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a restart; torchrun exits with 0."""
    monkeypatch.setenv("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", "0.4")
    script = tmp_path / "hanging.py"
    script.write_text(HANGING)
    ended = run_here("--max-restarts=3", "--shutdown-timeout=1", script, tmp_path / "fifo")
    assert ended.code == 1
    assert "in an uninterruptible system call (state D) for 0.4 s" in ended.err
    assert "another attempt would need what this worker holds" in ended.err
    assert "restarting" not in ended.err


def test_a_worker_that_sleeps_does_not_hang(
    run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", "0.1")
    assert run_here("--no-python", "sleep", "0.5").code == 0


@pytest.mark.parametrize(
    ("text", "seconds"), [("", None), ("0", None), ("-3", None), ("2.5", 2.5), ("7", 7.0)]
)
def test_the_time_in_an_uninterruptible_call(text: str, seconds: float | None) -> None:
    """Unset, and numbers that are not above 0, mean any time."""
    env = {"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": text}
    assert parse_run(["x"], env).spec.uninterruptible_timeout == seconds
