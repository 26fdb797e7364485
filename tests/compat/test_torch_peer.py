"""torch itself as the peer: its agent with our handlers, and our agent with its handlers."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tests.support.cli import run_program


def found(module: str) -> bool:
    """Return whether a module can be imported, without its import."""
    return importlib.util.find_spec(module) is not None


pytestmark = [pytest.mark.torch, pytest.mark.skipif(not found("torch"), reason="needs torch")]
SECONDS = 300.0  # torch takes seconds to import, per process

AGENT = """
import os
from {handlers} import RendezvousParameters
from {registry} import get_rendezvous_handler
from {agent} import LocalElasticAgent, WorkerSpec
from {logs} import DefaultLogsSpecs

handler = get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "run", 1, 1))
spec = WorkerSpec("t", 2, handler, entrypoint="sh", max_restarts=1,
                  args=("-c", "test $TORCHELASTIC_RESTART_COUNT = 1"))
result = LocalElasticAgent(spec, DefaultLogsSpecs(os.devnull)).run()
print(result.state, result.return_values, handler.shutdown())
"""
OURS = "elastic_aio.compat.torch"
ELASTIC = "torch.distributed.elastic"
OUR_HANDLERS = {"handlers": f"{OURS}.rendezvous", "registry": f"{OURS}.rendezvous"}
THEIR_HANDLERS = {"handlers": f"{ELASTIC}.rendezvous", "registry": f"{ELASTIC}.rendezvous.registry"}


@pytest.mark.parametrize(
    "modules",
    [
        {
            **OUR_HANDLERS,
            "agent": f"{ELASTIC}.agent.server.local_elastic_agent",
            "logs": f"{ELASTIC}.multiprocessing",
        },
        {**THEIR_HANDLERS, "agent": f"{OURS}.agent", "logs": f"{OURS}.multiprocessing"},
    ],
    ids=["torchs agent", "our agent"],
)
def test_a_handler_of_the_other_side_restarts_the_workers(modules: dict[str, str]) -> None:
    ended = run_program([sys.executable, "-c", AGENT.format(**modules)], seconds=SECONDS)
    assert ended.out == "WorkerState.SUCCEEDED {0: None, 1: None} True\n", ended.err
