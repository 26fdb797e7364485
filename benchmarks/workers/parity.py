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
    r"(TORCH|OMP_|CUDA_|USER_|MASTER_|RANK$|ROLE_|GROUP_|LOCAL_|WORLD_SIZE$)[A-Z_]*"
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


def hold(ending: str) -> None:
    """Wait for signals: "die" by them, "return" after a stop signal, "ignore" them all."""

    def receive(number: int, _frame: object) -> None:
        name = signal.Signals(number).name
        note(f"got {name}")
        if ending == "return" and not name.startswith("SIGUSR"):
            sys.exit(0)

    if ending != "die":
        for name in SIGNALS:
            signal.signal(getattr(signal, name), receive)
    note("ready")
    while True:
        signal.pause()


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
        elif action == "hold":
            hold(value or "die")
        else:
            raise ValueError(word)


if __name__ == "__main__":
    main(sys.argv[1:])
