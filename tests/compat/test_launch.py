"""torch's `elastic_launch` and `torch.distributed.run` over elastic_aio."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import logging
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_aio.agent.preflight import free_port
from elastic_aio.compat.torch.errors import ChildFailedError
from elastic_aio.compat.torch.events import register_handler
from elastic_aio.compat.torch.launch import (
    LaunchConfig,
    config_from_args,
    determine_local_world_size,
    elastic_launch,
    get_args_parser,
    get_rdzv_endpoint,
    get_use_env,
    main,
    parse_args,
    parse_min_max_nnodes,
    run,
)
from elastic_aio.compat.torch.metrics import MetricData, MetricHandler, NullMetricHandler, configure
from elastic_aio.compat.torch.multiprocessing import DefaultLogsSpecs, Std
from elastic_aio.compat.torch.rendezvous import RendezvousClosedError, RendezvousTimeoutError
from elastic_aio.store import StoreServer
from elastic_aio.worker.scripts import run_script
from tests.support import functions
from tests.support.cli import running

SHOW = "import os; print(os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT'])"


def config(nproc: int = 2, **settings: Any) -> LaunchConfig:
    return LaunchConfig(
        **{
            "min_nodes": 1,
            "max_nodes": 1,
            "nproc_per_node": nproc,
            "rdzv_backend": "c10d",
            "run_id": "r",
            "max_restarts": 0,
            "logs_specs": DefaultLogsSpecs(os.devnull),
            **settings,
        }
    )


# ------------------------------------------------------------------ elastic_launch


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_functions_return_their_values_by_global_rank(method: str) -> None:
    values = elastic_launch(config(start_method=method), functions.give)("a", 1)
    assert values == {0: ("a", 1), 1: ("a", 1)}


def test_programs_return_none(tmp_path: Path) -> None:
    logs = DefaultLogsSpecs(str(tmp_path), redirects=Std.OUT)
    values = elastic_launch(config(logs_specs=logs), sys.executable)("-c", SHOW)
    assert values == {0: None, 1: None}
    shown = sorted(path.read_text() for path in tmp_path.glob("r_*/attempt_0/*/stdout.log"))
    assert shown == ["0 0\n", "1 0\n"]


def test_a_failure_is_a_child_failed_error(tmp_path: Path) -> None:
    """With the root cause, its traceback, and torch's report."""
    logs = DefaultLogsSpecs(str(tmp_path))
    with pytest.raises(ChildFailedError, match="raise_error FAILED") as raised:
        elastic_launch(config(nproc=1, logs_specs=logs), functions.raise_error)("no luck")
    rank, failure = raised.value.get_first_failure()
    assert (rank, failure.exitcode) == (0, 1)
    assert "ValueError: no luck" in str(raised.value)


def test_a_program_that_fails_is_named(tmp_path: Path) -> None:
    """By its script, where the entrypoint is Python."""
    script = tmp_path / "bad.py"
    script.write_text("raise SystemExit(3)")
    with pytest.raises(ChildFailedError, match=r"bad\.py FAILED") as raised:
        elastic_launch(config(), sys.executable)("-u", str(script))
    assert raised.value.get_first_failure()[1].exitcode == 3


def test_restarts_are_counted(tmp_path: Path) -> None:
    logs = DefaultLogsSpecs(str(tmp_path), redirects=Std.OUT)
    code = f"{SHOW}; exit(os.environ['TORCHELASTIC_RESTART_COUNT'] != '2')"
    elastic_launch(config(1, max_restarts=2, logs_specs=logs), sys.executable)("-uc", code)
    shown = [path.read_text() for path in sorted(tmp_path.glob("r_*/*/0/stdout.log"))]
    assert shown == ["0 0\n", "0 1\n", "0 2\n"]


def test_a_running_event_loop_is_no_obstacle() -> None:
    """A notebook calls a blocking function inside of its loop."""

    async def cell() -> dict[int, Any]:
        return elastic_launch(config(), functions.give)(7)

    assert asyncio.run(cell()) == {0: (7,), 1: (7,)}


def test_a_run_id_is_made_up(caplog: pytest.LogCaptureFixture) -> None:
    made = config(nproc=1, run_id="")
    elastic_launch(made, "true")()
    assert made.run_id
    assert "generated a random run_id" in caplog.text


