"""torchrun's flags and variables in, a `LaunchSpec` out.

The grammar is torchrun's: every option in a dashed and an underscored spelling,
`PET_*` variables as fallbacks that the command line overrides, and everything
after the script left alone.  argparse cannot abbreviate an option that exists in
two spellings (Python 3.11 calls it ambiguous), so options are brought into one
spelling first, which also finds the script.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from msgspec import Struct

from elastic_aio.errors import SpecError
from elastic_aio.logspecs import ENTRY_POINTS
from elastic_aio.policy import DEFAULT_GRACE, SignalSpec, StopPlan
from elastic_aio.signames import signal_number
from elastic_aio.spec import Command, Function, LaunchSpec, LogSpec, Module, RendezvousSpec, Script
from elastic_aio.std import StdMap
from elastic_aio.worker.scripts import run_script

__all__ = ["RunRequest", "UsageError", "in_options", "parse_run"]


class UsageError(Exception):
    """A command line that cannot be accepted; the message is one line."""


class RunRequest(Struct, frozen=True):
    """What a command line asks for; `notices` are told to the user at the start."""

    spec: LaunchSpec
    signals: SignalSpec
    events_file: str | None
    notices: tuple[str, ...]


class _Option(Struct, frozen=True):
    name: str  # the dashed spelling, without "--"
    help: str
    short: str = ""
    metavar: str = ""  # empty: a flag
    has_pet: bool = True

    @property
    def is_flag(self) -> bool:
        return not self.metavar

    @property
    def dest(self) -> str:
        return self.name.replace("-", "_")

    @property
    def pet(self) -> str:
        return f"PET_{self.dest.upper()}"


_OPTIONS = (
    _Option("nnodes", "nodes of the job: N or MIN:MAX (only 1 for now)", metavar="N"),
    _Option(
        "nproc-per-node",
        "workers per node: a number, 'cpu', 'gpu' or 'auto' (default 1)",
        metavar="N",
    ),
    _Option("max-restarts", "restarts of the group after failures (default 0)", metavar="N"),
    _Option("monitor-interval", "accepted and unused: nothing is polled", metavar="S"),
    _Option("role", "name of the workers' role (default 'default')", metavar="NAME"),
    _Option("module", "run a module, as `python -m` does", short="-m"),
    _Option("no-python", "execute the program itself, not a Python script"),
    _Option("log-dir", "folder for logs; '/dev/null' keeps none", metavar="DIR"),
    _Option(
        "redirects",
        "streams that go to files: 0-3, or ranks as in '0-3:3,10:1'",
        short="-r",
        metavar="MASK",
    ),
    _Option(
        "tee", "streams that go to files and to the console, likewise", short="-t", metavar="MASK"
    ),
    _Option("local-ranks-filter", "local ranks shown on the console, as in '0,2'", metavar="RANKS"),
    _Option("standalone", "one node that meets nobody (the default)"),
    _Option("rdzv-backend", "how nodes meet: 'c10d'", metavar="NAME"),
    _Option("rdzv-endpoint", "where nodes meet: 'localhost:0' for one node", metavar="HOST:PORT"),
    _Option("rdzv-id", "name of the run (default: a random one)", metavar="ID"),
    _Option(
        "master-port",
        "TCP port at which the workers meet (default: a free one for each attempt)",
        metavar="PORT",
    ),
    _Option(
        "signals-to-handle",
        "signals that stop the job (default SIGTERM,SIGINT,SIGHUP,SIGQUIT);"
        " SIGUSR1 and SIGUSR2 are passed on to the workers, listed or not",
        metavar="NAMES",
    ),
    _Option(
        "shutdown-timeout",
        f"seconds from the first signal to SIGKILL (default {DEFAULT_GRACE:g})",
        metavar="S",
    ),
    _Option("stdin", "'null', or 'rank0': local rank 0 gets ours", metavar="WHO", has_pet=False),
    _Option("log-prefix", "template of the prefix of tee'd lines", metavar="T", has_pet=False),
    _Option(
        "logs-specs",
        "name of the plug-in that lays out the logs (default 'default')",
        metavar="NAME",
        has_pet=False,
    ),
    _Option("run-path", "run the script as a function's worker, in this launcher's Python"),
    _Option(
        "start-method",
        "how Python workers start: 'spawn' (default), 'fork' (only with --run-path)"
        " or 'forkserver'",
        metavar="NAME",
    ),
    _Option(
        "preload",
        "modules that a server imports once, to fork the workers of all attempts, as in"
        " 'torch,numpy'",
        metavar="MODULES",
        has_pet=False,
    ),
    _Option("events", "write every event to FILE as a line of JSON", metavar="FILE", has_pet=False),
)
# torchrun's, and not there yet; a value means that the option takes one.
_NOT_YET = {
    "rdzv-conf": "KEY=VALUE",
    "event-log-handler": "NAME",
    "duplicate-stdout-filters": "TEXT",
    "duplicate-stderr-filters": "TEXT",
    "node-rank": "N",
    "master-addr": "ADDR",
    "local-addr": "ADDR",
    "numa-binding": "KIND",
    "virtual-local-rank": "",
}
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
    options, program = _split(argv)
    values = vars(_parser().parse_args(options))
    if not program:
        raise UsageError("a script is required: aio-elastic run [options] script [arguments]")
    for option in _OPTIONS:
        if values[option.dest] is None:
            values[option.dest] = _from_env(option, env)
    _refuse_variables_not_yet(env)
    try:
        return _request(values, program, env)
    except SpecError as error:
        raise UsageError(in_options(error)) from error


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate our options, in their full dashed spelling, from the script and its arguments."""
    known = {option.name: option.metavar for option in _OPTIONS} | _NOT_YET | {"help": ""}
    shorts = {option.short: option.metavar for option in _OPTIONS if option.short} | {"-h": ""}
    options: list[str] = []
    rest = list(argv)
    while rest:
        word = rest[0]
        if word == "--":
            return options, rest[1:]
        if not word.startswith("-") or word == "-":
            break
        del rest[0]
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = _full_name(name.replace("_", "-"), known)
            if name in _NOT_YET:
                raise UsageError(f"--{name} is an option of torchrun's that is not supported yet")
            options.append(f"--{name}{equals}{value}")
            needs_value = known[name] and not equals
        elif word[:2] in shorts:
            options.append(word)
            needs_value = shorts[word[:2]] and len(word) == 2
        else:
            raise UsageError(f"unknown option {word} (aio-elastic run --help lists them)")
        if needs_value:
            if not rest:
                raise UsageError(f"{options[-1]} needs a value: {needs_value}")
            # Joined, so that argparse takes a value that begins with a dash too.
            joint = "=" if options[-1].startswith("--") else ""
            options[-1] += joint + rest.pop(0)
    return options, rest


