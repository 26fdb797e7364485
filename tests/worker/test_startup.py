"""The hook that records the exception of a script: it changes nothing that the script sees."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import LaunchSpec
from elastic_aio.agent.preflight import startup_env
from elastic_aio.worker.errorfile import parse_error_file
from tests.support.cli import Ended, run_program

pytestmark = pytest.mark.e2e

SEES = """
import os, sys
seen = {
    "modules": sorted(sys.modules), "path": sys.path, "importers": sorted(sys.path_importer_cache),
    "hooks": [repr(sys.__excepthook__), repr(sys.unraisablehook)],
    "finders": [type(finder).__name__ for finder in sys.meta_path], "flags": str(sys.flags),
    "argv": [sys.argv, sys.orig_argv], "callers": len(__import__("traceback").extract_stack()),
    "environment": {k: v for k, v in os.environ.items() if k not in ("_", "TMPDIR")},
    "customized": getattr(sys, "customized", None), "names": sorted(globals()),
    "command": open("/proc/self/cmdline").read(),
}
import json, subprocess
seen["child"] = subprocess.run(
    [sys.executable, "-c", "import os; print(os.environ.get('PYTHONPATH'))"],
    capture_output=True, text=True).stdout
print(json.dumps(seen))
"""


def run_script(program: list[str], directory: Path, *, hooked: bool, **env: str | None) -> Ended:
    """Run a script as a worker would run it, with or without the hook."""
    env = {"TORCHELASTIC_ERROR_FILE": str(directory / "error.json"), "PYTHONPATH": None, **env}
    own = {name: value for name, value in env.items() if value is not None}
    if hooked:
        env |= startup_env(LaunchSpec("script.py"), own)
        assert env["PYTHONPATH"] != own.get("PYTHONPATH")
    return run_program([sys.executable, "-u", *program], cwd=directory, env=env)


def recorded(directory: Path) -> Any:
    """Return what the error file holds."""
    return json.loads((directory / "error.json").read_text())["message"]


@pytest.mark.parametrize("program", [["script.py"], ["-m", "script"], ["-c", SEES]], ids=str)
@pytest.mark.parametrize("former", [None, "beside", ":beside:"])
def test_a_script_sees_no_difference(
    program: list[str], former: str | None, tmp_path: Path
) -> None:
    """Also one with a `sitecustomize` of its own."""
    (tmp_path / "script.py").write_text(SEES)
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "sitecustomize.py").write_text("import sys; sys.customized = __file__\n")
    plain, hooked = (
        run_script(program, tmp_path, hooked=is_hooked, PYTHONPATH=former)
        for is_hooked in (False, True)
    )
    assert (plain.code, hooked.code, hooked.err) == (0, 0, plain.err)
    assert json.loads(hooked.out) == json.loads(plain.out)
    assert bool(json.loads(plain.out)["customized"]) == (former is not None)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("raise ValueError('x\\ny')", "ValueError: x\ny"),
        ("import sys; sys.excepthook = lambda *_: None; raise KeyError('k')", "KeyError: 'k'"),
        ("raise ExceptionGroup('g', [ValueError('x')])", "ExceptionGroup: g (1 sub-exception)"),
        ("def f(:", "SyntaxError: invalid syntax (script.py, line 1)"),
        ("import sys; sys.exit('text')", None),
        ("raise SystemExit(3)", None),
        ("raise KeyboardInterrupt", None),
        ("import os; os._exit(3)", None),
        ("import os, sys\nif os.fork() == 0: raise ValueError\nos.wait()", None),
        ("try: 1/0\nexcept Exception: pass", None),
    ],
)
def test_what_is_recorded(script: str, message: str | None, tmp_path: Path) -> None:
    """An exception that ends the script; its output and its exit code stay the same."""
    (tmp_path / "script.py").write_text(script)
    plain, hooked = (
        run_script(["script.py"], tmp_path, hooked=is_hooked) for is_hooked in (False, True)
    )
    assert hooked == plain
    if message is None:
        assert not os.path.exists(tmp_path / "error.json")
    else:
        assert recorded(tmp_path)["message"] == message
        assert message.partition("\n")[0] in recorded(tmp_path)["extraInfo"]["py_callstack"] or (
            "Error" in message
        )


def test_a_failure_is_noted_before_the_exit_hooks(tmp_path: Path) -> None:
    """They may take longer than another worker needs to fail by it."""
    (tmp_path / "script.py").write_text(
        "import atexit, os\npath = os.environ['TORCHELASTIC_ERROR_FILE']\n"
        "atexit.register(lambda: print(os.getpid(), open(path).read()))\nraise ValueError(7)"
    )
    ended = run_script(["script.py"], tmp_path, hooked=True)
    pid, _, note = ended.out.partition(" ")
    error = parse_error_file(note.encode(), "")
    assert error is not None
    assert (error.message, error.pid, 0 <= time.time() - error.timestamp < 60) == (
        "",
        int(pid),
        True,
    )
    assert recorded(tmp_path)["message"] == "ValueError: 7"


def test_what_the_script_has_recorded_itself_stays(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os\nopen(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('own')\nraise ValueError"
    )
    run_script(["script.py"], tmp_path, hooked=True)
    assert (tmp_path / "error.json").read_text() == "own"


def test_what_a_helper_has_recorded_long_ago_does_not_stay(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os\npath = os.environ['TORCHELASTIC_ERROR_FILE']\n"
        'open(path, \'w\').write(\'{"message": "old", "timestamp": "5"}\')\n'
        "raise ValueError(7)"
    )
    run_script(["script.py"], tmp_path, hooked=True)
    assert recorded(tmp_path)["message"] == "ValueError: 7"


@pytest.mark.parametrize(
    ("spec", "env"),
    [
        (LaunchSpec(["python", "x.py"]), {}),
        (LaunchSpec("x.py", start_method="forkserver"), {}),
        (LaunchSpec("x.py"), {"PYTHONPATH": ""}),
    ],
)
def test_where_there_is_no_hook(spec: LaunchSpec, env: dict[str, str]) -> None:
    """Of a command nothing is known; an empty variable could not be restored."""
    assert startup_env(spec, env) == {}
