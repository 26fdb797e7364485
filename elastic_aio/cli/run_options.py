"""The command line of `aio-elastic run`, which is torchrun's, as a `LaunchSpec`.

Every option has a dashed and an underscored spelling, `PET_*` variables are fallbacks that the
command line overrides, and everything after the script is left alone.  `elastic_aio.spec` describes
an option that sets a field.  The field's check parses the option's text unless it has a form of its
own, so a field with an option needs nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final

from elastic_aio.cli.options import (
    SECONDS_LIMIT,
    Values,
    fields_from,
    plain_values,
    split_options,
    value_from_env,
)
from elastic_aio.errors import SpecError
from elastic_aio.outcome import SIGTERM
from elastic_aio.spec import checks
from elastic_aio.spec.fields import Option, SpecValue, all_fields, field, make_option, spec_fields
from elastic_aio.spec.job import Command, Function, LaunchSpec, Module, Script
from elastic_aio.spec.liveness import LivenessSpec
from elastic_aio.spec.logs import ENTRY_POINTS, LogSpec, StdMap
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.spec.restart import RestartPolicy, RestartWindow
from elastic_aio.spec.stop import PreemptionSpec, SignalSpec, StopPlan, StopStep
from elastic_aio.spec.tls import TlsSpec
from elastic_aio.worker.context import SCHEDULERS, is_in_worker


def _address(name: str, value: object) -> object:
    checks.parse_host_port(name, value, at_least=0)
    return value


class _JobPart(checks.Part, frozen=True):
    def __call__(self, name: str, value: object) -> Any:
        # Not by its class: a run loads nothing of groups.
        return value if hasattr(value, "children") else super().__call__(name, value)


class RunRequest(SpecValue, prefix=""):
    """A parsed command line of `aio-elastic run`."""

    spec: Any = field(check=_JobPart(LaunchSpec), kw_only=False)
    """A `LaunchSpec`, or of `aio-elastic up` perhaps a `GroupSpec`."""
    command: str = field(default="run")
    """The sub-command, for errors."""
    signals: SignalSpec = field(default=SignalSpec())
    """The signals that the launcher handles."""
    warnings: tuple[str, ...] = field(default=())
    """Lines to print at the start."""
    variables: Mapping[str, str] = field(default={})
    """The PET_* variables of this job, by the options that they set."""
    event_log_handler: str = field(
        default="null",
        option="--event-log-handler NAME",
        help="receiver of the events in torch's format: 'console' (lines of JSON on stderr), 'null'"
        " or a plug-in (default 'null')",
    )
    events_file: str | None = field(
        default=None,
        own_option="--events FILE",
        help="append every event to FILE as a line of JSON (default: none)",
    )
    http: str | None = field(
        default=None,
        check=_address,
        own_option="--http HOST:PORT",
        help="serve a page, /healthz, /readyz, /metrics, /status, /events and logs over HTTP,"
        " without a password; port 0 takes a free one; needs the extra http (default: none)",
    )
    has_control: bool = field(
        default=True,
        own_option="--no-control",
        help="make no control socket: `aio-elastic ps`, `status`, `stop` and others do not see the"
        " job",
    )
    """Whether other processes of this user can see and control the job."""
    is_recorded: bool = field(
        default=True,
        own_option="--no-record",
        help="keep no record of the run, which `aio-elastic ps -a`, `why`, `status` and `logs` show"
        " when it has ended",
    )
    """Whether a record of the run is kept."""
    reloads_on_hup: bool = field(
        default=False,
        own_option="--reload-on-hup",
        help="SIGHUP reloads the job in place of a stop: independent workers are replaced one after"
        " the other, others are restarted; `aio-elastic up` reads its file again first",
    )
    """Whether SIGHUP reloads the job; `reread` then returns the spec."""
    reread: Callable[[], Any] | None = field(default=None)
    """Returns the spec as the file now has it, or raises UsageError; None: the same."""
    is_dry_run: bool = field(
        default=False,
        own_option="--dry-run",
        help="print what would be started on this node, and start nothing",
    )
    loop: str = field(
        default="auto",
        own_option="--loop NAME",
        help="event loop of the launcher: 'asyncio', 'uvloop' or 'auto' (default 'auto', which"
        " takes asyncio)",
    )
    color: str = field(
        default="never", check=checks.OneOf(("auto", "always", "never")), label="--color"
    )
    """Colors of the launcher's own lines: "auto", "always" or "never"."""
    level: int | None = field(default=None)
    """Least level of the printed lines; None takes LOGLEVEL's."""


