"""What the prose and the tables of the pages name: options, types, defaults, exit codes."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import io
import re
from inspect import signature
from pathlib import Path

import anyio.abc
import anyio.streams.buffered
import anyio.streams.text
import pytest

from docs.site.names import public_names
from elastic_aio import LivenessSpec, RendezvousSpec, RestartPolicy, StopPlan
from elastic_aio.cli import COMMANDS, main
from tests.support.cli import REPOSITORY, run_cli
from tests.support.sockets import free_port

PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "SECURITY.md",
    *sorted(REPOSITORY.glob("docs/guides/*.md")),
    *(REPOSITORY / f"docs/{name}.md" for name in ("guarantees", "internals")),
    REPOSITORY / "docs/reference/exit-codes.md",
]
OF_OTHERS = {
    *("--cgroupns", "--privileged", "--shm-size", "--systemd", "--stop-timeout"),  # Docker, Podman
    *("--cpu", "--nproc"),  # accelerate, nproc(1)
    *("--enable-grpc-gateway", "--prefix"),  # etcd
    *("--device", "--epochs", "--nope"),  # programs of workers
    *(
        "--export",
        "--foreground",
        "--no-kill",
        "--only",
    ),  # Slurm, timeout(1), `python -m benchmarks`
    *("--scope", "--user"),  # systemd-run, systemctl
    "--timeout-graceful-shutdown",  # uvicorn
}
"""Options of other programs that the pages name."""
NAMES_OF_OTHERS = {
    *("AsyncExitStack", "CalledProcessError", "DistNetworkError", "LightningCLI", "PrefixStore"),
    *("DistributedDataParallel", "DistributedSampler"),
    *("CrashLoopBackOff", "OnFailure"),  # Kubernetes
    *("GraceTime", "KillWait", "PreemptTime", "SlurmdTimeout"),  # Slurm
    *("TimeoutStartSec", "TimeoutStopSec", "WatchdogSec"),  # systemd
}

all_pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def code_of(page: Path) -> list[str]:
    """Return what stands between backticks, outside of blocks."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`]+)`", text)


@pytest.fixture(scope="module")
def options() -> set[str]:
    """All options of all commands."""
    found = io.StringIO()
    for command in ((), ("run",), ("store", "ping"), *((name,) for name in COMMANDS)):
        with contextlib.redirect_stdout(found), contextlib.suppress(SystemExit):
            main([*command, "--help"])
    return set(re.findall(r"(?<!\w)--[a-z][\w-]+", found.getvalue()))


@all_pages
def test_options_exist(page: Path, options: set[str]) -> None:
    named = {
        name for text in code_of(page) for name in re.findall(r"(?<![\w-])--[a-z][\w-]+", text)
    }
    assert named <= options | OF_OTHERS


@all_pages
def test_types_exist(page: Path) -> None:
    known = {each.shown.rpartition(".")[2] for each in public_names()} | NAMES_OF_OTHERS
    named = {text for text in code_of(page) if re.fullmatch(r"(?:[A-Z][a-z]+){2,}", text)}
    others: tuple[object, ...] = (
        builtins,
        asyncio,
        anyio,
        anyio.abc,
        anyio.streams.buffered,
        anyio.streams.text,
    )
    assert {name for name in named - known if not any(hasattr(it, name) for it in others)} == set()


@all_pages
def test_a_time_beside_a_setting_is_its_default(page: Path) -> None:
    specs = (LivenessSpec(), RendezvousSpec(), RestartPolicy(), StopPlan())
    fields = {
        name: getattr(spec, name) for spec in specs for name in signature(type(spec)).parameters
    }
    fields["store_grace"] = RendezvousSpec().heartbeat_timeout / 2
    text = page.read_text()
    for name, seconds in re.findall(r"`(\w+)`(?:, | \()([\d.]+) s\b", text):
        assert name not in fields or fields[name] == float(seconds), name
    if page.name == "what-happens.md":
        (seconds,) = re.findall(r"SIGTERM, ([\d.]+) s", text)
        assert StopPlan().grace == float(seconds)


def shell(script: str, *options: str) -> tuple[str, ...]:
    return (*options, "--no-python", "bash", "-c", script)


TO_LAUNCHER = "trap '' USR1; kill -%s $PPID; sleep 9"
ENDS: dict[str, list[tuple[str, ...]]] = {
    "all workers exit with 0": [shell("exit 0")],
    "a worker fails, no restart is left": [shell("exit 7")],
    "a worker misses a deadline or its probe": [shell("sleep 9", "--progress-timeout=0.2")],
    "SIGTERM, SIGINT or SIGHUP to the launcher": [
        shell(TO_LAUNCHER % name) for name in ("TERM", "INT", "HUP")
    ],
    "the signal of `--preempt-signal`, `aio-elastic preempt`": [
        shell(TO_LAUNCHER % "USR1", "--preempt-signal=USR1", "--preempt-deadline=1")
    ],
    "the program or script does not exist": [("nosuch.py",), ("--no-python", "no-such-program")],
    "an option or a field is invalid": [("--nproc-per-node=x", "train.py")],
    "too few nodes at the start": [shell("exit 0", "--nnodes=2", "--rdzv-conf=join_timeout=1")],
}
"""Jobs by the first cell of a row of what-happens.md."""


def code_cell(event: str) -> str:
    """Return the cell with the exit code of the row of an event."""
    head: list[str] = []
    for line in (REPOSITORY / "docs/guides/what-happens.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "event":
            head = cells
        if cells[0] == event:
            return cells[head.index("exit code")]
    raise ValueError(event)


@pytest.mark.e2e
@pytest.mark.parametrize("event", ENDS)
def test_the_exit_code_of_an_event_is_that_of_its_row(event: str, tmp_path: Path) -> None:
    env: dict[str, str | None] = {"PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}"}
    codes = [run_cli(*words, cwd=tmp_path, env=env).code for words in ENDS[event]]
    if event == "a worker fails, no restart is left":
        assert (codes, code_cell(event)) == ([7], "that of the root cause")
        return
    shown = [int(code) for code in re.findall(r"\d+", code_cell(event))]
    assert codes == shown * (len(codes) // len(shown))
