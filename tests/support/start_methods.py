"""Start methods as parameters of tests, so that the default run has one of each kind."""

from __future__ import annotations

import pytest

# "forkserver" also starts an interpreter, as "spawn" does.
METHODS = [pytest.param("spawn", marks=pytest.mark.slow), "fork", "forkserver"]
# All of a matrix by the default method; by the others it is slow.
MOSTLY_SPAWN = [
    "spawn",
    pytest.param("fork", marks=pytest.mark.slow),
    pytest.param("forkserver", marks=pytest.mark.slow),
]
