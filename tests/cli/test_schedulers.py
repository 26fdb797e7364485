"""Jobs of Slurm, MPI and Kubernetes need no options for the rendezvous."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.cli.run_options import RunRequest, parse_run
from elastic_aio.cli.schedulers import Allocation, expand_hosts, find_allocation
from elastic_aio.spec.checks import UsageError
from elastic_aio.spec.stop import StopPlan
from tests.support.cli import CLI, bare_environment, running, running_cli
from tests.support.netns import Network

SLURM = {
    "SLURM_JOB_ID": "42",
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "n[07-09]",
}
STEP = {
    **SLURM,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[08-9]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "ENVIRONMENT": "BATCH",
}
OMPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "PMIX_NAMESPACE": "x"}
PMI = {"PMI_SIZE": "2", "PMI_RANK": "1", "PMI_PORT": "head:38217", "PMI_JOBID": "9"}
LSF = {"LSB_JOBID": "8", "LSB_MCPU_HOSTS": "b 2 a 2", "LSF_PM_TASKID": "2"}
FLUX = {"FLUX_JOB_ID": "f1", "FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "MASTER_ADDR": "h"}
HET = {**STEP, "SLURM_HET_SIZE": "2"}
PBS = {"PBS_JOBID": "12.head", "PBS_NODENUM": "0", "PBS_NODEFILE": "/var/spool/pbs/aux/12.head"}
INDEXED = {"JOB_COMPLETION_INDEX": "2", "JOB_COMPLETIONS": "4"}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("a,b-1.c", ["a", "b-1.c"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[008-010,7]", ["n008", "n009", "n010", "n7"]),
        ("a[1,3]x,login", ["a1x", "a3x", "login"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("127.0.0.[1-2]", ["127.0.0.1", "127.0.0.2"]),
        ("n[5]", ["n5"]),
    ],
)
def test_host_lists(text: str, hosts: list[str]) -> None:
    assert expand_hosts("X", text) == hosts


@pytest.mark.parametrize(
    "text", ["n[", "n]", "n[a]", "n[3-1]", "n[1-]", "n[]", "a,,b", "a b", "n[1[2]]", "n[0-9999999]"]
)
def test_malformed_host_lists(text: str) -> None:
    with pytest.raises(UsageError, match=rf"^X: must be a list .*\(got {re.escape(repr(text))}\)"):
        expand_hosts("X", text)


def test_absurd_host_lists_end_at_once() -> None:
    with pytest.raises(UsageError, match="at most 100000 hosts"):
        expand_hosts("X", "r[1-9999]n[1-9999]")


@given(st.text("n[]1,-", max_size=20))
def test_host_lists_are_expanded_or_refused(text: str) -> None:
    try:
        hosts = expand_hosts("X", text)
    except UsageError:
        return
    assert all(hosts)
    assert not any(set(host) & set("[],") for host in hosts)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        ({"SLURM_CONF": "/etc/slurm.conf"}, None),
        (SLURM, ("Slurm", "42", 3, 1, "n07", 25)),
        (STEP, ("Slurm", "42.0", 2, 1, "n08", 25)),
        # Several tasks on each host: each is a node of the job.
        (
            {**STEP, "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5"},
            ("Slurm", "42.0", 8, 5, "n08", 25),
        ),
        ({**SLURM, "ENVIRONMENT": "BATCH"}, ("Slurm", "42", 1, 0, "", 25)),
        ({**SLURM, "SLURM_NODEID": ""}, ("Slurm", "42", 1, 0, "", 25)),
        (FLUX, None),
        (LSF, None),
        (PBS, None),
        (
            {**OMPI, "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1,10.1.0.1:4567"},
            ("Open MPI", "x", 2, 1, "10.0.0.1", None),
        ),
        (
            {**OMPI, "PMIX_SERVER_URI2": "prte-a.0;tcp4://10.0.0.2:45", "MASTER_ADDR": "m"},
            ("Open MPI", "x", 2, 1, "m", None),
        ),
        ({**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, ("Open MPI", "x", 2, 1, "127.0.0.1", None)),
        (PMI, ("MPI", "9", 2, 1, "head", None)),
        ({**PMI, "MPI_LOCALNRANKS": "2"}, ("MPI", "9", 2, 1, "127.0.0.1", None)),
        ({"PMI_RANK": "0"}, None),
        ({**PBS, **PMI}, ("MPI", "9", 2, 1, "head", None)),
        ({**LSF, **OMPI, "MASTER_ADDR": "b"}, ("Open MPI", "x", 2, 1, "b", None)),
        (HET, ("Slurm", "42", None, 1, "", 25)),
        ({**STEP, "SLURM_HET_SIZE": "1"}, ("Slurm", "42.0", 2, 1, "n08", 25)),
        ({**SLURM, **PMI}, ("Slurm", "42", 3, 1, "n07", 25)),
        (INDEXED, ("Kubernetes", "train-w", 4, 2, "train-w-0.svc.ns", 25)),
        ({**INDEXED, "MASTER_ADDR": "m"}, ("Kubernetes", "train-w", 4, 2, "m", 25)),
        ({"JOB_COMPLETION_INDEX": "1"}, ("Kubernetes", "train-w", None, 1, "", 25)),
    ],
)
def test_what_a_scheduler_says(
    env: dict[str, str], expected: tuple[str, str, int | None, int, str, float | None] | None
) -> None:
    found = find_allocation(env, lambda: "train-w-2.svc.ns")
    if expected is None:
        assert found is None
        return
    assert isinstance(found, Allocation)
    got = (found.scheduler, found.job_id, found.nodes, found.rank, found.host, found.grace)
    assert got == expected


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({**SLURM, "SLURM_NNODES": "x"}, "SLURM_NNODES"),
        ({**SLURM, "SLURM_NODEID": "-1"}, "SLURM_NODEID"),
        ({**SLURM, "SLURM_JOB_NODELIST": "n["}, "SLURM_JOB_NODELIST"),
        ({**INDEXED, "JOB_COMPLETION_INDEX": "x"}, "JOB_COMPLETION_INDEX"),
    ],
)
def test_malformed_variables_are_named(env: dict[str, str], name: str) -> None:
    with pytest.raises(UsageError, match=f"^{name}: must be "):
        parse_run(["x"], env)


def rendezvous(request: RunRequest) -> tuple[str, str, int | None, str, str | None]:
    spec = request.spec
    settings = spec.rendezvous
    return (
        str(spec.nnodes),
        settings.backend,
        settings.node_rank,
        settings.endpoint.partition(":")[0],
        spec.run_id,
    )


def test_no_option_is_needed() -> None:
    """One line says what was found; all nodes find the same endpoint."""
    request = parse_run(["x"], STEP)
    assert rendezvous(request) == ("2", "c10d", 1, "n08", "slurm-42.0")
    assert request.spec.stop == StopPlan.within(25)
    endpoint = request.spec.rendezvous.endpoint
    assert request.warnings == (
        f"Slurm job 42.0, node 1 of 2, rendezvous at {endpoint}, stop grace 25 s",
    )
    other = parse_run(["x"], {**STEP, "SLURM_NODEID": "0", "SLURM_PROCID": "0"})
    assert other.spec.rendezvous.endpoint == endpoint
    another_step = parse_run(["x"], {**STEP, "SLURM_STEP_ID": "1"})
    assert another_step.spec.rendezvous.endpoint != endpoint


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--nnodes=1:2"], ("1:2", "c10d", 1, "n08", "slurm-42.0")),
        (["--rdzv-id=mine"], ("2", "c10d", 1, "n08", "mine")),
        (["--node-rank=0"], ("2", "c10d", 0, "n08", "slurm-42.0")),
        (["--rdzv-backend=static"], ("2", "static", 1, "n08", "slurm-42.0")),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=h"], ("2", "c10d", 1, "h", "slurm-42.0")),
        (["--master-addr=h"], ("2", "static", 1, "h", "slurm-42.0")),
        (["--standalone"], ("1", "c10d", None, "localhost", "slurm-42.0")),
        (["--nnodes=1"], ("1", "c10d", None, "localhost", "slurm-42.0")),
    ],
)
def test_given_options_win(
    options: list[str], expected: tuple[str, str, int | None, str, str | None]
) -> None:
    assert rendezvous(parse_run([*options, "x"], STEP)) == expected


def test_variables_of_kubeflow_win_too() -> None:
    """They are torchrun's own."""
    env = {**INDEXED, "PET_NNODES": "3", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "m",
           "PET_MASTER_PORT": "23456"}  # fmt: skip
    request = parse_run(["x"], env)
    assert request.spec.rendezvous.endpoint == "m:23456"
    assert rendezvous(request)[:4] == ("3", "static", 2, "m")


