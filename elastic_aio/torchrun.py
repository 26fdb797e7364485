"""torchrun's flags and variables in, a `LaunchSpec` out.

The grammar is torchrun's: every option in a dashed and an underscored spelling,
`PET_*` variables as fallbacks that the command line overrides, and everything
after the script left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from elastic_aio.errors import SpecError
from elastic_aio.logspecs import ENTRY_POINTS
from elastic_aio.options.grammar import (
    Option,
    UsageError,
    option_parser,
    split_options,
    value_from_env,
)
from elastic_aio.options.rendezvous import RENDEZVOUS_OPTIONS, read_meeting
from elastic_aio.policy import DEFAULT_GRACE, SignalSpec, StopPlan
from elastic_aio.signames import signal_number
from elastic_aio.spec import Command, Function, LaunchSpec, LogSpec, Module, Script
from elastic_aio.std import StdMap
from elastic_aio.worker.scripts import run_script

__all__ = ["RunRequest", "UsageError", "in_options", "parse_run"]


class RunRequest(Struct, frozen=True):
    """What a command line asks for; `notices` are told to the user at the start."""

    spec: LaunchSpec
    signals: SignalSpec
    events_file: str | None
    notices: tuple[str, ...]


_OPTIONS = (
    *RENDEZVOUS_OPTIONS,
    Option(
        "nproc-per-node",
        "workers per node: a number, 'cpu', 'gpu' or 'auto' (default 1)",
        metavar="N",
    ),
    Option("max-restarts", "restarts of the group after failures (default 0)", metavar="N"),
    Option("monitor-interval", "accepted and unused: nothing is polled", metavar="S"),
    Option("role", "name of the workers' role (default 'default')", metavar="NAME"),
    Option("module", "run a module, as `python -m` does", short="-m"),
    Option("no-python", "execute the program itself, not a Python script"),
    Option("log-dir", "folder for logs; '/dev/null' keeps none", metavar="DIR"),
    Option(
        "redirects",
        "streams that go to files: 0-3, or ranks as in '0-3:3,10:1'",
        short="-r",
        metavar="MASK",
    ),
    Option(
        "tee", "streams that go to files and to the console, likewise", short="-t", metavar="MASK"
    ),
    Option("local-ranks-filter", "local ranks shown on the console, as in '0,2'", metavar="RANKS"),
    Option(
        "signals-to-handle",
        "signals that stop the job (default SIGTERM,SIGINT,SIGHUP,SIGQUIT);"
        " SIGUSR1 and SIGUSR2 are passed on to the workers, listed or not",
        metavar="NAMES",
    ),
    Option(
        "shutdown-timeout",
        f"seconds from the first signal to SIGKILL (default {DEFAULT_GRACE:g})",
        metavar="S",
    ),
    Option("stdin", "'null', or 'rank0': local rank 0 gets ours", metavar="WHO", has_pet=False),
    Option("log-prefix", "template of the prefix of tee'd lines", metavar="T", has_pet=False),
    Option(
        "logs-specs",
        "name of the plug-in that lays out the logs (default 'default')",
        metavar="NAME",
        has_pet=False,
    ),
    Option("run-path", "run the script as a function's worker, in this launcher's Python"),
    Option(
        "start-method",
        "how Python workers start: 'spawn' (default), 'fork' (only with --run-path)"
        " or 'forkserver'",
        metavar="NAME",
    ),
    Option(
        "preload",
        "modules that a server imports once, to fork the workers of all attempts, as in"
        " 'torch,numpy'",
        metavar="MODULES",
        has_pet=False,
    ),
    Option("events", "write every event to FILE as a line of JSON", metavar="FILE", has_pet=False),
)
# torchrun's, and not there yet; a value means that the option takes one.
_NOT_YET = {
    "event-log-handler": "NAME",
    "duplicate-stdout-filters": "TEXT",
    "duplicate-stderr-filters": "TEXT",
    "numa-binding": "KIND",
    "virtual-local-rank": "",
}
_EPILOG = (
    "Options have torchrun's names, with dashes or underscores; each has a PET_*"
    " variable (PET_NPROC_PER_NODE=4). Keys of --rdzv-conf, times in whole seconds:"
    " join_timeout (600), last_call_timeout (30), close_timeout (30), heartbeat_timeout (5),"
    " read_timeout (60), timeout (900; 'static' only), store_grace (heartbeat_timeout),"
    " keeps_workers (true), is_host (found out), token_file (a file with the store's token)."
)
_LOG_PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
_NO_SHARED_STORE_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_GRACE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def parse_run(argv: Sequence[str], env: Mapping[str, str]) -> RunRequest:
    """Read the arguments of `aio-elastic run`.

    Args:
        argv: everything after `run`.
        env: the environment, for the `PET_*` variables and those of torch.

    Raises:
        UsageError: one line that names the option, the value and what is accepted.
        SystemExit: after `--help`, with code 0.
    """
    options, program = split_options(argv, _OPTIONS, _NOT_YET)
    values = vars(option_parser(_OPTIONS, _EPILOG).parse_args(options))
    if not program:
        raise UsageError("a script is required: aio-elastic run [options] script [arguments]")
    for option in _OPTIONS:
        if values[option.dest] is None:
            values[option.dest] = value_from_env(option, env)
    _refuse_variables_not_yet(env)
    try:
        return _request(values, program, env)
    except SpecError as error:
        raise UsageError(in_options(error)) from error


def _refuse_variables_not_yet(env: Mapping[str, str]) -> None:
    for name in _NOT_YET:
        variable = f"PET_{name.replace('-', '_').upper()}"
        if env.get(variable, "") not in ("", "0", "null"):
            raise UsageError(f"{variable} is torchrun's variable for --{name}, not supported yet")


def _request(
    values: Mapping[str, str | None], program: list[str], env: Mapping[str, str]
) -> RunRequest:
    notices = []
    if (interval := values["monitor_interval"]) is not None:
        if not _is_positive(interval):
            raise UsageError(f"--monitor-interval: must be a number above 0, not {interval!r}")
        notices.append("--monitor-interval is accepted but unused: nothing is polled")
    if values["module"] and values["no_python"] and not values["run_path"]:
        raise UsageError("-m/--module and --no-python exclude each other")
    meeting = read_meeting(values, env)
    notices += meeting.notices
    script, *args = program
    preload = [name.strip() for name in (values["preload"] or "").split(",") if name.strip()]
    is_function = bool(values["run_path"])
    spec = LaunchSpec(
        Function(run_script, script)
        if is_function
        else Module(script)
        if values["module"]
        else Command((script,))
        if values["no_python"]
        else Script(script),
        args=[script, *args] if is_function else args,
        start_method=values["start_method"] or ("forkserver" if preload else "spawn"),  # type: ignore[arg-type]  # LaunchSpec checks it
        preload=preload,
        nproc_per_node=_nproc(values["nproc_per_node"]),
        nnodes=meeting.nodes,
        max_restarts=_whole("--max-restarts", values["max_restarts"] or "0"),
        role=values["role"] or "default",
        run_id=values["rdzv_id"] or None,
        master_port=meeting.master_port,
        hosts_store=env.get(_NO_SHARED_STORE_VARIABLE) != "1",
        logs=_logs_specs(values["logs_specs"])(
            log_dir=values["log_dir"] or None,
            redirects=StdMap.parse("logs.redirects", values["redirects"] or "0"),
            tee=StdMap.parse("logs.tee", values["tee"] or "0"),
            local_ranks_filter=_ranks(values["local_ranks_filter"] or ""),
            prefix=values["log_prefix"] or env.get(_LOG_PREFIX_VARIABLE) or None,
        ),
        stop=_stop_plan(values["shutdown_timeout"], env),
        stdin=values["stdin"] or "null",  # type: ignore[arg-type]  # LaunchSpec checks it
        rendezvous=meeting.spec,
        python=env.get("PYTHON_EXEC") or None,
    )
    return RunRequest(spec, _signals(values["signals_to_handle"]), values["events"], tuple(notices))


def _logs_specs(name: str | None) -> Callable[..., LogSpec]:
    """Return what makes the job's `LogSpec`: the default, or a plug-in."""
    if name in (None, "default"):
        return LogSpec
    from importlib.metadata import entry_points

    found = entry_points(group=ENTRY_POINTS)
    for entry in found.select(name=name):
        try:
            made: Callable[..., LogSpec] = entry.load()
        except Exception as error:
            raise UsageError(f"--logs-specs: {name} cannot be loaded: {error!r}") from error
        return made
    known = ", ".join(sorted({"default", *found.names}))
    raise UsageError(f"--logs-specs: must be one of {known}, not {name!r}")


