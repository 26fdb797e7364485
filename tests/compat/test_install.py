"""Our names in place of torch's: in this process, and in what `aio-elastic exec` starts.

A stand-in with torch's module names takes the place of torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from elastic_aio.cli import main
from elastic_aio.compat.torch import installation, launch, rendezvous
from elastic_aio.compat.torch.installation import install, uninstall
from tests.support.cli import CLI, REPOSITORY, Ended, bare_environment, run_program, running
from tests.support.control import own_control_dir

SOURCES = {
    "torch/__init__.py": "",
    "torch/distributed/__init__.py": "",
    "torch/distributed/run.py": """
from torch.distributed.launcher.api import elastic_launch

def run(args): return "torch's"

def main(args=None): print("torch's main")

def _private(): return elastic_launch
""",
    "torch/distributed/launcher/__init__.py": """
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
""",
    "torch/distributed/launcher/api.py": """
class LaunchConfig: pass

class elastic_launch: pass
""",
    "torch/distributed/elastic/__init__.py": "",
    "torch/distributed/elastic/rendezvous/__init__.py": """
from .api import RendezvousHandler, rendezvous_handler_registry
rendezvous_handler_registry.append("torch's own backend")
from . import dynamic
""",
    "torch/distributed/elastic/rendezvous/api.py": """
class RendezvousHandler: pass

rendezvous_handler_registry = []
""",
    "torch/distributed/elastic/rendezvous/dynamic.py": """
from .api import RendezvousHandler

class Dynamic(RendezvousHandler): pass
""",
    "earlier.py": "from torch.distributed.run import main as launch_main, _private",
}


@pytest.fixture
def torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that has the module names of torch; the directory it is in."""
    for name, source in SOURCES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    others = {name: one for name, one in sys.modules.items() if name.startswith("torch")}
    for name in others:
        monkeypatch.delitem(sys.modules, name)
    yield tmp_path
    uninstall()
    for name in [*sys.modules]:
        if name == "earlier" or name == "torch" or name.startswith("torch."):
            del sys.modules[name]


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_modules_that_are_imported_later_have_our_names(torch: Path) -> None:
    install(is_quiet=True)
    run = load("torch.distributed.run")
    assert run.main is launch.main
    assert run._private() is launch.elastic_launch
    assert load("torch.distributed.launcher").LaunchConfig is launch.LaunchConfig


def test_modules_that_were_imported_before_have_them_too(torch: Path) -> None:
    """Under any name, and put back."""
    earlier = load("earlier")
    original, config = earlier.launch_main, load("torch.distributed.launcher").LaunchConfig
    install(is_quiet=True)
    assert earlier.launch_main is launch.main
    assert earlier._private() is launch.elastic_launch
    uninstall()
    assert earlier.launch_main is original
    assert load("torch.distributed.launcher").LaunchConfig is config


def test_uninstalling_leaves_torchs_modules_as_they_are(torch: Path) -> None:
    """Those too that were imported meanwhile."""
    install(is_quiet=True)
    run = load("torch.distributed.run")
    uninstall()
    assert run.run(None) == "torch's"
    assert run._private() is load("torch.distributed.launcher.api").elastic_launch
    assert run._private() is not launch.elastic_launch
    assert not any("elastic_aio" in repr(finder) for finder in sys.meta_path)


def test_torchs_own_handlers_derive_from_our_interface(torch: Path) -> None:
    """And torch registers its backends in its own registry, which is then replaced."""
    install(is_quiet=True)
    dynamic = load("torch.distributed.elastic.rendezvous.dynamic")
    assert issubclass(dynamic.Dynamic, rendezvous.RendezvousHandler)
    package = load("torch.distributed.elastic.rendezvous")
    assert package.rendezvous_handler_registry is rendezvous.rendezvous_handler_registry


def test_it_can_be_called_twice_and_says_so_once(
    torch: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    install()
    install()
    assert capfd.readouterr().err == "elastic_aio: replaces torch's launcher in this process\n"
    uninstall()
    uninstall()


def test_a_module_keeps_its_own_loader(torch: Path) -> None:
    """Tools read sources by it."""
    install(is_quiet=True)
    run = load("torch.distributed.run")
    assert type(run.__loader__).__name__ == "SourceFileLoader"
    assert run.__spec__ is not None
    assert run.__spec__.loader is run.__loader__


def test_every_replaced_name_exists_here() -> None:
    for home, (ours, names) in installation.NAMES.items():
        for name in names.split():
            assert hasattr(load(f"elastic_aio.compat.torch.{ours}"), name), f"{home}.{name}"


@pytest.mark.parametrize(
    "name", ["agent", "errors", "installation", "launch", "multiprocessing", "rendezvous"]
)
def test_the_package_has_all_names_of_a_module(name: str) -> None:
    """Type checkers are shown all of them."""
    package, module = load("elastic_aio.compat.torch"), load(f"elastic_aio.compat.torch.{name}")
    assert [getattr(package, one) for one in module.__all__] == [
        getattr(module, one) for one in module.__all__
    ]


# ------------------------------------------------------------------------ exec


def run_exec(directory: Path, *words: object, before: str = "") -> Ended:
    """Run a program by `aio-elastic exec`, with the stand-in on the path."""
    paths = filter(None, [before, str(directory), str(REPOSITORY)])
    env = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": None}
    return run_program([*CLI, "exec", *map(str, words)], env=env)


NOTHING = (
    "aio-elastic exec: {} has launched nothing by torch's launcher in its own process: nothing was"
    " replaced there"
)
SHOW = "from torch.distributed.run import main; print(main.__module__)"


def test_a_program_finds_our_names(torch: Path) -> None:
    ended = run_exec(torch, "--", sys.executable, "-c", SHOW)
    assert ended.out == "elastic_aio.compat.torch.launch\n", ended.err
    assert ended.err.splitlines() == [
        f"aio-elastic exec: what {sys.executable} launches by torch.distributed.run, .launcher or"
        " .elastic runs in elastic_aio",
        NOTHING.format(f"{sys.executable} -c {SHOW}"),
    ]


def test_what_the_program_starts_finds_them_too(torch: Path) -> None:
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SHOW!r}])"
    ended = run_exec(torch, sys.executable, "-c", nested)
    assert ended.out == "elastic_aio.compat.torch.launch\n", ended.err
    assert ended.err.count(NOTHING.partition("}")[2]) == 1  # the program's; its child says nothing


