"""The grammar of `aio-elastic run`: torchrun's options, variables and errors."""

from __future__ import annotations

import functools
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import (
    Command,
    Function,
    LaunchSpec,
    LogSpec,
    Module,
    NodeRange,
    RendezvousSpec,
    Script,
    SignalSpec,
    Std,
    StdMap,
    StopPlan,
)
from elastic_aio.cli import main
from elastic_aio.cli.run_options import RUN_OPTIONS, RunRequest, parse_run
from elastic_aio.spec.checks import UsageError
from elastic_aio.spec.fields import Option
from elastic_aio.worker.context import TASK, task_of
from elastic_aio.worker.scripts import run_script
from tests.support.children import assert_one_line
from tests.support.leaks import own_children

Reader = Callable[[RunRequest], Any]


def of_spec(path: str) -> Reader:
    """Return a reader of an attribute of the spec."""

    def read(request: RunRequest) -> Any:
        value: Any = request.spec
        for name in path.split("."):
            value = getattr(value, name)
        return value

    return read


def of_events(request: RunRequest) -> Any:
    return request.events_file


def of_stop_signals(request: RunRequest) -> Any:
    return sorted(request.signals.stop)


# Option, short spelling, whether it has a PET variable, value, reader, expected.
VALUED: list[tuple[str, str, bool, str, Reader, Any]] = [
    ("nnodes", "", True, "1:1", of_spec("nnodes"), NodeRange(1, 1)),
    ("nproc-per-node", "", True, "3", of_spec("nproc_per_node"), 3),
    ("max-restarts", "", True, "2", of_spec("max_restarts"), 2),
    ("monitor-interval", "", True, "0.5", lambda request: len(request.warnings), 1),
    ("role", "", True, "trainer", of_spec("role"), "trainer"),
    ("log-dir", "", True, "logs here", of_spec("logs.log_dir"), "logs here"),
    ("redirects", "-r", True, "0:2", of_spec("logs.redirects"), StdMap(by_rank=((0, Std.ERR),))),
    ("tee", "-t", True, "3", of_spec("logs.tee"), StdMap(Std.ALL)),
    ("local-ranks-filter", "", True, "0", of_spec("logs.local_ranks_filter"), frozenset({0})),
    ("rdzv-backend", "", True, "c10d", of_spec("rendezvous.backend"), "c10d"),
    ("rdzv-endpoint", "", True, "localhost:7", of_spec("rendezvous.endpoint"), "localhost:7"),
    ("rdzv-id", "", True, "my run", of_spec("run_id"), "my run"),
    ("rdzv-conf", "", True, "join_timeout=7", of_spec("rendezvous.join_timeout"), 7),
    ("node-rank", "", True, "3", of_spec("rendezvous.node_rank"), 3),
    ("master-addr", "", True, "nowhere", of_spec("rendezvous"), RendezvousSpec()),
    ("local-addr", "", True, "::1", of_spec("rendezvous.local_addr"), "::1"),
    ("exit-barrier-timeout", "", True, "2.5", of_spec("rendezvous.exit_barrier_timeout"), 2.5),
    ("master-port", "", True, "29500", of_spec("master_port"), 29500),
    ("signals-to-handle", "", True, "SIGINT, SIGTERM", of_stop_signals, [2, 15]),
    ("shutdown-timeout", "", True, "2.5", of_spec("stop"), StopPlan.within(2.5)),
    ("stdin", "", False, "rank0", of_spec("stdin"), "rank0"),
    ("log-prefix", "", False, "<${rank}>", of_spec("logs.prefix"), "<${rank}>"),
    ("on-full", "", False, "console", of_spec("logs.on_full"), "console"),
    ("log-max-bytes", "", False, "100M", of_spec("logs.max_bytes"), 100 << 20),
    ("log-max-bytes", "", False, "65536", of_spec("logs.max_bytes"), 65536),
    ("log-max-bytes", "", False, "1t", of_spec("logs.max_bytes"), 1 << 40),
    ("log-keep-attempts", "", False, "3", of_spec("logs.keep_attempts"), 3),
    ("events", "", False, "story", of_events, "story"),
    ("start-method", "", True, "forkserver", of_spec("start_method"), "forkserver"),
    ("preload", "", False, "json, wave", of_spec("preload"), ("json", "wave")),
    ("logs-specs", "", False, "default", of_spec("logs"), LogSpec(color="auto")),
    ("numa-binding", "", False, "core-complex", of_spec("numa_binding"), "core-complex"),
    ("event-log-handler", "", True, "console", lambda r: r.event_log_handler, "console"),
    (
        "duplicate-stdout-filters",
        "",
        True,
        "a,b,,c",
        of_spec("logs.duplicate_stdout_filters"),
        ("a", "b,c"),
    ),
    ("duplicate-stderr-filters", "", True, ",,", of_spec("logs.duplicate_stderr_filters"), (",",)),
]
FLAGS: list[tuple[str, str, Reader, Any, Any]] = [
    ("standalone", "", of_spec("rendezvous.backend"), "c10d", "c10d"),
    ("module", "-m", of_spec("entrypoint"), Module("train"), Script("train")),
    ("run-path", "", of_spec("entrypoint"), Function(run_script, "train"), Script("train")),
    ("no-python", "", of_spec("entrypoint"), Command(("train",)), Script("train")),
    ("virtual-local-rank", "", of_spec("virtual_local_rank"), True, False),
]


