"""Values of a spec: made, copied and compared as dataclasses are, and set by options."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import pydoc
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest

from elastic_aio import (
    LaunchSpec,
    LogSpec,
    RendezvousSpec,
    RestartPolicy,
    SpecError,
    StopPlan,
    StopStep,
)
from elastic_aio.cli.options import fields_from
from elastic_aio.outcome import Failure
from elastic_aio.plugins import LogLayout
from elastic_aio.spec.checks import OneOf, Seconds, UsageError, Whole, checked_items
from elastic_aio.spec.fields import (
    Converted,
    Option,
    SpecValue,
    all_fields,
    changed_fields,
    field,
    spec_fields,
)
from elastic_aio.spec.restart import RestartAction


def _sorted(name: str, value: object) -> tuple[Any, ...]:
    return tuple(sorted(checked_items(name, value)))


class Plate(SpecValue, prefix="plate."):
    """A spec of its own, as a new one would be written."""

    dish: str = field(kw_only=False)
    wait: float | None = field(
        default=None, check=Seconds(above=0), own_option="--plate-wait SECONDS", help="how long"
    )
    count: int = field(default=1, check=Whole(at_least=1), own_option="--plates N", help="how many")
    size: str = field(
        default="small",
        check=OneOf(("small", "large")),
        own_option="--plate-size SIZE",
        help="which",
    )
    warm: bool = field(default=True, own_option="--no-warmth", help="cold")
    sides: Converted[tuple[int, ...], Iterable[int]] = field(
        default=(), check=_sorted, option="--sides N,N", help="besides"
    )
    secret: str = field(default="", hidden=True)

    def _check(self) -> None:
        if self.wait is not None and self.size == "large":
            raise SpecError("plate.wait", self.wait, "is not for large ones")


PLATE = Plate("soup", sides=[3, 1], secret="sauce")


def test_a_field_keeps_its_argument_in_its_final_form() -> None:
    assert (PLATE.dish, PLATE.sides, PLATE.wait) == ("soup", (1, 3), None)
    assert repr(PLATE) == (
        "Plate(dish='soup', wait=None, count=1, size='small', warm=True, sides=(1, 3))"
    )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"wait": 0}, "plate.wait: must be a number above 0 (got 0)"),
        ({"count": None}, "plate.count: must be a whole number of at least 1 (got None)"),
        ({"size": "tiny"}, "plate.size: must be 'small' or 'large' (got 'tiny')"),
        ({"warm": None}, "plate.warm: must be a bool (got None)"),
        ({"wait": 1, "size": "large"}, "plate.wait: is not for large ones (got 1)"),
    ],
)
def test_errors_name_the_field(arguments: dict[str, Any], problem: str) -> None:
    new: Any = Plate
    for make in (partial(new, "soup"), PLATE.replace):
        with pytest.raises(SpecError) as caught:
            make(**arguments)
        assert str(caught.value) == problem


@pytest.mark.parametrize(
    ("args", "given", "problem"),
    [
        ((), {}, "missing a required argument: 'dish'"),
        (("soup",), {"colour": 1}, "got an unexpected keyword argument 'colour'"),
        (("soup", 2.0), {}, "too many positional arguments"),
        (("soup",), {"dish": "fish"}, "multiple values for argument 'dish'"),
    ],
)
def test_other_arguments_are_type_errors(
    args: tuple[Any, ...], given: dict[str, Any], problem: str
) -> None:
    make: Any = Plate
    with pytest.raises(TypeError, match=rf"^Plate\(\) {problem}$"):
        make(*args, **given)


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        lambda value: pickle.loads(pickle.dumps(value)),
        dataclasses.replace,
        lambda value: value.replace(),
    ],
)
def test_a_copy_is_equal(copied: Callable[[Any], Any]) -> None:
    plan = StopPlan([("SIGINT", 3)], linger=2)
    assert copied(plan) == plan != StopPlan()
    assert hash(copied(plan)) == hash(plan)
    assert type(copied(plan)) is StopPlan
    assert plan != LogSpec()


def test_a_value_is_a_frozen_dataclass() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLATE.dish = "x"  # type: ignore[misc]  # that is the point
    with pytest.raises(dataclasses.FrozenInstanceError):
        del PLATE.dish
    found = {each.name: each for each in dataclasses.fields(PLATE)}
    assert list(found) == ["dish", "wait", "count", "size", "warm", "sides", "secret"]
    assert found["dish"].default is dataclasses.MISSING
    assert (found["count"].default, found["secret"].repr) == (1, False)
    match StopStep(15, 2.0):
        case StopStep(signal, grace):
            assert (signal, grace) == (15, 2.0)


@pytest.mark.parametrize("settings", [{}, {"init": False}, {"slots": True}])
def test_a_plug_in_may_be_a_dataclass(settings: dict[str, bool]) -> None:
    class Plain(LogLayout):
        day: str = "mon"

    made: Any = dataclasses.dataclass(frozen=True, **settings)(Plain)
    assert [each.name for each in dataclasses.fields(made)][-2:] == ["keep_runs", "day"]
    layout = made(color="always")
    assert (layout.color, layout.day, layout.capture) == ("always", "mon", True)
    assert LaunchSpec("train.py", logs=layout).name == "train.py"
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.day = "tue"


def test_the_signature_is_that_of_the_fields() -> None:
    parameters = inspect.signature(Plate).parameters
    assert str(parameters["sides"]) == "sides: collections.abc.Iterable[int] = ()"
    assert parameters["dish"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert parameters["dish"].default is inspect.Parameter.empty


VALUES = {
    option.dest: None for _, each in all_fields(Plate) if isinstance(option := each.option, Option)
}


def test_options_set_fields_by_their_checks() -> None:
    """A new field with an option needs nothing else; texts with a form of their own have one."""
    given = {"plate_wait": "2.5", "plates": "3", "plate_size": "large", "no_warmth": "1"}
    assert fields_from({**VALUES, **given}, Plate) == {
        "wait": 2.5,
        "count": 3,
        "size": "large",
        "warm": False,
    }
    assert fields_from({**VALUES, "plate_size": ""}, Plate) == {}
    forms = {"sides": lambda option, text: [option, text]}
    assert fields_from({**VALUES, "sides": ""}, Plate, forms) == {"sides": ["--sides", ""]}
    for name, text in (("plate_wait", "0"), ("plates", "0"), ("plates", "")):
        with pytest.raises(UsageError, match=r"^--plate"):
            fields_from({**VALUES, name: text}, Plate)


@pytest.mark.parametrize("text", ["0", "21", "x"])
def test_an_option_has_the_range_of_its_check(text: str) -> None:
    class Cup(SpecValue, prefix="cup."):
        size: int = field(
            default=1, check=Whole(at_least=1, at_most=20), own_option="--cup N", help="how big"
        )

    with pytest.raises(UsageError) as caught:
        fields_from({"cup": text}, Cup)
    assert str(caught.value) == f"--cup: must be a whole number from 1 to 20 (got '{text}')"


def ask(failure: Failure) -> RestartAction:
    raise AssertionError


def test_changed_fields_are_comparable_texts() -> None:
    """The same on two nodes with the same settings: no addresses, no order of a set."""
    assert changed_fields(LaunchSpec("x", role="mine", nproc_per_node=3)) == {}
    policy = RestartPolicy(window=(2, 60.0), never_on=[9, 3], decide=ask, node_losses=None)
    rendezvous = RendezvousSpec(join_timeout=1.5, keep_workers=False, token="t" * 16)
    spec = LaunchSpec("x", max_restarts=4, restart=policy, rendezvous=rendezvous)
    assert changed_fields(spec) == {
        "max_restarts": "4",
        "restart.window": "2 within 60 s",
        "restart.never_on": "[3, 9]",
        "restart.decide": "ask",
        "restart.node_losses": "None",
        "rendezvous.join_timeout": "1.5",
        "rendezvous.keep_workers": "False",
    }


@pytest.mark.parametrize("owner", [LaunchSpec, LogSpec, RendezvousSpec, RestartPolicy, StopPlan])
def test_help_has_the_text_of_each_field(owner: type[SpecValue]) -> None:
    shown = pydoc.plain(pydoc.render_doc(owner))
    for name in spec_fields(owner):
        assert re.search(rf"^ \|      {name}: \S", shown, re.MULTILINE), name


def test_a_class_without_its_source_has_its_own_text() -> None:
    namespace: dict[str, Any] = {"SpecValue": SpecValue, "field": field}
    exec('class Mine(SpecValue):\n    """Mine."""\n    size: int = field(default=1)', namespace)
    assert namespace["Mine"].__doc__ == "Mine."
    assert LaunchSpec.__doc__ != LogSpec.__doc__
