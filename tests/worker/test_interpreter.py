"""The end of a worker's interpreter, beside that of `python script.py`."""

from __future__ import annotations

import gzip
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.cli import Ended, run_cli, run_program

pytestmark = pytest.mark.e2e

OPTIONS = [["--run-path"], ["--run-path", "--start-method=fork"], ["--preload=logging,tempfile"]]

# Leaves everything open, in global variables.
OPEN_FILES = """
import atexit, gzip, logging.handlers, os, subprocess, sys, tempfile, threading, zipfile
def path(name):
    return os.path.join(sys.argv[1], name)
text = open(path("text"), "w"); text.write("text")
binary = open(path("binary"), "wb"); binary.write(b"binary")
both = open(path("both"), "w+b"); both.write(b"both")
zipped = gzip.open(path("zipped"), "wt"); zipped.write("zipped")
archive = zipfile.ZipFile(path("archive"), "w"); archive.writestr("name", "content")
inside = {"a list": [open(path("inside"), "w")]}; inside["a list"][0].write("inside")
os.held_by_a_module = open(path("outside"), "w"); os.held_by_a_module.write("outside")
temporary = tempfile.NamedTemporaryFile(dir=sys.argv[1])
temporaries = tempfile.TemporaryDirectory(dir=sys.argv[1])
records = logging.handlers.MemoryHandler(9, target=logging.FileHandler(path("log")))
logging.getLogger().addHandler(records); logging.warning("logged")
reader = subprocess.Popen(["cp", "/dev/stdin", path("piped")], stdin=subprocess.PIPE, text=True)
reader.stdin.write("piped")
atexit.register(lambda: text.write(" and hook"))
threading.Timer(0.1, lambda: binary.write(b" and thread")).start()
class Deleted:
    def __del__(self):
        os.close(os.open(path("deleted by " + __name__), os.O_CREAT))
deleted = Deleted()
"""
WRITTEN = {
    "text": b"text and hook",
    "binary": b"binary and thread",
    "both": b"both",
    "zipped": b"zipped",
    "archive": ["name"],
    "inside": b"inside",
    "outside": b"outside",
    "log": b"logged\n",
    "deleted by __main__": b"",
    "piped": b"piped",
}
# The garbage collection at the end finds the file before the archive that writes to it: it goes
# through the youngest objects first.
YOUNG_FILE = """
import gc, sys, zipfile
gc.set_threshold(0)
def function_of_this_module(): pass
archive = zipfile.ZipFile.__new__(zipfile.ZipFile)
gc.collect(0)
archive.__init__(sys.argv[1] + "/archive", "w"); archive.writestr("name", "content")
"""
# Another thread is in a write to a pipe that nothing reads, and holds the lock of its buffer.
OTHER_THREAD = """
import os, sys, threading, time
text = open(sys.argv[1] + "/text", "w"); text.write("text")
reader, writer = os.pipe()
pipe = open(writer, "wb")
threading.Thread(target=pipe.write, args=[bytes(1 << 20)], daemon=True).start()
while not os.read(reader, 1):
    pass
"""
# The same below a layer of Python code, and above one.
OTHER_THREAD_BELOW = """
import gzip, io, os, sys, threading, time
zipped = gzip.open(sys.argv[1] + "/zipped", "wt"); zipped.write("zipped")
reader, writer = os.pipe()
pipe = gzip.GzipFile(fileobj=open(writer, "wb"), mode="wb")
def write_much():
    while True:
        pipe.write(os.urandom(1 << 17))
        pipe.flush()
threading.Thread(target=write_much, daemon=True).start()
os.read(reader, 1)
"""
OTHER_THREAD_ABOVE = """
import gzip, io, sys, threading
zipped = gzip.open(sys.argv[1] + "/zipped", "wt"); zipped.write("zipped")
is_writing = threading.Event()
class Raw(io.RawIOBase):
    def writable(self):
        return True
    def write(self, data):
        is_writing.set()
        threading.Event().wait()
text = io.TextIOWrapper(io.BufferedWriter(Raw()))
def write_some():
    text.write("text")
    text.flush()
threading.Thread(target=write_some, daemon=True).start()
is_writing.wait()
"""
# Its `close` or `__del__` waits for ever, before that of another layer of the program.
LOCKED_FILES = """
import io, sys, threading
sys.modules["elastic_aio.worker.interpreter"]._STEP_S = 0.1
text = open(sys.argv[1] + "/text", "w"); text.write("text")
lock = threading.Lock()
lock.acquire()
class File(io.BufferedIOBase):
    def METHOD(self):
        lock.acquire()
file = File()
below = open(sys.argv[1] + "/below", "wb"); below.write(b"below")
file.below = below
sys.exit(3)
"""
# Another thread prints to a pipe that nothing reads.
HELD_STDOUT = """
import os, sys, threading
text = open(sys.argv[1] + "/text", "w"); text.write("text")
below = open(sys.argv[1] + "/below", "wb"); below.write(b"below")
reader, writer = os.pipe()
sys.stdout = open(writer, "w")
threading.Thread(target=print, args=["x" * (1 << 20)], daemon=True).start()
os.read(reader, 1)
sys.exit(3)
"""
RAISING_HOOK = """
import sys
def hook(*details):
    raise ValueError("from the hook")
sys.excepthook = hook
raise KeyError("from the script")
"""
EXITING_HOOK = """
import atexit, sys
sys.excepthook = lambda kind, error, trace: sys.exit(f"hook of {error!r}")
atexit.register(lambda: print("last:", repr(sys.last_value)))
raise KeyError("from the script")
"""
FULL_STDOUT = "import sys\nsys.stdout = open('/dev/full', 'w')\nprint('text')\n"
BAD_HOOKS = """
import atexit, sys
atexit.register(print, "last")
atexit.register(sys.exit, 5)
atexit.register(int, "no number")
"""
BAD_TEXT = "import sys\nclass Text:\n    def __str__(self): sys.exit(0)\nsys.exit(Text())\n"
INTERRUPTED = "import atexit\natexit.register(print, 'hook')\nraise KeyboardInterrupt\n"


