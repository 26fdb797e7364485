"""A job saves before it ends: its programs get a signal once, and keep their helpers."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.children import until_sync
from tests.support.cli import CLI, Running, running, running_cli
from tests.support.leaks import leaked_processes

pytestmark = pytest.mark.e2e

# Saves in its `finally`, as most programs do: a second signal tears the checkpoint.
TRAIN = """
import os, signal, sys, time
notes = os.environ["NOTES"]
rank = os.environ.get("RANK", "0")
log = os.open(notes + "/log." + rank, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def stop(number, frame):
    os.write(log, (signal.Signals(number).name + "\\n").encode())
    sys.exit(0 if "EXIT_0" in os.environ else 128 + number)
for name in sys.argv[1:] or ["SIGTERM"]:
    action = signal.SIG_IGN if name.startswith("-") else stop
    signal.signal(getattr(signal, name.lstrip("-")), action)
try:
    open(notes + "/up." + rank, "w").close()
    while True:
        time.sleep(0.05)
finally:
    print("saving", file=sys.stderr, flush=True)
    with open(notes + "/ckpt." + rank, "w") as file:
        for _ in range(50):
            file.write("x")
            file.flush()
            time.sleep(0.005)
        file.write("END")
"""

# Passes signals on to its child, and waits: uv, tini and container entry points do so.
FORWARDING = """
import signal, subprocess, sys
signals = [signal.SIGTERM, signal.SIGINT]
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
child = subprocess.Popen(sys.argv[1:], preexec_fn=lambda: signal.pthread_sigmask(
    signal.SIG_UNBLOCK, signals))
for number in signals:
    signal.signal(number, lambda number, frame: child.send_signal(number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
sys.exit(child.wait())
"""
# The same for the first one, and ignores all others: timeout does so.
FORWARDING_ONCE = FORWARDING.replace(
    "child.send_signal(number)",
    "(signal.signal(number, signal.SIG_IGN), child.send_signal(number))",
)
# Runs a shell that runs the program, and handles no signal: conda does so.
CALLING = """
import subprocess, sys
sys.exit(subprocess.call(["bash", "-c", 'exec 3>&1; "$@"', "bash", *sys.argv[1:]]))
"""


@pytest.fixture
def train(tmp_path: Path) -> list[str]:
    """The command of a program that saves a checkpoint when it is stopped."""
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return [sys.executable, "-S", str(path)]


class Job:
    """What a test sees of a job that saves."""

    def __init__(self, directory: Path, job: Running) -> None:
        self.directory = directory
        self.job = job

    def wait_up(self, count: int = 1) -> None:
        """Wait until the programs of all workers can be stopped."""
        paths = [self.directory / f"up.{rank}" for rank in range(count)]
        until_sync(lambda: all(path.exists() for path in paths), "the start of the programs")

    def signals(self, rank: int = 0) -> list[str]:
        """Return the signals that a program got."""
        return (self.directory / f"log.{rank}").read_text().split()

    def has_saved(self, rank: int = 0) -> bool:
        """Return whether the checkpoint of a program is whole."""
        path = self.directory / f"ckpt.{rank}"
        return path.exists() and path.read_text() == "x" * 50 + "END"

    def stop(self, number: int = signal.SIGTERM, *, count: int = 1) -> None:
        """Stop the job when its programs are up, and check that each saves, and ends."""
        self.wait_up(count)
        self.job.send(number)
        ended = self.job.ended()
        assert ended.code == 128 + number, ended.err
        name = signal.Signals(number).name
        for rank in range(count):
            assert self.signals(rank) == [name], ended.err
            assert self.has_saved(rank), ended.err
        assert "did not stop in time" not in ended.err
        assert not leaked_processes()


def stop_job(
    directory: Path, *words: object, number: int = signal.SIGTERM, count: int = 1, **env: str
) -> None:
    """Run the command line, and stop it as `Job.stop` says."""
    environment = {"NOTES": str(directory), "LOGLEVEL": "INFO", **env}
    # Only the default plan passes SIGINT on.
    plan = ("--shutdown-timeout", 20) if number == signal.SIGTERM else ()
    options = (*plan, "--nproc-per-node", count, "--no-python")
    with running_cli(*options, *words, env=environment) as job:
        Job(directory, job).stop(number, count=count)


def script(text: str) -> Callable[[Sequence[str]], list[str]]:
    """Return what makes a worker of bash that knows the program as `$@`."""
    return lambda train: ["bash", "-c", text, "bash", *train]


WORKERS: dict[str, Callable[[Sequence[str]], list[str]]] = {
    "plain": list,
    "a shell that replaces itself": lambda train: ["sh", "-c", " ".join(train)],
    "a shell": lambda train: ["sh", "-c", f"{' '.join(train)}; true"],
    "bash": script('"$@"; true'),
    "two shells": lambda train: ["sh", "-c", f"bash -c '{' '.join(train)}; true'; true"],
    "a subshell": script('("$@"; true); true'),
    "a pipeline": script('"$@" | cat; exit 0'),
    "a pipeline that it prints into": script('"$@" 2>&1 | cat; exit 0'),
    "a pipeline below a trap": script('trap true TERM; "$@" 2>&1 | cat; exit 0'),
    "the reader of an endless program": script(
        'trap true TERM; "$@" < <(while :; do sleep 1; echo; done); exit 0'
    ),
    "beside the monitor of a pipeline": script(
        'trap true TERM; { sleep 99 & "$@"; } 2>&1 | cat; exit 0'
    ),
    "the end of a pipeline": script('trap true TERM; sleep 1000 | "$@"; exit 0'),
    "a trap": script("trap 'echo trapped > $NOTES/trapped' TERM; \"$@\"; true"),
    "a trap that passes it on": script(
        "trap 'kill -TERM $child; wait $child; exit' TERM; \"$@\" & child=$!; wait $child"
    ),
    # Without the option it signals its child, and then its whole process group: twice.
    "timeout": lambda train: ["timeout", "--foreground", "100", *train],
    "timeout below a shell": script('timeout --foreground 100 "$@"; true'),
    "a wrapper that passes it on": lambda train: [sys.executable, "-S", "-c", FORWARDING, *train],
    "a wrapper that passes one on": lambda train: [
        *(sys.executable, "-S", "-c", FORWARDING_ONCE, *train)
    ],
    "a wrapper below a shell": script(f'{sys.executable} -S -c "$FORWARDING" "$@"; true'),
    "a wrapper that calls a shell": lambda train: [sys.executable, "-S", "-c", CALLING, *train],
    "a nested job": lambda train: [*CLI, "run", "--quiet", "--no-python", *train],
    "a nested job below a shell": lambda train: [
        *("sh", "-c", '"$@"; true', "sh"),
        *(*CLI, "run", "--quiet", "--no-python", *train),
    ],
}


@pytest.mark.parametrize("worker", WORKERS.values(), ids=WORKERS)
def test_a_program_saves(
    worker: Callable[[Sequence[str]], list[str]], train: list[str], tmp_path: Path
) -> None:
    """It gets one signal, however the worker has started it."""
    stop_job(tmp_path, *worker(train), FORWARDING=FORWARDING)


@pytest.mark.parametrize(
    "worker",
    [
        pytest.param(script('"$@"; true'), id="shell"),
        # system(3) ignores SIGINT while it waits.
        pytest.param(lambda train: ["perl", "-e", "system(@ARGV)", *train], id="system"),
        pytest.param(
            lambda train: [
                *("perl", "-e", "system(@ARGV)", "bash", "-c", 'trap true INT; "$@"; true', "bash"),
                *train,
            ],
            id="shell below system",
        ),
    ],
)
def test_ctrl_c_reaches_a_command_that_is_waited_for(
    worker: Callable[[Sequence[str]], list[str]], train: list[str], tmp_path: Path
) -> None:
    """The terminal would send SIGINT to both, and does not reach a worker's session."""
    stop_job(tmp_path, *worker([*train, "SIGINT"]), number=signal.SIGINT)


def test_the_reader_of_a_pipe_takes_the_last_lines(tmp_path: Path) -> None:
    """It reads them when the program has ended already."""
    program = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"last\\n"), os._exit(0)))
