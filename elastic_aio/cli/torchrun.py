"""torchrun's options and variables in, a `LaunchSpec` out.

The grammar is torchrun's: every option in a dashed and an underscored spelling,
`PET_*` variables as fallbacks that the command line overrides, and everything
after the script left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import replace

from elastic_aio.cli.log_options import color_of, parse_log_options
from elastic_aio.cli.options import (
    UsageError,
    Values,
    invalid_value,
    parse_int,
    parse_seconds,
    plain_values,
    split_options,
    value_from_env,
)
from elastic_aio.cli.run_options import (
    RENDEZVOUS_OPTIONS,
    RESTART_OPTIONS,
    RUN_EPILOG,
    RUN_OPTIONS,
    USE_ENV,
)
from elastic_aio.errors import SpecError
from elastic_aio.spec.checks import parse_host_port, signal_number
from elastic_aio.spec.fields import Option
from elastic_aio.spec.job import Command, Function, LaunchSpec, Module, Script
from elastic_aio.spec.liveness import LivenessSpec
from elastic_aio.spec.logs import LogSpec
from elastic_aio.spec.restart import RestartWindow
from elastic_aio.spec.stop import DEFAULT_GRACE, SignalSpec, StopPlan, StopScope
from elastic_aio.worker.context import SCHEDULERS, is_in_worker

_DEADLINES = "heartbeat_timeout", "ready_timeout", "progress_timeout", "exit_skew_timeout"
"""Options that are deadlines of the workers, by their `dest`."""


class RunRequest(Struct, frozen=True):
    """A parsed command line of `aio-elastic run`.

    Attributes:
        spec: the job.
        signals: the signals that the launcher handles.
        events_file: path of the file for events; None writes none.
        loop: "auto", "asyncio" or "uvloop".
        warnings: lines to print at the start.
        variables: the PET_* variables of this job, by the options that they set.
        event_log_handler: "null", "console" or the name of a plug-in.
        is_dry_run: whether to print the plan only.
        http: `HOST:PORT` where the state of the job is served; None for nowhere.
        color: "auto", "always" or "never": colors of the launcher's own lines.
        has_control: whether other processes of this user can see and control the job.
        level: least level of the lines that are printed; None is that of LOGLEVEL.
    """

    spec: LaunchSpec
    signals: SignalSpec
    events_file: str | None
    loop: str
    warnings: tuple[str, ...]
    variables: Mapping[str, str] = {}
    event_log_handler: str = "null"
    is_dry_run: bool = False
    http: str | None = None
    color: str = "never"
    level: int | None = None
    has_control: bool = True


_INFO, _ERROR = 20, 40
"""Levels of `logging`, whose import would delay the start of the guardian."""

_NO_SHARED_STORE_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_GRACE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def parse_run(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    prog: str = "aio-elastic run",
    is_launch: bool = False,
) -> RunRequest:
    """Parse the arguments of `aio-elastic run`.

    Args:
        argv: everything after `run`.
        env: the environment, for `PET_*` and torch's variables.
        prog: the command, for its help.
        is_launch: accept `--use-env` and pass `--local-rank`, as torch.distributed.launch.

    Raises:
        UsageError: one line that names the option, the problem and the value.
        SystemExit: after `--help`, with code 0.
    """
    accepted = (*RUN_OPTIONS, USE_ENV) if is_launch else RUN_OPTIONS
    options, program = split_options(argv, accepted)
    notes: list[str] = []
    if is_in_worker(env):
        from elastic_aio.torch_variables import outside_worker  # most launchers are in none

        env, notes = outside_worker(env)
    values = plain_values(options, accepted)
    if values is None:
        from elastic_aio.cli.parser import option_parser

        values = vars(option_parser(accepted, RUN_EPILOG, prog).parse_args(options))
    if not program:
        raise UsageError(f"a script is required: {prog} [options] script [arguments]")
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
        return replace(request, variables=variables, warnings=tuple(warnings))
    except (SpecError, UsageError) as error:
        raise UsageError(as_option_error(error, variables)) from error


def _misplaced(
    argv: Sequence[str], program: list[str], accepted: Sequence[Option], env: Mapping[str, str]
) -> list[str]:
    """Return a line for what has no effect where it stands: variables, and the script's words."""
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


def _apply_scheduler(values: dict[str, str | None], env: Mapping[str, str]) -> list[str]:
    """Fill in the options of the rendezvous that a scheduler knows; return what it says."""
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
    """Put `--local-rank` before the script's arguments, except with `--use-env`."""
    if values["use_env"]:
        return program
    if values["no_python"] and not values["run_path"]:
        raise UsageError("--no-python: needs --use-env: --local-rank is for Python scripts")
    return [program[0], "--local-rank=${local_rank}", *program[1:]]


