"""The search through random scenarios: it repeats itself, and reaches more than chance does.

`ELASTIC_AIO_SEARCH` is the number of scenarios, and `ELASTIC_AIO_SEARCH_SEED` the seed.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from elastic_aio.rendezvous import coordinator_runner
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.rendezvous import RendezvousSpec
from tests.testing.scenarios import (
    FoundViolation,
    Scenario,
    Tape,
    play_recipe,
    search_scenarios,
)

COUNT = int(os.environ.get("ELASTIC_AIO_SEARCH", "40"))
SEED = int(os.environ.get("ELASTIC_AIO_SEARCH_SEED", "0"))
CHUNKS = max(2, COUNT // 1000)  # each within the time of a test, on a busy host too

TWO = LaunchSpec(
    "x",
    nnodes="1:2",
    max_restarts=2,
    rendezvous=RendezvousSpec(last_call_timeout=0.5, join_timeout=12, heartbeat_timeout=2),
)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_scenario_of_a_search_violates_an_invariant(chunk: int) -> None:
    result = search_scenarios(COUNT // CHUNKS, seed=SEED * CHUNKS + chunk)
    print(f"{COUNT // CHUNKS} scenarios reach {len(result.visits)} situations")


def test_a_search_repeats_itself() -> None:
    module: Any = coordinator_runner
    decide = module.decide
    first, second = (search_scenarios(12, seed=3, spec=TWO) for _ in range(2))
    assert first.visits == second.visits
    assert first.found == second.found
    assert search_scenarios(12, seed=4, spec=TWO).visits != first.visits
    assert module.decide is decide, "nothing is observed after the search"


@pytest.mark.slow
def test_a_search_reaches_more_than_chance_does() -> None:
    guided, by_chance = (
        search_scenarios(300, seed=1, spec=TWO, is_guided=is_guided) for is_guided in (True, False)
    )
    assert len(guided.visits) > 1.1 * len(by_chance.visits)


def test_a_situation_is_found_again_by_its_recipe() -> None:
    result = search_scenarios(4, seed=2, spec=TWO)
    found = result.found[-1]
    played, situations = play_recipe(found.recipe, TWO)
    assert played == found.recipe
    assert situations[found.situation] == found.place


def test_a_tape_repeats_its_draws_and_goes_on() -> None:
    first = Tape(1)
    drawn = [first.randint(1, 6), first.choice("abc"), first.random()]
    again = Tape(2, draws=first.draws)
    assert [again.randint(1, 6), again.choice("abc"), again.random()] == drawn
    again.random()
    assert len(again.draws) == len(first.draws) + 1


def test_a_violation_names_its_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def violate(scenario: Scenario, waves: int) -> None:
        scenario.sim.fail("wrong")

    monkeypatch.setattr(Scenario, "play", violate)
    text = r"^scenario 0 of the search with seed 5: .*wrong"
    with pytest.raises(FoundViolation, match=text) as caught:
        search_scenarios(3, seed=5)
    assert caught.value.recipe.waves == 1
