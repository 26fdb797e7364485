"""The pictures: made from the tables of the code, and as they are made now."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from docs.site.pictures import IMAGES, MACHINES, PICTURES, Machine, table_of, way_of
from elastic_aio import LogSpec
from elastic_aio.agent import machine, multi_node, supervisor
from elastic_aio.logs.paths import plan_logs
from elastic_aio.rendezvous import base

all_machines = pytest.mark.parametrize("drawn", MACHINES, ids=lambda drawn: drawn.name)


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_up_to_date(name: str) -> None:
    text = PICTURES[name]()
    assert (IMAGES / f"{name}.svg").read_text() == text, "run `python -m docs.site.pictures`"
    ElementTree.fromstring(text)


@all_machines
def test_a_table_names_inputs_and_effects_that_exist(drawn: Machine) -> None:
    known = {*vars(machine), *vars(multi_node), *vars(supervisor), *vars(base), *vars(drawn.module)}
    rows = drawn.rows()
    assert len(rows) > 15
    for row in rows:
        words = re.findall(r"\b[A-Z][a-z]+(?:[A-Z][a-z]+)+\b", f"{row.what} {row.effects}")
        assert not set(words) - known, row


@all_machines
def test_each_phase_is_entered_and_left(drawn: Machine) -> None:
    """But the first one is entered at the beginning only, and the last one never left."""
    entered = {phase for row in drawn.rows() for phase in drawn.phases_in(row.next)}
    left = {phase for row in drawn.rows() for phase in drawn.phases_in(row.phase)}
    assert entered >= set(drawn.phases[1:])
    assert left >= set(drawn.phases[:-1])


def test_a_row_of_several_lines_is_read_whole() -> None:
    rows = {(row.phase, row.what): row for row in table_of(machine, 1)}
    row = rows["DECIDING, BACKING_OFF", "StopReceived, PreemptionReceived"]
    assert (row.next, row.effects) == ("DONE", "CancelBackOff, Finish")
    last = table_of(MACHINES[2].module, 0)[-1]
    assert (last.phase, last.next) == ("FORMING, DECIDING, BACKING_OFF", "ENDING")


def test_the_way_of_a_line_is_that_of_its_plan() -> None:
    planned = plan_logs(LogSpec(log_dir="x", tee=1, redirects=2), "x/run", 0, 0)
    assert [text for text, _ in way_of(planned.stdout)][1::3] == ["stdout.log", "console"]
    assert [text for text, _ in way_of(planned.stderr)] == ["worker", "stderr.log"]
