"""Reads the files that describe a job: `jobs.toml`, and a Procfile; pure.

`spec_from_toml` takes every field of a spec by its name, and parts of a spec as tables.
`spec_from_procfile` reads what honcho and foreman do.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from shlex import split
from typing import Any, Final

from elastic_aio.errors import SpecError
from elastic_aio.spec.checks import is_integer, parse_port
from elastic_aio.spec.fields import Field, SpecValue, part_of, spec_fields
from elastic_aio.spec.group import DEPTH_MAX, AnySpec, GroupSpec
from elastic_aio.spec.job import NPROC_MAX, Command, LaunchSpec, Module, Script
from elastic_aio.spec.logs import LogSpec
from elastic_aio.spec.restart import Backoff, NodeLosses, RestartPolicy, RestartWindow
from elastic_aio.spec.stop import StopPlan
from elastic_aio.spec.tls import TlsSpec
from elastic_aio.text import did_you_mean
from elastic_aio.value import Value

Table = Mapping[str, Any]

_PROGRAMS: Final = ("script", "module", "command")
_OF_CHILD: Final = ("replicas", "after", "essential")
_NOT_IN_FILES: Final = ("entrypoint", "children")
# What others call a field, and options of `run` that are parts of one.
_OTHER_NAMES: Final = {
    "restart_scope": "restart = { scope = ... }",
    "shutdown_timeout": "stop = SECONDS",
    "within": "stop = SECONDS",
    "environment": "env",
}
# The classes of fields whose check names none.
_VALUES: Final[Mapping[str, type[Value]]] = {
    "backoff": Backoff,
    "window": RestartWindow,
    "node_losses": NodeLosses,
}
_SPECS: Final[Mapping[str, type[SpecValue]]] = {"tls": TlsSpec}


# ------------------------------------------------------------------------ TOML


def spec_from_toml(text: str, directory: str = "") -> AnySpec:
    """Return the job that a TOML file describes: a group if it has `children`, else one job.

    Workers run in `directory`, that of the file; a `cwd` in it is relative to that.

    Raises:
        SpecError: one line that names the table and the field.
    """
    try:
        try:
            table = tomllib.loads(text)
        except ValueError as error:  # also for a number of very many digits
            # The value is left out, which may be a password.
            place, lines = re.search(r"at line (\d+)", str(error)), text.splitlines() or [""]
            name, equals, _ = lines[int(place[1]) - 1 if place else -1].partition("=")
            raise SpecError("the file", name + equals, f"must be TOML: {error}") from None
        return _spec(table, "", directory)
    except RecursionError:
        problem = f"must have groups of at most {DEPTH_MAX} levels"
        raise SpecError("the file", text, problem) from None


def _spec(table: Table, where: str, directory: str) -> AnySpec:
    if "children" in table:
        return _group(table, where, directory)
    return _leaf(table, where, directory)


def _leaf(table: Table, where: str, directory: str) -> LaunchSpec:
    rest = {key: value for key, value in table.items() if key not in _PROGRAMS}
    fields = _fields(LaunchSpec, rest, where, _PROGRAMS)
    programs = [key for key in _PROGRAMS if key in table]
    if len(programs) != 1:
        problem = "must have one of script, module and command, or children"
        raise SpecError(where or "the file", programs, problem)
    name = programs[0]
    if "env" in fields:
        fields["env"] = _env(fields["env"])
    if directory:
        cwd = fields.get("cwd", "")
        if isinstance(cwd, str) and not cwd.startswith("/"):
            fields["cwd"] = f"{directory}/{cwd}".rstrip("/")
    entrypoint = _made(LaunchSpec, where, lambda: _entrypoint(name, table[name]))
    spec: LaunchSpec = _made(LaunchSpec, where, lambda: LaunchSpec(entrypoint, **fields))
    return spec


def _entrypoint(kind: str, value: object) -> Script | Module | Command:
    if kind == "command":
        try:
            words = split(value) if isinstance(value, str) else value
        except ValueError as error:
            raise SpecError(kind, value, f"must be a command line: {error}") from None
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise SpecError(kind, value, "must be a list of arguments, or a text")
        return Command(tuple(words))
    if not isinstance(value, str):
        raise SpecError(kind, value, "must be text")
    return Script(value) if kind == "script" else Module(value)


def _env(value: object) -> object:
    """Return variables whose numbers are texts."""
    if not isinstance(value, Mapping):
        return value
    numbers = (int, float)
    return {
        name: str(one) if isinstance(one, numbers) and not isinstance(one, bool) else one
        for name, one in value.items()
    }


def _group(table: Table, where: str, directory: str) -> GroupSpec:
    children: dict[str, AnySpec] = {}
    after = dict(_table(table.get("after", {}), f"{where}.after".lstrip(".")))
    others = []
    below = _table(table["children"], f"{where}.children".lstrip("."))
    for name, child in below.items():
        if not name:
            raise SpecError(f"{where}.children".lstrip("."), name, "must have names")
        path = f"{where}.children.{name}".lstrip(".")
        own = {key: child[key] for key in _OF_CHILD if key in _table(child, path)}
        if isinstance(own.get("essential"), list):  # of the group that the child is
            del own["essential"]
        if isinstance(own.get("after"), Mapping):
            del own["after"]
        rest = {key: value for key, value in child.items() if key not in own}
        children[name] = _child(rest, own, path, directory)
        if "after" in own:
            after[name] = own["after"]
        if not _bool(own.get("essential", True), f"{path}.essential"):
            others.append(name)
    rest = {key: value for key, value in table.items() if key not in ("children", "after")}
    if others and "essential" in rest:
        raise SpecError(
            "essential", rest["essential"], f"must be given once, not for {others[0]} too"
        )
    fields = _fields(GroupSpec, rest, where, ())
    if others:
        fields["essential"] = [name for name in children if name not in others]
    group: GroupSpec = _made(GroupSpec, where, lambda: GroupSpec(children, after=after, **fields))
    return group


def _child(table: Table, own: Table, where: str, directory: str) -> AnySpec:
    spec = _spec(table, where, directory)
    number = own.get("replicas")
    if number is None:
        return spec
    group: GroupSpec = _made(GroupSpec, where, lambda: GroupSpec.replicas(spec, number))
    return group


def _bool(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise SpecError(name, value, "must be true or false")
    return value


def _table(value: object, name: str) -> Table:
    if not isinstance(value, Mapping):
        raise SpecError(name, value, "must be a table")
    return value


def _fields(
    owner: type[SpecValue], table: Table, where: str, further: tuple[str, ...]
) -> dict[str, Any]:
    """Return the arguments of a class that a table has, with parts made of tables."""
    fields = spec_fields(owner)
    known = {name for name in fields if name not in _NOT_IN_FILES}
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{where}.{key}".lstrip(".")
        if key not in known:
            words = [*known, *further, *(_OF_CHILD if where.count("children.") else ())]
            other = _OTHER_NAMES.get(key)
            if owner is LaunchSpec and key in spec_fields(GroupSpec):
                other = "a group, which has [children.NAME]"
            hint = f"; did you mean {other}?" if other else did_you_mean(key, words)
            shown = [*value] if value and isinstance(value, Mapping) else value  # no password
            raise SpecError(name, shown, f"is no field{hint}")
        found[key] = _value(fields[key], key, value, name)
    return found


def _value(described: Field, key: str, value: object, name: str) -> object:
    if key == "stop" and (is_integer(value) or isinstance(value, float)):
        return _made(StopPlan, name, lambda: StopPlan.within(value))
    if key in _VALUES and value is False:
        return None
    if not isinstance(value, Mapping):
        return value
    if key in _VALUES:
        return _struct(_VALUES[key], value, name)
    part = part_of(described) or _SPECS.get(key)
    if part is None:
        return value  # `env` and `conf`, and probes, limits and sockets, which read tables
    default = {"streams": "joined"} if part is LogSpec else {}
    fields = default | _fields(part, value, name, ())
    return _made(part, name, lambda: part(**fields))


def _struct(made: type[Value], table: Table, name: str) -> Value:
    for key, one in table.items():
        if key not in made.__struct_fields__:
            known = did_you_mean(key, made.__struct_fields__)
            raise SpecError(f"{name}.{key}", one, f"is no field{known}")
    fields = {
        key: _struct(_VALUES[key], one, f"{name}.{key}") if isinstance(one, Mapping) else one
        for key, one in table.items()
    }
    value: Value = _made(SpecValue, name, lambda: made(**fields))
    return value


def _made(owner: type[SpecValue], where: str, make: Callable[[], Any]) -> Any:
    """Return what a function makes; its `SpecError` names the table."""
    try:
        return make()
    except SpecError as error:
        names = (where, error.field.removeprefix(owner.__spec_prefix__))
        raise SpecError(".".join(filter(None, names)), error.value, error.problem) from None
    except TypeError as error:
        raise SpecError(where, "a table", f"must be complete: {error}") from None


# ---------------------------------------------------------------------- Procfile

_LINE: Final = re.compile(r"([A-Za-z0-9_-]+):\s*(.+)")
# The grammar of python-dotenv: NAME=VALUE, a note, or both; a value in quotes may have lines.
_BINDING: Final = re.compile(
    r"""\s*(?:(?:export[^\S\r\n]+)?+(?:'([^']+)'|(?!')([^=\#\s]+))[^\S\r\n]*=
    (?:[^\S\r\n]+(?=\#)
    |[^\S\r\n]*+(?:'((?:\\.|[^'\\])*+)'|"((?:\\.|[^"\\])*+)"|((?!['"])[^\r\n]*)))
    )?[^\S\r\n]*(?:\#[^\r\n]*)?(?:\r\n|\r|\n|\Z)""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPES: Final = dict(zip("abfnrtv", "\a\b\f\n\r\t\v", strict=True))
_REFERENCE: Final = re.compile(r"\$\{([^}:]*)(?::-([^}]*))?\}")
_PORT: Final = 5000
_PORTS_EACH: Final = 100


def spec_from_procfile(
    text: str,
    env: str = "",
    directory: str = "",
    concurrency: Mapping[str, int] | None = None,
    inherited: Mapping[str, str] | None = None,
) -> GroupSpec:
    """Return the job of a Procfile: lines `NAME: COMMAND`, which the shell runs.

    The first process that ends ends the job, with its exit code.  `env` is the content of the file
    `.env`, for all processes, which also have the variables `inherited`.  PORT is the one of that
    file, else the inherited one, else 5000, for the first process type, and 100 more for each next
    type; `concurrency` starts several of a type, each with the next port.

    Raises:
        SpecError: one line that names the line of the file.
    """
    variables = variables_of(env, inherited or {})
    given = variables.get("PORT") or (inherited or {}).get("PORT") or str(_PORT)
    if (port := parse_port(given, at_least=0)) is None:
        raise SpecError("PORT", given, "must be a port")
    children: dict[str, AnySpec] = {}
    names: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if (found := _LINE.fullmatch(line.strip())) is None:
            raise SpecError(f"line {number}", line, "must be NAME: COMMAND")
        name, command = found.groups()
        if name in names:
            raise SpecError(f"line {number}", name, "must be a name that no other line has")
        if (count := (concurrency or {}).get(name, 1)) > NPROC_MAX:
            raise SpecError("concurrency", count, f"must be at most {NPROC_MAX}")
        first = port + _PORTS_EACH * len(names)
        if parse_port(str(last := first + max(count, 1) - 1), at_least=0) is None:
            raise SpecError("PORT", str(last), "must be a port")
        own = [{"PORT": str(first + rank), "PS": f"{name}.{rank + 1}"} for rank in range(count)]
        names.append(name)
        if count:
            children[name] = LaunchSpec(
                Command(("/bin/sh", "-c", command)),
                nproc_per_node=count,
                restart=RestartPolicy(scope="group" if count == 1 else "worker"),
                env=variables,
                worker_env=own,
                cwd=directory or None,
            )
    for name in concurrency or {}:
        if name not in names:
            problem = f"must name a process type{did_you_mean(name, names)}"
            raise SpecError("concurrency", name, problem)
    return GroupSpec(children, ends_with=[*children])


def variables_of(text: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a file `.env`, as python-dotenv reads it; or SpecError.

    `${NAME}` and `${NAME:-DEFAULT}` refer to earlier variables, and to those `inherited`.
    """
    found: dict[str, str] = {}
    position = 0
    while position < len(text):
        if (match := _BINDING.match(text, position)) is None:
            number, line = text.count("\n", 0, position) + 1, text[position:].partition("\n")[0]
            raise SpecError(f".env, line {number}", line, "must be NAME=VALUE")
        position = match.end()
        quoted, plain, single, double, value = match.groups()
        if single is not None:
            value = re.sub(r"\\([\\'])", r"\1", single)
        elif double is not None:
            value = re.sub(r"\\([\\'\"abfnrtv])", lambda one: _ESCAPES.get(one[1], one[1]), double)
        else:
            value = re.sub(r"\s+#.*", "", value or "").rstrip()
        if name := quoted or plain:
            found[name] = _resolved(value, {**inherited, **found})
    return found


def _resolved(value: str, known: Mapping[str, str]) -> str:
    return _REFERENCE.sub(lambda one: known.get(one[1], one[2] or ""), value)