def _log_warnings(logs: LogSpec) -> list[str]:
    if logs.ignored:
        options = " and ".join(_option_of(f"logs.{name}") for name in logs.ignored)
        return [f"--log-dir /dev/null keeps no files: no effect of {options}"]
    if logs.max_bytes is not None and logs.is_in_no_file:
        return ["--log-max-bytes: no effect without --redirects or --tee"]
    return []


def _request(values: Values, program: list[str], env: Mapping[str, str]) -> RunRequest:
    warnings = _usage_warnings(values)
    rendezvous, notes = _rendezvous(values, env)
    http = _http(values)
    entrypoint, args = _program(values, program)
    nproc = values["nproc_per_node"] if values["nproc_per_node"] is not None else "1"
    restart = _restart(values)
    logs = parse_log_options(values, env)
    warnings += _log_warnings(logs)
    preload = [name.strip() for name in (values["preload"] or "").split(",") if name.strip()]
    spec = LaunchSpec(
        entrypoint,
        args=args,
        start_method=values["start_method"] or ("forkserver" if preload else "spawn"),  # type: ignore[arg-type]  # LaunchSpec checks it
        preload=preload,
        nproc_per_node=nproc if (number := parse_int(nproc)) is None else number,
        **rendezvous,
        **restart,
        role=values["role"] or "default",
        run_id=values["rdzv_id"] or None,
        host_store=env.get(_NO_SHARED_STORE_VARIABLE) != "1",
        **_torch_fields(env),
        logs=logs,
        stop=_stop_plan(values, env),
        liveness=_liveness(values),
        stdin=values["stdin"] or "null",  # type: ignore[arg-type]  # LaunchSpec checks it
        python=env.get("PYTHON_EXEC") or None,
        numa_binding=values["numa_binding"],  # type: ignore[arg-type]  # LaunchSpec checks it
        virtual_local_rank=bool(values["virtual_local_rank"]),
    )
    return RunRequest(
        spec,
        _signals(values),
        values["events"],
        values["loop"] or "auto",
        (*warnings, *notes),
        event_log_handler=values["event_log_handler"] or "null",
        is_dry_run=bool(values["dry_run"]),
        http=http,
        color=color_of(values, env),
        level=_level(values),
        has_control=not values["no_control"],
    )


def _has_torch_variable(env: Mapping[str, str]) -> bool:
    """Whether a variable may be one of those that torch's launcher reads."""
    return any(name.startswith("TORCHELASTIC_") for name in env)


