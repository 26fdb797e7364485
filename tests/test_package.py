"""What the package says about itself, and that it runs with warnings as errors."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
import tomllib
from pathlib import Path

import pytest

import elastic_aio
from tests.support.cli import CLI, REPOSITORY, run_program

PACKAGE = Path(elastic_aio.__file__).parent
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
CHANGELOG_MAX = 6_144
"""Bytes of the entries of a release."""

PROGRAMS = {"elastic_aio.process.guard", "elastic_aio.worker.bootstrap_main"}
"""Executed by a guardian and by a worker, with arguments; the jobs below do so."""

EXTRAS = {
    "colors": {"rich"},
    "functions": {"cloudpickle"},
    "hangs": {"py-spy"},
    "http": {"hypercorn", "starlette"},
    "mig": {"nvidia-ml-py"},
    "redis": {"redis"},
}


def test_the_version_stands_in_one_place() -> None:
    """The build reads it there; no other file of the package or the project repeats it."""
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["hatch"]["version"] == {"path": "elastic_aio/_version.py"}
    found = {
        path.relative_to(REPOSITORY).as_posix()
        for path in [*PACKAGE.rglob("*.py"), REPOSITORY / "pyproject.toml"]
        if re.search(rf"\b{re.escape(elastic_aio.__version__)}\b", path.read_text())
    }
    assert found == {"elastic_aio/_version.py"}
    assert re.fullmatch(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?", elastic_aio.__version__)


def test_the_types_are_shipped() -> None:
    """PEP 561: type checkers read a package with this file only; the wheel has whole packages."""
    assert (PACKAGE / "py.typed").is_file()
    assert PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["elastic_aio"]
    assert "Typing :: Typed" in PROJECT["project"]["classifiers"]


def test_the_metadata_is_complete() -> None:
    project = PROJECT["project"]
    assert project["authors"] == [{"name": "elastic_aio contributors"}]
    assert project["keywords"]
    assert project["urls"]
    assert all(url.startswith("https://") for url in project["urls"].values())
    assert project["license"] == "Apache-2.0"
    assert PROJECT["build-system"]["requires"] == ["hatchling>=1.27"]  # PEP 639


def test_the_commands_are_installed() -> None:
    """Both, each with a function that is there; `.ci/release` runs them."""
    commands = PROJECT["project"]["scripts"]
    assert commands.keys() == {"aio-elastic", "aio-torchrun"}
    for place in commands.values():
        module, _, name = place.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_each_python_that_is_named_is_tested() -> None:
    """By `.ci/run`, which also tries the next one; the page on upgrades names them all."""
    named = {
        name.rpartition(" ")[2]
        for name in PROJECT["project"]["classifiers"]
        if re.search(r":: 3\.\d+$", name)
    }
    loop = re.search(r"^for version in (.+); do$", (REPOSITORY / ".ci/run").read_text(), re.M)
    assert loop is not None
    tested = loop[1].split()
    assert named == {*tested[:-1]}
    page = (REPOSITORY / "docs/guides/upgrades.md").read_text()
    assert f"Python {', '.join(tested[:-1])} | tested" in page
    assert f"| Python {tested[-1]} | tested where" in page
    assert PROJECT["project"]["requires-python"] == f">={tested[0]}"


def test_each_extra_is_described_where_it_is_installed() -> None:
    """In the order of the page; messages of the package name no other extra."""
    extras = PROJECT["project"]["optional-dependencies"].keys() - {"test", "lint", "docs"}
    page = (REPOSITORY / "docs/guides/first-job.md").read_text()
    assert set(re.findall(r"^\| `([a-z]+)` \| ", page, re.MULTILINE)) == extras
    assert extras == EXTRAS.keys() | {"examples"}
    for extra, packages in EXTRAS.items():
        named = PROJECT["project"]["optional-dependencies"][extra]
        assert {re.split(r"[<>=]", name)[0] for name in named} == packages, extra
    files = [*PACKAGE.rglob("*.py"), *REPOSITORY.glob("docs/**/*.md")]
    named = {
        extra
        for path in files
        for names in re.findall(r"(?:elastic_aio|'\.)\[([a-z,]+)\]", path.read_text())
        for extra in names.split(",")
    }
    assert named <= extras | {"test", "lint"}


def test_the_entries_of_each_release_are_short() -> None:
    releases = re.split(r"^## ", (REPOSITORY / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    assert releases
    for release in releases:
        assert len(release.encode()) <= CHANGELOG_MAX, release.partition("\n")[0]


def test_the_security_policy_leads_to_pages_that_exist() -> None:
    """The sdist and the front page of a repository have it; the README names it."""
    links = re.findall(r"\]\(([^)]+)\)", (REPOSITORY / "SECURITY.md").read_text())
    assert links
    assert all((REPOSITORY / link).is_file() for link in links)
    assert "(SECURITY.md)" in (REPOSITORY / "README.md").read_text()


@pytest.mark.slow
def test_all_modules_are_imported_without_a_warning() -> None:
    """In an interpreter of its own, in which a warning is an error."""
    names = {
        module.name
        for module in pkgutil.walk_packages(elastic_aio.__path__, "elastic_aio.")
        if module.name not in PROGRAMS and not module.name.endswith("__main__")
    }
    assert len(names) > 150
    program = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    ended = run_program([sys.executable, "-W", "error", "-c", program, *sorted(names)])
    assert (ended.code, ended.out, ended.err) == (0, "", "")


@pytest.mark.e2e
@pytest.mark.parametrize("options", [(), ("--restart-scope=worker",), ("--run-path",)])
def test_a_job_runs_with_warnings_as_errors(options: tuple[str, ...], tmp_path: Path) -> None:
    """Launcher, guardian and workers; a restart, a tee, and the end of a worker by a signal."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, signal\n"
        "from elastic_aio.worker import record\n"
        "if os.environ['RANK'] == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "record(lambda: print('rank', os.environ['RANK']))()\n"
    )
    words = ["run", "--nproc-per-node=2", "--max-restarts=1", "--tee=3", "--torchrun-defaults"]
    ended = run_program(
        [sys.executable, "-W", "error", *CLI[1:], *words, *options, str(script)],
        env={"PYTHONWARNINGS": "error"},
    )
    assert ended.code == 0, ended.err
    assert {"[default0]:rank 0", "[default1]:rank 1"} <= {*ended.out.splitlines()}
    assert "Warning" not in ended.err
    assert "1 restart" in ended.err


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_functions_run_with_warnings_as_errors(method: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from elastic_aio import LaunchSpec, run\n"
        "def double(n): return 2 * n\n"
        "if __name__ == '__main__':\n"
        f"    spec = LaunchSpec(double, args=[21], nproc_per_node=2, start_method={method!r})\n"
        "    print(run(spec).return_values)\n"
    )
    ended = run_program(
        [sys.executable, "-W", "error", str(program)],
        env={"PYTHONWARNINGS": "error"},
    )
    assert (ended.code, ended.out) == (0, "{0: 42, 1: 42}\n"), ended.err
    assert ended.err == ""
