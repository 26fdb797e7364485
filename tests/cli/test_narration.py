"""What a run says: colors, the end, waits, warnings, and how much of it."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
from pathlib import Path

import pytest

from elastic_aio import JobFailed, launch
from elastic_aio.cli import main, printer
from elastic_aio.cli.options import split_options
from elastic_aio.cli.run_options import RUN_OPTIONS, parse_run
from elastic_aio.events import JobStarted
from elastic_aio.logs.console import open_sink
from elastic_aio.node_events import RoundFormed
from elastic_aio.outcome import JobState, LaunchResult
from elastic_aio.report import format_success
from elastic_aio.spec.checks import UsageError
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.restart import UNLIMITED, Backoff, RestartPolicy, RestartWindow
from elastic_aio.spec.torchrun import TORCHRUN_DEFAULTS
from elastic_aio.status import Level, StatusTracker
from elastic_aio.text import closest, format_duration
from tests.support.children import DEADLINE_S
from tests.support.cli import CLI, Ended, run_cli, run_program, running_cli
from tests.support.sockets import free_port

TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
BASH = ["--no-python", "bash", "-c"]
TWO = ["--nproc-per-node", "2", "-t3"]


def run_on_terminal(*args: object, env: dict[str, str | None] | None = None) -> Ended:
    """Run a job whose streams are a terminal; what that shows is `out`."""
    words = [sys.executable, "-c", TERMINAL, *CLI, "run", *map(str, args)]
    return run_program(words, env={"TERM": "xterm", "NO_COLOR": None, **(env or {})})


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--tee", "9", "x.py"], "(got '9'); see aio-elastic help --tee"),
        (["nope.py"], "script not found: nope.py\nHelp: aio-elastic help runbook an-exit-code"),
        (["--qqq", "x.py"], "is not an option (aio-elastic run --help lists the options)"),
    ],
)
def test_on_a_terminal_an_error_names_its_page(
    words: list[str], shown: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A program that reads the error gets its line only."""
    ended = run_on_terminal(*words, env={"NO_COLOR": "1"})
    assert ended.out.replace("\r", "").endswith(f"{shown}\n")
    line = shown.partition("; see ")[0].partition("\n")[0]
    assert run_cli(*words).err.endswith(f"{line}\n")
    if "aio-elastic help" in shown:
        assert main(["help", *shown.rpartition("help ")[2].split()]) == 0
        assert capfd.readouterr().out.startswith("#")


