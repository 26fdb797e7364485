"""The fenced code blocks of the pages, and what a test does with each.

A block of Python is a program; a block of a shell is a script.  `tests/docs/test_blocks.py` runs
them as `SETUPS` says, compares what is printed where the next block, or the page, shows that, and
parses blocks of data.  A block in `NOT_RUN` is not run, for the reason there.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^( *)```([\w-]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: `page` is the path from the root, `line` that of its first line."""

    page: str
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def why_not_run(self) -> str:
        """The reason why it is not run; empty if it is."""
        for (page, part), why in NOT_RUN.items():
            if self.page.endswith(page) and part in self.text:
                return why
        return ""

    @property
    def is_run(self) -> bool:
        return not self.why_not_run


def pages() -> list[Path]:
    """Return the Markdown files that people read."""
    found = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
    return [*found, *sorted(ROOT.glob("docs/**/*.md"))]


@functools.cache
def blocks() -> tuple[Block, ...]:
    """Return all blocks, by page and in their order."""
    found = []
    for page in pages():
        text = page.read_text()
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start(3)) + 1
            found.append(Block(str(page.relative_to(ROOT)), line, match[2], match[3]))
    return tuple(found)


_OUTPUTS = "tests/docs/test_outputs.py"
_TRAIN = "tests/programs/test_programs.py::test_the_guide_of_training_prints_what_it_shows"

NOT_RUN: dict[tuple[str, str], str] = {
    ("README.md", ".venv/bin/aio-elastic run"): "`.ci/run` runs it in a fresh clone",
    ("README.md", "'.[test]'"): "`.ci/run` runs it in a fresh clone",
    ("CONTRIBUTING.md", "'.[test,lint]'"): "the steps of `.ci/run`",
    ("architecture.md", "multiprocessing\n"): f"{_OUTPUTS}::test_the_drawing_of_the_layers",
    ("benchmarks.md", "--quick"): "a benchmark: minutes on an idle host",
    ("benchmarks.md", "benchmarks.compare"): "compares two checkouts: minutes on an idle host",
    ("failures.md", "ValueError: bad batch"): f"{_OUTPUTS}::test_a_sentence_is_that_of_its_event",
    ("failures.md", "was recorded 12 s"): (
        "a rare end: tests/agent/test_failures.py::test_an_error_before_a_hang"
    ),
    ("failures.md", "(on node-b) exited with 0"): (
        "tests/agent/test_failures.py::test_a_failure_notes_who_had_succeeded_before"
    ),
    ("failures.md", "coredumpctl"): (
        "the host decides where it is: tests/agent/test_core_file.py::test_a_program_takes_the_core"
    ),
    ("first-job.md", ".venv/bin/pip install ."): "`.ci/run` does so in a fresh clone",
    ("hangs.md", "no progress for 120 s"): f"{_OUTPUTS}::test_a_sentence_is_that_of_its_event",
    ("hangs.md", "1 of 8 workers"): f"{_OUTPUTS}::test_a_sentence_is_that_of_its_event",
    ("hangs.md", "8 of 16 workers"): f"{_OUTPUTS}::test_a_sentence_is_that_of_its_event",
    ("servers.md", "not ready 60 s"): f"{_OUTPUTS}::test_a_sentence_is_that_of_its_event",
    ("stopping.md", "6 processes of run old"): f"{_OUTPUTS}::test_a_sentence_is_that_of_its_event",
    ("stopping.md", "gc --host --dry-run"): (
        "needs jobs that were lost: tests/process/test_lost_jobs.py"
    ),
    ("runbook.md", "gc --host --dry-run"): "shows what is left on the whole host",
    ("internals.md", "'.[test,lint]'"): "the steps of `.ci/run`",
    ("migrate-from-torchrun.md", "$ aio-elastic exec accelerate"): (
        "needs accelerate: tests/programs/test_programs.py"
    ),
    ("services.md", "journalctl"): "needs systemd as the first process",
    ("train.md", "nn.Linear"): f"needs torch: {_TRAIN}",
    ("train.md", "$ aio-elastic run"): f"needs torch: {_TRAIN}",
    ("upgrades.md", "pip install -U"): "needs a release at the index",
    ("logs.md", "<log_dir>/<run_id>"): f"{_OUTPUTS}::test_the_layout_of_the_logs",
    ("command-line.md", "aio-elastic --version"): (
        "tests/test_docs.py::test_the_command_line_is_documented_completely"
    ),
    ("modules.md", "SpecError (ValueError)"): f"{_OUTPUTS}::test_the_tree_of_errors",
}
"""Why a block is not run, by the end of its page's path and a text in the block."""
