"""The house stands on its floors: imports point down, and pure modules stay pure."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import elastic_aio

PACKAGE = Path(elastic_aio.__file__).parent

FLOORS: list[set[str]] = [
    {
        "_version",
        "errors",
        "outcome",
        "ranks",
        "rendezvousspec",
        "spec",
        "logspecs",
        "policy",
        "checks",
        "std",
        "signames",
        "backoff",
        "events",
        "restarts",
    },
    {"aio", "channel", "signals", "worker"},
    {"process", "logs", "store"},
    {"rendezvous"},
    {"agent", "testing"},
    {"options", "report"},
    {"launcher", "processes", "torchrun", "metrics", "store_cli", "events_cli"},
    {"cli", "sync"},
    {"__init__", "__main__"},
]
WORDS = FLOORS[0]
PURE = WORDS - {"_version"} | {
    "logs.lines",
    "logs.paths",
    "logs.prefix",
    "agent.groupmachine",
    "agent.machine",
    "agent.membermachine",
    "agent.vocabulary",
    "rendezvous.adopting",
    "rendezvous.base",
    "rendezvous.bulletin",
    "rendezvous.choosing",
    "rendezvous.commands",
    "rendezvous.desk",
    "rendezvous.ending",
    "rendezvous.forming",
    "rendezvous.incumbent",
    "rendezvous.job",
    "rendezvous.judging",
    "rendezvous.member",
    "rendezvous.roll",
    "rendezvous.running",
    "rendezvous.seats",
    "rendezvous.state",
    "rendezvous.tickets",
    "testing.attendance",
    "testing.bureau",
    "testing.crew",
    "testing.network",
    "testing.nodes",
    "testing.places",
    "testing.scenarios",
    "testing.simulation",
    "testing.timeline",
    "testing.witness",
    "store.wire",
    "store.keyspace",
    "store.leases",
    "store.replies",
    "store.watches",
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
# Who may import what others made; whatever is not named here is the standard library.
CONFINED = {
    "aiofiles": {"agent.evidence"},
    "anyio": {"aio"},
    "cloudpickle": {"process.payload"},
    "uvloop": {"cli", "launcher", "store_cli"},
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


def imported_by(name: str, *, typing_too: bool = True) -> set[str]:
    return set(imports(ast.parse(MODULES[name].read_text()), typing_too=typing_too))


def ours(imported: str) -> str | None:
    """Return which of our modules an imported name is, or is in."""
    head, _, rest = imported.partition(".")
    if head != "elastic_aio":
        return None
    while rest and rest not in MODULES:
        rest = rest.rpartition(".")[0]
    return rest or "__init__"


def room(name: str) -> str:
    """Return the part of the house that a module belongs to."""
    return name.partition(".")[0]


def floor(name: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room(name) in rooms)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_has_a_floor(name: str) -> None:
    """A new module is given its place here before it is used."""
    assert sum(room(name) in rooms for rooms in FLOORS) == 1


@pytest.mark.parametrize("name", sorted(MODULES.keys() - {"__init__", "__main__"}))
def test_imports_point_down(name: str) -> None:
    """A module imports lower floors and its own room; words import words."""
    for imported in sorted(filter(None, map(ours, imported_by(name)))):
        is_word = floor(name) == floor(imported) == 0
        is_below = floor(imported) < floor(name)
        is_version = imported == "__init__"
        assert is_word or is_below or room(imported) == room(name), f"{name} imports {imported}"
        assert not is_version, f"{name} imports the package itself"


def test_words_import_each_other_without_a_cycle() -> None:
    """At run time the words form a tree."""
    below: dict[str, set[str]] = {
        name: {one for one in map(ours, imported_by(name, typing_too=False)) if one in WORDS}
        for name in WORDS & MODULES.keys()
    }
    while below:
        free = {name for name, others in below.items() if not others & below.keys()}
        assert free, f"a cycle among {sorted(below)}"
        below = {name: others for name, others in below.items() if name not in free}


@pytest.mark.parametrize("organ", ["process", "logs", "store"])
def test_organs_do_not_know_each_other(organ: str) -> None:
    """No sibling of the second floor imports another."""
    others = {"process", "logs", "store"} - {organ}
    for name in MODULES:
        if room(name) == organ:
            found = {one for one in map(ours, imported_by(name)) if one and room(one) in others}
            assert not found, f"{name} imports {found}"


@pytest.mark.parametrize("name", sorted(PURE & MODULES.keys()))
def test_pure_modules_stay_pure(name: str) -> None:
    """What decides imports no clock, no chance, no machine and no loop."""
    roots = {imported.partition(".")[0] for imported in imported_by(name)}
    if room(name) == "testing":
        roots -= {"random"}  # a generator of its own, with a seed
    assert not roots & NOT_PURE


@pytest.mark.parametrize("name", sorted(PURE & MODULES.keys()))
def test_pure_modules_stand_on_pure_ones(name: str) -> None:
    """What a pure module imports of ours at run time is pure too."""
    found = set(filter(None, map(ours, imported_by(name, typing_too=False))))
    assert found <= PURE


def test_the_pure_heart_is_there() -> None:
    """The list of pure modules names existing ones."""
    assert not PURE - MODULES.keys()


@pytest.mark.parametrize("name", MODULES)
def test_third_parties_are_confined(name: str) -> None:
    """Each package of others is imported where the design says, and torch nowhere."""
    roots = {imported.partition(".")[0] for imported in imported_by(name)}
    strangers = roots - set(sys.stdlib_module_names) - {"elastic_aio"}
    if name == "process.guardian_main":
        strangers -= {"roster", "sweep"}  # its neighbours, in a bare interpreter
    if name == "worker.bootstrap_main":
        strangers -= {"bootstrap"}  # its neighbour, before the package can be found
    if room(name) != "worker":
        strangers -= {"msgspec"}  # values; a worker may run where nothing is installed
    assert strangers <= CONFINED.keys()
    for stranger in strangers:
        assert name in CONFINED[stranger], f"{name} imports {stranger}"


@pytest.mark.parametrize("name", [name for name in MODULES if room(name) == "worker"])
def test_worker_code_never_imports_asyncio(name: str) -> None:
    """What runs inside a worker leaves its event loop alone."""
    roots = {imported.partition(".")[0] for imported in imported_by(name)}
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
    """A worker that imports `record` pays for nothing else."""
    loaded = loaded_by("from elastic_aio.worker import record")
    assert "elastic_aio.worker.errorfile" in loaded
    assert not loaded & {"asyncio", "anyio", "uvloop", "aiofiles", "torch", "ssl"}


def test_the_package_itself_loads_nothing() -> None:
    """`import elastic_aio` is free; the names load on first use."""
    loaded = loaded_by("import elastic_aio")
    assert {name for name in loaded if name.startswith("elastic_aio")} == {
        "elastic_aio",
        "elastic_aio._version",
    }
    assert "asyncio" not in loaded


def test_the_launcher_loads_no_other_loop() -> None:
    """anyio, aiofiles and torch cost start-up time that most jobs never need."""
    loaded = loaded_by("import elastic_aio.cli")
    assert "asyncio" in loaded
    assert not loaded & {"anyio", "aiofiles", "torch", "concurrent.futures.thread"}


def test_one_node_does_not_pay_for_many() -> None:
    """What only nodes that meet need is loaded when there are several, or when it is asked for."""
    parse = "from elastic_aio.torchrun import parse_run; parse_run(['--nproc-per-node=2', 'x'], {})"
    loaded = loaded_by(f"import elastic_aio.cli; {parse}")
    assert not {name for name in loaded if name.startswith("elastic_aio.rendezvous.")} - {
        "elastic_aio.rendezvous.base"
    }
    assert not loaded & {"elastic_aio.events_cli", "elastic_aio.store_cli", "importlib.metadata"}


@pytest.mark.parametrize("name", ["process.guardian_main", "process.sweep", "process.roster"])
def test_the_guardian_stands_on_the_standard_library(name: str) -> None:
    """Its bare interpreter imports nothing of ours but its neighbours."""
    found = imported_by(name, typing_too=False)
    assert not [one for one in found if one.startswith("elastic_aio")]
    roots = {one.partition(".")[0] for one in found}
    assert roots <= {
        "__future__",
        "errno",
        "os",
        "select",
        "signal",
        "sys",
        "time",
        "roster",
        "sweep",
    }


def test_no_module_bears_the_name_of_a_public_function() -> None:
    """`elastic_aio.launch` must stay the function, whatever else is imported."""
    assert not {name for name in elastic_aio.__all__ if name in MODULES}


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is(name: str) -> None:
    """The first line of each module is a sentence about it."""
    text = ast.get_docstring(ast.parse(MODULES[name].read_text()))
    assert text, f"{name} has no docstring"