_STANDALONE: Final = make_option(
    "--standalone",
    "run on a single node without rendezvous (default); excludes --nnodes with a minimum above 1",
)
_RDZV_CONF: Final = make_option(
    "--rdzv-conf KEY=VALUE,...", "settings of the rendezvous, listed below (default: none)"
)


def options_of(owner: type[SpecValue]) -> list[Option]:
    return [each.option for _, each in all_fields(owner) if isinstance(each.option, Option)]


RUN_OPTIONS: Final = (
    *options_of(RunRequest),
    _STANDALONE,
    _RDZV_CONF,
    make_option("--monitor-interval SECONDS", "no effect: workers are not polled"),
    make_option("--module", "run a module, as `python -m` does (default: a script)", short="-m"),
    make_option("--no-python", "execute the program itself instead of a Python script"),
    make_option(
        "--run-path", "run the script inside a function worker, with this launcher's Python"
    ),
    make_option(
        "--logs-specs NAME",
        "name of the plug-in that lays out the logs (default 'default')",
        has_variable=False,
    ),
    make_option(
        "--torchrun-defaults",
        "torchrun's defaults where others differ: no delay of restarts, an exit barrier of 300 s"
        " (on for aio-torchrun)",
        is_own=True,
        has_variable=True,
    ),
    make_option("--quiet", "print errors and the failure report only", is_own=True),
    make_option(
        "--verbose", "also print each worker's start and exit, rounds and nodes", is_own=True
    ),
)

USE_ENV: Final = make_option(
    "--use-env",
    "pass the local rank as LOCAL_RANK only, not as the argument --local-rank",
    has_variable=False,
)
"""An option of `python -m elastic_aio.launch` only."""

_OF_NODES: Final = (
    *("nnodes", "standalone", "rdzv_conf", "master_addr", "master_port"),
    *(option.dest for option in options_of(RendezvousSpec)),
)
_OF_RESTARTS: Final = ("max_restarts", *(option.dest for option in options_of(RestartPolicy)))

_DEADLINES: Final = "heartbeat_timeout", "ready_timeout", "progress_timeout", "exit_skew_timeout"
"""Options that are deadlines of the workers, by their `dest`."""

_INFO, _ERROR = 20, 40
"""Levels of `logging`, whose import would delay the start of the guardian."""

_NO_SHARED_STORE_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_GRACE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"


def parse_run(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    prog: str = "aio-elastic run",
    is_launch: bool = False,
) -> RunRequest:
    """Parse the arguments of `aio-elastic run`, with the variables of `env` as their defaults.

    With `is_launch`, accept `--use-env` and pass `--local-rank`, as torch.distributed.launch.

    Raises:
        UsageError: one line that names the option, the problem and the value.
        SystemExit: after `--help`, with code 0.
    """
    accepted = (*RUN_OPTIONS, USE_ENV) if is_launch else RUN_OPTIONS
    options, program = split_options(argv, accepted)
    notes: list[str] = []
    env = _without_services(env)
    if is_in_worker(env):
        from elastic_aio.torch_variables import outside_worker  # most launchers are in none

        env, notes = outside_worker(env)
    values = plain_values(options, accepted)
    if values is None:
        from elastic_aio.cli.parser import option_parser

        values = vars(option_parser(accepted, prog).parse_args(options))
    if not program:
        raise checks.UsageError(f"a script is required: {prog} [options] script [arguments]")
    variables: dict[str, str] = {}
    for option in accepted:
        if values[option.dest] is None and (value := value_from_env(option, env)) is not None:
            values[option.dest] = value
            variables[f"--{option.name}"] = option.variable
    if values["signals_to_handle"] is None and (names := env.get(_SIGNALS_VARIABLE)):
        values["signals_to_handle"] = names
        variables["--signals-to-handle"] = _SIGNALS_VARIABLE
    if values["http"] is None and _has_torch_variable(env):
        from elastic_aio.torch_variables import HEALTH_VARIABLE, health_address_from

        if (address := health_address_from(env)) is not None:
            values["http"] = address
            variables["--http"] = HEALTH_VARIABLE
    if is_launch:
        program = _with_local_rank(values, program)
    try:
        found = _apply_scheduler(values, env)
        request = _request(values, program, env)
        warnings = [*notes, *found, *request.warnings, *_misplaced(argv, program, accepted, env)]
        return request.replace(spec=request.spec, variables=variables, warnings=tuple(warnings))
    except (SpecError, checks.UsageError) as error:
        raise checks.UsageError(as_option_error(error, variables)) from error


