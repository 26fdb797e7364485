"""What to run: `LaunchSpec`, entry points and node counts, frozen and checked when made.

Nothing here reads the host.  Whether the script exists and how many GPUs there are is
resolved by the agent before it starts a worker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from os import PathLike
from typing import Any, Final, Literal, cast

from elastic_aio.errors import SpecError
from elastic_aio.spec.checks import (
    MAX_NUMBER,
    check_number,
    checked_host,
    checked_integer,
    checked_items,
    checked_part,
    checked_path,
    checked_port,
    checked_text,
    checked_texts,
    is_integer,
    set_fields,
)
from elastic_aio.spec.liveness import LivenessSpec
from elastic_aio.spec.logs import LogSpec
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.spec.restart import UNLIMITED, RestartPolicy
from elastic_aio.spec.stop import StopPlan
from elastic_aio.value import Value

StartMethod = Literal["spawn", "fork", "forkserver"]
NumaMode = Literal["node", "socket", "exclusive", "core-complex", "cpu"]

# More than any host runs; results and logs of so many workers still fit into memory.
_NPROC_MAX: Final = 65_536
NPROC_ACCEPTED: Final = f"must be a number from 1 to {_NPROC_MAX}, 'cpu', 'gpu', 'xpu' or 'auto'"


class Script(Value, frozen=True):
    """The Python script `path`, run as `python -u path args...`."""

    path: str


class Module(Value, frozen=True):
    """The Python module `name`, run as `python -u -m name args...`."""

    name: str


class Command(Value, frozen=True):
    """The program `argv[0]` with its first arguments (`argv`), executed without a shell."""

    argv: tuple[str, ...]


class Function(Value, frozen=True):
    """The Python function `call`, called with the job's `args`; its value is returned."""

    call: Callable[..., Any]
    name: str = ""
    """Name of the function in messages; empty takes its own."""


class NodeRange(Value, frozen=True):
    """How many nodes a job runs on: from `minimum` to `maximum`, both included."""

    minimum: int = 1
    maximum: int = 1

    @classmethod
    def parse(cls, value: object) -> NodeRange:
        """Read `N`, `"N"`, `"MIN:MAX"` or a pair.

        Raises:
            SpecError: `value` has none of these forms with 1 <= MIN <= MAX.
        """
        ends: Sequence[object]
        if isinstance(value, NodeRange):
            ends = (value.minimum, value.maximum)
        elif isinstance(value, str):
            ends = [
                int(part) if part.isdecimal() and len(part) < 10 else part
                for part in value.split(":")
            ]
        elif isinstance(value, (tuple, list)):
            ends = value
        else:
            ends = (value,)
        if all(is_integer(end) and end <= MAX_NUMBER for end in ends):
            match ends:
                case [int(low), int(high)] if 1 <= low <= high:
                    return cls(low, high)
                case [int(only)] if only >= 1:
                    return cls(only, only)
        raise SpecError("nnodes", value, "must be N or MIN:MAX with 1 <= MIN <= MAX")

    def __str__(self) -> str:
        same = self.minimum == self.maximum
        return str(self.minimum) if same else f"{self.minimum}:{self.maximum}"


