"""argparse for the command line: its errors have one line, and completion reads its options.

A run imports this for its help only.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, NoReturn

from elastic_aio.cli.options import UsageError, parse_seconds, read_token
from elastic_aio.spec.fields import Option
from elastic_aio.text import did_you_mean


class OptionParser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises `UsageError` where argparse prints usage and exits."""

    captured: ClassVar[list[OptionParser] | None] = None
    """Where shell completion gets the parsers whose help would be printed; None prints it."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message and unknown.startswith("-"):
            message += did_you_mean(unknown.split()[0].partition("=")[0], self.option_names())
        raise UsageError(message.removeprefix("argument "))

    def option_names(self) -> list[str]:
        """Return the options in their long spelling."""
        return [name for name in self._option_string_actions if name.startswith("--")]

    def print_help(self, file: Any = None) -> None:
        """Print the help, or leave the parser itself in `captured`."""
        if self.captured is None:
            super().print_help(file)
        else:
            self.captured.append(self)


def option_parser(options: Sequence[Option], epilog: str, prog: str) -> OptionParser:
    """Return the parser of the words that `split_options` returns."""
    parser = OptionParser(
        prog=prog,
        usage=f"{prog} [options] script [arguments of the script]",
        description="Run a script as a group of worker processes; restart the group when a"
        " worker fails.",
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


def add_timeout_option(parser: OptionParser, default: int, purpose: str) -> None:
    """Add `--timeout SECONDS` to a sub-command that connects to a store."""
    parser.add_argument(
        "--timeout",
        type=lambda text: parse_seconds("--timeout", text, is_positive=True, limit=1e9),
        default=float(default),
        metavar="SECONDS",
        help=f"{purpose} (default {default})",
    )


def add_token_option(parser: OptionParser, purpose: str) -> None:
    """Add `--token-file FILE`; its value is `token`, the text of the file."""
    parser.add_argument(
        "--token-file",
        type=partial(read_token, "--token-file"),
        dest="token",
        metavar="FILE",
        help=f"{purpose} (default: no token)",
    )
