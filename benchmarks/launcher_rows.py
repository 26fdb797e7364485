"""Small behaviours of launchers, each observed of one peer.

A job has two workers, unless its `Launch` says otherwise; see `workers/parity.py` for the words.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.comparison import Family, Row
from benchmarks.jobs import WORKER, Job
from benchmarks.launcher_peers import LAUNCHER_PEERS, Launch, Launching
from benchmarks.peers import refuse
from benchmarks.trials import SETTLE_S, memory_of
from tests.support.sockets import free_port, listening

__all__ = ["LAUNCHERS"]

_START_S = 60.0
"""Seconds for a start of a job: torch imports for seconds on a busy host."""
_END_S = 15.0
_STUBBORN_S = 40.0
_NODES_S = 90.0
"""Seconds in which the nodes of a job have to notice a loss: their limits are up to 30 s."""


_X, _Y = "W x\n", "W y\n"
"""What the words `out=x` and `err=y` write."""


class Launched(Job):
    """A job by a peer; a context manager.

    Args:
        peer: the launcher.
        launch: the job.
        stdin: of the launcher.
        variables: further ones of the launcher.
    """

    def __init__(
        self,
        peer: Launching,
        launch: Launch,
        *,
        stdin: bytes = b"",
        variables: dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._peer = peer
        self._options = launch
        self._variables = variables or {}
        self.began = time.monotonic()
        self.add(0, stdin)

    def add(self, node: int, stdin: bytes = b"") -> None:
        """Start the launcher of a node."""
        changes = {**self._peer.variables(self._options), **self._variables}
        command = self._peer.command(self._options, node)
        self.launch(command, node, changes=changes, stdin=stdin)

    def run(self, command: Sequence[str]) -> str:
        """Run another command beside the job; return its output."""
        ended = subprocess.run(
            command,
            env=self.environment(),
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        return ended.stdout + ended.stderr

    def expect(self, condition: Callable[[], bool], what: str, seconds: float = _START_S) -> None:
        """Wait for something.

        Raises:
            TimeoutError: it did not happen, or the launchers have ended before.
        """
        if not self.until(condition, seconds):
            raise TimeoutError(f"{what}: not within {seconds:g} s")

    def expect_notes(self, text: str, number: int = 2, seconds: float = _START_S) -> None:
        """Wait for notes of so many ranks."""
        self.expect(lambda: len(self.noted(text)) >= number, text, seconds)

    def code(self, node: int = 0, seconds: float = _START_S) -> str:
        """Wait for the end of a launcher; return its exit code as a shell has it."""
        code = self.end(node, seconds)
        if code is None:
            return f"runs on after {seconds:.0f} s"
        return f"exit code {128 - code if code < 0 else code}"

    def ends(self, since: float, seconds: float, number: int = 2) -> str:
        """Return how long it takes to end, and what of the workers is left."""
        if self.end(0, seconds) is None:
            return f"runs on after {seconds:.0f} s"
        return f"ends after {time.monotonic() - since:.0f} s, {self.left(number)}"

    def left(self, number: int) -> str:
        """Return how many of so many processes of the workers are left."""
        left = list(self.processes_left().values())
        own = [each for each in left if _is_worker(each) or each.startswith("sleep ")]
        others = len(left) - len(own)
        rest = f", and {others} of the launcher" if others else ""
        return f"{len(own)} of {number} left{rest}"

    def lines(self) -> str:
        """Return how many lines the launcher has written."""
        lines = [*self.text("out").splitlines(), *self.text("err").splitlines()]
        number = sum(not line.startswith("W ") for line in lines)
        return f"{number} line{'s' if number != 1 else ''}"

    def log_texts(self) -> list[str]:
        """Return the contents of its log files."""
        paths = (self.directory / "logs").rglob("*")
        return [path.read_text(errors="replace") for path in paths if path.is_file()]

    def helpers(self) -> list[int]:
        """Return the pids of the launcher and of its helpers, not those of workers."""
        found = self.processes()
        others = [pid for pid, command in found.items() if not _is_worker(command)]
        return [self.programs[0].pid, *others]


def _is_worker(command: str) -> bool:
    """Tell whether an interpreter runs the worker; the launcher has its path as an argument."""
    return re.match(rf"\S+ (-\w+ )*{WORKER} ", f"{command} ") is not None


def _ended(peer: Launching, launch: Launch, seconds: float = _START_S) -> str:
    with Launched(peer, launch) as job:
        return job.code(seconds=seconds)


# ------------------------------------------------------- exit codes and reports


def _exit_code(peer: Launching) -> str:
    return _ended(peer, Launch("meet 1:exit=7 hold"))


def _by_signal(peer: Launching) -> str:
    return _ended(peer, Launch("meet 1:kill=SIGSEGV hold"))


def _late_failure(peer: Launching) -> str:
    return _ended(peer, Launch("1:nap=1 1:exit=3"))


def _report(text: str) -> str:
    """Return the report of a failure: torchrun's form of it, or the last line of ft_launcher."""
    lines = [line for line in text.splitlines() if "Some rank(s) exited" in line]
    return text.partition(" FAILED\n")[2] or "\n".join(lines)


