"""The environment of a worker, with torch's variables: its ranks, the job and the master."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic_aio.errors import HostError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
NOTIFY_FD = "ELASTIC_AIO_NOTIFY_FD"
"""The inherited socket for the messages of `elastic_aio.worker.notify`."""
NOTIFY_SOCKET = "NOTIFY_SOCKET"
"""The address of such a socket, as systemd names it."""
WATCHDOG_USEC = "WATCHDOG_USEC"
"""Microseconds within which a worker has to send a heartbeat."""
PENDING_CHANGE = "ELASTIC_AIO_PENDING_CHANGE"
"""Path of the file that `elastic_aio.worker.pending_change` reads."""
REAL_LOCAL_RANK = "ELASTIC_AIO_LOCAL_RANK"
"""The local rank where LOCAL_RANK is virtual, and so 0."""
RUN_ID = "TORCHELASTIC_RUN_ID"
TIMER_FILE = "TORCHELASTIC_TIMER_FILE"
TASK = "ELASTIC_AIO_TASK"
"""Marks a worker: the scheduler's task that its launcher runs in, as `task_of` returns it."""
NOTICE_SIGNAL = "ELASTIC_AIO_NOTICE_SIGNAL"  # of a preemption: it ends no Python worker
_CHANNELS = {NOTIFY_FD, NOTIFY_SOCKET, WATCHDOG_USEC, REAL_LOCAL_RANK, TIMER_FILE, PENDING_CHANGE}
_CHANNELS |= {NOTICE_SIGNAL}
SCHEDULERS = ("SLURM_", "OMPI_", "PMI_", "JOB_COMPLETION")
"""How the variables of schedulers begin that are read."""
# Variables that differ in another task: a job or a step that a worker has submitted, for example.
_TASK_VARIABLES = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "FLUX_JOB_ID", "LSB_JOBID", "LSF_PM_TASKID"),
    *("PBS_JOBID", "PBS_TASKNUM", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    *("PMI_JOBID", "PMI_KVS", "PMI_PORT"),
)

# Attributes by variable, for each type.
_NUMBERS = {
    "RANK": "rank",
    "LOCAL_RANK": "local_rank",
    "WORLD_SIZE": "world_size",
    "LOCAL_WORLD_SIZE": "local_world_size",
    "GROUP_RANK": "group_rank",
    "GROUP_WORLD_SIZE": "group_world_size",
    "ROLE_RANK": "role_rank",
    "ROLE_WORLD_SIZE": "role_world_size",
    "MASTER_PORT": "master_port",
    "TORCHELASTIC_RESTART_COUNT": "restart_count",
    "TORCHELASTIC_MAX_RESTARTS": "max_restarts",
}
# Those that torchrun does not set.
_OWN_NUMBERS = {"ELASTIC_AIO_ATTEMPT": "attempt", "ELASTIC_AIO_ROUND": "round"}
_TEXTS = {"ROLE_NAME": "role", "MASTER_ADDR": "master_addr", RUN_ID: "run_id"}
_ALL = {**_NUMBERS, **_OWN_NUMBERS, **_TEXTS}
_USE_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """The ranks, job and master of a worker; `WorkerContext.from_env()` returns its own."""

    rank: int
    """This worker among all of the job: 0 to `world_size` - 1."""
    local_rank: int
    """This worker among the workers of its node."""
    world_size: int
    """How many workers the job has."""
    local_world_size: int
    """How many workers this node has."""
    group_rank: int
    """This node among all nodes."""
    group_world_size: int
    """How many nodes the job has."""
    role_rank: int
    """This worker among the workers of its role."""
    role_world_size: int
    """How many workers have its role."""
    role: str
    """The role's name."""
    run_id: str
    """The job's id."""
    master_addr: str
    """Host at which the workers meet."""
    master_port: int
    """Port at which the workers meet."""
    restart_count: int = 0
    """How often the workers were restarted after failures; the same on all nodes."""
    max_restarts: int = 0
    """How often they may be; 999999999 for "unlimited"."""
    use_agent_store: bool = False
    """Whether the agent serves the store at the master's address; else worker 0 must."""
    error_file: str = ""
    """Path to which `record` writes; empty if nothing is kept."""
    attempt: int = 0
    """Number of the attempt, from 0, the same on all nodes; grows with every start of workers."""
    round: int = 0
    """Number of the round, which only grows; without a rendezvous the number of the attempt."""

    def to_env(self) -> dict[str, str]:
        """Return the variables to put into a worker's environment."""
        named = {name: str(getattr(self, field)) for name, field in _ALL.items()}
        # torch compares the flag with exactly this spelling.
        return {**named, _USE_AGENT_STORE: str(self.use_agent_store), ERROR_FILE: self.error_file}

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> WorkerContext:
        """Read the variables of a worker from `env`, by default this process's own environment.

        Raises:
            HostError: a variable is missing or not a number, so this process was not started by a
                launcher.
        """
        env = os.environ if env is None else env
        values: dict[str, Any] = {}
        name = ""
        try:
            for name, field in _NUMBERS.items():
                values[field] = int(env[name])
            for name, field in _OWN_NUMBERS.items():
                values[field] = int(env.get(name, 0))
            values |= {field: env[name] for name, field in _TEXTS.items()}
            use_agent_store = env[_USE_AGENT_STORE] == "True"
        except KeyError as error:
            raise HostError(f"not inside a worker: {error.args[0]} is not set") from error
        except ValueError as error:
            raise HostError(
                f"not inside a worker: {name} is not a whole number (got {env[name]!r})"
            ) from error
        error_file = env.get(ERROR_FILE, "")
        return cls(**values, use_agent_store=use_agent_store, error_file=error_file)


def task_of(env: Mapping[str, str]) -> str:
    """Return the identity of the scheduler's task of a process; "" without a scheduler."""
    return " ".join(f"{name}={env[name]}" for name in _TASK_VARIABLES if name in env)


def is_in_worker(env: Mapping[str, str]) -> bool:
    """Return whether a process is part of a worker: another job has set its variables.

    A task that a worker has submitted inherits them, and is none.
    """
    return TASK in env and set(task_of(env).split()) <= set(env[TASK].split())


def without_channels(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the channels of a worker, which its jobs must not use."""
    return {name: text for name, text in env.items() if TASK not in env or name not in _CHANNELS}
