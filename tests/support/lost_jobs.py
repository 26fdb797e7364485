"""What happens to lost jobs, in a pid namespace that has no other jobs: `python -m ... SCENARIO`.

`aio-elastic gc --host` ends the lost jobs of a whole host, so the tests give it a host of its own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from elastic_aio.process import proc
from tests.support.children import until_sync
from tests.support.cli import CLI, Ended, run_program

NOTES = Path(os.environ.get("NOTES", "/nonexistent"))
MARKER = "ELASTIC_AIO_JOB_" + "ab" * 16
# A worker that writes its pid, and its rank at SIGTERM; with a daemon, a child that has neither its
# session nor its environment, and one that has lost its parent and its environment.
WORKER = """
setsid bash -c 'echo $$ > $NOTES/$NAME.daemon; exec sleep 99' &
setsid env -i NOTES=$NOTES NAME=$NAME bash -c 'echo $$ > $NOTES/$NAME.bare; exec sleep 99' &
(env -i NOTES=$NOTES NAME=$NAME bash -c 'echo $$ > $NOTES/$NAME.session; exec sleep 99' &)
for kind in daemon bare session; do until [ -s $NOTES/$NAME.$kind ]; do sleep 0.01; done; done
trap 'echo $RANK >> $NOTES/$NAME.saved; exit' TERM
echo $$ > $NOTES/$NAME.worker; sleep 99 & wait
"""
Job = subprocess.Popen[bytes]


def start(name: str, script: str = WORKER, *, end: str = "", **env: str) -> Job:
    """Start a job whose run id is its name and `end`; return when its worker runs."""
    words = ["run", "--rdzv-id", name + end, "--no-python", "bash", "-c", script]
    settings = {**os.environ, "NAME": name, **env}
    job = subprocess.Popen([*CLI, *words], env=settings, stderr=subprocess.DEVNULL)
    pid_of(f"{name}.worker")
    return job


def pid_of(note: str) -> int:
    path = NOTES / note
    return until_sync(lambda: int(path.read_text() or 0) if path.exists() else 0, note)


def lose(job: Job, number: int = signal.SIGKILL) -> None:
    """Kill the launcher and its guardian, or send the guardian another signal."""
    job.send_signal(signal.SIGSTOP)  # it starts no other guardian
    lose_by_pid(job.pid, number)
    job.wait()


def lose_by_pid(launcher: int, number: int = signal.SIGKILL) -> None:
    (guardian,) = [
        pid
        for pid in proc.list_children(launcher)
        if b"guardian_main.py" in (proc.read(pid, "cmdline") or b"")
    ]
    os.kill(guardian, number)
    os.kill(launcher, signal.SIGKILL)


def runs(pid: int) -> bool:
    process = proc.read_process(pid)
    return process is not None and not process.is_dead


def collect(*words: str) -> Ended:
    return run_program([*CLI, "gc", "--host", *words])


def orphan(
    env: Mapping[str, str], *, uid: int = 0, parent_lives: bool = False, is_service: bool = False
) -> int:
    """Start a process with this environment whose parent has ended, and return its pid."""
    read, write = os.pipe()
    if (first := os.fork()) == 0:
        if (second := os.fork()) == 0:
            os.setsid()
            os.setuid(uid)
            own = {"SYSTEMD_EXEC_PID": str(os.getpid())} if is_service else {}
            os.execve("/bin/sleep", ["sleep", "99"], {**own, **env})
        os.write(write, b"%d\n" % second)
        if parent_lives:
            time.sleep(99)
        os._exit(0)
    if not parent_lives:
        os.waitpid(first, 0)
    pid = int(os.read(read, 32))
    os.close(read)
    os.close(write)
    until_sync(lambda: proc.read(pid, "cmdline") == b"sleep\x0099\0")
    return pid


def gone_pid() -> int:
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


def marked(launcher: object = None, namespace: str | None = None) -> dict[str, str]:
    """Return the environment of a process whose launcher has ended, unless it is given."""
    pid = gone_pid() if launcher is None else launcher
    value = f"{pid}@{proc.pid_namespace() if namespace is None else namespace}"
    return {MARKER: value, "TORCHELASTIC_RUN_ID": "crafted"}


def nothing_is_found() -> None:
    ended = collect("--shutdown-timeout", "0")
    assert (ended.code, ended.out, ended.err) == (0, "nothing to remove\n", "")


# ------------------------------------------------------------------------------ scenarios


def all_of_it_ends() -> None:
    """Workers, daemons, and children without session and environment; files too."""
    sockets, temporary = NOTES / "sockets", NOTES / "temporary"
    for directory in (sockets, temporary):
        directory.mkdir(mode=0o700)
    os.environ["ELASTIC_AIO_CONTROL_DIR"] = str(sockets)
    env = {"TMPDIR": str(temporary), "TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
    lose(start("first", **env))
    lose(start("second", end="\n\x1b[31m", **env))
    kinds = ("worker", "daemon", "bare", "session")
    pids = {pid_of(f"{name}.{kind}") for name in ("first", "second") for kind in kinds}
    assert len(list(temporary.iterdir())) == 4  # two directories, two pipes
    would = collect("--dry-run", "--json")
    jobs = [json.loads(line) for line in would.out.splitlines()]
    assert [job["run_id"] for job in jobs] == ["first", "second\n\x1b[31m"]
    assert pids <= {pid for job in jobs for pid in job["pids"]}
    assert all(map(runs, pids))
    ended = collect()
    assert (ended.code, ended.err) == (0, "")
    first, second = ended.out.splitlines()
    assert re.fullmatch(r"ended first: 5 processes \(pid [\d, ]+\), begun \d+ seconds? ago", first)
    assert second.startswith("ended second [31m: 5 processes")
    assert not any(map(runs, pids))
    assert (NOTES / "first.saved").exists()
    assert not [*temporary.iterdir(), *sockets.iterdir()]
    nothing_is_found()


def a_process_that_ignores_the_signal_is_killed() -> None:
    ignoring = "trap '' TERM; echo $$ > $NOTES/$NAME.worker; while :; do sleep 99; done"
    launcher = start("deaf", ignoring)
    launcher.send_signal(signal.SIGSTOP)
    lose_by_pid(launcher.pid)  # which stays a zombie
    assert collect("--shutdown-timeout", "0.2").out.startswith("ended deaf: 2 processes")
    assert not runs(pid_of("deaf.worker"))


def live_jobs_are_spared() -> None:
    """One that runs, one whose launcher is suspended, one without a socket, and one in its end."""
    plain = start("plain")
    suspended = start("suspended")
    suspended.send_signal(signal.SIGSTOP)
    for path in Path(os.environ["ELASTIC_AIO_CONTROL_DIR"]).iterdir():
        path.unlink()
    guarded = start("guarded")
    lose(guarded, signal.SIGSTOP)
    nothing_is_found()
    assert all(runs(pid_of(f"{name}.worker")) for name in ("plain", "suspended", "guarded"))
    assert plain.poll() is suspended.poll() is None


def a_lost_job_in_a_live_job_is_its_part() -> None:
    outer = start("outer", nested("echo $$ > $NOTES/outer.worker; sleep 99"))
    lose_by_pid(pid_of("inner.launcher"))
    until_sync(lambda: not runs(pid_of("inner.launcher")))
    nothing_is_found()
    assert runs(pid_of("inner.worker"))
    assert outer.poll() is None


def a_live_job_in_a_lost_job_is_spared() -> None:
    """With what it has started outside of its workers; the rest of the lost job ends."""
    outer = start("outer", nested("echo $$ > $NOTES/outer.worker; sleep 99"))
    inner = pid_of("inner.launcher")
    lose(outer)
    ended = collect()
    assert ended.out.startswith("ended outer: ")
    assert not runs(pid_of("outer.worker"))
    assert all(runs(pid) for pid in (inner, *map(pid_of, ("inner.worker", "inner.bare"))))


def nested(then: str) -> str:
    """Return a worker that starts another job and runs `then` beside it."""
    job = f"NAME=inner {sys.executable} -m elastic_aio run --rdzv-id inner --no-python"
    return f"""
{job} bash -c "$INNER" 2> /dev/null & echo $! > $NOTES/inner.launcher
until [ -s $NOTES/inner.worker ]; do sleep 0.01; done
{then}
"""


def other_namespaces_are_spared() -> None:
    """A container's job, lost or not; its pids mean other processes here."""
    container = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    script = [*CLI, "run", "--rdzv-id", "inside", "--no-python", "bash", "-c", WORKER]
    env = {**os.environ, "NAME": "inside"}
    inside = subprocess.Popen([*container, *script], env=env, stderr=subprocess.DEVNULL)
    until_sync((NOTES / "inside.worker").exists)
    crafted = orphan(marked(namespace="pid:[1]"))
    former = orphan({MARKER: "1"})
    here = proc.pid_namespace()
    values = ("", "@", "x@", "1@", f"@{here}", f"x@{here}", f"-1@{here}", f"{'9' * 5000}@{here}")
    broken = [orphan({MARKER: value}) for value in values]
    nothing_is_found()
    assert all(map(runs, [crafted, former, *broken]))
    assert inside.poll() is None
    foreign = run_program(["unshare", "--pid", "--fork", "--kill-child", *CLI, "gc", "--host"])
    assert foreign.code == 1
    assert "/proc shows another pid namespace" in foreign.err