@pytest.mark.both_loops
async def test_a_failure_report_does_not_block_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of long tracebacks may be in it."""
    goes_on = threading.Event()
    monkeypatch.setattr(printer, "format_failure", lambda *_: str(goes_on.wait(DEADLINE_S)))
    with pytest.raises(JobFailed) as caught:
        await launch(LaunchSpec(["false"]))
    path = tmp_path / "stderr"
    with path.open("w") as file:
        sink = open_sink("stderr", file.fileno())
        lines = printer.EventPrinter(sink, Level.WARNING)
        asyncio.get_running_loop().call_soon(goes_on.set)
        await lines.print_result(caught.value, "false")
        await lines.drain(DEADLINE_S)
        sink.close()
    assert path.read_text().endswith("True\n")


@pytest.mark.e2e
def test_prefixes_have_the_color_of_their_rank_on_a_terminal(tmp_path: Path) -> None:
    """A further file with selected lines has none."""
    ended = run_on_terminal(*TWO, "--log-dir", tmp_path, "--duplicate-stdout-filters=rank",
                            *BASH, "echo rank $RANK; exit 0")  # fmt: skip
    assert "\x1b[36m[default0]:\x1b[0mrank 0\r\n" in ended.out
    assert "\x1b[33m[default1]:\x1b[0mrank 1\r\n" in ended.out
    assert "\x1b[1;32maio-elastic: \x1b[0mfinished: 2 workers, " in ended.out
    (copy,) = tmp_path.rglob("filtered_stdout.log")
    assert sorted(copy.read_text().splitlines()) == ["[default0]:rank 0", "[default1]:rank 1"]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("options", "env"), [([], {"NO_COLOR": "1"}), ([], {"TERM": "dumb"}), (["--color=never"], {})]
)
def test_a_terminal_without_colors(options: list[str], env: dict[str, str | None]) -> None:
    ended = run_on_terminal(*TWO, *options, *BASH, "echo rank $RANK", env=env)
    assert "[default0]:rank 0\r\n" in ended.out
    assert "\x1b[3" not in ended.out
    assert "\x1b[1" not in ended.out


@pytest.mark.e2e
def test_a_pipe_has_colors_on_request_only() -> None:
    assert "\x1b" not in (plain := run_cli(*TWO, *BASH, "echo 1")).out + plain.err
    colored = run_cli("--color=always", *TWO, *BASH, "echo 1", env={"NO_COLOR": "1"})
    assert "\x1b[36m[default0]:\x1b[0m1\n" in colored.out
    assert colored.err.startswith("\x1b[1maio-elastic: \x1b[0mrun ")


@pytest.mark.e2e
def test_a_progress_bar_keeps_its_color_and_its_width() -> None:
    """The escape sequences of the prefix do not count."""
    bar = "printf '1%%\\r%0100d\\r' 2; sleep 0.3; echo 3"
    ended = run_on_terminal("-t1", *BASH, f"stty cols 40 <$(tty); {bar}", env={})
    assert f"\x1b[36m[default0]:\x1b[0m{'0' * 28}" in ended.out


@pytest.mark.e2e
def test_a_countdown_until_the_restart() -> None:
    """On a terminal only; it is erased before a worker writes to the terminal itself."""
    script = "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && echo direct"
    options = ["--max-restarts=1", "--restart-delay=1.5", "--color=never", *BASH, script]
    ended = run_on_terminal(*options)
    assert ended.code == 0
    _, countdown = ended.out.split("restarting as attempt 1 in 1.5 s", 1)
    assert "\r\x1b[Kaio-elastic: restarting, 1.5 s left\r\x1b[K" in countdown
    assert " s left\r\x1b[Kdirect\r\n" in countdown
    assert "left" not in run_cli(*options).err


@pytest.mark.e2e
def test_a_node_that_waits_names_other_runs() -> None:
    """Two nodes with two ids would otherwise see only themselves."""
    at = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    one = [*at, "--rdzv-id=one", "--no-python", "true"]
    other = [*at, "--rdzv-id=other", "--no-python", "true"]
    with running_cli(*one) as first:
        first.wait_err("waiting for nodes")
        with running_cli(*other) as second:
            second.wait_err(r"; other runs that wait at this store: one \(is --rdzv-id the same")
            second.send(signal.SIGTERM)
            second.wait()
        first.send(signal.SIGTERM)
        first.wait()


def test_how_much_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """`--quiet` leaves the report of a failure; the options override LOGLEVEL."""
    quiet = ["run", "--quiet", "--max-restarts=1", "--monitor-interval=1", "--no-python"]
    assert main([*quiet, "true"]) == 0
    assert capfd.readouterr() == ("", "")
    assert main([*quiet, "false"]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "aio-elastic: the only restart is used up (max restarts)"
    assert "false FAILED" in lines
    with pytest.MonkeyPatch.context() as changes:
        changes.setenv("LOGLEVEL", "ERROR")
        assert main(["run", "--verbose", "--no-python", "true"]) == 0
    assert "rank 0 started (pid " in capfd.readouterr().err


def test_quiet_and_verbose_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="--quiet: excludes --verbose"):
        parse_run(["--quiet", "--verbose", "x"], {})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 s"),
        (0.314, "0.31 s"),
        (9.949, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 m 00 s"),
        (723, "12 m 03 s"),
        (3599.7, "1 h 00 m"),
        (7500, "2 h 05 m"),
        (360_000, "100 h 00 m"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_the_line_of_a_success() -> None:
    result = LaunchResult("r", JobState.SUCCEEDED, "", 0, 723.0, restarts=1)
    job = JobStarted(entrypoint="x", nproc_per_node=4, nnodes="1", max_restarts=3, agent_pid=1)
    status = StatusTracker()
    status(job)
    assert format_success(result, status) == "finished: 4 workers, 12 m 03 s, 1 restart"
    formed = RoundFormed(round=3, group_rank=0, group_world_size=2, world_size=8, master_addr="a",
                         master_port=1, changes=2)  # fmt: skip
    text = "finished: 8 workers on 2 nodes, 12 m 03 s, 1 restart, 2 membership changes"
    status(formed)
    assert format_success(result, status) == text


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--nprocs-per-node", "--nproc-per-node"),
        ("-nproc_per_node", "--nproc-per-node"),
        ("--rdzv-endpiont=a:1", "--rdzv-endpoint"),
        ("--nnode=2x", None),  # an abbreviation
    ],
)
def test_an_option_that_is_near(word: str, meant: str | None) -> None:
    with pytest.raises(UsageError) as caught:
        parse_run([word, "x"], {})
    assert (f"is not an option; did you mean {meant}? (" in str(caught.value)) is bool(meant)


def test_options_of_other_commands_that_are_near(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "--prot", "1"]) == 2
    assert "did you mean --port?" in capfd.readouterr().err
    assert main(["events", "--zzz"]) == 2
    assert "did you mean" not in capfd.readouterr().err


def test_the_closest_word() -> None:
    assert closest("evnets", ["events", "exec"]) == "events"
    assert closest("rum", ["run", "restart"]) == "run"
    assert closest("qqq", ["events", "exec"]) is None
    assert closest("", ["events"]) is None


TORCHRUN = {
    *("nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf"),
    *("standalone", "max-restarts", "monitor-interval", "start-method", "event-log-handler"),
    *("role", "module", "no-python", "run-path", "log-dir", "redirects", "tee"),
    *("local-ranks-filter", "duplicate-stdout-filters", "duplicate-stderr-filters", "node-rank"),
    *("master-addr", "master-port", "local-addr", "logs-specs", "numa-binding"),
    *("signals-to-handle", "shutdown-timeout", "virtual-local-rank"),
}


def test_the_options_that_torchrun_lacks_are_marked() -> None:
    """An unmarked one would make abbreviations of torchrun's ambiguous."""
    assert {option.name for option in RUN_OPTIONS if not option.is_own} == TORCHRUN


