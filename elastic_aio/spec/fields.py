"""The fields of a spec: each says once its default, its check, and how the command line sets it.

::

    class StopPlan(SpecValue, prefix="stop."):
        linger: float = field(
            default=0.0, check=Seconds(at_least=0), option="--linger SECONDS", help="..."
        )

The constructor, the options of `aio-elastic run` with their help, the keys of `--rdzv-conf`, the
completion, the option that an error names, and the tests of `docs/reference` follow from it.

Neither `dataclass` nor `msgspec` makes these values: `dataclass` compiles six methods for each
class, which would be a twentieth of a start, and both keep an argument as it is given.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Self, TypeVar, dataclass_transform

from msgspec import Struct

from elastic_aio.spec.checks import Part, checked_bool, variable_of
from elastic_aio.value import dataclass_fields

Kept = TypeVar("Kept", covariant=True)
Accepted = TypeVar("Accepted", contravariant=True)

_POSITIONAL: Final = inspect.Parameter.POSITIONAL_OR_KEYWORD

REQUIRED: Final[Any] = inspect.Parameter.empty
"""The default of a field that has none."""


class Option(Struct, frozen=True):
    """One option of `aio-elastic run`: a flag unless it has a `metavar`.

    `name` is the dashed spelling without "--"; with `has_variable`, a PET_* variable is the
    fallback for the option.  Torchrun lacks an option that `is_own`.
    """

    name: str
    help: str
    metavar: str
    short: str
    has_variable: bool
    is_own: bool

    @property
    def label(self) -> str:
        return f"--{self.name}"

    @property
    def is_flag(self) -> bool:
        return not self.metavar

    @property
    def dest(self) -> str:
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        return variable_of(self.name)


def make_option(
    usage: str,
    help: str,
    *,
    short: str = "",
    is_own: bool = False,
    has_variable: bool | None = None,
) -> Option:
    """Return an option that is used as in `--tee STREAMS`, or `--quiet`.

    `has_variable` is by default whether torchrun has the option too.
    """
    name, _, metavar = usage.removeprefix("--").partition(" ")
    variable = not is_own if has_variable is None else has_variable
    return Option(name, help, metavar, short, variable, is_own)


class ConfKey(Struct):
    """A key of `--rdzv-conf`; `default` is how the help names its default, if that differs."""

    default: str = ""
    least: int | None = None
    """The least value of a number of whole seconds; None: the value is text or a switch."""
    name: str = ""
    """The name of the field: its class sets it."""

    @property
    def label(self) -> str:
        return f"--rdzv-conf: {self.name}"


class Field(Struct, eq=False):
    """What the package knows of a field, beside its name, its type and its docstring."""

    default: Any
    check: Callable[[str, Any], Any] | None
    """Returns an argument in its final form, or raises a `SpecError` of the given name."""
    option: Option | ConfKey | None
    label: str
    """The name of the field in an error of the command line; empty without an option."""
    is_positional: bool
    is_hidden: bool
    """`repr()` leaves it out: a secret."""
    is_alike: bool
    """All nodes of a job must have it alike: a node relies on the value of the others."""


def field(
    *,
    default: Any = REQUIRED,
    check: Callable[[str, Any], Any] | None = None,
    option: str = "",
    help: str = "",
    short: str = "",
    own_option: str = "",
    has_variable: bool | None = None,
    key: ConfKey | None = None,
    label: str = "",
    kw_only: bool = True,
    hidden: bool = False,
    alike: bool = False,
) -> Any:
    """Describe a field; the arguments are the fields of `Field`, and of its option (`make_option`).

    `own_option` is an option that torchrun lacks.  The check of a switch, or of a part, a value of
    a spec, follows from the default.  A default is not checked; if it is None, so is accepted as an
    argument.
    """
    if check is None and isinstance(default, (bool, SpecValue)):
        check = checked_bool if isinstance(default, bool) else Part(type(default))
    made: Option | ConfKey | None = key
    if usage := option or own_option:
        made = make_option(
            usage, help, short=short, is_own=bool(own_option), has_variable=has_variable
        )
    return Field(default, check, made, label, not kw_only, hidden, alike)


class Converted(Generic[Kept, Accepted]):
    """Type of a field that accepts more than it keeps; for type checkers only."""

    if TYPE_CHECKING:

        def __get__(self, value: object, owner: Any = None) -> Kept: ...
        def __set__(self, value: object, argument: Accepted) -> None: ...


class _DataclassFields:
    """Makes the fields that `dataclasses` looks for when they are asked for."""

    def __get__(self, value: object, owner: type[SpecValue]) -> dict[str, dataclasses.Field[Any]]:
        found = []
        for name, each in owner.__spec_fields__.items():
            default = {} if each.default is REQUIRED else {"default": each.default}
            if isinstance(each.default, Mapping):  # which `dataclasses` accepts from a factory only
                default = {"default_factory": dict(each.default).copy}
            found.append((name, owner.__annotations__.get(name, Any), default, each.is_hidden))
        return dataclass_fields(owner, found)


class _DataclassParams:
    """Says to `dataclass`, which a plug-in may decorate a subclass with, that this is frozen."""

    def __get__(self, value: object, owner: type[SpecValue]) -> object:
        made: Any = dataclasses.make_dataclass("Frozen", (), frozen=True)
        return made.__dataclass_params__


class _Signature:
    """Makes the signature of the constructor for `inspect` when it is asked for."""

    def __get__(self, value: object, owner: type[SpecValue]) -> inspect.Signature:
        if owner.__init__ is not SpecValue.__init__:
            raise AttributeError("__signature__")  # a plug-in's own constructor
        return _signature_of(owner)


class _Doc:
    """Adds the texts of the fields to that of the class, from its source: for `help()`."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, value: object, owner: type[SpecValue]) -> str:
        try:
            (tree,) = ast.parse(inspect.getsource(owner)).body
        except (OSError, SyntaxError, TypeError):
            return self._text  # no source, or that of a class within a function
        text = f"{inspect.cleandoc(self._text)}\n\nFields:"
        for item, doc in itertools.pairwise(getattr(tree, "body", ())):
            match item, doc:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(about))):
                    text += f"\n    {name}: " + inspect.cleandoc(about).replace("\n", "\n        ")
        return text


