"""Launchers of worker groups, each with its own options for the same job.

What a launcher has no option for raises `Lacks`: such a cell of the table says so, and was not run.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from benchmarks.jobs import WORKER
from benchmarks.peers import OURS, Installer, Lacks, Peer, refuse
from elastic_aio import __version__

__all__ = [
    "LAUNCHER_PEERS",
    "Accelerate",
    "ElasticRun",
    "FtLauncher",
    "Launch",
    "Launching",
    "Torchrun",
]

_NOTES = {"PYTHONWARNINGS": "ignore::FutureWarning:torch.cuda"}
"""torch warns of a package that ft_launcher needs: other launchers do not have it installed."""


@dataclass(frozen=True)
class Launch:
    """A job; in its texts `{port}` is a free port and `{dir}` its directory (see `jobs.Job`).

    `words` are those of `workers/parity.py`, the program, unless `program` is another one.
    `port` is "" for the launcher's default; `free_port` asks for a port only where the default
    is the same for all jobs.  Times are in seconds, and 0 for the default.
    """

    words: str = ""
    program: tuple[str, ...] = ()
    python: bool = True
    workers: int | str = 2  # of a node; "" without the option
    restarts: int = 0
    alone: bool = False  # a restart is that of the failed worker only
    stop: int = 0
    logs: bool = False  # log files of all streams, at log_dir
    tee: bool = False
    log_dir: str = "{dir}/logs"
    shown: int | None = None  # the rank whose output reaches the console
    nodes: str = "1"
    more: int = 0  # workers of the second node above those of the first
    join: int = 0
    heartbeat: int = 0
    section: int = 0
    port: str = "{port}"
    free_port: bool = True
    options: tuple[str, ...] = ()


class Launching(Peer):
    """A launcher."""

    beats: ClassVar[str] = ""
    """How its workers send heartbeats: see `workers/parity.py`."""
    learns: ClassVar[str] = ""
    """How its workers learn the limit of their heartbeats."""
    sections: ClassVar[str] = ""
    """How its workers limit the time of a section."""

    def command(self, launch: Launch, node: int = 0) -> list[str]:
        """Return the command of a node."""
        program = launch.program or ("{w}", *shlex.split(launch.words))
        plain = [] if launch.python else [self._plain()]
        return [*self._launcher(), *self._options(launch, node), *launch.options, *plain, *program]

    def variables(self, launch: Launch) -> dict[str, str]:
        """Return the variables that it needs, or that are its settings."""
        return {}

    def file(self, directory: Path) -> list[str]:
        """Write a file that asks for three workers; return the command that reads it."""
        raise Lacks

    def training(self) -> tuple[str, ...]:
        """Return the options by which the program trains with bfloat16."""
        raise Lacks

    def events(self) -> tuple[str, ...]:
        """Return the options that make events of lines of JSON, in {dir}/events or on stderr."""
        raise Lacks

    def ask(self, verb: str) -> list[str]:
        """Return the command that does something with a running job: "status" or "dump"."""
        raise Lacks

    def _launcher(self) -> list[str]:
        raise NotImplementedError

    def _plain(self) -> str:
        """Return the option for a program that is not Python."""
        return "--no-python"

    def _options(self, launch: Launch, node: int) -> Iterator[str]:
        """Yield options as torchrun has them."""
        if launch.workers != "":
            workers = launch.workers if not node else int(launch.workers) + launch.more
            yield f"--nproc-per-node={workers}"
        if launch.restarts:
            yield f"--max-restarts={launch.restarts}"
        if launch.tee or launch.logs:
            yield f"--log-dir={launch.log_dir}"
            yield "--tee=3" if launch.tee else "--redirects=3"
        if launch.shown is not None:
            yield f"--local-ranks-filter={launch.shown}"
        if launch.nodes != "1":
            yield f"--nnodes={launch.nodes}"
            yield from ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{launch.port}")
            yield from ("--rdzv-id=job", f"--rdzv-conf={_conf(launch)}")


def _conf(launch: Launch) -> str:
    join = f",join_timeout={launch.join}" if launch.join else ""
    return f"last_call_timeout=1{join}"


class ElasticRun(Launching):
    """`aio-elastic run`."""

    beats = "notify"
    sections = "notify"

    def _launcher(self) -> list[str]:
        return [*self._command(), "run"]

    def _command(self) -> list[str]:
        return [sys.executable, "-P", "-m", "elastic_aio"]

    def _options(self, launch: Launch, node: int) -> Iterator[str]:
        yield from super()._options(launch, node)
        if launch.alone:
            yield "--restart-scope=worker"
        if launch.stop:
            yield f"--shutdown-timeout={launch.stop}"
        if launch.heartbeat:
            yield f"--heartbeat-timeout={launch.heartbeat}"
        if launch.port and not launch.free_port and launch.nodes == "1":
            yield f"--master-port={launch.port}"

    def file(self, directory: Path) -> list[str]:
        """Write `jobs.toml`."""
        path = directory / "jobs.toml"
        path.write_text(f'[children.web]\nscript = "{WORKER}"\nnproc_per_node = 3\n')
        return [*self._command(), "up", str(path)]

    def events(self) -> tuple[str, ...]:
        """Let it write the file."""
        return ("--events={dir}/events",)

    def ask(self, verb: str) -> list[str]:
        """Return `aio-elastic status` or `dump`."""
        return [*self._command(), verb]


class Torchrun(Launching):
    """`torchrun`."""

    sections = "timer"

    def variables(self, launch: Launch) -> dict[str, str]:
        """Let timers of the workers hold where a section has a limit.

        A range of nodes gets a store of the workers for each round: by default torchrun waits
        without end when another node joins.
        """
        found = dict(_NOTES)
        if launch.section:
            found["TORCHELASTIC_ENABLE_FILE_TIMER"] = "1"
        if ":" in launch.nodes:
            found["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        return found

    def _launcher(self) -> list[str]:
        return [str(self.tools / "torchrun")]

    def _options(self, launch: Launch, node: int) -> Iterator[str]:
        refuse(launch.alone, launch.heartbeat)
        yield from super()._options(launch, node)
        if launch.stop:
            yield f"--shutdown-timeout={launch.stop}"
        if launch.port and launch.nodes == "1":
            yield f"--master-port={launch.port}"

    def events(self) -> tuple[str, ...]:
        """Let it write them to standard error."""
        return ("--event-log-handler=console",)


class FtLauncher(Launching):
    """NVIDIA's `ft_launcher`, with its watch for network cards off: this host has none."""

    beats = "ft"
    learns = "learn"
    sections = "ft"

    def variables(self, launch: Launch) -> dict[str, str]:
        """Return what keeps torch from a warning."""
        return _NOTES

    def _launcher(self) -> list[str]:
        return [str(self.tools / "ft_launcher"), "--ft-enable-nic-monitor=false"]

    def _options(self, launch: Launch, node: int) -> Iterator[str]:
        refuse(launch.alone)
        yield from super()._options(launch, node)
        if launch.stop:
            yield from (f"--term-timeout={launch.stop}", f"--workers-stop-timeout={launch.stop}")
        if launch.heartbeat:
            yield f"--ft-rank-heartbeat-timeout={launch.heartbeat}"
        if launch.section:
            yield f"--ft-rank-section-timeouts=load:{launch.section}"
        if launch.heartbeat or launch.section:
            yield "--ft-workload-check-interval=0.5"
        if launch.port and launch.nodes == "1":
            yield f"--rdzv-endpoint=127.0.0.1:{launch.port}"


