"""argparse for the command line: its errors have one line, and completion reads its options.

A run imports this for its help only.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, NoReturn

from elastic_aio.cli.options import REPEATABLE
from elastic_aio.errors import SpecError
from elastic_aio.spec.checks import UsageError, parse_seconds, parse_switch, read_token
from elastic_aio.spec.fields import ConfKey, Option, spec_fields
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.spec.tls import TlsSpec
from elastic_aio.text import did_you_mean


class OptionParser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises `UsageError` where argparse prints usage and exits."""

    captured: ClassVar[list[OptionParser] | None] = None
    """Where shell completion gets the parsers instead of printed help; None prints the help."""

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
            print(self.format_help(), end="", file=file, flush=True)
        else:
            self.captured.append(self)


def option_parser(options: Sequence[Option], prog: str) -> OptionParser:
    """Return the parser of the words that `split_options` returns."""
    parser = OptionParser(
        prog=prog,
        usage=f"{prog} [options] script [arguments of the script]",
        description="Run a script as a group of worker processes; restart the group when a"
        " worker fails.",
        epilog=_run_epilog(),
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
    )
    add_options(parser, options)
    return parser


def add_options(parser: OptionParser, options: Iterable[Option]) -> None:
    for option in options:
        names = [option.short] if option.short else []
        names.append(f"--{option.name}")
        if option.is_flag:
            parser.add_argument(
                *names, dest=option.dest, help=option.help, action="store_const", const="1"
            )
        else:
            action = _Repeatable if option.dest in REPEATABLE else "store"
            parser.add_argument(
                *names, dest=option.dest, help=option.help, metavar=option.metavar, action=action
            )


class _Repeatable(argparse.Action):
    """Joins the values of an option that is given several times."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        former = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, f"{former},{values}" if former else values)


def _run_epilog() -> str:
    described = [
        f"{each.option.name} ({each.option.default or _as_text(each.default)})"
        for each in spec_fields(RendezvousSpec).values()
        if isinstance(each.option, ConfKey)
    ]
    return (
        "Options have torchrun's names, with dashes or underscores. torchrun's options also have"
        " PET_* variables as defaults, such as PET_NPROC_PER_NODE=4. Keys of --rdzv-conf, times in"
        f" whole seconds, with defaults: {', '.join(described)}, timeout (900; 'static' only),"
        " token_file (path of a file with the store's token; no token), tls_cert,"
        " tls_key and tls_ca (PEM files; no TLS), tls_client_auth (true), tls_server_name (host of"
        " the endpoint); with 'etcd' and 'redis': user, password_file, key_prefix (/rendezvous),"
        " retention (86400); with 'redis': sentinel (name of the master that the endpoints know)."
    )


def _as_text(default: object) -> str:
    return f"{default:g}" if isinstance(default, float) else str(default).lower()


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


def add_client_tls_options(parser: OptionParser) -> None:
    _add_tls_file(parser, "ca", "certificates of the CAs that verify the store; connects over TLS")
    _add_tls_file(parser, "cert", "certificate of this client, if the store requires one")
    _add_tls_file(parser, "key", "private key of --tls-cert")
    parser.add_argument(
        "--tls-server-name",
        metavar="NAME",
        help="name that the store's certificate must have (default: the host of the endpoint)",
    )


def add_server_tls_options(parser: OptionParser) -> None:
    _add_tls_file(parser, "cert", "certificate of the store, which then serves TLS only")
    _add_tls_file(parser, "key", "private key of --tls-cert")
    _add_tls_file(parser, "ca", "certificates of the CAs that verify the certificates of clients")
    parser.add_argument(
        "--tls-client-auth",
        metavar="BOOL",
        type=lambda text: parse_switch("--tls-client-auth", text),
        help="whether clients must have a certificate of --tls-ca (default: true with --tls-ca)",
    )


def tls_of(arguments: argparse.Namespace, *, is_server: bool) -> TlsSpec | None:
    """Return the certificates that the options name, after a check; None without options.

    Raises:
        UsageError: they do not belong together, or a file cannot be used.
    """
    values = {name: getattr(arguments, f"tls_{name}", None) for name in spec_fields(TlsSpec)}
    if all(value is None for value in values.values()):
        return None
    from elastic_aio.store.tls import check_tls  # OpenSSL is for TLS only

    try:
        tls = TlsSpec(**values)
        check_tls(tls, may_serve=is_server, may_connect=not is_server)
    except SpecError as error:
        option = f"--{error.field.replace('.', '-').replace('_', '-')}"
        raise UsageError(str(SpecError(option, error.value, error.problem))) from None
    return tls


def _add_tls_file(parser: OptionParser, name: str, purpose: str) -> None:
    parser.add_argument(f"--tls-{name}", metavar="FILE", help=f"PEM file with the {purpose}")
