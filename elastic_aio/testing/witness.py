"""What must never happen in a job of many nodes, looked at whenever something does."""

from __future__ import annotations

from collections.abc import Callable

from elastic_aio.events import Event, RoundFormed
from elastic_aio.rendezvous.base import Begin, Conclude, Ending, Halt, Pause, Placement
from elastic_aio.rendezvous.commands import Command, Send
from elastic_aio.rendezvous.state import Coordinator
from elastic_aio.rendezvous.tickets import Body
from elastic_aio.testing.nodes import Node, Settings
from elastic_aio.testing.timeline import Timeline

__all__ = ["InvariantBroken", "Judge"]


class InvariantBroken(AssertionError):
    """What must never happen has happened; the message ends with the story so far."""


class Judge:
    """Keeps the story of a simulation, and compares each step with the rules."""

    def __init__(self, timeline: Timeline, settings: Settings, seed: int) -> None:
        """Begin with nothing seen."""
        self.story: list[str] = []
        self.rounds: dict[tuple[int, str], Placement] = {}
        """One place of each round that was begun anywhere."""
        self.restarts = 0
        """The most restarts that any round was told of."""
        self.has_split = False
        """Whether there may have been two jobs that did not hear of each other."""
        self.endings: dict[str, Ending] = {}
        self.on_event: Callable[[Node, Event], None] | None = None
        self.on_order: Callable[[Node, str, Body], None] | None = None
        self._timeline = timeline
        self._settings = settings
        self._seed = seed
        self._running: dict[str, Node] = {}
        self._attempts: dict[tuple[str, int], int] = {}
        self._last: dict[str, Placement] = {}
        self._seats: dict[Coordinator, dict[str, int]] = {}

    def note(self, who: str, what: str) -> None:
        """Write down what happened."""
        self.story.append(f"{self._timeline.now:9.3f} {who}: {what}")

    def fail(self, what: str) -> None:
        """Say that a rule is broken.

        Raises:
            InvariantBroken: always.
        """
        story = "\n".join(self.story)
        raise InvariantBroken(f"seed {self._seed}: {what}\n{story}")

    # ---------------------------------------------------------------- the rules

    def decided(self, node: Node, coordinator: Coordinator, commands: list[Command]) -> None:
        """A coordinator has decided: at most one order each, and one round at a time."""
        begun: dict[str, Placement] = {}
        for command in commands:
            if not isinstance(command, Send):
                continue
            if self.on_order is not None:
                self.on_order(node, command.member, command.order.body)
            match command.order.body:
                case Begin(placement):
                    begun[command.member] = placement
                    self.note(node.name, _told(command.member, placement))
                case Halt() | Conclude() | Pause() as body:
                    self.note(node.name, f"tells {command.member}: {type(body).__name__}")
        if begun and next(iter(begun.values())).round == coordinator.round:
            self._formed(coordinator, begun)

    def _formed(self, coordinator: Coordinator, begun: dict[str, Placement]) -> None:
        one = next(iter(begun.values()))
        spans = {member: placement.span for member, placement in begun.items()}
        if (one.round, one.origin) in self.rounds and len(begun) != one.span.group_world_size:
            return  # told again, in part
        size = self._settings.rules
        ranks = sorted(span.group_rank for span in spans.values())
        if ranks != list(range(len(ranks))) or len(ranks) != one.span.group_world_size:
            self.fail(f"group ranks {ranks} in a round of {one.span.group_world_size}")
        if not size.minimum <= len(ranks) <= size.maximum:
            self.fail(f"{len(ranks)} nodes are not {size.wanted}")
        former = self._seats.get(coordinator, {})
        for member, span in spans.items():
            rank = former.get(member)
            if rank is not None and rank < len(ranks) and span.group_rank != rank:
                self.fail(f"{member} had group rank {rank} and has {span.group_rank}")
        self._seats[coordinator] = {member: span.group_rank for member, span in spans.items()}

    def begun(self, node: Node, begin: Begin) -> None:
        """A node was told to begin a round: it is newer, and all agree about it."""
        placement = begin.placement
        last = self._last.get(node.name)
        self._last[node.name] = placement
        if last is not None:
            if placement.round <= last.round or placement.attempt <= last.attempt:
                self.fail(f"{node.name} was in {_brief(last)} and is told {_brief(placement)}")
            # Each side of a split counts for itself; what they have in common is the highest.
            is_restart = (
                not self.has_split and begin.cause is not None and begin.cause.root is not None
            )
            if placement.restarts < last.restarts + is_restart or placement.changes < last.changes:
                self.fail(f"{node.name} was in {_brief(last)} and is told {_brief(placement)}")
        if placement.restarts > self._settings.max_restarts:
            self.fail(f"{placement.restarts} restarts")
        self.restarts = max(placement.restarts, self.restarts)
        key = placement.round, placement.origin
        same = self.rounds.setdefault(key, placement)
        if _common(same) != _common(placement):
            self.fail(f"two rounds of one name: {_brief(same)} and {_brief(placement)}")
        round = self._attempts.setdefault((placement.origin, placement.attempt), placement.round)
        if round != placement.round:
            self.fail(f"attempt {placement.attempt} is that of rounds {round}, {placement.round}")
        if not placement.span.group_rank:
            expected = node.machine.name, node.crew.port
            if (placement.master_addr, placement.master_port) != expected:
                self.fail(f"{node.name} has reserved {expected} for {_brief(placement)}")

    def started(self, node: Node, placement: Placement) -> None:
        """Workers start: nobody else has their ranks, and nothing newer was told."""
        self.note(node.name, f"runs {_brief(placement)} as group rank {placement.span.group_rank}")
        if placement.round != node.crew.newest:
            self.fail(f"{node.name} starts {placement.round} and was told {node.crew.newest}")
        self._running[node.name] = node
        for name, other in list(self._running.items()):
            held = other.running
            if held is None:
                del self._running[name]
            elif other is not node and _is_same_place(held, placement):
                self.fail(f"{node.name} and {name} have the same place in {_brief(placement)}")

    def told(self, node: Node, event: Event) -> None:
        """Pass an event on."""
        if self.on_event is not None:
            self.on_event(node, event)
        if not isinstance(event, RoundFormed):
            self.note(node.name, f"event {type(event).__name__} {getattr(event, 'why', '')}")

    def concluded(self, node: Node, ending: Ending) -> None:
        """The job ends for a node."""
        self.endings[node.name] = ending


def _is_same_place(one: Placement, other: Placement) -> bool:
    return (one.round, one.origin, one.span.group_rank) == (
        other.round,
        other.origin,
        other.span.group_rank,
    )


def _common(placement: Placement) -> tuple[object, ...]:
    """What is the same for all nodes of a round."""
    span = placement.span
    return (
        placement.attempt,
        placement.restarts,
        placement.changes,
        span.group_world_size,
        span.world_size,
        placement.master_addr,
        placement.master_port,
    )


def _brief(placement: Placement) -> str:
    return (
        f"round {placement.round} of {placement.origin} (attempt {placement.attempt},"
        f" restarts {placement.restarts}, {placement.span.group_world_size} nodes)"
    )


def _told(member: str, placement: Placement) -> str:
    return f"tells {member}: begin {_brief(placement)} as {placement.span.group_rank}"
