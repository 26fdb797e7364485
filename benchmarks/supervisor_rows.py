"""Small behaviours of supervisors, each observed of one peer."""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.comparison import Family, Row
from benchmarks.launchers import environment_changes, wait_until
from benchmarks.peers import Lacks
from benchmarks.supervisor_peers import CHILD, SUPERVISOR_PEERS, Program, Setup, Supervisor
from benchmarks.trials import SETTLE_S, WAIT_S, Trial, memory_of
from tests.support.cli import environment
from tests.support.leaks import alive
from tests.support.sockets import free_port

__all__ = ["SUPERVISORS"]

_RELOAD_S = 8.0
"""Seconds for a reload of four servers."""
_RUNS_ON = f"runs on after {WAIT_S:.0f} s"


class Note(NamedTuple):
    """What happened to a child: see `workers/child.py`."""

    what: str
    name: str
    pid: int
    at: int


class Run(Trial):
    """A peer that runs a setup; a context manager.

    Args:
        peer: the supervisor.
        setup: what it runs.
    """

    def __init__(self, peer: Supervisor, setup: Setup) -> None:
        super().__init__("supervisors-")
        self._peer = peer
        self.process = self.start(peer.write(setup, self.directory))

    def notes(self, what: str, name: str = "") -> list[Note]:
        """Return the notes of a kind, of all children or of one program."""
        try:
            lines = (self.directory / "notes").read_text().splitlines()
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            kind, of, pid, at = line.split()
            if kind == what and name in ("", of):
                found.append(Note(kind, of, int(pid), int(at)))
        return found

    def pids(self, name: str = "") -> set[int]:
        """Return the children that run now."""
        return {note.pid for note in self.notes("start", name) if alive(note.pid)}

    def await_children(self, number: int, name: str = "", seconds: float = WAIT_S) -> set[int]:
        """Wait until so many children run; return them."""
        wait_until(lambda: len(self.pids(name)) == number, f"{number} children", seconds)
        return self.pids(name)

    def await_note(self, what: str, name: str = "", number: int = 1) -> None:
        """Wait for notes of children."""
        wait_until(lambda: len(self.notes(what, name)) >= number, what, WAIT_S)

    def pids_by_kind(self) -> tuple[list[int], list[int]]:
        """Return the processes of the supervisor, and those of the children."""
        found = self.processes()
        children = [pid for pid, command in found.items() if str(CHILD) in command]
        others = [pid for pid in found if pid not in children]
        return [self.process.pid, *others] if alive(self.process.pid) else others, children

    def ask(self, verb: str, *words: str) -> str:
        """Make a request; return the output of the command."""
        with suppress(Lacks):
            command = self._peer.control(self.directory, verb, *words)
            ended = subprocess.run(
                command,
                env=self.environment(),
                cwd=self.directory,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            return ended.stdout
        text = self._peer.say(self.directory, verb, *words)
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()
        time.sleep(0.5)
        return self.text("out")

    def reload(self) -> None:
        """Let it read its configuration anew."""
        if self._peer.reloads_by:
            self.process.send_signal(self._peer.reloads_by)
        else:
            self.ask("reload")

    def rewrite(self, setup: Setup) -> None:
        """Write another configuration in the place of the present one."""
        self._peer.write(setup, self.directory)

    def stop(self) -> str:
        """Stop it by SIGTERM; return its exit code, or that it does not end."""
        self.process.terminate()
        return self.code()

    def code(self, seconds: float = WAIT_S) -> str:
        """Wait for its end; return its exit code."""
        code = self.end(seconds=seconds)
        return _RUNS_ON if code is None else str(code)


def _one(*words: str, **settings: object) -> Setup:
    return Setup((Program("web", words),), **settings)  # type: ignore[arg-type]


def _eight() -> Setup:
    return Setup((Program("web", number=8),))


# ------------------------------------------------------------------- behaviours


def _killed(peer: Supervisor) -> str:
    with Run(peer, _eight()) as run:
        before = run.await_children(8)
        time.sleep(1.2)  # a second after its start supervisord takes a program as started
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: not alive(victim), "the end of a child", WAIT_S)
        try:
            after = run.await_children(8, seconds=5)
        except TimeoutError:
            time.sleep(SETTLE_S)
            after = run.pids()
            return f"{len(before & after)} of 7 unchanged, it is not restarted"
        return f"{len(before & after)} of 7 unchanged"


