"""The job to run: `LaunchSpec`, entry points and node counts, frozen and checked when made.

Nothing here reads the host.  The agent resolves whether the script exists and how many GPUs there
are before it starts a worker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from elastic_aio.errors import SpecError
from elastic_aio.spec import checks
from elastic_aio.spec.fields import Converted, SpecValue, field
from elastic_aio.spec.liveness import LivenessSpec
from elastic_aio.spec.logs import LogSpec
from elastic_aio.spec.rendezvous import STATIC_PORT, RendezvousSpec
from elastic_aio.spec.restart import RESTART_WHEN, UNLIMITED, RestartPolicy, RestartWhen
from elastic_aio.spec.stop import PreemptionSpec, StopPlan
from elastic_aio.text import counted
from elastic_aio.value import Value

if TYPE_CHECKING:
    from elastic_aio.spec.limits import LimitSpec
    from elastic_aio.spec.probe import PolledProbe, Probe
    from elastic_aio.spec.sockets import SocketSpec

LATE_TYPES: Final = {
    "LimitSpec": "elastic_aio.spec.limits",
    "PolledProbe": "elastic_aio.spec.probe",
    "Probe": "elastic_aio.spec.probe",
    "SocketSpec": "elastic_aio.spec.sockets",
}
"""Modules of the types that few jobs need, for the signature of `LaunchSpec`."""

StartMethod = Literal["spawn", "fork", "forkserver"]
"""How Python workers are started: by an exec, or by a fork of the launcher or of a server."""
NumaMode = Literal["node", "socket", "exclusive", "core-complex", "cpu"]
"""Which CPUs each worker is bound to."""

# More than any host runs; results and logs of so many workers still fit into memory.
NPROC_MAX: Final = 65_536
NPROC_ACCEPTED: Final = f"must be a number from 1 to {NPROC_MAX}, 'cpu', 'gpu', 'xpu' or 'auto'"


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
        if all(checks.is_integer(end) and end <= checks.MAX_NUMBER for end in ends):
            match ends:
                case [int(low), int(high)] if 1 <= low <= high:
                    return cls(low, high)
                case [int(only)] if only >= 1:
                    return cls(only, only)
        raise SpecError("nnodes", value, "must be N or MIN:MAX with 1 <= MIN <= MAX")

    def __str__(self) -> str:
        same = self.minimum == self.maximum
        return str(self.minimum) if same else f"{self.minimum}:{self.maximum}"


def _entrypoint(_: str, value: object) -> Script | Module | Command | Function:
    match value:
        case Script(path):
            return Script(checks.checked_path("entrypoint", path))
        case Module(name):
            return Module(_module("entrypoint", name))
        case Function(call, name):
            if not callable(call):
                raise SpecError("entrypoint", call, "must be callable")
            return Function(call, checks.checked_text("entrypoint", name))
        case Command(argv):
            return Command(_argv(argv))
        case list() | tuple():
            return Command(_argv(value))
    if isinstance(value, str) or hasattr(value, "__fspath__"):
        return Script(checks.checked_path("entrypoint", value))
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


def _arguments(name: str, entrypoint: object, args: Sequence[object]) -> tuple[Any, ...]:
    if isinstance(entrypoint, Function):
        return tuple(args)
    return tuple(_argument(name, item) for item in args)


def _argument(name: str, value: object) -> str:
    if hasattr(value, "__fspath__"):
        value = value.__fspath__()
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise SpecError(name, value, "must be text, a path or a number")
    try:
        return checks.checked_text(name, str(value))
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
    if not checks.is_integer(value) or not 1 <= value <= NPROC_MAX:
        raise SpecError(name, value, NPROC_ACCEPTED)
    return value


def _nodes(_: str, value: object) -> NodeRange:
    return NodeRange.parse(value)


def checked_max_restarts(name: str, value: object) -> int:
    return UNLIMITED if value == "unlimited" else checks.checked_integer(name, value, at_least=0)


def _env(name: str, value: object) -> Mapping[str, str]:
    env = checks.checked_texts(name, {} if value is None else value)
    for variable in env:
        if not variable or "=" in variable:
            raise SpecError(name, variable, "must hold names without '=' or NUL")
    return env


def _of_workers(check: Callable[[str, object], Any]) -> Callable[[str, object], tuple[Any, ...]]:
    return lambda name, value: tuple(
        check(f"{name}[{rank}]", item)
        for rank, item in enumerate(checks.checked_items(name, value))
    )


class _Restart(checks.Part, frozen=True):
    def __call__(self, name: str, value: object) -> Any:
        if isinstance(value, str):
            return RestartPolicy(when=checks.OneOf(RESTART_WHEN)(name, value))
        return super().__call__(name, value)


def _preload(name: str, value: object) -> tuple[str, ...]:
    return tuple(_module(name, item) for item in checks.checked_items(name, value))


def _timers(name: str, value: object) -> bool | str:
    return value if isinstance(value, bool) else checks.checked_path(name, value)


def _ready(name: str, value: object) -> Probe:
    from elastic_aio.spec.probe import checked_probe

    return checked_probe(name, value)


def _alive(name: str, value: object) -> PolledProbe:
    from elastic_aio.spec.probe import checked_alive

    return checked_alive(name, value)


def _sockets(name: str, value: object) -> tuple[SocketSpec, ...]:
    from elastic_aio.spec.sockets import checked_sockets

    return checked_sockets(name, value)


def _limits(name: str, value: object) -> LimitSpec:
    from elastic_aio.spec.limits import checked_limits

    return checked_limits(name, value)


def _program_of(argv: Sequence[str]) -> str:
    """Return the script or module of a Python interpreter, or another program itself."""
    if re.fullmatch(r"python[\d.]*t?", argv[0].rpartition("/")[2]):
        words = iter(argv[1:])
        for word in words:
            if word in ("-X", "-W"):
                next(words, None)
            elif word == "-m" or not word.startswith("-"):
                return next(words, argv[0]) if word == "-m" else word
            elif word in ("-", "-c"):
                break
    return argv[0]


class LaunchSpec(SpecValue, prefix=""):
    """One job: what its workers run, how many there are, and how they are supervised.

    Raises:
        SpecError: one line naming the field, the problem and the value.
    """

    entrypoint: Converted[
        Script | Module | Command | Function,
        str
        | PathLike[str]
        | Sequence[str]
        | Script
        | Module
        | Command
        | Function
        | Callable[..., Any],
    ] = field(check=_entrypoint, label="script", kw_only=False)
    """A script path, an argv list, a function, or one of these types."""
    args: Converted[tuple[Any, ...], Iterable[object]] = field(
        default=(), check=checks.checked_items
    )
    """Arguments of every worker.  `${local_rank}` is replaced in the arguments of commands; a
    function gets any picklable values."""
    nproc_per_node: int | str = field(
        default=1,
        check=_nproc,
        option="--nproc-per-node N",
        help="workers per node: a number, 'cpu' (one per usable CPU; a CPU quota does not count),"
        " 'gpu' or 'xpu' (one per visible device), the name of a private-use backend such as 'npu',"
        " or 'auto' (devices if there are any, else CPUs) (default 1)",
    )
    """Workers per node; "cpu", "gpu", "xpu" and "auto" count what the host has.  So does the name
    of a private-use backend: "npu", "mlu", "musa", "hpu", or a plug-in of the entry point group
    `elastic_aio.accelerators`."""
    nnodes: Converted[NodeRange, int | str | tuple[int, int] | NodeRange] = field(
        default=NodeRange(),
        check=_nodes,
        option="--nnodes N",
        help="nodes of the job: N or MIN:MAX (default 1)",
    )
    """Nodes of the job: N, "MIN:MAX" or a pair."""
    max_restarts: Converted[int, int | Literal["unlimited"]] = field(
        default=0,
        check=checked_max_restarts,
        alike=True,
        option="--max-restarts N",
        help="restarts of the group after failures: a number, or 'unlimited' (default 0)",
    )
    """How many failed attempts may be followed by another one; "unlimited" for any number."""
    env: Converted[Mapping[str, str], Mapping[str, str] | None] = field(
        default=MappingProxyType({}), check=_env
    )
    """Variables set in every worker, over the inherited environment.  The launcher's own (RANK,
    MASTER_PORT, ...) cannot be replaced."""
    worker_args: Converted[tuple[tuple[Any, ...], ...], Iterable[Iterable[object]]] = field(
        default=(), check=_of_workers(checks.checked_items)
    )
    """Further arguments of each worker, by local rank: they follow `args`; empty for none."""
    worker_env: Converted[tuple[Mapping[str, str], ...], Iterable[Mapping[str, str]]] = field(
        default=(), check=_of_workers(_env)
    )
    """Further variables of each worker, by local rank, over `env`; empty for none."""
    cwd: Converted[str | None, str | PathLike[str] | None] = field(
        default=None, check=checks.checked_path
    )
    """Working directory of the workers; None inherits."""
    role: str = field(
        default="default",
        check=checks.checked_text,
        option="--role NAME",
        help="name of the workers' role (default 'default')",
    )
    """Name of these workers, for line prefixes and `ROLE_NAME`."""
    logs: Converted[LogSpec, LogSpec | None] = field(default=LogSpec())
    """Where the output of the workers goes."""
    restart: Converted[RestartPolicy, RestartPolicy | RestartWhen | None] = field(
        default=RestartPolicy(), check=_Restart(RestartPolicy)
    )
    """Which failures are followed by another attempt, and after which delay; also given as the word
    of `RestartPolicy.when`."""
    stop: Converted[StopPlan, StopPlan | None] = field(
        default=StopPlan(), check=checks.Part(StopPlan, ", such as StopPlan.within(10)")
    )
    """How workers are stopped, on every path."""
    preemption: Converted[PreemptionSpec, PreemptionSpec | None] = field(default=PreemptionSpec())
    """What gives notice of a preemption, and how long workers then have."""
    liveness: Converted[LivenessSpec, LivenessSpec | None] = field(default=LivenessSpec())
    """How long workers may be silent, and what follows."""
    ready: Converted[Probe | None, Probe | str | Mapping[str, Any] | None] = field(
        default=None,
        check=_ready,
        own_option="--ready PROBE",
        help="what says that a worker is ready: http://HOST:PORT/PATH, https://..., tcp://HOST:PORT,"
        " exec:COMMAND, log:REGEX or 'notify' (READY=1) (default: as soon as it runs)",
    )
    """What says that a worker is ready: a probe, its text, or a table such as
    `{"http": "http://...", "period": 0.5}`.  The job is ready when all of its workers are; with
    None, when they run.  They have `liveness.ready_timeout` for that; without one they, and
    children after them, may wait without an end."""
    alive: Converted[PolledProbe | None, PolledProbe | str | Mapping[str, Any] | None] = field(
        default=None,
        check=_alive,
        own_option="--alive PROBE",
        help="fail the attempt when a worker that is ready fails this probe three times in a row:"
        " http://..., https://..., tcp://... or exec:COMMAND (default: none)",
    )
    """A probe that a worker may not fail once it is ready: `threshold` failures in a row are a
    hang, for which `liveness.on_timeout` says what follows."""
    sockets: Converted[tuple[SocketSpec, ...], Iterable[str | SocketSpec | Mapping[str, Any]]] = (
        field(
            default=(),
            check=_sockets,
            own_option="--socket ADDRESSES",
            help="listening sockets that workers inherit from descriptor 3 on (LISTEN_FDS), as in"
            " tcp://127.0.0.1:8000,admin=unix:///run/admin.sock; they stay open over restarts"
            " (default: none)",
        )
    )
    """Listening sockets that the launcher opens once and all workers inherit, from descriptor 3 on,
    as sd_listen_fds(3) describes: addresses `tcp://HOST:PORT` and `unix:///PATH`, with a name
    `NAME=ADDRESS`, or `SocketSpec`."""
    limits: Converted[LimitSpec | None, LimitSpec | Mapping[str, Any] | None] = field(
        default=None, check=_limits
    )
    """What the workers may use of the host, and as whom they run."""
    rendezvous: Converted[RendezvousSpec, RendezvousSpec | None] = field(default=RendezvousSpec())
    """How the nodes find each other; without effect for one node."""
    run_id: str | None = field(
        default=None,
        check=checks.checked_name,
        option="--rdzv-id ID",
        help="id of the run, the same on all nodes (default: a random id for one node, 'none' for"
        " several)",
    )
    """Name of the run, the same on all nodes.  None is a random id for one node and "none" for
    several, torchrun's default."""
    master_addr: str | None = field(
        default=None,
        check=checks.checked_host,
        option="--master-addr ADDR",
        help="host of the node with rank 0, for 'static'; with one node and --master-port,"
        " MASTER_ADDR of the workers (default 127.0.0.1)",
    )
    """Host of MASTER_ADDR; None is 127.0.0.1 for one node, and for several nodes the address of the
    node with group rank 0, as the others reach it."""
    master_port: int | None = field(
        default=None,
        check=checks.checked_port,
        option="--master-port PORT",
        help="TCP port of the workers' store (default: a free port per attempt); with 'static' the"
        f" port of the rendezvous store (default {STATIC_PORT})",
    )
    """TCP port of MASTER_PORT; None takes a free one for each attempt."""
    host_store: bool = field(default=True)
    """Whether the agent serves torch's store at that port, a fresh one for each attempt; otherwise
    worker 0 has to."""
    stdin: Literal["auto", "null", "rank0"] = field(
        default="auto",
        check=checks.OneOf(("auto", "null", "rank0")),
        own_option="--stdin SOURCE",
        help="stdin of local rank 0: 'rank0' (the launcher's), 'null', or 'auto': the launcher's if"
        " that is a terminal, in the foreground; other workers have 'null' (default 'auto')",
    )
    """Standard input of local rank 0: "rank0" is the launcher's, "null" is `/dev/null`, and "auto"
    is the launcher's if that is a terminal, in the foreground, and the job is no child of a group.
    Other workers have `/dev/null`."""
    python: Converted[str | None, str | PathLike[str] | None] = field(
        default=None, check=checks.checked_path, label="PYTHON_EXEC"
    )
    """Interpreter of scripts and modules; None is the running one."""
    start_method: StartMethod = field(
        default="spawn",
        check=checks.OneOf(("spawn", "fork", "forkserver")),
        option="--start-method NAME",
        help="start of Python workers: 'spawn', 'fork' (only with --run-path) or 'forkserver'"
        " (default 'spawn', with --preload 'forkserver')",
    )
    """How Python workers start: "spawn" starts a new interpreter; "fork" forks this process, for
    functions only; "forkserver" forks a server that has imported `preload` once for all
    attempts."""
    preload: Converted[tuple[str, ...], Iterable[str]] = field(
        default=(),
        check=_preload,
        own_option="--preload MODULES",
        help="modules that the fork server imports once for the workers of all attempts, as in"
        " 'torch,numpy' (default: none)",
    )
    """Modules that the server of "forkserver" imports."""
    numa_binding: NumaMode | None = field(
        default=None,
        check=checks.OneOf(("node", "socket", "exclusive", "core-complex", "cpu")),
        option="--numa-binding MODE",
        help="bind workers to CPUs near their devices: 'node', 'socket', 'exclusive' or"
        " 'core-complex'; or 'cpu' divides the CPUs among the workers (default: not bound)",
        has_variable=False,
    )
    """How workers are bound to CPUs; None does not bind them.  "node", "socket", "exclusive" and
    "core-complex" take CPUs near the device whose index is the local rank, as torch does; "cpu"
    divides the CPUs among the workers."""
    virtual_local_rank: bool = field(
        default=False,
        option="--virtual-local-rank",
        help="each worker has LOCAL_RANK 0 and sees its own device only (default: all devices)",
    )
    """Whether each worker has LOCAL_RANK 0 and sees its own device only."""
    timers: Converted[bool | str, bool | str | PathLike[str]] = field(default=False, check=_timers)
    """Whether workers may acquire timers (`elastic_aio.worker.expires`).  A path names the pipe to
    make; True makes one in the temporary directory."""
    uninterruptible_timeout: float | None = field(default=None, check=checks.Seconds(above=0))
    """Seconds that a worker may be in one uninterruptible system call (state D); None: any time.
    After that the job fails without a restart, since the worker may hold what another attempt
    needs, and may not end."""
    event_history: int = field(default=10_000, check=checks.Whole(at_least=1))
    """How many past events are kept for late readers."""

    def _check(self) -> None:
        self._set(
            args=_arguments("args", self.entrypoint, self.args),
            worker_args=tuple(
                _arguments("worker_args", self.entrypoint, args) for args in self.worker_args
            ),
        )
        if self.run_id is None and self.nnodes.maximum > 1:
            self._set(run_id="none")
        if self.preload and self.start_method != "forkserver":
            raise SpecError("preload", ",".join(self.preload), "needs start method 'forkserver'")
        self.restart.check_with(self.max_restarts)
        self.stop.checked_without_pipe()
        self._check_rendezvous()
        if isinstance(self.nproc_per_node, int):
            self.check_with(self.nproc_per_node)
        for name in ("sockets", "limits"):
            if getattr(self, name) and not self.is_executed:
                problem = f"needs start method 'spawn', not {self.start_method!r}"
                raise SpecError(name, getattr(self, name), problem)

    def check_with(self, nproc: int) -> None:
        """Raise `SpecError` if a field does not fit so many workers on this node."""
        self.logs.check_with(nproc)
        if self.ready is not None:
            self.ready.check_with("ready", nproc)
        if self.alive is not None:
            self.alive.check_with("alive", nproc)
        for name in ("worker_args", "worker_env"):
            if (items := getattr(self, name)) and len(items) != nproc:
                problem = f"must have an item for each of the {counted(nproc, 'worker')}"
                raise SpecError(name, list(items), problem)

    @property
    def is_executed(self) -> bool:
        """Whether each worker executes a program: it is not forked from another process."""
        match self.entrypoint, self.start_method:
            case (Command(), _) | (_, "spawn"):
                return True
            case Function(), _:
                return False
            case _, method:
                return method == "fork"  # scripts and modules are spawned

    def _check_rendezvous(self) -> None:
        if self.nnodes.maximum == 1:
            if (command := self.rendezvous.health_check) is not None:
                problem = "needs a job of several nodes: another node has to take over"
                raise SpecError("rendezvous.health_check", command, problem)
            return
        if self.restart.scope != "group":
            problem = "must be 'group' with several nodes, whose ranks share a world and a store"
            raise SpecError("restart.scope", self.restart.scope, problem)
        if self.restart.when == "always":
            problem = "must not be 'always' with several nodes, which end a run together"
            raise SpecError("restart.when", self.restart.when, problem)
        self.rendezvous.check_with(self.nnodes.maximum)
        if self.rendezvous.backend == "static" and self.nnodes.minimum < self.nnodes.maximum:
            problem = "must be one number with the backend 'static', which waits for all nodes"
            raise SpecError("nnodes", str(self.nnodes), problem)

    @property
    def name(self) -> str:
        """A short name of what the workers run: a path, a module, a program or a function."""
        match self.entrypoint:
            case Script(path):
                return path
            case Module(name):
                return name
            case Command(argv):
                return _program_of([*argv, *map(str, self.args)])
            case Function(call, name):
                return name or getattr(call, "__qualname__", type(call).__qualname__)

    if TYPE_CHECKING:

        @property
        def replace(self) -> type[_Job]: ...


if TYPE_CHECKING:
    _Program = Script | Module | Command | Function

    class _Job(LaunchSpec):
        entrypoint: Converted[
            _Program, str | PathLike[str] | Sequence[str] | _Program | Callable[..., Any]
        ] = field(default="")
