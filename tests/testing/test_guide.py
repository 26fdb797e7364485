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
    exec(program, {})


def test_there_are_programs() -> None:
    assert len(PROGRAMS) == 3
