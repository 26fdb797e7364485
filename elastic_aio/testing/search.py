"""A search through random scenarios, steered towards decisions that were not seen before.

A coordinator's decision is abstracted to a few small values, its situation: what it knows of
the members, and what it does then.  A scenario that reaches new situations is kept, and those
that are kept are varied: what they drew at random is changed in places, so that messages
cross, other faults happen, or fewer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final

from elastic_aio.rendezvous import coordinator_runner
from elastic_aio.rendezvous.state import CoordinatorEffect, CoordinatorState, SendOrder
from elastic_aio.spec.checks import check_number
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.testing.scenarios import Scenario
from elastic_aio.testing.trace import InvariantViolated

_RIVALS: Final = 4
"""Of so many situations, the rarest is returned to."""

_WAVES_MAX: Final = 5
"""How often faults are injected into one scenario at most."""

_MANY: Final = 3
"""So many members count as any higher number of them."""


class Tape(Random):
    """Random numbers that repeat former ones, and go on with new ones."""

    def __init__(self, seed: int, draws: Sequence[float] = ()) -> None:
        """Repeat `draws` first; `seed` is that of all later ones."""
        super().__init__(seed)
        self.draws, self.used = list(draws), 0

    def random(self) -> float:
        """Return the next number; all other methods of a `Random` are made from it."""
        if self.used == len(self.draws):
            self.draws.append(super().random())
        self.used += 1
        return self.draws[self.used - 1]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What repeats a scenario.

    Attributes:
        seed: of its network.
        draws: the random numbers that it draws first.
        end: seed of all later ones.
        waves: how often faults are injected before they are over.
    """

    seed: int
    draws: tuple[float, ...]
    end: int
    waves: int = 1


@dataclass(frozen=True, slots=True)
class Found:
    """A situation that was new.

    Attributes:
        recipe: repeats the scenario that has reached it.
        situation: what the coordinator knew and did.
        place: after how many draws that was.
    """

    recipe: Recipe
    situation: Hashable
    place: int


@dataclass(slots=True)
class SearchResult:
    """What a search has reached."""

    visits: dict[Hashable, int] = field(default_factory=dict)
    """How many scenarios reached each situation."""
    found: list[Found] = field(default_factory=list)
    """How each situation was reached first, in this order."""


def search_scenarios(
    count: int,
    *,
    seed: int = 0,
    spec: LaunchSpec | None = None,
    exit_codes: Sequence[int] = (1, 3),
    is_guided: bool = True,
) -> SearchResult:
    """Play `count` random scenarios, each one after what the former ones have reached.

    The same arguments give the same scenarios.  Without `is_guided` none depends on another,
    to compare; `spec` and `exit_codes` are those of `run_random_scenario`.

    Raises:
        SpecError: an argument is not possible.
        InvariantViolated: one does not hold; `recipe` repeats the scenario.
    """
    check_number("count", count, at_least=0)
    random, result = Random(f"search {seed}"), SearchResult()
    # Of each way: how many situations its scenarios have found, and how many they were.
    yields = {way: [0.0, 0.0] for way in _WAYS}
    for number in range(count):
        way = _anew
        if is_guided and result.found:
            weights = [(found + 1) / (played + 1) for found, played in yields.values()]
            (way,) = random.choices(_WAYS, weights)
        recipe = way(random, result)
        try:
            recipe, situations = play_recipe(recipe, spec, exit_codes)
        except InvariantViolated as error:
            where = f"scenario {number} of the search with seed {seed}"
            violated = InvariantViolated(f"{where}: {error}")
            violated.recipe = recipe
            raise violated from None
        new = situations.keys() - result.visits.keys()
        for situation, place in situations.items():
            result.visits[situation] = result.visits.get(situation, 0) + 1
            if situation in new:
                result.found.append(Found(recipe, situation, place))
        yields[way] = [yields[way][0] + len(new), yields[way][1] + 1]
    return result