@pytest.mark.parametrize(("name", "short", "has_pet", "text", "read", "expected"), VALUED)
def test_every_option_in_every_spelling(
    name: str, short: str, has_pet: bool, text: str, read: Reader, expected: Any
) -> None:
    """Dashes, underscores, "=", a space, the short form and the variable are equivalent."""
    underscored = name.replace("-", "_")
    spellings = [
        [f"--{name}", text],
        [f"--{name}={text}"],
        [f"--{underscored}", text],
        [f"--{underscored}={text}"],
    ]
    if short:
        spellings += [[short, text], [short + text]]
    for options in spellings:
        assert read(parse_run([*options, "train"], {})) == expected, options
    variable = f"PET_{underscored.upper()}"
    if has_pet:
        assert read(parse_run(["train"], {variable: text})) == expected


@pytest.mark.parametrize(("name", "short", "read", "with_flag", "without"), FLAGS)
def test_every_flag_in_every_spelling(
    name: str, short: str, read: Reader, with_flag: Any, without: Any
) -> None:
    """A flag is set by its name, and by a variable that is a number above 0."""
    underscored = name.replace("-", "_")
    for option in [f"--{name}", f"--{underscored}", *([short] if short else [])]:
        assert read(parse_run([option, "train"], {})) == with_flag
    variable = f"PET_{underscored.upper()}"
    assert read(parse_run(["train"], {})) == without
    assert read(parse_run(["train"], {variable: "1"})) == with_flag
    assert read(parse_run(["train"], {variable: "2"})) == with_flag
    assert read(parse_run(["train"], {variable: "0"})) == without


@pytest.mark.parametrize(
    "limit", ["--heartbeat-timeout", "--ready-timeout", "--progress-timeout", "--exit-skew-timeout"]
)
def test_an_action_without_a_deadline_has_no_effect(limit: str) -> None:
    (warning,) = parse_run(["--on-timeout", "report", "--idle-report", "9", "y"], {}).warnings
    assert warning.startswith("--on-timeout has no effect without one of --heartbeat-timeout,")
    assert not parse_run(["--on-timeout", "report", limit, "9", "y"], {}).warnings