class Accelerate(Launching):
    """`accelerate launch --multi_gpu`, which is how it starts several processes, on CPUs."""

    sections = "timer"

    def variables(self, launch: Launch) -> dict[str, str]:
        """Return the variables of torch's launcher, which it runs in its own process."""
        found = {**_NOTES, "ACCELERATE_USE_CPU": "true"}
        if launch.stop:
            found["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(launch.stop)
        if launch.section:
            found["TORCHELASTIC_ENABLE_FILE_TIMER"] = "1"
        return found

    def _launcher(self) -> list[str]:
        return [str(self.tools / "accelerate"), "launch"]

    def _plain(self) -> str:
        return "--no_python"

    def _options(self, launch: Launch, node: int) -> Iterator[str]:
        bad = launch.workers == "" or launch.shown is not None or ":" in launch.nodes
        refuse(bad, launch.alone, launch.heartbeat, launch.more)
        many = launch.nodes != "1"
        workers = int(launch.workers) * int(launch.nodes) if many else launch.workers
        yield from ("--multi_gpu", f"--num_processes={workers}", f"--num_machines={launch.nodes}")
        yield from ("--mixed_precision=no", "--dynamo_backend=no")
        if launch.restarts:
            yield f"--max_restarts={launch.restarts}"
        if launch.tee or launch.logs:
            yield from (f"--log_dir={launch.log_dir}", "--tee=3")
        if many:
            yield from (f"--machine_rank={node}", "--main_process_ip=127.0.0.1")
            yield from ("--rdzv_backend=c10d", f"--rdzv_conf={_conf(launch)}")
        if launch.port:
            yield f"--main_process_port={launch.port}"

    def file(self, directory: Path) -> list[str]:
        """Write its configuration, as `accelerate config` does."""
        path = directory / "config.yaml"
        path.write_text(
            "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 3\n"
            "num_machines: 1\nmachine_rank: 0\nmixed_precision: 'no'\nmain_process_port: 0\n"
            "use_cpu: false\n"
        )
        return [*self._launcher(), f"--config_file={path}", str(WORKER)]

    def training(self) -> tuple[str, ...]:
        """Set what its `Accelerator` reads."""
        return ("--mixed_precision=bf16",)


_TORCH = ("torch==2.13.0", "numpy")
LAUNCHER_PEERS: Mapping[str, Callable[[Installer], Peer]] = {
    OURS: lambda _: ElasticRun(OURS, __version__, Path()),
    "torchrun": lambda it: it.pypi(Torchrun, "torchrun", *_TORCH),
    "ft_launcher": lambda it: it.pypi(FtLauncher, "ft_launcher", "nvidia-resiliency-ext", *_TORCH),
    "accelerate": lambda it: it.pypi(Accelerate, "accelerate", "accelerate==1.15.0", *_TORCH),
}
