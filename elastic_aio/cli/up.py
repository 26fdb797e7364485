"""`aio-elastic up`: run the jobs of a file, `jobs.toml` or a Procfile, as one job."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from elastic_aio.cli.options import fields_from, print_error
from elastic_aio.cli.parser import OptionParser, add_options
from elastic_aio.cli.run_options import RunRequest, as_option_error
from elastic_aio.errors import SpecError
from elastic_aio.spec.checks import UsageError, invalid_value, parse_number
from elastic_aio.spec.fields import Option, spec_fields
from elastic_aio.spec.files import spec_from_procfile, spec_from_toml
from elastic_aio.spec.group import AnySpec, GroupSpec
from elastic_aio.spec.logs import LogSpec
from elastic_aio.spec.restart import restarts_text
from elastic_aio.text import counted, error_reason, redacted

if TYPE_CHECKING:
    from elastic_aio.spec.job import LaunchSpec

FILES: Final = ("jobs.toml", "Procfile")
"""The files that are looked for, in this order."""


def main_up(argv: Sequence[str], *, owns_process: bool = True) -> int:
    """Run the jobs of a file; return the exit code.

    With `owns_process` all children of this process belong to them.
    """
    options = [one.option for one in spec_fields(RunRequest).values()]
    parser = OptionParser(
        prog="aio-elastic up",
        description="Run the jobs that a file describes as one job: a tree of children, which start"
        " in their order, and restart each by its own policy.",
        epilog="Exit codes: those of `aio-elastic run`; a group ends as its `ends_with` child, or"
        " as the first essential child that fails.",
    )
    parser.add_argument(
        "file", nargs="?", metavar="FILE", help=f"default: {' or '.join(FILES)} in this directory"
    )
    parser.add_argument(
        "--concurrency",
        metavar="NAMES",
        help="processes of each type of a Procfile, as in 'web=2,worker=4' (default: one of each)",
    )
    add_options(parser, [one for one in options if isinstance(one, Option)])
    try:
        values = vars(parser.parse_args(argv))
        settings = fields_from(values, RunRequest)
        read = partial(read_spec, values["file"] or _default_file(), _counts(values["concurrency"]))
        spec = read()
        color = "never" if "NO_COLOR" in os.environ or not sys.stderr.isatty() else "auto"
        request = RunRequest(spec, command="up", color=color, reread=read, **settings)
    except (UsageError, SpecError) as error:
        return print_error("up", as_option_error(error, {}), 2)
    if request.is_dry_run:
        print(redacted("\n".join(plan_lines(spec))))
        return 0
    from elastic_aio.cli.run import main_run

    return main_run(request, owns_process=owns_process)


def _default_file() -> str:
    found = next(filter(os.path.isfile, FILES), None)
    if found is None:
        raise UsageError(f"FILE: must be given: there is no {' or '.join(FILES)} here")
    return found


def _counts(text: str | None) -> dict[str, int]:
    """Return the numbers of `--concurrency`, by their names."""
    found = {}
    for item in filter(None, (text or "").split(",")):
        name, _, number = item.partition("=")
        found[name.strip()] = parse_number("--concurrency", number.strip())
    return found


def read_spec(path: str, concurrency: Mapping[str, int]) -> AnySpec:
    """Return what a file describes, or raise a UsageError.

    The lines of children have prefixes, unless the `logs` of a TOML file are set.  A `.env` beside
    a Procfile is for its processes.
    """
    text, directory = _text_of(path), os.path.dirname(os.path.abspath(path))
    spec: AnySpec
    try:
        if path.endswith(".toml"):
            if concurrency:
                raise UsageError("--concurrency: has no effect with a TOML file")
            spec = spec_from_toml(text, directory)
        else:
            variables = f"{directory}/.env"
            env = _text_of(variables) if os.path.isfile(variables) else ""
            spec = spec_from_procfile(text, env, directory, concurrency, os.environ)
    except SpecError as error:
        raise UsageError(f"{path}: {error}") from None
    if isinstance(spec, GroupSpec) and spec.logs == LogSpec():
        return spec.replace(children=spec.children, logs=LogSpec(tee=3, streams="joined"))
    return spec


def _text_of(path: str) -> str:
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except UnicodeDecodeError:
        raise invalid_value("FILE", "must be text in UTF-8", path) from None
    except OSError as error:
        raise invalid_value("FILE", f"cannot be read: {error_reason(error)}", path) from None


def plan_lines(spec: AnySpec, name: str = "job") -> Iterator[str]:
    """Yield what would be started, in the order of the starts; an indent for each level."""
    if not isinstance(spec, GroupSpec):
        yield from _leaf_lines(spec, name)
        return
    ends = [f"ends with {' or '.join(spec.ends_with)}"] if spec.ends_with else []
    rules = [spec.strategy, *ends]
    yield f"{name}: {counted(len(spec.children), 'child', 'children')}, {', '.join(rules)}"
    for child in spec.order:
        notes = [f"after {', '.join(spec.after[child])}"] if spec.after.get(child) else []
        notes += [] if spec.is_essential(child) else ["not essential"]
        first, *rest = plan_lines(spec.children[child], child)
        yield "  " + "; ".join([first, *notes])
        yield from (f"  {line}" for line in rest)


def _leaf_lines(spec: LaunchSpec, name: str) -> Iterator[str]:
    from elastic_aio.cli.dry_run import command_text, setting_lines

    number = spec.nproc_per_node
    workers = counted(number, "worker") if isinstance(number, int) else f"workers: {number}"
    restarts = "" if spec.restart.when == "always" else f", {restarts_text(spec.max_restarts)}"
    yield f"{name}: {workers}{restarts}, stop: {spec.stop}"
    for rank in range(len(spec.worker_args) or 1):
        yield f"  command: {command_text(spec, rank)}"
    yield from (f"  {line}" for line in setting_lines(spec))
    for env in filter(None, (spec.env, *spec.worker_env)):
        yield "  env: " + " ".join(f"{one}={shlex.quote(env[one])}" for one in env)