@dataclass(frozen=True, slots=True, init=False)
class LaunchSpec:
    """One job: what its workers run, how many there are, and how they are supervised.

    Raises:
        SpecError: one line naming the field, the problem and the value.
    """

    entrypoint: Script | Module | Command | Function
    """A script path, an argv list, a function, or one of these types."""
    args: tuple[Any, ...] = ()
    """Arguments of every worker.

    `${local_rank}` is replaced in those of commands; a function gets any picklable values.
    """
    nproc_per_node: int | str = 1
    """Workers per node; "cpu", "gpu", "xpu" and "auto" count what the host has.

    So does the name of a private-use backend: "npu", "mlu", "musa", "hpu", or that of a plug-in
    of the entry point group `elastic_aio.accelerators`.
    """
    nnodes: NodeRange = NodeRange()
    """Nodes of the job: N, "MIN:MAX" or a pair."""
    max_restarts: int = 0
    """How many failed attempts may be followed by another one; "unlimited" for any number."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables set in every worker, over the inherited environment.

    The launcher's own (RANK, MASTER_PORT, ...) cannot be replaced.
    """
    cwd: str | None = None
    """Working directory of the workers; None inherits."""
    role: str = "default"
    """Name of these workers, for line prefixes and `ROLE_NAME`."""
    logs: LogSpec = LogSpec()
    """Where the output of the workers goes."""
    restart: RestartPolicy = RestartPolicy()
    """Which failures are followed by another attempt, and after which delay."""
    stop: StopPlan = StopPlan()
    """How workers are stopped, on every path."""
    liveness: LivenessSpec = LivenessSpec()
    """How long workers may be silent, and what follows."""
    rendezvous: RendezvousSpec = RendezvousSpec()
    """How the nodes find each other; without effect for one node."""
    run_id: str | None = None
    """Name of the run, the same on all nodes.

    None is a random id for one node and "none" for several, torchrun's default.
    """
    master_addr: str | None = None
    """Host of MASTER_ADDR; None is 127.0.0.1 for one node.

    For several nodes it is the address of the node with group rank 0, as the others reach it.
    """
    master_port: int | None = None
    """TCP port of MASTER_PORT; None takes a free one for each attempt."""
    host_store: bool = True
    """Whether the agent serves torch's store at that port, a fresh one for each attempt.

    Otherwise worker 0 has to.
    """
    stdin: Literal["null", "rank0"] = "null"
    """Standard input of the workers: "null", or "rank0": local rank 0 inherits the launcher's."""
    python: str | None = None
    """Interpreter of scripts and modules; None is the running one."""
    start_method: StartMethod = "spawn"
    """How Python workers start.

    "spawn" starts a new interpreter; "fork" forks this process, for functions only;
    "forkserver" forks a server that has imported `preload` once for all attempts.
    """
    preload: tuple[str, ...] = ()
    """Modules that the server of "forkserver" imports."""
    numa_binding: NumaMode | None = None
    """How workers are bound to CPUs; None does not bind them.

    "node", "socket", "exclusive" and "core-complex" take CPUs near the device whose index is
    the local rank, as torch does; "cpu" divides the CPUs among the workers.
    """
    virtual_local_rank: bool = False
    """Whether each worker has LOCAL_RANK 0 and sees its own device only."""
    timers: bool | str = False
    """Whether workers may acquire timers (`elastic_aio.worker.expires`).

    A path is that of the named pipe to make; True makes one in the temporary directory.
    """
    uninterruptible_timeout: float | None = None
    """Seconds that a worker may be in one uninterruptible system call (state D); None: any time.

    After that the job fails without a restart, since the worker may hold what another attempt
    needs, and may not end.
    """
    event_history: int = 10_000
    """How many past events are kept for late readers."""

    def __init__(
        self,
        entrypoint: str
        | PathLike[str]
        | Sequence[str]
        | Script
        | Module
        | Command
        | Function
        | Callable[..., Any],
        *,
        args: Iterable[object] = (),
        nproc_per_node: int | str = 1,
        nnodes: int | str | tuple[int, int] | NodeRange = 1,
        max_restarts: int | Literal["unlimited"] = 0,
        env: Mapping[str, str] | None = None,
        cwd: str | PathLike[str] | None = None,
        role: str = "default",
        logs: LogSpec | None = None,
        restart: RestartPolicy | None = None,
        stop: StopPlan | None = None,
        liveness: LivenessSpec | None = None,
        rendezvous: RendezvousSpec | None = None,
        run_id: str | None = None,
        master_addr: str | None = None,
        master_port: int | None = None,
        host_store: bool = True,
        stdin: Literal["null", "rank0"] = "null",
        python: str | PathLike[str] | None = None,
        start_method: StartMethod = "spawn",
        preload: Iterable[str] = (),
        numa_binding: NumaMode | None = None,
        virtual_local_rank: bool = False,
        uninterruptible_timeout: float | None = None,
        timers: bool | str | PathLike[str] = False,
        event_history: int = 10_000,
    ) -> None:
        """Check and keep every setting; the fields say what they mean."""
        settings = {**locals()}
        program, nodes = _entrypoint(entrypoint), NodeRange.parse(nnodes)
        set_fields(self, entrypoint=program, args=_arguments(program, args), nnodes=nodes)
        if run_id is None and nodes.maximum > 1:
            settings["run_id"] = "none"
        set_fields(self, **{name: check(name, settings[name]) for name, check in _CHECKS.items()})
        if self.preload and start_method != "forkserver":
            raise SpecError("preload", ",".join(self.preload), "needs start method 'forkserver'")
        self.restart.check_with(self.max_restarts)
        self._check_rendezvous()
        if isinstance(self.nproc_per_node, int):
            self.logs.check_with(self.nproc_per_node)

    def _check_rendezvous(self) -> None:
        if self.nnodes.maximum == 1:
            return
        self.rendezvous.check_with(self.nnodes.maximum)
        if self.rendezvous.backend == "static" and self.nnodes.minimum < self.nnodes.maximum:
            problem = "must be one number with the backend 'static', which waits for all nodes"
            raise SpecError("nnodes", str(self.nnodes), problem)

    def replace(self, **changes: Any) -> LaunchSpec:
        """Return a copy with some settings changed; it is checked again."""
        settings = {setting.name: getattr(self, setting.name) for setting in fields(self)}
        return LaunchSpec(**{**settings, **changes})

    @property
    def name(self) -> str:
        """A short name of what the workers run: a path, a module, a program or a function."""
        match self.entrypoint:
            case Script(path):
                return path
            case Module(name):
                return name
            case Command(argv):
                return argv[0]
            case Function(call, name):
                return name or getattr(call, "__qualname__", type(call).__qualname__)