def _full_name(name: str, known: Mapping[str, str]) -> str:
    if name in known:
        return name
    fitting = [full for full in known if full.startswith(name)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        could = ", ".join(f"--{full}" for full in fitting)
        raise UsageError(f"--{name} could be any of {could}")
    raise UsageError(f"unknown option --{name} (aio-elastic run --help lists them)")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="aio-elastic run",
        usage="aio-elastic run [options] script [arguments of the script]",
        description="Run a script as a group of worker processes, and restart them when one fails.",
        epilog="Options have torchrun's names, with dashes or underscores; each has a PET_*"
        " variable (PET_NPROC_PER_NODE=4).",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
    )
    for option in _OPTIONS:
        names = [option.short] if option.short else []
        names.append(f"--{option.name}")
        if option.is_flag:
            parser.add_argument(
                *names, dest=option.dest, help=option.help, action="store_const", const="1"
            )
        else:
            parser.add_argument(*names, dest=option.dest, help=option.help, metavar=option.metavar)
    return parser


def _from_env(option: _Option, env: Mapping[str, str]) -> str | None:
    value = env.get(option.pet) if option.has_pet else None
    if value is None:
        return None
    if option.is_flag:
        if not value.isdecimal():
            raise UsageError(f"{option.pet}: must be 0 or 1, not {value!r}")
        return "1" if int(value) else None
    return value


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
        nnodes=values["nnodes"] or "1",
        max_restarts=_whole("--max-restarts", values["max_restarts"] or "0"),
        role=values["role"] or "default",
        run_id=values["rdzv_id"] or None,
        master_port=_master_port(values["master_port"]),
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
        rendezvous=_rendezvous(values),
        python=env.get("PYTHON_EXEC") or None,
    )
    if spec.nnodes.maximum > 1:
        raise UsageError(f"--nnodes: more than one node is not supported yet, not {spec.nnodes}")
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


def _master_port(value: str | None) -> int | None:
    if value is None:
        return None
    if not (value.isdecimal() and len(value) < 6 and 1 <= int(value) <= 65535):
        raise UsageError(f"--master-port: must be a port from 1 to 65535, not {value!r}")
    return int(value)


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


def _rendezvous(values: Mapping[str, str | None]) -> RendezvousSpec:
    backend = values["rdzv_backend"] or "c10d"
    # torchrun's default backend is "static", and one node without an endpoint
    # meets nobody there either.
    backend = "c10d" if backend == "static" else backend
    return RendezvousSpec(backend=backend, endpoint=values["rdzv_endpoint"] or "localhost:0")


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