def ranks_of_two_nodes(endpoint: str, backend: str, *configs: dict[str, Any]) -> dict[int, Any]:
    """Return what the workers of two nodes, two of each, return as their rank."""

    def node(own: dict[str, Any]) -> dict[int, Any]:
        job = config(
            min_nodes=2, max_nodes=2, rdzv_backend=backend, rdzv_endpoint=endpoint, rdzv_configs=own
        )
        return elastic_launch(job, functions.give_rank)()

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(node, configs)
    return first | second


RANKS = {rank: rank for rank in range(4)}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_two_nodes(backend: str) -> None:
    configs = [{"rank": rank} if backend == "static" else {} for rank in range(2)]
    assert ranks_of_two_nodes(f"127.0.0.1:{free_port()}", backend, *configs) == RANKS


@pytest.mark.engine
@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_two_nodes_at_etcd(backend: str, etcd_endpoint: str, tmp_path: Path) -> None:
    """Without torch, and without a client of etcd; `is_host` has no effect."""
    configs = [{"etcd_prefix": str(tmp_path), "is_host": number == 0} for number in range(2)]
    assert ranks_of_two_nodes(etcd_endpoint, backend, *configs) == RANKS


@pytest.mark.slow
def test_too_few_nodes_are_a_timeout() -> None:
    alone = config(
        min_nodes=2,
        max_nodes=2,
        rdzv_endpoint=f"127.0.0.1:{free_port()}",
        rdzv_configs={"join_timeout": 1},
    )
    with pytest.raises(RendezvousTimeoutError, match="1 of 2 nodes"):
        elastic_launch(alone, "true")()


def test_a_node_that_comes_too_late_finds_the_rendezvous_closed() -> None:
    """The store has recorded how the run ended."""
    port = free_port()

    def node() -> dict[int, Any]:
        configs = {"last_call_timeout": 0, "is_host": False}
        endpoint = f"127.0.0.1:{port}"
        job = config(1, max_nodes=2, rdzv_endpoint=endpoint, rdzv_configs=configs)
        return elastic_launch(job, "true")()

    async def serve() -> None:
        async with StoreServer("127.0.0.1", port):
            assert await asyncio.to_thread(node) == {0: None}
            with pytest.raises(RendezvousClosedError, match="the run has ended"):
                await asyncio.to_thread(node)

    asyncio.run(serve())


def test_filters_and_devices_of_each_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    logs = DefaultLogsSpecs(str(tmp_path), tee=Std.OUT)
    job = config(virtual_local_rank=True, duplicate_stdout_filters=["5"], logs_specs=logs)
    code = "import os; print(*map(os.environ.get, ('LOCAL_RANK', 'CUDA_VISIBLE_DEVICES')))"
    elastic_launch(job, sys.executable)("-c", code)
    shown = sorted(path.read_text() for path in tmp_path.glob("r_*/attempt_0/*/stdout.log"))
    assert shown == ["0 4\n", "0 5\n"]
    (filtered,) = tmp_path.glob("r_*/attempt_0/filtered_stdout.log")
    assert filtered.read_text() == "[default_role1]:0 5\n"


def test_events_and_metrics_reach_torchs_handlers() -> None:
    class Metrics(MetricHandler):
        def emit(self, metric_data: MetricData) -> None:
            seen.append(metric_data.name)

    seen: list[str] = []
    stream = io.StringIO()
    register_handler("mine", logging.StreamHandler(stream))
    configure(Metrics(), "torchelastic")
    try:
        elastic_launch(config(1, role="t", event_log_handler="mine"), "true")()
    finally:
        configure(NullMetricHandler(), "torchelastic")
    states = [json.loads(line)["metadata"]["state"] for line in stream.getvalue().splitlines()]
    assert states.count("SUCCEEDED") == 2  # the worker's and the agent's
    assert "workers.t.run_success_no_retries" in seen


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_tee_writes_to_a_replaced_stream(name: str, tmp_path: Path) -> None:
    """Of a notebook or a test, which has no descriptor."""
    redirect = {"stdout": redirect_stdout, "stderr": redirect_stderr}[name]
    logs = DefaultLogsSpecs(str(tmp_path), tee=Std.ALL)
    with redirect(io.StringIO()) as stream:
        code = f"import sys; print('\N{SNOWMAN}' * 99999, file=sys.{name})"
        elastic_launch(config(1, logs_specs=logs), sys.executable)("-c", code)
    assert "[default_role0]:" + "\N{SNOWMAN}" * 99999 + "\n" in stream.getvalue()


