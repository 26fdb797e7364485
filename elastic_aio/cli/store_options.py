"""The options that say where the store of a job is, for the sub-commands that read it."""

from __future__ import annotations

import argparse

from elastic_aio.cli.parser import OptionParser, add_token_option
from elastic_aio.cli.rendezvous_options import check_backend
from elastic_aio.cli.tls_options import add_client_tls_options, tls_of
from elastic_aio.spec.rdzv_conf import parse_conf
from elastic_aio.spec.rendezvous import (
    ENGINES,
    ETCD_PORT,
    REDIS_PORT,
    STATIC_PORT,
    RendezvousSpec,
    engine_port,
)


def add_store_options(parser: OptionParser) -> None:
    """Add the options of the store to a sub-command."""
    default = RendezvousSpec()
    parser.add_argument(
        "--rdzv-endpoint",
        "--rdzv_endpoint",
        metavar="HOST:PORT[,...]",
        help=f"endpoints of the job's store (default {default.endpoint}); for the backend"
        f" 'static' MASTER_ADDR:MASTER_PORT of the job (its default port is {STATIC_PORT});"
        f" for 'etcd' and 'redis' those of the engine (default localhost:{ETCD_PORT} and"
        f" localhost:{REDIS_PORT})",
    )
    parser.add_argument(
        "--rdzv-backend",
        "--rdzv_backend",
        default=default.backend,
        metavar="NAME",
        help=f"backend of the job (default {default.backend}); only 'etcd' and 'redis' make a"
        " difference",
    )
    parser.add_argument(
        "--rdzv-conf",
        "--rdzv_conf",
        default="",
        metavar="KEY=VALUE,...",
        help="with 'etcd' and 'redis': user, password_file, key_prefix and sentinel, as for a run"
        " (default: none)",
    )
    add_token_option(parser, "file with the store's token")
    add_client_tls_options(parser)


def store_spec(arguments: argparse.Namespace) -> RendezvousSpec:
    """Return the place of the store that the options describe.

    Raises:
        UsageError: a file cannot be read, or there is no such backend.
        SpecError: a value is invalid.
    """
    backend = arguments.rdzv_backend
    if backend != RendezvousSpec().backend:
        check_backend(backend)
    default = f"localhost:{engine_port(backend)}" if backend in ENGINES else None
    secrets = parse_conf(arguments.rdzv_conf, backend).read_secrets()
    settings = {
        "token": arguments.token,
        "tls": tls_of(arguments, is_server=False) or secrets.get("tls"),
        **({"engine": secrets["engine"]} if "engine" in secrets else {}),
    }
    return RendezvousSpec(
        backend=backend if backend in ENGINES else "c10d",
        endpoint=arguments.rdzv_endpoint or default or RendezvousSpec().endpoint,
        is_host=None if backend in ENGINES else False,
        **settings,
    )
