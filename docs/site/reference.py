"""The tables of docs/reference, from what the code knows: `python -m docs.site.reference`.

A field of a spec says its default and, in its docstring, its meaning; an option of any command its
help; a key of `--rdzv-conf` its least value; an event its fields and, in its docstrings, its
meaning; `EXIT_CODES` those of `aio-elastic run`; `WorkerContext` the variables of a worker.
The pages say in which table each stands, and in which order.  `SEE` adds the links that a
docstring cannot have.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

import elastic_aio
from docs.site.names import ROOT
from elastic_aio import GroupSpec, LaunchSpec, SignalSpec, StopStep, TlsSpec
from elastic_aio.cli import COMMANDS, USAGE
from elastic_aio.cli import main as run_command
from elastic_aio.cli.exit_codes import EXIT_CODES
from elastic_aio.cli.guides import anchors_of, find_pages
from elastic_aio.cli.parser import OptionParser
from elastic_aio.cli.run_options import RUN_OPTIONS
from elastic_aio.cli.store_options import add_store_options
from elastic_aio.outcome import signal_name
from elastic_aio.spec.checks import OneOf, checked_path
from elastic_aio.spec.fields import REQUIRED, ConfKey, SpecValue, part_of, spec_fields
from elastic_aio.spec.job import NodeRange
from elastic_aio.spec.limits import LimitSpec
from elastic_aio.spec.logs import StdMap
from elastic_aio.spec.probe import Exec, Http, LogMatch, PolledProbe, Tcp
from elastic_aio.spec.rendezvous import ENGINE_ENTRIES, EngineSpec, RendezvousSpec
from elastic_aio.spec.sockets import SocketSpec
from elastic_aio.status import Event
from elastic_aio.value import Value
from elastic_aio.worker import WorkerContext

REFERENCE = ROOT / "docs/reference"
POLLED: list[type[SpecValue]] = [Http, Tcp, Exec]
PROBES: list[type[SpecValue]] = [PolledProbe, *POLLED, LogMatch]
SPECS: list[type[SpecValue]] = [LaunchSpec, GroupSpec, SignalSpec, TlsSpec, EngineSpec]
SPECS += [SocketSpec, LimitSpec, *PROBES]
SPECS += [part for each in spec_fields(LaunchSpec).values() if (part := part_of(each))]

SEE = {
    "LaunchSpec.nproc_per_node": "[devices](command-line.md#devices)",
    "LaunchSpec.ready": "[probes](#probes)",
    "LaunchSpec.alive": "[probes](#probes)",
    "LaunchSpec.sockets": "[SocketSpec](#socketspec)",
    "LaunchSpec.limits": "[LimitSpec](#limitspec)",
    "LaunchSpec.numa_binding": "[CPUs](command-line.md#cpus)",
    "LogSpec.capture": "[failures.md](../guides/failures.md#captured-standard-error)",
    "LogSpec.max_bytes": "[logs.md](../guides/logs.md#how-much-is-kept)",
    "LogSpec.on_full": "[logs.md](../guides/logs.md#a-full-disk)",
    "RestartPolicy.scope": "[trees.md](../guides/trees.md)",
    "StopPlan.scope": "[stopping.md](../guides/stopping.md#leaders-first)",
    "StopPlan.linger": "[stopping.md](../guides/stopping.md#what-a-success-leaves-behind)",
    "RendezvousSpec.scale_up": "[many-nodes.md](../guides/many-nodes.md#nodes-that-join)",
    "--nproc-per-node": "[devices](#devices)",
    "--restart-scope": "[trees.md](../guides/trees.md)",
    "--torchrun-defaults": "[torchrun's defaults](torchrun-parity.md#defaults-that-differ)",
    "--numa-binding": "[CPUs](#cpus)",
    "--ready": "[probes](spec.md#probes)",
    "--no-capture": "[failures.md](../guides/failures.md#captured-standard-error)",
    "--log-max-bytes": "[logs.md](../guides/logs.md#how-much-is-kept)",
    "--no-control": "[control.md](../guides/control.md)",
    "--no-record": "[finished-runs.md](../guides/finished-runs.md)",
    "ps --all": "[finished-runs.md](../guides/finished-runs.md)",
    "stop --kill": "[which processes](../guides/control.md#the-socket)",
}

GUIDES = {
    "WorkerExited": "failures.md#where-the-reason-comes-from",
    "AttemptFailed": "failures.md#known-causes",
    "Restarting": "runbook.md#a-job-restarts",
    "StopRequested": "stopping.md#what-happens-in-a-stop",
    "PreemptionNotice": "stopping.md#a-preemption",
    "LeftoversFound": "stopping.md#what-a-success-leaves-behind",
    "StopEscalated": "runbook.md#a-job-does-not-stop",
    "WorkerAbandoned": "runbook.md#a-job-does-not-stop",
    "SignalForwarded": "stopping.md#signals",
    "TimerExpired": "hangs.md#deadlines",
    "TimerRejected": "hangs.md#deadlines",
    "DeadlineMissed": "hangs.md#deadlines",
    "MessageDropped": "hangs.md#messages",
    "ForeignAnswer": "servers.md#which-process-answers",
    "WorkersIdle": "hangs.md#a-job-that-hangs-now",
    "WorkersUnfinished": "hangs.md#a-job-that-hangs-now",
    "StacksDumped": "hangs.md#stacks",
    "GuardianRestarted": "stopping.md#when-the-guardian-is-killed-too",
    "GuardianLost": "stopping.md#when-the-guardian-is-killed-too",
    "LostJobFound": "runbook.md#processes-are-left",
    "ControlUnavailable": "control.md#the-socket",
    "ConsoleLost": "logs.md#the-console",
    "LogDiskFull": "logs.md#a-full-disk",
    "LogsNotRemoved": "logs.md#how-much-is-kept",
    "OutputLost": "logs.md#files",
    "EventsMissed": "events.md#reading",
    "JobFinished": "runbook.md#an-exit-code",
    "ChildRestarting": "trees.md#restarts",
    "ChildFinished": "trees.md#the-end",
    "ReloadFailed": "trees.md#reload-and-scale",
    "RoundForming": "runbook.md#nodes-do-not-come-together",
    "RoundWaiting": "many-nodes.md#what-happens-when",
    "MembershipPending": "many-nodes.md#nodes-that-join",
    "MembershipChanged": "many-nodes.md#what-happens-when",
    "NodeJoined": "many-nodes.md#nodes-that-join",
    "NodeLost": "restarts.md#lost-nodes",
    "NodeRefused": "runbook.md#nodes-do-not-come-together",
    "NodeExcluded": "many-nodes.md#nodes-that-are-not-fit",
    "NodeStandby": "many-nodes.md#nodes-that-join",
    "RendezvousStoreAwaited": "runbook.md#nodes-do-not-come-together",
    "RendezvousStoreLost": "many-nodes.md#when-the-store-is-lost",
    "RendezvousStoreRecovered": "many-nodes.md#when-the-store-is-lost",
    "WorkerStoreRefused": "many-nodes.md#the-store-of-the-workers",
}
"""The section that says what to do about an event: for each of level WARNING, and the last."""
"""Where a reader finds more, by the field or the option."""


def field_docs(owner: type) -> dict[str, str]:
    """Return the docstrings of the fields of a class and its bases, each on one line."""
    found: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        if base.__module__.startswith("elastic_aio"):
            found |= _own_docs(base.__module__).get(base.__qualname__, {})
    return found


@functools.cache
def _own_docs(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of fields by the class, of all classes of a module."""
    found: dict[str, dict[str, str]] = {}
    for owner in ast.parse(inspect.getsource(importlib.import_module(module))).body:
        if not isinstance(owner, ast.ClassDef):
            continue
        docs = found.setdefault(owner.name, {})
        for item, doc in itertools.pairwise(owner.body):
            match item, doc:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    docs[name] = " ".join(text.split())
    return found