# As torch's options: the value of their mode counts, whose names are those of `--numa-binding`.
NUMA = SimpleNamespace(affinity_mode=SimpleNamespace(value="pigeons"))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"rdzv_backend": "pigeons"}, "rdzv_backend: 'pigeons' is not registered"),
        ({"rdzv_configs": {"read_timeout": "x"}}, "--rdzv-conf: read_timeout"),
        ({"rdzv_configs": {"is_host": "perhaps"}}, "is_host: must be true or false"),
        ({"rdzv_backend": "etcd"}, "rdzv_backend: 'etcd' is torch's default and needs an endpoint"),
        ({"rdzv_configs": 3}, r"rdzv_configs: must be a dict \(got 3\)"),
        ({"rdzv_configs": {"tls_cert": "/c"}}, r"tls\.key: is needed with a certificate"),
        ({"logs_specs": "x"}, r"logs_specs: must be a LogsSpecs \(got 'x'\)"),
        ({"nproc_per_node": "2"}, r"local_world_size: must be a whole number .* \(got '2'\)"),
        ({"rdzv_backend": "static", "rdzv_endpoint": "h:1"}, 'needs a rank .*: {"rank": 0}'),
        ({"rdzv_backend": "static", "rdzv_configs": {"rank": 0}}, "rdzv_endpoint: must be HOST"),
        ({"min_nodes": 3}, "max_nodes: must be at least min_nodes"),
        ({"nproc_per_node": 0}, "local_world_size: must be a whole number of at"),
        ({"monitor_interval": 0}, "monitor_interval: must be above 0"),
        ({"max_restarts": -1}, "max_restarts"),
        ({"start_method": "thread"}, "start_method"),
        ({"event_log_handler": "pigeons"}, "event-log-handler"),
        ({"entrypoint": None}, "entrypoint: must be"),
        ({"numa_options": NUMA}, "numa_binding: must be 'node', "),
    ],
)
def test_a_mistake_is_one_line(settings: dict[str, Any], problem: str) -> None:
    own = {**settings}
    entrypoint = own.pop("entrypoint", "true")
    with pytest.raises(ValueError, match=problem) as raised:
        elastic_launch(config(**own), entrypoint)()
    assert "\n" not in str(raised.value)


def test_the_config_changes_nothing_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    given = {"join_timeout": 5}
    made = LaunchConfig(1, 1, 1, rdzv_configs=given)
    assert given == {"join_timeout": 5}
    assert made.rdzv_configs == {"timeout": 900, "join_timeout": 5}
    assert made.shutdown_timeout == 7
    assert isinstance(made.logs_specs, DefaultLogsSpecs)
    assert LaunchConfig(1, 1, 1, rdzv_timeout=3).rdzv_configs["timeout"] == 3
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    assert LaunchConfig(1, 1, 1).shutdown_timeout == 30


