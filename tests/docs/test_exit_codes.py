"""docs/reference/exit-codes.md: the codes that the help of each command names."""

from __future__ import annotations

import re

import pytest

from elastic_aio import JobState
from elastic_aio.cli import COMMANDS, main
from tests.support.cli import REPOSITORY

PAGE = (REPOSITORY / "docs/reference/exit-codes.md").read_text()
SECTIONS: dict[str, str] = dict(
    re.findall(r"^## (.+?)$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
)


def section_of(command: str) -> str:
    """Return the section that is for a command: its heading has the name."""
    found = [
        text
        for heading, text in SECTIONS.items()
        if command in re.split(r"[ ,]+", heading) and not heading.endswith("store ping")
    ]
    assert len(found) == 1, command
    return found[0]


@pytest.mark.parametrize("command", ["run", *COMMANDS])
def test_the_codes_of_the_help_have_rows(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    codes = re.findall(r"(?<![\w-])\d+(?= )", shown.partition("Exit codes: ")[2])
    section = section_of(command)
    rows = " ".join(re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE))
    for code in codes:
        assert re.search(rf"\b{code}\b", rows) or f"with {code}" in section, (command, code)


def test_each_end_of_a_job_has_a_row() -> None:
    """A failed job has the code of its root cause, a stopped one 128 + n, a preempted one 85."""
    words = {
        JobState.SUCCEEDED: "every worker exited with 0",
        JobState.FAILED: "the job failed",
        JobState.STOPPED: "signal n stopped the job",
        JobState.PREEMPTED: "the job was preempted",
    }
    assert words.keys() == set(JobState)
    for text in words.values():
        assert text in section_of("run")