def _back(peer: Supervisor) -> str:
    times = []
    with Run(peer, _eight()) as run:
        run.await_children(8)
        time.sleep(1.2)
        for victim in [note.pid for note in run.notes("start")[:5]]:
            if not alive(victim):
                return "not restarted"
            count = len(run.notes("start"))
            began = time.monotonic_ns()
            os.kill(victim, signal.SIGKILL)
            try:
                wait_until(lambda n=count: len(run.notes("start")) > n, "restart", 10)  # type: ignore[misc]
            except TimeoutError:
                return "not restarted"
            times.append((run.notes("start")[-1].at - began) / 1e6)
            time.sleep(0.3)
    return f"{statistics.median(times):.0f} ms"


def _stubborn(peer: Supervisor) -> str:
    with Run(peer, _one("stubborn")) as run:
        run.await_note("start")
        time.sleep(1.2)
        began = time.monotonic()
        code = run.stop()
        took = time.monotonic() - began
        time.sleep(0.2)
        _, left = run.pids_by_kind()
        return f"{len(left)} of 2 left, after {took:.1f} s" if code != _RUNS_ON else code


def _daemon(peer: Supervisor) -> str:
    with Run(peer, _one("daemon")) as run:
        run.await_note("daemon")
        run.await_note("start")
        time.sleep(1.2)
        code = run.stop()
        time.sleep(0.2)
        _, left = run.pids_by_kind()
        return f"{len(left)} of 1 left" if code != _RUNS_ON else code


def _sigkill(peer: Supervisor) -> str:
    with Run(peer, _one("stubborn")) as run:
        run.await_note("start")
        time.sleep(1.2)
        run.process.kill()
        run.process.wait()
        time.sleep(SETTLE_S)
        _, left = run.pids_by_kind()
        return f"{len(left)} of 2 left"


def _sigkill_polite(peer: Supervisor) -> str:
    with Run(peer, _eight()) as run:
        run.await_children(8)
        run.process.kill()
        run.process.wait()
        time.sleep(SETTLE_S)
        _, left = run.pids_by_kind()
        return f"{len(left)} of 8 left"


def _pair(ready: str, port: int = 0) -> Setup:
    """Return two programs; the second is after the first, which is ready after half a second."""
    words = ("ready=0.5", "slow=0.3", *([f"http={port}"] if ready == "http" else []))
    first = Program("db", words, ready=ready, port=port)
    return Setup((first, Program("web", ("slow=0.3",), after="db")))


def _started_in_order(peer: Supervisor, ready: str) -> str:
    with Run(peer, _pair(ready, free_port())) as run:
        run.await_note("ready")
        run.await_note("start", "web")
        (ready_note,), (start,) = run.notes("ready"), run.notes("start", "web")
        when = "after" if start.at >= ready_note.at else "before"
        return f"{when} the first is ready"


def _ready_line(peer: Supervisor) -> str:
    return _started_in_order(peer, "line")


def _ready_http(peer: Supervisor) -> str:
    return _started_in_order(peer, "http")


def _order_alone(peer: Supervisor) -> str:
    return _started_in_order(peer, "")


def _stopped_in_order(peer: Supervisor) -> str:
    with Run(peer, _pair("")) as run:
        run.await_note("ready")
        run.await_note("start", "web")
        time.sleep(1.2)
        run.stop()
        ends, terms = run.notes("end", "web"), run.notes("term", "db")
        if not ends or not terms:
            return "without SIGTERM to each"
        return "one after the other" if terms[0].at >= ends[0].at else "at the same time"


def _limit(peer: Supervisor) -> str:
    with Run(peer, _one("exit=3", limit=2)) as run:
        wait_until(lambda: bool(run.notes("start")), "start", WAIT_S)
        code = run.code(12)
        starts = len(run.notes("start"))
        if code == _RUNS_ON:
            time.sleep(3)
            more = len(run.notes("start")) - starts
            return f"{starts} starts, runs on" + (", starts go on" if more else "")
        return f"{starts} starts, exit code {code}"


def _escalation(peer: Supervisor) -> str:
    first = Program("db")
    with Run(
        peer, Setup((first, Program("web", ("exit-after=0.3,3",))), limit=1, nested=True)
    ) as run:
        run.await_note("start", "db")
        code = run.code(12)
        starts = len(run.notes("start", "db"))
        return f"the other child: {starts} starts, exit code {code}"


def _chosen_code(peer: Supervisor) -> str:
    trainer = Program("web", ("exit-after=1.5,7",), restart=False)
    with Run(peer, Setup((Program("db"), trainer), ends_with="web")) as run:
        run.await_children(2)
        code = run.code()
        _, left = run.pids_by_kind()
        return f"exit code {code}, {len(left)} left"


