"""Scripts in an interpreter started for other code: `--run-path` and the fork server."""

from __future__ import annotations

import json
import py_compile
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.children import until_sync
from tests.support.cli import REPOSITORY, Ended, run_cli, run_program
from tests.support.leaks import leaked_processes

pytestmark = pytest.mark.e2e

SCRIPT = """
import os, sys
import beside
print(__name__, sys.argv[1:], beside.WORD, flush=True)
class Own:
    pass
assert sys.modules["__main__"].Own is Own
ending = sys.argv[1]
if ending == "raise":
    raise ValueError("from the script")
if ending == "exit":
    sys.exit()
if ending == "hard":
    os._exit(0)
if ending == "text":
    sys.exit("said")
if ending == "interrupt":
    raise KeyboardInterrupt
sys.exit(int(ending))
"""
OPTIONS = [["--run-path"], ["--run-path", "--start-method=fork"],
        ["--run-path", "--start-method=forkserver"], ["--start-method=forkserver"],
        ["--preload=wave"], []]  # fmt: skip


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script whose first argument is its ending, and a module that it imports."""
    (tmp_path / "beside.py").write_text("WORD = 'neighbour'\n")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def run_script(options: list[str], script: Path, ending: str) -> Ended:
    return run_cli(*options, f"--log-dir={script.parent / 'logs'}", script, ending, "${local_rank}")


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("ending", "code"),
    [("0", 0), ("exit", 0), ("hard", 0), ("3", 3), ("text", 1), ("raise", 1), (str(2**64), 255)],
)
def test_every_ending(options: list[str], ending: str, code: int, script: Path) -> None:
    """The same as in an interpreter of its own."""
    ended = run_script(options, script, ending)
    assert ended.code == code
    assert ended.out == f"__main__ ['{ending}', '0'] neighbour\n"
    if ending == "text":
        assert "said" in ended.err.splitlines()
    if ending == "raise":
        assert "ValueError: from the script" in ended.err


def test_an_exception_is_recorded(script: Path) -> None:
    """Without `record`."""
    run_script(["--run-path"], script, "raise")
    (file,) = script.parent.rglob("error.json")
    message = json.loads(file.read_text())["message"]
    assert message["message"] == "ValueError: from the script"
    assert "script.py" in message["extraInfo"]["py_callstack"]


def test_a_keyboard_interrupt(script: Path) -> None:
    """A script ends by SIGINT, forked or not."""
    for options in (["--run-path"], ["--start-method=forkserver"], []):
        ended = run_script(options, script, "interrupt")
        assert ended.code == 128 + 2
        assert "KeyboardInterrupt" in ended.err


@pytest.mark.parametrize("options", [[], ["--start-method=forkserver"]])
def test_modules_and_directories(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    code = "import sys; print(__name__, __package__, sys.argv[1:])\n"
    (tmp_path / "package" / "__main__.py").write_text(code)
    for arguments, package in ((["-m", "package"], "package"), ([tmp_path / "package"], "")):
        ended = run_cli(*options, *arguments, "x", cwd=tmp_path)
        assert ended.out == f"__main__ {package} ['x']\n"


PRINTS_ITSELF = """
import json, os, sys, warnings
def describe(value):
    if hasattr(value, "get_data"):
        return [type(value).__name__, getattr(value, "name", None), getattr(value, "path", None)]
    return value if isinstance(value, (str, dict, list)) or value is None else repr(type(value))
own = {name: describe(value) for name, value in globals().items() if name.startswith("__")}
spec = __spec__ and [__spec__.name, __spec__.origin, __spec__.cached, __spec__.parent]
streams = [
    [s.encoding, s.errors, s.name, s.mode, s.line_buffering, s.write_through,
     type(s.buffer).__name__, s.buffer.name if s is sys.stdin else s.buffer.mode]
    for s in (sys.stdin, sys.stdout, sys.stderr)
]
print(json.dumps({
    "main": own, "spec": spec, "is main": sys.modules["__main__"].__dict__ is globals(),
    "code": sys._getframe().f_code.co_filename, "path": sys.path, "argv": sys.argv,
    "orig_argv": sys.orig_argv, "executable": sys.executable, "flags": str(sys.flags),
    "streams": streams, "warnings": repr(warnings.filters), "cwd": os.getcwd(),
}))
"""
FORKSERVER = ["--preload=json"]
RUN_PATHS = [["--run-path"], ["--run-path", "--start-method=fork"],
             ["--run-path", "--start-method=forkserver"]]  # fmt: skip


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A directory with the same program as a script, a link, a directory, and so on."""
    (tmp_path / "real").mkdir()
    (tmp_path / "package").mkdir()
    (tmp_path / "links").mkdir()
    for name in ("real/script.py", "package/__main__.py", "package/module.py"):
        (tmp_path / name).write_text(PRINTS_ITSELF)
    (tmp_path / "links/link.py").symlink_to("../real/script.py")
    py_compile.compile(str(tmp_path / "real/script.py"), str(tmp_path / "compiled.pyc"))
    with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
        archive.writestr("__main__.py", PRINTS_ITSELF)
    return tmp_path