@pytest.mark.parametrize(
    ("options", "env", "grace"),
    [
        (["--shutdown-timeout=7"], {}, 7),
        ([], {"PET_SHUTDOWN_TIMEOUT": "8"}, 8),
        ([], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "9"}, 9),
        ([], {}, 25),
    ],
)
def test_the_grace_of_a_stop(options: list[str], env: dict[str, str], grace: float) -> None:
    """It ends before the scheduler's own, unless it is given."""
    assert parse_run([*options, "x"], {**STEP, **env}).spec.stop == StopPlan.within(grace)


def test_a_batch_script_runs_one_node() -> None:
    """The line says how to use all of them."""
    request = parse_run(["x"], {**SLURM, "ENVIRONMENT": "BATCH"})
    assert str(request.spec.nnodes) == "1"
    assert "one of 3 nodes: start it with srun to use all" in request.warnings[0]


def test_a_name_that_dns_cannot_have() -> None:
    """The number of the pod is known without its host name."""

    def fqdn() -> str:
        return "n\udcff".encode("idna").decode()

    found = find_allocation({**INDEXED, "JOB_COMPLETION_INDEX": "0"}, fqdn)
    assert found is not None
    assert (found.rank, found.host, found.job_id) == (0, "", "job")


def test_an_unknown_number_or_host() -> None:
    request = parse_run(["x"], {"JOB_COMPLETION_INDEX": "1"})
    assert "one node, because --nnodes is not given" in request.warnings[0]
    with pytest.raises(UsageError, match="--rdzv-endpoint: needs HOST:PORT: Open MPI does not"):
        parse_run(["x"], OMPI)