def _scaled(peer: Supervisor) -> str:
    few = Setup((Program("web", number=4),))
    with Run(peer, few) as run:
        before = run.await_children(4)
        time.sleep(1.2)
        run.rewrite(Setup((Program("web", number=6),)))  # supervisord reads it; others do not
        run.ask("scale", "web", "4", "6")
        after = run.await_children(6)
        return f"{len(before & after)} of 4 unchanged"


def _status(peer: Supervisor) -> str:
    with Run(peer, _one()) as run:
        (pid,) = run.await_children(1)
        time.sleep(1.2)
        return "its pid" if str(pid) in run.ask("status", "web") else "no pid"


def _prefixed(peer: Supervisor) -> str:
    setup = Setup((Program("db", ("say=hello",)), Program("web", ("say=hello",))), console=True)
    with Run(peer, setup) as run:
        run.await_children(2)
        time.sleep(SETTLE_S)  # a supervisor may write what it has read later
        output = run.text("out") + run.text("err")
        lines = [line for line in output.splitlines() if line.endswith("hello")]
        named = [line for line in lines if "web" in line or "db" in line]
        if not lines:
            return "no output"
        return f"`{named[0].strip()}`" if len(named) == 2 else "without a name"


def _logged(peer: Supervisor) -> str:
    programs = (Program("db", ("say=from db",)), Program("web", ("say=from web",)))
    quiet = tuple(Program(each.name, (each.words[0].replace(" ", "-"),)) for each in programs)
    with Run(peer, Setup(quiet, logs=True)) as run:
        run.await_children(2)
        time.sleep(1.2)
        run.stop()
        files = [path for path in run.directory.rglob("*") if path.is_file()]
        texts = [
            path.read_text(errors="replace")
            for path in files
            if path.name not in ("out.0", "err.0")
        ]
        found = sum(text == f"from-{name}\n" for text in texts for name in ("db", "web"))
        return "a file for each" if found == 2 else f"{found} files of 2"


def _liveness(peer: Supervisor) -> str:
    port = free_port()
    web = Program("web", (f"http={port}", "ready=0.1"), ready="http", alive=True, port=port)
    with Run(peer, Setup((web,))) as run:
        (pid,) = run.await_children(1)
        time.sleep(1)
        os.kill(pid, signal.SIGUSR1)  # from now on it answers with 503
        run.await_note("start", "web", 2)
        return "restarted"


