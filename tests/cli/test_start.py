"""What the start of a job loads and compiles: numbers that the load of a host does not change."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.support.cli import run_program

# The guardian is spawned first, then the workers.
PROGRAM = """
import gc, json, sys
before, spawned, compiled = {*sys.modules}, [], 0
def count(event, args):
    global compiled
    if event == "subprocess.Popen":
        modules = [name for name in sys.modules if name not in before]
        found = {"modules": modules, "compiled": compiled, "collects": gc.isenabled()}
        spawned.append(found)
    elif event == "exec" and sys._getframe(1).f_globals["__name__"] == "dataclasses":
        compiled += 1
sys.addaudithook(count)
from elastic_aio.cli import entry
sys.argv[1:] = ["run", "--nproc-per-node=2", *sys.argv[1:]]
code = entry()
spawned.append({"modules": [*sys.modules]})
print(json.dumps(spawned))
sys.exit(code)
"""

# A script that prints, has a child, and has a handler that saves.
TRAINER = """
import os, signal, sys
def save(*_):
    open(__file__ + ".saved", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
print("loss", 0.25, file=sys.stderr)
"""

MODULES_MAX = 75
"""Modules of this package when the first worker is spawned; each takes half a millisecond."""
COMPILED_MAX = 12
"""Texts that `dataclass` writes and compiles by then: with Python 3.11 one for each method."""

FOR_OTHER_JOBS = """
agent.core_file agent.health agent.later agent.multi_node_driver agent.probes agent.worker_setup
cli.dry_run cli.event_file cli.finished_jobs cli.parser cli.rendezvous_options cli.restart_options
cli.schedulers cli.sd_notify cli.suggestions control.session discovery event_json group hardware
http logs.inotify logs.line_filter logs.reader logs.trimmer multiprocessing node_events
process.calls process.cgroups process.command_output process.exec_main process.fork
process.forkserver process.listeners process.lost_jobs record recorder rendezvous spec.limits
spec.probe spec.rdzv_conf spec.sockets spec.torchrun stacks store.client store.server store.tls
torch_events torch_logs torch_variables watch watch.forensics worker.bootstrap worker.membership
worker.notify worker.recorder worker.scripts worker.timers
agent.supervisor child_events spec.group
"""

STANDARD = """
argparse bz2 concurrent.futures.thread difflib email encodings.idna gettext hashlib hmac http
importlib.metadata importlib.util lzma multiprocessing pickle random shutil tempfile unicodedata
termios urllib zlib
"""
"""Modules of the standard library that such a start does without."""


@pytest.fixture(scope="module", params=["/bin/true", "a trainer"])
def spawned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What is loaded and compiled when the guardian is spawned, when each worker is, and then."""
    worker = ["--no-python", request.param]
    if request.param == "a trainer":
        script = tmp_path_factory.mktemp("trainer") / "trainer.py"
        script.write_text(TRAINER)
        worker = [str(script)]
    ended = run_program([sys.executable, "-c", PROGRAM, *worker])
    assert ended.code == 0, ended.err
    found: list[Any] = json.loads(ended.out)
    assert len(found) == 4
    return found


def loaded(modules: list[str], unwanted: str, package: str = "") -> set[str]:
    """Return the unwanted modules, and those of unwanted packages, that are loaded."""
    names = {f"{package}{name}" for name in unwanted.split()}
    return {name for name in modules if name in names or name.rpartition(".")[0] in names}


def test_the_guardian_starts_before_the_event_loop_is_imported(spawned: list[Any]) -> None:
    """Its interpreter starts meanwhile, and no worker may start before."""
    assert not loaded(spawned[0]["modules"], "asyncio ssl socket logging concurrent.futures")


def test_a_start_loads_few_modules(spawned: list[Any]) -> None:
    ours = [name for name in spawned[1]["modules"] if name.partition(".")[0] == "elastic_aio"]
    assert len(ours) <= MODULES_MAX, ours


def test_a_start_loads_no_module_of_another_job(spawned: list[Any]) -> None:
    """Those of several nodes, functions, watchdogs and the like are loaded where they are used."""
    modules = spawned[1]["modules"]
    assert not loaded(modules, FOR_OTHER_JOBS, "elastic_aio.")
    assert not loaded(modules, STANDARD)
    assert not loaded(modules, "anyio h11 h2 hypercorn starlette wsproto")


def test_a_job_without_limits_and_reports_loads_no_watchdog(spawned: list[Any]) -> None:
    """Neither when its workers end."""
    assert not loaded(spawned[-1]["modules"], "watch stacks", "elastic_aio.")


def test_a_start_compiles_few_methods(spawned: list[Any]) -> None:
    assert spawned[1]["compiled"] <= COMPILED_MAX


def test_garbage_is_collected_when_all_modules_are_imported(spawned: list[Any]) -> None:
    """Not before: they are no garbage, and take a fortieth of the start to look through."""
    assert [each["collects"] for each in spawned[:-1]] == [False, True, True]
