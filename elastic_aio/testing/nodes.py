"""Simulated nodes: each finds a store, takes part, and runs what it is told to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from random import Random
from typing import Protocol

from msgspec import Struct

from elastic_aio.events import Event, StandingBy
from elastic_aio.outcome import Failure, JobState
from elastic_aio.policy import Action, RestartPolicy
from elastic_aio.rendezvous.base import Begin, Conclude, Ending, Halt, NodeCard, Pause, Placement
from elastic_aio.rendezvous.base import Report as AgentReport
from elastic_aio.rendezvous.commands import Command, Rules
from elastic_aio.rendezvous.member import Member, Probe, Reaction
from elastic_aio.rendezvous.state import Coordinator
from elastic_aio.rendezvous.tickets import Ticket
from elastic_aio.restarts import RestartBook
from elastic_aio.testing.attendance import Attendance
from elastic_aio.testing.crew import Crew, Work
from elastic_aio.testing.network import Network
from elastic_aio.testing.places import Place
from elastic_aio.testing.timeline import Machine

__all__ = ["Node", "Settings", "Witness", "World"]

_LOOK_EACH_S = 0.25
_FIRST_ANSWER_S, _ANSWER_S = 1.0, 0.3
"""How long an endpoint of which nothing is seen is waited for, at first and later."""
_FIRST_TURN_S, _TURN_S = 3.0, 0.3
"""How much later the second endpoint may be served than the first, at first and later."""
_HOME_EACH_S = 1.0
_PROBE_S = 1.0


class Settings(Struct, frozen=True):
    """What all nodes of a job were started with; times in seconds."""

    rules: Rules
    endpoints: tuple[str, ...]
    max_restarts: int
    restart: RestartPolicy
    decide: Callable[[Failure], Action]
    deciding: float
    heartbeat_timeout: float
    store_grace: float
    read_timeout: float
    close_timeout: float
    exit_barrier_timeout: float


class Witness(Protocol):
    """Who sees all that happens, and knows what never may."""

    def decided(self, node: Node, coordinator: Coordinator, commands: list[Command]) -> None:
        """See what a coordinator has decided."""

    def told(self, node: Node, event: Event) -> None:
        """See an event of the job."""

    def begun(self, node: Node, begin: Begin) -> None:
        """See a node being told to begin a round."""

    def started(self, node: Node, placement: Placement) -> None:
        """See workers being started."""

    def concluded(self, node: Node, ending: Ending) -> None:
        """See the job end for a node."""

    def note(self, who: str, what: str) -> None:
        """Write down what happened."""


class World(Protocol):
    """Where the nodes live."""

    network: Network
    places: dict[str, Place]

    def machine(self, name: str) -> Machine:
        """Return a machine by its name."""

    def open_place(self, endpoint: str) -> Place:
        """Let a machine serve a store."""

    def node_at(self, machine: str) -> Node | None:
        """Return the node that lives on a machine."""


class _Sight(Enum):
    NOTHING = 0
    ABSENT = 1
    STORE = 2
    RUN = 3


class Node:
    """One node of the job: one incarnation of its agent's process."""

    def __init__(
        self,
        name: str,
        machine: Machine,
        world: World,
        settings: Settings,
        witness: Witness,
        random: Random,
        *,
        nproc: int,
        wish: int | None,
        work: Callable[[Node, Placement], Work],
    ) -> None:
        """Prepare; nothing happens before `start`."""
        self.name = name
        self.machine = machine
        self.network = world.network
        self.settings = settings
        self.witness = witness
        self.random = random
        self.ending: Ending | None = None
        self.has_left = False
        self.is_standing_by = False
        self.attendance: Attendance | None = None
        self.crew = Crew(self)
        self.book = RestartBook(settings.max_restarts, settings.restart, random.random)
        rules = settings.rules
        self.member = Member(
            Ticket(
                serial=0,
                card=NodeCard(machine.name, 1, nproc, "default"),
                address=machine.name,
                port=self.crew.port,
                wish=wish,
                minimum=rules.minimum,
                maximum=rules.maximum,
            )
        )
        self._world = world
        self._work = work
        self._place: Place | None = None
        self._search = 0
        self._graces = 0
        self._is_in_grace = False
        self._has_met = False

    def __repr__(self) -> str:
        running = self.crew.running
        runs = "nothing" if running is None else f"round {running.round} ({running.origin})"
        return f"<Node {self.name}: {self.member.ticket.standing}, runs {runs}>"

    @property
    def is_living(self) -> bool:
        """Whether it takes part, or tries to."""
        return self.machine.is_alive and not self.has_left and self.ending is None

    @property
    def running(self) -> Placement | None:
        """The place whose workers are alive here."""
        return self.crew.running if self.machine.is_alive else None

    def story(self, what: str) -> None:
        """Write down what happens here."""
        self.witness.note(self.name, what)

    def work(self, placement: Placement) -> Work:
        """Return what the workers of a round do here."""
        return self._work(self, placement)

    # -------------------------------------------------- between member and agent

    def start(self) -> None:
        """Begin to look for the others."""
        self._look_for_store()

    def act(self, actions: Iterable[Reaction]) -> None:
        """Do what the member has decided."""
        for action in actions:
            match action:
                case Begin():
                    self.is_standing_by = False
                    self.crew.instructed(action)
                    self.member.reserved(self.crew.port)
                case Halt() | Pause() | Conclude():
                    self.crew.instructed(action)
                case Probe():
                    self._probe(action)
                case StandingBy():
                    self.is_standing_by = True
                    self.witness.told(self, action)
                case Event():
                    self.witness.told(self, action)
        self._ticket_changed()

    def report(self, report: AgentReport) -> None:
        """Take a report of the agent."""
        self.member.report(report)
        self._ticket_changed()

    def _ticket_changed(self) -> None:
        if self.attendance is not None:
            self.attendance.ticket_changed()

    def _probe(self, probe: Probe) -> None:
        machine = self._world.machine(probe.address)
        is_there = machine.is_alive and not machine.is_paused
        if is_there and self.network.is_open_both_ways(self.machine.name, machine.name):
            self.machine.after(0.01, self._probed, probe.round, "")
        else:
            self.machine.after(_PROBE_S, self._probed, probe.round, "no answer")

    def _probed(self, round: int, trouble: str) -> None:
        self.member.probed(round, trouble)
        self._ticket_changed()

    # ------------------------------------------------------------ finding stores

    def _look_for_store(self) -> None:
        self._search += 1
        self._look(self._search, self.machine.now, {})

    def _look(self, search: int, began: float, sights: dict[str, _Sight]) -> None:
        if search != self._search or self.has_left:
            return
        endpoints = self.settings.endpoints
        for endpoint in endpoints:
            sight = self._see(endpoint)
            if sight is not _Sight.NOTHING:
                sights[endpoint] = sight
        elapsed = self.machine.now - began
        chosen = self._choose([sights.get(one, _Sight.NOTHING) for one in endpoints], elapsed)
        if chosen is not None and self._attend(endpoints[chosen]):
            return
        if elapsed > self.settings.read_timeout:
            self.act(self.member.give_up("no store could be found"))
            return
        self.machine.after(_LOOK_EACH_S, self._look, search, began, sights)

    def _see(self, endpoint: str) -> _Sight:
        machine = self._world.machine(endpoint)
        if machine.is_paused or not self.network.is_open_both_ways(self.machine.name, endpoint):
            return _Sight.NOTHING
        place = self._world.places.get(endpoint)
        if place is None or not place.is_open or not machine.is_alive:
            return _Sight.ABSENT
        return _Sight.RUN if place.has_run else _Sight.STORE

    def _choose(self, sights: list[_Sight], elapsed: float) -> int | None:
        best = sights.index(_Sight.RUN) if _Sight.RUN in sights else None
        rivals = sights if best is None else sights[:best]
        if best is None and _Sight.STORE in sights:
            best = sights.index(_Sight.STORE)
        if _Sight.NOTHING in rivals and elapsed < (_ANSWER_S if self._has_met else _FIRST_ANSWER_S):
            return None
        if best is not None:
            return best
        for index, endpoint in enumerate(self.settings.endpoints):
            turn = index * (_TURN_S if self._has_met else _FIRST_TURN_S)
            if endpoint == self.machine.name and elapsed >= turn:
                return index
        return None

    def _attend(self, endpoint: str) -> bool:
        place = self._world.places.get(endpoint)
        if place is None or not place.is_open:
            if endpoint != self.machine.name:
                return False
            place = self._place = self._world.open_place(endpoint)
            self.story(f"serves a store at {endpoint}")
        elif self._see(endpoint) in (_Sight.NOTHING, _Sight.ABSENT):
            return False
        self.member.found(self.machine.name, is_host=endpoint == self.machine.name)
        self.member.reserved(self.crew.port)
        self._has_met = True
        self.attendance = Attendance(self, place)
        index = self.settings.endpoints.index(endpoint)
        if index and (endpoint == self.machine.name or self._world.node_at(endpoint) is None):
            self.machine.after(_HOME_EACH_S, self._go_home, self.attendance, index)
        return True

    def _go_home(self, attendance: Attendance, index: int) -> None:
        """Leave a later endpoint for an earlier one at which there is a store again."""
        if attendance.is_over or self.member.has_ended:
            return  # once the end is known, nobody must miss it
        earlier = self.settings.endpoints[:index]
        if any(self._see(one) is _Sight.RUN for one in earlier):
            attendance.end("the others meet at an earlier endpoint")
        else:
            self.machine.after(_HOME_EACH_S, self._go_home, attendance, index)

    def _close_place(self) -> None:
        if self._place is not None and self._place.is_open:
            self._place.close()
        self._place = None

    # ------------------------------------------------------------ without a store

    def attended(self) -> None:
        """The others know that this node is there."""
        self._is_in_grace = False
        self._graces += 1

    def store_lost(self, attendance: Attendance, why: str) -> None:
        """Look for another store, and stop what runs if that takes too long."""
        if attendance is not self.attendance:
            return
        self.attendance = None
        self._close_place()
        self.story(f"loses the store at {attendance.place.endpoint}: {why}")
        if self.has_left or self.member.has_ended:
            return
        if not self._is_in_grace:
            self._is_in_grace = True
            self._graces += 1
            self.machine.after(self.settings.store_grace, self._cut_off, self._graces)
        self._look_for_store()

    def _cut_off(self, grace: int) -> None:
        if self._is_in_grace and grace == self._graces:
            self._is_in_grace = False
            self.act(self.member.cut_off("no store could be found"))

    # ------------------------------------------------------------------ leaving

    def concluded(self, ending: Ending) -> None:
        """The job is over."""
        if self.ending is None:
            self.ending = ending
            self.story(f"ends: {ending.state}, {ending.why}")
            self.witness.concluded(self, ending)
            self._see_off()

    def leave(self, why: str) -> None:
        """Leave by itself."""
        if self.has_left:
            return
        self.story(f"leaves: {why}")
        self.has_left = True
        if self.ending is None and self.crew.is_done:
            self.ending = Ending(JobState.SUCCEEDED, why, 0)
        self._finish()

    def _see_off(self) -> None:
        attendance = self.attendance
        if attendance is None:
            self._finish()
            return
        place = attendance.place
        if attendance.bureau is None and place.machine is not self.machine:
            self._finish()
            return
        attendance.say_goodbye()
        office = place.keyspace.peek(b"coordinator")
        self._wait_for_others(attendance, office, self.machine.now + self.settings.close_timeout)

    def _wait_for_others(self, attendance: Attendance, office: bytes | None, until: float) -> None:
        """Stay until the coordinator has told everybody; it leaves last."""
        place, bureau = attendance.place, attendance.bureau
        if bureau is not None:
            is_over = bureau.coordinator.is_over
        else:
            is_over = office is None or place.keyspace.peek(b"coordinator") != office
        if is_over or attendance.is_over or self.machine.now >= until:
            self._finish()
        else:
            self.machine.after(0.05, self._wait_for_others, attendance, office, until)

    def _finish(self) -> None:
        self.has_left = True
        if self.attendance is not None:
            self.attendance.end("leaves")
        self.attendance = None
        self._close_place()
        self.crew.dismiss()

    def died(self) -> None:
        """Its process is gone."""
        self.has_left = True
        attendance, self.attendance = self.attendance, None
        if attendance is not None:
            attendance.died()
        if self._place is not None:
            self._place.close()