open(os.environ["NOTES"] + "/up." + os.environ["RANK"], "w").close()
while True:
    time.sleep(0.05)
"""
    reader = "while read line; do sleep 0.01; echo $line > $NOTES/lines.$RANK; done"
    text = f'{sys.executable} -S -c "$1" | ({reader})'
    environment = {"NOTES": str(tmp_path)}
    with running_cli(
        "--nproc-per-node", 8, "--no-python", "bash", "-c", text, "bash", program, env=environment
    ) as job:
        Job(tmp_path, job).wait_up(8)
        job.send(signal.SIGTERM)
        assert job.ended().code == 143
    assert [(tmp_path / f"lines.{rank}").read_text() for rank in range(8)] == ["last\n"] * 8


def test_a_shell_whose_file_was_replaced(train: list[str], tmp_path: Path) -> None:
    """As by an upgrade while the job runs."""
    shell = tmp_path / "bash"
    shutil.copy(shutil.which("bash") or "", shell)
    _, *words = script(f'rm {shell}; trap true TERM; "$@"; true')(train)
    stop_job(tmp_path, shell, *words)


@pytest.mark.parametrize(
    "worker",
    [
        pytest.param(WORKERS["a trap"], id="foreground"),
        pytest.param(WORKERS["a trap that passes it on"], id="background"),
        pytest.param(script("trap '' INT; trap true TERM; \"$@\"; true"), id="ignored"),
    ],
)
@pytest.mark.parametrize("sigint", ["SIGINT", "-SIGINT"], ids=["handled", "ignored"])
def test_a_program_that_changes_the_action_of_sigint(
    worker: Callable[[Sequence[str]], list[str]], sigint: str, train: list[str], tmp_path: Path
) -> None:
    """A shell lets commands of the background ignore SIGINT, but the program may change that."""
    stop_job(tmp_path, *worker([*train, "SIGTERM", sigint]))


def test_a_launcher_in_the_background_of_a_worker(train: list[str], tmp_path: Path) -> None:
    """It leaves SIGINT and SIGQUIT ignored, so it gets the signal from the trap only."""
    worker = WORKERS["a trap that passes it on"](WORKERS["a nested job"](train))
    stop_job(tmp_path, *worker)


def test_the_trap_of_a_shell_runs_too(train: list[str], tmp_path: Path) -> None:
    """After its command has ended."""
    worker = WORKERS["a trap"](train)
    stop_job(tmp_path, *worker)
    assert (tmp_path / "trapped").read_text() == "trapped\n"


def test_what_a_trap_starts_is_not_signalled(tmp_path: Path) -> None:
    """The program that copies a checkpoint runs to its end."""
    text = """
