"""torchrun's options and variables in, a `LaunchSpec` out.

The grammar is torchrun's: every option in a dashed and an underscored spelling,
`PET_*` variables as fallbacks that the command line overrides, and everything
after the script left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from elastic_aio.cli.options import (
    Option,
    UsageError,
    invalid_value,
    option_parser,
    parse_int,
    parse_number,
    parse_seconds,
    split_options,
    value_from_env,
    variable_of,
)
from elastic_aio.cli.rdzv_conf import SWITCHES, TIMES, TLS
from elastic_aio.cli.rendezvous_options import (
    RENDEZVOUS_OPTIONS,
    Values,
    parse_rendezvous_options,
)
from elastic_aio.errors import SpecError
from elastic_aio.spec.checks import signal_number
from elastic_aio.spec.job import Command, Function, LaunchSpec, Module, Script
from elastic_aio.spec.logs import ENTRY_POINTS, LogSpec, StdMap
from elastic_aio.spec.stop import DEFAULT_GRACE, SignalSpec, StopPlan
from elastic_aio.worker.scripts import run_script


class RunRequest(Struct, frozen=True):
    """A parsed command line of `aio-elastic run`.

    Attributes:
        spec: the job.
        signals: the signals that the launcher handles.
        events_file: path of the file for events; None writes none.
        loop: "auto", "asyncio" or "uvloop".
        warnings: lines to print at the start.
        variables: the PET_* variables of this job, by the options that they set.
    """

    spec: LaunchSpec
    signals: SignalSpec
    events_file: str | None
    loop: str
    warnings: tuple[str, ...]
    variables: Mapping[str, str] = {}


_OPTIONS = (
    *RENDEZVOUS_OPTIONS,
    Option(
        "nproc-per-node",
        "workers per node: a number, 'cpu' (one per usable CPU), 'gpu' (one per visible GPU) or"
        " 'auto' (GPUs if there are any, else CPUs) (default 1)",
        metavar="N",
    ),
    Option("max-restarts", "restarts of the group after failures (default 0)", metavar="N"),
    Option("monitor-interval", "no effect: workers are not polled", metavar="SECONDS"),
    Option("role", "name of the workers' role (default 'default')", metavar="NAME"),
    Option("module", "run a module, as `python -m` does (default: a script)", short="-m"),
    Option("no-python", "execute the program itself instead of a Python script"),
    Option(
        "log-dir",
        "directory for logs; '/dev/null' keeps none (default: a temporary directory when needed)",
        metavar="DIR",
    ),
    Option(
        "redirects",
        "streams written to log files: 0 none, 1 stdout, 2 stderr, 3 both; or per local rank as"
        " in '0-3:3,10:1' (default 0)",
        short="-r",
        metavar="STREAMS",
    ),
    Option(
        "tee",
        "streams written to log files and to the console; values as for --redirects (default 0)",
        short="-t",
        metavar="STREAMS",
    ),
    Option(
        "local-ranks-filter",
        "local ranks whose tee'd streams reach the console, as in '0,2' (default: all)",
        metavar="RANKS",
    ),
    Option(
        "signals-to-handle",
        "signals that stop the job (default SIGTERM,SIGINT,SIGHUP,SIGQUIT);"
        " SIGUSR1 and SIGUSR2 are always forwarded to the workers",
        metavar="NAMES",
    ),
    Option(
        "shutdown-timeout",
        f"seconds from the first signal to SIGKILL (default {DEFAULT_GRACE:g})",
        metavar="SECONDS",
    ),
    Option(
        "stdin",
        "stdin of local rank 0: 'null' or 'rank0' (inherit); other workers have 'null'"
        " (default 'null')",
        metavar="SOURCE",
        has_variable=False,
    ),
    Option(
        "log-prefix",
        "template of the prefix of tee'd lines (default '[${role}${local_rank}]:')",
        metavar="TEMPLATE",
        has_variable=False,
    ),
    Option(
        "on-full",
        "when the disk of the log files is full: 'fail' (the worker's write fails) or 'console'"
        " (the console shows what the files do not take) (default 'fail')",
        metavar="ACTION",
        has_variable=False,
    ),
    Option(
        "logs-specs",
        "name of the plug-in that lays out the logs (default 'default')",
        metavar="NAME",
        has_variable=False,
    ),
    Option("run-path", "run the script as a function's worker, in this launcher's Python"),
    Option(
        "start-method",
        "start of Python workers: 'spawn', 'fork' (only with --run-path) or 'forkserver'"
        " (default 'spawn', with --preload 'forkserver')",
        metavar="NAME",
    ),
    Option(
        "preload",
        "modules that the fork server imports once for the workers of all attempts, as in"
        " 'torch,numpy' (default: none)",
        metavar="MODULES",
        has_variable=False,
    ),
    Option(
        "events",
        "append every event to FILE as a line of JSON (default: none)",
        metavar="FILE",
        has_variable=False,
    ),
    Option(
        "loop",
        "event loop of the launcher: 'asyncio', 'uvloop' or 'auto' (default 'auto', which takes"
        " asyncio)",
        metavar="NAME",
        has_variable=False,
    ),
)
_UNSUPPORTED = {
    "event-log-handler": "NAME",
    "duplicate-stdout-filters": "TEXT",
    "duplicate-stderr-filters": "TEXT",
    "numa-binding": "KIND",
    "virtual-local-rank": "",
}
"""Metavars of torchrun's options that are not supported yet; empty for a flag."""