LAUNCHES = {
    "command": "from torch.distributed.run import main; main(['--no-python', 'true'])",
    "help": "from torch.distributed.run import main; main(['--help'])",
    "processes": """
from elastic_aio.compat.torch import DefaultLogsSpecs, start_processes
start_processes("x", "true", {0: ()}, {0: {}}, DefaultLogsSpecs()).wait()
""",
}


@pytest.mark.parametrize("how", LAUNCHES)
def test_a_program_that_has_launched_something_is_not_reported(torch: Path, how: str) -> None:
    """Another line says what runs; so a program that replaces nothing is seen by its end."""
    ended = run_exec(torch, sys.executable, "-c", LAUNCHES[how])
    assert ended.code == 0, ended.err
    assert NOTHING.partition("}")[2] not in ended.err


def test_a_fork_and_a_worker_do_not_report_for_the_program(torch: Path) -> None:
    """The variable by which the program knows itself is inherited by no other process."""
    program = "import os, sys\nif os.fork(): os.wait()\nprint(os.environ.get('ELASTIC_AIO_EXEC'))"
    ended = run_exec(torch, sys.executable, "-c", program)
    assert ended.out == "None\nNone\n"
    assert ended.err.count(NOTHING.partition("}")[2]) == 1


def test_a_hidden_sitecustomize_runs_first(torch: Path, tmp_path: Path) -> None:
    """Once in the command, and once in the program."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("print('theirs')")
    ended = run_exec(torch, sys.executable, "-c", SHOW, before=str(other))
    assert ended.out == "theirs\ntheirs\nelastic_aio.compat.torch.launch\n", ended.err


def test_another_python_without_this_package_is_left_alone(tmp_path: Path) -> None:
    """With -S nothing but PYTHONPATH is on the path."""
    site = REPOSITORY / "elastic_aio/compat/torch/site"
    ended = run_program(
        [sys.executable, "-S", "-c", "import sitecustomize; print('ran')"],
        env={**bare_environment(), "PYTHONPATH": str(site)},
        cwd=tmp_path,
    )
    assert ended.out == "ran\n", ended.err


TORCHRUN = "from torch.distributed.run import main; main()"
WORKER = """
import os, time
os.write(2, f"rank {os.environ['RANK']} begins\\n".encode())  # at once: two workers write
time.sleep(99)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [[], ["--run-path"]])
def test_other_processes_see_and_control_the_job(
    torch: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], how: list[str]
) -> None:
    """By the script's name."""
    (tmp_path / "train.py").write_text(WORKER)
    words = [sys.executable, "-c", TORCHRUN, "--nproc-per-node=2", *how, "train.py"]
    env = {"PYTHONPATH": os.pathsep.join((str(torch), str(REPOSITORY)))}

    def ask(*argv: str) -> str:
        capfd.readouterr()
        assert main(argv) == 0
        return capfd.readouterr().out

    with own_control_dir(), running([*CLI, "exec", *words], env=env, cwd=tmp_path) as job:
        for rank in (0, 1):
            job.wait_err(f"rank {rank} begins")
        assert "train.py" in ask("ps")
        assert "2 workers of" in ask("why", "train.py")
        assert "rank 1 (local rank 1" in ask("dump", "train.py")
        assert "rank 0 begins" in ask("logs", "train.py", "0")
        assert "stopped" in ask("stop", "train.py")
        assert job.wait() == 1


def test_an_installation_makes_no_socket_by_default(torch: Path) -> None:
    for control in (False, True):
        install(is_quiet=True, control=control)
        assert installation.has_control() == control
        uninstall()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (["sh", "-c", "exit 3"], 3, "runs in elastic_aio"),
        (["--", "true"], 0, "what true launches by torch.distributed.run, .launcher or .elastic"),
        ([], 2, "a program is required"),
        ([""], 2, "a program is required"),
        (["/nonexistent"], 127, "cannot run /nonexistent: no such file or directory"),
        (["/etc/passwd"], 126, "cannot run /etc/passwd: permission denied"),
    ],
)
def test_exit_codes(words: list[str], code: int, error: str) -> None:
    ended = run_program([*CLI, "exec", *words])
    assert ended.code == code
    assert error in ended.err