def shown_default(value: Any) -> str:
    """Return a default as a table has it: what a program would give."""
    match value:
        case _ if value is REQUIRED:
            return "required"
        case None | bool():
            return str(value)
        case int() | float():
            return f"{value:,g}" if abs(value) < 1e6 else str(value)
        case str():
            return f'`"{value}"`'
        case NodeRange():
            return str(value)
        case StdMap():
            return "0" if value == StdMap() else f"`{value!r}`"
        case frozenset() | tuple() if value and all(isinstance(item, int) for item in value):
            is_signals = isinstance(value, frozenset)
            return ", ".join(map(signal_name, sorted(value))) if is_signals else f"`{value!r}`"
        case tuple() if value and all(isinstance(item, StopStep) for item in value):
            steps = ", ".join(f'("{signal_name(step.signal)}", {step.grace:g})' for step in value)
            return f"`[{steps}]`"
        case frozenset() | tuple():
            return "`()`"
        case Mapping():
            return "`{}`"
    return f"`{_constructor(value)}`"


def _constructor(value: Any) -> str:
    """Return the call that makes a value, without arguments that are defaults."""
    if isinstance(value, SpecValue):
        given = {
            name: getattr(value, name)
            for name, each in spec_fields(type(value)).items()
            if getattr(value, name) != each.default
        }
    else:
        assert isinstance(value, Value)
        given = {
            each.name: getattr(value, each.name)
            for each in msgspec.structs.fields(value)
            if getattr(value, each.name) != each.default
        }
    words = ", ".join(f"{name}={content!r}" for name, content in given.items())
    return f"{type(value).__name__}({words})"


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", text)


