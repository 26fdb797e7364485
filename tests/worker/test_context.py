"""The environment variables of a worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.errors import HostError
from elastic_aio.worker.context import (
    TASK,
    WorkerContext,
    is_in_worker,
    task_of,
    without_channels,
)

CONTEXT = WorkerContext(
    rank=5,
    local_rank=1,
    role_rank=3,
    group_rank=2,
    world_size=8,
    local_world_size=2,
    role_world_size=4,
    group_world_size=3,
    role="trainer",
    run_id="run",
    master_addr="127.0.0.1",
    master_port=29500,
    restart_count=1,
    max_restarts=3,
    error_file="/logs/error.json",
    attempt=2,
    round=4,
)
ENVIRONMENT = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "ROLE_RANK": "3",
    "GROUP_RANK": "2",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "2",
    "ROLE_WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "3",
    "ROLE_NAME": "trainer",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RUN_ID": "run",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "TORCHELASTIC_ERROR_FILE": "/logs/error.json",
    "ELASTIC_AIO_ATTEMPT": "2",
    "ELASTIC_AIO_ROUND": "4",
}
OPTIONAL = {"TORCHELASTIC_ERROR_FILE", "ELASTIC_AIO_ATTEMPT", "ELASTIC_AIO_ROUND"}


def test_the_variables_are_torchs() -> None:
    assert CONTEXT.to_env() == ENVIRONMENT


def test_true_is_spelled_as_torch_compares_it() -> None:
    """torch compares TORCHELASTIC_USE_AGENT_STORE with the text "True"."""
    used = replace(CONTEXT, use_agent_store=True)
    assert used.to_env()["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert WorkerContext.from_env(used.to_env()).use_agent_store is True


numbers = st.integers(0, 2**31)
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)

VALUES: dict[str, st.SearchStrategy[object]] = {
    "int": numbers,
    "str": texts,
    "bool": st.booleans(),
}


@pytest.mark.slow
@given(
    st.builds(
        WorkerContext,
        **{field.name: VALUES[str(field.type)] for field in fields(WorkerContext)},
    )
)
def test_a_context_survives_the_environment(context: WorkerContext) -> None:
    assert WorkerContext.from_env(context.to_env()) == context


@pytest.fixture
def _worker_environment() -> Iterator[None]:
    previous = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    yield
    os.environ.clear()
    os.environ.update(previous)


@pytest.mark.usefixtures("_worker_environment")
def test_a_worker_reads_its_own_environment() -> None:
    assert WorkerContext.from_env() == CONTEXT


@pytest.mark.parametrize("name", sorted(ENVIRONMENT.keys() - OPTIONAL))
def test_a_missing_variable_is_named(name: str) -> None:
    env = {key: value for key, value in ENVIRONMENT.items() if key != name}
    with pytest.raises(HostError, match=rf"^not inside a worker: {name} is not set$"):
        WorkerContext.from_env(env)


def test_some_variables_are_optional() -> None:
    """torchrun sets no numbers of ours, and names no error file where it keeps no logs."""
    env = {key: value for key, value in ENVIRONMENT.items() if key not in OPTIONAL}
    context = WorkerContext.from_env(env)
    assert (context.error_file, context.attempt, context.round) == ("", 0, 0)


@pytest.mark.parametrize("name", ["RANK", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"])
def test_a_malformed_number_is_an_error(name: str) -> None:
    problem = rf"^not inside a worker: {name} is not a whole number \(got 'x'\)$"
    with pytest.raises(HostError, match=problem):
        WorkerContext.from_env({**ENVIRONMENT, name: "x"})


@pytest.mark.parametrize(
    ("now", "then", "is_inside"),
    [
        ({}, None, False),  # no worker
        ({"SLURM_JOB_ID": "4"}, None, False),
        ({}, {}, True),
        ({"SLURM_JOB_ID": "4", "SLURM_STEP_ID": "0"}, {"SLURM_JOB_ID": "4", "SLURM_STEP_ID": "0"},
         True),
        ({}, {"SLURM_JOB_ID": "4"}, True),  # it has removed the scheduler's variables
        ({"SLURM_JOB_ID": "4"}, {}, False),  # submitted by a worker that is in no job
        ({"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0"}, {"SLURM_JOB_ID": "4", "SLURM_STEP_ID": "0"},
         False),
        ({"SLURM_JOB_ID": "4", "PMIX_NAMESPACE": "x"}, {"SLURM_JOB_ID": "4"}, False),  # mpirun
        ({"SLURM_JOB_ID": "4", "SLURM_PROCID": "1"}, {"SLURM_JOB_ID": "4"}, True),
    ],
)  # fmt: skip
def test_a_worker_knows_the_task_of_its_launcher(
    now: dict[str, str], then: dict[str, str] | None, is_inside: bool
) -> None:
    env = now if then is None else {**now, TASK: task_of(then)}
    assert is_in_worker(env) == is_inside


def test_a_job_inside_a_worker_does_not_inherit_its_channels() -> None:
    """Its own workers would send their messages to the launcher of another job."""
    channels = dict.fromkeys(
        ["ELASTIC_AIO_NOTIFY_FD", "NOTIFY_SOCKET", "WATCHDOG_USEC", "ELASTIC_AIO_LOCAL_RANK",
         "TORCHELASTIC_TIMER_FILE", "ELASTIC_AIO_PENDING_CHANGE"], "x"
    )  # fmt: skip
    env = {**channels, "RANK": "0", "X": "y"}
    assert without_channels(env) == env  # of systemd, for example
    assert without_channels({**env, TASK: ""}) == {"RANK": "0", "X": "y", TASK: ""}