def run_both(
    options: list[str], program: list[str], cwd: Path, env: dict[str, str | None]
) -> tuple[Any, Any]:
    """Return what a program prints in an interpreter of its own, and as a worker."""
    env = {**env, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    plain = run_program([sys.executable, "-u", *program, "x", ""], cwd=cwd, env=env)
    worker = run_cli(*options, *program, "x", "", cwd=cwd, env=env)
    assert (plain.code, worker.code) == (0, 0), worker.err
    found = json.loads(worker.out)
    for stream in found["streams"][1:]:  # it writes lines, and as `-u` does all else
        assert stream[4:6] == [True, False]
        stream[4:6] = [False, True]
    return json.loads(plain.out), found


@pytest.mark.parametrize("options", [FORKSERVER, *RUN_PATHS])
@pytest.mark.parametrize(
    "env",
    [
        {},
        {"PYTHONSAFEPATH": "1"},
        {"PYTHONIOENCODING": "latin-1:replace", "PYTHONWARNINGS": "error::ResourceWarning"},
        {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
    ],
)
def test_a_script_sees_what_it_sees_in_an_interpreter_of_its_own(
    options: list[str], env: dict[str, str | None], programs: Path
) -> None:
    """A relative link to a script, run in another directory: all paths differ."""
    plain, worker = run_both(options, ["links/link.py"], programs, env)
    assert worker == plain


@pytest.mark.parametrize("options", [FORKSERVER, RUN_PATHS[0]])
@pytest.mark.parametrize(
    "program", ["package", "archive", "compiled.pyc", "./package/../real/script.py"]
)
@pytest.mark.parametrize("env", [{}, {"PYTHONSAFEPATH": "1"}])
def test_other_programs_see_the_same_too(
    options: list[str], program: str, env: dict[str, str | None], programs: Path
) -> None:
    plain, worker = run_both(options, [program], programs, env)
    assert worker == plain


@pytest.mark.parametrize("name", ["package", "package.module"])
@pytest.mark.parametrize("safe", [None, "1"])
def test_a_module_sees_the_same_too(name: str, safe: str | None, programs: Path) -> None:
    path = f"{REPOSITORY}:{programs}"  # for safe paths
    env = {"PYTHONSAFEPATH": safe, "PYTHONPATH": path}
    plain, worker = run_both(FORKSERVER, ["-m", name], programs, env)
    assert worker == plain


@pytest.mark.parametrize("options", [[], FORKSERVER, *RUN_PATHS])
def test_a_traceback_begins_in_the_script(options: list[str], script: Path) -> None:
    ended = run_script(options, script, "raise")
    printed = ended.err.partition("Traceback (most recent call last):\n")[2].splitlines()
    assert printed[:3] == [
        f'  File "{script}", line 10, in <module>',
        '    raise ValueError("from the script")',
        "ValueError: from the script",
    ]


def test_a_script_does_not_have_the_options_of_the_launcher(programs: Path) -> None:
    """Forked or not."""
    launcher = [sys.executable, "-O", "-P", "-m", "elastic_aio", "run"]
    for options in ([], FORKSERVER):
        ended = run_program([*launcher, *options, "real/script.py"], cwd=programs)
        seen = json.loads(ended.out)
        assert seen["path"][0] == str(programs / "real")
        assert "optimize=0" in seen["flags"]


UNGUARDED = """
from elastic_aio import LaunchSpec, run
def function():
    return 1
print(dict(run(LaunchSpec(function, nproc_per_node=2)).return_values))
"""
GUARDED = UNGUARDED.replace("\nprint", '\nif __name__ == "__main__":\n    print')


@pytest.mark.parametrize("options", ["script", "module"])
def test_functions_of_the_main_script(options: str, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(GUARDED)
    arguments = [str(tmp_path / "job.py")] if options == "script" else ["-m", "job"]
    path = f"{tmp_path}:{Path(__file__).parent.parent.parent}"
    ended = run_program([sys.executable, *arguments], cwd=tmp_path, env={"PYTHONPATH": path})
    assert ended == Ended(0, "{0: 1, 1: 1}\n", "")


def test_a_missing_guard_is_one_clear_error(tmp_path: Path) -> None:
    """And workers do not start workers."""
    (tmp_path / "job.py").write_text(UNGUARDED)
    ended = run_program([sys.executable, str(tmp_path / "job.py")])
    assert ended.code == 1
    assert "put that part under: if __name__ == '__main__':" in ended.errors[-1]


@pytest.mark.parametrize("options", ["-c", "stdin"])
def test_functions_of_an_interactive_session(options: str) -> None:
    """They are pickled by value, so no guard is needed."""
    if options == "-c":
        ended = run_program([sys.executable, "-c", UNGUARDED])
    else:
        ended = run_program([sys.executable, "-i", "-q"], stdin=f"{PROMPT}\n".encode())
    assert "{0: 1, 1: 1}\n" in ended.out


PROMPT = """from elastic_aio import LaunchSpec, run
def function(): return 1

print(dict(run(LaunchSpec(function, nproc_per_node=2)).return_values))
"""


def test_without_cloudpickle_interactive_functions_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "cloudpickle.py").write_text("raise ImportError('hidden')\n")
    path = f"{tmp_path}:{Path(__file__).parent.parent.parent}"
    ended = run_program([sys.executable, "-c", UNGUARDED], env={"PYTHONPATH": path})
    assert ended.code == 1
    assert ended.errors[-1].startswith(
        "elastic_aio.errors.SpecError: entrypoint: cannot be pickled"
    )
    assert "install cloudpickle" in ended.errors[-1]


def test_the_environment_is_set_before_the_interpreter_starts(tmp_path: Path) -> None:
    """PYTHONHASHSEED and sitecustomize take effect in a spawned worker."""
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
    ended = run_program([sys.executable, str(tmp_path / "job.py")])
    assert ended.out == "(('1', '0'), 0)\n"


def test_a_killed_parent_leaves_no_function_worker(tmp_path: Path) -> None:
    """With all start methods; the guardian ends too."""
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
        ended = run_program([sys.executable, str(tmp_path / "job.py"), method])
        assert ended.code == 128 + 9
        until_sync(lambda: not leaked_processes())
