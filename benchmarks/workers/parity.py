"""A worker of `benchmarks.jobs`: it does what its arguments say, one after the other.

An argument is `action` or `action=value`; `1:exit=3` is for rank 1 only.  Lines of output
begin with "W ", so that a launcher's can be left out.  Notes are files in the directory
`$PARITY_NOTES`: the name is what it says, and the content the time in monotonic nanoseconds.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time

RANK = os.environ.get("RANK", "?")
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
NOTES = os.environ["PARITY_NOTES"]
VARIABLE = re.compile(
    r"(TORCH|ACCELERATE_|OMP_|CUDA_|USER_|MASTER_|RANK$|ROLE_|GROUP_|LOCAL_|WORLD_SIZE$)[A-Z_]*"
)
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


def note(text: str) -> None:
    """Write a note of this rank."""
    path = os.path.join(NOTES, f"{RANK} {text}")
    with open(f"{path}.", "w", encoding="ascii") as file:
        file.write(str(time.monotonic_ns()))
    os.rename(f"{path}.", path)  # so that who sees it finds the time in it


def note_environment() -> None:
    """Write the variables that matter to a worker."""
    found = {name: value for name, value in os.environ.items() if VARIABLE.match(name)}
    with open(os.path.join(NOTES, f"env.{RANK}"), "w", encoding="utf-8") as file:
        json.dump(found, file)


def hold(ending: str, who: str = "") -> None:
    """Wait for signals: "die" by them or "ignore" them.

    After a stop signal "return", with a delay in "slow", and with an error in "fail".
    """

    def receive(number: int, _frame: object) -> None:
        name = signal.Signals(number).name
        note(f"{who}got {name}")
        if ending != "ignore" and not name.startswith("SIGUSR"):
            time.sleep(0.5 if ending == "slow" else 0)
            sys.exit(5 if ending == "fail" else 0)

    if ending != "die":
        for name in SIGNALS:
            signal.signal(getattr(signal, name), receive)
    note(f"{who}ready")
    while True:
        signal.pause()


def fork() -> None:
    """Fork a child that notes what it receives; wait until it is ready to."""
    if not os.fork():
        hold("return", "child ")
    wait(f"{RANK} child ready")


def wait(name: str) -> None:
    """Wait for a note of this name."""
    while name not in os.listdir(NOTES):
        time.sleep(0.005)


def runs(pid: int) -> bool:
    """Tell whether a process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def together() -> None:
    """Fail as soon as another worker is gone, as a collective operation does."""
    pids: dict[str, int] = {}
    while len(pids) < WORLD:
        found = [name.split() for name in os.listdir(NOTES) if " started " in name]
        alive = [words for words in found if words[-1].isdigit() and runs(int(words[-1]))]
        pids = {words[0]: int(words[-1]) for words in alive if int(words[0]) < WORLD}
        time.sleep(0.02)
    while all(map(runs, pids.values())):
        time.sleep(0.02)
    sys.exit(1)


KEPT: list[object] = []
"""Clients, whose connections to the launcher last as long as they do."""


def beat(how: str, seconds: float) -> None:
    """Send heartbeats to the launcher for some time: by "notify", by "ft", or "learn" a limit."""
    if how == "notify":
        from elastic_aio.worker import heartbeat as send
    else:
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

        client = RankMonitorClient()
        KEPT.append(client)
        client.init_workload_monitoring()
        send = client.send_heartbeat
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        send()
        time.sleep(0.2)
    if how == "learn":
        import torch.distributed

        torch.distributed.init_process_group("gloo")
        client.calculate_and_set_hb_timeouts()
        send()
    note("last")


def section(how: str, seconds: float) -> None:
    """Begin a section that may take so long, by "notify", by "ft" or a "timer"; hang in it."""
    note("section")
    if how == "notify":
        from elastic_aio.worker import phase

        with phase("load", timeout=seconds):
            hang_here()
    elif how == "ft":
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

        client = RankMonitorClient()
        client.init_workload_monitoring()
        note("section")
        client.start_section("load")
        hang_here()
    else:
        from torch.distributed.elastic import timer

        timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
        note("section")
        with timer.expires(after=seconds):
            hang_here()


def hang_here() -> None:
    """Wait for nothing, in a function with a name."""
    while True:
        time.sleep(60)


def write_lines(number: int) -> None:
    """Write numbered lines of 100 bytes in the blocks of a pipe."""
    note("writing")
    for first in range(0, number, 1000):
        block = "".join(
            f"W {RANK} {n:8} {'x' * 86:.{86 - len(RANK)}}.\n" for n in range(first, first + 1000)
        )
        sys.stdout.write(block)
    sys.stdout.flush()


def tick(seconds: float) -> None:
    """Write the time every 50 milliseconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        print("W", time.monotonic_ns(), flush=True)
        time.sleep(0.05)


def meet() -> None:
    """Wait until all workers of this attempt have started."""
    while sum(f" started {ATTEMPT} " in name for name in os.listdir(NOTES)) < WORLD:
        time.sleep(0.01)


def main(words: list[str]) -> None:
    """Do what the words say."""
    note(f"started {ATTEMPT} {os.getpid()}")
    for index, word in enumerate(words):
        match = re.match(r"(?:(\d+):)?(\w+)=?(.*)", word, re.DOTALL)
        assert match, word
        rank, action, value = match.groups()
        if rank not in (None, RANK):
            continue
        if action == "args":
            print("W args", words[index + 1 :])
            return
        if action == "env":
            note_environment()
        elif action == "out":
            print("W", value, flush=True)
        elif action == "err":
            print("W", value, file=sys.stderr, flush=True)
        elif action == "hex":
            os.write(1, bytes.fromhex(value))
        elif action == "note":
            note(value)
        elif action == "meet":
            meet()
        elif action == "nap":
            time.sleep(float(value))
        elif action == "exit":
            sys.exit(int(value) if value else None)
        elif action == "raise":
            raise ValueError(value)
        elif action == "kill":
            os.kill(os.getpid(), getattr(signal, value))
        elif action == "fail":  # in the first attempts
            if int(value) > ATTEMPT:
                note("failing")
                sys.exit(9)
        elif action == "error":
            with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w", encoding="utf-8") as file:
                file.write(value)
        elif action == "stdin":
            print("W stdin", repr(sys.stdin.read()))
        elif action == "session":
            print("W session", os.getsid(0) == os.getpgid(0) == os.getpid())
        elif action == "daemon":
            subprocess.Popen(["sleep", "60"], start_new_session=value == "session")
        elif action == "fork":
            fork()
        elif action == "wait":
            wait(f"- {value}")
        elif action == "world":
            note(f"world {WORLD}")
        elif action == "together":
            together()
        elif action == "first":  # what follows is for the first attempt only
            if ATTEMPT:
                return
        elif action == "beat":
            how, _, seconds = value.partition(",")
            beat(how, float(seconds))
        elif action == "section":
            how, _, seconds = value.partition(",")
            section(how, float(seconds))
        elif action == "hang":
            hang_here()
        elif action == "lines":
            write_lines(int(value))
        elif action == "tick":
            tick(float(value))
        elif action == "hold":
            hold(value or "die")
        else:
            raise ValueError(word)


if __name__ == "__main__":
    main(sys.argv[1:])