def _root_cause(peer: Launching) -> str:
    with Launched(peer, Launch("meet 2:exit=7 hold=fail", workers=3)) as job:
        job.code()
        text = job.text("err")
        found = re.search(r"Root Cause.*?rank *: (\d+)", _report(text), re.DOTALL)
        found = found or re.search(r"failed \(exitcode.*?local_rank: (\d+)", text)
        return f"rank {found[1]}" if found else "no rank"


def _in_report(peer: Launching, words: str) -> str:
    with Launched(peer, Launch(words)) as job:
        job.code()
        report = _report(job.text("err"))
        if not report:
            return "no report"
        return "the exception" if "bad-batch" in report else "the exit code"


def _exception(peer: Launching) -> str:
    return _in_report(peer, "meet 1:raise=bad-batch hold")


def _recorded(peer: Launching) -> str:
    """Observe an error file, as `torch.distributed.elastic.multiprocessing.errors.record` has."""
    extra = {"py_callstack": "ValueError: bad-batch", "timestamp": "1700000000"}
    error = json.dumps({"message": {"message": "ValueError: bad-batch", "extraInfo": extra}})
    return _in_report(peer, f"meet '1:error={error}' 1:exit=1 hold")


def _quiet(peer: Launching) -> str:
    with Launched(peer, Launch()) as job:
        return f"{job.code()}, {job.lines()}"


def _failure_lines(peer: Launching) -> str:
    with Launched(peer, Launch("meet 1:exit=7 hold")) as job:
        job.code()
        return job.lines()


# --------------------------------------------------------------------- bad input


def _refused(peer: Launching, launch: Launch) -> str:
    with Launched(peer, launch) as job:
        return f"{job.code()}, {job.lines()}"


def _no_script(peer: Launching) -> str:
    return _refused(peer, Launch(program=("nowhere.py",)))


def _no_program(peer: Launching) -> str:
    return _refused(peer, Launch(program=("./nowhere",), python=False))


def _bad_option(peer: Launching) -> str:
    return _refused(peer, Launch(options=("--unknown",)))


def _bad_number(peer: Launching) -> str:
    return _refused(peer, Launch(workers="many"))


def _bad_port(peer: Launching) -> str:
    return _refused(peer, Launch(port="99999", free_port=False))


def _bad_logs(peer: Launching) -> str:
    return _refused(peer, Launch(logs=True, log_dir="{dir}/stdin"))


def _variable(peer: Launching) -> str:
    launch = Launch(workers="")
    with Launched(peer, launch, variables={"PET_NPROC_PER_NODE": "3"}) as job:
        job.code()
        return f"{len(job.starts())} workers"


def _file(peer: Launching) -> str:
    with Job() as job:
        job.launch(peer.file(job.directory), changes=peer.variables(Launch()))
        job.end(0, _START_S)
        return f"{len(job.starts())} workers"