def test_what_is_kept_of_the_logs() -> None:
    logs = parse_run(["--no-capture", "--log-dir", "x", "--log-keep-runs=2", "y"], {}).spec.logs
    assert (logs.capture, logs.keep_runs) == (False, 2)
    assert parse_run(["y"], {"PET_NO_CAPTURE": "1"}).spec.logs.capture
    words = ["--log-dir", "/dev/null", "--log-max-bytes", "1M", "--log-keep-runs", "2", "y"]
    (warning,) = parse_run(words, {}).warnings
    assert warning.endswith("no effect of --log-max-bytes and --log-keep-runs")


@pytest.mark.parametrize(
    ("options", "has_files"),
    [([], False), (["--log-dir=logs"], False), (["--tee=1"], True), (["--redirects=2"], True)],
)
def test_a_limit_of_files_that_are_not_there(options: list[str], has_files: bool) -> None:
    """Captured text has its own limit."""
    request = parse_run(["--log-max-bytes=1M", *options, "x"], {})
    problem = "--log-max-bytes: no effect without --redirects or --tee"
    assert list(request.warnings) == ([] if has_files else [problem])


@pytest.mark.parametrize(
    ("options", "is_seen"),
    [([], True), (["--log-dir=/dev/null"], False), (["--log-dir=x"], True)],
)
def test_a_notice_that_no_worker_would_see(options: list[str], is_seen: bool) -> None:
    """Its file has no directory; a signal to the workers does without."""
    words = [*options, "--preempt-signal=USR1", "--preempt-deadline=9"]
    problem = "--log-dir /dev/null: no worker sees the notice without --preempt-forward"
    assert list(parse_run([*words, "x"], {}).warnings) == ([] if is_seen else [problem])
    assert not parse_run([*words, "--preempt-forward=USR2", "x"], {}).warnings


def test_the_command_line_wins_over_the_variables() -> None:
    request = parse_run(["--nproc-per-node=2", "x"], {"PET_NPROC_PER_NODE": "5", "PET_ROLE": "r"})
    assert (request.spec.nproc_per_node, request.spec.role) == (2, "r")


def test_each_socket_may_have_an_option() -> None:
    """As of other programs with addresses; of other options the last one counts."""
    words = ["--socket", "tcp://*:8000", "--socket=b=unix:///b,unix:///c", "--tee=1"]
    request = parse_run([*words, "--tee=2", "train.py"], {})
    addresses = [one.address for one in request.spec.sockets]
    assert addresses == ["tcp://*:8000", "unix:///b", "unix:///c"]
    assert request.spec.logs.tee == StdMap(Std.ERR)
    with pytest.raises(UsageError, match=r"^--socket: must not hold an address twice"):
        parse_run(["--socket=unix:///b", "--socket=unix:///b", "x"], {})


@pytest.mark.parametrize("word", ["cpu", "gpu", "auto"])
def test_words_for_the_number_of_workers(word: str) -> None:
    """`cpu`, `gpu` and `auto` are resolved when the job starts."""
    assert parse_run(["--nproc-per-node", word, "x"], {}).spec.nproc_per_node == word


@pytest.mark.parametrize(
    ("options", "read", "expected"),
    [
        (["--nproc", "2"], of_spec("nproc_per_node"), 2),
        (["--nproc=2"], of_spec("nproc_per_node"), 2),
        (["--max_r", "1"], of_spec("max_restarts"), 1),
        (["--stand"], of_spec("nnodes"), NodeRange(1, 1)),
        (["--nno", "1"], of_spec("nnodes"), NodeRange(1, 1)),
        (["--rdzv_c", "join_timeout=7"], of_spec("rendezvous.join_timeout"), 7),
        (["--exit-b=1"], of_spec("rendezvous.exit_barrier_timeout"), 1),
        (["--node", "2"], of_spec("rendezvous.node_rank"), 2),
        (["--shut", "1"], of_spec("stop"), StopPlan.within(1)),
        (["--no-p"], of_spec("entrypoint"), Command(("train",))),
        (["--rdzv_b", "c10d"], of_spec("rendezvous.backend"), "c10d"),
    ],
)
def test_unique_abbreviations(options: list[str], read: Reader, expected: Any) -> None:
    """An option may be abbreviated while only one option matches."""
    assert read(parse_run([*options, "train"], {})) == expected


