"""Pictures of what the code says in tables: `python -m docs.site.pictures` writes docs/images.

The tables of the state machines are in the docstrings of their modules; stop plans and the way of
a line come from the values and functions of the package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from types import ModuleType

from docs.site.names import ROOT
from elastic_aio import LogSpec, StopPlan
from elastic_aio.agent import machine, multi_node, supervisor
from elastic_aio.agent.machine import AgentPhase
from elastic_aio.agent.supervisor import ChildPhase
from elastic_aio.logs.paths import CapturedStreams, StreamPlan, StreamTarget, plan_logs
from elastic_aio.outcome import signal_name
from elastic_aio.rendezvous import coordinator
from elastic_aio.rendezvous.state import CoordinatorPhase
from elastic_aio.spec.logs import Std

IMAGES = ROOT / "docs/images"
_STYLE = """\
text{font:12px ui-monospace,monospace;fill:#1b1f24}
.s{fill:#57606a;font-size:11px}.t{font-weight:bold}
.l{stroke:#57606a;fill:none}.g{stroke:#d0d7de;stroke-dasharray:2 4}
.b{fill:#ddf4ff;stroke:#0969da}.w{fill:#ffffff}
.p{fill:#fff8c5;stroke:#9a6700}.k{fill:#ffebe9;stroke:#cf222e}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#9198a1}.w{fill:#0d1117}
.l{stroke:#9198a1}.g{stroke:#3d444d}.b{fill:#121d2f;stroke:#4493f8}
.p{fill:#272115;stroke:#d29922}.k{fill:#25171c;stroke:#f85149}}"""
_CHARACTER = 7.3
"""Pixels of a character, at most."""

# ------------------------------------------------------------------ tables


@dataclass(frozen=True)
class Row:
    """A row of a table of transitions: cells as they are written, without line breaks."""

    phase: str
    what: str
    next: str
    effects: str = ""


def table_of(module: ModuleType, number: int) -> list[Row]:
    """Return the rows of the n-th table in the docstring of a module."""
    lines = (module.__doc__ or "").splitlines()
    rules = [index for index, line in enumerate(lines) if re.fullmatch(r" +(-+ +)+-+", line)]
    begin = rules[number]
    starts = [match.start() for match in re.finditer(r"-+", lines[begin])]
    rows: list[Row] = []
    is_open = False
    for line in lines[begin + 1 :]:
        if not line.strip():
            break
        phase, what, after, effects = _cells(line, starts)
        if is_open or (not phase and not what):
            rows[-1] = _joined(rows[-1], Row(phase, what, after, effects))
        else:
            rows.append(Row(phase or rows[-1].phase, what, after, effects))
        is_open = not rows[-1].next
    return rows


def _cells(line: str, starts: list[int]) -> list[str]:
    """Return the cells of a line; phases in a row may be longer than their column."""
    if line[starts[1] - 1 : starts[1]].strip():
        return [line.strip(), "", "", ""]
    ends = [*starts[1:], None]
    cells = [line[start:end].strip() for start, end in zip(starts, ends, strict=True)]
    return [*cells, ""][:4]


def _joined(row: Row, more: Row) -> Row:
    pairs = zip(vars(row).values(), vars(more).values(), strict=True)
    return Row(*(" ".join(filter(None, pair)) for pair in pairs))


@dataclass(frozen=True)
class Machine:
    """A state machine as a picture: `live` are the phases that the table calls LIVE."""

    name: str
    title: str
    module: ModuleType
    number: int
    phases: Sequence[str]
    live: Sequence[str] = ()

    def rows(self) -> list[Row]:
        found = table_of(self.module, self.number)
        for index, row in enumerate(found):
            if row.phase.startswith("..."):
                found[index] = replace(row, phase=found[index - 1].phase)
        return found

    def phases_in(self, text: str) -> list[str]:
        """Return the phases that a cell names, in the order of the columns."""
        words = set(re.findall(r"[A-Z_]{3,}", text))
        if "LIVE" in words:
            words |= set(self.live)
        if words & set(_ENDS):
            words |= {"an end"}
        return [phase for phase in self.phases if phase in words or phase == text]


def _names(kind: type[AgentPhase] | type[ChildPhase] | type[CoordinatorPhase]) -> list[str]:
    return [phase.name for phase in kind]


_LIVE = ("STARTING", "RUNNING")
_ONE_NODE = [name for name in _names(AgentPhase) if name not in ("IDLE", "BARRIER", "LEAVING")]
_SEVERAL = [name for name in _names(AgentPhase) if name not in ("DECIDING", "BACKING_OFF")]
_ENDS = ("SUCCEEDED", "FAILED", "STOPPED")
_CHILD = [name for name in _names(ChildPhase) if name not in _ENDS]
MACHINES = (
    Machine("job", "A job of one node", machine, 1, _ONE_NODE, _LIVE),
    Machine("node", "A node of several", multi_node, 0, _SEVERAL, _LIVE),
    Machine("round", "The coordinator, and the rounds", coordinator, 0, _names(CoordinatorPhase)),
    Machine("child", "A child of a supervisor", supervisor, 0, [*_CHILD, "an end"], _LIVE),
)

# ------------------------------------------------------------------ drawing


class Svg:
    """The parts of a picture, in the order in which they are drawn."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._parts: list[str] = []
        self._width = self._height = 0.0

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        more = f' class="{kind}"' if kind else ""
        more += f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._parts.append(f'<text x="{x:g}" y="{y:g}"{more}>{escape(text)}</text>')
        wide = len(text) * _CHARACTER
        self._reach(x + wide * {"start": 1, "middle": 0.5, "end": 0}[anchor], y + 6)

    def line(self, x: float, y: float, to_x: float, to_y: float, kind: str = "l") -> None:
        ends = f'x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}"'
        self._parts.append(f'<line {ends} class="{kind}"/>')
        self._reach(max(x, to_x), max(y, to_y))

    def arrow(self, x: float, y: float, to_x: float) -> None:
        """Draw a horizontal arrow."""
        back = -6 if to_x > x else 6
        path = f"M{x:g} {y:g}H{to_x:g}m{back} -4l{-back} 4l{back} 4"
        self._parts.append(f'<path d="{path}" class="l"/>')

    def loop(self, x: float, y: float) -> None:
        """Draw an arrow that leads back to where it begins."""
        path = f"M{x:g} {y - 8:g}h16v8h-16m6 -4l-6 4l6 4"
        self._parts.append(f'<path d="{path}" class="l"/>')

    def box(self, x: float, y: float, width: float, text: str, kind: str = "b") -> None:
        rect = f'x="{x:g}" y="{y:g}" width="{width:g}" height="24" rx="4"'
        self._parts.append(f'<rect {rect} class="{kind}"/>')
        self.text(x + width / 2, y + 16, text, anchor="middle")
        self._reach(x + width, y + 24)

    def _reach(self, x: float, y: float) -> None:
        self._width, self._height = max(self._width, x), max(self._height, y)

    def render(self) -> str:
        size = f'width="{self._width + 10:.0f}" height="{self._height + 10:.0f}"'
        view = f'viewBox="0 0 {self._width + 10:.0f} {self._height + 10:.0f}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} role="img">'
        title = f"<title>{escape(self._title)}</title>"
        back = '<rect width="100%" height="100%" class="w"/>'
        return "\n".join([head, title, f"<style>{_STYLE}</style>", back, *self._parts, "</svg>\n"])


_COLUMN, _TOP, _ROW = 118, 70, 34


def draw_machine(drawn: Machine) -> str:
    """Draw a column for each phase, and each row of the table as an arrow between two."""
    svg = Svg(drawn.title)
    svg.text(10, 20, drawn.title, "t")
    place = {phase: 64 + _COLUMN * index for index, phase in enumerate(drawn.phases)}
    rows = drawn.rows()
    bottom = _TOP + _ROW * len(rows)
    for phase, x in place.items():
        svg.line(x, 58, x, bottom, "g")
        svg.box(x - 52, 34, 104, phase.lower().replace("_", " "))
    right = max(place.values()) + 70
    svg.text(right, 50, "effects" if any(row.effects for row in rows) else "", "s")
    for index, row in enumerate(rows):
        y = _TOP + _ROW * index + 24
        _draw_row(svg, drawn, row, place, y)
        svg.text(right, y, row.effects, "s")
    return svg.render()


def _draw_row(svg: Svg, drawn: Machine, row: Row, place: dict[str, int], y: float) -> None:
    sources = drawn.phases_in(row.phase) or (list(place) if row.phase.startswith("any") else [])
    if not sources:
        raise ValueError(f"{drawn.name}: no phase in {row}")
    targets = drawn.phases_in(row.next)
    xs = [place[phase] for phase in sources]
    label = min(xs)
    if len(xs) > 1:
        svg.line(min(xs), y, max(xs), y)
    for x in xs:
        svg.line(x, y - 3, x, y + 3)
    if not targets:
        svg.loop(max(xs), y)
        label = max(xs) + 16 if len(xs) <= 2 else label
    for target in targets:
        x = place[target]
        begin = min(xs, key=lambda source: abs(source - x))
        if begin == x:
            svg.loop(x, y)
            label = x + 16
        else:
            svg.arrow(begin, y, x)
            label = min(label, x)
    svg.text(label + 6, y - 6, row.what)


_BAR = 620


def draw_stop_plans() -> str:
    """Draw the default plan, one with two signals, and what the guardian does."""
    default = StopPlan()
    guarded = StopPlan.within(min(default.steps[0].grace, default.guardian_grace))
    plans = [
        ("StopPlan()", default),
        ('StopPlan([("SIGINT", 5), ("SIGTERM", 20, "all")])',
         StopPlan([("SIGINT", 5), ("SIGTERM", 20, "all")])),
        ("after the launcher was killed: its guardian", guarded),
    ]  # fmt: skip
    svg = Svg("Stop plans over time")
    longest = max(plan.grace + plan.reap_timeout for _, plan in plans)
    for index, (name, plan) in enumerate(plans):
        _draw_plan(svg, name, plan, 20 + 96 * index, _BAR / longest)
    return svg.render()


def _draw_plan(svg: Svg, name: str, plan: StopPlan, top: float, scale: float) -> None:
    svg.text(10, top, name, "t")
    at = 0.0
    for step in plan.steps:
        whom = "every process" if plan.reaches_all(step) else "leaders, then the rest"
        width = max(step.grace * scale, 6)
        svg.box(20 + at * scale, top + 12, width, "", "p")
        text = f"{signal_name(step.signal)}: {whom}"
        svg.text(26 + at * scale, top + 28, text if len(text) * _CHARACTER < width else "")
        svg.line(20 + at * scale, top + 8, 20 + at * scale, top + 44)
        # A step that is too short for its text has it below.
        inside = len(text) * _CHARACTER < width
        shown = f"{at:g} s" if inside else f"{at:g} s {signal_name(step.signal)}"
        svg.text(20 + at * scale, top + 56, shown, "s")
        at += step.grace
    x = 20 + at * scale
    x = max(x, 26)
    svg.box(x, top + 12, plan.reap_timeout * scale, "", "k")
    svg.text(x + 6, top + 28, "SIGKILL")
    last = f"{at:g} s, and up to {plan.reap_timeout:g} s until no process is left"
    svg.text(max(x, 20 + 12 * _CHARACTER), top + 56, last, "s")


Chain = list[tuple[str, str]]
_SHOWN = CapturedStreams()
_NO_TERMINAL = CapturedStreams(streams=Std.ERR)
LINES: list[tuple[str, LogSpec, CapturedStreams]] = [
    ("on a terminal", LogSpec(log_dir="logs"), _SHOWN),
    ("standard error that is no terminal", LogSpec(log_dir="logs"), _NO_TERMINAL),
    ("--redirects 3", LogSpec(log_dir="logs", redirects=3), _SHOWN),
    ("--tee 3", LogSpec(log_dir="logs", tee=3), _SHOWN),
    ("--tee 3 --on-full console", LogSpec(log_dir="logs", tee=3, on_full="console"), _SHOWN),
    ("--local-ranks-filter 1, rank 0", LogSpec(log_dir="logs", local_ranks_filter=[1]), _SHOWN),
]


def way_of(stream: StreamPlan) -> Chain:
    """Return what a line passes on its way, each with the kind of its box."""
    worker = ("worker", "b")
    if stream.target is StreamTarget.CONSOLE:
        return [worker, ("console", "b")]
    if stream.target is StreamTarget.NOWHERE:
        return [worker, ("/dev/null", "k")]
    name = (stream.path or "").rpartition("/")[2]
    chain = [worker, *([("pipe", "p")] if stream.is_relayed else []), (name, "p")]
    if stream.is_captured:
        return [worker, ("pipe", "p"), ("console, as it is", "b"), (f"and {name}", "p")]
    if not stream.is_shown:
        return chain
    return [*chain, ("inotify: log tailer", "p"), ("whole lines, prefix", "p"), ("console", "b")]


def draw_lines() -> str:
    """Draw the way of a line of each stream, for some settings of the logs."""
    svg = Svg("The way of a line")
    y = 20.0
    for name, spec, captured in LINES:
        planned = plan_logs(spec, "logs/run", 0, 0, captured)
        svg.text(10, y, name, "t")
        ways = [("stdout", way_of(planned.stdout)), ("stderr", way_of(planned.stderr))]
        if [box for box in ways[0][1] if "std" not in box[0]] == [
            box for box in ways[1][1] if "std" not in box[0]
        ]:
            both = [(text.replace("stdout", "std{out,err}"), kind) for text, kind in ways[0][1]]
            ways = [("both", both)]
        for stream, chain in ways:
            y += 32
            _draw_chain(svg, stream, chain, y)
        y += 34
    return svg.render()


def _draw_chain(svg: Svg, stream: str, chain: Chain, y: float) -> None:
    svg.text(20, y, stream, "s")
    x = 80.0
    for index, (text, kind) in enumerate(chain):
        width = len(text) * _CHARACTER + 16
        svg.box(x, y - 16, width, text, kind)
        if index + 1 < len(chain):
            svg.arrow(x + width, y - 4, x + width + 26)
        x += width + 26


PICTURES: dict[str, Callable[[], str]] = {
    "stop-plans": draw_stop_plans,
    "way-of-a-line": draw_lines,
} | {f"states-{each.name}": lambda each=each: draw_machine(each) for each in MACHINES}


def write_all(directory: Path = IMAGES) -> None:
    """Write all pictures."""
    for name, draw in PICTURES.items():
        (directory / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    write_all()
