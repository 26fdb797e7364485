"""What to run and how: `LaunchSpec` and its parts, frozen and checked when made.

Nothing here touches the machine.  What needs it (does the script exist, how many GPUs
are there) is resolved before anything starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, cast

from elastic_aio.checks import (
    PathLike,
    checked_argument,
    checked_environment,
    checked_integer,
    checked_items,
    checked_part,
    checked_path,
    checked_text,
    set_fields,
)
from elastic_aio.errors import SpecError
from elastic_aio.policy import RestartPolicy, StopPlan
from elastic_aio.rendezvousspec import RendezvousSpec
from elastic_aio.std import StdMap

__all__ = [
    "Command",
    "Function",
    "LaunchSpec",
    "LogSpec",
    "Module",
    "NodeRange",
    "Script",
    "StartMethod",
]

StartMethod = Literal["spawn", "fork", "forkserver"]

# More than any machine runs, and little enough to write down.
_NPROC_MAX = 65_536


@dataclass(frozen=True, slots=True)
class Script:
    """A Python script, run as `python -u path args...`."""

    path: str


@dataclass(frozen=True, slots=True)
class Module:
    """A Python module, run as `python -u -m name args...`."""

    name: str


@dataclass(frozen=True, slots=True)
class Command:
    """A program with its first arguments, executed as it is."""

    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Function:
    """A Python function, called with the job's `args`; its value comes back.

    `name` is what messages call it; empty takes the function's own.
    """

    call: Callable[..., Any]
    name: str = ""


@dataclass(frozen=True, slots=True, init=False)
class LogSpec:
    """Where the workers' output goes.

    Args:
        log_dir: folder for the logs of all runs; None makes a temporary one when
            it is needed; "/dev/null" keeps nothing and leaves every stream alone.
        redirects: streams that go to files only.
        tee: streams that go to files and, with a prefix, to the console.
        local_ranks_filter: local ranks shown on the console; empty shows all.
        prefix: template of the line prefix; `${role}` (or `${role_name}`),
            `${rank}`, `${local_rank}`, `${attempt}`, `${host}`, `${stream}` and
            `${timestamp}` are replaced; None is torchrun's `[${role}${local_rank}]:`.

    `redirects` and `tee` take a mask, a mapping of local ranks to masks, or the
    command line's text: `3`, `{0: 3}` and `"0:3"`.
    """

    log_dir: str | None = None
    redirects: StdMap = StdMap()
    tee: StdMap = StdMap()
    local_ranks_filter: frozenset[int] = frozenset()
    prefix: str | None = None

    def __init__(
        self,
        *,
        log_dir: str | PathLike | None = None,
        redirects: StdMap | Mapping[int, int] | int | str = 0,
        tee: StdMap | Mapping[int, int] | int | str = 0,
        local_ranks_filter: Iterable[int] = (),
        prefix: str | None = None,
    ) -> None:
        """Check and keep every setting; see the class for their meaning."""
        ranks = checked_items("logs.local_ranks_filter", local_ranks_filter)
        for rank in ranks:
            checked_integer("logs.local_ranks_filter", rank, at_least=0)
        if prefix is not None and "\n" in checked_text("logs.prefix", prefix):
            raise SpecError("logs.prefix", prefix, "must be a single line")
        folder = None if log_dir is None else checked_path("logs.log_dir", log_dir)
        set_fields(
            self,
            log_dir=folder,
            redirects=StdMap.parse("logs.redirects", redirects),
            tee=StdMap.parse("logs.tee", tee),
            local_ranks_filter=frozenset(ranks),
            prefix=prefix,
        )

    @property
    def is_off(self) -> bool:
        """Whether nothing is captured at all (`/dev/null`)."""
        return self.log_dir == "/dev/null"

    def check_with(self, nproc: int) -> None:
        """Refuse ranks that a node of `nproc` workers does not have."""
        highest = {
            "logs.redirects": self.redirects.highest_rank,
            "logs.tee": self.tee.highest_rank,
            "logs.local_ranks_filter": max(self.local_ranks_filter, default=-1),
        }
        for name, rank in highest.items():
            if rank >= nproc:
                raise SpecError(name, rank, f"local ranks must be from 0 to {nproc - 1}")


@dataclass(frozen=True, slots=True)
class NodeRange:
    """How many nodes a job takes: from `minimum` to `maximum`."""

    minimum: int = 1
    maximum: int = 1

    @classmethod
    def parse(cls, value: object) -> NodeRange:
        """Read `N`, `"N"`, `"MIN:MAX"` or a pair.

        Raises:
            SpecError: when it is none of these with 1 <= MIN <= MAX.
        """
        accepted = "must be N or MIN:MAX with 1 <= MIN <= MAX"
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
        if not any(isinstance(end, bool) for end in ends):
            match ends:
                case [int(low), int(high)] if 1 <= low <= high:
                    return cls(low, high)
                case [int(only)] if only >= 1:
                    return cls(only, only)
        raise SpecError("nnodes", value, accepted)

    def __str__(self) -> str:
        same = self.minimum == self.maximum
        return str(self.minimum) if same else f"{self.minimum}:{self.maximum}"


@dataclass(frozen=True, slots=True, init=False)
class LaunchSpec:
    """One job: what its workers run, how many there are, and how they are kept.

    Args:
        entrypoint: a script path, an argv list, a function, or a `Script`, `Module`,
            `Command` or `Function`.
        args: arguments of every worker; `${local_rank}` in those of commands is
            replaced, a function gets anything as it is.
        nproc_per_node: workers per node: a number, "cpu", "gpu" or "auto".
        nnodes: nodes of the job: N, "MIN:MAX" or a pair.
        max_restarts: how often the group may be restarted after failures.
        env: variables set in every worker, over the inherited environment; the
            launcher's own (RANK, MASTER_PORT, ...) cannot be replaced.
        cwd: working directory of the workers; None inherits.
        role: name of these workers, used in prefixes and `ROLE_NAME`.
        logs: where their output goes.
        restart: when and how fast a failed attempt is repeated.
        stop: how workers are stopped, on every path.
        rendezvous: how nodes meet.
        run_id: name of the run, the same on all nodes; None makes one, and is torchrun's
            "none" where several nodes have to know it.
        master_port: TCP port at which the workers meet; None takes a free one for
            each attempt.
        hosts_store: whether the agent itself serves torch's store at that port, a
            fresh one for each attempt; otherwise worker 0 has to.
        stdin: "null" (the default) or "rank0", which hands ours to local rank 0.
        python: interpreter of scripts and modules; None is the running one.
        start_method: how Python workers start: "spawn" in a new interpreter, "fork"
            (functions only) from this process, "forkserver" from a server that has
            imported `preload` once for all attempts.
        preload: modules that the server of "forkserver" imports.
        events_kept: how many past events late readers can still see.

    Raises:
        SpecError: one line naming the field, the value and what is accepted.
    """

    entrypoint: Script | Module | Command | Function
    args: tuple[Any, ...] = ()
    nproc_per_node: int | Literal["cpu", "gpu", "auto"] = 1
    nnodes: NodeRange = NodeRange()
    max_restarts: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    role: str = "default"
    logs: LogSpec = LogSpec()
    restart: RestartPolicy = RestartPolicy()
    stop: StopPlan = StopPlan()
    rendezvous: RendezvousSpec = RendezvousSpec()
    run_id: str | None = None
    master_port: int | None = None
    hosts_store: bool = True
    stdin: Literal["null", "rank0"] = "null"
    python: str | None = None
    start_method: StartMethod = "spawn"
    preload: tuple[str, ...] = ()
    events_kept: int = 10_000

    def __init__(
        self,
        entrypoint: str
        | PathLike
        | Sequence[str]
        | Script
        | Module
        | Command
        | Function
        | Callable[..., Any],
        *,
        args: Iterable[object] = (),
        nproc_per_node: int | Literal["cpu", "gpu", "auto"] = 1,
        nnodes: int | str | tuple[int, int] | NodeRange = 1,
        max_restarts: int = 0,
        env: Mapping[str, str] | None = None,
        cwd: str | PathLike | None = None,
        role: str = "default",
        logs: LogSpec | None = None,
        restart: RestartPolicy | None = None,
        stop: StopPlan | None = None,
        rendezvous: RendezvousSpec | None = None,
        run_id: str | None = None,
        master_port: int | None = None,
        hosts_store: bool = True,
        stdin: Literal["null", "rank0"] = "null",
        python: str | PathLike | None = None,
        start_method: StartMethod = "spawn",
        preload: Iterable[str] = (),
        events_kept: int = 10_000,
    ) -> None:
        """Check and keep every setting; see the class for their meaning."""
        what = _entrypoint(entrypoint)
        nodes = NodeRange.parse(nnodes)
        if run_id is None and nodes.maximum > 1:
            run_id = "none"
        set_fields(
            self,
            entrypoint=what,
            args=_arguments(what, args),
            nproc_per_node=_nproc(nproc_per_node),
            nnodes=nodes,
            max_restarts=checked_integer("max_restarts", max_restarts, at_least=0),
            env=MappingProxyType(checked_environment({} if env is None else env)),
            cwd=None if cwd is None else checked_path("cwd", cwd),
            role=checked_text("role", role),
            logs=checked_part("logs", logs, LogSpec),
            restart=checked_part("restart", restart, RestartPolicy),
            stop=checked_part("stop", stop, StopPlan),
            rendezvous=checked_part("rendezvous", rendezvous, RendezvousSpec),
            run_id=None if run_id is None else checked_text("run_id", run_id),
            master_port=None if master_port is None else _port(master_port),
            hosts_store=checked_part("hosts_store", hosts_store, bool),
            stdin=stdin,
            python=None if python is None else checked_path("python", python),
            start_method=start_method,
            preload=tuple(_module("preload", one) for one in checked_items("preload", preload)),
            events_kept=checked_integer("events_kept", events_kept, at_least=1),
        )
        if start_method not in ("spawn", "fork", "forkserver"):
            raise SpecError("start_method", start_method, "must be 'spawn', 'fork' or 'forkserver'")
        if self.preload and start_method != "forkserver":
            raise SpecError("preload", self.preload, "needs start_method='forkserver'")
        if stdin not in ("null", "rank0"):
            raise SpecError("stdin", stdin, "must be 'null' or 'rank0'")
        if self.run_id == "":
            raise SpecError("run_id", run_id, "must not be empty")
        self.restart.check_with(self.max_restarts)
        if nodes.maximum > 1:
            self.rendezvous.check_with(nodes.maximum)
        if isinstance(self.nproc_per_node, int):
            self.logs.check_with(self.nproc_per_node)

    def replaced(self, **changes: Any) -> LaunchSpec:
        """Return a copy with some settings changed, checked again."""
        settings = {one.name: getattr(self, one.name) for one in fields(self)}
        return LaunchSpec(**{**settings, **changes})

    @property
    def name(self) -> str:
        """What the workers run, in one word or two."""
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
                raise SpecError("entrypoint", call, "a function must be callable")
            return Function(call, checked_text("entrypoint", name))
        case Command(argv):
            return Command(_argv(argv))
        case list() | tuple():
            return Command(_argv(value))
    if isinstance(value, str) or hasattr(value, "__fspath__"):
        return Script(checked_path("entrypoint", value))
    if callable(value):
        return Function(value)
    accepted = "must be a script path, an argv list, a function, a Script, a Module or a Command"
    raise SpecError("entrypoint", value, accepted)


def _module(field: str, name: object) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"\w+(\.\w+)*", name):
        raise SpecError(field, name, "a module must have a dotted name")
    return name


def _arguments(entrypoint: object, args: object) -> tuple[Any, ...]:
    items = checked_items("args", args)
    if isinstance(entrypoint, Function):
        return tuple(items)
    return tuple(checked_argument("args", one) for one in items)


def _argv(value: Sequence[object]) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        raise SpecError("entrypoint", value, "an argv must be a list")
    argv = tuple(checked_argument("entrypoint", one) for one in value)
    if not argv or not argv[0]:
        raise SpecError("entrypoint", list(value), "an argv list must start with a program")
    return argv


def _port(value: object) -> int:
    if checked_integer("master_port", value, at_least=1) > 65535:
        raise SpecError("master_port", value, "must be a port from 1 to 65535")
    return cast("int", value)


def _nproc(value: object) -> int | str:
    if isinstance(value, str) and value in ("cpu", "gpu", "auto"):
        return value
    accepted = f"must be a number from 1 to {_NPROC_MAX}, 'cpu', 'gpu' or 'auto'"
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number or not 1 <= value <= _NPROC_MAX:  # type: ignore[operator]  # is_number
        raise SpecError("nproc_per_node", value, accepted)
    return cast("int", value)
