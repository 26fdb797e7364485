"""Random trees of supervised jobs in virtual time, and what must hold at each of their steps.

The supervisors and the leaves are the shipped state machines; only the workers are simulated, by
random times and exit codes.  `TreeRules` knows nothing of a machine but its inputs and effects.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Final

from elastic_aio.agent.machine import (
    AgentPhase,
    BackOff,
    BackoffElapsed,
    CancelBackOff,
    Finish,
    GroupStarted,
    GroupStopped,
    PreemptionReceived,
    Publish,
    RestartReceived,
    SingleNodeMachine,
    Start,
    StartFailed,
    StartGroup,
    StopGroup,
    StopReceived,
    WorkerEnded,
)
from elastic_aio.agent.supervisor import (
    SETTLED_AFTER_S,
    Arm,
    AskChild,
    ChildEnded,
    ChildPhase,
    ChildReady,
    ChildRequest,
    ChildRestartReceived,
    ChildResult,
    ChildStarted,
    ChildState,
    ChildStopReceived,
    Disarm,
    LeafRestarted,
    PublishOf,
    ReloadReceived,
    ReportReady,
    ScaleReceived,
    StartChild,
    StopChild,
    SupervisorMachine,
    TimerElapsed,
)
from elastic_aio.child_events import ChildFinished, ChildRestarting, ReloadFailed, ReloadFinished
from elastic_aio.errors import SpecError
from elastic_aio.events import AttemptFailed, Restarting
from elastic_aio.outcome import SIGKILL, SIGTERM, ExitStatus, Failure, JobOutcome, JobState
from elastic_aio.spec.group import (
    AnySpec,
    GroupSpec,
    group_of,
    has_children,
    outermost_group,
    reports_ready,
    template_of,
)
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.restart import Backoff, RestartPolicy
from elastic_aio.testing.virtual_time import Trace, VirtualTime

_STOP_S: Final = 3.0
"""The longest time in which the workers of a leaf stop."""
_START_S: Final = 2.0
_READY_S: Final = 5.0


class SimTree:
    """A tree of supervisors in virtual time; `run` it, request what you like, then `finish`."""

    def __init__(self, spec: AnySpec, seed: int) -> None:
        self.random = Random(seed)
        self.time = VirtualTime()
        self.trace = Trace(self.time, seed)
        self.outcome: JobOutcome | None = None
        self.is_calm = False  # no worker fails any more
        self.root = SimSupervisor(self, outermost_group(spec), "", self._on_end)
        self.root.receive(Start())

    def _on_end(self, ended: SimEnd) -> None:
        self.outcome = ended.outcome

    def run(self, seconds: float) -> None:
        """Go on for so many seconds, or to the end; raise `InvariantViolated`."""
        until = self.time.now + seconds
        while self.outcome is None and self.time.step(until):
            if self.trace.error is not None:
                raise self.trace.error
        if self.trace.error is not None:
            raise self.trace.error

    def after(self, longest: float, call: Callable[..., None], *args: Any) -> None:
        """Schedule a call within a random time."""
        self.time.at(self.time.now + self.random.uniform(0, longest), call, *args)

    def supervisors(self) -> Iterator[SimSupervisor]:
        """Yield those that run, the outermost first."""
        left = [self.root]
        while left:
            found = left.pop()
            yield found
            left += [one for one in found.live.values() if isinstance(one, SimSupervisor)]

    def finish(self, stop: StopReceived) -> JobOutcome:
        """Stop the tree; its end is bounded by the stops of all leaves, one after the other."""
        starts = sum(len(one.live) + len(one.machine.children) for one in self.supervisors())
        self.root.receive(stop)
        self.run((starts + 1) * (_STOP_S + _START_S))
        if self.outcome is None:
            self.trace.fail("a stop has not ended the tree")
            self.run(0)
        assert self.outcome is not None
        return self.outcome


@dataclass(frozen=True, slots=True)
class SimEnd:
    """How a start of a child ended."""

    outcome: JobOutcome
    failures: tuple[Failure, ...] = ()
    ran_for: float = 0.0
    since: float = 0.0
    is_permanent: bool = False
    spec: AnySpec | None = None


# ------------------------------------------------------------------ a supervisor


class SimSupervisor:
    """Performs the effects of a `SupervisorMachine`."""

    def __init__(
        self,
        tree: SimTree,
        spec: AnySpec,
        path: str,
        on_end: Callable[[SimEnd], None],
        report: Callable[[bool], None] = lambda is_ready: None,
    ) -> None:
        self.tree = tree
        self.path = path
        self.machine = SupervisorMachine(spec, tree.random.random)
        self.live: dict[tuple[str, int], SimSupervisor | SimLeaf] = {}
        self._rules = TreeRules(self)
        self._on_end = on_end
        self._report = report
        self._inputs: deque[Any] = deque()
        self._is_handling = False
        self._armed: dict[str, int] = {}

    def receive(self, received: Any) -> None:
        self._inputs.append(received)
        if self._is_handling:
            return
        self._is_handling = True
        while self._inputs:
            received = self._inputs.popleft()
            self.note(received)
            effects = self.machine.handle(received, self.tree.time.now)
            self._rules.check(received, effects)
            for effect in effects:
                self.note(effect, "  ")
                self._perform(effect)
        self._is_handling = False

    def note(self, what: Any, indent: str = "") -> None:
        names = ("name", "generation", "number", "reason", "signal", "outcome", "is_ready", "event")
        parts = [f"{name}={getattr(what, name)}" for name in names if hasattr(what, name)]
        self.tree.trace.note(self.path or "/", f"{indent}{type(what).__name__} {' '.join(parts)}")

    def request(self, request: ChildRequest) -> None:
        """Hand in a request of a user, unless it is refused."""
        try:
            self.machine.check(request)
        except SpecError:
            return
        self.receive(request)

    def stop(self, stop: StopReceived) -> None:
        self.receive(stop)

    def kill(self, stop: StopReceived) -> None:
        for child in [*self.live.values()]:
            child.kill(stop)
        self.receive(stop)

    def ask(self, request: Any) -> None:
        self.request(request) if isinstance(request, ChildRequest) else self.receive(request)

    def _perform(self, effect: Any) -> None:
        match effect:
            case StartChild():
                self._start(effect)
            case Arm(name, token, delay):
                self._armed[name] = token
                self.tree.time.at(self.tree.time.now + delay, self._elapse, name, token)
            case Disarm(name):
                self._armed.pop(name, None)
            case ReportReady(is_ready):
                self._report(is_ready)
            case Finish(outcome):
                if self.live:
                    self.tree.trace.fail(f"{self.path}: over, and {[*self.live]} run")
                machine = self.machine
                since = self.tree.time.now - machine.ending_at
                end = SimEnd(
                    outcome, outcome.failures, 0.0, since, machine.is_permanent, machine.spec
                )
                self._on_end(end)
        child = self.live.get((getattr(effect, "name", ""), getattr(effect, "generation", -1)))
        match effect:
            case StopChild(_, _, stop) if child is not None:
                child.stop(stop)
            case AskChild(_, _, request) if child is not None:
                child.ask(request)

    def _start(self, effect: StartChild) -> None:
        name, generation, spec = effect.name, effect.generation, effect.spec
        path = f"{self.path}/{name}".strip("/")

        def on_end(end: SimEnd) -> None:
            del self.live[name, generation]
            if self.tree.random.random() < 0.2:  # what was on its way
                late: list[ChildResult] = [
                    ChildReady(name, generation),
                    ChildStarted(name, generation),
                    LeafRestarted(name, generation, 1),
                ]
                self.tree.after(3, self.receive, self.tree.random.choice(late))
            self.tree.time.at(
                self.tree.time.now,
                self.receive,
                ChildEnded(
                    name,
                    generation,
                    end.outcome,
                    failures=end.failures,
                    ran_for=end.ran_for,
                    since=end.since,
                    is_permanent=end.is_permanent,
                    spec=end.spec,
                ),
            )

        if not has_children(spec):
            leaf = SimLeaf(self.tree, effect, path, on_end, self.receive)
            self.live[name, generation] = leaf
            leaf.receive(Start())
            return

        def report(is_ready: bool) -> None:
            if is_ready:
                self.receive(ChildStarted(name, generation))
            self.receive(ChildReady(name, generation, is_ready))

        child = SimSupervisor(self.tree, spec, path, on_end, report)
        self.live[name, generation] = child
        child.receive(Start())

    def _elapse(self, name: str, token: int) -> None:
        if self._armed.get(name) == token:
            del self._armed[name]
            self.receive(TimerElapsed(name, token))


# ------------------------------------------------------------------------ a leaf


class SimLeaf:
    """A gang of one simulated worker, supervised by the state machine of a job of one node."""

    def __init__(
        self,
        tree: SimTree,
        effect: StartChild,
        path: str,
        on_end: Callable[[SimEnd], None],
        receive: Callable[[Any], None],
    ) -> None:
        assert isinstance(effect.spec, LaunchSpec)
        self._tree = tree
        self._spec = effect.spec
        self._path = path
        self._child = effect.name, effect.generation
        self._on_end = on_end
        self._report = receive
        self._machine = SingleNodeMachine(
            effect.spec, 1, tree.random.random, restarts=effect.restarts
        )
        self._inputs: deque[Any] = deque()
        self._is_handling = False
        self._is_killed = False
        self._back_off = 0
        self._failure: Failure | None = None
        self._failures: tuple[Failure, ...] = ()
        self._stops = 0
        self._is_ending = False
        self._ran_until = 0.0  # when the group of the present attempt began to end

    def receive(self, received: Any) -> None:
        self._inputs.append(received)
        if self._is_handling:
            return
        self._is_handling = True
        while self._inputs:
            for effect in self._machine.handle(self._inputs.popleft()):
                self._perform(effect)
        self._is_handling = False

    def stop(self, stop: StopReceived) -> None:
        if stop.signal == SIGKILL:
            self.kill(stop)
        else:
            self.receive(stop)

    def kill(self, stop: StopReceived) -> None:
        self._is_killed = True
        if self._stops:
            self._tree.after(0.01, self._end, self._machine.attempt, self._stops)
        self.receive(stop)

    def ask(self, request: Any) -> None:
        self.receive(request)

    def _perform(self, effect: Any) -> None:
        attempt = self._machine.attempt
        match effect:
            case StartGroup():
                self._failure = None
                self._is_ending = False
                self._tree.after(_START_S, self._begin, attempt)
            case StopGroup():
                if not self._is_ending:
                    self._is_ending, self._ran_until = True, self._tree.time.now
                self._stops += 1
                longest = 0.01 if self._is_killed else _STOP_S
                self._tree.after(longest, self._end, attempt, self._stops)
            case BackOff(_, delay):
                self._back_off += 1
                when = self._tree.time.now + delay
                self._tree.time.at(when, self._elapse, attempt, self._back_off)
            case CancelBackOff():
                self._back_off += 1
            case Publish(AttemptFailed() as failed):
                self._failures = failed.failures
            case Publish(Restarting() as restarting):
                restarted = LeafRestarted(*self._child, restarting.restarts, self._failures)
                self._failures = ()
                self._tree.time.at(self._tree.time.now, self._report, restarted)
            case Finish(outcome):
                self._on_end(
                    SimEnd(
                        outcome,
                        self._failures,
                        self._machine.uptime,
                        self._tree.time.now - self._ran_until,
                        self._machine.is_permanent,
                    )
                )

    def _begin(self, attempt: int) -> None:
        """Start the worker, or fail to."""
        if self._machine.phase is not AgentPhase.STARTING or self._machine.attempt != attempt:
            return
        random, now = self._tree.random, self._tree.time.now
        if random.random() < 0.03 and not self._tree.is_calm:
            self._failure = self._failed(127)
            is_permanent = random.random() < 0.3
            self.receive(StartFailed(attempt, "it cannot be started", is_permanent, 127, 0))
            return
        self.receive(GroupStarted(attempt, now))
        self._report(ChildStarted(*self._child))
        if reports_ready(self._spec) and random.random() < 0.9:
            self._tree.after(_READY_S, self._become_ready, attempt)
        if self._tree.is_calm or random.random() < 0.4:
            return  # it runs until it is stopped
        code = random.choice([0, 0, 0, 1, 1, 3])
        self._tree.after(random.choice([0.5, 5, 40]), self._exit, attempt, code)

    def _become_ready(self, attempt: int) -> None:
        if self._machine.phase is AgentPhase.RUNNING and self._machine.attempt == attempt:
            self._report(ChildReady(*self._child))

    def _exit(self, attempt: int, code: int) -> None:
        if self._machine.phase is not AgentPhase.RUNNING or self._machine.attempt != attempt:
            return
        if code and self._tree.is_calm:
            return
        if code:
            self._failure = self._failed(code)
        self.receive(WorkerEnded(attempt, 0, ExitStatus.from_returncode(code), False))

    def _failed(self, code: int) -> Failure:
        status, now = ExitStatus.from_returncode(code), self._tree.time.now
        return Failure(rank=0, local_rank=0, pid=1, host="h", status=status, time=now, order=0)

    def _end(self, attempt: int, number: int) -> None:
        if number == self._stops and self._machine.phase is AgentPhase.STOPPING:
            failures = () if self._failure is None else (self._failure,)
            now, until = self._tree.time.now, self._ran_until
            self.receive(GroupStopped(attempt, now, failures, ran_until=until))

    def _elapse(self, attempt: int, number: int) -> None:
        if number == self._back_off:
            self.receive(BackoffElapsed(attempt))


# --------------------------------------------------------------------- the rules


class TreeRules:
    """What must hold at each step of one supervisor."""

    def __init__(self, supervisor: SimSupervisor) -> None:
        self._supervisor = supervisor
        self._starts: dict[str, int] = {}
        self._live: dict[str, dict[int, StartChild]] = {}
        self._stopping: set[tuple[str, int]] = set()
        self._ready: dict[tuple[str, int], float] = {}  # since when; started, without a `ready`
        self._restarts: dict[tuple[str, int], int] = {}
        self._finished: dict[str, JobState] = {}
        self._held: set[str] = set()  # stopped by request
        self._must_end: set[tuple[str, int]] = set()  # before anything starts
        self._counted: list[float] = []
        self._is_exhausted = self._may_be_exhausted = False
        self._is_complete = self._may_be_complete = False
        self._requested: set[tuple[str, int]] = set()  # those that a request may stop
        self._granted: Counter[str] = Counter()  # restarts since the last change of a child
        self._again: set[str] = set()  # those that have succeeded, and may be started again
        self._is_early = False  # the last child that has ended was not ready before
        self._fatal: ChildFinished | None = None
        self._failed: set[int] = set()  # exit codes of essential children, once it ends
        self._stop: StopReceived | None = None
        self._notice: PreemptionReceived | None = None
        self._is_killed = False
        self._has_reload = self._ends_reload = False

    @property
    def _group(self) -> GroupSpec:
        return group_of(self._supervisor.machine.spec)

    def _fail(self, text: str) -> None:
        self._supervisor.tree.trace.fail(f"{self._supervisor.path or '/'}: {text}")

    @property
    def _now(self) -> float:
        return self._supervisor.tree.time.now

    @property
    def _is_ending(self) -> bool:
        is_over = self._is_exhausted or self._is_complete
        return is_over or bool(self._stop or self._notice or self._fatal)

    def _after(self, name: str) -> tuple[str, ...]:
        group = self._group
        after = group.after.get(name, ())
        order = group.order
        if group.strategy == "rest_for_one" and name in order[1:]:
            after = (*after, order[order.index(name) - 1])
        return after

    def _dependents(self, name: str) -> set[str]:
        """Return the children that are after one, whether directly or not."""
        found: set[str] = set()
        left = [name]
        while left:
            other = left.pop()
            more = {one for one in self._live if other in self._after(one)} - found
            found |= more
            left += more
        return found

    def check(self, received: Any, effects: list[Any]) -> None:
        """Check the effects of an input."""
        swept = {*self._must_end}
        self._note(received)
        self._note_exhausted(received, effects, swept)
        events = [  # a child that does not run has finished at once
            getattr(one, "event", None)
            for one in effects
            if not (isinstance(one, PublishOf) and isinstance(one.event, ReloadFinished))
        ]
        self._ends_reload = any(isinstance(one, ReloadFailed | ReloadFinished) for one in events)
        for effect in effects:
            match effect:
                case StartChild():
                    self._check_start(effect)
                case StopChild():
                    self._check_stop(effect)
                case PublishOf(name, event):
                    self._check_event(name, event, received, effects)
                case Finish(outcome):
                    self._check_outcome(outcome)
        if any(isinstance(one, ReloadFinished) for one in events):
            self._check_reloaded()
        self._held &= self._group.children.keys()  # others were removed
        live = {(name, one) for name, found in self._live.items() for one in found}
        if received is self._notice:
            found = {(one.name, one.generation) for one in effects if isinstance(one, AskChild)}
            is_over = not self._has_live_end  # then those that wait for their stop have it already
            if not is_over and live - self._stopping - found - swept - self._requested:
                self._fail(f"{live - self._stopping - found} have no notice")
        if isinstance(received, StopReceived) and self._is_killed and live - self._stopping:
            self._fail(f"{live - self._stopping} are not killed at once")

    @property
    def _has_live_end(self) -> bool:
        """Whether a child runs that a notice waits for."""
        group, live = self._group, {name for name, found in self._live.items() if found}
        names = [name for name in group.children if group.is_essential(name)] or [*group.children]
        return bool(live & {*names}) and live >= {*group.ends_with}

    # --------------------------------------------------------------- inputs

    def _note(self, received: Any) -> None:
        granting = ChildRestartReceived | RestartReceived | ReloadReceived | ScaleReceived
        if isinstance(received, granting):
            self._granted.clear()
        if isinstance(received, ChildRequest | RestartReceived):
            self._again |= self._finished.keys()
            self._requested |= {(name, one) for name, live in self._live.items() for one in live}
        match received:
            case StopReceived():
                self._stop = self._stop or received
                self._is_killed |= received.signal == SIGKILL
            case PreemptionReceived() if not self._is_ending or (
                self._notice and not self._stop and received.is_earlier_than(self._notice)
            ):
                self._notice = received
            case ChildResult(name, generation) if generation in self._live.get(name, {}):
                self._note_result(received, self._live[name][generation])
            case ChildStopReceived(name):
                self._held.add(name)
            case ChildRestartReceived(name):
                self._held.discard(name)
            case ReloadReceived():
                self._has_reload = True
            case ScaleReceived("", number):
                self._held = {name for name in self._held if int(name) < number}

    def _note_result(self, result: Any, start: StartChild) -> None:
        key = result.name, result.generation
        is_essential = self._group.is_essential(result.name)
        match result:
            case ChildStarted() if not reports_ready(start.spec) or start.rank is not None:
                if not reports_ready(start.spec):
                    self._ready.setdefault(key, self._now)
            case ChildReady(is_ready=is_ready):
                self._ready.pop(key, None)
                if is_ready:
                    self._ready[key] = self._now
            case LeafRestarted(restarts=restarts):
                self._ready.pop(key, None)
                is_more = restarts > self._restarts.get(key, 0)
                self._restarts[key] = restarts
                is_present = key[1] == min(self._live[key[0]]) and key not in self._stopping
                if is_more and is_present and not self._is_ending:
                    self._count(result.name)
            case ChildEnded(outcome=outcome):
                del self._live[key[0]][key[1]]
                has_ready = isinstance(start.spec, LaunchSpec) and start.spec.ready is not None
                is_early = has_ready and key not in self._ready and outcome.exit_code == 0
                is_awaited = any(key[0] in self._after(one) for one in self._group.children)
                self._is_early = is_early and is_awaited
                self._ready.pop(key, None)
                self._must_end.discard(key)
                if self._is_ending and is_essential and outcome.state is JobState.FAILED:
                    self._failed.add(outcome.exit_code)

    def _count(self, name: str) -> None:
        if not self._group.is_essential(name) or self._is_new(name):
            return
        self._is_exhausted |= self._has_no_restart
        self._counted.append(self._now)

    def _is_new(self, name: str) -> bool:
        return self._supervisor.machine.children[name].is_new

    @property
    def _has_no_restart(self) -> bool:
        window = self._group.restart_window
        if window is None:
            return False
        recent = [time for time in self._counted if self._now - time < window.seconds]
        return len(recent) >= window.count

    def _note_exhausted(
        self, received: Any, effects: list[Any], swept: set[tuple[str, int]]
    ) -> None:
        """Note a child whose end, without any other reason, ends the group."""
        if not isinstance(received, ChildEnded) or self._is_ending or not self._has_no_restart:
            return
        if not self._group.is_essential(received.name) or self._is_new(received.name):
            return
        key = received.name, received.generation
        is_replaced = key in self._stopping | swept or bool(self._live[received.name])
        if not is_replaced and not any(isinstance(one, PublishOf) for one in effects):
            self._may_be_exhausted = True
            self._is_exhausted = key not in self._requested

    # -------------------------------------------------------------- effects

    def _check_start(self, start: StartChild) -> None:
        name, live = start.name, self._live.setdefault(start.name, {})
        if start.generation != self._starts.get(name, 0):
            self._fail(f"{name} has generation {start.generation}")
        self._starts[name] = start.generation + 1
        if live and (
            len(live) > 1 or not self._has_reload or self._stopping & {(name, g) for g in live}
        ):
            self._fail(f"{name} is started beside {[*live]}")
        if name in self._held:
            self._fail(f"{name} was stopped by request, and is started")
        if self._is_ending:
            self._fail(f"{name} is started, and the group ends")
        if self._must_end:
            self._fail(f"{name} is started before the end of {self._must_end}")
        for other in self._after(name):
            if not live and not self._is_released(other):
                self._fail(f"{name} is started before {other} is ready")
        live[start.generation] = start
        self._finished.pop(name, None)

    def _is_released(self, name: str) -> bool:
        state = self._finished.get(name)
        is_over = state is JobState.SUCCEEDED or (
            state is JobState.FAILED and not self._group.is_essential(name)
        )
        return is_over or any((name, one) in self._ready for one in self._live.get(name, ()))

    def _check_stop(self, stop: StopChild) -> None:
        name, key = stop.name, (stop.name, stop.generation)
        live = self._live.get(name, {})
        if stop.generation not in live:
            self._fail(f"{key} is stopped, and does not run")
            return
        others = [
            one for one in live if one > stop.generation and (name, one) not in self._stopping
        ]
        is_first = key not in self._stopping
        self._stopping.add(key)
        if self._is_killed or stop.stop.signal == SIGKILL or not is_first:
            return
        if others and not self._is_ending:
            new = live[others[0]]
            since = self._ready.get((name, new.generation))
            wait = 0.0 if reports_ready(new.spec) else SETTLED_AFTER_S
            if since is None or self._now - since < wait - 1e-6:
                self._fail(f"{key} is replaced by {others[0]}, which is not ready")
        if stop.generation != min(live):
            return  # a replacement
        is_asked = self._is_ending or name in self._held or key in self._must_end | self._requested
        may_end = self._may_be_complete or self._may_be_exhausted or self._ends_reload
        if not (is_asked or others or may_end):
            self._fail(f"{key} is stopped without a reason")
        for other in self._dependents(name):
            for one in self._live.get(other, ()):
                if self._is_ending or (other, one) in self._must_end:
                    self._fail(f"{key} is stopped before {other, one}")

    def _check_event(self, name: str, event: Any, received: Any, effects: list[Any]) -> None:
        match event:
            case ChildRestarting():
                self._finished.pop(name, None)
                if isinstance(received, ChildEnded):
                    self._check_restart(received)
                    self._count(name)
                    if self._is_exhausted:
                        self._fail(f"{name} restarts, and its window is used up")
                if isinstance(received, ChildEnded) or self._live.get(name):
                    self._begin_sweep(name)
            case ChildFinished():
                self._check_finished(name, event)
            case ReloadFailed():
                self._requested |= {(one, g) for one, live in self._live.items() for g in live}
                is_own = isinstance(received, ChildResult | TimerElapsed)
                if is_own and received.name == name:
                    self._check_failed_reload(received, effects)

    def _check_restart(self, ended: ChildEnded) -> None:
        """The policy of the child grants the restart."""
        spec = self._supervisor.machine.children[ended.name].spec
        when = spec.restart if isinstance(spec, GroupSpec) else spec.restart.when
        self._granted[ended.name] += 1
        has_failed = ended.outcome.state is JobState.FAILED or self._is_early
        is_granted = has_failed and not ended.is_permanent
        if when == "always":
            is_granted = is_granted or ended.outcome.state is JobState.SUCCEEDED
        else:
            is_granted = is_granted and self._granted[ended.name] <= spec.max_restarts
        if not is_granted or when == "never":
            self._fail(f"{ended.name} is restarted against its policy: {spec.max_restarts} {when}")

    def _check_failed_reload(self, received: Any, effects: list[Any]) -> None:
        """The new worker is stopped; the old one is not, if it runs."""
        name, live = received.name, self._live.get(received.name, {})
        stops = [one for one in effects if isinstance(one, StopChild)]
        stopped = {one.generation for one in stops if one.name == name}
        has_ended = isinstance(received, ChildEnded)
        is_alone = self._group.strategy == "one_for_one"  # else others are stopped before it
        if is_alone and not has_ended and live and max(live) not in stopped:
            self._fail(f"{name} keeps a new worker that has failed")
        if stopped & {min(live, default=-1)} and (has_ended or len(live) > 1):
            self._fail(f"{name} is stopped, and its replacement has failed")

    def _begin_sweep(self, name: str) -> None:
        group, order = self._group, self._group.order
        if group.strategy == "one_for_one":
            return
        if group.strategy == "rest_for_one":
            order = order[order.index(name) :]
        self._again |= self._finished.keys()
        self._must_end |= {(one, g) for one in order for g in self._live.get(one, ())}

    def _check_finished(self, name: str, event: ChildFinished) -> None:
        if name not in self._group.children:
            return  # it was removed
        self._finished[name] = event.state
        self._again.discard(name)
        group = self._group
        spec = self._supervisor.machine.children[name].spec
        when = spec.restart if isinstance(spec, GroupSpec) else spec.restart.when
        is_policy = isinstance(spec, GroupSpec) or spec.restart.scope == "group"
        if (
            is_policy
            and when == "always"
            and event.state is JobState.SUCCEEDED
            and name not in self._held
        ):
            self._fail(f"{name} has succeeded, and is not started again")
        is_failure = event.state in (JobState.FAILED, JobState.PREEMPTED)
        is_new = event.state is JobState.FAILED and self._is_new(name)
        is_fatal = name in group.ends_with or (group.is_essential(name) and is_failure)
        is_fatal = is_fatal and not is_new
        if is_fatal and not self._is_ending:
            self._fatal = event
        names = [name for name in group.children if group.is_essential(name)] or [*group.children]
        if not self._is_ending and all(one in self._finished for one in names):
            self._is_complete = not self._again.intersection(names)
            self._may_be_complete = True

    def _check_reloaded(self) -> None:
        """Each worker that runs, and is not stopped, has the new spec."""
        children = self._supervisor.machine.children
        self._requested |= {(one, g) for one, live in self._live.items() for g in live}
        for name, live in self._live.items():
            for generation, start in live.items():
                is_new = name not in children or start.spec.name == self._group.children[name].name
                if (name, generation) not in self._stopping and not is_new:
                    self._fail(f"{name} runs the old spec after a reload")

    def _check_outcome(self, outcome: JobOutcome) -> None:
        if any(self._live.values()):
            self._fail("over, and children run")
        state, group = outcome.state, self._group
        names = [name for name in group.children if group.is_essential(name)] or [*group.children]
        ends = {self._finished.get(name) for name in names}
        if self._fatal is not None:
            expected = {(self._fatal.state, self._fatal.exit_code)}
        elif self._notice is not None:
            expected = {(JobState.PREEMPTED, outcome.exit_code)}
        elif self._is_exhausted:
            expected = {(JobState.FAILED, outcome.exit_code)}
        elif self._stop is not None and not self._is_complete:
            expected = {(JobState.STOPPED, outcome.exit_code), (JobState.SUCCEEDED, 0)}
            expected |= {(JobState.FAILED, code) for code in self._failed}
        elif JobState.FAILED in ends and group.is_essential(names[0]):
            expected = {(JobState.FAILED, outcome.exit_code)}
        elif JobState.STOPPED in ends and template_of(self._supervisor.machine.spec) is not None:
            expected = {(JobState.STOPPED, outcome.exit_code)}
        elif JobState.SUCCEEDED in ends:
            expected = {(JobState.SUCCEEDED, 0)}
        else:
            expected = {(one, outcome.exit_code) for one in ends if one is not None}
        if self._may_be_exhausted:
            expected |= {(JobState.FAILED, outcome.exit_code)}
        if self._may_be_complete:
            expected |= {(one, outcome.exit_code) for one in ends if one is not None}
        if (state, outcome.exit_code) not in expected:
            self._fail(f"ends with {outcome}, and not {expected}")
        if state is JobState.FAILED and not outcome.exit_code:
            self._fail(f"has failed with exit code 0: {outcome}")
        if not (self._is_ending or self._may_be_exhausted) and None in ends:
            self._fail(f"is over before all of {names} have ended")


# ------------------------------------------------------------- random trees


def random_spec(random: Random, depth: int = 0) -> AnySpec:
    """Return a random leaf or group."""
    if depth and (depth > 2 or random.random() < 0.6):
        return _random_leaf(random, may_be_restarted=True)
    strategy: Any = random.choice(["one_for_one", "one_for_one", "rest_for_one", "one_for_all"])
    if depth and random.random() < 0.15:
        return GroupSpec.replicas(_random_leaf(random), random.randint(1, 3), window=(4, 20.0))
    names = [f"c{number}" for number in range(random.randint(1, 4))]
    children = {name: random_spec(random, depth + 1) for name in names}
    after = {
        name: random.sample(names[:number], random.randint(0, min(2, number)))
        for number, name in enumerate(names)
        if random.random() < 0.5
    }
    random.shuffle(names)
    essential: list[Any] = [name for name in names if random.random() < 0.7]
    restart: Any = random.choice(["on-failure", "on-failure", "always", "never"])
    return GroupSpec(
        {name: children[name] for name in names},
        strategy=strategy,
        after=after,
        essential=random.choice([None, essential]),
        ends_with=random.choice([(), (), essential[:1]]),
        window=random.choice([None, (1, 5.0), (3, 20.0), (5, 10.0), "auto"]),
        restart=restart,
        max_restarts=random.randint(0, 2) if restart == "on-failure" else 0,
    )


def _random_leaf(random: Random, *, may_be_restarted: bool = False) -> LaunchSpec:
    when: Any = random.choice(["on-failure", "on-failure", "always", "never"])
    scope: Any = random.choice(["group", "group", "group", "worker", "rest"])
    limit = 0 if when == "never" else random.choice([0, 1, 3])
    changes: dict[str, Any] = {}
    if limit:
        changes["backoff"] = random.choice([None, Backoff(initial=2, cap=5, jitter=True)])
    return LaunchSpec(
        [f"x{random.randrange(1_000_000)}"],
        nproc_per_node=random.randint(1, 4),
        max_restarts=limit,
        restart=RestartPolicy(scope=scope, when=when, **changes),
        ready=random.choice([None, "notify"]),
    )


class _RandomRequests:
    """What users ask of a tree at random times."""

    def __init__(self, tree: SimTree) -> None:
        self._tree = tree
        self._random = tree.random

    def make(self) -> None:
        """Make a random request of a random supervisor."""
        tree, random = self._tree, self._random
        if tree.outcome is not None or tree.is_calm:
            return
        supervisor = random.choice([*tree.supervisors()])
        names = [*supervisor.machine.children]
        name = random.choice([*names, ""])
        kinds: list[Callable[[], object]] = [
            partial(supervisor.request, ChildRestartReceived(name, "a request")),
            partial(supervisor.request, ReloadReceived(name, None)),
            partial(supervisor.request, ReloadReceived(name, self._changed(supervisor, name))),
            partial(supervisor.request, ScaleReceived(name, random.randint(1, 5))),
        ]
        if name:
            signal = random.choice([None, None, SIGTERM, SIGKILL])
            kinds += [partial(supervisor.request, ChildStopReceived(name, "a request", signal))]
        random.choice(kinds)()

    def _changed(self, supervisor: SimSupervisor, name: str) -> AnySpec:
        """Return another spec for a child, or for a supervisor itself."""
        random, children = self._random, supervisor.machine.children
        spec = children[name].spec if name in children else supervisor.machine.spec
        if isinstance(spec, LaunchSpec):
            return spec.replace(entrypoint=[f"x{random.randrange(1_000_000)}"])
        new = {
            one: random_spec(random, 3) if random.random() < 0.3 else spec.children[one]
            for one in spec.children
        }
        return spec.replace(children=new)


def check_settled(tree: SimTree) -> None:
    """Check that each child runs, has ended, or waits for another one that is not ready."""
    for supervisor in tree.supervisors():
        group = group_of(supervisor.machine.spec)
        children = supervisor.machine.children
        for name, child in children.items():
            if child.phase in (ChildPhase.STOPPING, ChildPhase.BACKING_OFF):
                tree.trace.fail(f"{supervisor.path or '/'}: {name} is {child.phase} for ever")
            if child.phase is not ChildPhase.WAITING:
                continue
            after = [*group.after.get(name, ())]
            if group.strategy == "rest_for_one":
                after += group.order[: group.order.index(name)]
            if all(_is_over_or_ready(children[one], group) for one in after):
                tree.trace.fail(f"{supervisor.path or '/'}: {name} waits for nothing")


def _is_over_or_ready(child: ChildState, group: GroupSpec) -> bool:
    is_over = child.phase is ChildPhase.FAILED and not group.is_essential(child.name)
    return child.is_ready or is_over or child.phase is ChildPhase.SUCCEEDED


def run_random_tree(seed: int) -> JobOutcome:
    """Play a random tree with random ends, requests and stops; raise `InvariantViolated`."""
    random = Random(seed)
    tree = SimTree(random_spec(random), seed)
    requests = _RandomRequests(tree)
    for _ in range(random.randint(0, 10)):
        tree.time.at(random.uniform(0, 80), requests.make)
    tree.run(random.choice([0.5, 20, 90]))
    if tree.outcome is None and random.random() < 0.6:
        tree.is_calm = True
        tree.run(300)
        if tree.outcome is None:
            check_settled(tree)
    if tree.outcome is None and random.random() < 0.3:
        for _ in range(random.randint(1, 2)):
            left = random.uniform(0, 9)
            notice = PreemptionReceived("a notice", 1e9, left, tree.time.now + left)
            tree.root.receive(notice)
            if random.random() < 0.5:
                tree.run(random.uniform(0, 15))
    if tree.outcome is not None:
        return tree.outcome
    stop = StopReceived("the end", random.choice([None, SIGTERM]))
    if random.random() < 0.3:
        tree.root.receive(stop)
        tree.run(random.uniform(0, 5))
        stop = StopReceived("at once", SIGKILL)
        tree.root.kill(stop)
    return tree.finish(stop)
