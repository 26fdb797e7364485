"""Stream masks, log settings, and plug-ins that lay out the logs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio import JobFailed, launch
from elastic_aio.errors import SpecError
from elastic_aio.logs.paths import StreamPlan, StreamTarget, plan_logs
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.logs import LogDestinations, LogLayout, LogLayoutContext, LogSpec, Std, StdMap
from tests.support.children import file_console, shell
from tests.support.cli import run_cli


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        ("0", {0: 0, 7: 0}),
        ("3", {0: 3, 100: 3}),
        (" 2 ", {0: 2}),
        (Std.OUT, {0: 1, 5: 1}),
        (3, {0: 3}),
        ("0:3,1:1", {0: 3, 1: 1, 2: 0}),
        ("10:3", {10: 3, 1: 0, 0: 0}),
        ("0-3:3,10:1", {0: 3, 3: 3, 4: 0, 10: 1}),
        ("2-2:2", {2: 2, 1: 0, 3: 0}),
        (" 0:1 , 1:2 ", {0: 1, 1: 2}),
        ({0: 3, 12: Std.ERR}, {0: 3, 12: 2, 1: 0}),
        ({}, {0: 0}),
        (StdMap(Std.ALL), {4: 3}),
    ],
)
def test_every_form_is_parsed(value: object, chosen: dict[int, int]) -> None:
    """A mask is for all ranks; a list or mapping is for those it names."""
    parsed = StdMap.parse("logs.tee", value)
    assert {rank: int(parsed.of(rank)) for rank in chosen} == chosen


@pytest.mark.parametrize(
    "value",
    [
        "",
        "4",
        "-1",
        "a",
        "0:4",
        "0:",
        ":1",
        "0:1,",
        "0:1;1:1",
        "0-:1",
        "-3:1",
        "1-2-3:1",
        "0:1:2",
        4,
        -1,
        True,
        1.0,
        None,
        {0: 4},
        {-1: 1},
        {"0": 1},
        {0: True},
        {True: 1},
        [0, 1],
        "9" * 5000,
    ],
)
def test_other_forms_are_refused_in_one_line(value: object) -> None:
    with pytest.raises(SpecError, match=r"^logs\.tee: must be a mask 0-3 or a list") as caught:
        StdMap.parse("logs.tee", value)
    assert "\n" not in str(caught.value)


def test_a_rank_named_twice_is_refused() -> None:
    """Overlapping ranges contradict each other."""
    with pytest.raises(SpecError, match=r"^-r: must name rank 2 only once \(got '0-3:3,2:1'\)"):
        StdMap.parse("-r", "0-3:3,2:1")


def test_a_backward_range_is_refused() -> None:
    with pytest.raises(SpecError, match=r"range 3-1 runs backwards"):
        StdMap.parse("-r", "3-1:3")


def test_properties_of_a_map() -> None:
    """They do not depend on the number of workers."""
    assert StdMap().is_empty
    assert StdMap.parse("f", "0:0,9:0").is_empty
    assert not StdMap.parse("f", "5:1").is_empty
    assert not StdMap.parse("f", 2).is_empty
    assert StdMap.parse("f", "0-3:3,10:1").highest_rank == 10
    assert StdMap.parse("f", "3").highest_rank == -1


@given(st.dictionaries(st.integers(0, 300), st.sampled_from(list(Std)), min_size=1))
def test_a_list_and_a_mapping_agree(chosen: dict[int, Std]) -> None:
    text = ",".join(f"{rank}:{int(mask)}" for rank, mask in chosen.items())
    assert StdMap.parse("f", text) == StdMap.parse("f", chosen)
    assert all(StdMap.parse("f", text).of(rank) == mask for rank, mask in chosen.items())


def test_the_numbers_are_torchs() -> None:
    assert (Std.NONE, Std.OUT, Std.ERR, Std.ALL) == (0, 1, 2, 3)
    assert Std.OUT | Std.ERR is Std.ALL


def test_log_settings_are_normalised() -> None:
    """Texts and mappings become maps, ranks a frozen set, a path a text."""
    logs = LogSpec(
        log_dir=Path("/tmp/x"),
        redirects="0-1:3",
        tee={1: 1},
        local_ranks_filter=[1, 0],
        prefix="${rank}|",
    )
    assert logs.log_dir == "/tmp/x"
    assert logs.redirects.of(1) is Std.ALL
    assert logs.tee == StdMap(by_rank=((1, Std.OUT),))
    assert logs.local_ranks_filter == frozenset({0, 1})
    assert not logs.is_off
    assert LogSpec(log_dir="/dev/null").is_off


def test_settings_without_effect() -> None:
    """`/dev/null` captures nothing, so there is nothing to tee, to filter or to keep."""
    settings: dict[str, Any] = {
        "redirects": 1, "tee": 2, "local_ranks_filter": [0], "on_full": "console",
        "max_bytes": 1 << 20, "keep_attempts": 1, "keep_runs": 1,
    }  # fmt: skip
    assert LogSpec(log_dir="/dev/null", **settings).ignored == tuple(settings)
    assert LogSpec(log_dir="/dev/null", tee=1).ignored == ("tee",)
    assert LogSpec(log_dir="/dev/null", prefix="x").ignored == ()
    assert LogSpec(log_dir="/tmp", **settings).ignored == ()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"redirects": {2: 1}}, "logs.redirects: local ranks must be from 0 to 1 (got 2)"),
        ({"tee": "10:1"}, "logs.tee: local ranks must be from 0 to 1 (got 10)"),
        ({"local_ranks_filter": {5}}, "logs.local_ranks_filter: local ranks must be from 0 to 1"),
    ],
)
def test_logs_of_a_missing_rank_are_refused(settings: dict[str, Any], message: str) -> None:
    """As soon as the number of workers is known."""
    with pytest.raises(SpecError) as caught:
        LaunchSpec("x.py", nproc_per_node=2, logs=LogSpec(**settings))
    assert str(caught.value).startswith(message)
    LaunchSpec("x.py", nproc_per_node="auto", logs=LogSpec(**settings))


PLUG_IN = '''
from elastic_aio.spec.logs import LogDestinations, LogLayout

class Flat(LogLayout):
    """All in one directory."""

    def plan(self, worker):
        path = f"{self.log_dir}/flat/{worker.attempt}-{worker.local_rank}.txt"
        return LogDestinations(stdout=path, stderr="/dev/null")
'''


class Flat(LogLayout):
    """Streams of all workers in one directory."""

    def plan(self, worker: LogLayoutContext) -> LogDestinations:
        name = f"{self.log_dir}/flat/{worker.attempt}-{worker.local_rank}"
        shown = frozenset({"stderr"})
        return LogDestinations(
            f"{name}.out", f"{name}.err", f"{worker.directory}/error.json", shown
        )


class Wrong(LogLayout):
    """Cannot decide."""

    def plan(self, worker: LogLayoutContext) -> LogDestinations:
        raise LookupError("where to?")


def test_a_layout_is_only_a_plan() -> None:
    """None inherits a stream and /dev/null drops it; nothing is opened."""

    class Mixed(LogLayout):
        def plan(self, worker: LogLayoutContext) -> LogDestinations:
            return LogDestinations(stderr=os.devnull)

    logs = plan_logs(Mixed(), "/run", 2, 1)
    assert logs.stdout == StreamPlan(StreamTarget.CONSOLE)
    assert logs.stderr == StreamPlan(StreamTarget.NOWHERE)
    assert (logs.directory, logs.error_file) == ("/run/attempt_2/1", "")
    with pytest.raises(NotImplementedError):
        plan_logs(LogLayout(), "/run", 0, 0)


async def test_a_plug_in_lays_out_the_files(tmp_path: Path) -> None:
    """Its directories and files are created; the streams it names reach the console."""
    with file_console(tmp_path) as console:
        spec = LaunchSpec(
            shell("echo out $RANK; echo err $RANK >&2"),
            nproc_per_node=2,
            logs=Flat(log_dir=tmp_path / "logs"),
        )
        result = await launch(spec, console=console)
    directory = tmp_path / "logs" / "flat"
    assert {path.name: path.read_text() for path in directory.iterdir()} == {
        "0-0.out": "out 0\n",
        "0-0.err": "err 0\n",
        "0-1.out": "out 1\n",
        "0-1.err": "err 1\n",
    }
    shown = sorted((tmp_path / "err").read_text().splitlines())
    assert shown == ["[default0]:err 0", "[default1]:err 1"]
    assert result.attempts[0].workers[0].stdout_path == str(directory / "0-0.out")


async def test_a_plug_in_that_fails() -> None:
    """The job fails with one line and is not restarted."""
    with pytest.raises(JobFailed, match=r"the plan of the logs failed: LookupError: where to\?"):
        await launch(LaunchSpec(["true"], logs=Wrong(), max_restarts=3))


@pytest.mark.slow
def test_a_plug_in_is_found_by_its_name(tmp_path: Path) -> None:
    """An entry point of an installed distribution; other names are refused."""
    (tmp_path / "flat_logs.py").write_text(PLUG_IN)
    info = tmp_path / "flat_logs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flat-logs\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[elastic_aio.logs_specs]\nflat = flat_logs:Flat\nbroken = flat_logs:Nothing\n"
    )
    path = f"{tmp_path}:{Path(__file__).parents[2]}"
    words = ["--log-dir", tmp_path / "logs", "--no-python", sys.executable, "-c", "print('hi')"]
    ended = run_cli("--logs-specs", "flat", *words, env={"PYTHONPATH": path})
    assert ended.code == 0
    assert (tmp_path / "logs" / "flat" / "0-0.txt").read_text() == "hi\n"
    refused = run_cli("--logs-specs", "round", *words, env={"PYTHONPATH": path})
    assert refused.code == 2
    assert "must be one of: broken, default, flat (got 'round')" in refused.err
    broken = run_cli("--logs-specs", "broken", *words, env={"PYTHONPATH": path})
    assert broken.code == 2
    assert "broken cannot be loaded" in broken.err