def _misplaced(
    argv: Sequence[str], program: list[str], accepted: Sequence[Option], env: Mapping[str, str]
) -> list[str]:
    """Return a line for each variable and word of the script that has no effect in its place."""
    args = program[1:]
    # The module is imported only where one of them may have no effect.
    if not any(name.startswith("PET_") for name in env) and not any(
        word.startswith("--") for word in args
    ):
        return []
    from elastic_aio.cli.suggestions import argument_warnings, variable_warnings

    warnings = variable_warnings(env, accepted)
    # `--` before the script says that all words after it are the script's.
    if list(argv[-len(program) - 1 : -len(program)]) != ["--"]:
        warnings += argument_warnings(program[0], args, accepted)
    return warnings


def _without_services(env: Mapping[str, str]) -> Mapping[str, str]:
    """Leave out what Kubernetes sets for a Service whose name looks like a PET_* variable."""
    found = [name[:-12] for name in env if name[:4] == "PET_" and name.endswith("_SERVICE_HOST")]
    own = tuple(begin + end for begin in found for end in ("SERVICE_", "PORT_"))
    urls = {f"{begin}PORT" for begin in found if "://" in env.get(f"{begin}PORT", "")}
    return {name: env[name] for name in env if not (name.startswith(own) or name in urls)}


def _apply_scheduler(values: dict[str, str | None], env: Mapping[str, str]) -> list[str]:
    """Fill in the options of the rendezvous that a scheduler knows; return its lines."""
    # The module is imported only where one of them has started this process.
    if not any(name.startswith(SCHEDULERS) for name in env):
        return []
    import socket

    from elastic_aio.cli.schedulers import apply_allocation, find_allocation

    if (found := find_allocation(env, socket.getfqdn)) is None:
        return []
    is_explicit_stop = values["shutdown_timeout"] is not None or bool(env.get(_GRACE_VARIABLE))
    return [apply_allocation(values, found, is_explicit_stop=is_explicit_stop)]


def _with_local_rank(values: Values, program: list[str]) -> list[str]:
    if values["use_env"]:
        return program
    if values["no_python"] and not values["run_path"]:
        raise checks.UsageError("--no-python: needs --use-env: --local-rank is for Python scripts")
    return [program[0], "--local-rank=${local_rank}", *program[1:]]


def _log_warnings(logs: LogSpec) -> list[str]:
    if logs.ignored:
        options = " and ".join(option_of_field(f"logs.{name}") for name in logs.ignored)
        return [f"--log-dir /dev/null keeps no files: no effect of {options}"]
    if logs.max_bytes is not None and logs.is_in_no_file:
        return ["--log-max-bytes: no effect without --redirects or --tee"]
    return []


def _preemption_warnings(preemption: PreemptionSpec, logs: LogSpec) -> list[str]:
    if logs.is_off and preemption.signal is not None and preemption.forward is None:
        return ["--log-dir /dev/null: no worker sees the notice without --preempt-forward"]
    return []


def _request(values: Values, program: list[str], env: Mapping[str, str]) -> RunRequest:
    warnings = _usage_warnings(values)
    nodes, notes = _nodes(values, env)
    entrypoint, args = _program(values, program)
    logs = _logs(values, env)
    preemption = PreemptionSpec(**fields_from(values, PreemptionSpec))
    warnings += [*_log_warnings(logs), *_preemption_warnings(preemption, logs)]
    settings = {
        **fields_from(values, LaunchSpec, _FORMS),
        **nodes,
        **_restarts(values),
        "args": args,
        "host_store": env.get(_NO_SHARED_STORE_VARIABLE) != "1",
        **_torch_fields(env),
        "logs": logs,
        "stop": _stop_plan(values, env),
        "preemption": preemption,
        "liveness": LivenessSpec(**fields_from(values, LivenessSpec)),
        "python": env.get("PYTHON_EXEC") or None,
    }
    if settings.get("preload"):
        settings.setdefault("start_method", "forkserver")
    return RunRequest(
        LaunchSpec(entrypoint, **settings),
        **fields_from(values, RunRequest),
        signals=SignalSpec(**fields_from(values, SignalSpec, _FORMS)),
        warnings=(*warnings, *notes),
        color=_color(values, env),
        level=_level(values),
    )