def play_recipe(
    recipe: Recipe, spec: LaunchSpec | None = None, exit_codes: Sequence[int] = (1, 3)
) -> tuple[Recipe, dict[Hashable, int]]:
    """Play one scenario; return it with all its draws, and how many precede each situation."""
    tape = Tape(recipe.end, draws=recipe.draws)
    situations: dict[Hashable, int] = {}
    with _observed(situations, tape):
        Scenario(recipe.seed, spec, exit_codes, tape).play(recipe.waves)
    return replace(recipe, draws=tuple(tape.draws[: tape.used])), situations


# --------------------------------------------------------------- ways of variation


def _anew(random: Random, result: SearchResult) -> Recipe:
    """Vary nothing."""
    return Recipe(random.getrandbits(32), (), random.getrandbits(32))


def _rare(random: Random, result: SearchResult) -> Found:
    """Return how a situation was reached that is rare rather."""
    rivals = [random.choice(result.found) for _ in range(_RIVALS)]
    return min(rivals, key=lambda one: result.visits[one.situation])


def _other_end(random: Random, result: SearchResult) -> Recipe:
    """Return to a situation, and go on otherwise, with more faults."""
    found = _rare(random, result)
    waves = min(found.recipe.waves + 1, _WAVES_MAX)
    draws = found.recipe.draws[: found.place]
    return Recipe(found.recipe.seed, draws, random.getrandbits(32), waves)


def _other_moments(random: Random, result: SearchResult) -> Recipe:
    """Draw a few moments and faults before a situation otherwise, or a little otherwise.

    Or delay all messages otherwise, so that they cross.
    """
    found = _rare(random, result)
    draws = list(found.recipe.draws)
    for _ in range(random.randint(1, 4)):
        place, drawn = random.randrange(found.place or 1), random.random()
        near = min(draws[place] * random.uniform(0.8, 1.2), 1 - 2**-53)
        draws[place] = random.choice([drawn, near])
    seed = random.choice([found.recipe.seed, random.getrandbits(32)])
    return replace(found.recipe, seed=seed, draws=tuple(draws))


_WAYS: Final = (_anew, _other_end, _other_moments)


# ------------------------------------------------------------------- situations


@contextmanager
def _observed(situations: dict[Hashable, int], tape: Tape) -> Iterator[None]:
    """Note the situation of each decision meanwhile, and what was drawn before it."""
    module: Any = coordinator_runner  # whose drivers look the function up at each call
    decide = module.decide

    def observe(state: CoordinatorState, now: float) -> list[CoordinatorEffect]:
        before = _knowledge(state, now)
        effects: list[CoordinatorEffect] = decide(state, now)
        kinds = frozenset(
            type(one.order.body if isinstance(one, SendOrder) else one) for one in effects
        )
        situations.setdefault((before, state.phase, kinds), tape.used)
        return effects

    module.decide = observe
    try:
        yield
    finally:
        module.decide = decide


def _knowledge(state: CoordinatorState, now: float) -> Hashable:
    """Abstract what a coordinator knows before it decides."""
    current, statuses = state.round, [one.status for one in state.members.values()]
    placed = len(state.active())
    return (
        state.phase,
        min(placed, _MANY),
        min(len(current.placements) - placed, _MANY),  # those that are gone
        min(len(statuses) - placed, _MANY),  # joiners, and members of other rounds
        frozenset(one.phase for one in statuses),
        any(one.outcome is not None for one in statuses),
        any(one.pending_restart is not None for one in statuses),
        any(one.placement is not None and state.is_elsewhere(one.placement) for one in statuses),
        min(current.members_done, _MANY),
        current.has_lost_member,
        current.is_excused,
        max(0, current.attempt) % 2,
        min(state.outbox.term, _MANY),
        None if state.former is None else state.former.is_open,
        now < state.fenced_until,
    )