@pytest.mark.parametrize(
    ("short", "fitting"),
    [
        ("--rdzv", ["--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"]),
        ("--mo", ["--module"]),
        ("--master", ["--master-addr", "--master-port"]),
    ],
)
def test_ambiguous_abbreviations(short: str, fitting: list[str]) -> None:
    """The error lists all options that match."""
    with pytest.raises(UsageError) as caught:
        parse_run([short, "x", "train"], {})
    assert short in str(caught.value)
    assert all(name in str(caught.value) for name in fitting)


def test_everything_after_the_script_is_its_own() -> None:
    """Arguments that look like options reach the worker unchanged."""
    args = ["--max-restarts", "3", "-t", "--", "--help", "--nnodes=9", "-", "$$", ""]
    request = parse_run(["--role", "r", "train.py", *args], {})
    assert request.spec.entrypoint == Script("train.py")
    assert request.spec.args == tuple(args)
    assert request.spec.max_restarts == 0


def test_two_dashes_end_the_options() -> None:
    """What follows `--` is the script, even if it begins with a dash."""
    assert parse_run(["--role", "r", "--", "-x.py", "-y"], {}).spec.entrypoint == Script("-x.py")


@pytest.mark.parametrize(
    "words", [["--role=-m"], ["--role", "-1"], ["--role", "-"], ["--role", "-a b"]]
)
def test_a_value_may_begin_with_a_dash(words: list[str]) -> None:
    assert parse_run([*words, "x"], {}).spec.role == words[-1].removeprefix("--role=")


@pytest.mark.parametrize(
    ("option", "joint"), [("--log-dir", "="), ("--master-addr", "="), ("-r", "")]
)
def test_an_option_is_no_value_of_another(option: str, joint: str) -> None:
    """The value is missing: an empty variable of a shell, for example."""
    with pytest.raises(UsageError) as caught:
        parse_run([option, "--max-restarts", "3", "x.py"], {})
    problem = f"needs a value; if it is one, write {option}{joint}--max-restarts"
    assert str(caught.value) == f"{option}: {problem} (got '--max-restarts')"


def test_defaults() -> None:
    """The defaults are torchrun's."""
    request = parse_run(["train.py", "a"], {})
    logs = LogSpec(color="auto")
    expected = LaunchSpec("train.py", args=["a"], run_id="x", logs=logs)
    assert request.spec.replace(run_id="x") == expected
    assert request.signals.stop == {
        signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT,
    }  # fmt: skip
    assert request.signals.forward == {signal.SIGUSR1, signal.SIGUSR2}
    assert request.events_file is None
    assert request.warnings == ()


def test_run_id() -> None:
    """`--rdzv-id` sets the run id, with `--standalone` too."""
    assert parse_run(["--standalone", "--rdzv-id", "mine", "x"], {}).spec.run_id == "mine"


def test_variables_of_torch() -> None:
    """The prefix, the grace period and the interpreter have variables of torch's."""
    env = {
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${rank}>",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "4",
        "PYTHON_EXEC": "/opt/python",
    }
    spec = parse_run(["x"], env).spec
    assert (spec.logs.prefix, spec.stop, spec.python) == (
        "<${rank}>",
        StopPlan.within(4),
        "/opt/python",
    )
    spec = parse_run(["--log-prefix", "p", "--shutdown-timeout", "1", "x"], env).spec
    assert (spec.logs.prefix, spec.stop) == ("p", StopPlan.within(1))


def test_listed_user_signals_are_still_forwarded() -> None:
    """SIGUSR1 in --signals-to-handle does not stop the job."""
    signals = parse_run(["--signals-to-handle", "SIGTERM,SIGUSR1", "x"], {}).signals
    assert signals.stop == {signal.SIGTERM}
    assert signal.SIGUSR1 in signals.forward


