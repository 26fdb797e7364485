"""The table "For a scheduler" of docs/reference/exit-codes.md."""

from __future__ import annotations

import re
import socket

import pytest

from tests.support.cli import REPOSITORY, run_cli


def advice(code: int) -> str:
    """Return what the table says of an exit code, without its reason."""
    page = (REPOSITORY / "docs/reference/exit-codes.md").read_text()
    table = page.partition("### For a scheduler")[2].partition("\n\n## ")[0]
    rows = re.findall(r"^\| ([\d, ]+|others) \| ([^:|]+)", table, re.MULTILINE)
    said: dict[str, str] = {
        key.strip(): text.strip() for keys, text in rows for key in keys.split(",")
    }
    return said.get(str(code), said["others"])


# Other tests show which jobs end with these codes.
@pytest.mark.parametrize(
    ("codes", "said", "is_requeued"),
    [
        ((0, 2, 3, 126, 127), "no", False),
        ((85,), "yes", True),
        ((69, 75), "yes", True),
        ((129, 130, 143), "yes", False),  # after scancel; Slurm requeues others itself
        ((134,), "on another host", False),
        ((137,), "often", True),
    ],
)
def test_whether_a_job_runs_again(codes: tuple[int, ...], said: str, is_requeued: bool) -> None:
    """The examples do what the table says."""
    for code in codes:
        assert advice(code).partition(",")[0] == said
        assert (str(code) in requeued_codes()) == is_requeued
        assert (str(code) in action_codes("FailJob")) == (code in (2, 126, 127))
        assert (str(code) in action_codes("Ignore")) == (code == 85)


@pytest.mark.e2e
def test_a_host_that_lacks_something() -> None:
    """No worker is reported."""
    with socket.create_server(("0.0.0.0", 0)) as taken:
        words = ("--no-python", "true")
        ended = run_cli("--master-port", taken.getsockname()[1], *words)
    assert ended.code == 1
    assert advice(ended.code) == "on another host"
    assert "rank" not in ended.err


def test_the_jobset_is_not_restarted_after_such_a_code() -> None:
    """The default action of a JobSet for a failed Job is a restart of the set."""
    text = (REPOSITORY / "examples/jobset.yaml").read_text()
    policy = text.partition("failurePolicy:")[2].partition("replicatedJobs:")[0]
    rule = r"rules:\s+(#.*\s+)*- action: FailJobSet\s+onJobFailureReasons: \[PodFailurePolicy\]"
    assert re.search(rule, policy)


def requeued_codes() -> list[str]:
    """Return the codes after which the example for Slurm runs the job again."""
    text = (REPOSITORY / "examples/slurm.sbatch").read_text()
    always = re.findall(r"\$code == (\d+)", text)
    match = re.search(r"\$code =~ \^\(([\d|]+)\)", text)
    assert match is not None
    return [*always, *match[1].split("|")]


def action_codes(action: str) -> list[str]:
    """Return the codes after which the example for Kubernetes does something else than usual."""
    text = (REPOSITORY / "examples/jobset.yaml").read_text()
    match = re.search(rf"action: {action}\n.*?values: \[([\d, ]+)\]", text, re.DOTALL)
    assert match is not None
    return match[1].split(", ")
