"""Random trees of supervised jobs in virtual time.

`ELASTIC_AIO_TREES` is their number, and `ELASTIC_AIO_TREES_SEED` the first seed.  A failure names
its seed.
"""

from __future__ import annotations

import os

import pytest

from tests.support.simulated_trees import run_random_tree

COUNT = int(os.environ.get("ELASTIC_AIO_TREES", "200"))
FIRST = int(os.environ.get("ELASTIC_AIO_TREES_SEED", "0"))
CHUNKS = max(4, COUNT // 500)  # each within the time of a test, on a busy host too


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_trees(chunk: int) -> None:
    for seed in range(FIRST + chunk, FIRST + COUNT, CHUNKS):
        run_random_tree(seed)