def _nproc(value: str | None) -> int:
    if value is None:
        return 1
    if value in ("cpu", "gpu", "auto"):
        return value  # type: ignore[return-value]  # one of the three words
    if value.isdecimal() and len(value) < 10 and int(value) >= 1:
        return int(value)
    raise UsageError(
        f"--nproc-per-node: must be a number of at least 1, 'cpu', 'gpu' or 'auto', not {value!r}"
    )


def _whole(option: str, value: str) -> int:
    if not value.isdecimal():
        raise UsageError(f"{option}: must be a whole number of at least 0, not {value!r}")
    return int(value)


def _is_positive(value: str) -> bool:
    try:
        return float(value) > 0
    except ValueError:
        return False


def _ranks(value: str) -> frozenset[int]:
    ranks = [part.strip() for part in value.split(",")] if value.strip() else []
    for rank in ranks:
        if not rank.isdecimal():
            raise UsageError(
                f"--local-ranks-filter: must be local ranks such as '0,2', not {value!r}"
            )
    return frozenset(int(rank) for rank in ranks)


def _stop_plan(value: str | None, env: Mapping[str, str]) -> StopPlan:
    option = "--shutdown-timeout"
    if value is None and (value := env.get(_GRACE_VARIABLE) or None):
        option = _GRACE_VARIABLE
    if value is None:
        return StopPlan()
    try:
        grace = float(value)
    except ValueError:
        grace = -1.0
    if not 0 <= grace < float("inf"):
        raise UsageError(f"{option}: must be a number of seconds of at least 0, not {value!r}")
    return StopPlan.within(grace)