def _torch_fields(env: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of the spec that only variables of torch's launcher set."""
    if not _has_torch_variable(env):
        return {}
    from elastic_aio.torch_variables import timers_from, uninterruptible_timeout_from

    timeout = uninterruptible_timeout_from(env)
    return {"timers": timers_from(env), "uninterruptible_timeout": timeout}


def _has_any(values: Values, options: Iterable[Option]) -> bool:
    """Whether one of the options is given, or torchrun's defaults take the place of ours."""
    return bool(values["torchrun_defaults"]) or any(
        values[option.dest] is not None for option in options
    )


def _rendezvous(values: Values, env: Mapping[str, str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the fields of the spec for several nodes, and lines to print at the start."""
    if not _has_any(values, RENDEZVOUS_OPTIONS):
        return {}, ()
    from elastic_aio.cli.rendezvous_options import parse_rendezvous_options

    found = parse_rendezvous_options(values, env)
    fields = {
        "nnodes": found.nodes,
        "master_addr": found.master_addr,
        "master_port": found.master_port,
        "rendezvous": found.spec,
    }
    return fields, found.warnings


def _restart(values: Values) -> dict[str, Any]:
    """Return the fields of the spec for restarts."""
    if not _has_any(values, RESTART_OPTIONS):
        return {}
    from elastic_aio.cli.restart_options import parse_max_restarts, parse_restart_options

    max_restarts = parse_max_restarts(values["max_restarts"])
    policy = parse_restart_options(values, max_restarts)
    return {"max_restarts": max_restarts, "restart": policy}


def _http(values: Values) -> str | None:
    if (address := values["http"]) is not None:
        parse_host_port("address", address, at_least=0)
    return address


def _level(values: Values) -> int | None:
    """Return the least level of `--quiet` or `--verbose`; None without either."""
    if values["quiet"] and values["verbose"]:
        raise UsageError("--quiet: excludes --verbose")
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
        parse_seconds("--monitor-interval", interval, is_positive=True)
        warnings.append("--monitor-interval has no effect: workers are not polled")
    return warnings


def _program(
    values: Values, program: list[str]
) -> tuple[Script | Module | Command | Function, list[str]]:
    """Return what the workers run, and its arguments; --run-path wins, as in torchrun."""
    script, *args = program
    if values["run_path"]:
        from elastic_aio.worker.scripts import run_script

        return Function(run_script, script), program
    if values["module"] and values["no_python"]:
        raise UsageError("-m/--module: excludes --no-python")
    if values["module"]:
        return Module(script), args
    return (Command((script,)) if values["no_python"] else Script(script)), args


def _stop_plan(values: Values, env: Mapping[str, str]) -> StopPlan:
    option, value = "--shutdown-timeout", values["shutdown_timeout"]
    if value is None and (value := env.get(_GRACE_VARIABLE) or None):
        option = _GRACE_VARIABLE
    grace = DEFAULT_GRACE if value is None else parse_seconds(option, value, limit=1e9)
    linger = values["linger"]
    return StopPlan.within(
        grace,
        scope=cast("StopScope", values["stop_scope"] or "leaders"),  # checked there
        linger=0.0 if linger is None else parse_seconds("--linger", linger, limit=1e9),
    )


def _liveness(values: Values) -> LivenessSpec:
    names = (*_DEADLINES, "idle_report")
    options = {name: f"--{name.replace('_', '-')}" for name in names}
    seconds = {
        name: parse_seconds(option, text, is_positive=True, limit=1e9)
        for name, option in options.items()
        if (text := values[name]) is not None
    }
    return LivenessSpec(**seconds, on_timeout=values["on_timeout"] or "fail")  # type: ignore[arg-type]  # LivenessSpec checks it


def _signals(values: Values) -> SignalSpec:
    stop: Iterable[int] = SignalSpec().stop
    if (value := values["signals_to_handle"]) is not None:
        # torchrun's users list SIGUSR1 to have it forwarded while the job goes on.
        stop = _signal_numbers(value) - SignalSpec().forward
    return SignalSpec(stop=stop, unhandled=values["signal_unhandled"] or "skip")  # type: ignore[arg-type]  # SignalSpec checks it


def _signal_numbers(value: str) -> set[int]:
    numbers = set()
    for name in value.split(","):
        try:
            numbers.add(signal_number("--signals-to-handle", name.strip()))
        except SpecError:
            problem = "must be signal names such as 'SIGTERM,SIGINT'"
            raise invalid_value("--signals-to-handle", problem, name.strip()) from None
    return numbers


_OPTION_OF_FIELD = {
    "logs.prefix": "--log-prefix",
    "logs.max_bytes": "--log-max-bytes",
    "logs.keep_attempts": "--log-keep-attempts",
    "logs.keep_runs": "--log-keep-runs",
    "rendezvous.backend": "--rdzv-backend",
    "rendezvous.endpoint": "--rdzv-endpoint",
    "endpoint": "--rdzv-endpoint",
    "address": "--http",
    "rendezvous.token": "--rdzv-conf: token_file",
    "rendezvous.conf": "--rdzv-conf",
    "run_id": "--rdzv-id",
    "restart.window": "--restart-window",
    "signals.stop": "--signals-to-handle",
    "stop.scope": "--stop-scope",
    "signals.forward": "--signals-to-handle",
    "signals.unhandled": "--signal-unhandled",
    "entrypoint": "script",
    "python": "PYTHON_EXEC",
}
"""Options that do not have the name of the spec's field that they set."""


def as_option_error(error: SpecError | UsageError, variables: Mapping[str, str] = {}) -> str:
    """Return the message of an error with the option, or its variable, in place of the field."""
    message = str(error)
    if isinstance(error, SpecError):
        option = _option_of(error.field)
        value = str(error.value) if isinstance(error.value, RestartWindow) else error.value
        message = str(SpecError(option, value, error.problem))
    option, colon, problem = message.partition(":")
    return f"{variables.get(option, option)}{colon}{problem}"


def _option_of(field: str) -> str:
    """Return the option that sets a field of the spec; the field if there is none."""
    if option := _OPTION_OF_FIELD.get(field):
        return option
    from elastic_aio.spec.rdzv_conf import SWITCHES, TIMES, TLS

    part, _, name = field.rpartition(".")
    for key in (name if part == "rendezvous" else "", field.replace(".", "_")):
        if key in (*TIMES, *SWITCHES, *TLS):
            return f"--rdzv-conf: {key}"
    same_name = (f"--{option.name}" for option in RUN_OPTIONS if option.dest == name)
    return next(same_name, field)
