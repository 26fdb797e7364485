"""What a running job may load later is loaded while it is idle."""

from __future__ import annotations

import asyncio
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from elastic_aio import Agent, LaunchSpec
from elastic_aio.agent import later
from elastic_aio.agent.later import LATER, missing_modules
from tests.support.children import SLEEPER, until, until_ready
from tests.support.fake_rendezvous import member, node_spec
from tests.test_structure import late_imports, module_names

# Modules that a job loads before its workers run, or not at all: a reason for each.
BEFORE = {
    "aio": "each job begins with it",
    "agent.health": "the first check is made before the workers run",
    "agent.later": "it has the list, and is loaded half a second earlier",
    "agent.multi_node_driver": "a job of several nodes begins with it",
    "agent.supervisor": "a job of several children begins with it",
    "agent.supervisor_driver": "a job of several children begins with it",
    "child_events": "a job of several children begins with it",
    "spec.group": "a job of several children begins with it",
    "agent.probes": "they are made before the workers run",
    "process.listeners": "the sockets are opened before",
    "agent.worker_setup": "the sockets are opened before",
    "cli.event_file": "the file is opened before",
    "control.server": "it listens before the workers run",
    "discovery.engine": "the rendezvous of an engine begins with it",
    "hardware.cpus": "a worker is bound when it is spawned",
    "hardware.host": "devices are counted before",
    "logs.line_filter": "the streams are planned before",
    "process.calls": "functions are pickled before",
    "process.fork": "workers are forked by it",
    "process.forkserver": "the server starts before the workers",
    "spec.limits": "the spec is checked before",
    "spec.probe": "the spec is checked before",
    "spec.sockets": "the spec is checked before",
    "rendezvous.backends": "the rendezvous is made by it",
    "rendezvous.dynamic": "the rendezvous of most backends",
    "store": "the package of store.client",
    "worker.bootstrap": "functions are pickled before",
    "worker.scripts": "scripts are looked for before each attempt",
    "http.app": "the server listens before",
    "http.connections": "the server listens before",
    "http.server": "the server listens before",
    "torch_events": "the handler is loaded before",
    "cli.sd_notify": "a service is ready when the workers run",
}
OTHERS = ("cli", "compat.", "testing.", "worker.", "process.forkserver_main")
"""Those that run in other processes; and in the command before the job begins."""


def test_each_module_that_a_running_job_loads_is_in_the_list() -> None:
    listed = {name for names in LATER.values() for name in names.split()}
    found = set()
    for user, imported in late_imports():
        is_command = user == "elastic_aio.cli.run"
        if user.removeprefix("elastic_aio.").startswith(OTHERS) and not is_command:
            continue
        if imported.startswith("elastic_aio."):
            module = imported if find_module(imported) else imported.rpartition(".")[0]
            found.add(module)
    found.discard("elastic_aio")
    assert found - listed == {f"elastic_aio.{name}" for name in BEFORE}


def find_module(name: str) -> bool:
    """Return whether there is such a module, or a package of others that has it."""
    if name.startswith("elastic_aio."):
        return name in module_names()
    return find_spec(name.partition(".")[0]) is not None


def test_the_list_names_modules_that_exist_and_use_each_other() -> None:
    for user, names in LATER.items():
        for name in (user, *names.split()):
            assert find_module(name), name


async def test_a_job_that_is_idle_has_loaded_them() -> None:
    async with Agent(LaunchSpec(SLEEPER)) as agent:
        await until_ready(agent)
        await until(lambda: not any(missing_modules()))


async def test_a_node_that_waits_for_others_loads_them_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers may start hours later."""
    last = "elastic_aio.logs.trimmer"
    monkeypatch.delitem(sys.modules, last, raising=False)
    async with member(node_spec(tmp_path, SLEEPER)) as node:
        await until(lambda: last in sys.modules)
        assert node.agent.pids() == {}


async def test_a_module_that_cannot_be_loaded_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other ones are."""
    last = "elastic_aio.logs.trimmer"
    monkeypatch.setitem(later.LATER, "elastic_aio.agent.agent", f"no_such_module {last}")
    monkeypatch.delitem(sys.modules, last, raising=False)
    async with Agent(LaunchSpec(SLEEPER)) as agent:
        await until_ready(agent)
        await until(lambda: last in sys.modules)
        assert [*missing_modules()] == ["no_such_module"]
        assert agent.status().is_ready


async def test_a_stop_ends_the_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one more module is loaded when the job ends."""
    names = [f"no_such_module_{number}" for number in range(100_000)]
    tried: list[str] = []

    def load(name: str) -> None:
        tried.append(name)
        raise ImportError(name)

    monkeypatch.setattr(later, "import_module", load)
    monkeypatch.setitem(later.LATER, "elastic_aio.agent.agent", " ".join(names))
    async with Agent(LaunchSpec(SLEEPER)) as agent:
        await until_ready(agent)
        await until(lambda: tried)
    count = len(tried)
    assert count < len(names)
    await asyncio.sleep(0)
    assert len(tried) == count
