"""Recorded terminal sessions, in the format of asciinema (v2): made, and shown on the site.

`python -m docs.site.casts [NAME...]` records the sessions anew: the commands run for real, on a
pseudo-terminal.  The site shows each as a sequence of screens, which `cast.js` plays; without
scripts it shows the last one.  `asciinema play FILE` plays a file in a terminal.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from docs.site.names import ROOT

CASTS = ROOT / "docs/recordings"
WIDTH, HEIGHT = 110, 30
_TYPED_S = 0.6
"""Seconds for which a command is shown before it runs."""

Frame = tuple[float, str]
"""Seconds from the start, and the output."""


@dataclass(frozen=True)
class Command:
    """A command of a session; `keys` are sent to it after so many seconds."""

    line: str
    is_shown: bool = True
    keys: tuple[float, bytes] | None = None


JOB = "aio-elastic run --rdzv-id my-run --nproc-per-node 4 train.py"
SESSIONS: dict[str, list[Command]] = {
    "first-job": [
        Command("aio-elastic run --nproc-per-node 4 --max-restarts 1 --tee 3 examples/hello.py")
    ],
    "top": [
        Command(f"{JOB} >/dev/null 2>&1 &", is_shown=False),
        Command("until aio-elastic status my-run 2>/dev/null | grep -q 600; do sleep 0.1; done",
                is_shown=False),
        Command("aio-elastic top", keys=(4.5, b"\x03")),
        Command("aio-elastic stop my-run >/dev/null", is_shown=False),
    ],
    "dump": [
        Command(f"{JOB} >/dev/null 2>&1 &", is_shown=False),
        Command("until aio-elastic status my-run 2>/dev/null | grep -q 600; do sleep 0.1; done",
                is_shown=False),
        Command("aio-elastic dump my-run"),
        Command("aio-elastic stop my-run >/dev/null", is_shown=False),
    ],
}  # fmt: skip
TRAIN = """\
import os
import time

from elastic_aio.worker import progress, ready


def load_batch(step: int) -> None:
    time.sleep(0.1)


def all_reduce(step: int) -> None:
    time.sleep(0.1)


ready("data loaded")
for step in range(600):
    progress(step, total=600)
    load_batch(step) if os.environ["RANK"] == "3" else all_reduce(step)
