"""What a cluster's scheduler says of a job in the environment, as settings of a rendezvous.

Each task that the scheduler starts is a node of the job, usually one for each host.  The nodes meet
at the host of the first task, at a port that follows from the job's id, so that jobs that share a
host do not meet.

By default, the stop grace is shorter than the time from the scheduler's SIGTERM to its SIGKILL: the
workers end, and the launcher exits with its own code, before that.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from msgspec import Struct

from elastic_aio.spec.checks import UsageError, format_host_port, invalid_value, parse_int
from elastic_aio.text import os_bytes

Env = Mapping[str, str]

# Below the ports that kernels give to clients (32768 and up), and none of torch's own.
_FIRST_PORT: Final = 20_000
_PORTS: Final = 9_000
_HOSTS_MAX: Final = 100_000
_LOSSES: Final = "replace_timeout=30"
"""For schedulers that do not replace a lost node: the others do not wait long."""

_PIECE: Final = re.compile(r"([\w.-]+)|\[([\d,-]+)\]")
_HOST: Final = re.compile(rf"(?:{_PIECE.pattern})+")


class Allocation(Struct, frozen=True, kw_only=True):
    """The place of this process in a job of a scheduler.

    Attributes:
        scheduler: its name.
        job_id: the id of the job, and of its step if it has several.
        nodes: number of nodes; None if the scheduler does not say it.
        rank: this node among them.
        host: the host of the first node; empty if it is not known.
        grace: seconds for a stop; None if the scheduler sets no limit.
        advice: what to do if this process is not started by the scheduler itself; else empty.
        problem: why the variables do not describe all nodes; empty if they do.  The job
            then needs its number of nodes and its endpoint as options.
        replaces_nodes: whether it starts a task again whose host is lost.
    """

    scheduler: str
    job_id: str
    nodes: int | None = 1
    rank: int = 0
    host: str = ""
    grace: float | None = None
    advice: str = ""
    problem: str = ""
    replaces_nodes: bool = False

    @property
    def run_id(self) -> str:
        return f"{self.scheduler.lower().replace(' ', '-')}-{self.job_id}"

    @property
    def port(self) -> int:
        return _FIRST_PORT + zlib.crc32(os_bytes(self.run_id)) % _PORTS


def find_allocation(env: Env, fqdn: Callable[[], str] = lambda: "") -> Allocation | None:
    """Return the place of this process in a job of a scheduler; None without a scheduler.

    `fqdn` returns the full name of this host, for Kubernetes.

    Raises:
        UsageError: the named variable of the scheduler is malformed.
    """
    for finder in (_slurm, _open_mpi, _pmi):
        if (found := finder(env)) is not None:
            return found
    return _kubernetes(env, fqdn)


# --------------------------------------------------------------------- schedulers


def _slurm(env: Env) -> Allocation | None:
    if not (job := env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID")):
        return None
    if requeued := _number(env, "SLURM_RESTART_COUNT"):
        job = f"{job}r{requeued}"  # a store that outlives the job knows the end of the former one
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID") or ""
    nodes = _number(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or 1
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    variable = next((name for name in names if env.get(name)), "")
    hosts = expand_hosts(variable, env[variable]) if variable else []
    grace = 25.0  # KillWait is 30 s by default
    # The batch script and the shell of salloc are no step: srun starts one on all nodes.
    is_shell = not step and (env.get("ENVIRONMENT") == "BATCH" or not env.get("SLURM_NODEID"))
    if is_shell:
        advice = f"one of {nodes} nodes: start it with srun to use all" if nodes > 1 else ""
        return Allocation(scheduler="Slurm", job_id=job, grace=grace, advice=advice)
    rank = _number(env, "SLURM_NODEID") or 0
    if (_number(env, "SLURM_HET_SIZE", "SLURM_PACK_SIZE") or 1) > 1:
        problem = "the variables of a heterogeneous job tell of one component only"
        return Allocation(
            scheduler="Slurm", job_id=job, nodes=None, rank=rank, grace=grace, problem=problem
        )
    tasks = _number(env, "SLURM_STEP_NUM_TASKS") or nodes
    if tasks != nodes:
        nodes, rank = tasks, _number(env, "SLURM_PROCID") or 0
    return Allocation(
        scheduler="Slurm",
        job_id=f"{job}.{step}" if step else job,
        nodes=nodes,
        rank=rank,
        host=hosts[0] if hosts else "",
        grace=grace,
    )


def _open_mpi(env: Env) -> Allocation | None:
    size = _number(env, "OMPI_COMM_WORLD_SIZE")
    if size is None:
        return None
    # `JOBID;tcp://ADDRESS,ADDRESS:PORT` of mpirun, which runs on the first host by default.
    uri = env.get("OMPI_MCA_orte_hnp_uri") or env.get("PMIX_SERVER_URI2") or ""
    contact = re.search(r"tcp4?://([\w.-]+)", uri)
    is_local = _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE") == size
    return Allocation(
        scheduler="Open MPI",
        job_id=env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or "job",
        nodes=size,
        rank=_number(env, "OMPI_COMM_WORLD_RANK") or 0,
        host=_host_of_mpi(env, contact.group(1) if contact else "", is_local=is_local),
    )


def _pmi(env: Env) -> Allocation | None:
    size = _number(env, "PMI_SIZE")
    if size is None or "PMI_RANK" not in env:
        return None
    contact = env.get("PMI_PORT", "").rpartition(":")[0]
    is_local = _number(env, "MPI_LOCALNRANKS") == size
    return Allocation(
        scheduler="MPI",
        job_id=env.get("PMI_JOBID") or env.get("PMI_KVS") or contact or "job",
        nodes=size,
        rank=_number(env, "PMI_RANK") or 0,
        host=_host_of_mpi(env, contact, is_local=is_local),
    )


def _host_of_mpi(env: Env, contact: str, *, is_local: bool) -> str:
    return env.get("MASTER_ADDR") or ("127.0.0.1" if is_local else contact)


def _kubernetes(env: Env, fqdn: Callable[[], str]) -> Allocation | None:
    """Read an Indexed Job, also of a JobSet; its pods have the host names `JOB-INDEX`."""
    rank = _number(env, "JOB_COMPLETION_INDEX")
    if rank is None:
        return None
    try:
        name, dot, domain = fqdn().partition(".")
    except UnicodeError:  # DNS has no such name
        name = dot = domain = ""
    job, dash, index = name.rpartition("-")
    first = f"{job}-0{dot}{domain}" if dash and index == str(rank) else ""
    return Allocation(
        scheduler="Kubernetes",
        job_id=job or "job",
        nodes=_number(env, "JOB_COMPLETIONS"),
        rank=rank,
        host=env.get("MASTER_ADDR") or first,
        grace=25.0,  # terminationGracePeriodSeconds is 30 by default
        replaces_nodes=True,
    )


def _number(env: Env, *names: str) -> int | None:
    """Return the first of these variables that is set; None if none is."""
    for name in names:
        if text := env.get(name):
            if (number := parse_int(text)) is None:
                raise invalid_value(name, "must be a number", text)
            return number
    return None


# --------------------------------------------------------------------- host lists


def expand_hosts(variable: str, text: str) -> list[str]:
    """Return the hosts of a list in Slurm's form: `a,rack[1-2]n[01-03,7]`.

    Raises:
        UsageError: `variable` has another form, or too many hosts.
    """
    hosts: list[str] = []
    for part in re.split(r",(?![^\[\]]*\])", text.strip()):
        if not _HOST.fullmatch(part):
            raise _not_a_list(variable, text)
        names = [""]
        for literal, ranges in _PIECE.findall(part):
            ends = [literal] if literal else list(_numbers(variable, text, ranges))
            if len(hosts) + len(names) * len(ends) > _HOSTS_MAX:
                raise invalid_value(variable, f"must be a list of at most {_HOSTS_MAX} hosts", text)
            names = [name + end for name in names for end in ends]
        hosts += names
    return hosts


def _numbers(variable: str, text: str, ranges: str) -> Iterator[str]:
    """Yield the numbers of `01-03,7`, as wide as they are written."""
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        digits = first.isdecimal() and last.isdecimal() and len(first) < 10 and len(last) < 10
        if not digits or not 0 <= int(last) - int(first) < _HOSTS_MAX:
            raise _not_a_list(variable, text)
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _not_a_list(variable: str, text: str) -> UsageError:
    return invalid_value(variable, "must be a list of hosts such as 'a,n[01-03,7]'", text)


# -------------------------------------------------------------------- the options


def apply_allocation(
    values: dict[str, str | None], found: Allocation, *, is_explicit_stop: bool
) -> str:
    """Fill in the options that are not given; return a line about the allocation.

    With `is_explicit_stop` the stop grace is set by an option or a variable.

    Raises:
        UsageError: there are several nodes, and no endpoint is known.
    """
    said = [f"{found.scheduler} job {found.job_id}"]
    if found.grace is not None and not is_explicit_stop:
        values["shutdown_timeout"] = f"{found.grace:g}"
    nodes = values["nnodes"]
    if nodes is None and not values["standalone"]:
        if found.problem:
            raise UsageError(f"--nnodes: is required in {found.scheduler}: {found.problem}")
        if found.nodes is not None:
            nodes = values["nnodes"] = str(found.nodes)
    is_many = not values["standalone"] and (nodes or "1").rpartition(":")[2] not in ("", "1")
    if values["rdzv_id"] is None and (is_many or found.job_id != "job"):
        values["rdzv_id"] = found.run_id
    if found.nodes is None and not is_many:
        said.append("one node, because --nnodes is not given")
    if found.advice and not is_many:
        said.append(found.advice)
    if is_many:
        if values["node_rank"] is None:
            values["node_rank"] = str(found.rank)
        if not found.replaces_nodes:
            # The last one of a key counts.
            given = values["rdzv_conf"]
            values["rdzv_conf"] = f"{_LOSSES},{given}" if given else _LOSSES
        said.append(f"node {values['node_rank']} of {nodes}")
        said.append(f"rendezvous at {_meet(values, found)}")
    if values["shutdown_timeout"] is not None and not is_explicit_stop:
        said.append(f"stop grace {values['shutdown_timeout']} s")
    return ", ".join(said)


def _meet(values: dict[str, str | None], found: Allocation) -> str:
    if values["rdzv_endpoint"]:
        return values["rdzv_endpoint"]
    if values["master_addr"]:
        return values["master_addr"]
    if not found.host:
        problem = f"needs HOST:PORT: {found.scheduler} does not say where the first node is"
        raise UsageError(f"--rdzv-endpoint: {problem}")
    if values["rdzv_backend"] == "static":
        values["master_addr"] = found.host
        values["master_port"] = values["master_port"] or str(found.port)
        return f"{found.host} port {values['master_port']}"
    values["rdzv_backend"] = values["rdzv_backend"] or "c10d"
    endpoint = values["rdzv_endpoint"] = format_host_port(found.host, found.port)
    return endpoint
