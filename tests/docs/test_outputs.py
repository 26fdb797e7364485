"""What the pages say is printed: by an event, by a command after a job, by a test of hours."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

import elastic_aio
from elastic_aio import (
    AttemptFailed,
    ElasticAioError,
    Event,
    ExitStatus,
    Failure,
    LostJobFound,
    WorkersUnfinished,
)
from elastic_aio.event_json import event_from_json
from elastic_aio.worker.errorfile import parse_error_file
from tests.support.cli import CLI, REPOSITORY, run_program
from tests.support.doc_outputs import block_of
from tests.test_layers import LAYERS


def failed(rank: int, reason: str) -> AttemptFailed:
    """Return the failure of a worker, as the examples of the pages have it."""
    root: Any = Failure(
        rank=rank,
        local_rank=rank,
        pid=4711,
        host="h",
        status=ExitStatus(code=1),
        time=0.0,
        order=0,
        message=reason,
    )
    return AttemptFailed(root=root, failures=(root,))


SENTENCES: dict[tuple[str, str], Event] = {
    ("failures.md", "bad batch"): failed(1, "ValueError: bad batch"),
    ("hangs.md", "no progress for 120 s"): failed(
        3, "no progress for 120 s (progress timeout), at step 17/1000"
    ),
    ("hangs.md", "1 of 8 workers"): WorkersUnfinished(
        seconds=60.0, finished=1, running=tuple(range(1, 8))
    ),
    ("hangs.md", "8 of 16 workers"): WorkersUnfinished(
        seconds=60.0, finished=8, running=(8, 9), world_size=16
    ),
    ("servers.md", "not ready 60 s"): failed(
        0, "not ready 60 s after its start (ready timeout), last probe: HTTP status 503"
    ),
    ("stopping.md", "6 processes of run old"): LostJobFound(
        lost_run_id="old", pids=(4711, 4712, 4720, 4721, 4730, 4731), since=-7500.0
    ),
}


@pytest.mark.parametrize("place", SENTENCES, ids=":".join)
def test_a_sentence_is_that_of_its_event(place: tuple[str, str]) -> None:
    shown = block_of(*place).text.splitlines()[0]
    assert shown == f"aio-elastic: {SENTENCES[place].sentence}"


def test_the_json_of_an_event() -> None:
    text = block_of("reference/events.md", '"event":"WorkerStarted"').text
    event = event_from_json(text.replace("\n ", "").encode())
    assert (event.sentence, event.run_id) == ("rank 0 started (pid 4711)", "my-run")


def test_the_json_of_an_error_file() -> None:
    text = block_of("worker-environment.md", "py_callstack").text
    assert (error := parse_error_file(text.encode(), "")) is not None
    assert (error.message, error.timestamp) == ("ValueError: x", 1_700_000_000)


def test_the_groups_of_plug_ins_are_those_that_are_looked_for() -> None:
    table = tomllib.loads(block_of("plugins.md", "[project.entry-points").text)
    sources = "".join(path.read_text() for path in (REPOSITORY / "elastic_aio").rglob("*.py"))
    groups = table["project"]["entry-points"]
    assert len(groups) == 4
    for group in groups:
        assert f'"{group}"' in sources, group


def test_the_unit_of_systemd() -> None:
    """Its lines are those of the example, but for what it starts."""
    lines = block_of("guides/services.md", "[Service]").text.splitlines()
    unit = (REPOSITORY / "examples/systemd/jobs@.service").read_text().splitlines()
    (start,) = [line for line in lines if line not in unit]
    assert re.fullmatch("ExecStart=.*/aio-elastic up --reload-on-hup /etc/jobs/web.toml", start)


@pytest.mark.docs
def test_the_command_of_a_pod(tmp_path: Path) -> None:
    text = block_of("guides/services.md", "livenessProbe").text
    match = re.search(r"^command: \[(.*)\]$", text, re.MULTILINE)
    assert match is not None
    (tmp_path / "jobs.toml").write_text(block_of("services.md", "[children.mailer]").text)
    program, command, *words = shlex.split(match[1].replace(", ", " "))
    assert program == "aio-elastic"
    ended = run_program([*CLI, command, "--dry-run", *words], cwd=tmp_path)
    assert ended.code == 0, ended.err


def test_the_drawing_of_the_layers() -> None:
    """Its lines are the layers, the highest first."""
    text = block_of("docs/architecture.md", "multiprocessing").text
    drawn = [line.split() for line in text.splitlines() if line.strip() != "|"]
    layers = {name: number for number, names in enumerate(LAYERS) for name in names}
    assert {name for names in drawn for name in names} <= layers.keys()
    below = [max(layers[name] for name in names) for names in drawn[1:]]
    for names, highest in zip(drawn, below, strict=False):
        assert min(layers[name] for name in names) >= highest, names


def test_the_tree_of_errors() -> None:
    """Each error stands below its base; those of the package that are no event stand there."""
    stack: list[str] = []
    shown: dict[str, str] = {}
    for line in block_of("modules.md", "SpecError (ValueError)").text.splitlines():
        found = re.match(r"([│├└─ ]*)(\w+)", line)
        assert found is not None
        del stack[len(found[1]) // 4 :]
        shown[found[2]] = stack[-1] if stack else ""
        stack.append(found[2])
    names = {name for name in dir(elastic_aio) if isinstance(getattr(elastic_aio, name), type)}
    names |= shown.keys()
    errors = [getattr(elastic_aio, name) for name in names]
    real = {error.__name__: error for error in errors if issubclass(error, ElasticAioError)}
    assert shown.keys() == real.keys()
    for name, base in shown.items():
        assert not base or getattr(elastic_aio, base) in real[name].__bases__


@pytest.mark.docs
def test_the_layout_of_the_logs(tmp_path: Path) -> None:
    lines = block_of("logs.md", "<log_dir>/<run_id>").text.splitlines()
    words = ["run", "--log-dir=logs", "--rdzv-id=my-run", "--redirects=3", "fail.py"]
    (tmp_path / "fail.py").write_text(
        "from elastic_aio.worker import record\n\n\n@record\ndef main():\n    1 / 0\n\n\nmain()\n"
    )
    assert run_program([*CLI, *words], cwd=tmp_path).code == 1
    real = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("logs/**/*")}
    host = os.uname().nodename.partition(".")[0]
    for line in lines:
        directory, _, names = line.rpartition("/")
        for name in names.strip("{}").split(","):
            text = re.escape(f"{directory}/{name}").replace("<log_dir>", "logs")
            text = text.replace("<run_id>", "my\\-run").replace("<host>", re.escape(host))
            text = re.sub(r"<\w+>", r"\\w+", text)
            assert any(re.fullmatch(text, path) for path in real), (text, real)