@pytest.mark.parametrize(
    ("word", "full"),
    [
        ("--re=1", "--redirects=1"),  # and not --restart-delay
        ("--v", "--virtual-local-rank"),  # and not --verbose
        ("--e=null", "--event-log-handler=null"),  # and not --events
        ("--qui", "--quiet"),
    ],
)
def test_abbreviations_of_torchrun_stay_unambiguous(word: str, full: str) -> None:
    """An option that torchrun lacks may be abbreviated where that is not one of torchrun's."""
    assert split_options([word, "x"], RUN_OPTIONS) == ([full], ["x"])


@pytest.mark.parametrize(
    ("env", "warnings"),
    [
        ({"PET_NPROC_PERNODE": "4"}, ["PET_NPROC_PERNODE has no effect; did you mean"
                                      " PET_NPROC_PER_NODE?"]),
        ({"PET_STDIN": "rank0"}, ["PET_STDIN has no effect: use --stdin"]),
        ({"PET_SERVICE_HOST": "10.0.0.1", "PET_SERVICE_PORT": "80", "PET_PORT": "tcp://10.0.0.1:80",
          "PET_PORT_80_TCP": "tcp://10.0.0.1:80", "PET_PORT_80_TCP_PORT": "80",
          "PET_MASTER_SERVICE_HOST": "10.0.0.2", "PET_MASTER_SERVICE_PORT": "80",
          "PET_MASTER_PORT": "tcp://10.0.0.2:80", "PET_MASTER_PORT_80_TCP_ADDR": "10.0.0.2"}, []),
        ({"PET_SHOP": "1", "PATH": "a", "PET_": "b", "PET_NNODES": "1"}, []),
    ],
)  # fmt: skip
def test_variables_without_effect(env: dict[str, str], warnings: list[str]) -> None:
    """A name that is near none of ours is another program's."""
    assert list(parse_run(["x"], env).warnings) == warnings


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["x", "--nproc_per_node=4", "a", "--tee", "3", "--tee=1"], "--nproc_per_node, --tee"),
        (["--role=r", "x", "--max-restarts", "3"], "--max-restarts"),
        (["x", "--role", "a", "--log-dir", "b", "-t", "3", "nnodes"], ""),
        (["--", "x", "--nproc-per-node=4"], ""),
        (["x", "--", "--nproc-per-node=4"], ""),
    ],
)
def test_our_options_after_the_script(argv: list[str], named: str) -> None:
    """`--` says that they are meant; names that scripts have themselves are not mentioned."""
    warnings = parse_run(argv, {}).warnings
    assert [text.split(" stand")[0] for text in warnings] == ([named] if named else [])


@pytest.mark.parametrize(
    ("text", "backoff"),
    [
        ("5", Backoff(initial=5, factor=1, cap=5, jitter=False)),
        ("0", Backoff(initial=0, factor=1, cap=0, jitter=False)),
        ("0.5:60", Backoff(initial=0.5, factor=2, cap=60)),
    ],
)
def test_restart_delays(text: str, backoff: Backoff) -> None:
    spec = parse_run(["--max-restarts=3", f"--restart-delay={text}", "x"], {}).spec
    assert spec.restart.backoff == backoff


def test_restarts_by_default() -> None:
    policy = parse_run(["--max-restarts=3", "x"], {}).spec.restart
    assert policy == RestartPolicy()


def test_restarts_without_a_limit() -> None:
    """As an option, as a variable and as a setting; the guide begins with this form."""
    words = ["--max-restarts=unlimited", "--healthy-after=600", "--restart-window=5:3600"]
    spec = parse_run([*words, "x"], {}).spec
    assert spec.max_restarts == LaunchSpec("x", max_restarts="unlimited").max_restarts
    assert (spec.restart.healthy_after, spec.restart.window) == (600.0, RestartWindow(5, 3600.0))
    assert parse_run(["x"], {"PET_MAX_RESTARTS": "unlimited"}).spec.max_restarts == UNLIMITED


