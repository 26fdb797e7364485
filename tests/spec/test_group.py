"""Groups of jobs, and what they refuse."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.errors import SpecError
from elastic_aio.spec.group import (
    GroupSpec,
    group_of,
    outermost_group,
    restarted_by_supervisor,
    scaled_to,
    template_of,
)
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.restart import RestartPolicy, RestartWindow

LEAF = LaunchSpec("x")
MANY = LaunchSpec("x", nnodes=2)
DECIDED = LaunchSpec("x", max_restarts=1, restart=RestartPolicy(decide=lambda _: None))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"children": {}}, "children: must name a child (got {})"),
        ({"children": [LEAF]}, "children: must be a mapping of names to specs (got [LaunchSpec("),
        ({"children": {"a": "x"}}, "children['a']: must be a LaunchSpec or a GroupSpec (got 'x')"),
        ({"children": {"a/b": LEAF}}, "children: must have names of up to 64 letters, digits"),
        ({"children": {"": LEAF, "a": LEAF}}, "children: must have names of"),
        ({"children": {"..": LEAF}}, "children: must have names of"),
        ({"children": {"attempt_0": LEAF}}, "children: must not have a name such as attempt_0"),
        ({"children": {"run.json": LEAF}}, "children: must not have a name such as attempt_0"),
        ({"children": {5: LEAF}}, "children: must have names of"),
        ({"strategy": "simple_one_for_one"}, "strategy: must be 'one_for_one', 'rest_for_one' or"),
        ({"after": {"a": ["serve"]}}, "after['a']: must name a child; did you mean server? (got"),
        ({"after": {"x": []}}, "after: must name a child (got 'x')"),
        ({"after": ["a"]}, "after: must be a mapping of names to lists of names (got ['a'])"),
        ({"after": {"a": "server"}}, "after['a']: must be a list (got 'server')"),
        ({"after": {"a": ["a"]}}, "after: must have no cycle (got 'a -> a')"),
        (
            {"after": {"a": ["b"], "b": ["server"], "server": ["b"]}},
            "after: must have no cycle (got 'server -> b -> server')",
        ),
        ({"essential": ["x"]}, "essential: must name a child (got 'x')"),
        ({"ends_with": "x"}, "ends_with: must name a child (got 'x')"),
        (
            {"ends_with": "a", "essential": ["b"]},
            "essential: must have 'a', which the group ends with (got ['b'])",
        ),
        ({"window": (0, 5)}, "window: must be a whole number of at least 1 (got 0)"),
        ({"restart": "sometimes"}, "restart: must be 'on-failure', 'always' or 'never' (got"),
        ({"restart": "never", "max_restarts": 1}, "max_restarts: must be 0 with restart 'never'"),
        (
            {"children": {"a": LEAF.replace(run_id="mine")}},
            "children['a'].run_id: must not be set: a child has the id of its job, and its name",
        ),
        (
            {"children": {"a": MANY}, "strategy": "one_for_all"},
            "children['a'].nnodes: must be 1 with strategy 'one_for_all': other nodes restart no",
        ),
        (
            {"children": {"a": GroupSpec({"b": MANY})}, "strategy": "rest_for_one"},
            "children['a'].nnodes: must be 1 with strategy 'rest_for_one': other nodes restart no",
        ),
        (
            {"children": {"a": MANY}, "max_restarts": 1},
            "children['a'].nnodes: must be 1 with restarts of the group: other nodes restart no",
        ),
        (
            {"children": {"a": DECIDED}, "strategy": "rest_for_one"},
            "children['a'].restart.decide: has no effect with strategy 'rest_for_one' (got",
        ),
    ],
)
def test_what_a_group_refuses(fields: dict[str, Any], message: str) -> None:
    children = {"server": LEAF, "a": LEAF, "b": LEAF}
    with pytest.raises(SpecError) as raised:
        GroupSpec(**{"children": children, **fields})
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"nnodes": 2, "restart": RestartPolicy(scope="worker")},
            "restart.scope: must be 'group' with several nodes, whose ranks share a world and a"
            " store (got 'worker')",
        ),
        (
            {"nnodes": 2, "restart": "always"},
            "restart.when: must not be 'always' with several nodes, which end a run together"
            " (got 'always')",
        ),
        (
            {"max_restarts": 1, "restart": "never"},
            "max_restarts: must be 0 with restart 'never' (got 1)",
        ),
        (
            {"restart": RestartPolicy(when="always", restart_on=[1])},
            "restart.restart_on: has no effect with restart 'always' (got [1])",
        ),
        (
            {"restart": RestartPolicy(when="always", decide=len)},  # type: ignore[arg-type]
            "restart.decide: has no effect with restart 'always' (got",
        ),
        (
            {"restart": RestartPolicy(scope="rest", decide=len), "max_restarts": 1},  # type: ignore[arg-type]
            "restart.decide: has no effect with scope 'rest' (got",
        ),
        (
            {"restart": RestartPolicy(scope="worker", window=(9, 60))},
            "restart.window: cannot be exhausted with max_restarts=0; its count must be at most"
            " max_restarts (got",
        ),
        (
            {"worker_env": [{}], "nproc_per_node": 2},
            "worker_env: must have an item for each of the 2 workers (got [",
        ),
        ({"worker_args": [[object]]}, "worker_args: must be text, a path or a number (got"),
        ({"worker_args": [1]}, "worker_args[0]: must be a list (got 1)"),
        ({"worker_env": [{"A=": ""}]}, "worker_env[0]: must hold names without '=' or NUL"),
    ],
)
def test_what_a_job_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as raised:
        LaunchSpec("x", **fields)
    assert str(raised.value).startswith(message)


def test_a_window_is_exact_unless_it_is_automatic() -> None:
    group = GroupSpec.replicas(LaunchSpec("x"), 3)
    assert (group.window, group.restart_window) == ("auto", RestartWindow(8, 10))
    scaled = [scaled_to(one, 64) for one in (group, group.replace(window=(5, 10)))]
    windows = [one.restart_window for one in scaled if isinstance(one, GroupSpec)]
    assert windows == [RestartWindow(69, 10), RestartWindow(5, 10)]
    assert GroupSpec.replicas(LaunchSpec("x"), 3, window=None).restart_window is None


def test_a_window_of_independent_workers_is_that_of_all() -> None:
    """So it may allow more than `max_restarts`, which is of each."""
    LaunchSpec("x", max_restarts=1, restart=RestartPolicy(scope="worker", window=(9, 60)))


@given(st.data())
def test_an_order_holds_all_that_a_child_is_after(data: st.DataObject) -> None:
    names = [f"c{number}" for number in range(data.draw(st.integers(1, 7)))]
    after = {
        name: data.draw(st.lists(st.sampled_from(names[:number]), unique=True))
        for number, name in enumerate(names)
        if number
    }
    order = data.draw(st.permutations(names))
    group = GroupSpec(dict.fromkeys(order, LEAF), after=after)
    assert sorted(group.order) == sorted(names)
    for name, others in after.items():
        assert all(group.order.index(other) < group.order.index(name) for other in others)
    if not any(after.values()):
        assert list(group.order) == order


def test_a_long_chain_is_no_cycle() -> None:
    names = [str(number) for number in range(2000)]
    after = {one: [other] for one, other in itertools.pairwise(names)}
    group = GroupSpec(dict.fromkeys(names, LEAF), after=after)
    assert list(group.order) == names[::-1]


def test_replicas() -> None:
    group = GroupSpec.replicas(LEAF, 3)
    assert [*group.children] == ["0", "1", "2"]
    assert group.replica == template_of(group) == LEAF
    assert scaled_to(group, 5) == GroupSpec.replicas(LEAF, 5)
    assert not any(map(GroupSpec.replicas(LEAF, 2, essential=False).is_essential, "01"))
    other = group.replace(children={"0": LEAF, "1": LEAF.replace(env={"A": ""})})
    assert other.replica is None
    with pytest.raises(SpecError, match="replicas: must be a whole number of at least 1"):
        GroupSpec.replicas(LEAF, 0)


def test_the_leaves_of_a_group() -> None:
    inner = GroupSpec({"c": LEAF, "d": LEAF})
    group = GroupSpec({"a": LEAF, "b": inner})
    assert [path for path, _ in group.leaves()] == ["a", "b/c", "b/d"]
    assert group.name == "a, b"


def test_independent_workers_are_a_group() -> None:
    spec = LaunchSpec(
        "x",
        nproc_per_node=3,
        max_restarts=2,
        restart=RestartPolicy(scope="rest", window=(4, 60)),
        worker_env=[{"A": "0"}, {"A": "1"}, {"A": "2"}],
    )
    group = group_of(spec)
    assert (group.strategy, group.window) == ("rest_for_one", RestartWindow(4, 60))
    child = group.children["2"]
    assert isinstance(child, LaunchSpec)
    assert (child.restart.scope, child.restart.window, child.max_restarts) == ("group", None, 2)
    assert child.worker_env == spec.worker_env
    assert not child.host_store


def test_what_the_outermost_supervisor_is_made_for() -> None:
    """A job that is started again as a whole is the only child of a group."""
    workers = LaunchSpec("x", restart=RestartPolicy(scope="worker", when="always"))
    group = GroupSpec({"a": LEAF})
    for spec in (workers, group):
        assert outermost_group(spec) is spec
    wrapped: list[Any] = [LaunchSpec("x", restart="always", run_id="r")]
    wrapped += [group.replace(max_restarts=1), group.replace(restart="always")]
    for spec in wrapped:
        found = outermost_group(spec)
        assert isinstance(found, GroupSpec)
        assert found.children == {"": spec.replace(run_id=None)}
        assert (found.run_id, found.window) == (spec.run_id, None)


def test_a_leaf_of_a_supervisor_does_not_restart_itself() -> None:
    policy = RestartPolicy(window=(1, 60), never_on=[3], exclude_for=5)
    spec = restarted_by_supervisor(LaunchSpec("x", max_restarts=4, restart=policy))
    assert (spec.max_restarts, spec.restart) == (0, RestartPolicy(exclude_for=5))
