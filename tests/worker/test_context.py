"""The variables by which a worker knows its place."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.errors import SurroundingsError
from elastic_aio.ranks import Place
from elastic_aio.worker.context import WorkerContext

PLACE = Place(
    rank=5,
    local_rank=1,
    role_rank=3,
    group_rank=2,
    world_size=8,
    local_world_size=2,
    role_world_size=4,
    group_world_size=3,
)
CONTEXT = WorkerContext(
    place=PLACE,
    role="trainer",
    run_id="run",
    master_addr="127.0.0.1",
    master_port=29500,
    restart_count=1,
    max_restarts=3,
    error_file="/logs/error.json",
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
}


def test_the_variables_are_torchs() -> None:
    """Names and spellings are those that torch's workers read."""
    assert CONTEXT.to_env() == ENVIRONMENT


def test_true_is_spelled_as_torch_compares_it() -> None:
    """torch compares TORCHELASTIC_USE_AGENT_STORE with the text "True"."""
    used = WorkerContext(PLACE, "r", "run", "h", 1, use_agent_store=True)
    assert used.to_env()["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert WorkerContext.from_env(used.to_env()).use_agent_store is True


numbers = st.integers(0, 2**31)
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@given(
    st.builds(
        WorkerContext,
        place=st.builds(Place, *[numbers] * 8),
        role=texts,
        run_id=texts,
        master_addr=texts,
        master_port=numbers,
        restart_count=numbers,
        max_restarts=numbers,
        use_agent_store=st.booleans(),
        error_file=texts,
    )
)
def test_what_is_written_is_read_back(context: WorkerContext) -> None:
    """Variables hold the whole context."""
    assert WorkerContext.from_env(context.to_env()) == context


@pytest.fixture
def _worker_environment() -> Iterator[None]:
    former = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    yield
    os.environ.clear()
    os.environ.update(former)


@pytest.mark.usefixtures("_worker_environment")
def test_a_worker_reads_its_own_environment() -> None:
    """Without an argument it is the process's environment."""
    assert WorkerContext.from_env() == CONTEXT


@pytest.mark.parametrize("name", sorted(ENVIRONMENT.keys() - {"TORCHELASTIC_ERROR_FILE"}))
def test_a_missing_variable_is_named(name: str) -> None:
    """Outside of a job the error says which variable is missing."""
    env = {key: value for key, value in ENVIRONMENT.items() if key != name}
    with pytest.raises(SurroundingsError, match=rf"^not inside a worker: {name} is not set$"):
        WorkerContext.from_env(env)


def test_the_error_file_is_optional() -> None:
    """A launcher that keeps no logs names no error file."""
    env = {key: value for key, value in ENVIRONMENT.items() if key != "TORCHELASTIC_ERROR_FILE"}
    assert WorkerContext.from_env(env).error_file == ""


@pytest.mark.parametrize("name", ["RANK", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"])
def test_what_is_no_number_is_refused(name: str) -> None:
    """A number that is none is an error of the surroundings, in one line."""
    with pytest.raises(SurroundingsError, match=r"^not inside a worker: .*'x'$"):
        WorkerContext.from_env({**ENVIRONMENT, name: "x"})
