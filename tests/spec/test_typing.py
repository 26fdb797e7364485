"""Type checkers know the arguments of `replace`."""

from __future__ import annotations

from pathlib import Path

import pytest

SNIPPET = """
from elastic_aio import LaunchSpec, LogSpec, RendezvousSpec, RestartPolicy, StopPlan, StopStep
from elastic_aio.plugins import LogLayout

class Layout(LogLayout): ...

job: LaunchSpec = LaunchSpec("train.py").replace(max_restarts=3).replace(entrypoint=["sh"])
step: StopStep = StopStep("TERM", 3).replace(grace=4)
plan: StopPlan = StopPlan().replace(linger=2)
layout: Layout = Layout().replace(log_dir="logs")
"""
WRONG = {
    "job.replace(max_restart=5)": "max_restart",
    "job.replace(max_restarts='many')": "max_restarts",
    "job.replace(entrypoint=5)": "entrypoint",
    "step.replace(graze=5)": "graze",
    "plan.replace(lingers=5)": "lingers",
    "layout.replace(tees=5)": "tees",
    "LogSpec().replace(tee='x', tees=5)": "tees",
    "RestartPolicy().replace(backof=None)": "backof",
    "RendezvousSpec().replace(endpoints=())": "endpoints",
}


@pytest.mark.slow
def test_a_wrong_argument_of_replace_is_an_error(tmp_path: Path) -> None:
    mypy = pytest.importorskip("mypy.api")
    snippet = tmp_path / "snippet.py"
    snippet.write_text("\n".join([SNIPPET, *WRONG]))
    first = snippet.read_text().splitlines().index(next(iter(WRONG))) + 1
    out, err, _ = mypy.run(["--strict", "--config-file=", str(snippet)])
    errors = [line for line in out.splitlines() if ": error: " in line]
    assert len(errors) == len(WRONG), out + err
    for number, (line, word) in enumerate(zip(errors, WRONG.values(), strict=True), start=first):
        assert f":{number}: error: " in line
        assert f'"{word}"' in line