def _signals(value: str | None) -> SignalSpec:
    if value is None:
        return SignalSpec()
    numbers = set()
    for name in value.split(","):
        try:
            numbers.add(signal_number("--signals-to-handle", name.strip()))
        except SpecError:
            raise UsageError(
                f"--signals-to-handle: must be names such as 'SIGTERM,SIGINT', not {name.strip()!r}"
            ) from None
    # What its users meant by listing SIGUSR1: pass it on and go on with the job.
    return SignalSpec(stop=frozenset(numbers) - SignalSpec().forward)


# Fields of a spec, as the command line calls them.
_OPTION_OF_FIELD = {
    "logs.log_dir": "--log-dir",
    "logs.redirects": "--redirects",
    "logs.tee": "--tee",
    "logs.local_ranks_filter": "--local-ranks-filter",
    "logs.prefix": "--log-prefix",
    "rendezvous.backend": "--rdzv-backend",
    "rendezvous.endpoint": "--rdzv-endpoint",
    "rendezvous.node_rank": "--node-rank",
    "rendezvous.local_addr": "--local-addr",
    "rendezvous.exit_barrier_timeout": "--exit-barrier-timeout",
    **{
        f"rendezvous.{key}": f"--rdzv-conf: {key}"
        for key in (
            "is_host",
            "join_timeout",
            "last_call_timeout",
            "close_timeout",
            "heartbeat_timeout",
            "read_timeout",
            "store_grace",
            "keeps_workers",
        )
    },
    "rendezvous.token": "--rdzv-conf: token_file",
    "rendezvous.conf": "--rdzv-conf",
    "master_port": "--master-port",
    "run_id": "--rdzv-id",
    "nnodes": "--nnodes",
    "nproc_per_node": "--nproc-per-node",
    "max_restarts": "--max-restarts",
    "role": "--role",
    "stdin": "--stdin",
    "signals.stop": "--signals-to-handle",
    "signals.forward": "--signals-to-handle",
    "entrypoint": "script",
    "start_method": "--start-method",
    "preload": "--preload",
    "python": "PYTHON_EXEC",
}


def in_options(error: SpecError) -> str:
    """Say a spec's complaint in the words of the command line."""
    return str(
        SpecError(_OPTION_OF_FIELD.get(error.field, error.field), error.value, error.accepted)
    )