def _training(peer: Launching) -> str:
    with Launched(peer, Launch("env", options=peer.training())) as job:
        job.code()
        found = job.observe()["env"]["0"]
        name = "ACCELERATE_MIXED_PRECISION"
        return f"`{name}={found[name]}`" if name in found else "nothing"


# ------------------------------------------------------------------- left behind


def _left_behind(peer: Launching, words: str) -> str:
    with Launched(peer, Launch(words)) as job:
        return f"{job.code()}, {job.left(2)}"


def _child(peer: Launching) -> str:
    return _left_behind(peer, "daemon")


def _daemon(peer: Launching) -> str:
    return _left_behind(peer, "daemon=session")


def _killed(peer: Launching, words: str) -> str:
    with Launched(peer, Launch(words)) as job:
        job.expect_notes("ready")
        job.programs[0].kill()
        job.end(0)
        return job.left(2)


def _killed_polite(peer: Launching) -> str:
    return _killed(peer, "hold=return")


def _killed_stubborn(peer: Launching) -> str:
    return _killed(peer, "hold=ignore")


def _temporary(peer: Launching) -> str:
    with Launched(peer, Launch("out=x")) as job:
        job.code()
        number = len(os.listdir(job.directory / "tmp"))
        return f"{number} left"


# -------------------------------------------------------------------------- stop


def _stopped(peer: Launching, number: int) -> str:
    with Launched(peer, Launch("hold=return")) as job:
        job.expect_notes("ready")
        job.programs[0].send_signal(number)
        return f"{job.code()}, {job.left(2)}"


def _terminated(peer: Launching) -> str:
    return _stopped(peer, signal.SIGTERM)


def _hung_up(peer: Launching) -> str:
    return _stopped(peer, signal.SIGHUP)


def _interrupted(peer: Launching) -> str:
    with Launched(peer, Launch("hold=return")) as job:
        job.expect_notes("ready")
        os.killpg(job.programs[0].pid, signal.SIGINT)  # as a terminal does
        return f"{job.code()}, {job.lines()}, {job.left(2)}"


def _user_signal(peer: Launching) -> str:
    with Launched(peer, Launch("hold=ignore")) as job:
        job.expect_notes("ready")
        job.programs[0].send_signal(signal.SIGUSR1)
        code = job.end(0, SETTLE_S)
        if code is None:
            return f"it reaches {len(job.noted('got SIGUSR1'))} of 2 workers"
        return f"exit code {128 - code}, {job.left(2)}"


def _stubborn(peer: Launching, stop: int, seconds: float) -> str:
    with Launched(peer, Launch("hold=ignore", stop=stop)) as job:
        job.expect_notes("ready")
        began = time.monotonic()
        job.programs[0].terminate()
        return job.ends(began, seconds)


def _stubborn_default(peer: Launching) -> str:
    return _stubborn(peer, 0, _STUBBORN_S)


def _stubborn_limit(peer: Launching) -> str:
    return _stubborn(peer, 2, _END_S)


def _twice(peer: Launching) -> str:
    with Launched(peer, Launch("hold=ignore")) as job:
        job.expect_notes("ready")
        job.programs[0].terminate()
        job.expect_notes("got SIGTERM")
        began = time.monotonic()
        job.programs[0].terminate()
        return job.ends(began, _END_S)


def _stubborn_other(peer: Launching) -> str:
    with Launched(peer, Launch("1:hold=ignore wait=go exit=3", stop=2)) as job:
        job.expect_notes("ready", 1)
        began = time.monotonic()
        job.note("go")
        return job.ends(began, _END_S)


def _whom(peer: Launching) -> str:
    with Launched(peer, Launch("fork hold=slow")) as job:
        job.expect_notes("ready")
        job.programs[0].terminate()
        job.code()
        worker, child = job.noted("got SIGTERM"), job.noted("child got SIGTERM")
        if len(worker) != 2:
            return f"{len(worker)} of 2 workers"
        if not child:
            return "the workers alone"
        late = all(child[rank] - worker[rank] > 250_000_000 for rank in child)
        return "the workers, then their children" if late else "all at the same time"


# ----------------------------------------------------------------------- restart


