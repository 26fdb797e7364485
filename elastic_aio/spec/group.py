"""A group of jobs that are supervised together: `GroupSpec`; and independent workers as such."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from elastic_aio.errors import SpecError
from elastic_aio.spec import checks
from elastic_aio.spec.fields import Converted, SpecValue, field
from elastic_aio.spec.job import NPROC_MAX, LaunchSpec, checked_max_restarts
from elastic_aio.spec.logs import LogSpec
from elastic_aio.spec.restart import (
    RESTART_WHEN,
    UNLIMITED,
    RestartPolicy,
    RestartWhen,
    RestartWindow,
    checked_window,
)
from elastic_aio.spec.stop import PreemptionSpec
from elastic_aio.text import did_you_mean

Strategy = Literal["one_for_one", "rest_for_one", "one_for_all"]
"""What restarts with a child: nothing; the children after it; all children."""

_FURTHER_RESTARTS: Final = 5  # in the window of a group, beside one of each child
_WINDOW_S: Final = 10.0

_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")
# The directory of a run has these, and a directory for each child.
_NOT_NAMES: Final = re.compile(r"attempt_\d+|.*\.(json|jsonl|log)")


DEPTH_MAX: Final = 32
"""How many groups may be in each other."""


def _children(name: str, value: object) -> Mapping[str, AnySpec]:
    if not isinstance(value, Mapping):
        raise SpecError(name, value, "must be a mapping of names to specs")
    if not value:
        raise SpecError(name, {}, "must name a child")
    for child, spec in value.items():
        is_name = isinstance(child, str) and _NAME.fullmatch(child)
        is_alone = child == "" and len(value) == 1  # a job that needs a supervisor for itself
        if not (is_name or is_alone) or _NOT_NAMES.fullmatch(child):
            problem = "must have names of up to 64 letters, digits, '_', '-' and '.', no '.' first"
            if is_name:  # of a file in the directory of a run
                problem = "must not have a name such as attempt_0, or with .json, .jsonl or .log"
            raise SpecError(name, child, problem)
        if not isinstance(spec, (LaunchSpec, GroupSpec)):
            raise SpecError(f"{name}[{child!r}]", spec, "must be a LaunchSpec or a GroupSpec")
    return MappingProxyType(dict(value))


def _window(name: str, value: object) -> RestartWindow | Literal["auto"]:
    return "auto" if value == "auto" else checked_window(name, value)


def _names(name: str, value: object) -> tuple[str, ...]:
    return tuple(checks.checked_text(name, item) for item in checks.checked_items(name, value))


def _ends_with(name: str, value: object) -> tuple[str, ...]:
    return _names(name, [value] if isinstance(value, str) else value)


def _after(name: str, value: object) -> Mapping[str, tuple[str, ...]]:
    if not isinstance(value, Mapping):
        raise SpecError(name, value, "must be a mapping of names to lists of names")
    return MappingProxyType({one: _names(f"{name}[{one!r}]", value[one]) for one in value})


class GroupSpec(SpecValue, prefix=""):
    """Jobs that are supervised together, each by its name; they may be groups themselves.

    Raises:
        SpecError: one line naming the field, the problem and the value.
    """

    children: Converted[Mapping[str, AnySpec], Mapping[str, AnySpec]] = field(
        check=_children, kw_only=False
    )
    """The specs by name, in their order.  Names have letters, digits, `_`, `-` and `.`."""
    strategy: Strategy = field(
        default="one_for_one", check=checks.OneOf(("one_for_one", "rest_for_one", "one_for_all"))
    )
    """Who is restarted with a child that is: "one_for_one": no other child; "rest_for_one": those
    that come after it in the order, in which each is started after the last; "one_for_all": all."""
    after: Converted[Mapping[str, tuple[str, ...]], Mapping[str, Iterable[str]]] = field(
        default=MappingProxyType({}), check=_after
    )
    """By name, the children that a child is started after, once they are ready (started, if they
    have no `ready`), and stopped before."""
    essential: Converted[tuple[str, ...] | None, Iterable[str] | None] = field(
        default=None, check=_names
    )
    """The children whose failure fails the group; None: all.  The end of another child is reported
    and ends nothing; it is stopped when all of these have ended."""
    ends_with: Converted[tuple[str, ...], str | Iterable[str]] = field(default=(), check=_ends_with)
    """The child that ends the group by its end, with its outcome; of several, the first to end.
    They are essential."""
    window: Converted[
        RestartWindow | Literal["auto"] | None,
        RestartWindow | tuple[int, float] | Literal["auto"] | None,
    ] = field(default="auto", check=checks.optional(_window))
    """At most `count` restarts of essential children in `seconds`; a further one fails the group.
    "auto": one of each child, and five more, in 10 s; None for no limit."""
    restart: RestartWhen = field(default="on-failure", check=checks.OneOf(RESTART_WHEN))
    """After which ends the group as a whole is started again, up to `max_restarts` times."""
    max_restarts: Converted[int, int | Literal["unlimited"]] = field(
        default=0, check=checked_max_restarts
    )
    """How many failures of the group as a whole may be followed by another start of it."""
    logs: Converted[LogSpec, LogSpec | None] = field(default=LogSpec())
    """Where the output goes; of the whole job, only that of the outermost group counts."""
    preemption: Converted[PreemptionSpec, PreemptionSpec | None] = field(default=PreemptionSpec())
    """What gives notice of a preemption to all children; that of the outermost group counts."""
    run_id: str | None = field(default=None, check=checks.checked_name)
    """Name of the run; None is a random id.  Only that of the outermost group counts."""
    event_history: int = field(default=10_000, check=checks.Whole(at_least=1))
    """How many past events are kept for late readers."""

    def _check(self) -> None:
        self._check_names()
        if self.restart == "never" and self.max_restarts:
            raise SpecError("max_restarts", self.max_restarts, "must be 0 with restart 'never'")
        essential = self.children if self.essential is None else self.essential
        self._set(_order=_ordered(self.children, self.after), _essential=frozenset(essential))
        for name, child in self.children.items():
            self._check_child(name, child)
        below = [child.depth for child in self.children.values() if isinstance(child, GroupSpec)]
        self._set(_depth=1 + max(below, default=0))
        if self.depth > DEPTH_MAX:
            raise SpecError("children", self.name, f"must have at most {DEPTH_MAX} levels")

    def _check_names(self) -> None:
        found = [("after", one) for one in self.after]
        found += [(f"after[{name!r}]", one) for name, names in self.after.items() for one in names]
        found += [("essential", one) for one in self.essential or ()]
        found += [("ends_with", one) for one in self.ends_with]
        for where, name in found:
            if name not in self.children:
                raise SpecError(
                    where, name, f"must name a child{did_you_mean(name, self.children)}"
                )
        for name in self.ends_with:
            if self.essential is not None and name not in self.essential:
                problem = f"must have {name!r}, which the group ends with"
                raise SpecError("essential", list(self.essential or ()), problem)

    def _check_child(self, name: str, child: AnySpec) -> None:
        where = f"children[{name!r}]"
        if child.run_id not in (None, "none"):
            problem = "must not be set: a child has the id of its job, and its name"
            raise SpecError(f"{where}.run_id", child.run_id, problem)
        is_alone = self.strategy == "one_for_one"
        for leaf in () if is_alone and not is_restarted(self) else leaves_of(child).values():
            if leaf.nnodes.maximum > 1:
                setting = "restarts of the group" if is_alone else f"strategy {self.strategy!r}"
                problem = f"must be 1 with {setting}: other nodes restart no child"
                raise SpecError(f"{where}.nnodes", str(leaf.nnodes), problem)
        if is_alone or isinstance(child, GroupSpec):
            return
        if child.restart.decide is not None:
            problem = f"has no effect with strategy {self.strategy!r}"
            raise SpecError(f"{where}.restart.decide", child.restart.decide, problem)

    @classmethod
    def replicas(
        cls,
        spec: AnySpec,
        number: int,
        *,
        essential: bool = True,
        window: RestartWindow | tuple[int, float] | Literal["auto"] | None = "auto",
    ) -> GroupSpec:
        """Return a group of so many equal children "0", "1", ..., each with a store of its own.

        Unless they are `essential`, the failure of a replica ends no other one.
        """
        _check_number("replicas", number)
        children = {str(rank): spec for rank in range(number)}
        return cls(children, essential=None if essential else (), window=window)

    @property
    def restart_window(self) -> RestartWindow | None:
        """The `window` that applies to so many children: what they share may fail each of them."""
        if self.window == "auto":
            return RestartWindow(_FURTHER_RESTARTS + len(self.children), _WINDOW_S)
        return self.window

    @property
    def replica(self) -> AnySpec | None:
        """The spec of every child, if the children are equal and named as `replicas` does."""
        specs = [*self.children.values()]
        is_numbered = [*self.children] == [str(rank) for rank in range(len(specs))]
        is_equal = is_numbered and not self.after and all(one == specs[0] for one in specs)
        return specs[0] if is_equal else None

    @property
    def order(self) -> tuple[str, ...]:
        """The names so that each comes after those that it is `after`; else as in `children`."""
        found: tuple[str, ...] = self.__dict__["_order"]
        return found

    @property
    def depth(self) -> int:
        """How many groups are in each other, this one included."""
        found: int = self.__dict__["_depth"]
        return found

    def is_essential(self, name: str) -> bool:
        """Return whether the failure of a child fails the group."""
        return name in self.__dict__["_essential"]

    def restarts_itself(self, name: str, child: LaunchSpec) -> bool:
        """Return whether a program decides about its restarts, and waits for no other child."""
        is_free = child.nnodes.maximum > 1 or child.restart.decide is not None
        return self.strategy == "one_for_one" and (is_free or not self.after.get(name))

    @property
    def name(self) -> str:
        """A short name of what runs: the names of the children."""
        return ", ".join(self.children)

    def leaves(self, path: str = "") -> Iterator[tuple[str, LaunchSpec]]:
        """Yield the path and the spec of each child that is no group, in their order."""
        for name, child in self.children.items():
            below = f"{path}/{name}" if path else name
            if isinstance(child, GroupSpec):
                yield from child.leaves(below)
            else:
                yield below, child

    if TYPE_CHECKING:

        @property
        def replace(self) -> type[_Group]: ...


AnySpec: TypeAlias = LaunchSpec | GroupSpec
"""What `launch`, `run` and `Agent` accept."""

if TYPE_CHECKING:

    class _Group(GroupSpec):
        children: Converted[Mapping[str, AnySpec], Mapping[str, AnySpec]] = field(default={})


def _ordered(
    children: Mapping[str, AnySpec], after: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """Return the names in their order, each after those that it is `after`; SpecError: a cycle."""
    found: dict[str, None] = {}
    while left := [name for name in children if name not in found]:
        for name in left:
            if found.keys() >= {*after.get(name, ())}:
                found[name] = None
        if len(found) + len(left) == len(children):
            raise SpecError("after", _cycle(left[0], found, after), "must have no cycle")
    return tuple(found)


def _cycle(name: str, found: Container[str], after: Mapping[str, tuple[str, ...]]) -> str:
    path = [name]
    while True:
        name = next(one for one in after[path[-1]] if one not in found)
        if name in path:
            return " -> ".join([*path[path.index(name) :], name])
        path.append(name)


def leaves_of(spec: AnySpec) -> dict[str, LaunchSpec]:
    """Return the leaves of a group by their path; of a leaf, itself by an empty one."""
    return {"": spec} if isinstance(spec, LaunchSpec) else dict(spec.leaves())


def spans_nodes(spec: AnySpec) -> bool:
    """Return whether a leaf has several nodes: its run cannot begin again once it has ended."""
    return any(leaf.nnodes.maximum > 1 for leaf in leaves_of(spec).values())


def restart_ends_run(spec: AnySpec) -> bool:
    """Return whether a requested restart stops leaves of several nodes, to start them again.

    Leaves that restart themselves go on, on all of their nodes.
    """
    if isinstance(spec, LaunchSpec):
        return False
    return (bool(spec.after) and spans_nodes(spec)) or any(
        map(restart_ends_run, spec.children.values())
    )


def _check_number(name: str, number: int) -> None:
    if checks.checked_integer(name, number, at_least=1) > NPROC_MAX:
        raise SpecError(name, number, f"must be at most {NPROC_MAX}")


def has_children(spec: AnySpec) -> bool:
    """Return whether a spec is a group, or of independent workers, with a supervisor of its own."""
    return isinstance(spec, GroupSpec) or spec.restart.scope != "group"


def outermost_group(spec: AnySpec) -> AnySpec:
    """Return what the outermost supervisor of a job is made for.

    A job that is started again as a whole is the only child of a group, without a name.
    """
    if has_children(spec) and not (isinstance(spec, GroupSpec) and is_restarted(spec)):
        return spec
    return GroupSpec(
        {"": spec.replace(run_id=None)},
        window=None,
        logs=spec.logs,
        preemption=spec.preemption,
        run_id=spec.run_id,
        event_history=spec.event_history,
    )


def restart_limit(spec: AnySpec) -> int:
    """Return how many restarts a job or child may have: `UNLIMITED` if it always restarts."""
    when = spec.restart if isinstance(spec, GroupSpec) else spec.restart.when
    return UNLIMITED if when == "always" else spec.max_restarts


def is_restarted(group: GroupSpec) -> bool:
    """Return whether a group may be started again as a whole."""
    return group.restart == "always" or group.max_restarts > 0


def group_of(spec: AnySpec) -> GroupSpec:
    """Return a group itself; of independent workers, a group with a child "0", "1", ... for each.

    Such a child is a gang of the worker with this rank, without a store.
    """
    if isinstance(spec, GroupSpec):
        return spec
    number = spec.nproc_per_node
    if not isinstance(number, int):
        raise SpecError("nproc_per_node", number, "must be a number")
    worker = spec.replace(
        restart=spec.restart.replace(scope="group", window=None), host_store=False, run_id=None
    )
    return GroupSpec(
        {str(rank): worker for rank in range(number)},
        strategy="rest_for_one" if spec.restart.scope == "rest" else "one_for_one",
        window=spec.restart.window,
    )


def template_of(spec: AnySpec) -> AnySpec | None:
    """Return the spec of each child of independent workers or replicas; None for other groups."""
    group = group_of(spec)
    return group.replica if isinstance(spec, GroupSpec) else group.children["0"]


def restarted_by_supervisor(spec: LaunchSpec) -> LaunchSpec:
    """Return a leaf that does not restart itself: its supervisor does."""
    return spec.replace(max_restarts=0, restart=RestartPolicy(exclude_for=spec.restart.exclude_for))


def scaled_to(spec: AnySpec, number: int) -> AnySpec:
    """Return a spec with so many workers, or replicas; SpecError for a group of other children."""
    _check_number("number", number)
    if isinstance(spec, LaunchSpec):
        if spec.nnodes.maximum > 1:
            problem = "must not be changed in a job of several nodes"
            raise SpecError("nproc_per_node", number, problem)
        return spec.replace(nproc_per_node=number)
    replica = spec.replica
    if replica is None:
        raise SpecError("children", [*spec.children], "must be replicas, to be scaled")
    return spec.replace(children={str(rank): replica for rank in range(number)})


def size_of(spec: AnySpec) -> int:
    """Return the number of workers, or of children; 0 if the host decides."""
    if isinstance(spec, GroupSpec):
        return len(spec.children)
    return spec.nproc_per_node if isinstance(spec.nproc_per_node, int) else 0


def is_same_kind(former: AnySpec, spec: AnySpec) -> bool:
    """Return whether a child may run another spec without being stopped as a whole."""
    if isinstance(former, LaunchSpec) and isinstance(spec, LaunchSpec):
        return "group" not in (former.restart.scope, spec.restart.scope)
    return isinstance(former, GroupSpec) and isinstance(spec, GroupSpec)


def check_reload(former: AnySpec, spec: AnySpec, *, is_whole: bool) -> None:
    """Raise SpecError if a child cannot run a spec in place of another; `is_whole`: a whole job."""
    if is_whole and not is_same_kind(former, spec):
        kind = "GroupSpec" if isinstance(former, GroupSpec) else "LaunchSpec of independent workers"
        raise SpecError("spec", type(spec).__name__, f"must be a {kind}, as the running one")
    before, after = leaves_of(former), leaves_of(spec)
    changed = [path for path in before.keys() & after.keys() if before[path] != after[path]]
    for leaf in [found[path] for path in sorted(changed) for found in (before, after)]:
        if leaf.nnodes.maximum > 1:
            raise SpecError("nnodes", str(leaf.nnodes), "must be 1 for another spec")
    group_of(spec) if is_whole else None


def reports_ready(spec: AnySpec) -> bool:
    """Return whether a child says when it is ready; else it is so when it has been started."""
    return isinstance(spec, GroupSpec) or has_children(spec) or spec.ready is not None


READY_TIMEOUT_S: Final = 60.0
"""Seconds that the replacement of a worker has to be ready, without a `ready_timeout`."""


def ready_timeout(spec: AnySpec) -> float:
    """Return the seconds that a replacement has until it is ready."""
    limit = None if isinstance(spec, GroupSpec) else spec.liveness.ready_timeout
    return READY_TIMEOUT_S if limit is None else limit
