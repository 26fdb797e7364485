"""Layers and purity: imports point to lower layers, and pure modules do no I/O."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import elastic_aio
from tests.support.exports import names_of

PACKAGE = Path(elastic_aio.__file__).parent

LAYERS: list[set[str]] = [
    {
        "_version",
        "errors",
        "outcome",
        "ranks",
        "reasons",
        "spec",
        "events",
        "node_events",
        "child_events",
        "event_json",
        "explanation",
        "lazy",
        "stacks",
        "text",
        "status",
        "value",
        "worker_error",
    },
    {"aio", "hardware", "worker"},
    {"signals", "sockets"},
    {"process", "logs", "store"},
    {"engines", "watch"},
    {"discovery", "control", "record"},
    {"rendezvous"},
    {"agent"},
    {"http", "report", "testing", "torch_events", "torch_logs", "torch_variables"},
    {"launcher", "recorder"},
    {"group"},
    {"multiprocessing"},
    {"plugins", "sync"},
    {"cli", "compat"},
    {"__init__", "__main__", "launch"},
]
VALUES = LAYERS[0]
PURE = {
    "errors",
    "events",
    "node_events",
    "child_events",
    "event_json",
    "explanation",
    "outcome",
    "ranks",
    "reasons",
    "lazy",
    "stacks",
    "text",
    "value",
    "worker_error",
    "spec",
    "spec.checks",
    "spec.fields",
    "spec.files",
    "spec.group",
    "spec.job",
    "spec.limits",
    "spec.liveness",
    "spec.logs",
    "spec.probe",
    "spec.rendezvous",
    "spec.restart",
    "spec.sockets",
    "spec.stop",
    "spec.tls",
    "control.protocol",
    "hardware.cpus",
    "logs.lines",
    "logs.paths",
    "watch.deadlines",
    "watch.probe_table",
    "agent.machine",
    "agent.multi_node",
    "agent.supervisor",
    "rendezvous.base",
    "discovery.choice",
    "rendezvous.formation",
    "rendezvous.state",
    "rendezvous.member",
    "rendezvous.coordinator",
    "rendezvous.messages",
    "torch_events",
    "_version",
    "http.openmetrics",
    "status",
    "testing.virtual_time",
    "engines.etcd.operations",
    "engines.etcd.wire",
    "engines.redis.script",
    "store.wire",
    "store.keyspace",
    "store.limits",
    "store.replies",
}
NOT_PURE = {
    "anyio",
    "asyncio",
    "os",
    "random",
    "signal",
    "socket",
    "subprocess",
    "threading",
    "time",
}
# Third-party packages, and the modules that may import them.
CONFINED = {
    "aiofiles": {"aio"},
    "anyio": {"aio", "process.open_process"},
    "cloudpickle": {"process.calls"},
    "hypercorn": {"http.connections"},
    "pynvml": {"hardware.host"},
    "redis": {"engines.redis.connection"},
    "rich": {"cli.top"},
    "starlette": {"http.app", "http.connections", "http.jobs"},
    # Each import is inside the function that has to return one of torch's objects.
    "torch": {
        "compat.torch.rendezvous.bridge",
        "compat.torch.rendezvous",
    },
    "uvloop": {"cli.options"},
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(tree: ast.AST, *, typing_too: bool) -> Iterator[str]:
    """Yield the full names that a module imports, those inside functions included."""
    for node in ast.iter_child_nodes(tree):
        if (
            not typing_too
            and isinstance(node, ast.If)
            and ast.unparse(node.test).endswith("TYPE_CHECKING")
        ):
            for other in node.orelse:
                yield from imports(ast.Module([other], []), typing_too=typing_too)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imports(node, typing_too=typing_too)


@functools.cache
def imported_by(name: str, *, typing_too: bool = True) -> frozenset[str]:
    return frozenset(imports(ast.parse(MODULES[name].read_text()), typing_too=typing_too))


def ours(imported: str) -> str | None:
    """Return which of our modules an imported name is, or is in."""
    head, _, rest = imported.partition(".")
    if head != "elastic_aio":
        return None
    while rest and rest not in MODULES:
        rest = rest.rpartition(".")[0]
    return rest or "__init__"


def package_of(name: str) -> str:
    """Return the package or top-level module that a module belongs to."""
    return name.partition(".")[0]


def layer_of(name: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if package_of(name) in layer)


SATELLITES = ("compat", "engines", "testing")
"""Packages that the core reaches by name only: `test_satellites` deletes them."""


@pytest.mark.parametrize("name", MODULES)
def test_the_core_imports_no_satellite(name: str) -> None:
    """Neither inside functions nor for type checkers; and no satellite imports another one."""
    found = {package_of(module) for module in filter(None, map(ours, imported_by(name)))}
    assert not found.intersection(SATELLITES) - {package_of(name)}


@pytest.mark.parametrize("name", MODULES)
def test_every_module_has_a_layer(name: str) -> None:
    assert sum(package_of(name) in layer for layer in LAYERS) == 1


@pytest.mark.parametrize("name", sorted(MODULES.keys() - {"__init__", "__main__"}))
def test_imports_point_down(name: str) -> None:
    """A module imports lower layers and its own package; values import values."""
    for imported in sorted(filter(None, map(ours, imported_by(name)))):
        is_value = layer_of(name) == layer_of(imported) == 0
        is_below = layer_of(imported) < layer_of(name)
        is_version = imported == "__init__"
        assert is_value or is_below or package_of(imported) == package_of(name), (
            f"{name} imports {imported}"
        )
        assert not is_version, f"{name} imports the package itself"


def test_values_import_each_other_without_a_cycle() -> None:
    """Neither at run time nor for type checkers; a package stands above its modules."""
    values = {name for name in MODULES if package_of(name) in VALUES}
    below = {name: values & set(map(ours, imported_by(name))) for name in values}
    while below:
        free = {name for name, others in below.items() if not others & below.keys()}
        assert free, f"a cycle among {sorted(below)}"
        below = {name: others for name, others in below.items() if name not in free}


@pytest.mark.parametrize("subsystem", ["process", "logs", "store"])
def test_subsystems_do_not_import_each_other(subsystem: str) -> None:
    others = {"process", "logs", "store"} - {subsystem}
    for name in MODULES:
        if package_of(name) == subsystem:
            modules = filter(None, map(ours, imported_by(name)))
            upward = {module for module in modules if package_of(module) in others}
            assert not upward, f"{name} imports {upward}"


@pytest.mark.parametrize("name", sorted(PURE & MODULES.keys()))
def test_pure_modules_stay_pure(name: str) -> None:
    """They import no clock, no randomness, no operating system and no event loop."""
    names = imported_by(name) - {"os.PathLike"}  # an abstract class, for annotations
    roots = {imported.partition(".")[0] for imported in names}
    assert not roots & NOT_PURE


@pytest.mark.parametrize("name", sorted(PURE & MODULES.keys()))
def test_pure_modules_import_pure_ones(name: str) -> None:
    """At run time, and from this package."""
    assert set(filter(None, map(ours, imported_by(name, typing_too=False)))) <= PURE


def test_the_pure_modules_exist() -> None:
    assert not PURE - MODULES.keys()


# What the guardian's bare interpreter imports beside the standard library.
BARE_NEIGHBOURS = {"proc", "descendants", "stop_order", "guard"}


@pytest.mark.parametrize("name", MODULES)
def test_third_parties_are_confined(name: str) -> None:
    """Each third-party package is imported where `CONFINED` allows it."""
    roots = {imported.partition(".")[0] for imported in imported_by(name)}
    third_parties = roots - set(sys.stdlib_module_names) - {"elastic_aio"}
    if name in {f"process.{each}" for each in ("guardian_main", *BARE_NEIGHBOURS)}:
        third_parties -= BARE_NEIGHBOURS
    if name in ("worker.bootstrap", "worker.bootstrap_main"):
        # Before the package can be found.
        third_parties -= {"bootstrap", "interpreter", "lines"}
    if name == "worker.startup.sitecustomize":
        # The script's own, in place of this one; a neighbour: the package may be elsewhere.
        third_parties -= {"sitecustomize", "interpreter", "lines"}
    if package_of(name) != "worker":
        third_parties -= {"msgspec"}  # values; a worker may run where nothing is installed
    assert third_parties <= CONFINED.keys()
    for third_party in third_parties:
        assert name in CONFINED[third_party], f"{name} imports {third_party}"


@pytest.mark.parametrize("name", [name for name in MODULES if package_of(name) == "worker"])
def test_worker_code_never_imports_asyncio(name: str) -> None:
    """Except for running a coroutine function."""
    roots = {imported.partition(".")[0] for imported in imported_by(name)}
    if name == "worker.interpreter":
        roots -= {"asyncio"}  # a test of `bootstrap` shows that other functions do without
    assert not roots & {"asyncio", "anyio", "uvloop", "aiofiles"}


def loaded_by(statement: str) -> set[str]:
    """Return the modules that a fresh interpreter holds after a statement."""
    code = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r})\n{statement}\n"
    printed = subprocess.run(
        [sys.executable, "-I", "-c", code + "print('\\n'.join(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(printed.stdout.split())


def test_record_leaves_asyncio_out() -> None:
    """A worker that imports `record` loads no other code."""
    loaded = loaded_by("from elastic_aio.worker import record")
    assert "elastic_aio.worker.errorfile" in loaded
    assert not loaded & {"asyncio", "anyio", "uvloop", "aiofiles", "torch", "ssl", "msgspec"}


@pytest.mark.parametrize("name", [name for name in MODULES if package_of(name) == "worker"])
def test_worker_code_needs_no_package(name: str) -> None:
    """A worker may run where no package but this one is installed."""
    if name in ("worker.bootstrap_main", "worker.startup.sitecustomize"):
        pytest.skip("a program, not a module")
    assert "msgspec" not in loaded_by(f"import elastic_aio.{name}")


def test_the_package_itself_loads_nothing() -> None:
    """`import elastic_aio` is free; the names load on first use."""
    loaded = loaded_by("import elastic_aio")
    assert {name for name in loaded if name.startswith("elastic_aio")} == {
        "elastic_aio",
        "elastic_aio._version",
        "elastic_aio.lazy",
    }
    assert "asyncio" not in loaded


def test_the_launcher_loads_no_other_loop() -> None:
    """anyio, aiofiles and torch cost start-up time that most jobs never need."""
    loaded = loaded_by("import elastic_aio.cli.run")
    assert "asyncio" in loaded
    assert not loaded & {"anyio", "aiofiles", "torch", "concurrent.futures.thread"}


def test_one_node_does_not_pay_for_many() -> None:
    """The rendezvous is loaded for several nodes only."""
    words = ["--nproc-per-node=2", "x"]
    parse = f"from elastic_aio.cli.run_options import parse_run; parse_run({words}, {{}})"
    loaded = loaded_by(f"import elastic_aio.cli.run; {parse}")
    assert not {
        name
        for name in loaded
        if name.startswith(("elastic_aio.rendezvous.", "elastic_aio.discovery"))
    } - {"elastic_aio.rendezvous.base"}
    unused = {"elastic_aio.cli.events", "elastic_aio.cli.store", "elastic_aio.http.server"}
    unused |= {"elastic_aio.control.session", "elastic_aio.control.protocol"}
    assert not loaded & (unused | {"importlib.metadata"})


@pytest.mark.parametrize("name", ["guardian_main", *sorted(BARE_NEIGHBOURS)])
def test_the_guardian_imports_the_standard_library_only(name: str) -> None:
    """Its bare interpreter imports only neighbouring files of this package."""
    names = imported_by(f"process.{name}", typing_too=False)
    if name in ("guard", "guardian_main", "proc"):  # the others find it in the package too
        assert not [imported for imported in names if imported.startswith("elastic_aio")]
    roots = {imported.partition(".")[0] for imported in names}
    standard = {"__future__", "_signal", "_socket", "binascii", "errno", "fcntl"}
    standard |= {"itertools", "os", "resource", "select", "sys", "time"}
    assert roots - {"elastic_aio"} <= standard | BARE_NEIGHBOURS


def test_no_module_bears_the_name_of_a_public_function() -> None:
    """`elastic_aio.launch` must stay the function, whatever else is imported.

    The module of that name is for `python -m`; imported, it puts the function in its place.
    """
    assert names_of("elastic_aio") & MODULES.keys() == {"launch"}
    check = "assert elastic_aio.launch is elastic_aio.launcher.launch"
    loaded_by(f"import elastic_aio.launch; import elastic_aio.launcher; {check}")
    loaded_by(f"from elastic_aio import launch; import elastic_aio.launch; {check}")


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is(name: str) -> None:
    """The first line of each module is a sentence about it."""
    text = ast.get_docstring(ast.parse(MODULES[name].read_text()))
    assert text, f"{name} has no docstring"