def _restarted(peer: Launching) -> str:
    with Launched(peer, Launch("meet 1:fail=1 nap=0.5", restarts=1)) as job:
        return f"{job.code()}, {len(job.starts())} starts"


def _exhausted(peer: Launching) -> str:
    with Launched(peer, Launch("1:exit=9 hold", restarts=2)) as job:
        code = job.code()
        return f"{code}, {sum(start.rank == 1 for start in job.starts())} starts of it"


def _starts_of_first(peer: Launching, launch: Launch) -> str:
    with Launched(peer, launch) as job:
        job.code()
        number = sum(start.rank == 0 for start in job.starts())
        return f"{number} start{'s' if number != 1 else ''} of it"


def _kept(peer: Launching) -> str:
    words = "1:nap=0.5 1:fail=1 0:nap=2"
    return _starts_of_first(peer, Launch(words, restarts=1, alone=True))


def _succeeded_before(peer: Launching) -> str:
    return _starts_of_first(peer, Launch("1:nap=1 1:fail=1", restarts=1))


def _attempts_apart(peer: Launching) -> str:
    with Launched(peer, Launch("out=x meet 1:fail=1", restarts=1, logs=True)) as job:
        job.code()
        return f"{job.log_texts().count(_X)} of 4 files"


def _back(peer: Launching, ending: str) -> str:
    times = []
    for _ in range(3):
        words = f"1:wait=go 1:fail=1 hold={ending}"
        with Launched(peer, Launch(words, restarts=1)) as job:
            job.expect_notes("ready", 1)
            job.note("go")
            job.expect(lambda job=job: len(job.starts()) == 4, "starts")  # type: ignore[misc]
            last = max(start.at for start in job.starts())
            times.append((last - job.noted("failing")[1]) / 1e6)
    return f"{statistics.median(times):.0f} ms"


def _back_plain(peer: Launching) -> str:
    return _back(peer, "die")


def _back_handled(peer: Launching) -> str:
    return _back(peer, "return")


# ------------------------------------------------------------------------ output


def _prefix(peer: Launching) -> str:
    with Launched(peer, Launch("out=hello", tee=True)) as job:
        job.code()
        lines = sorted(line for line in job.text("out").splitlines() if line.endswith("W hello"))
        return f"`{lines[0]}`" if lines else "no output"


def _partial_lines(peer: Launching) -> str:
    """Observe two workers that write a line each in two parts at the same time."""
    with Launched(peer, Launch("meet hex=5720 nap=0.5 hex=780a", tee=True)) as job:
        job.code()
        lines = job.text("out").splitlines()
        return f"{sum(line.endswith(']:W x') for line in lines)} of 2 lines"


def _bytes(peer: Launching) -> str:
    with Launched(peer, Launch("0:hex=5720ff0a", tee=True)) as job:
        job.code()
        content = (job.directory / "out.0").read_bytes()
        if not content:
            return "no output"
        return "kept" if b"W \xff" in content else "changed"


def _progress_bar(peer: Launching) -> str:
    """Observe "1", carriage return, "2", carriage return, "3", newline."""
    with Launched(peer, Launch("0:hex=5720310d5720320d5720330a", tee=True)) as job:
        job.code()
        lines = job.text("out").count("\n")
        return f"{lines} line{'s' if lines != 1 else ''}"


def _last_words(peer: Launching) -> str:
    with Launched(peer, Launch("1:out=x 1:err=y 1:kill=SIGKILL hold", tee=True)) as job:
        job.code()
        lines = [*job.text("out").splitlines(), *job.text("err").splitlines()]
        found = {line[-3:] for line in lines if line.endswith(("]:W x", "]:W y"))}
        return f"{len(found)} of 2 lines"


def _files(peer: Launching) -> str:
    with Launched(peer, Launch("out=x err=y", logs=True)) as job:
        job.code()
        return f"{sum(text in (_X, _Y) for text in job.log_texts())} of 4"


def _one_shown(peer: Launching) -> str:
    with Launched(peer, Launch("0:out=zero 1:out=one", shown=1)) as job:
        job.code()
        out = job.text("out")
        ranks = [str(rank) for rank, word in enumerate(("zero", "one")) if f"W {word}" in out]
        return f"rank {' and '.join(ranks) or 'none'}"


