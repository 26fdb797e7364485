"""Apply each mutation to a copy of the package, and print by what it is caught.

::

    python -m tests.mutations [--part N/M] [--seed S] [--seeds COUNT] [--jobs J] [NAME ...]

Seeds of one run are the same for all mutations, and others each time: `ELASTIC_AIO_SEED`, or
`--seed`, repeats them.  Exits with 1 if a mutation survives, or no longer fits the code.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.mutations.table import MUTATIONS, SEEDS, Mutation

_ROOT: Final = Path(__file__).parents[2]

_LIMIT_S: Final = {True: 600, False: 60}
"""Seconds for scenarios, and for a test; a mutation that makes them endless is caught by that."""

_SCENARIOS: Final = """
import gc, sys
from tests.testing.scenarios import run_random_scenario

gc.set_threshold(20_000, 20, 20)
first, count = map(int, sys.argv[1:])
for number in range(count):
    try:
        run_random_scenario(first + number)
    except Exception as error:
        print(f"{number + 1} seeds: {str(error).partition(chr(10))[0]}")
        sys.exit(1)
print(f"survives {count} seeds")
"""


def fault_of(mutation: Mutation) -> str:
    """Return why a mutation does not fit the code; empty if it does."""
    count = (_ROOT / "elastic_aio" / mutation.file).read_text().count(mutation.old)
    return "" if count == 1 else f"{mutation.file} has its text {count} times, not once"


def try_mutation(mutation: Mutation, first: int, count: int) -> tuple[bool, str]:
    """Return whether a mutation is caught, and how."""
    if fault := fault_of(mutation):
        return False, fault
    limit = _LIMIT_S[mutation.caught_by == SEEDS]
    with TemporaryDirectory(prefix="elastic_aio-mutation.") as directory:
        copy = Path(directory)
        # With its compiled files: those that do not change stay valid.
        shutil.copytree(_ROOT / "elastic_aio", copy / "elastic_aio")
        file = copy / "elastic_aio" / mutation.file
        file.write_text(file.read_text().replace(mutation.old, mutation.new))
        shutil.copytree(_ROOT / "tests", copy / "tests")
        if mutation.caught_by == SEEDS:
            command = ["-c", _SCENARIOS, str(first), str(count)]
        else:
            shutil.copy(_ROOT / "pyproject.toml", copy)
            options = ["-q", "-x", "-n", "0", "-m", "", "-p", "no:cacheprovider", "--tb=line"]
            command = ["-m", "pytest", *options, mutation.caught_by]
        try:
            done = subprocess.run(
                [sys.executable, *command],
                cwd=copy,
                env={**os.environ, "PYTHONPATH": directory},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return True, f"not over after {limit} s"
        lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
        if done.returncode > 1:  # of pytest: no such test, for example
            return False, f"the test was not run: {lines[-1]}"
        how = lines[-1] if mutation.caught_by == SEEDS else mutation.caught_by
        return done.returncode == 1, how


def chosen_part(text: str) -> tuple[Mutation, ...]:
    """Return every M-th mutation, from the N-th, for "N/M"."""
    number, _, parts = text.partition("/")
    return MUTATIONS[int(number) % int(parts) :: int(parts)]


def main() -> int:
    """Run from the command line; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("--part", default="0/1", help="every M-th mutation, from the N-th")
    parser.add_argument("--seed", type=int, default=os.environ.get("ELASTIC_AIO_SEED"))
    parser.add_argument("--seeds", type=int, default=2000, help="scenarios for each mutation")
    parser.add_argument("--jobs", type=int, default=2, help="mutations at a time")
    parser.add_argument("names", nargs="*", help="only these mutations")
    options = parser.parse_args()
    mutations = [
        one for one in chosen_part(options.part) if not options.names or one.name in options.names
    ]
    seed = random.randrange(1_000_000) if options.seed is None else int(options.seed)
    first = 1_000_000_000 + seed % 1_000_000 * options.seeds
    print(f"{len(mutations)} of {len(MUTATIONS)} mutations, seeds from {first}", flush=True)
    survivors = []

    def run(mutation: Mutation) -> None:
        began = time.monotonic()
        is_caught, how = try_mutation(mutation, first, options.seeds)
        if not is_caught:
            survivors.append(mutation)
        state = "caught" if is_caught else "SURVIVED"
        print(f"{state:8} {time.monotonic() - began:5.0f} s  {mutation.name}: {how}", flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, mutations))
    print(f"{len(mutations) - len(survivors)} of {len(mutations)} are caught")
    for mutation in survivors:
        print(f"survived: {mutation.name} ({mutation.file}): {mutation.rule}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
