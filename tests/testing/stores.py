"""The keys in the stores of a simulation: statuses, orders and the leader, as written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from elastic_aio.discovery import runs
from elastic_aio.rendezvous import messages
from elastic_aio.store.connection import Service
from elastic_aio.store.keyspace import Client
from elastic_aio.store.replies import CHANGE_SET, RawChange
from elastic_aio.testing.network import Listener
from elastic_aio.testing.simulation import RUN_ID
from elastic_aio.testing.virtual_time import VirtualTime

_PREFIX = f"/{runs.run_prefix(RUN_ID)}/".encode()

Written = messages.LeaderRecord | messages.Order | runs.RunEnd | runs.FormerJob

OnChange = Callable[["SimStore", str, Written], None]


class SimStore(Client):
    """One server's keys of the job: a watch that sees each change when it is made.

    Attributes:
        leader: the record of the coordinator of the newest generation, if there is one.
        orders: the last one for each member.
        generation: of the last order; a job that moves here after an end begins another.
        jobs: which job each generation is.
        ends: how generations have ended, and when in virtual time.
        first_led_at: when it first had a leader, in virtual time.
        joined_at: since when nodes are present as members, in virtual time, by their numbers.
        left_at: when the others were last lost, or have left.
    """

    def __init__(
        self, time: VirtualTime, listener: Listener, service: Service, on_change: OnChange
    ) -> None:
        """Watch; `on_change` is called with each new order or leader and its member.

        Also with each end and its generation, and with the former jobs.
        """
        super().__init__()
        self.listener = listener
        self.host = listener.loop.host
        self.keyspace = service.keyspace
        self.instance = service.instance
        self.leader: messages.LeaderRecord | None = None
        self._led = "0"
        self.statuses: dict[str, messages.MemberStatus] = {}
        self.orders: dict[str, messages.Order] = {}
        self.generation = ""
        self.jobs: dict[str, str] = {}
        self.ends: dict[str, tuple[runs.RunEnd, float]] = {}
        self.first_led_at = math.inf
        self.joined_at: dict[int, float] = {}
        self.left_at: dict[int, float] = {}
        self._time = time
        self._on_change = on_change
        view = self.keyspace.watch(self, None, _PREFIX, -1, is_prefix=True)
        assert not view.pairs, "a store is watched before its first request"

    def __repr__(self) -> str:
        return f"<SimStore at {self.host.name}, {len(self.statuses)} members>"

    @property
    def is_open(self) -> bool:
        """Whether it is served."""
        return self.listener.is_open

    @property
    def leader_number(self) -> int | None:
        """The number of the node that is the coordinator, if it is present."""
        return None if self.leader is None else self.number_of(self.leader.member)

    def number_of(self, member: str) -> int | None:
        """Return the number of the node of a member that is present."""
        status = self.statuses.get(member)
        return None if status is None else status.node.pid

    def was_attended(self, number: int, *, left_after: float, closed_after: float) -> bool:
        """Return whether a node is present as a member, or was.

        It has left, or was lost, after `left_after`, or with the store after `closed_after`.
        """
        if number in self.joined_at:
            return self.listener.closed_at > closed_after
        return self.left_at.get(number, -math.inf) > left_after

    def on_change(self, tag: Any, change: RawChange) -> None:
        generation, _, key = change.key[len(_PREFIX) :].decode().partition("/")
        kind, _, member = key.partition("/")
        is_set = change.kind == CHANGE_SET
        now = self._time.now
        if kind == "coordinator" and int(generation) >= int(self._led):
            self._led = generation
            self.leader = messages.LeaderRecord.decode(change.value) if is_set else None
            if self.leader is not None:
                self.first_led_at = min(self.first_led_at, now)
                self._on_change(self, self.leader.member, self.leader)
        elif generation == "run" and (record := runs.decode_run(change.value)):
            self.jobs[str(record.generation)] = record.job
        elif generation == "jobs":
            for former in runs.decode_former_jobs(change.value):
                self._on_change(self, former.job, former)
        elif kind == "end" and (end := runs.decode_end(change.value if is_set else None)):
            self._on_change(self, generation, end)
            self.ends.setdefault(generation, (end, now))
        elif kind == "t" and is_set:
            status = self.statuses[member] = messages.decode_status(change.value)
            self.joined_at.setdefault(status.node.pid, now)
        elif kind == "t" and member in self.statuses:
            number = self.statuses.pop(member).node.pid
            del self.joined_at[number]
            self.left_at[number] = now
        elif kind == "o" and is_set:
            order = self.orders[member] = messages.decode_order(change.value)
            self.generation = generation
            self._on_change(self, member, order)
        elif kind == "o":
            self.orders.pop(member, None)
