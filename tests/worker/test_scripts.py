"""Scripts inside an interpreter that began otherwise: `--run-path`, and forked by the server."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.children import until_sync
from tests.support.cli import Ended, run_cli, run_program
from tests.support.traces import strays

SCRIPT = """
import os, sys
import beside
print(__name__, sys.argv[1:], beside.WORD, flush=True)
class Own:
    pass
assert sys.modules["__main__"].Own is Own
how = sys.argv[1]
if how == "raise":
    raise ValueError("from the script")
if how == "exit":
    sys.exit()
if how == "hard":
    os._exit(0)
if how == "text":
    sys.exit("said")
if how == "interrupt":
    raise KeyboardInterrupt
sys.exit(int(how))
"""
WAYS = [["--run-path"], ["--run-path", "--start-method=fork"],
        ["--run-path", "--start-method=forkserver"], ["--start-method=forkserver"],
        ["--preload=wave"], []]  # fmt: skip


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script that ends as its first argument says, with a module beside it."""
    (tmp_path / "beside.py").write_text("WORD = 'neighbour'\n")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def ended(way: list[str], script: Path, how: str) -> Ended:
    return run_cli(*way, f"--log-dir={script.parent / 'logs'}", script, how, "${local_rank}")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("how", "code"), [("0", 0), ("exit", 0), ("hard", 0), ("3", 3), ("text", 1), ("raise", 1)]
)
def test_every_way_to_end(way: list[str], how: str, code: int, script: Path) -> None:
    """The same as in an interpreter of its own, whatever runs it; never a hang."""
    what = ended(way, script, how)
    assert what.code == code
    assert what.out == f"__main__ ['{how}', '0'] neighbour\n"
    if how == "text":
        assert "said" in what.err.splitlines()
    if how == "raise":
        assert "ValueError: from the script" in what.err


def test_an_exception_is_recorded(script: Path) -> None:
    """A function's worker records by itself."""
    ended(["--run-path"], script, "raise")
    (file,) = script.parent.rglob("error.json")
    said = json.loads(file.read_text())["message"]
    assert said["message"] == "ValueError: from the script"
    assert "script.py" in said["extraInfo"]["py_callstack"]


def test_an_interrupt(script: Path) -> None:
    """A peaceful end for a function; a script is ended by the signal, forked or not."""
    assert ended(["--run-path"], script, "interrupt").code == 0
    for way in (["--start-method=forkserver"], []):
        what = ended(way, script, "interrupt")
        assert what.code == 128 + 2
        assert "KeyboardInterrupt" in what.err


@pytest.mark.parametrize("way", [[], ["--start-method=forkserver"]])
def test_modules_and_folders(way: list[str], tmp_path: Path) -> None:
    """`-m` and a folder with `__main__.py` work in both."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    code = "import sys; print(__name__, __package__, sys.argv[1:])\n"
    (tmp_path / "package" / "__main__.py").write_text(code)
    for words, package in ((["-m", "package"], "package"), ([tmp_path / "package"], "")):
        what = run_cli(*way, *words, "x", cwd=tmp_path)
        assert what.out == f"__main__ {package} ['x']\n"


UNGUARDED = """
from elastic_aio import LaunchSpec, run
def function():
    return 1
print(dict(run(LaunchSpec(function, nproc_per_node=2)).return_values))
"""
GUARDED = UNGUARDED.replace("\nprint", '\nif __name__ == "__main__":\n    print')


@pytest.mark.parametrize("way", ["script", "module"])
def test_functions_of_the_main_script(way: str, tmp_path: Path) -> None:
    """They are found by workers, from a script and from `python -m`."""
    (tmp_path / "job.py").write_text(GUARDED)
    words = [str(tmp_path / "job.py")] if way == "script" else ["-m", "job"]
    path = f"{tmp_path}:{Path(__file__).parent.parent.parent}"
    what = run_program([sys.executable, *words], cwd=tmp_path, env={"PYTHONPATH": path})
    assert what == Ended(0, "{0: 1, 1: 1}\n", "")


def test_a_missing_guard_is_one_clear_error(tmp_path: Path) -> None:
    """And no chain of processes without end."""
    (tmp_path / "job.py").write_text(UNGUARDED)
    what = run_program([sys.executable, str(tmp_path / "job.py")])
    assert what.code == 1
    assert "put that part under: if __name__ == '__main__':" in what.errors[-1]


@pytest.mark.parametrize("way", ["-c", "stdin"])
def test_functions_of_a_session(way: str) -> None:
    """Those of `python -c` and of a prompt travel by value; a guard is not needed."""
    if way == "-c":
        what = run_program([sys.executable, "-c", UNGUARDED])
    else:
        what = run_program([sys.executable, "-i", "-q"], stdin=f"{PROMPT}\n".encode())
    assert "{0: 1, 1: 1}\n" in what.out


PROMPT = """from elastic_aio import LaunchSpec, run
def function(): return 1

print(dict(run(LaunchSpec(function, nproc_per_node=2)).return_values))
"""


def test_without_cloudpickle_a_session_is_refused(tmp_path: Path) -> None:
    """In one line that says what to install."""
    (tmp_path / "cloudpickle.py").write_text("raise ImportError('hidden')\n")
    path = f"{tmp_path}:{Path(__file__).parent.parent.parent}"
    what = run_program([sys.executable, "-c", UNGUARDED], env={"PYTHONPATH": path})
    assert what.code == 1
    assert what.errors[-1].startswith("elastic_aio.errors.SpecError: entrypoint: must be picklable")
    assert "install cloudpickle" in what.errors[-1]


def test_the_environment_is_there_before_anything_is_imported(tmp_path: Path) -> None:
    """What the interpreter itself reads at its start takes effect in a spawned worker."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nsys.seen = os.environ.get('OWN'), os.environ.get('RANK')\n"
    )
    code = (
        "import sys\nfrom elastic_aio import LaunchSpec, run\n"
        "def function():\n    return sys.seen, sys.flags.hash_randomization\n"
        "if __name__ == '__main__':\n"
        f"    env = {{'OWN': '1', 'PYTHONHASHSEED': '0', 'PYTHONPATH': {str(tmp_path)!r}}}\n"
        "    print(run(LaunchSpec(function, env=env)).return_values[0])\n"
    )
    (tmp_path / "job.py").write_text(code)
    what = run_program([sys.executable, str(tmp_path / "job.py")])
    assert what.out == "(('1', '0'), 0)\n"


def test_a_killed_parent_takes_its_functions_along(tmp_path: Path) -> None:
    """All start methods; the guardian goes last."""
    code = (
        "import os, signal, sys\nfrom elastic_aio import LaunchSpec, WorkerStarted, run\n"
        "from tests.support.functions import sleep\n"
        "def listen(event):\n"
        "    if isinstance(event, WorkerStarted) and event.rank == 1:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "if __name__ == '__main__':\n"
        "    spec = LaunchSpec(sleep, nproc_per_node=2, start_method=sys.argv[1])\n"
        "    run(spec, listeners=[listen])\n"
    )
    (tmp_path / "job.py").write_text(code)
    for method in ("spawn", "fork", "forkserver"):
        what = run_program([sys.executable, str(tmp_path / "job.py"), method])
        assert what.code == 128 + 9
        until_sync(lambda: not strays())
