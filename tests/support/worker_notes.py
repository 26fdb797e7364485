"""The environments of workers as their notes show them, and whether they agree."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from elastic_aio import RoundFormed


class Note(msgspec.Struct, frozen=True):
    """A note of a worker: it has `started`, received a `signal`, or gives an `answer`."""

    what: str
    text: str
    time: float
    node: str
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
        """Its attempt, from the path of its error file."""
        match = re.search(r"/attempt_(\d+)/", self.error_file)
        assert match, self.error_file
        return int(match[1])


read_note = msgspec.json.Decoder(Note).decode


def check_world(workers: Sequence[Note]) -> None:
    """Assert that these are all workers of one world and that their environments agree."""
    count = len(workers)
    assert sorted(note.rank for note in workers) == list(range(count))
    same = {
        (note.world_size, note.group_world_size, note.master_addr, note.master_port, note.attempt,
         note.restart_count, note.max_restarts, note.run_id)
        for note in workers
    }  # fmt: skip
    assert len(same) == 1, f"different worlds: {same}"
    assert workers[0].world_size == count
    groups: dict[int, list[Note]] = {}
    for note in sorted(workers, key=lambda note: note.rank):
        groups.setdefault(note.group_rank, []).append(note)
    # Ranks are cumulative in the order of the groups.
    assert list(groups) == list(range(workers[0].group_world_size))
    for group in groups.values():
        assert [note.local_rank for note in group] == list(range(len(group)))
        assert {note.local_world_size for note in group} == {len(group)}
    for role in {note.role_name for note in workers}:
        members = sorted(
            (note for note in workers if note.role_name == role), key=lambda note: note.rank
        )
        assert [note.role_rank for note in members] == list(range(len(members)))
        assert {note.role_world_size for note in members} == {len(members)}


def check_rounds(formed: Mapping[str, Iterable[RoundFormed]]) -> None:
    """Assert that no group rank was given twice, and that all nodes of a round agree on it."""
    places: dict[tuple[int, int], str] = {}
    rounds: dict[int, tuple[object, ...]] = {}
    for name, events in formed.items():
        for event in events:
            place = (event.round, event.group_rank)
            assert places.setdefault(place, name) == name, (
                f"group rank {event.group_rank} of round {event.round}: {places[place]} and {name}"
            )
            facts = (event.attempt, event.group_world_size, event.world_size,
                    event.master_addr, event.master_port, event.changes)  # fmt: skip
            assert rounds.setdefault(event.round, facts) == facts, f"round {event.round}: {rounds}"
