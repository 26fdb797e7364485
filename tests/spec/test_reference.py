"""The tables of docs/reference, against the fields: their names, defaults and options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import elastic_aio
from docs.site.reference import PAGES, POLLED, SPECS, heading_of
from elastic_aio import GroupSpec, LaunchSpec, TlsSpec
from elastic_aio.cli.parser import option_parser
from elastic_aio.cli.run_options import RUN_OPTIONS
from elastic_aio.spec import job, rendezvous, restart
from elastic_aio.spec.fields import REQUIRED, ConfKey, SpecValue, all_fields, spec_fields
from elastic_aio.spec.probe import Exec, Http, LogMatch, PolledProbe, Tcp
from elastic_aio.spec.rdzv_conf import ENGINE, TLS, WITHOUT_EFFECT, conf_fields
from elastic_aio.spec.rendezvous import ENGINE_ENTRIES, EngineSpec, RendezvousSpec
from elastic_aio.spec.sockets import SocketSpec

REFERENCE = Path(elastic_aio.__file__).parent.parent / "docs/reference"
COMMAND_LINE = (REFERENCE / "command-line.md").read_text()
REQUIRED_ARGUMENTS: dict[type[SpecValue], tuple[Any]] = {
    LaunchSpec: ("x",),
    GroupSpec: ({"a": LaunchSpec("x")},),
    SocketSpec: ("tcp://h:1",),
    Http: ("http://h",),
    Tcp: ("h:1",),
    Exec: ("x",),
    LogMatch: ("x",),
}
NAMES = {**vars(job), **vars(rendezvous), **vars(restart)}


def rows(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading, without its two lines of titles."""
    section = text.split(f"\n{heading}\n", 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert lines is not None
    return [re.split(r"(?<!\\) \| ", row.strip("| ")) for row in lines[0].splitlines()[2:]]


def value_of(text: str) -> Any:
    """Return a default as a table writes it: `10,000`, `"null"`, `LogSpec()`, `SIGHUP, SIGINT`."""
    text = text.replace("`", "")
    if text.startswith("SIG"):
        return text.split(", ")
    return eval(re.sub(r"(?<=\d),(?=\d)", "", text), {**NAMES})


@pytest.mark.parametrize("owner", SPECS, ids=lambda owner: owner.__name__)
def test_every_field_is_in_its_table_with_its_default(owner: type[SpecValue]) -> None:
    found: dict[str, str] = {}
    for names, default, *_ in rows((REFERENCE / "spec.md").read_text(), heading_of(owner)):
        found |= dict.fromkeys(re.findall(r"\w+", names), default)
    fields = spec_fields(owner)
    if owner in POLLED:
        fields = {name: fields[name] for name in fields.keys() - spec_fields(PolledProbe).keys()}
    assert found.keys() == fields.keys()
    make: Any = owner
    entrypoint = REQUIRED_ARGUMENTS.get(owner, ())
    for name, described in fields.items():
        if described.default is REQUIRED:
            assert found[name] == "required"
        else:
            value = make(*entrypoint, **{name: value_of(found[name])})
            assert getattr(value, name) == described.default, name


def test_the_tables_mark_the_options_that_have_a_variable() -> None:
    run = COMMAND_LINE.split("\n## aio-elastic run\n")[1].split("\n## ")[0]
    marked = re.findall(r"^\| ((?:`.*?` ?(?:, |or )?)+)(P?) \|", run, re.MULTILINE)
    found = {name: mark for names, mark in marked for name in re.findall(r"--([\w-]+)", names)}
    for option in RUN_OPTIONS:
        assert found.get(option.name, "") == "P" * option.has_variable, option.name


def test_every_key_of_the_rendezvous_is_in_the_table() -> None:
    table = rows(COMMAND_LINE, "### Keys of `--rdzv-conf`")
    found = {name: cells[2] for cells in table for name in re.findall(r"`(\w+)`", cells[0])}
    for _, described in (*all_fields(RendezvousSpec), *all_fields(TlsSpec)):
        if isinstance(key := described.option, ConfKey):
            least = found[key.name].partition(" or more")
            assert (int(least[0]) if least[1] else None) == key.least, key.name
    keys = {*TLS, *ENGINE, "timeout", "token_file"}
    keys |= {*conf_fields(RendezvousSpec), *conf_fields(EngineSpec)}
    assert found.keys() == keys
    help_ = str(option_parser(RUN_OPTIONS, "x").epilog)
    assert [key for key in keys if not re.search(rf"\b{key}\b", help_)] == []
    accepted = {key for entry in ENGINE_ENTRIES for key in entry.conf_keys} | {*WITHOUT_EFFECT}
    assert [key for key in accepted if f"`{key}`" not in COMMAND_LINE] == []


def test_every_row_of_options_is_made_from_the_code() -> None:
    """A row in a form that the generator does not know would stay as it was written by hand."""
    made = PAGES["command-line.md"](re.sub(r"^(\| `-.*) \|$", r"\1 x |", COMMAND_LINE, flags=re.M))
    assert made == COMMAND_LINE


@pytest.mark.parametrize("name", PAGES)
def test_the_tables_are_those_of_the_code(name: str) -> None:
    text = (REFERENCE / name).read_text()
    assert PAGES[name](text) == text, "run `python -m docs.site.reference`"


def test_an_option_sets_one_field() -> None:
    names = [option.name for option in RUN_OPTIONS]
    assert len(names) == len(set(names))