def a_process_counts_by_its_parent_and_user() -> None:
    """A scheduler hands its clients' environment to what it starts, and systemd may."""
    scheduled = orphan(marked(), parent_lives=True)
    strange = orphan(marked(), uid=65534)
    service = orphan(marked(), is_service=True)
    quoting = orphan({"LAST_COMMAND": f"env {MARKER}=1 sleep"})
    nothing_is_found()
    assert all(map(runs, (scheduled, strange, service, quoting)))
    # Of a launcher that was a service.
    lost = orphan({**marked(), "SYSTEMD_EXEC_PID": str(gone_pid())})
    os.kill(lost, signal.SIGSTOP)
    assert collect().out.startswith("ended crafted: 1 process ")
    assert all(map(runs, (scheduled, strange, service)))
    assert not runs(lost)


def what_the_command_runs_in_is_spared() -> None:
    """It may be typed in a shell that a lost job has left, beside others of its workers."""
    job = start("shell", f"(setsid sleep 99 & echo $! > $NOTES/beside); {TYPING}")
    lose(job)
    (NOTES / "now").touch()
    until_sync((NOTES / "done").exists)
    assert (NOTES / "printed").read_text().startswith("ended shell: 1 process ")
    assert not runs(pid_of("beside"))
    assert runs(pid_of("shell.worker"))