def _with_link(text: str, name: str) -> str:
    return f"{text.removesuffix('.')}. See {SEE[name]}." if name in SEE else text


def field_row(owner: type[SpecValue], name: str) -> str:
    """Return the row of a field: its name, its default, and its docstring."""
    text = _with_link(field_docs(owner)[name], f"{owner.__name__}.{name}")
    default = shown_default(spec_fields(owner)[name].default)
    return f"| `{name}` | {default} | {_cell(text)} |"


def fields_of(owner: type[SpecValue]) -> list[str]:
    """Return the fields of the table of a class: probes that are polled share those of the base."""
    names = list(spec_fields(owner))
    if owner in POLLED:
        names = [name for name in names if name not in spec_fields(PolledProbe)]
    return names


def heading_of(owner: type[SpecValue]) -> str:
    return f"{'###' if owner in PROBES else '##'} {owner.__name__}"


def with_spec_tables(text: str) -> str:
    """Return docs/reference/spec.md with its tables as the code has them."""
    for owner in SPECS:
        head, heading, rest = text.partition(f"\n{heading_of(owner)}\n")
        rows = "".join(f"{field_row(owner, name)}\n" for name in fields_of(owner))
        prefix = owner.__spec_prefix__.removesuffix(".")
        first = f"field of `{prefix}`" if prefix else "field"  # as errors name it
        table = f"| {first} | default | meaning |\n|---|---|---|\n{rows}"
        found = re.search(r"(?:^\|.*\n)+", rest, re.MULTILINE)
        assert found is not None, owner
        text = head + heading + rest[: found.start()] + table + rest[found.end() :]
    return text


_DEFAULT = re.compile(r" \(default:? ([^()]*)\)")
_OPTION_ROW = re.compile(
    r"^\| (?:`-\w`, )?`--([\w-]+)[^|]*\|(?: .*?)? \|(?: .*)? \|$", re.MULTILINE
)


def option_row(name: str) -> str:
    """Return the row of an option of `aio-elastic run`: from its help."""
    (option,) = [each for each in RUN_OPTIONS if each.name == name]
    short = f"`{option.short}`, " if option.short else ""
    usage = f"`--{name} {option.metavar}`" if option.metavar else f"`--{name}`"
    marked = " P" if option.has_variable else ""
    return _help_row(f"{short}{usage}{marked}", option.help, f"--{name}")


def _help_row(names: str, help_: str, see: str) -> str:
    """Return a row: a default that stands in the help has a column of its own."""
    defaults = _DEFAULT.findall(help_)
    text = _DEFAULT.sub("", help_) if len(defaults) == 1 else help_
    default = defaults[0] if len(defaults) == 1 else "as it says" if defaults else ""
    cells = [_quoted(_with_link(text, see)), _quoted(default)]
    return f"| {names} | {_cell(cells[1])} | {_cell(cells[0])} |".replace("|  |", "| |")


def _quoted(text: str) -> str:
    """Return a help with its quoted words, and its options, as code."""
    parts = re.split(r"(`[^`]*`)", text)
    for index in range(0, len(parts), 2):  # what is no code yet
        quoted = re.sub(r"(?<!\w)'([^' ]+)'", r"`\1`", parts[index])
        parts[index] = re.sub(r"(?<![\w`/-])(--[a-z][\w-]+)(?!`)", r"`\1`", quoted)
    return "".join(parts)


def with_option_tables(text: str) -> str:
    """Return docs/reference/command-line.md with the rows of options of `run` as the code has."""
    known = {option.name for option in RUN_OPTIONS}
    begin = text.index("\n## aio-elastic run\n")
    end = text.index("\n## ", begin + 2)

    def row(match: re.Match[str]) -> str:
        return option_row(match[1]) if match[1] in known else match[0]

    return text[:begin] + _OPTION_ROW.sub(row, text[begin:end]) + text[end:]


_OPTIONS_HEAD = "| option | default | meaning |\n|---|---|---|\n"
_SHARED = {
    "run": "as for [`aio-elastic run`](#aio-elastic-run)",
    "store": "see [options of a store](#options-of-a-store)",
}
"""Rows of options that several commands have, by where they are described."""