def _stdin(peer: Launching) -> str:
    with Launched(peer, Launch("0:stdin"), stdin=b"text") as job:
        job.code()
        found = re.search(r"W stdin '(.*)'", job.text("out"))
        return f"`{found[1]}`" if found and found[1] else "nothing"


def _delay(peer: Launching, variables: dict[str, str]) -> str:
    delays: list[float] = []
    with (
        Launched(peer, Launch("meet 0:tick=4", tee=True), variables=variables) as job,
        (job.directory / "out.0").open("rb") as file,
    ):
        job.expect_notes("started", 0)
        end = time.monotonic() + _START_S
        while job.programs[0].poll() is None and len(delays) < 60 and time.monotonic() < end:
            line = file.readline()
            if line.endswith(b"\n") and b"W " in line:
                delays.append((time.monotonic_ns() - int(line.split()[-1])) / 1e6)
            else:
                time.sleep(0.0005)
    return f"{statistics.median(delays):.1f} ms"


def _latency(peer: Launching) -> str:
    return _delay(peer, {})


def _latency_unbuffered(peer: Launching) -> str:
    return _delay(peer, {"PYTHONUNBUFFERED": "1"})


def _volume(peer: Launching) -> str:
    """Observe 2 x 20 MB through the launcher to the console, and lines that are not whole."""
    number = 200_000
    with Launched(peer, Launch(f"meet lines={number}", tee=True)) as job:
        job.expect_notes("writing")
        began = min(job.noted("writing").values()) / 1e9
        code = job.end(0, 120)
        took = time.monotonic() - began
        whole = re.compile(rb"\[\w+\]:W \d +\d+ x+\.\n")
        content = (job.directory / "out.0").read_bytes()
    lines = sum(1 for _ in whole.finditer(content))
    rest = "" if code is not None else ", runs on"
    return f"{2 * number * 100 / took / 1e6:.0f} MB/s, {2 * number - lines} lines not whole{rest}"


# -------------------------------------------------------------------------- hang


def _restart_after(job: Launched, note: str) -> str:
    """Return when an attempt follows what was noted of rank 1."""
    job.expect_notes(note, 1)
    noted = 0

    def again() -> bool:
        nonlocal noted
        noted = job.noted(note).get(1, 0)
        return any(start.attempt == 1 for start in job.starts())

    if not job.until(again, 30):
        code = job.code(seconds=0)
        return f"{code}, {job.left(2)}" if code.startswith("exit") else "no restart within 30 s"
    at = min(start.at for start in job.starts() if start.attempt == 1)
    return f"restart after {(at - noted) / 1e9:.1f} s"


def _heartbeats(peer: Launching) -> str:
    refuse(not peer.beats)
    words = f"first 0:beat={peer.beats},60 1:beat={peer.beats},1 hang"
    with Launched(peer, Launch(words, heartbeat=2, restarts=1)) as job:
        return _restart_after(job, "last")


def _learnt(peer: Launching) -> str:
    refuse(not peer.learns)
    words = f"first beat={peer.learns},2 0:beat={peer.beats},60 hang"
    with Launched(peer, Launch(words, heartbeat=600, restarts=1)) as job:
        return _restart_after(job, "last")


def _section(peer: Launching) -> str:
    with Launched(peer, Launch(f"first section={peer.sections},2", section=2, restarts=1)) as job:
        return _restart_after(job, "section")


def _where(peer: Launching) -> str:
    with Launched(peer, Launch(f"section={peer.sections},2", section=2, logs=True)) as job:
        job.code()
        texts = [job.text("out"), job.text("err"), *job.log_texts()]
        return "its function" if any("hang_here" in text for text in texts) else "nothing"


# ----------------------------------------------------------------- several nodes


@contextmanager
def _two_nodes(peer: Launching, launch: Launch) -> Iterator[Launched]:
    """Start the second node when the store of the first one listens."""
    with Launched(peer, launch) as job:
        job.expect(lambda: bool(listening([int(job.port)])), "the store")
        job.add(1)
        yield job