def _broken_file(peer: Supervisor) -> str:
    with tempfile.TemporaryDirectory(prefix="supervisors-") as name:
        try:
            ended = subprocess.run(
                peer.broken(Path(name)),
                env=environment(environment_changes()),
                cwd=name,
                capture_output=True,
                text=True,
                timeout=SETTLE_S * 2,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            said = ((late.stdout or b"") + (late.stderr or b"")).decode().strip()
            return f"it runs, {len(said.splitlines())} lines"
    lines = len((ended.stdout + ended.stderr).strip().splitlines())
    return f"exit code {ended.returncode}, {lines} line{'s' if lines != 1 else ''}"


def _hup(peer: Supervisor) -> str:
    """Observe what SIGHUP does to a child that the changed file leaves as it is, and a new one."""
    with Run(peer, _one()) as run:
        before = run.await_children(1)
        time.sleep(1.2)
        run.rewrite(Setup((Program("web"), Program("db"))))
        run.process.send_signal(signal.SIGHUP)
        time.sleep(2 * SETTLE_S)
        if run.process.poll() is not None:
            return f"ends, exit code {run.process.returncode}"
        kept = "kept" if before & run.pids("web") else "restarted"
        new = "started" if run.pids("db") else "not started"
        return f"the old child {kept}, a new one {new}"


# ---------------------------------------------------------------------- sockets


@dataclass
class _Answers:
    """What a client saw that connects without a pause."""

    versions: list[str]
    refused: int = 0
    broken: int = 0
    longest: float = 0.0

    def __str__(self) -> str:
        lost = f"{self.refused} refused, {self.broken} reset"
        return f"{lost}, longest wait {self.longest * 1000:.0f} ms"


@contextmanager
def _client(port: int) -> Iterator[_Answers]:
    """Connect again and again from a thread until the block ends."""
    answers, is_over = _Answers([]), threading.Event()

    def connect() -> None:
        while not is_over.is_set():
            began = time.monotonic()
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                    if text := connection.recv(100).decode():
                        answers.versions.append(text)
                    else:
                        answers.broken += 1
            except ConnectionRefusedError:
                answers.refused += 1
            except OSError:
                answers.broken += 1
            answers.longest = max(answers.longest, time.monotonic() - began)
            time.sleep(0.001)

    thread = threading.Thread(target=connect)
    thread.start()
    try:
        yield answers
    finally:
        is_over.set()
        thread.join()


def _servers(port: int, version: str, number: int = 4) -> Setup:
    words = ("ready=0.2",) if version != "broken" else ("exit=3",)
    return Setup((Program("web", words, number, serves=version, ready=""),), port=port)


def _socket_kept(peer: Supervisor) -> str:
    port = free_port()
    with Run(peer, _servers(port, "v1", 1)) as run:
        (pid,) = run.await_children(1)
        run.await_note("ready")
        time.sleep(1.2)
        with _client(port) as answers:
            time.sleep(0.2)
            os.kill(pid, signal.SIGTERM)  # the program ends by itself, between two connections
            run.await_note("ready", "web", 2)
            time.sleep(0.5)
        return str(answers)


def _reloaded(peer: Supervisor, version: str) -> tuple[_Answers, str]:
    port = free_port()
    with Run(peer, _servers(port, "v1")) as run:
        run.await_note("ready", "web", 4)
        time.sleep(1.2)
        with _client(port) as answers:
            time.sleep(0.2)
            run.rewrite(_servers(port, version))
            try:
                run.reload()
            except subprocess.TimeoutExpired:
                return answers, "nothing"
            time.sleep(_RELOAD_S)
            with suppress(TimeoutError):
                count = len(answers.versions)
                wait_until(lambda: len(answers.versions) > count + 20, "answers", 2)
            serves = {*answers.versions[count + 5 :]}
            if version == "broken":
                for pid in run.pids_by_kind()[0]:
                    os.kill(pid, signal.SIGKILL)  # so that the client does not wait for ever
                for pid in run.pids_by_kind()[1]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        return answers, ", ".join(sorted(serves)) or "nothing"


def _rolling(peer: Supervisor) -> str:
    answers, serves = _reloaded(peer, "v2")
    return f"{answers}; then {serves} serves"


def _broken_version(peer: Supervisor) -> str:
    _, serves = _reloaded(peer, "broken")
    return f"{serves} serves"


# ----------------------------------------------------------------------- memory


def _memory(peer: Supervisor) -> str:
    used = []
    for number in (8, 64):
        with Run(peer, Setup((Program("web", number=number),))) as run:
            run.await_children(number, seconds=60)
            time.sleep(1.5)
            used.append(memory_of(run.pids_by_kind()[0]))
    each = (used[1] - used[0]) / 56
    return f"{used[0] / 1024:.0f} MB, {each:.0f} kB"


_ROWS = {
    "kill": Row("1 of 8 workers is killed: the others", _killed),
    "back": Row("time until it runs again, median of 5 kills", _back, alone=True, varies=True),
    "stubborn": Row(
        "a child that forks and ignores SIGTERM, as its fork does: after a stop",
        _stubborn,
        varies=True,
    ),
    "daemon": Row("a daemon that a child has started: after a stop", _daemon),
    "sigkill": Row("SIGKILL of the supervisor: children that end by SIGTERM", _sigkill_polite),
    "sigkill-stubborn": Row("SIGKILL of the supervisor: a stubborn child and its fork", _sigkill),
    "order": Row("the second child of an order starts, without a probe", _order_alone),
    "ready-line": Row("... with a line of output as readiness", _ready_line),
    "ready-http": Row("... with an HTTP probe", _ready_http),
    "stop-order": Row("children in an order are stopped", _stopped_in_order),
    "limit": Row("a child that always fails, limit of 2 restarts", _limit),
    "escalation": Row("a group in a group, limit of 1 restart each", _escalation),
    "code": Row("a chosen child ends with 7", _chosen_code),
    "socket": Row(
        "the only server at a kept socket restarts", _socket_kept, alone=True, varies=True
    ),
    "reload": Row("a new version of 4 servers at a socket", _rolling, alone=True, varies=True),
    "broken": Row("a broken version of 4 servers at a socket", _broken_version),
    "scale": Row("from 4 to 6 workers: the old ones", _scaled),
    "hup": Row("SIGHUP, with a further child in the file", _hup),
    "liveness": Row("a child that answers its HTTP probe with 503", _liveness),
    "status": Row("a command that shows the state of a child", _status),
    "prefix": Row("a line of a child in the common output", _prefixed, varies=True),
    "logs": Row("a log file for each child", _logged),
    "config": Row("an error in the configuration", _broken_file),
    "memory": Row(
        "memory of the supervisor: with 8 children, for each further one",
        _memory,
        alone=True,
        varies=True,
    ),
}
SUPERVISORS = Family("Supervisors", _ROWS, SUPERVISOR_PEERS)