def _has_torch_variable(env: Mapping[str, str]) -> bool:
    """Whether a variable may be for torch's launcher."""
    return any(name.startswith("TORCHELASTIC_") for name in env)


def _torch_fields(env: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of the spec that only variables of torch's launcher set."""
    if not _has_torch_variable(env):
        return {}
    from elastic_aio.torch_variables import timers_from, uninterruptible_timeout_from

    timeout = uninterruptible_timeout_from(env)
    return {"timers": timers_from(env), "uninterruptible_timeout": timeout}


def _has_any(values: Values, names: Iterable[str]) -> bool:
    """Whether an option is given, or torchrun's defaults take the place of ours."""
    return bool(values["torchrun_defaults"]) or any(values[name] is not None for name in names)


def _nodes(values: Values, env: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    if not _has_any(values, _OF_NODES):
        return {}, []
    from elastic_aio.cli.rendezvous_options import node_fields

    return node_fields(values, env)


def _restarts(values: Values) -> dict[str, Any]:
    if not _has_any(values, _OF_RESTARTS):
        return {}
    from elastic_aio.cli.restart_options import restart_fields

    return restart_fields(values)


def _level(values: Values) -> int | None:
    if values["quiet"] and values["verbose"]:
        raise checks.UsageError("--quiet: excludes --verbose")
    if values["quiet"]:
        return _ERROR
    return _INFO if values["verbose"] else None


def _usage_warnings(values: Values) -> list[str]:
    """Return a line for each option of workers that has no effect on these."""
    warnings = []
    method = values["start_method"]
    if method == "fork" and not values["run_path"]:
        warnings.append("--start-method fork has no effect without --run-path: scripts are spawned")
    elif (method == "forkserver" or values["preload"]) and values["no_python"]:
        option = "--preload" if values["preload"] else "--start-method forkserver"
        warnings.append(f"{option} has no effect with --no-python")
    if values["on_timeout"] is not None and not any(values[name] for name in _DEADLINES):
        options = ", ".join(f"--{name.replace('_', '-')}" for name in _DEADLINES)
        warnings.append(f"--on-timeout has no effect without one of {options}")
    if (interval := values["monitor_interval"]) is not None:
        checks.parse_seconds("--monitor-interval", interval, is_positive=True)
        warnings.append("--monitor-interval has no effect: workers are not polled")
    return warnings


def _program(
    values: Values, program: list[str]
) -> tuple[Script | Module | Command | Function, list[str]]:
    """Return the program of the workers, and its arguments; --run-path wins, as in torchrun."""
    script, *args = program
    if values["run_path"]:
        from elastic_aio.worker.scripts import run_script

        return Function(run_script, script), program
    if values["module"] and values["no_python"]:
        raise checks.UsageError("-m/--module: excludes --no-python")
    if values["module"]:
        return Module(script), args
    return (Command((script,)) if values["no_python"] else Script(script)), args


def _stop_plan(values: Values, env: Mapping[str, str]) -> StopPlan:
    fields = fields_from(values, StopPlan, _FORMS)
    if values["shutdown_timeout"] is None and (text := env.get(_GRACE_VARIABLE)):
        fields["steps"] = _steps(_GRACE_VARIABLE, text)
    return StopPlan(**fields)


# ------------------------------------------------------------------------- logs


def _logs(values: Values, env: Mapping[str, str]) -> LogSpec:
    fields = fields_from(values, LogSpec, _FORMS)
    # A plug-in may be older than other settings.
    for name in ("log_dir", "redirects", "tee", "local_ranks_filter", "prefix"):
        fields.setdefault(name, spec_fields(LogSpec)[name].default)
    fields["prefix"] = fields["prefix"] or env.get(_PREFIX_VARIABLE) or None
    if values["color"] or values["logs_specs"] in (None, "default"):
        fields["color"] = _color(values, env)
    return _log_layout(values["logs_specs"])(**fields)


def _log_layout(name: str | None) -> Callable[..., LogSpec]:
    """Return the class that makes the job's `LogSpec`: the default, or a plug-in."""
    if name in (None, "default"):
        return LogSpec
    from importlib.metadata import entry_points

    found = [*entry_points(group=ENTRY_POINTS), *entry_points(group="torchrun.logs_specs")]
    for entry in found:
        if entry.name != name:
            continue
        try:
            layout: Callable[..., LogSpec] = entry.load()
        except Exception as error:
            raise checks.UsageError(f"--logs-specs: {name} cannot be loaded: {error!r}") from error
        if entry.group == ENTRY_POINTS:
            return layout
        from elastic_aio.torch_logs import TorchLogLayout

        return partial(TorchLogLayout.of_plugin, layout)
    known = ", ".join(sorted({"default", *(entry.name for entry in found)}))
    raise checks.invalid_value("--logs-specs", f"must be one of: {known}", name)


def _color(values: Values, env: Mapping[str, str]) -> str:
    """Return `--color`; without it, NO_COLOR and a terminal without colors exclude them."""
    if (color := values["color"]) is not None:
        return color
    return "never" if env.get("NO_COLOR") or env.get("TERM") == "dumb" else "auto"


# ------------------------------------------------------------- forms of options


def _nproc(option: str, text: str) -> int | str:
    return text if (number := checks.parse_int(text)) is None else number


def _streams(option: str, text: str) -> StdMap:
    return StdMap.parse(option, text or "0")


def _names(option: str, text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _texts(option: str, text: str) -> list[str]:
    """Split a list at its commas; a doubled comma belongs to the text."""
    # NUL cannot occur in an argument.
    texts = text.replace(",,", "\0").split(",") if text else []
    return [part.replace("\0", ",") for part in texts]


def _ranks(option: str, text: str) -> list[int]:
    ranks = [checks.parse_int(part.strip()) for part in text.split(",")] if text.strip() else []
    if None in ranks:
        raise checks.invalid_value(option, "must be local ranks such as '0,2'", text)
    return [rank for rank in ranks if rank is not None]


def _size(option: str, text: str) -> int:
    if (size := checks.parse_size(text)) is None:
        raise checks.invalid_value(option, "must be a size such as '100M' or '65536'", text)
    return size


def _steps(option: str, text: str) -> tuple[StopStep, ...]:
    return (StopStep(SIGTERM, checks.parse_seconds(option, text, limit=SECONDS_LIMIT)),)


def _signals(option: str, text: str) -> set[int]:
    numbers = {checks.signal_number(option, name.strip()) for name in text.split(",")}
    # torchrun's users list SIGUSR1 to have it forwarded while the job goes on.
    return numbers - SignalSpec().forward


_FORMS: Final[Mapping[str, Callable[[str, str], Any]]] = {
    "nproc_per_node": _nproc,
    "redirects": _streams,
    "tee": _streams,
    "local_ranks_filter": _ranks,
    "duplicate_stdout_filters": _texts,
    "duplicate_stderr_filters": _texts,
    "log_max_bytes": _size,
    "preload": _names,
    "shutdown_timeout": _steps,
    "socket": _texts,
    "signals_to_handle": _signals,
}
"""Makers of a field from a text, by the `dest` of its option; `RestartPolicy` has its own."""

# ----------------------------------------------------------------------- errors


def as_option_error(error: SpecError | checks.UsageError, variables: Mapping[str, str] = {}) -> str:
    """Return the message of an error with the option, or its variable, in place of the field."""
    message = str(error)
    if isinstance(error, SpecError):
        option = option_of_field(error.field)
        value = str(error.value) if isinstance(error.value, RestartWindow) else error.value
        message = str(SpecError(option, value, error.problem))
    option, colon, problem = message.partition(":")
    return f"{variables.get(option, option)}{colon}{problem}"


@cache
def _labels() -> dict[str, str]:
    """Return the command line's names for the fields, by the names that errors give them."""
    fields = (*all_fields(RunRequest), *all_fields(TlsSpec))
    labels = {name: each.label for name, each in fields if each.label}
    return {**labels, "endpoint": labels["rendezvous.endpoint"], "address": labels["http"]}


def option_of_field(name: str) -> str:
    """Return the option that sets a field of the spec; the name if there is none."""
    return _labels().get(name, name)