TYPING = f"""
echo $$ > $NOTES/shell.worker
until [ -e $NOTES/now ]; do sleep 0.01; done
{sys.executable} -m elastic_aio gc --host 2>&1 | cat > $NOTES/printed
touch $NOTES/done; sleep 99
"""


def a_pid_that_is_used_again_is_no_launcher() -> None:
    """Of a process that is younger than the worker; an older one may be the launcher."""
    older = subprocess.Popen(["sleep", "99"])
    time.sleep(0.03)  # the kernel counts in ticks of 10 ms
    live = orphan(marked(older.pid))
    nothing_is_found()
    future = gone_pid() + 40
    lost = orphan({name.replace("ab", "cd"): value for name, value in marked(future).items()})
    time.sleep(0.03)
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(future - 1))
    younger = subprocess.Popen(["sleep", "99"])
    assert younger.pid == future
    assert collect().out.startswith("ended crafted: 1 process ")
    assert [runs(live), runs(lost), runs(younger.pid)] == [True, False, True]


def the_next_launcher_names_it() -> None:
    """Once for each lost job, after its own workers have started."""
    lose(start("lost"))
    words = ["run", "--rdzv-id", "next", "--max-restarts", "1", "--no-python", "bash", "-c"]
    events = NOTES / "events"
    job = ["until grep -q LostJobFound $NOTES/events; do sleep 0.02; done; sleep 1.5; exit 1"]
    ended = run_program([*CLI, "run", "--events", str(events), *words[1:], *job])
    (line,) = [line for line in ended.errors if "aio-elastic gc --host" in line]
    assert "of run lost, whose launcher was killed, still run on this host (pid " in line
    kinds = [json.loads(text)["event"] for text in events.read_text().splitlines()]
    assert kinds.index("WorkerStarted") < kinds.index("LostJobFound")
    assert kinds.count("LostJobFound") == 1


SCENARIOS: Sequence[Callable[[], None]] = (
    all_of_it_ends,
    a_process_that_ignores_the_signal_is_killed,
    live_jobs_are_spared,
    a_lost_job_in_a_live_job_is_its_part,
    a_live_job_in_a_lost_job_is_spared,
    other_namespaces_are_spared,
    a_process_counts_by_its_parent_and_user,
    what_the_command_runs_in_is_spared,
    a_pid_that_is_used_again_is_no_launcher,
    the_next_launcher_names_it,
)


def main(name: str) -> None:
    os.environ.setdefault("ELASTIC_AIO_CONTROL_DIR", tempfile.mkdtemp(dir=NOTES))
    os.environ["INNER"] = WORKER
    {each.__name__: each for each in SCENARIOS}[name]()


if __name__ == "__main__":
    main(sys.argv[1])