def contents(directory: Path) -> dict[str, object]:
    """Return the files by name; temporary ones too."""
    found: dict[str, object] = {}
    for path in directory.iterdir():
        found[path.name] = path.read_bytes() if path.is_file() else "a directory"
        if path.name == "archive" and zipfile.is_zipfile(path):
            found[path.name] = zipfile.ZipFile(path).namelist()
        elif path.name == "zipped" and path.stat().st_size:
            found[path.name] = gzip.decompress(path.read_bytes())
    return found


def run_both(
    tmp_path: Path, options: list[str], code: str, *args: str
) -> tuple[tuple[Ended, dict[str, object]], tuple[Ended, dict[str, object]]]:
    """Return how a script ends in an interpreter of its own and as a worker, and its files."""
    (tmp_path / "script.py").write_text(code)
    ends = []
    for name in ("plain", "worker"):
        directory = tmp_path / name
        directory.mkdir()
        program = [str(tmp_path / "script.py"), str(directory), *args]
        if name == "plain":
            ended = run_program([sys.executable, "-u", *program])
        else:
            ended = run_cli(*options, *program)
        ends.append((ended, contents(directory)))
    return ends[0], ends[1]


@pytest.mark.parametrize("options", OPTIONS)
def test_open_files_are_written_out(options: list[str], tmp_path: Path) -> None:
    """With the layers above them; temporary ones are removed."""
    (plain, expected), (worker, found) = run_both(tmp_path, options, OPEN_FILES)
    assert (plain.code, worker.code) == (0, 0)
    assert found == WRITTEN
    # The interpreter itself loses some, by the order of a garbage collection.
    assert expected.keys() <= WRITTEN.keys()


@pytest.mark.parametrize("options", OPTIONS)
def test_a_file_ends_after_what_writes_to_it(options: list[str], tmp_path: Path) -> None:
    """The archive has the list of its members, which is written at its end."""
    (plain, _), (worker, found) = run_both(tmp_path, options, YOUNG_FILE)
    assert (plain.code, worker.code) == (0, 0)
    assert found == {"archive": ["name"]}