save() {
    echo SIGTERM >> $NOTES/log.$RANK
    sleep 0.3 && printf "$WHOLE" > $NOTES/ckpt.$RANK
    exit 0
}
trap save TERM
: > $NOTES/up.$RANK
while :; do sleep 1000 & wait $!; done
"""
    whole = "x" * 50 + "END"
    stop_job(tmp_path, "bash", "-c", text, count=4, WHOLE=whole)


@pytest.mark.parametrize("kind", ["a trap", "a trap that passes it on"])
def test_a_job_in_the_background_of_a_script(kind: str, train: list[str], tmp_path: Path) -> None:
    """Its shell has no job control, so it ignores SIGINT, and so do workers if it is not reset."""
    command = [*CLI, "run", "--shutdown-timeout", "20", "--no-python"]
    worker = WORKERS[kind]([*train, "SIGTERM", "SIGINT"])
    launcher = ["bash", "-c", '"$@" & echo $! > $NOTES/pid; wait $!', "bash", *command, *worker]
    with running(launcher, env={"NOTES": str(tmp_path)}) as shell:
        job = Job(tmp_path, shell)
        job.wait_up()
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
        assert shell.wait() == 143, shell.err
        assert (job.signals(), job.has_saved()) == (["SIGTERM"], True), shell.err
        assert "did not stop in time" not in shell.err


def test_uv_run(train: list[str], tmp_path: Path) -> None:
    """`uv` passes SIGTERM on to its child."""
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    if not os.path.exists(uv):
        pytest.skip("needs uv")
    worker = [uv, "run", "--no-project", "--no-config", "--offline", *train]
    stop_job(tmp_path, *worker, HOME=str(tmp_path), UV_CACHE_DIR=str(tmp_path / "cache"))


@pytest.mark.torch
def test_torchrun(train: list[str], tmp_path: Path) -> None:
    """It has workers of its own, which it stops."""
    pytest.importorskip("torch")
    options = ["--standalone", "--nproc-per-node", "2", "--no-python"]
    worker = [sys.executable, "-m", "torch.distributed.run", *options, *train]
    environment = {"NOTES": str(tmp_path), "LOGLEVEL": "INFO"}
    with running_cli("--shutdown-timeout", 60, "--no-python", *worker, env=environment) as job:
        test = Job(tmp_path, job)
        test.stop(count=2)


# Finishes the requests that it has accepted; needs its engine for that.
SERVE = """
import multiprocessing, os, signal, sys, time
notes = os.environ["NOTES"]
log = os.open(notes + "/log.0", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def engine(requests, answers):
    for request in iter(requests.get, None):
        time.sleep(0.1)
        answers.put(request)
if __name__ == "__main__":
    requests, answers = multiprocessing.Queue(), multiprocessing.Queue()
    multiprocessing.Process(target=engine, args=(requests, answers), daemon=True).start()
    requests.put(0)
    answers.get()
    stopping = []
    def stop(number, frame):
        os.write(log, (signal.Signals(number).name + "\\n").encode())
        stopping.append(number)
    signal.signal(signal.SIGTERM, stop)
    open(notes + "/up.0", "w").close()
    while not stopping:
        time.sleep(0.02)
    for number in range(3):
        requests.put(number)
    for _ in range(3):
        answers.get(timeout=20)
    with open(notes + "/ckpt.0", "w") as file:
        file.write("x" * 50 + "END")
    if sys.argv[1:] == ["forget"]:
        os._exit(0)
"""


@pytest.mark.parametrize("words", [[], ["forget"]], ids=["joined", "forgotten"])
@pytest.mark.parametrize("below", ["leader", "shell"])
def test_an_engine_lives_until_its_leader_has_drained(
    words: list[str], below: str, tmp_path: Path
) -> None:
    """An engine that its leader forgets is stopped then."""
    (tmp_path / "serve.py").write_text(SERVE)
    program = [sys.executable, str(tmp_path / "serve.py"), *words]
    stop_job(tmp_path, *(program if below == "leader" else script('"$@"; true')(program)))


LOADER = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader, Dataset
notes = os.environ["NOTES"]
log = os.open(notes + "/log.0", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
class Numbers(Dataset):
    def __len__(self):
        return 1_000_000
    def __getitem__(self, index):
        return torch.tensor(index)
if __name__ == "__main__":
    stopping = []
    def stop(number, frame):
        os.write(log, (signal.Signals(number).name + "\\n").encode())
        stopping.append(number)
    signal.signal(signal.SIGTERM, stop)
    batches = iter(DataLoader(Numbers(), batch_size=2, num_workers=2))
    next(batches)
    open(notes + "/up.0", "w").close()
    while not stopping:
        next(batches)
    for _ in range(50):  # more than what the loaders have prepared
        next(batches)
    with open(notes + "/ckpt.0", "w") as file:
        file.write("x" * 50 + "END")
"""


@pytest.mark.torch
@pytest.mark.parametrize("below", ["leader", "shell"])
def test_data_loaders_live_until_the_epoch_is_saved(below: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "loader.py").write_text(LOADER)
    program = [sys.executable, str(tmp_path / "loader.py")]
    stop_job(tmp_path, *(program if below == "leader" else script('"$@"; true')(program)))