def test_a_heterogeneous_job_needs_options() -> None:
    """Its variables do not describe all nodes, so no part of the nodes starts by itself."""
    problem = "Slurm: the variables of a heterogeneous job tell of one component only"
    with pytest.raises(UsageError, match=f"^--nnodes: is required in {problem}$"):
        parse_run(["x"], HET)
    with pytest.raises(UsageError, match=r"^--rdzv-endpoint: needs HOST:PORT: "):
        parse_run(["--nnodes=4", "x"], HET)
    options = ["--nnodes=4", "--rdzv-endpoint=h", "--rdzv-backend=c10d"]
    assert rendezvous(parse_run([*options, "x"], HET))[:4] == ("4", "c10d", 1, "h")
    for option in ("--standalone", "--nnodes=1"):
        assert str(parse_run([option, "x"], HET).spec.nnodes) == "1"


@pytest.mark.parametrize("env", [FLUX, LSF, PBS], ids=["flux", "lsf", "pbs"])
def test_variables_of_other_schedulers_are_not_read(env: dict[str, str]) -> None:
    """Options, or `PET_*` variables, describe the job."""
    assert parse_run(["x"], env) == parse_run(["x"], {})
    options = ["--nnodes=2", "--node-rank=1", "--rdzv-endpoint=h", "--rdzv-id=8"]
    pet = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_RDZV_ENDPOINT": "h", "PET_RDZV_ID": "8"}
    given = parse_run([*options, "--rdzv-backend=c10d", "x"], env)
    by_variables = parse_run(["x"], {**env, **pet, "PET_RDZV_BACKEND": "c10d"})
    assert rendezvous(given) == rendezvous(by_variables) == ("2", "c10d", 1, "h", "8")