_EPILOG = (
    "Options have torchrun's names, with dashes or underscores. torchrun's options also have"
    " PET_* variables as defaults, such as PET_NPROC_PER_NODE=4. Keys of --rdzv-conf, times in"
    " whole seconds, with defaults:"
    " join_timeout (600), last_call_timeout (30), close_timeout (30), heartbeat_timeout (5),"
    " read_timeout (60), timeout (900; 'static' only), store_grace (heartbeat_timeout),"
    " keep_workers (true), overlap (false), reuse (false), is_host (detected), token_file"
    " (path of a file with the store's token; no token), tls_cert, tls_key and tls_ca (PEM files;"
    " no TLS), tls_client_auth (true), tls_server_name (host of the endpoint)."
)
_LOG_PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
_NO_SHARED_STORE_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_GRACE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def parse_run(argv: Sequence[str], env: Mapping[str, str]) -> RunRequest:
    """Parse the arguments of `aio-elastic run`.

    Args:
        argv: everything after `run`.
        env: the environment, for `PET_*` and torch's variables.

    Raises:
        UsageError: one line that names the option, the problem and the value.
        SystemExit: after `--help`, with code 0.
    """
    options, program = split_options(argv, _OPTIONS, _UNSUPPORTED)
    values = vars(option_parser(_OPTIONS, _EPILOG).parse_args(options))
    if not program:
        raise UsageError("a script is required: aio-elastic run [options] script [arguments]")
    variables: dict[str, str] = {}
    for option in _OPTIONS:
        if values[option.dest] is None and (value := value_from_env(option, env)) is not None:
            values[option.dest] = value
            variables[f"--{option.name}"] = option.variable
    for name in _UNSUPPORTED:
        variable = variable_of(name)
        if env.get(variable, "") not in ("", "0", "null"):
            raise UsageError(f"{variable}: --{name} of torchrun is not supported yet")
    try:
        return replace(_request(values, program, env), variables=variables)
    except (SpecError, UsageError) as error:
        raise UsageError(as_option_error(error, variables)) from error


def _request(values: Values, program: list[str], env: Mapping[str, str]) -> RunRequest:
    warnings = []
    if (interval := values["monitor_interval"]) is not None:
        parse_seconds("--monitor-interval", interval, is_positive=True)
        warnings.append("--monitor-interval has no effect: workers are not polled")
    rendezvous = parse_rendezvous_options(values, env)
    entrypoint, args = _program(values, program)
    nproc = "1" if values["nproc_per_node"] is None else values["nproc_per_node"]
    number = parse_int(nproc)
    logs = _logs(values, env)
    if logs.ignored:
        options = " and ".join(f"--{name.replace('_', '-')}" for name in logs.ignored)
        warnings.append(f"--log-dir /dev/null keeps no files: no effect of {options}")
    preload = [name.strip() for name in (values["preload"] or "").split(",") if name.strip()]
    spec = LaunchSpec(
        entrypoint,
        args=args,
        start_method=values["start_method"] or ("forkserver" if preload else "spawn"),  # type: ignore[arg-type]  # LaunchSpec checks it
        preload=preload,
        nproc_per_node=nproc if number is None else number,  # type: ignore[arg-type]  # LaunchSpec checks it
        nnodes=rendezvous.nodes,
        max_restarts=parse_number("--max-restarts", values["max_restarts"] or "0"),
        role=values["role"] or "default",
        run_id=values["rdzv_id"] or None,
        master_port=rendezvous.master_port,
        host_store=env.get(_NO_SHARED_STORE_VARIABLE) != "1",
        logs=logs,
        stop=_stop_plan(values["shutdown_timeout"], env),
        stdin=values["stdin"] or "null",  # type: ignore[arg-type]  # LaunchSpec checks it
        rendezvous=rendezvous.spec,
        python=env.get("PYTHON_EXEC") or None,
    )
    return RunRequest(
        spec,
        _signals(values["signals_to_handle"]),
        values["events"],
        values["loop"] or "auto",
        (*warnings, *rendezvous.warnings),
    )


