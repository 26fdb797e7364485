"""The tables of docs/reference, from what the code knows: `python -m docs.site.reference`.

A field of a spec says its default and, in its docstring, its meaning; an option its help; a key of
`--rdzv-conf` its least value; an event its fields; `WorkerContext`
the variables of a worker.  The pages say in which table each stands, and
in which order.  `SEE` adds the links that a docstring cannot have.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

import elastic_aio
from docs.site.names import ROOT
from elastic_aio import GroupSpec, LaunchSpec, SignalSpec, StopStep, TlsSpec
from elastic_aio.cli.run_options import RUN_OPTIONS
from elastic_aio.outcome import signal_name
from elastic_aio.spec.checks import checked_bool
from elastic_aio.spec.fields import REQUIRED, ConfKey, SpecValue, part_of, spec_fields
from elastic_aio.spec.job import NodeRange
from elastic_aio.spec.limits import LimitSpec
from elastic_aio.spec.logs import StdMap
from elastic_aio.spec.probe import Exec, Http, LogMatch, PolledProbe, Tcp
from elastic_aio.spec.rendezvous import EngineSpec, RendezvousSpec
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
    "--no-capture": "[failures.md](../guides/failures.md#captured-standard-error)",
    "--log-max-bytes": "[logs.md](../guides/logs.md#how-much-is-kept)",
    "--no-control": "[control.md](../guides/control.md)",
    "--no-record": "[finished-runs.md](../guides/finished-runs.md)",
}
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
        table = f"| field | default | meaning |\n|---|---|---|\n{rows}"
        found = re.search(r"(?:^\|.*\n)+", rest, re.MULTILINE)
        assert found is not None, owner
        text = head + heading + rest[: found.start()] + table + rest[found.end() :]
    return text


_DEFAULT = re.compile(r" \(default:? ([^()]*)\)")
_OPTION_ROW = re.compile(r"^\| (?:`-\w`, )?`--([\w-]+)[^|]*\| (.*?) \| (.*) \|$", re.MULTILINE)


def option_row(name: str) -> str:
    """Return the row of an option of `aio-elastic run`: from its help."""
    (option,) = [each for each in RUN_OPTIONS if each.name == name]
    defaults = _DEFAULT.findall(option.help)
    text = _DEFAULT.sub("", option.help) if len(defaults) == 1 else option.help
    default = defaults[0] if len(defaults) == 1 else "as it says" if defaults else ""
    short = f"`{option.short}`, " if option.short else ""
    usage = f"`--{name} {option.metavar}`" if option.metavar else f"`--{name}`"
    marked = " P" if option.has_variable else ""
    cells = [_quoted(_with_link(text, f"--{name}")), _quoted(default)]
    return f"| {short}{usage}{marked} | {_cell(cells[1])} | {_cell(cells[0])} |"


def _quoted(text: str) -> str:
    """Return a help with its quoted words, and its options, as code."""
    text = re.sub(r"(?<![\w`])'([^' ]+)'", r"`\1`", text)
    return re.sub(r"(?<![\w`/-])(--[a-z][\w-]+)(?!`)", r"`\1`", text)


def with_option_tables(text: str) -> str:
    """Return docs/reference/command-line.md with the rows of options of `run` as the code has."""
    known = {option.name for option in RUN_OPTIONS}
    begin = text.index("\n## aio-elastic run\n")
    end = text.index("\n## ", begin + 2)

    def row(match: re.Match[str]) -> str:
        return option_row(match[1]) if match[1] in known else match[0]

    return text[:begin] + _OPTION_ROW.sub(row, text[begin:end]) + text[end:]


_KEYS = {
    each.option.name: (owner, name, each)
    for owner in (RendezvousSpec, TlsSpec)
    for name, each in spec_fields(owner).items()
    if isinstance(each.option, ConfKey)
}


def key_row(key: str) -> str:
    """Return the row of a key of `--rdzv-conf`: its default, its values, its field's docstring."""
    owner, name, described = _KEYS[key]
    option = described.option
    assert isinstance(option, ConfKey)
    is_switch = described.check is checked_bool
    values = "true, false" if is_switch else "text"
    if option.least is not None:
        values = f"{option.least} or more"
    default = option.default or str(described.default).lower()
    if isinstance(described.default, float) and not option.default:
        default = f"{described.default:g}"
    default = _quoted("" if default == "none" else default)
    return f"| `{key}` | {default} | {values} | {_cell(field_docs(owner)[name])} |"


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


def with_event_fields(text: str) -> str:
    """Return docs/reference/events.md with all fields of each event."""
    common = {each.name for each in msgspec.structs.fields(Event)}

    def row(match: re.Match[str]) -> str:
        kind = getattr(elastic_aio, match[1], None)
        if not (isinstance(kind, type) and issubclass(kind, Event)):
            return match[0]
        own = [each.name for each in msgspec.structs.fields(kind) if each.name not in common]
        return f"| `{match[1]}` | {', '.join(f'`{name}`' for name in own)} | {match[3]} |"

    return _EVENT_ROW.sub(row, text)


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
    "command-line.md": lambda text: with_key_table(with_option_tables(text)),
    "events.md": with_event_fields,
    "worker-environment.md": with_worker_variables,
}


def main() -> None:
    """Write the pages."""
    for name, update in PAGES.items():
        path = REFERENCE / name
        path.write_text(update(path.read_text()))


if __name__ == "__main__":
    main()