def _refuse(owner: type[SpecValue], args: tuple[Any, ...], given: dict[str, Any]) -> None:
    try:
        _signature_of(owner).bind(*args, **given)
    except TypeError as error:
        raise TypeError(f"{owner.__name__}() {error}") from None


def _signature_of(owner: type[SpecValue]) -> inspect.Signature:
    parameters = []
    late = getattr(sys.modules[owner.__module__], "LATE_TYPES", {})
    types = {name: getattr(import_module(module), name) for name, module in late.items()}
    for name, hint in typing.get_type_hints(owner, localns=types).items():
        if (each := owner.__spec_fields__.get(name)) is not None:
            if typing.get_origin(hint) is Converted:
                hint = typing.get_args(hint)[1]
            kind = _POSITIONAL if each.is_positional else inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(name, kind, default=each.default, annotation=hint))
    # A field that a base class has, by keyword only, may precede a positional one.
    return inspect.Signature(sorted(parameters, key=lambda each: each.kind))


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class SpecValue:
    """A frozen value whose fields are checked when it is made; a dataclass, for `dataclasses`.

    Raises:
        SpecError: one line naming the field, the problem and the value.
    """

    __dataclass_fields__: ClassVar[Any] = _DataclassFields()
    __dataclass_params__: ClassVar[Any] = _DataclassParams()
    __signature__: ClassVar[Any] = _Signature()
    __spec_fields__: ClassVar[Mapping[str, Field]] = {}
    __spec_prefix__: ClassVar[str] = ""
    """Precedes the names of the fields in errors."""

    def __init_subclass__(cls, prefix: str | None = None, alike: bool = False) -> None:
        """Take the fields out of the class; with `alike`, each is so."""
        super().__init_subclass__()
        found = {name: each for name, each in vars(cls).items() if isinstance(each, Field)}
        for name, each in found.items():
            delattr(cls, name)
            each.is_alike |= alike
            if isinstance(each.option, ConfKey):
                place = f"{prefix}{name}".removeprefix("rendezvous.").removeprefix("engine.")
                each.option.name = place.replace(".", "_")
            if each.option is not None:
                each.label = each.option.label
        cls.__spec_fields__ = {**cls.__spec_fields__, **found}
        if not TYPE_CHECKING:
            cls.__match_args__ = tuple(cls.__spec_fields__)
            cls.__spec_positional__ = [
                name for name, each in cls.__spec_fields__.items() if each.is_positional
            ]
        if prefix is not None:
            cls.__spec_prefix__ = prefix
        doc: Any = cls.__doc__ and _Doc(cls.__doc__)
        cls.__doc__ = doc

    if not TYPE_CHECKING:  # type checkers make the signature of each class

        def __init__(self, *args: Any, **given: Any) -> None:
            fields, prefix, content = self.__spec_fields__, self.__spec_prefix__, self.__dict__
            named = {**dict(zip(self.__spec_positional__, args, strict=False)), **given}
            if len(named) < len(args) + len(given) or not named.keys() <= fields.keys():
                _refuse(type(self), args, given)
            for name, each in fields.items():
                if (value := named.get(name, each.default)) is REQUIRED:
                    _refuse(type(self), args, given)
                is_none = value is None and each.default is None
                if name in named and each.check is not None and not is_none:
                    value = each.check(prefix + name, value)
                content[name] = value
            self._check()

    def _check(self) -> None:
        """Raise `SpecError` for fields that do not fit together; may set others by `_set`."""

    def _set(self, **fields: object) -> None:
        self.__dict__.update(fields)

    def _contents(self) -> tuple[object, ...]:
        return tuple(map(self.__dict__.__getitem__, self.__spec_fields__))

    if TYPE_CHECKING:

        @property
        def replace(self) -> type[Self]:
            """Its arguments are the constructor's; a class with a field to give redefines it."""

    else:

        def replace(self, **changes: Any) -> Self:
            """Return a copy with some fields changed; it is checked again."""
            fields = {name: getattr(self, name) for name in self.__spec_fields__}
            return type(self)(**fields | changes)

        __replace__ = replace

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{name}={getattr(self, name)!r}"
            for name, each in self.__spec_fields__.items()
            if not each.is_hidden
        )
        return f"{type(self).__qualname__}({shown})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SpecValue) or type(other) is not type(self):
            return NotImplemented
        return self._contents() == other._contents()

    def __hash__(self) -> int:
        return hash(self._contents())

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: object) -> None:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

        def __delattr__(self, name: str) -> None:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def spec_fields(owner: type[SpecValue]) -> Mapping[str, Field]:
    """Return the fields of a class of specs by name."""
    return owner.__spec_fields__


def part_of(described: Field) -> type[SpecValue] | None:
    """Return the class of a field that is a part of the spec, with fields of its own."""
    return getattr(described.check, "part", None)


def all_fields(owner: type[SpecValue]) -> Iterator[tuple[str, Field]]:
    """Yield the fields of a spec and of its parts, each by the name that errors give it."""
    for name, each in owner.__spec_fields__.items():
        yield f"{owner.__spec_prefix__}{name}", each
        if (part := part_of(each)) is not None:
            yield from all_fields(part)


_TEXT_MAX: Final = 100
"""Characters of a field that is compared with the same field of another node."""


def changed_fields(value: SpecValue) -> dict[str, str]:
    """Return the fields that nodes must have alike and are not the defaults, as text to compare."""
    found: dict[str, str] = {}
    for name, each in value.__spec_fields__.items():
        content = getattr(value, name)
        if part_of(each) is not None:
            found |= changed_fields(content)
        elif each.is_alike and content != each.default:
            content = sorted(content) if isinstance(content, frozenset) else content
            text = f"{content:g}" if isinstance(content, float) else str(content)
            text = getattr(content, "__qualname__", text)
            found[f"{value.__spec_prefix__}{name}"] = text[:_TEXT_MAX]
    return found
