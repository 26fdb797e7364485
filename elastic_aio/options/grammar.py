"""Options as torchrun spells them: dashed, underscored, cut short, or as PET_* variables.

argparse cannot abbreviate an option that exists in two spellings (Python 3.11 calls it
ambiguous), so options are brought into one spelling first, which also finds the script.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import NoReturn

from msgspec import Struct

__all__ = ["Option", "UsageError", "option_parser", "split_options", "value_from_env", "whole"]


class UsageError(Exception):
    """A command line that cannot be accepted; the message is one line."""


class Option(Struct, frozen=True):
    """One option: a flag unless it has a `metavar`; `name` is the dashed spelling without "--"."""

    name: str
    help: str
    short: str = ""
    metavar: str = ""
    has_pet: bool = True

    @property
    def is_flag(self) -> bool:
        return not self.metavar

    @property
    def dest(self) -> str:
        return self.name.replace("-", "_")

    @property
    def pet(self) -> str:
        return f"PET_{self.dest.upper()}"


def split_options(
    argv: Sequence[str], options: Sequence[Option], not_yet: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Separate our options, in their full dashed spelling, from the script and its arguments.

    Args:
        argv: all that was given.
        options: the options that there are.
        not_yet: names of those that are torchrun's and not there yet; a value means
            that the option takes one.

    Raises:
        UsageError: an option is unknown, ambiguous, not there yet, or lacks its value.
    """
    known = {option.name: option.metavar for option in options} | {**not_yet, "help": ""}
    shorts = {option.short: option.metavar for option in options if option.short} | {"-h": ""}
    found: list[str] = []
    rest = list(argv)
    while rest:
        word = rest[0]
        if word == "--":
            return found, rest[1:]
        if not word.startswith("-") or word == "-":
            break
        del rest[0]
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = _full_name(name.replace("_", "-"), known)
            if name in not_yet:
                raise UsageError(f"--{name} is an option of torchrun's that is not supported yet")
            found.append(f"--{name}{equals}{value}")
            needs_value = known[name] and not equals
        elif word[:2] in shorts:
            found.append(word)
            needs_value = shorts[word[:2]] and len(word) == 2
        else:
            raise UsageError(f"unknown option {word} (aio-elastic run --help lists them)")
        if needs_value:
            if not rest:
                raise UsageError(f"{found[-1]} needs a value: {needs_value}")
            # Joined, so that argparse takes a value that begins with a dash too.
            joint = "=" if found[-1].startswith("--") else ""
            found[-1] += joint + rest.pop(0)
    return found, rest


def _full_name(name: str, known: Mapping[str, str]) -> str:
    if name in known:
        return name
    fitting = [full for full in known if full.startswith(name)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        could = ", ".join(f"--{full}" for full in fitting)
        raise UsageError(f"--{name} could be any of {could}")
    raise UsageError(f"unknown option --{name} (aio-elastic run --help lists them)")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def option_parser(options: Sequence[Option], epilog: str) -> argparse.ArgumentParser:
    """Return the parser of what `split_options` has found; it complains by UsageError."""
    parser = _Parser(
        prog="aio-elastic run",
        usage="aio-elastic run [options] script [arguments of the script]",
        description="Run a script as a group of worker processes, and restart them when one fails.",
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
    )
    for option in options:
        names = [option.short] if option.short else []
        names.append(f"--{option.name}")
        if option.is_flag:
            parser.add_argument(
                *names, dest=option.dest, help=option.help, action="store_const", const="1"
            )
        else:
            parser.add_argument(*names, dest=option.dest, help=option.help, metavar=option.metavar)
    return parser


def value_from_env(option: Option, env: Mapping[str, str]) -> str | None:
    """Return what the option's PET_* variable says; None if it says nothing.

    Raises:
        UsageError: the variable of a flag is no number.
    """
    value = env.get(option.pet) if option.has_pet else None
    if value is None:
        return None
    if option.is_flag:
        if not value.isdecimal():
            raise UsageError(f"{option.pet}: must be 0 or 1, not {value!r}")
        return "1" if int(value) else None
    return value


def whole(text: str) -> int | None:
    """Return the number that `text` is; None if it is not a whole one from 0 to 999,999,999."""
    fits = text.isascii() and text.isdecimal() and len(text) < 10
    return int(text) if fits else None
