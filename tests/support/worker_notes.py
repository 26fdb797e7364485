"""What workers are told about their world, and whether it fits together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from elastic_aio import RoundFormed


class Note(msgspec.Struct, frozen=True):
    """What a worker says: that it has `started`, got a `signal`, or an `answer`."""

    what: str
    text: str
    time: float
    pid: int
    restart_count: int
    max_restarts: int
    run_id: str
    error_file: str
    rank: int
    local_rank: int
    role_rank: int
    group_rank: int
    world_size: int
    local_world_size: int
    role_world_size: int
    group_world_size: int
    master_port: int
    role_name: str
    master_addr: str

    @property
    def attempt(self) -> int:
        """The attempt that it belongs to, from the folder that it was given."""
        match = re.search(r"/attempt_(\d+)/", self.error_file)
        assert match, self.error_file
        return int(match[1])


def check_world(workers: Sequence[Note]) -> None:
    """Assert that these are all workers of one world, who were told so."""
    count = len(workers)
    assert sorted(one.rank for one in workers) == list(range(count))
    same = {
        (one.world_size, one.group_world_size, one.master_addr, one.master_port, one.attempt,
         one.restart_count, one.max_restarts, one.run_id)
        for one in workers
    }  # fmt: skip
    assert len(same) == 1, f"different worlds: {same}"
    assert workers[0].world_size == count
    groups: dict[int, list[Note]] = {}
    for one in sorted(workers, key=lambda one: one.rank):
        groups.setdefault(one.group_rank, []).append(one)
    # Ranks are cumulative in the order of the groups.
    assert list(groups) == list(range(workers[0].group_world_size))
    for group in groups.values():
        assert [one.local_rank for one in group] == list(range(len(group)))
        assert {one.local_world_size for one in group} == {len(group)}
    for role in {one.role_name for one in workers}:
        members = sorted((one for one in workers if one.role_name == role), key=lambda o: o.rank)
        assert [one.role_rank for one in members] == list(range(len(members)))
        assert {one.role_world_size for one in members} == {len(members)}


def check_rounds(formed: Mapping[str, Iterable[RoundFormed]]) -> None:
    """Assert that no place was given twice, and that a round is the same for all its nodes.

    Args:
        formed: what each node was told, by its name.
    """
    places: dict[tuple[int, int], str] = {}
    rounds: dict[int, tuple[object, ...]] = {}
    for name, events in formed.items():
        for one in events:
            place = (one.round, one.group_rank)
            assert places.setdefault(place, name) == name, (
                f"group rank {one.group_rank} of round {one.round}: {places[place]} and {name}"
            )
            told = (one.attempt, one.group_world_size, one.world_size,
                    one.master_addr, one.master_port, one.changes)  # fmt: skip
            assert rounds.setdefault(one.round, told) == told, f"round {one.round}: {rounds}"