@pytest.mark.parametrize(("text", "given"), [("soon", None), ("30", -1)])
def test_a_shutdown_timeout_is_checked(
    text: str, given: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", text)
    with pytest.raises(ValueError, match=r"(SHUTDOWN_TIMEOUT|shutdown_timeout): must be"):
        LaunchConfig(1, 1, 1, shutdown_timeout=given)


JOB = """
from elastic_aio.compat.torch.launch import LaunchConfig, elastic_launch
from elastic_aio.compat.torch.multiprocessing import SignalException
job = LaunchConfig(1, 1, 2, rdzv_backend="c10d", signals_to_handle="SIGTERM,SIGALRM")
try:
    elastic_launch(job, "sh")("-c", "echo up; exec sleep 99")
except SignalException as error:
    print(error.sigval.name, error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGALRM"])
def test_a_signal_is_a_signal_exception(name: str) -> None:
    """Raised after the workers have ended; the former handlers are back."""
    with running([sys.executable, "-c", JOB]) as program:
        program.wait_out("up\nup\n")
        program.send(signal.Signals[name])
        assert program.wait() == 0
        number = signal.Signals[name].value
        assert program.out.endswith(f"{name} Process got signal: {number} ({name})\n")


# --------------------------------------------------------------- torchrun's arguments


def test_the_parser_has_torchruns_defaults() -> None:
    args = parse_args(["x.py", "--lr", "1"])
    assert vars(args) == {
        "nnodes": "1:1",
        "nproc_per_node": "1",
        "rdzv_backend": "static",
        "rdzv_endpoint": "",
        "rdzv_id": "none",
        "rdzv_conf": "",
        "standalone": False,
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "start_method": "spawn",
        "event_log_handler": "null",
        "role": "default",
        "module": False,
        "no_python": False,
        "run_path": False,
        "log_dir": None,
        "redirects": "0",
        "tee": "0",
        "local_ranks_filter": "",
        "duplicate_stdout_filters": [],
        "duplicate_stderr_filters": [],
        "node_rank": 0,
        "master_addr": "127.0.0.1",
        "master_port": None,
        "local_addr": None,
        "logs_specs": None,
        "numa_binding": None,
        "signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "shutdown_timeout": None,
        "virtual_local_rank": False,
        "training_script": "x.py",
        "training_script_args": ["--lr", "1"],
    }


def test_both_spellings_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line overrides a variable; a flag's variable is a number."""
    monkeypatch.setenv("PET_NNODES", "1:4")
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    monkeypatch.setenv("PET_NO_PYTHON", "1")
    monkeypatch.setenv("PET_MODULE", "0")
    args = parse_args(["--nproc_per_node=2", "--max-restarts", "5", "-t", "3", "x"])
    assert (args.nnodes, args.nproc_per_node, args.max_restarts) == ("1:4", "2", 5)
    assert (args.no_python, args.module, args.tee) == (True, False, "3")
    monkeypatch.setenv("PET_MODULE", "perhaps")
    with pytest.raises(SystemExit):
        parse_args(["x"])


def test_variables_of_its_job_are_no_defaults_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("ELASTIC_AIO_TASK", "")
    assert parse_args(["x"]).nnodes == "1:1"
    assert parse_args(["--nnodes", "3", "x"]).nnodes == "3"


@pytest.mark.parametrize(
    ("text", "texts"),
    [("a,b", ["a", "b"]), ("a,,b", ["a,b"]), ("a,,,b", ["a,", "b"]), ("x", ["x"])],
)
def test_two_commas_are_a_comma(text: str, texts: list[str]) -> None:
    args = parse_args(["--duplicate-stdout-filters", text, "x"])
    assert args.duplicate_stdout_filters == texts


def test_callers_extend_the_parser() -> None:
    """As torch.distributed.launch does, and others with `parents=`."""
    parser = get_args_parser()
    parser.add_argument("--use-env", "--use_env", default=False, action="store_true")
    assert not get_use_env(parser.parse_args(["x.py"]))
    assert get_use_env(parser.parse_args(["--use_env", "x.py"]))
    assert get_use_env(parse_args(["x.py"]))
    child = argparse.ArgumentParser(parents=[get_args_parser()], add_help=False)
    child.add_argument("--own")
    assert child.parse_args(["--own", "1", "--nnodes", "2", "x.py"]).nnodes == "2"


@pytest.mark.parametrize(
    ("text", "counts"), [("1", (1, 1)), ("2:4", (2, 4)), ("1:2:3", None), ("a", None)]
)
def test_node_counts(text: str, counts: tuple[int, int] | None) -> None:
    if counts is not None:
        assert parse_min_max_nnodes(text) == counts
        return
    with pytest.raises((RuntimeError, ValueError)):
        parse_min_max_nnodes(text)


def test_worker_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch counts, where it has been imported."""
    assert determine_local_world_size("4") == 4
    assert determine_local_world_size("cpu") == len(os.sched_getaffinity(0))
    none = SimpleNamespace(is_available=lambda: False)
    three = SimpleNamespace(is_available=lambda: True, device_count=lambda: 3)
    stub = SimpleNamespace(cuda=three, xpu=none, accelerator=three)
    monkeypatch.setitem(sys.modules, "torch", stub)  # a stand-in
    assert determine_local_world_size("gpu") == 3
    assert determine_local_world_size("auto") == 3
    for word in ("xpu", "pigeons"):
        with pytest.raises(ValueError, match="nproc_per_node: "):
            determine_local_world_size(word)


def config_of(*words: str) -> tuple[LaunchConfig, Any, list[str]]:
    return config_from_args(parse_args(words))


def test_a_script_runs_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config_of("x.py", "-a")[1:] == (sys.executable, ["-u", "x.py", "-a"])
    assert config_of("-m", "x.y", "-a")[1:] == (sys.executable, ["-u", "-m", "x.y", "-a"])
    assert config_of("--no-python", "x", "-a")[1:] == ("x", ["-a"])
    assert config_of("--run-path", "x.py", "-a")[1:] == (run_script, ["x.py", "-a"])
    monkeypatch.setenv("PYTHON_EXEC", "/usr/bin/python9")
    assert config_of("x.py")[1] == "/usr/bin/python9"


def test_the_config_of_arguments(tmp_path: Path) -> None:
    made, _, _ = config_of(
        *("--nnodes", "1:2", "--nproc-per-node", "3", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", "h:1", "--rdzv-id", "run", "--rdzv-conf", "join_timeout=5,a=b=c"),
        *("--max-restarts", "4", "--role", "eval", "--log-dir", str(tmp_path), "-r", "1"),
        *("--tee", "0:3", "--local-ranks-filter", "0,2", "--shutdown-timeout", "9", "x.py"),
    )
    assert (made.min_nodes, made.max_nodes, made.nproc_per_node) == (1, 2, 3)
    assert (made.rdzv_backend, made.rdzv_endpoint, made.run_id) == ("c10d", "h:1", "run")
    assert made.rdzv_configs == {"join_timeout": "5", "a": "b=c", "timeout": 900}
    assert (made.max_restarts, made.role, made.shutdown_timeout) == (4, "eval", 9)
    logs = DefaultLogsSpecs(str(tmp_path), Std.OUT, {0: Std.ALL}, {0, 2})
    assert made.logs_specs == logs


def test_static_takes_the_masters_address() -> None:
    args = parse_args(["--master-addr", "h", "--master-port", "5", "--node-rank", "1", "x.py"])
    assert get_rdzv_endpoint(args) == "h:5"
    made, _, _ = config_from_args(args)
    assert made.rdzv_configs["rank"] == 1


def test_a_namespace_may_lack_newer_options() -> None:
    """Of a program that was written for an older torch."""
    args = parse_args(["--nproc-per-node", "2", "x.py"])
    del args.virtual_local_rank, args.shutdown_timeout, args.signals_to_handle
    assert config_from_args(args)[0].nproc_per_node == 2


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--nnodes", "0"], "--nnodes: must be"),
        (["--nnodes", "2:1"], "--nnodes: must be"),
        (["--max-restarts", "-1"], "--max-restarts: must be"),
        (["-m", "--no-python"], "excludes --no-python"),
        (["--rdzv-conf", "a"], "--rdzv-conf: must be KEY=VALUE"),
        (["--local-ranks-filter", "a"], "--local-ranks-filter: must be"),
        (["--logs-specs", "pigeons"], "--logs-specs: must be"),
        (["--redirects", "4"], "does not match"),
    ],
)
def test_mistakes_in_arguments(words: list[str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        config_of(*words, "x.py")


def test_a_node_rank_without_static_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config_of("--rdzv-backend", "c10d", "--node-rank", "1", "x.py")
    assert "node_rank is only used for static" in caplog.text


def test_main_runs_a_script(tmp_path: Path) -> None:
    """A single node needs no free port, and keeps the run id that it is given."""
    script = tmp_path / "show.py"
    script.write_text(
        "import os, sys\n"
        f"open(f'{tmp_path}/' + os.environ['RANK'], 'w').write("
        "os.environ['TORCHELASTIC_RUN_ID'] + ' '.join(sys.argv[1:]))\n"
    )
    main(["--nproc-per-node", "2", "--rdzv-id", "mine", str(script), "-a"])
    assert (tmp_path / "1").read_text() == "mine-a"


def test_run_leaves_the_namespace_alone(tmp_path: Path) -> None:
    """And the environment of the process."""
    args = parse_args(["--nproc-per-node", "2", "--standalone", "--no-python", "true"])
    before, env = {**vars(args)}, {**os.environ}
    run(args)
    assert vars(args) == before
    assert {**os.environ} == env


def test_main_raises_what_failed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(ChildFailedError, match="false FAILED"):
        main(["--no-python", "false"])
    assert "exit code 1" in caplog.text


def test_a_local_rank_argument_comes_first() -> None:
    """As with `torch.distributed.launch`."""
    parser = get_args_parser()
    parser.add_argument("--use-env", default=False, action="store_true")
    args = parser.parse_args(["x.py", "-a"])
    assert config_from_args(args)[2] == ["-u", "x.py", "--local-rank=${local_rank}", "-a"]