def _failure_of_node(peer: Launching) -> str:
    with _two_nodes(peer, Launch("meet note=met 3:exit=5 hold", nodes="2")) as job:
        job.expect_notes("met", 1)
        return ", ".join(job.code(node, _END_S) for node in (0, 1))


def _missing_node(peer: Launching) -> str:
    with Launched(peer, Launch(nodes="2", join=3)) as job:
        code = job.code(seconds=30)
        return f"{code} after {time.monotonic() - job.began:.0f} s"


def _unequal_nodes(peer: Launching) -> str:
    with _two_nodes(peer, Launch("world", workers=1, nodes="2", more=1)) as job:
        job.code()
        return f"world of {len(job.noted('world 3'))}"


def _joined(peer: Launching) -> str:
    with Launched(peer, Launch("world hold=return", nodes="1:2")) as job:
        job.expect_notes("ready")
        began = time.monotonic()
        job.add(1)
        job.expect_notes("world 4", 4)
        return f"4 workers after {time.monotonic() - began:.1f} s"


def _lost(peer: Launching, node: int) -> str:
    """Observe the end of a host: its launcher, with its workers, is killed."""
    with _two_nodes(peer, Launch("world together", nodes="1:2", restarts=3)) as job:
        job.expect_notes("world 4", 4)
        time.sleep(SETTLE_S)
        began = time.monotonic()
        job.kill(node)
        other = job.programs[1 - node]

        def formed() -> bool:
            again = [at for at in job.noted("world 2").values() if at > began * 1e9]
            return len(again) == 2 or other.poll() is not None

        if not job.until(formed, _NODES_S):
            return f"no worker within {_NODES_S:.0f} s"
        took = time.monotonic() - began
        if other.poll() is not None:
            return f"{job.code(1 - node)} after {took:.1f} s"
        return f"2 workers after {took:.1f} s"


def _second_lost(peer: Launching) -> str:
    return _lost(peer, 1)


def _first_lost(peer: Launching) -> str:
    return _lost(peer, 0)


# ------------------------------------------------------------- ports and figures


def _two_jobs(peer: Launching) -> str:
    launch = Launch("meet nap=2", port="")
    with Launched(peer, launch) as first, Launched(peer, launch) as second:
        return ", ".join(job.code(seconds=_START_S) for job in (first, second))


def _port_in_use(peer: Launching) -> str:
    with socket.create_server(("127.0.0.1", free_port())) as other:
        port = str(other.getsockname()[1])
        with Launched(peer, Launch("nap=0.1", port=port, free_port=False)) as job:
            return f"{job.code(seconds=30)}, {job.lines()}"


def _start(peer: Launching) -> str:
    return _median_start(peer, 2, 5, "ms", 1e6)


def _many(peer: Launching) -> str:
    return _median_start(peer, 64, 1, "s", 1e9)


def _median_start(peer: Launching, workers: int, rounds: int, unit: str, divisor: float) -> str:
    times = []
    for _ in range(rounds):
        with Launched(peer, Launch("hold=return", workers=workers)) as job:
            job.expect(lambda: len(job.starts()) == workers, "starts")
            times.append((max(start.at for start in job.starts()) - job.began * 1e9) / divisor)
    return f"{statistics.median(times):.{0 if unit == 'ms' else 1}f} {unit}"


def _noticed(peer: Launching) -> str:
    times = []
    for _ in range(3):
        with Launched(peer, Launch("1:wait=go 1:note=failing 1:exit=7 hold=return")) as job:
            job.expect_notes("ready", 1)
            job.note("go")
            job.code()
            if 0 not in job.noted("got SIGTERM"):
                return "no SIGTERM"
            times.append((job.noted("got SIGTERM")[0] - job.noted("failing")[1]) / 1e6)
    return f"{statistics.median(times):.0f} ms"


def _end_time(peer: Launching) -> str:
    times = []
    for _ in range(3):
        with Launched(peer, Launch("nap=0.3 note=end")) as job:
            job.until(lambda: job.programs[0].poll() is not None, _START_S)
            times.append((time.monotonic_ns() - max(job.noted("end").values())) / 1e6)
    return f"{statistics.median(times):.0f} ms"