def _program(
    values: Values, program: list[str]
) -> tuple[Script | Module | Command | Function, list[str]]:
    """Return what the workers run, and its arguments; --run-path wins, as in torchrun."""
    script, *args = program
    if values["run_path"]:
        return Function(run_script, script), program
    if values["module"] and values["no_python"]:
        raise UsageError("-m/--module: excludes --no-python")
    if values["module"]:
        return Module(script), args
    return (Command((script,)) if values["no_python"] else Script(script)), args


def _logs(values: Values, env: Mapping[str, str]) -> LogSpec:
    # A plug-in may be older than this setting.
    others = {} if values["on_full"] is None else {"on_full": values["on_full"]}
    return _log_layout(values["logs_specs"])(
        log_dir=values["log_dir"] or None,
        redirects=StdMap.parse("logs.redirects", values["redirects"] or "0"),
        tee=StdMap.parse("logs.tee", values["tee"] or "0"),
        local_ranks_filter=_ranks(values["local_ranks_filter"] or ""),
        prefix=values["log_prefix"] or env.get(_LOG_PREFIX_VARIABLE) or None,
        **others,
    )


def _log_layout(name: str | None) -> Callable[..., LogSpec]:
    """Return the class that makes the job's `LogSpec`: the default, or a plug-in."""
    if name in (None, "default"):
        return LogSpec
    from importlib.metadata import entry_points

    plugins = entry_points(group=ENTRY_POINTS)
    for entry in plugins.select(name=name):
        try:
            layout: Callable[..., LogSpec] = entry.load()
        except Exception as error:
            raise UsageError(f"--logs-specs: {name} cannot be loaded: {error!r}") from error
        return layout
    known = ", ".join(sorted({"default", *plugins.names}))
    raise invalid_value("--logs-specs", f"must be one of: {known}", name)


def _ranks(value: str) -> frozenset[int]:
    ranks = [parse_int(part.strip()) for part in value.split(",")] if value.strip() else []
    if None in ranks:
        raise invalid_value("--local-ranks-filter", "must be local ranks such as '0,2'", value)
    return frozenset(rank for rank in ranks if rank is not None)


def _stop_plan(value: str | None, env: Mapping[str, str]) -> StopPlan:
    option = "--shutdown-timeout"
    if value is None and (value := env.get(_GRACE_VARIABLE) or None):
        option = _GRACE_VARIABLE
    return StopPlan() if value is None else StopPlan.within(parse_seconds(option, value))


def _signals(value: str | None) -> SignalSpec:
    if value is None:
        return SignalSpec()
    numbers = set()
    for name in value.split(","):
        try:
            numbers.add(signal_number("--signals-to-handle", name.strip()))
        except SpecError:
            problem = "must be signal names such as 'SIGTERM,SIGINT'"
            raise invalid_value("--signals-to-handle", problem, name.strip()) from None
    # torchrun's users list SIGUSR1 to have it forwarded while the job goes on.
    return SignalSpec(stop=frozenset(numbers) - SignalSpec().forward)


_OPTION_OF_FIELD = {
    "logs.prefix": "--log-prefix",
    "rendezvous.backend": "--rdzv-backend",
    "rendezvous.endpoint": "--rdzv-endpoint",
    "endpoint": "--rdzv-endpoint",
    **{f"rendezvous.{key}": f"--rdzv-conf: {key}" for key in (*TIMES, *SWITCHES)},
    "rendezvous.token": "--rdzv-conf: token_file",
    **{key.replace("_", ".", 1): f"--rdzv-conf: {key}" for key in TLS},
    "rendezvous.conf": "--rdzv-conf",
    "run_id": "--rdzv-id",
    "signals.stop": "--signals-to-handle",
    "signals.forward": "--signals-to-handle",
    "entrypoint": "script",
    "python": "PYTHON_EXEC",
}
"""Options that do not have the name of the spec's field that they set."""


def as_option_error(error: SpecError | UsageError, variables: Mapping[str, str] = {}) -> str:
    """Return the message of an error with the option, or its variable, in place of the field."""
    message = str(error)
    if isinstance(error, SpecError):
        name = error.field.rpartition(".")[2]
        same_name = (f"--{option.name}" for option in _OPTIONS if option.dest == name)
        option = _OPTION_OF_FIELD.get(error.field) or next(same_name, error.field)
        problem = error.problem.replace("start_method='forkserver'", "--start-method forkserver")
        message = str(SpecError(option, error.value, problem))
    option, colon, problem = message.partition(":")
    return f"{variables.get(option, option)}{colon}{problem}"
