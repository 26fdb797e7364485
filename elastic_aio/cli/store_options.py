"""The options that say where the store of a job is, for the sub-commands that read it."""

from __future__ import annotations

import argparse

from elastic_aio.cli.options import print_error
from elastic_aio.cli.parser import OptionParser, add_client_tls_options, add_token_option, tls_of
from elastic_aio.cli.rendezvous_options import check_backend
from elastic_aio.spec.rdzv_conf import parse_conf
from elastic_aio.spec.rendezvous import ENGINE_ENTRIES, ENGINES, STATIC_PORT, RendezvousSpec


def add_store_options(parser: OptionParser) -> None:
    """Add the options of the store to a sub-command."""
    default = RendezvousSpec()
    engines = " and ".join(repr(entry.names[0]) for entry in ENGINE_ENTRIES)
    ports = " and".join(f" localhost:{entry.port}" for entry in ENGINE_ENTRIES)
    parser.add_argument(
        "--rdzv-endpoint",
        "--rdzv_endpoint",
        metavar="HOST:PORT[,...]",
        help=f"endpoints of the job's store (default {default.endpoint}); for the backend"
        f" 'static' MASTER_ADDR:MASTER_PORT of the job (its default port is {STATIC_PORT});"
        f" for {engines} those of the engine (default{ports})",
    )
    parser.add_argument(
        "--rdzv-backend",
        "--rdzv_backend",
        default=default.backend,
        metavar="NAME",
        help=f"backend of the job (default {default.backend}); only {engines} make a difference",
    )
    parser.add_argument(
        "--rdzv-conf",
        "--rdzv_conf",
        default="",
        metavar="KEY=VALUE,...",
        help="as for a run: token_file and the tls_ keys; with"
        f" {engines}: user, password_file, key_prefix, sentinel; other keys of a run have no effect"
        " (default: none)",
    )
    add_token_option(parser, "file with the store's token")
    add_client_tls_options(parser)


def store_spec(arguments: argparse.Namespace, command: str) -> RendezvousSpec:
    """Return the place of the store that the options describe; warn in the name of a command.

    Raises:
        UsageError: a file cannot be read, or there is no such backend.
        SpecError: a value is invalid.
    """
    backend = arguments.rdzv_backend
    if backend != RendezvousSpec().backend:
        check_backend(backend)
    engine = ENGINES.get(backend)
    default = RendezvousSpec().endpoint if engine is None else f"localhost:{engine.port}"
    conf = parse_conf(arguments.rdzv_conf, backend)
    for warning in conf.warnings:
        print_error(command, warning, 0)
    secrets = conf.read_secrets()
    if arguments.token is not None:  # the command's own options come first
        secrets["token"] = arguments.token
    if (tls := tls_of(arguments, is_server=False)) is not None:
        secrets["tls"] = tls
    elif "tls" in secrets:
        from elastic_aio.store.tls import check_tls  # OpenSSL is for TLS only

        check_tls(secrets["tls"], may_serve=False, may_connect=True)
    return RendezvousSpec(
        backend="c10d" if engine is None else backend,
        endpoint=arguments.rdzv_endpoint or default,
        is_host=False if engine is None else None,
        **secrets,
    )