def command_options(*words: str) -> list[argparse.Action]:
    """Return the options of a command, from the parser that prints its help."""
    captured = OptionParser.captured = []
    try:
        with contextlib.suppress(SystemExit):  # argparse, after the help
            run_command([*words, "--help"])
    finally:
        OptionParser.captured = None
    actions = [action for parser in captured for action in parser._actions]
    return [action for action in actions if action.option_strings and action.dest != "help"]


def _store_options() -> list[argparse.Action]:
    parser = OptionParser(add_help=False)
    add_store_options(parser)
    return parser._actions


def options_table(words: tuple[str, ...], options: list[argparse.Action]) -> str:
    """Return the table of a command; options that are described elsewhere share a row each."""
    shared = {f"--{option.name}": ("run", option.help) for option in RUN_OPTIONS}
    if words != ("store",):
        shared |= {
            action.option_strings[0]: ("store", action.help or "") for action in _store_options()
        }
    rows, elsewhere = "", dict.fromkeys(_SHARED, "")
    for action in options:
        *_, name = names = [each for each in action.option_strings if "_" not in each]
        place, help_ = shared.get(name, ("", ""))
        if words and place and help_ == action.help:
            elsewhere[place] += f", `{name}`"
            continue
        metavar = action.metavar or action.dest.upper()
        names[-1] += f" {metavar}" if action.nargs != 0 else ""
        shown = ", ".join(f"`{each}`" for each in names)
        text = " ".join((action.help or "").split()).replace("%%", "%")
        rows += _help_row(shown, text, f"{' '.join(words)} {name}") + "\n"
    for place, names_ in elsewhere.items():
        rows += f"| {names_.removeprefix(', ')} | | {_SHARED[place]} |\n" if names_ else ""
    return _OPTIONS_HEAD + rows


def with_command_tables(text: str) -> str:
    """Return docs/reference/command-line.md with the options of each command as its parser has."""
    places = {("store", "ping"): "### aio-elastic store ping", (): "## Options of a store"}
    places |= {(name,): f"## aio-elastic {name}" for name in COMMANDS}
    for words, heading in places.items():
        options = command_options(*words) if words else _store_options()
        begin = text.index(f"\n{heading}\n")
        end = next(re.compile(r"\n##|\Z").finditer(text, begin + 2)).start()
        section = text[begin:end]
        has_table = section.count(_OPTIONS_HEAD)
        assert has_table == bool(options), f"{heading}: {has_table} tables of options"
        if options:
            head, _, rest = section.partition(_OPTIONS_HEAD)
            rest = re.sub(r"\A(?:\|.*(?:\n|\Z))*", "", rest)
            text = text[:begin] + head + options_table(words, options) + rest + text[end:]
    return text


def with_usage(text: str) -> str:
    """Return docs/reference/command-line.md with the commands as `aio-elastic --help` has them."""
    usage = USAGE.partition("\n\n")[0].replace("usage: ", "       ")
    lines = [*inspect.cleandoc(usage).splitlines()]
    lines.append(
        "python -m elastic_aio.launch [--use-env] [options] script [arguments of the script]"
    )
    block = re.compile(r"(?<=^```\n)aio-elastic run .*?(?=^```$)", re.MULTILINE | re.DOTALL)
    return block.sub(lambda _: "".join(f"{line}\n" for line in lines), text, count=1)


_KEYS = {
    each.option.name: (owner, name, each)
    for owner in (RendezvousSpec, TlsSpec, EngineSpec)
    for name, each in spec_fields(owner).items()
    if isinstance(each.option, ConfKey)
}


def key_row(key: str) -> str:
    """Return the row of a key of `--rdzv-conf`: its default, its values, its field's docstring."""
    owner, name, described = _KEYS[key]
    option = described.option
    assert isinstance(option, ConfKey)
    values = "text"
    if option.least is not None:
        values = f"{option.least} or more"
    elif isinstance(described.check, OneOf):
        values = ", ".join(described.check.accepted)
    elif described.check is checked_path:
        values = "a path"
    elif "bool" in owner.__annotations__[name]:
        values = "true, false"
    default = option.default.partition("; or ")[0] or str(described.default).lower()
    if isinstance(described.default, float) and not option.default:
        default = f"{described.default:g}"
    default = _quoted("" if default == "none" else default)
    text = field_docs(owner)[name]
    if owner is EngineSpec:
        engines = [each for each in ENGINE_ENTRIES if name in each.settings] or ENGINE_ENTRIES
        text = f"{', '.join(f'`{each.names[0]}`' for each in engines)}: {text}"
    return f"| `{key}` | {default} | {values} | {_cell(text)} |".replace("|  |", "| |")