@pytest.mark.parametrize(("part", "defaults"), TORCHRUN_DEFAULTS.items())
def test_the_defaults_of_torchrun(part: str, defaults: dict[str, object]) -> None:
    """All of them at once; an explicit option wins."""
    spec = parse_run(["--torchrun-defaults", "--nnodes=2", "x"], {}).spec
    assert {name: getattr(getattr(spec, part), name) for name in defaults} == defaults
    words = ["--exit-barrier-timeout=7", "--max-restarts=1", "--restart-delay=5", "x"]
    changed = parse_run(["--torchrun-defaults", *words], {}).spec
    assert changed.rendezvous.exit_barrier_timeout == 7
    assert changed.restart.backoff == Backoff(initial=5, factor=1, cap=5, jitter=False)


def test_a_row_for_each_default_of_torchrun() -> None:
    text = Path("docs/reference/torchrun-parity.md").read_text()
    for part, defaults in TORCHRUN_DEFAULTS.items():
        for name in defaults:
            assert f"| `{part}.{name}` |" in text


def test_restart_rules() -> None:
    words = ["--max-restarts=3", "--restart-window=3:900", "--restart-on=1, SIGKILL,75"]
    policy = parse_run([*words, "--never-on", "2,SIGSEGV", "x"], {}).spec.restart
    assert policy.window == RestartWindow(3, 900.0)
    assert policy.restart_on == frozenset({1, 75, 137})
    assert policy.never_on == frozenset({2, 139})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-restarts=inf"], "--max-restarts: must be 'unlimited' or a whole number from 0"),
        (["--max-restarts=-1"], "--max-restarts: must be 'unlimited' or a whole number from 0"),
        (["--healthy-after=60"], "--healthy-after: has no effect unless --max-restarts is at"),
        (["--max-restarts=1", "--healthy-after=0"], "--healthy-after: must be a number of seco"),
        (["--max-restarts=9", "--restart-window=9:60"], "--restart-window: cannot be exhausted,"
         " as 9 delays of the back-off take 183 s; use a longer window or shorter delays"),
        (["--restart-delay=1"], "--restart-delay: has no effect unless --max-restarts is at"),
        (["--max-restarts=1", "--restart-delay=x"], "--restart-delay: must be a number of sec"),
        (["--max-restarts=1", "--restart-delay=9:3"], "--restart-delay: must be SECONDS, or"),
        (["--max-restarts=1", "--restart-delay=0:3"], "--restart-delay: must be SECONDS, or"),
        (["--max-restarts=1", "--restart-window=3"], "--restart-window: must be N:SECONDS such"),
        (["--max-restarts=1", "--restart-window=0:3"], "--restart-window: must be N:SECONDS su"),
        (["--max-restarts=1", "--restart-window=2:9"], "--restart-window: is never reached: --"),
        (["--max-restarts=9", "--restart-window=9:9", "--restart-delay=1"], "--restart-window: "
         "cannot be exhausted, as 9 delays of the back-off take 9 s; use a longer window or"
         " shorter delays (got '9 within 9 s')"),
        (["--max-restarts=1", "--restart-on=0"], "--restart-on: must be exit codes from 1 to 25"),
        (["--never-on=SIGNONE"], "--never-on: must be exit codes from 1 to 255, or signal name"),
        (["--never-on="], "--never-on: must be exit codes from 1 to 255, or signal names (got '"),
        (["--max-restarts=1", "--restart-on=1", "--never-on=1"], "--never-on: must not hold codes"
         " of the restart-on list: 1"),
        (["--color=blue"], "--color: must be 'auto', 'always' or 'never' (got 'blue')"),
    ],
)  # fmt: skip
def test_mistakes(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_run([*words, "x"], {})
    assert str(caught.value).startswith(message)


def test_the_rules_reach_the_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    events = tmp_path / "events"
    words = ["run", "--max-restarts=3", "--restart-delay=0.125", "--never-on=7", "--events", events,
             *BASH, "exit $((6 + TORCHELASTIC_RESTART_COUNT))"]  # fmt: skip
    assert main([str(word) for word in words]) == 7
    shown = capfd.readouterr().err
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    assert [line["delay"] for line in lines if line["event"] == "Restarting"] == [0.125]
    # The command says the same as the events, of which a program is the reader.
    assert lines[-1]["why"] == "exit code 7 is in the never-on list"
    assert f"aio-elastic: {lines[-1]['why']}\n" in shown