def _memory(peer: Launching) -> str:
    used = []
    for workers in (2, 18):
        with Launched(peer, Launch("hold=return", workers=workers)) as job:
            job.expect_notes("ready", workers)
            time.sleep(1)
            used.append(memory_of(job.helpers()))
    return f"{used[0] / 1024:.0f} MB, {(used[1] - used[0]) / 16:.0f} kB"


def _idle(peer: Launching) -> str:
    with Launched(peer, Launch("hold=return")) as job:
        job.expect_notes("ready")
        time.sleep(SETTLE_S)
        before = sum(map(_processor_time, job.helpers()))
        time.sleep(5)
        used = sum(map(_processor_time, job.helpers())) - before
        return f"{used / 5e6:.2f} ms"


def _processor_time(pid: int) -> int:
    """Return the processor time of all threads of a process in nanoseconds."""
    paths = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in paths)


# ----------------------------------------------------------------------- control


def _status(peer: Launching) -> str:
    return _asked(peer, "status", lambda job: f"{job.starts()[0].pid}", "the pids")


def _dump(peer: Launching) -> str:
    return _asked(peer, "dump", lambda _: "hold", "the functions")


def _asked(peer: Launching, verb: str, wanted: Callable[[Job], str], what: str) -> str:
    command = peer.ask(verb)
    with Launched(peer, Launch("hold=return")) as job:
        job.expect_notes("ready")
        return what if wanted(job) in job.run(command) else "nothing of it"


def _events(peer: Launching) -> str:
    with Launched(peer, Launch(options=peer.events())) as job:
        job.code()
        path = job.directory / "events"
        text = path.read_text() if path.exists() else job.text("err")
        found = [line for line in text.splitlines() if _is_json(line[line.find("{") :])]
        return f"{len(found)} lines"


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