def test_frozen_files_are_written_out(tmp_path: Path) -> None:
    """Those of a worker that is no fork."""
    code = f"{OPEN_FILES}\nimport gc\ngc.freeze()"
    _, (worker, found) = run_both(tmp_path, ["--run-path"], code)
    assert (worker.code, found) == (0, WRITTEN)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_thread_in_a_write_delays_no_end(options: list[str], tmp_path: Path) -> None:
    _, (worker, found) = run_both(tmp_path, options, OTHER_THREAD)
    assert worker.code == 0
    assert found["text"] == b"text"


@pytest.mark.parametrize("code", [OTHER_THREAD_BELOW, OTHER_THREAD_ABOVE])
def test_a_thread_in_another_layer_delays_no_end(code: str, tmp_path: Path) -> None:
    """Other files are written out, with the ends that their layers add."""
    _, (worker, found) = run_both(tmp_path, ["--run-path"], code)
    assert worker.code == 0
    assert found["zipped"] == b"zipped"


@pytest.mark.parametrize(
    "code",
    [*(LOCKED_FILES.replace("METHOD", name) for name in ("close", "__del__")), HELD_STDOUT],
    ids=["close", "__del__", "stdout"],
)
def test_a_lock_delays_no_end(code: str, tmp_path: Path) -> None:
    """The exit code is the program's, and what has been written is in its files."""
    (tmp_path / "script.py").write_text(code)
    (tmp_path / "files").mkdir()
    ended = run_cli("--run-path", tmp_path / "script.py", tmp_path / "files")
    assert ended.code == 3
    assert contents(tmp_path / "files") == {"text": b"text", "below": b"below"}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("code", "exit_code"),
    [(EXITING_HOOK, 1), (RAISING_HOOK, 1), (INTERRUPTED, 130)],
)
def test_an_end_is_reported_as_by_the_interpreter(
    code: str, exit_code: int, options: list[str], tmp_path: Path
) -> None:
    """The exit code, and each line that is printed."""
    (plain, _), (worker, _) = run_both(tmp_path, options, code)
    assert (plain.code, worker.code) == (exit_code, exit_code)
    assert worker.out == plain.out
    lines = plain.errors
    assert lines == [line for line in worker.errors if line in lines][: len(lines)]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("code", "exit_code"), [(BAD_TEXT, 1), (FULL_STDOUT, 120)])
def test_an_end_that_cannot_be_reported_has_the_same_code(
    code: str, exit_code: int, options: list[str], tmp_path: Path
) -> None:
    """What is printed about it differs between versions of the interpreter."""
    (plain, _), (worker, _) = run_both(tmp_path, options, code)
    assert (plain.code, worker.code) == (exit_code, exit_code)


@pytest.mark.parametrize("options", OPTIONS)
def test_errors_of_exit_hooks_are_printed(options: list[str], tmp_path: Path) -> None:
    """All hooks run; none changes the exit code."""
    (plain, _), (worker, _) = run_both(tmp_path, options, BAD_HOOKS)
    assert (plain.code, worker.code) == (0, 0)
    assert worker.out == plain.out == "last\n"
    assert {"SystemExit: 5", "ValueError: invalid literal for int() with base 10: 'no number'"} <= {
        *worker.errors
    }


@pytest.mark.parametrize("options", ["--run-path", "--start-method=fork"])
def test_a_missing_script_is_no_failure_of_a_worker(options: str, tmp_path: Path) -> None:
    """As for a command: one line, no restart, and a shell's exit code."""
    arguments = ["--run-path", options, "--max-restarts=2"]
    missing = run_cli(*arguments, tmp_path / "missing.py")
    assert (missing.code, missing.errors) == (
        127,
        [f"aio-elastic: script not found: {tmp_path}/missing.py"],
    )
    directory = run_cli(*arguments, tmp_path)
    assert directory.code == 126
    assert len(directory.errors) == 1
