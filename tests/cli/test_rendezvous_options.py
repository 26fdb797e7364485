"""The options of multi-node jobs: the rendezvous they configure, warnings, errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from elastic_aio.cli.run_options import RunRequest, parse_run
from elastic_aio.spec.checks import UsageError
from elastic_aio.spec.job import LaunchSpec, NodeRange
from elastic_aio.spec.logs import LogSpec
from elastic_aio.spec.rendezvous import RendezvousSpec


def read(line: str, env: Mapping[str, str] | None = None) -> RunRequest:
    return parse_run([*line.split(), "train.py"], env or {})


def rendezvous(line: str, env: Mapping[str, str] | None = None) -> RendezvousSpec:
    found: RendezvousSpec = read(line, env).spec.rendezvous
    return found


STATIC = "--nnodes 2 --master-addr a"
DYNAMIC = "--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint a:1"


def test_the_main_use_of_the_static_backend() -> None:
    """As in torchrun: the node of rank 0 serves the store at --master-addr and --master-port."""
    first = read("--nnodes 2 --node-rank 0 --master-addr a --master-port 7")
    other = read("--nnodes 2 --node-rank 1 --master-addr a --master-port 7")
    assert first.spec.rendezvous == RendezvousSpec(
        backend="static",
        endpoint="a:7",
        node_rank=0,
        is_host=True,
        join_timeout=900,
        read_timeout=900,
    )
    assert (other.spec.rendezvous.node_rank, other.spec.rendezvous.is_host) == (1, False)
    assert (first.spec.nnodes, first.spec.run_id) == (NodeRange(2, 2), "none")
    assert first.spec.master_port is None, "the port is that of the rendezvous store"
    assert first.warnings == other.warnings == ()


def test_the_main_use_of_the_dynamic_backend() -> None:
    """A range of nodes, and two endpoints of which one has the default port."""
    request = read(
        "--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint a:1,b --rdzv-id mine"
        " --rdzv-conf heartbeat_timeout=3,is_host=0 --local-addr 10.0.0.1"
    )
    spec = request.spec
    assert (spec.nnodes, spec.run_id, spec.master_port) == (NodeRange(1, 4), "mine", None)
    assert spec.rendezvous == RendezvousSpec(
        endpoint="a:1,b",
        heartbeat_timeout=3,
        is_host=False,
        local_addr="10.0.0.1",
        conf={"heartbeat_timeout": "3", "is_host": "0"},
    )
    assert spec.rendezvous.endpoints == ("a:1", "b:29400")
    assert request.warnings == ()


@pytest.mark.parametrize(
    ("line", "endpoint"),
    [
        ("--nnodes 2 --master-addr a", "a:29500"),
        ("--nnodes 2 --master-addr ::1", "[::1]:29500"),
        ("--nnodes 2 --master-addr [::1] --master-port 7", "[::1]:7"),
        ("--nnodes 2 --rdzv-endpoint b", "b:29500"),
        ("--nnodes 2 --rdzv-endpoint b:8 --master-port 7", "b:8"),
        ("--nnodes 2", "127.0.0.1:29500"),
        ("--nnodes 2 --rdzv-backend c10d --master-port 7", "localhost:29400"),
    ],
)
def test_default_endpoints(line: str, endpoint: str) -> None:
    """--rdzv-endpoint, else the master's address and port, else torchrun's defaults."""
    assert rendezvous(line).endpoints == (endpoint,)


@pytest.mark.parametrize(
    ("line", "port"),
    [
        ("--master-port 7", 7),
        ("--nnodes 2 --master-addr a --master-port 7", None),
        ("--nnodes 2 --rdzv-endpoint a:8 --master-port 7", 7),
        ("--nnodes 2 --rdzv-endpoint a:7 --master-port 7", None),
        (f"{DYNAMIC} --master-port 7", 7),
        (f"{DYNAMIC} --master-port 1", None),
    ],
)
def test_the_port_of_the_workers(line: str, port: int | None) -> None:
    """--master-port sets it unless the rendezvous store has that port."""
    assert read(line).spec.master_port == port


def test_the_static_backend_takes_the_maximum() -> None:
    """As torchrun does, but with a warning."""
    request = read("--nnodes 1:3 --node-rank 2 --master-addr a")
    assert request.spec.nnodes == NodeRange(3, 3)
    (warning,) = request.warnings
    assert "--nnodes 1:3" in warning
    assert "waits for all 3" in warning


RANKS = [
    ("", {}, None),
    ("--node-rank 1", {"PET_NODE_RANK": "0", "SLURM_PROCID": "0"}, 1),
    ("", {"PET_NODE_RANK": "1", "SLURM_PROCID": "0"}, 1),
    ("", {"SLURM_PROCID": "1", "SLURM_NODEID": "0"}, 1),
    ("", {"SLURM_NODEID": "1"}, 1),
    ("", {"SLURM_PROCID": "", "SLURM_NODEID": "1"}, 1),
    ("--node-rank 1", {"SLURM_PROCID": "x"}, 1),
]


@pytest.mark.parametrize(("line", "env", "rank"), RANKS)
def test_where_the_rank_comes_from(line: str, env: dict[str, str], rank: int | None) -> None:
    """The option, its variable, Slurm's variables; else 0 for static, none for c10d."""
    assert rendezvous(f"{DYNAMIC} {line}", env).node_rank == rank
    static = rendezvous(f"{STATIC} {line}", env)
    assert (static.node_rank, static.is_host) == (rank or 0, not rank)