_ROWS = {
    "exit-code": Row("a worker exits with 7", _exit_code),
    "segv": Row("a worker dies of SIGSEGV", _by_signal),
    "late": Row("a worker ends with 0, the other later with 3", _late_failure),
    "root-cause": Row(
        "rank 2 of 3 fails, the others fail when they are stopped: the cause is", _root_cause
    ),
    "exception": Row("an exception in an unchanged program: the report has", _exception),
    "recorded": Row("... in one with `@record`, or what it writes: the report has", _recorded),
    "quiet": Row("a success of 2 workers: lines of the launcher", _quiet),
    "failure-lines": Row(
        "a worker exits with 7: lines of the launcher", _failure_lines, varies=True
    ),
    "no-script": Row("a script that does not exist", _no_script),
    "no-program": Row("a program that does not exist", _no_program),
    "bad-option": Row("an unknown option", _bad_option),
    "bad-number": Row('"many" workers', _bad_number),
    "bad-port": Row("port 99999", _bad_port),
    "bad-logs": Row("a log directory that is a file", _bad_logs),
    "variable": Row("`PET_NPROC_PER_NODE=3`", _variable),
    "file": Row("a configuration file asks for 3 workers", _file),
    "training": Row("an option for training with bfloat16: the program gets", _training),
    "child": Row("each of 2 workers leaves a child behind, success", _child),
    "daemon": Row("... a daemon with a session of its own", _daemon),
    "killed": Row("SIGKILL of the launcher, workers that end by SIGTERM", _killed_polite),
    "killed-stubborn": Row("... workers that ignore SIGTERM", _killed_stubborn),
    "temporary": Row("files and directories in `$TMPDIR` after a success", _temporary),
    "term": Row("SIGTERM to the launcher", _terminated),
    "interrupt": Row("Ctrl-C", _interrupted, varies=True),
    "hangup": Row("SIGHUP to the launcher", _hung_up),
    "user-signal": Row("SIGUSR1 to the launcher", _user_signal),
    "stubborn": Row("SIGTERM, workers ignore it, by default", _stubborn_default, varies=True),
    "stubborn-limit": Row("... with a limit of 2 s", _stubborn_limit, varies=True),
    "twice": Row("... a second SIGTERM", _twice, varies=True),
    "stubborn-other": Row(
        "a worker fails, the other ignores SIGTERM, limit of 2 s", _stubborn_other, varies=True
    ),
    "whom": Row("whom SIGTERM reaches, where workers have children", _whom),
    "restart": Row("a worker fails once, 1 restart", _restarted),
    "exhausted": Row("a worker always fails with 9, 2 restarts", _exhausted),
    "kept": Row("restart of the failed worker alone: the other", _kept),
    "succeeded": Row("a worker has succeeded before the other fails, 1 restart", _succeeded_before),
    "attempts": Row("log files of both attempts of 2 workers", _attempts_apart),
    "back": Row(
        "time from a failure to the restart of 2 workers, median of 3",
        _back_plain,
        alone=True,
        varies=True,
    ),
    "back-handled": Row(
        "... where the other worker handles SIGTERM", _back_handled, alone=True, varies=True
    ),
    "prefix": Row("a line on the console", _prefix),
    "partial": Row("2 workers write a line each in two parts, at once", _partial_lines),
    "bytes": Row("a byte that is not UTF-8", _bytes),
    "bar": Row("a progress bar: 3 states of one line", _progress_bar),
    "last-words": Row("the last line of both streams before SIGKILL", _last_words),
    "files": Row("log files of 2 streams of 2 workers", _files),
    "shown": Row("the output of rank 1 only on the console", _one_shown),
    "stdin": Row("what rank 0 reads from the launcher's standard input", _stdin),
    "latency": Row(
        "time of a line through the launcher into a file", _latency, alone=True, varies=True
    ),
    "unbuffered": Row(
        "... with `PYTHONUNBUFFERED=1` for the launcher",
        _latency_unbuffered,
        alone=True,
        varies=True,
    ),
    "volume": Row("40 MB of lines through the launcher", _volume, alone=True, varies=True),
    "heartbeats": Row("heartbeats stop, limit of 2 s", _heartbeats, varies=True),
    "learnt": Row("... with a limit that the launcher learns", _learnt, varies=True),
    "section": Row("a section of the program hangs, limit of 2 s", _section, varies=True),
    "where": Row("... what the output and log files say of the place", _where),
    "node-failure": Row(
        "a worker of the second node exits with 5, the others wait", _failure_of_node
    ),
    "missing": Row(
        "the second of 2 nodes is missing, limit of 3 s: from the start", _missing_node, varies=True
    ),
    "unequal": Row("nodes with 1 and 2 workers", _unequal_nodes),
    "joined": Row("a second node joins a job of 1 to 2", _joined, alone=True, varies=True),
    "lost": Row("the second of 1 to 2 nodes is lost", _second_lost, varies=True),
    "first-lost": Row(
        "the first of 1 to 2 nodes is lost, with the store", _first_lost, varies=True
    ),
    "two-jobs": Row("two jobs at once, with the default port", _two_jobs, alone=True),
    "port-in-use": Row("the given port is in use", _port_in_use),
    "status": Row("a command that shows the state of a running job has", _status),
    "dump": Row("a command that shows where workers are has", _dump, needs="py-spy"),
    "events": Row("events as lines of JSON, of a success", _events, varies=True),
    "start": Row("time until 2 workers run, median of 5", _start, alone=True, varies=True),
    "many": Row("time until 64 workers run", _many, alone=True, varies=True),
    "noticed": Row(
        "time from a failure to the other's SIGTERM, median of 3",
        _noticed,
        alone=True,
        varies=True,
    ),
    "end": Row(
        "time from the last end of a worker to the launcher's, median of 3",
        _end_time,
        alone=True,
        varies=True,
    ),
    "memory": Row(
        "memory of the launcher: with 2 workers, for each further one",
        _memory,
        alone=True,
        varies=True,
    ),
    "idle": Row(
        "processor time of the launcher per second of waiting", _idle, alone=True, varies=True
    ),
}
LAUNCHERS = Family("Launchers", _ROWS, LAUNCHER_PEERS)
