"""The option grammar of all sub-commands: parsers, values of options, one-line errors.

`aio-elastic run` spells options as torchrun does: dashed, underscored, abbreviated, or as PET_*
variables.  argparse cannot abbreviate an option that exists in two spellings (Python 3.11 calls it
ambiguous), so `split_options` first brings every option into one spelling, which also finds the
script.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from elastic_aio.cli.standard_streams import StandardStream
from elastic_aio.spec import checks
from elastic_aio.spec.fields import Option, SpecValue, spec_fields
from elastic_aio.text import did_you_mean, error_reason, one_line, shown_bytes

if TYPE_CHECKING:
    from elastic_aio.launcher import LoopFactory

LOOPS: Final = ("auto", "asyncio", "uvloop")
"""Event loops that `--loop` accepts."""

_UVLOOP_DESCRIPTORS: Final = 32
"""Below a limit of 12 descriptors, libuv aborts the process or cannot close its loop."""

Values = Mapping[str, str | None]
"""The values of options by their `dest`; None without the option."""

SECONDS_LIMIT: Final = 1e9
"""All numbers of seconds are below it."""

_NEVER_EMPTY: Final = ("color", "events", "http", "numa_binding", "on_full")
"""Texts whose empty value is not the default, by the `dest` of their options."""

REPEATABLE: Final = ("socket",)
"""Lists that several options make together, by the `dest`; of others the last option counts, as
torchrun has it."""

_OPTION_LIKE: Final = r"-(?!\d+$|\d*\.\d+$)[^ ]+$"


def split_options(argv: Sequence[str], options: Sequence[Option]) -> tuple[list[str], list[str]]:
    """Separate options, in their full dashed spelling, from the script and its arguments.

    UsageError: an option is unknown or ambiguous, or lacks its value.
    """
    metavars = {option.name: option.metavar for option in options} | {"help": ""}
    own = {option.name for option in options if option.is_own}
    shorts = {option.short: option.metavar for option in options if option.short} | {"-h": ""}
    words: list[str] = []
    rest = list(argv)
    while rest:
        word = rest[0]
        if word == "--":
            return words, rest[1:]
        if not word.startswith("-") or word == "-":
            break
        del rest[0]
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = _full_name(name.replace("_", "-"), metavars, own)
            if equals and not metavars[name]:
                raise checks.invalid_value(f"--{name}", "takes no value", value)
            words.append(f"--{name}{equals}{value}")
            missing = "" if equals else metavars[name]
        elif word[:2] in shorts:
            words.append(word)
            missing = shorts[word[:2]] if len(word) == 2 else ""
        else:
            raise _unknown_option(word, metavars)
        if missing:
            if not rest:
                raise checks.UsageError(f"{words[-1]}: needs a value")
            # Joined, so that argparse accepts a value that begins with a dash.
            joined = words[-1] + ("=" if words[-1].startswith("--") else "") + rest[0]
            # Where argparse refuses it, so do we: with `--log-dir $UNSET --tee 3`, for example.
            if re.match(_OPTION_LIKE, rest[0]):
                problem = f"needs a value; if it is one, write {joined}"
                raise checks.invalid_value(words[-1], problem, rest[0])
            words[-1] = joined
            del rest[0]
    return words, rest


def _full_name(name: str, known: Mapping[str, str], own: Collection[str]) -> str:
    if name in known:
        return name
    matches = [full for full in known if full.startswith(name)]
    # An abbreviation that torchrun accepts means the same here.
    matches = [full for full in matches if full not in own] or matches
    if len(matches) == 1:
        return matches[0]
    if matches:
        could = ", ".join(f"--{full}" for full in matches)
        raise checks.UsageError(f"--{name}: is ambiguous: {could}")
    raise _unknown_option(f"--{name}", known)


def _unknown_option(word: str, known: Iterable[str]) -> checks.UsageError:
    name = f"--{word.lstrip('-').partition('=')[0].replace('_', '-')}"
    meant = did_you_mean(name, (f"--{full}" for full in known))
    return checks.UsageError(
        f"{word}: is not an option{meant} (aio-elastic run --help lists the options)"
    )


def plain_values(words: Sequence[str], options: Sequence[Option]) -> dict[str, str | None] | None:
    """Return the value of each option, by its `dest`, in the words of `split_options`.

    None if there is a request for help or words of other forms, which are for `option_parser`.
    """
    known = {f"--{option.name}": option for option in options}
    known |= {option.short: option for option in options if option.short}
    values: dict[str, str | None] = {option.dest: None for option in options}
    for word in words:
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            name, value = word[:2], word[2:]
        option = known.get(name)
        if option is None or value.startswith("=") or option.is_flag == bool(equals or value):
            return None
        if option.dest in REPEATABLE and (former := values[option.dest]):
            value = f"{former},{value}"
        values[option.dest] = "1" if option.is_flag else value
    return values


def fields_from(
    values: Values, owner: type[SpecValue], forms: Mapping[str, Callable[[str, str], Any]] = {}
) -> dict[str, Any]:
    """Return the fields of a spec, without its parts, that the options set, by their names.

    `forms` make a field of the label and the text of its option, by the `dest`.  Other fields have
    the form of their check: a number, a switch, or a text, whose check then follows.  Raises
    UsageError.
    """
    found: dict[str, Any] = {}
    for name, described in spec_fields(owner).items():
        option, check = described.option, described.check
        if not isinstance(option, Option) or (text := values[option.dest]) is None:
            continue
        if option.dest in forms:
            found[name] = forms[option.dest](option.label, text)
        elif isinstance(check, checks.Seconds):
            is_positive = check.above is not None
            found[name] = checks.parse_seconds(
                option.label, text, is_positive=is_positive, limit=SECONDS_LIMIT
            )
        elif isinstance(check, checks.Whole):
            most = checks.MAX_NUMBER if check.at_most is None else check.at_most
            found[name] = checks.parse_number(option.label, text, least=check.at_least, most=most)
        elif option.is_flag:
            # A field that is True without an option has `--no-...`.
            found[name] = not described.default
        elif text or option.dest in _NEVER_EMPTY:
            found[name] = text
    return found


def value_from_env(option: Option, env: Mapping[str, str]) -> str | None:
    """Return the value of the option's PET_* variable, or raise UsageError.

    None: it is unset, or the 0 of a flag.
    """
    value = env.get(option.variable) if option.has_variable else None
    if value is None or not option.is_flag:
        return value
    if (number := checks.parse_int(value)) is None:
        raise checks.invalid_value(option.variable, "must be a number (0 is off)", value)
    return "1" if number else None  # as in torchrun


def choose_loop(choice: str, *, serves_store: bool = False) -> LoopFactory | None:
    """Return the factory of the event loop for a sub-command; None is asyncio's own loop.

    "auto" takes uvloop, if installed, for `aio-elastic store`, and asyncio's loop for `aio-elastic
    run`, where uvloop makes no difference (docs/benchmarks.md, "Event loops").  UsageError: the
    `choice` is something else, or "uvloop" and cannot be used.
    """
    if choice not in LOOPS:
        raise checks.invalid_value("--loop", "must be 'auto', 'asyncio' or 'uvloop'", choice)
    if choice == "asyncio" or (choice == "auto" and not serves_store):
        return None
    try:
        import uvloop  # lazily: a run on asyncio's loop does not pay for it
    except ImportError as error:
        problem = f"cannot be imported: {error}"
    else:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit == resource.RLIM_INFINITY or limit >= _UVLOOP_DESCRIPTORS:
            factory: LoopFactory = uvloop.new_event_loop
            return factory
        problem = f"needs a limit of at least {_UVLOOP_DESCRIPTORS} descriptors, not {limit}"
    if choice == "auto":
        return None
    raise checks.invalid_value("--loop", problem, choice)


def print_error(command: str, text: str, code: int) -> int:
    """Write a line to stderr, if that is open; return the exit code `code`.

    On a terminal the line of a refused option ends with the command that prints the option's rows.
    """
    prefix = f"aio-elastic {command}" if command else "aio-elastic"
    hint = ""
    if text.startswith("--") and " (got " in text and os.isatty(2):
        hint = f"; see aio-elastic help {text.partition(':')[0]}"
    try:
        stream = StandardStream(2, "w", closefd=False)
        stream.write(shown_bytes(f"{prefix}: {one_line(text)}{hint}\n"))
    except OSError:
        pass  # closed, full or broken: the exit code remains
    return code


def print_output_error(command: str, error: OSError) -> int:
    """Say that an output takes no more, which a reader that has exited knows; return the code."""
    try:
        print(end="", flush=True)
    except OSError:  # as the flush at exit would
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE
    return print_error(command, error_reason(error), 1)
