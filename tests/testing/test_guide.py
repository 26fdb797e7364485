"""The programs of the guide to simulations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parent.parent.parent / "docs" / "guides" / "simulation.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_runs(program: str) -> None:
    """A thousand clusters take a minute; twenty show that the program works."""
    exec(program.replace("range(1000)", "range(20)"), {})


def test_there_are_programs() -> None:
    assert len(PROGRAMS) == 4