def with_key_table(text: str) -> str:
    """Return docs/reference/command-line.md with the keys of fields as the code has them."""
    head, heading, rest = text.partition("\n### Keys of `--rdzv-conf`\n")
    table = re.search(r"(?:^\|.*\n)+", rest, re.MULTILINE)
    assert table is not None
    lines = []
    for line in table[0].splitlines():
        keys = re.findall(r"`(\w+)`", line.split(" | ")[0])
        lines += [key_row(key) for key in keys] if keys and keys[0] in _KEYS else [line]
    return head + heading + rest[: table.start()] + "\n".join(lines) + "\n" + rest[table.end() :]


_EVENT_ROW = re.compile(r"^\| `([A-Z]\w+)` \| (.*?) \| (.*) \|$", re.MULTILINE)


def event_row(kind: type[Event]) -> str:
    """Return the row of an event: its fields, and the docstrings of the event and its fields."""
    common = {each.name for each in msgspec.structs.fields(Event)}
    own = [each.name for each in msgspec.structs.fields(kind) if each.name not in common]
    docs = field_docs(kind)
    parts = [" ".join((kind.__doc__ or "").split())]
    parts += [f"`{name}`: {docs[name]}" for name in own if name in docs]
    if guide := GUIDES.get(kind.__name__):
        parts.append(f"See [{_title_of(f'guides/{guide}')}](../guides/{guide}).")
    fields = ", ".join(f"`{name}`" for name in own)
    return f"| `{kind.__name__}` | {fields} | {_cell(' '.join(parts))} |"


def _title_of(guide: str) -> str:
    """Return the heading that a link to a section leads to."""
    page, _, anchor = guide.partition("#")
    text = (ROOT / "docs" / page).read_text()
    (found,) = [each for each in anchors_of(text) if each.level and each.anchor == anchor]
    return text.split("\n")[found.line].lstrip("# ")


def with_events(text: str) -> str:
    """Return docs/reference/events.md with the rows of all events as the code has them."""

    def row(match: re.Match[str]) -> str:
        kind = getattr(elastic_aio, match[1], None)
        return event_row(kind) if isinstance(kind, type) and issubclass(kind, Event) else match[0]

    return _EVENT_ROW.sub(row, text)


def with_exit_codes(text: str) -> str:
    """Return docs/reference/exit-codes.md with the codes of `aio-elastic run` as the code has."""
    rows = ""
    for each in EXIT_CODES:
        link = "/".join(Path(find_pages()[each.guide.split()[0]]).parts[-2:])
        guide = f"{link}#{each.guide.split()[1]}"
        rows += f"| {each.code} | {_cell(each.meaning)} | [{_title_of(guide)}](../{guide}) |\n"
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table is not None
    head = "| code | meaning | what to do |\n|---|---|---|\n"
    return text[: table.start()] + head + rows + text[table.end() :]


def worker_variables() -> dict[str, str]:
    """Return the field of `WorkerContext` that each variable of a worker is read from."""
    fields = [each.name for each in dataclasses.fields(WorkerContext)]
    values: dict[str, Any] = {name: number for number, name in enumerate(fields, start=100)}
    texts = {name: str(value) for name, value in values.items()}
    values |= {name: texts[name] for name in ("role", "run_id", "master_addr", "error_file")}
    named = {value: name for name, value in texts.items()}
    return {variable: named[text] for variable, text in WorkerContext(**values).to_env().items()}


def with_worker_variables(text: str) -> str:
    """Return docs/reference/worker-environment.md with all variables of `WorkerContext`."""
    docs = field_docs(WorkerContext)
    rows = [
        f"| `{variable}` | `{field}` | {_cell(docs[field])} |\n"
        for variable, field in worker_variables().items()
    ]
    table = re.search(r"^\| variable \| field of.*\n\|.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table is not None
    return text[: table.start(1)] + "".join(rows) + text[table.end(1) :]


PAGES: dict[str, Callable[[str], str]] = {
    "spec.md": with_spec_tables,
    "command-line.md": lambda text: with_key_table(
        with_command_tables(with_option_tables(with_usage(text)))
    ),
    "events.md": with_events,
    "exit-codes.md": with_exit_codes,
    "worker-environment.md": with_worker_variables,
}


def main() -> None:
    """Write the pages."""
    for name, update in PAGES.items():
        path = REFERENCE / name
        path.write_text(update(path.read_text()))


if __name__ == "__main__":
    main()