def test_a_requeued_job_of_slurm_is_another_one() -> None:
    """A store that outlives the job knows how the former one has ended."""
    runs = [parse_run(["x"], {**STEP, "SLURM_RESTART_COUNT": count}) for count in ("0", "1")]
    assert [run.spec.run_id for run in runs] == ["slurm-42.0", "slurm-42r1.0"]
    first, second = (run.spec.rendezvous.endpoint for run in runs)
    assert first != second


@pytest.mark.e2e
def test_three_nodes_of_slurm(tmp_path: Path) -> None:
    """Agents with nothing but the scheduler's variables form one job, ranked by node."""
    program = f'echo "$RANK $WORLD_SIZE $TORCHELASTIC_RUN_ID" > {tmp_path}/$GROUP_RANK'
    job = f"{abs(hash(tmp_path)) % 10**6}"  # so that tests at the same time use other ports
    with ExitStack() as stack:
        agents = []
        for node in range(3):
            env = {**SLURM, "SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "127.0.0.[1-3]",
                   "SLURM_NODEID": str(node)}  # fmt: skip
            words = ["--nproc-per-node=2", "--no-python", "bash", "-c", program]
            agents.append(stack.enter_context(running_cli(*words, env=bare_environment(**env))))
        assert [agent.wait() for agent in agents] == [0, 0, 0]
        assert f"Slurm job {job}, node 2 of 3, rendezvous at 127.0.0.1:" in agents[2].err
    said = [path.read_text().split() for path in sorted(tmp_path.iterdir())]
    assert [int(rank) // 2 for rank, _, _ in said] == [0, 1, 2]
    assert {(size, run) for _, size, run in said} == {("6", f"slurm-{job}")}


def slurm(rank: int, job: str) -> dict[str, str]:
    return {**STEP, "SLURM_JOB_ID": job, "SLURM_STEP_NODELIST": "10.77.0.[1-2]",
            "SLURM_NODEID": str(rank), "SLURM_PROCID": str(rank)}  # fmt: skip


def open_mpi(rank: int, job: str) -> dict[str, str]:
    uri = f"prterun-w-0-{job}@0.0;tcp4://10.77.0.1:45"
    return {**OMPI, "PMIX_NAMESPACE": job, "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "PMIX_SERVER_URI2": uri}  # fmt: skip


def jobset(rank: int, job: str) -> dict[str, str]:
    return {"JOB_COMPLETION_INDEX": str(rank), "JOB_COMPLETIONS": "2"}


def kubeflow(rank: int, job: str) -> dict[str, str]:
    return {"PET_NNODES": "2", "PET_NODE_RANK": str(rank), "PET_MASTER_ADDR": "w-0",
            "PET_MASTER_PORT": "23456"}  # fmt: skip


@pytest.mark.black_box
@pytest.mark.netns
@pytest.mark.parametrize("variables", [slurm, open_mpi, jobset, kubeflow])
def test_two_hosts(variables: Callable[[int, str], dict[str, str]], tmp_path: Path) -> None:
    """Agents on hosts of their own, each with nothing but the variables of its task."""
    program = "import os; e = os.environ; print(*(e[name] for name in e['NAMES'].split()))"
    names = "RANK WORLD_SIZE GROUP_RANK MASTER_ADDR"
    words = ["--nproc-per-node=2", "--no-python", sys.executable, "-c", program]
    with Network(tmp_path, "w-0", "w-1") as network, ExitStack() as stack:
        for host in network.hosts.values():
            pods = "".join(f"{one.address} {one.name}\n" for one in network.hosts.values())
            (host.etc / "hosts").write_text(f"127.0.0.1 localhost\n{pods}")
        agents = []
        for rank, host in enumerate(network.hosts.values()):
            env = bare_environment(**variables(rank, "7"), NAMES=names)
            argv = host.argv([*CLI, "run", *words])
            agents.append(stack.enter_context(running(argv, env=env)))
        ended = [agent.ended() for agent in agents]
    assert [one.code for one in ended] == [0, 0], [one.err for one in ended]
    said = [sorted(one.out.splitlines()) for one in ended]
    master = "w-0" if variables is kubeflow else "10.77.0.1"  # `static` passes the name on
    for rank in (0, 1):
        assert said[rank] == [f"{worker} 4 {rank} {master}" for worker in (2 * rank, 2 * rank + 1)]