"""


def record(name: str) -> list[Frame]:
    """Run the commands of a session; return what they write to the terminal, and when."""
    with tempfile.TemporaryDirectory(prefix="cast-") as directory:
        place = Path(directory)
        (place / "bin").mkdir()
        (place / "control").mkdir(mode=0o700)
        program = place / "bin/aio-elastic"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m elastic_aio "$@"\n')
        program.chmod(0o755)
        (place / "train.py").write_text(TRAIN)
        shutil.copytree(ROOT / "examples", place / "examples")
        env = {
            **os.environ,
            "PATH": f"{place}/bin:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TERM": "xterm-256color",
            "XDG_STATE_HOME": str(place),
            "ELASTIC_AIO_CONTROL_DIR": str(place / "control"),
            "TMPDIR": str(place),
            "OMP_NUM_THREADS": "1",
        }
        frames: list[Frame] = []
        at = 0.0
        for command in SESSIONS[name]:
            if not command.is_shown:
                # Beside the terminal, whose end would end a job in the background.
                words = ["bash", "-c", command.line]
                subprocess.run(words, env=env, cwd=directory, stdin=subprocess.DEVNULL, timeout=60)
                continue
            frames.append((at, f"$ {command.line}\r\n"))
            at += _TYPED_S
            for seconds, output in _run(command, env, directory):
                frames.append((at + seconds, _cleaned(output, directory)))
            at = frames[-1][0]
    return frames


def _run(command: Command, env: dict[str, str], directory: str) -> Iterator[Frame]:
    """Run one command on a pseudo-terminal, to its end; yield its output."""
    begin = time.monotonic()
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(directory)
        os.execvpe("bash", ["bash", "-c", command.line], env)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    keys = command.keys
    try:
        while True:
            left = keys and begin + keys[0] - time.monotonic()
            if keys and not select.select([terminal], [], [], max(left or 0.0, 0.0))[0]:
                os.write(terminal, keys[1])
                keys = None
                continue
            try:
                output = os.read(terminal, 1 << 16)
            except OSError:  # EIO: no process has the terminal open
                break
            if not output:
                break
            yield time.monotonic() - begin, output.decode(errors="replace")
    finally:
        os.close(terminal)
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            os.kill(pid, signal.SIGHUP)
            os.waitpid(pid, 0)


def _cleaned(output: str, directory: str) -> str:
    """Return an output without the places of the recording."""
    output = output.replace(f"{directory}/", "/tmp/").replace(directory, "/tmp")
    output = output.replace(sys.executable, "python3")
    return output.replace(str(ROOT), "/work").replace(os.uname().nodename, "host0")


def write_cast(name: str, frames: list[Frame]) -> None:
    head = {"version": 2, "width": WIDTH, "height": HEIGHT, "title": name}
    lines = [json.dumps(head), *(json.dumps([round(at, 3), "o", text]) for at, text in frames)]
    CASTS.mkdir(exist_ok=True)
    (CASTS / f"{name}.cast").write_text("\n".join(lines) + "\n")


def read_cast(path: Path) -> list[Frame]:
    """Return the frames of a file; ValueError if it is not of version 2."""
    head, *lines = path.read_text().splitlines()
    if json.loads(head)["version"] != 2:
        raise ValueError(f"{path.name}: version 2 is expected")
    return [(at, text) for at, kind, text in map(json.loads, lines) if kind == "o"]


# ------------------------------------------------------------------ screens

_ESCAPE = re.compile(r"\x1b(?:\[([?\d;]*)([A-Za-z])|\][^\x07]*\x07|[=>()].?)")
_COLORS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


class Screen:
    """What a terminal shows that nothing scrolls away from: the rows, each of styled cells."""

    def __init__(self) -> None:
        self._rows: list[list[tuple[str, str]]] = [[]]
        self._y = self._x = 0
        self._style: frozenset[str] = frozenset()

    def write(self, text: str) -> None:
        """Show an output: text, line ends, movements, colors."""
        end = 0
        for match in _ESCAPE.finditer(text):
            self._put(text[end : match.start()])
            if match[2]:
                self._control(match[1], match[2])
            end = match.end()
        self._put(text[end:])

    def _put(self, text: str) -> None:
        for character in text:
            if character == "\n":
                self._y += 1
            elif character == "\r":
                self._x = 0
            elif character == "\b":
                self._x = max(self._x - 1, 0)
            elif character >= " ":
                row = self._row()
                row += [(" ", "")] * (self._x + 1 - len(row))
                row[self._x] = (character, " ".join(sorted(self._style)))
                self._x += 1

    def _row(self) -> list[tuple[str, str]]:
        while len(self._rows) <= self._y:
            self._rows.append([])
        return self._rows[self._y]

    def _control(self, arguments: str, kind: str) -> None:
        numbers = [int(part) for part in arguments.split(";") if part.isdigit()]
        first = numbers[0] if numbers else 0
        match kind:
            case "A":
                self._y = max(self._y - (first or 1), 0)
            case "B":
                self._y += first or 1
            case "C":
                self._x += first or 1
            case "G":
                self._x = max(first - 1, 0)
            case "K":
                row = self._row()
                del row[0 if first == 2 else self._x :]
            case "J":
                del self._row()[self._x :]
                del self._rows[self._y + 1 :]
            case "m":
                self._style = self._styled(numbers or [0])

    def _styled(self, numbers: list[int]) -> frozenset[str]:
        style = set(self._style)
        for number in numbers:
            if number in (0, 39):
                style = set() if number == 0 else {name for name in style if name[:2] != "c-"}
            elif number in (1, 2):
                style.add("bold" if number == 1 else "dim")
            elif number == 22:
                style -= {"bold", "dim"}
            elif 30 <= number % 60 <= 37 and number < 98:
                style = {name for name in style if name[:2] != "c-"}
                style.add(f"c-{_COLORS[number % 10]}")
        return frozenset(style)

    def lines(self) -> list[str]:
        """Return the text of all rows."""
        return ["".join(cell for cell, _ in row).rstrip() for row in self._rows]

    def html(self) -> str:
        """Return the rows with their styles as classes."""
        found = []
        for row in self._rows:
            text, last = "", ""
            for cell, style in row:
                if style != last:
                    text += ("</span>" if last else "") + (f'<span class="{style}">' * bool(style))
                    last = style
                text += escape(cell, quote=False)
            found.append(text + ("</span>" if last else ""))
        return "\n".join(found).rstrip()


def screens(frames: list[Frame]) -> list[tuple[float, str]]:
    """Return the screen after each moment at which it changes, as HTML."""
    screen = Screen()
    found: list[tuple[float, str]] = []
    for at, text in frames:
        screen.write(text)
        if found and at - found[-1][0] < 0.02:
            found[-1] = (found[-1][0], screen.html())
        elif not found or screen.html() != found[-1][1]:
            found.append((round(at, 3), screen.html()))
    return found


def player(name: str) -> str:
    """Return the HTML that plays a recording, and shows its last screen until then."""
    shown = screens(read_cast(CASTS / f"{name}.cast"))
    data = json.dumps(shown).replace("</", "<\\/")
    return (
        f'<div class="cast"><pre>{shown[-1][1]}</pre>'
        f'<script type="application/json">{data}</script></div>'
    )


if __name__ == "__main__":
    for each in sys.argv[1:] or SESSIONS:
        write_cast(each, record(each))