def test_workers_without_a_handler_are_skipped_or_killed() -> None:
    assert parse_run(["x"], {}).signals.unhandled == "skip"
    words = ["--signal-unhandled", "kill", "--signals-to-handle", "SIGTERM", "x"]
    assert parse_run(words, {}).signals == SignalSpec(stop=["SIGTERM"], unhandled="kill")
    with pytest.raises(UsageError, match=r"^--signal-unhandled: must be 'skip' or 'kill' \(got 'x"):
        parse_run(["--signal-unhandled=x", "x"], {})


STEP = {"SLURM_JOB_ID": "4", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "a,b", "SLURM_NODEID": "0"}  # fmt: skip
OF_JOB = {**STEP, "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NNODE": "3"}
IN_WORKER = {**OF_JOB, TASK: task_of(STEP), "TORCHELASTIC_RUN_ID": "outer"}


def test_the_variables_of_its_job_are_not_read_in_a_worker() -> None:
    """A launch there would take a rank of this job; options are read."""
    inner = parse_run(["x"], IN_WORKER)
    assert (inner.spec.nnodes, inner.spec.nproc_per_node) == (NodeRange(1, 1), 1)
    assert inner.spec.run_id is None
    assert inner.spec.rendezvous == RendezvousSpec()
    assert inner.variables == {}
    said = "inside a worker of outer: PET_*, SLURM_* are not read, options are"
    assert inner.warnings == (said,)
    words = ["--nproc-per-node=2", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=h:1", "x"]
    spec = parse_run(words, IN_WORKER).spec
    assert (spec.nnodes, spec.nproc_per_node) == (NodeRange(2, 2), 2)
    assert spec.rendezvous.endpoints == ("h:1",)


def test_no_line_in_a_worker_without_such_variables() -> None:
    assert parse_run(["x"], {TASK: "", "TORCHELASTIC_RUN_ID": "outer"}).warnings == ()


@pytest.mark.parametrize("changes", [{"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "5"}])
def test_a_task_that_a_worker_has_submitted_is_a_node(changes: dict[str, str]) -> None:
    """By srun or sbatch, which pass on the variables of the worker."""
    request = parse_run(["x"], {**IN_WORKER, **changes})
    assert (request.spec.nnodes, request.spec.nproc_per_node) == (NodeRange(2, 2), 8)
    assert request.spec.rendezvous.node_rank == 0


# Options, variables, and words of the error: the option, the value, the problem.
INVALID: list[tuple[str | list[str], dict[str, str], list[str]]] = [
    ("--nnodes 0", {}, ["--nnodes", "'0'", "MIN:MAX"]),
    ("--start-method thread", {}, ["--start-method", "'thread'", "'forkserver'"]),
    ("--preload a-b", {}, ["--preload", "'a-b'", "dotted name"]),
    ("--preload a --start-method spawn", {}, ["--preload", "'a'", "forkserver"]),
    ("--logs-specs unknown", {}, ["--logs-specs", "'unknown'", "default"]),
    ("--nnodes a", {}, ["--nnodes", "'a'", "MIN:MAX"]),
    ("--nproc-per-node 0", {}, ["--nproc-per-node", "got 0", "from 1 to 65536"]),
    ("--nproc-per-node two", {}, ["--nproc-per-node", "'two'", "'cpu'"]),
    (["--nproc-per-node", "²"], {}, ["--nproc-per-node", "'²'", "from 1 to 65536"]),
    ("", {"PET_NPROC_PER_NODE": "x"}, ["PET_NPROC_PER_NODE", "'x'", "from 1 to 65536"]),
    ("--max-restarts -1", {}, ["--max-restarts", "'-1'", "from 0 to"]),
    (["--max-restarts", "9" * 5000], {}, ["--max-restarts", "'999", "from 0 to"]),
    ("", {"PET_MAX_RESTARTS": "many"}, ["PET_MAX_RESTARTS", "'many'", "from 0 to"]),
    ("--monitor-interval 0", {}, ["--monitor-interval", "'0'", "above 0"]),
    ("--monitor-interval soon", {}, ["--monitor-interval", "'soon'", "above 0"]),
    ("--monitor-interval nan", {}, ["--monitor-interval", "'nan'", "above 0"]),
    ("--rdzv-backend foo", {}, ["--rdzv-backend", "'foo'", "etcd-v2, redis, static, tcp, valkey"]),
    (
        "--nnodes=2 --rdzv-backend=etcd-v2 --rdzv-conf=protocol=https",
        {},
        ["protocol=https needs tls_ca"],
    ),
    ("--rdzv-endpoint localhost:99999", {}, ["--rdzv-endpoint", "localhost:99999", "65535"]),
    ("--rdzv-endpoint a:1,", {}, ["--rdzv-endpoint", "''", "HOST:PORT"]),
    (
        "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:0",
        {},
        ["--rdzv-endpoint", "'localhost:0'", "other than 0"],
    ),
    (
        "--nnodes=2 --rdzv-endpoint=a:1,b:1",
        {},
        ["--rdzv-endpoint", "'a:1,b:1'", "single", "'static'"],
    ),
    (["--master-addr", "a b"], {}, ["--master-addr", "'a b'", "name or address"]),
    ("--master-addr a:1", {}, ["--master-addr", "'a:1'", "without a port"]),
    ("--master-port 0", {}, ["--master-port", "'0'", "1 to 65535"]),
    ("--master-port 65536", {}, ["--master-port", "'65536'", "1 to 65535"]),
    ("", {"PET_MASTER_PORT": ""}, ["PET_MASTER_PORT", "''", "1 to 65535"]),
    ("--local-addr a:1", {}, ["--local-addr", "'a:1'", "without a port"]),
    ("--node-rank -1", {}, ["--node-rank", "'-1'", "from 0 to"]),
    ("--node-rank one", {}, ["--node-rank", "'one'", "from 0 to"]),
    ("", {"PET_NODE_RANK": ""}, ["PET_NODE_RANK", "''", "from 0 to"]),
    ("--nnodes=2 --node-rank=2", {}, ["--node-rank", "2", "from 0 to 1", "'static'"]),
    ("--nnodes=2", {"SLURM_PROCID": "5"}, ["SLURM_PROCID", "5", "from 0 to 1", "'static'"]),
    ("--exit-barrier-timeout -1", {}, ["--exit-barrier-timeout", "'-1'", "at least 0"]),
    ("--exit-barrier-timeout nan", {}, ["--exit-barrier-timeout", "'nan'", "at least 0"]),
    ("--standalone --nnodes 2", {}, ["run: --standalone: is for one node (got --nnodes 2)"]),
    ("--rdzv-conf join_timeout", {}, ["--rdzv-conf", "'join_timeout'", "KEY=VALUE"]),
    ("-r 4", {}, ["--redirects", "'4'", "0-3"]),
    ("-r 5:1", {}, ["--redirects", "5", "0 to 0"]),
    ("--local-ranks-filter a", {}, ["--local-ranks-filter", "'a'", "0,2"]),
    ("--local-ranks-filter 7", {}, ["--local-ranks-filter", "7", "0 to 0"]),
    ("--signals-to-handle RTMIN-1", {}, ["--signals-to-handle", "'RTMIN-1'", "SIGTERM"]),
    ("--signals-to-handle SIGFOO", {}, ["--signals-to-handle", "'SIGFOO'", "SIGTERM"]),
    ("--signals-to-handle SIGKILL", {}, ["--signals-to-handle", "SIGKILL", "handled"]),
    ("--signals-to-handle SIGTERM,", {}, ["--signals-to-handle", "''", "SIGTERM"]),
    ("--shutdown-timeout -1", {}, ["--shutdown-timeout", "'-1'", "at least 0"]),
    ("--shutdown-timeout nan", {}, ["--shutdown-timeout", "'nan'", "at least 0"]),
    ("--shutdown-timeout 1e308", {}, ["--shutdown-timeout", "'1e308'", "below"]),
    ("--shutdown-timeout inf", {}, ["--shutdown-timeout", "'inf'", "at least 0"]),
    (
        "",
        {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "-3"},
        ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "'-3'", "at least 0"],
    ),
    ("--stdin all", {}, ["--stdin", "'all'", "'rank0'"]),
    (["--log-prefix", "a\nb"], {}, ["--log-prefix", "single line"]),
    ("--on-full drop", {}, ["--on-full", "'fail' or 'console'"]),
    ("--on-full=", {}, ["--on-full", "''", "'fail' or 'console'"]),
    ("--color=", {}, ["--color", "''", "'auto', 'always' or 'never'"]),
    ("--http=", {}, ["--http", "''", "HOST:PORT"]),
    ("--log-max-bytes 1.5G", {}, ["--log-max-bytes", "'1.5G'", "such as '100M'"]),
    ("--log-max-bytes 1K", {}, ["--log-max-bytes", "1024", "from 65536"]),
    ("--log-keep-attempts 0", {}, ["--log-keep-attempts", "'0'", "from 1"]),
    ("--log-keep-runs 3", {}, ["--log-keep-runs: needs a log directory (got 3)"]),
    ("--log-keep-runs x --log-dir y", {}, ["--log-keep-runs", "'x'", "from 1"]),
    ("--events /nowhere/story", {}, ["--events", "'/nowhere/story'", "can be written"]),
    ("--log-dir /dev/full/logs", {}, ["--log-dir", "'/dev/full/logs'", "directory"]),
    ("-m --no-python", {}, ["run: -m/--module: excludes --no-python"]),
    ("", {"PET_STANDALONE": "yes"}, ["PET_STANDALONE", "'yes'", "must be a number"]),
    ("", {"PET_MODULE": ""}, ["PET_MODULE", "''", "must be a number"]),
    ("", {"LOGLEVEL": "loud"}, ["LOGLEVEL", "'loud'", "DEBUG"]),
    ("--nproc-per-node gpu", {"CUDA_VISIBLE_DEVICES": ""}, ["--nproc-per-node", "'gpu'", "'cpu'"]),
    ("", {"PET_NPROC_PER_NODE": "gpu", "CUDA_VISIBLE_DEVICES": ""}, ["run: PET_NPROC_PER_NODE:"]),
    ("", {"PET_RDZV_CONF": "join_timeout=x"}, ["run: PET_RDZV_CONF: join_timeout: must be"]),
    ("--nnodes=2", {"SLURM_PROCID": "x"}, ["run: SLURM_PROCID: must be", "(got 'x')"]),
    ("--no", {}, ["run: --no: is ambiguous: --node-rank, --no-python"]),
    (
        "--virtual-local-rank",
        {"CUDA_VISIBLE_DEVICES": ""},
        ["run: --virtual-local-rank: needs a device for local rank 0"],
    ),
    ("--numa-binding all", {}, ["run: --numa-binding: must be 'node', ", "(got 'all')"]),
    ("--duplicate-stdout-filters a,", {}, ["--duplicate-stdout-filters: ", "none of them"]),
    ("--event-log-handler x", {}, ["--event-log-handler: must be one of: console, null"]),
    ("", {"PET_EVENT_LOG_HANDLER": "x"}, ["run: PET_EVENT_LOG_HANDLER: must be one of: "]),
    (
        "",
        {"TORCHELASTIC_SIGNALS_TO_HANDLE": "TERMS"},
        ["run: TORCHELASTIC_SIGNALS_TO_HANDLE: ", "'TERMS'"],
    ),
    ("", {"LOGLEVEL": "9" * 5000}, ["run: LOGLEVEL: must be one of: CRITICAL"]),
    ("", {"LOGLEVEL": "\udcff"}, ["run: LOGLEVEL: must be one of: CRITICAL"]),
    ("--unknown", {}, ["run: --unknown: is not an option", "--help"]),
    ("-x", {}, ["run: -x: is not an option", "--help"]),
]


@pytest.mark.parametrize(("options", "variables", "named"), INVALID)
def test_invalid_values_are_one_line(
    options: str | list[str],
    variables: dict[str, str],
    named: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The error names the option, the problem and the value; nothing is started."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    given = shlex.split(options) if isinstance(options, str) else options
    no_python = [] if "-m" in given else ["--no-python"]
    started = tmp_path / "started"
    children = own_children()
    assert main(["run", *no_python, *given, "touch", str(started)]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("aio-elastic run: ")
    assert err.count("\n") == 1
    for word in named:
        assert word in err
    assert not started.exists()
    assert own_children() == children


ABSURD = ["9" * 5000, f"-{'9' * 5000}", f"1e{'9' * 5000}", f"{'9' * 5000}:{'9' * 5000}", "1e400",
          "nan", "\udcff", "x" * 200_000, f"join_timeout={'9' * 5000}", "1\n2"]  # fmt: skip


@pytest.mark.parametrize("option", RUN_OPTIONS)
def test_absurd_values_are_one_line(option: Option) -> None:
    """Or accepted, as text, and then they can be printed; as an option and as a variable."""
    for value in ABSURD:
        for words, variables in (
            ([f"--{option.name}={value}"], {}),
            ([], {option.variable: value}),
        ):
            assert_one_line(functools.partial(parse_run, [*words, "script.py"], variables))


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "a command is required"),
        (["walk"], "must be 'run', 'up', "),
        (["evnets"], "; did you mean events? (got 'evnets')"),
        (["--verison"], "; did you mean --version? (got '--verison')"),
        (
            ["--nnodes=2", "x"],
            "; did you mean aio-elastic run [options] script? (got '--nnodes=2')",
        ),
        ([__file__], "; did you mean aio-elastic run [options] script? (got "),
        (["run"], "a script is required"),
        (["run", "--role", "r"], "a script is required"),
        (["run", "--role"], "--role: needs a value\n"),
        (["run", "-t"], "-t: needs a value\n"),
        (["run", "--standalone=1", "x"], "--standalone: takes no value (got '1')"),
        (["run", "-m", "not a name"], "dotted name"),
    ],
)
def test_incomplete_command_lines(
    argv: list[str], named: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The error is one line and the exit code is 2."""
    assert main(argv) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert named in err


@pytest.mark.parametrize(
    ("options", "code", "line"),
    [
        (
            ["--preload", "nomod", "--run-path"],
            2,
            "aio-elastic run: --preload: cannot import 'nomod': ",
        ),
        ([], 127, "aio-elastic: PYTHON_EXEC: cannot run /nope: command not found"),
    ],
)
def test_what_cannot_be_started(
    options: list[str],
    code: int,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The final line names the option or the variable."""
    if not options:
        monkeypatch.setenv("PYTHON_EXEC", "/nope")
    script = tmp_path / "script.py"
    script.touch()
    assert main(["run", *options, str(script)]) == code
    assert line in capfd.readouterr().err


def test_preload_sets_the_start_method() -> None:
    spec = parse_run(["--preload", "json,wave", "x"], {}).spec
    assert (spec.start_method, spec.preload) == ("forkserver", ("json", "wave"))


def test_run_path_wins() -> None:
    """It overrides --no-python and -m, as in torchrun; the job has the script's name."""
    spec = parse_run(["--run-path", "--no-python", "-m", "x.py", "a"], {}).spec
    assert spec.entrypoint == Function(run_script, "x.py")
    assert spec.args == ("x.py", "a")
    assert spec.name == "x.py"