def test_a_preferred_rank_may_exceed_the_maximum() -> None:
    """A standby node may get any rank later; with static the rank is fixed."""
    assert rendezvous(f"{DYNAMIC} --node-rank 9").node_rank == 9
    with pytest.raises(UsageError, match=r"^--node-rank: must be from 0 to 1 for 2 nodes"):
        read(f"{STATIC} --node-rank 2")


ONE_NODE = [
    "--standalone --rdzv-backend etcd --rdzv-endpoint a:1",
    "--rdzv-backend etcd",
    "--rdzv-backend static --master-addr a --node-rank 0",
    "--rdzv-backend c10d --rdzv-endpoint localhost:0",
    "--nnodes 1:1 --rdzv-endpoint elsewhere:1,there:2 --rdzv-conf keep_alive_interval=5,foo=1",
    "--rdzv-conf token_file=/no/such/file",
]


@pytest.mark.parametrize("line", ONE_NODE)
def test_one_node_ignores_rendezvous_options(line: str) -> None:
    """They have no effect, and there is no warning."""
    request = read(line, {"SLURM_PROCID": "3"})
    assert request.spec.nnodes == NodeRange(1, 1)
    assert request.warnings == ()
    assert request.spec.run_id is None
    assert request.spec.rendezvous.token is None


def test_without_any_option_there_is_no_rendezvous() -> None:
    """Slurm's ranks are ignored too."""
    env = {"SLURM_PROCID": "3", "SLURM_NODEID": "1"}
    assert read("", env).spec == LaunchSpec("train.py", logs=LogSpec(color="auto"))


def test_a_rank_without_nnodes_gives_a_warning() -> None:
    """Without `--nnodes` every node would start a job of its own."""
    (warning,) = read("--node-rank 1").warnings
    assert warning == "--node-rank 1 has no effect: the job has one node"


def test_standalone_is_one_node() -> None:
    """A range of nodes is taken as 1, with a warning."""
    request = read("--standalone --nnodes 1:4")
    assert request.spec.nnodes == NodeRange(1, 1)
    assert request.warnings == ("--standalone is for one node: --nnodes 1:4 is taken as 1",)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--nnodes 2", ["--master-addr is not given", "127.0.0.1:29500"]),
        ("--nnodes 2 --rdzv-backend c10d", ["--rdzv-endpoint is not given", "localhost:29400"]),
        (f"{DYNAMIC} --master-addr a", ["--master-addr has no effect", "--rdzv-endpoint sets"]),
        ("--nnodes 2 --rdzv-endpoint a:1 --master-addr b", ["--master-addr has no effect"]),
        (f"{DYNAMIC} --rdzv-conf foo=1", ["'foo' is unknown"]),
        (f"{STATIC} --rdzv-conf is_host=1", ["is_host has no effect"]),
    ],
)
def test_likely_mistakes_give_a_warning(line: str, words: list[str]) -> None:
    """One line for each; the command line is accepted."""
    (warning,) = read(line).warnings
    assert all(word in warning for word in words)


def test_the_token_comes_from_a_file(tmp_path: Path) -> None:
    """Surrounding space is removed; a file that cannot be read is an error."""
    path = tmp_path / "token"
    path.write_text("secret-of-this-test\n")
    assert rendezvous(f"{DYNAMIC} --rdzv-conf token_file={path}").token == "secret-of-this-test"
    assert "secret" not in repr(read(f"{DYNAMIC} --rdzv-conf token_file={path}"))
    with pytest.raises(
        UsageError, match=r"^--rdzv-conf: token_file: must be a file that can be read.*/nowhere"
    ):
        read(f"{DYNAMIC} --rdzv-conf token_file=/nowhere")


def test_errors_of_the_spec_name_the_option() -> None:
    """The field of a SpecError is replaced by the option."""
    with pytest.raises(UsageError, match=r"^--local-addr: must be the name or address"):
        read(f"{DYNAMIC} --local-addr a:1")
    with pytest.raises(UsageError, match=r"^--rdzv-endpoint: needs a port other than 0"):
        read("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint a:0")
