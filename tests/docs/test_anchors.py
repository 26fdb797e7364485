"""Each error, exit code and event leads to its place in the reference, by `aio-elastic help`."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from docs.site.reference import GUIDES, SPECS, command_options, fields_of
from elastic_aio import Agent, Event, StopPlan, follow_job, open_process
from elastic_aio.cli import COMMANDS
from elastic_aio.cli.exit_codes import EXIT_CODES, guide_of_end
from elastic_aio.cli.guides import TABLES, find_pages, sections
from elastic_aio.http import StatusServer
from elastic_aio.multiprocessing import spawn, start_processes
from elastic_aio.outcome import EndCause
from elastic_aio.reasons import KNOWN_CODES, KNOWN_TEXTS, LOST_PEER, known_cause
from elastic_aio.status import Level
from elastic_aio.store import RemoteStore, Store, StoreServer
from elastic_aio.store.etcd import EtcdStore
from elastic_aio.testing import WorkerBehavior
from tests.support.cli import REPOSITORY

PACKAGE = REPOSITORY / "elastic_aio"
ERRORS = re.compile(r"SpecError|UsageError|invalid_value|(_?check|parse|read)(ed)?_\w+")
"""What raises or makes an error of the name that is its first argument."""
FIELDS = [f"{owner.__spec_prefix__}{name}" for owner in SPECS for name in fields_of(owner)]
CODES = sorted({each.code for each in EXIT_CODES if isinstance(each.code, int)})

ARGUMENTS: dict[str, Callable[..., Any]] = {
    "address": StatusServer,
    "amount": Store.add,
    "argv": open_process,
    "endpoint": follow_job,
    "endpoints": EtcdStore,
    "envs": start_processes,
    "exit_code": WorkerBehavior,
    "host": StoreServer,
    "items": Store.multi_set,
    "key": Store.set,
    "keys": Store.wait,
    "linger": Store.lease,
    "lost_after": EtcdStore,
    "min_ttl": RemoteStore,
    "name": Store.prefixed,
    "nprocs": spawn,
    "number": Agent.scale,
    "pass_fds": open_process,
    "peer_timeout": RemoteStore,
    "ping_interval": RemoteStore,
    "port": StoreServer,
    "rank": Agent.forward_signal,
    "ranks": Agent.logs,
    "reason": Agent.stop,
    "reply_timeout": RemoteStore,
    "seconds": Agent.preempt,
    "spec": Agent,
    "start_duration": WorkerBehavior,
    "stop_duration": WorkerBehavior,
    "stop.grace": StopPlan.within,
    "streams": Agent.logs,
    "ttl": Store.lease,
    "value": Store.set,
}
"""Arguments of functions, whose errors a program gets; the API reference describes them."""
FILES = {
    "behavior": "simulation",
    "the": "trees",
    "line": "trees",
    ".env": "trees",
    "PORT": "trees",
    "concurrency": "command-line",
    "nproc": "command-line",
}
"""What stands in a file of jobs, in a form or in a simulation, and the page about it."""
WORDS = {
    "CHILD": "command-line",
    "FILE": "command-line",
    "JOB": "control",
    "NUMBER": "command-line",
    "PAGE": "command-line",
    "RANK": "command-line",
    "SECTION": "command-line",
    "SIGNAL": "command-line",
    "shell": "command-line",
}
"""Arguments of commands."""
BEGINNINGS = ("--", "tls.")
"""Of names of options and fields, each of which has a row."""
SENTENCES = ("a program is required", "a script is required")


@cache
def text_of(page: str) -> str:
    return Path(find_pages()[page]).read_text()


def has_place(name: str) -> bool:
    """Whether `aio-elastic help NAME` prints rows."""
    return any(sections(text_of(page), name) for page in TABLES)


def names_in_errors() -> Iterator[tuple[str, str]]:
    """Yield each name that an error of the package begins with, and where."""
    for path in PACKAGE.rglob("*.py"):
        if "compat" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = node.func.id if isinstance(node.func, ast.Name) else ""
            first = node.args[0]
            if isinstance(first, ast.JoinedStr):  # of its beginning, if that is a name
                first = first.values[0]
            text = first.value if isinstance(first, ast.Constant) else None
            if ERRORS.fullmatch(called) and isinstance(text, str):
                yield text, f"{path.relative_to(REPOSITORY)}:{node.lineno}"


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_has_its_row(name: str) -> None:
    """An error of a field begins with its name."""
    assert has_place(name)


@pytest.mark.parametrize("command", ["run", *COMMANDS])
def test_an_option_has_its_row(command: str) -> None:
    """An error of the command line begins with the option."""
    names = [name for option in command_options(command) for name in option.option_strings]
    assert not [name for name in names if "_" not in name and not has_place(name)]


def test_each_error_begins_with_a_name_that_has_a_place() -> None:
    """Those that are made from a variable begin with the name of a field or an option."""
    known = {*ARGUMENTS, *FILES, *WORDS, *BEGINNINGS}
    wrong = []
    for text, where in names_in_errors():
        name = re.split(r"[:=\[]|(?<=\w) |, |(?<=engine)\.$", text)[0].split("/")[-1]
        if not (
            name in BEGINNINGS or has_place(name) or name in known or text.startswith(SENTENCES)
        ):
            wrong.append((text, where))
    assert not wrong


@pytest.mark.parametrize("name", FILES | WORDS)
def test_the_page_of_a_name_has_it(name: str) -> None:
    assert name.removeprefix("the ") in text_of((FILES | WORDS)[name])


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_is_that_of_a_public_function(name: str) -> None:
    function = ARGUMENTS[name]
    assert name.rpartition(".")[2] in inspect.signature(function).parameters
    assert function.__doc__


@pytest.mark.parametrize("code", CODES)
def test_an_exit_code_has_its_rows(code: int) -> None:
    assert sections(text_of("exit-codes"), str(code))


@pytest.mark.parametrize("guide", sorted({each.guide for each in EXIT_CODES}))
def test_the_section_about_an_exit_code_is_there(guide: str) -> None:
    page, section = guide.split()
    assert sections(text_of(page), section)


@pytest.mark.parametrize("cause", EndCause)
def test_each_end_of_a_job_without_a_failed_worker_has_its_section(cause: EndCause) -> None:
    (found,) = [each for each in EXIT_CODES if cause in each.causes]
    assert guide_of_end(1, cause) == found.guide


def test_the_section_of_a_code_without_a_cause() -> None:
    """The first row counts; no row has a code that only a worker exits with."""
    assert guide_of_end(1) == "sizing where-one-job-stops"
    assert guide_of_end(127) == "runbook an-exit-code"
    assert guide_of_end(37) == "failures"


CAUSES = [LOST_PEER, *KNOWN_CODES.values(), *(cause for _, cause in KNOWN_TEXTS)]
PROVEN: list[dict[str, Any]] = [
    {"signal": 9, "oom_kills": "the kernel has killed 1 process"},
    {"signal": 7, "is_shm_full": True},
    {"signal": 24},
    {"signal": 25},
]
"""Of what `known_cause` gets: the status proves these."""


@pytest.mark.parametrize("cause", CAUSES + [known_cause("", **each)[0] for each in PROVEN])
def test_a_known_cause_has_a_row_that_says_what_to_do(cause: str) -> None:
    (table,) = re.findall(r"\| `cause` \|.*\n\|---.*\n((?:\|.*\n)+)", text_of("failures"))
    rows = [row.strip("| \n").split(" | ") for row in table.splitlines()]
    word = cause.replace("{}", "NAME").partition(" (")[0]
    full = cause.partition("file size")[1] or word.partition(" killed")[0]
    (action,) = {row[2] for row in rows if re.search(rf"`(?:\.\.\. of )?{full}(?![:\w])", row[0])}
    assert action


@pytest.mark.parametrize("event", sorted(one.__name__ for one in Event.__subclasses__()))
def test_an_event_has_its_row(event: str) -> None:
    assert sections(text_of("events-reference"), event)


def test_each_event_of_a_fault_names_the_section_that_says_what_to_do() -> None:
    """Those of level WARNING, but not the first of a job; `docs.site.reference` finds headings."""
    known = {kind.__name__: kind for kind in Event.__subclasses__()}
    warnings = {name for name, kind in known.items() if kind._level == Level.WARNING}
    assert GUIDES.keys() - {"JobFinished"} == warnings - {"JobStarted"}
    for name, guide in GUIDES.items():
        (rows,) = sections(text_of("events-reference"), name)
        assert rows.rstrip().endswith(f"](../guides/{guide}). |"), name