def _entrypoint(value: object) -> Script | Module | Command | Function:
    match value:
        case Script(path):
            return Script(checked_path("entrypoint", path))
        case Module(name):
            return Module(_module("entrypoint", name))
        case Function(call, name):
            if not callable(call):
                raise SpecError("entrypoint", call, "must be callable")
            return Function(call, checked_text("entrypoint", name))
        case Command(argv):
            return Command(_argv(argv))
        case list() | tuple():
            return Command(_argv(value))
    if isinstance(value, str) or hasattr(value, "__fspath__"):
        return Script(checked_path("entrypoint", value))
    if callable(value):
        return Function(value)
    problem = "must be a script path, an argv list, a function, a Script, a Module or a Command"
    raise SpecError("entrypoint", value, problem)


def _argv(value: Sequence[object]) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        raise SpecError("entrypoint", value, "must be a list of arguments")
    argv = tuple(_argument("entrypoint", item) for item in value)
    if not argv or not argv[0]:
        raise SpecError("entrypoint", list(value), "must start with a program")
    return argv


def _arguments(entrypoint: object, args: object) -> tuple[Any, ...]:
    items = checked_items("args", args)
    if isinstance(entrypoint, Function):
        return tuple(items)
    return tuple(_argument("args", item) for item in items)


def _argument(name: str, value: object) -> str:
    if hasattr(value, "__fspath__"):
        value = value.__fspath__()
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise SpecError(name, value, "must be text, a path or a number")
    try:
        return checked_text(name, str(value))
    except ValueError as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(name, value, "must have fewer digits") from None


def _module(name: str, value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"\w+(\.\w+)*", value):
        raise SpecError(name, value, "must be the dotted name of a module")
    return value


def _nproc(name: str, value: object) -> int | str:
    # A word that this host does not know is refused before the job starts.
    if isinstance(value, str) and re.fullmatch(r"[a-z][a-z0-9_]{1,31}", value):
        return value
    if not is_integer(value) or not 1 <= value <= _NPROC_MAX:
        raise SpecError(name, value, NPROC_ACCEPTED)
    return value


def _max_restarts(name: str, value: object) -> int:
    return UNLIMITED if value == "unlimited" else checked_integer(name, value, at_least=0)


def _run_id(name: str, value: object) -> str:
    if not checked_text(name, value):
        raise SpecError(name, value, "must not be empty")
    return cast("str", value)


def _env(name: str, value: object) -> Mapping[str, str]:
    env = checked_texts(name, {} if value is None else value)
    for variable in env:
        if not variable or "=" in variable:
            raise SpecError(name, variable, "must hold names without '=' or NUL")
    return env


def _preload(name: str, value: object) -> tuple[str, ...]:
    return tuple(_module(name, item) for item in checked_items(name, value))


def _timers(name: str, value: object) -> bool | str:
    return value if isinstance(value, bool) else checked_path(name, value)


def _seconds(name: str, value: object) -> float:
    check_number(name, value, above=0)
    return cast("float", value)


def _one_of(*accepted: str) -> Callable[[str, object], object]:
    def check(name: str, value: object) -> object:
        if value not in accepted:
            *others, last = map(repr, accepted)
            raise SpecError(name, value, f"must be {', '.join(others)} or {last}")
        return value

    return check


def _optional(check: Callable[[str, object], object]) -> Callable[[str, object], object]:
    return lambda name, value: None if value is None else check(name, value)


# How each setting is checked that needs no other one, in this order.
_CHECKS: Final[Mapping[str, Callable[[str, Any], object]]] = {
    "nproc_per_node": _nproc,
    "max_restarts": _max_restarts,
    "env": _env,
    "cwd": _optional(checked_path),
    "role": checked_text,
    "logs": partial(checked_part, kind=LogSpec),
    "restart": partial(checked_part, kind=RestartPolicy),
    "stop": partial(checked_part, kind=StopPlan, hint=", such as StopPlan.within(10)"),
    "liveness": partial(checked_part, kind=LivenessSpec),
    "rendezvous": partial(checked_part, kind=RendezvousSpec),
    "run_id": _optional(_run_id),
    "master_addr": _optional(checked_host),
    "master_port": _optional(checked_port),
    "host_store": partial(checked_part, kind=bool),
    "stdin": _one_of("null", "rank0"),
    "python": _optional(checked_path),
    "start_method": _one_of("spawn", "fork", "forkserver"),
    "preload": _preload,
    "numa_binding": _optional(_one_of("node", "socket", "exclusive", "core-complex", "cpu")),
    "virtual_local_rank": partial(checked_part, kind=bool),
    "timers": _timers,
    "uninterruptible_timeout": _optional(_seconds),
    "event_history": partial(checked_integer, at_least=1),
}
