"""`--rdzv-conf KEY=VALUE,...`: all keys of torchrun, and further keys."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from msgspec import Struct

from elastic_aio.spec.checks import (
    UsageError,
    checked_bool,
    invalid_value,
    parse_number,
    parse_switch,
    read_token,
)
from elastic_aio.spec.fields import ConfKey, Field, SpecValue, spec_fields
from elastic_aio.spec.rendezvous import (
    ENGINE_ENTRIES,
    ENGINES,
    EngineEntry,
    EngineSpec,
    RendezvousSpec,
)
from elastic_aio.spec.tls import TlsSpec
from elastic_aio.text import closest, did_you_mean


def conf_fields(owner: type[SpecValue]) -> dict[str, Field]:
    """Return the fields of a class that are keys of `--rdzv-conf`, by their keys."""
    found = spec_fields(owner).values()
    return {each.option.name: each for each in found if isinstance(each.option, ConfKey)}


_FIELDS: Final = conf_fields(RendezvousSpec)
_ENGINE_FIELDS: Final = conf_fields(EngineSpec)

TLS: Final = tuple(conf_fields(TlsSpec))
"""Keys of `TlsSpec`."""

_STATIC_TIMEOUT: Final = "900"
"""Seconds; torchrun's default for its static backend."""

ENGINE: Final = (
    *(_ENGINE_FIELDS.keys() - {name for entry in ENGINE_ENTRIES for name in entry.settings}),
    "password_file",
)
"""Keys of `EngineSpec` that all engines have, and the file with the password."""

_OPTION_OF_PARAMETER: Final = {
    "backend": "--rdzv-backend",
    "endpoint": "--rdzv-endpoint",
    "run_id": "--rdzv-id",
    "min_nodes": "--nnodes",
    "max_nodes": "--nnodes",
    "local_addr": "--local-addr",
}

WITHOUT_EFFECT: Final = {
    "keep_alive_interval": "heartbeat_timeout sets after how long an unreachable node is lost",
    "keep_alive_max_attempt": "heartbeat_timeout sets after how long an unreachable node is lost",
    "rank": "--node-rank sets the rank",
}
"""torchrun's keys that have no effect here, and their replacements."""

_SECURES: Final = {
    **{
        name: meant
        for entry in ENGINE_ENTRIES
        for name, meant in entry.conf_keys.items()
        if meant in TLS
    },
    **{name: name for name in (*TLS, "password_file", "token_file", "user")},
    "username": "user",
}
"""The keys that secure a job, torchrun's and other usual names too, and the keys of this package
that they mean."""

_SECURE_PREFIXES: Final = ("tls", "ssl", "token", "user", "password", "cert", "ca_")
"""How an unknown key begins that is near none of them, and may still be meant to secure a job."""

_QUOTES: Final = ("'", '"')
# Up to a comma outside of quotes.
_PART: Final = re.compile(r"""(?:^|(?<=,))(?:[^,=]*=\s*(?:"[^"]*"|'[^']*')\s*(?=,|$)|[^,]*)""")

_KNOWN: Final = frozenset({*_FIELDS, *TLS, *WITHOUT_EFFECT, "store_type", "timeout", "token_file"})


class Conf(Struct, frozen=True):
    """A parsed `--rdzv-conf`: `pairs` are all keys and values as text.

    `settings`, `tls` (empty without TLS) and `engine` are fields of `RendezvousSpec`, `TlsSpec` and
    `EngineSpec`.  The files with the token and with the password of the engine's user have not been
    read.  `warnings` are lines to print at the start.
    """

    settings: Mapping[str, Any]
    tls: Mapping[str, Any]
    engine: Mapping[str, Any]
    token_file: str | None
    password_file: str | None
    pairs: Mapping[str, str]
    warnings: tuple[str, ...]

    def read_secrets(self) -> dict[str, Any]:
        """Return the fields of `RendezvousSpec` for which files are read.

        UsageError: a file cannot be read.  SpecError: a setting is invalid.
        """
        settings: dict[str, Any] = {}
        engine = dict(self.engine)
        if self.token_file is not None:
            settings["token"] = read_token("--rdzv-conf: token_file", self.token_file)
        if self.password_file is not None:
            option = "--rdzv-conf: password_file"
            engine["password"] = read_token(option, self.password_file, at_least=1)
        if engine:
            settings["engine"] = EngineSpec(**engine)
        if self.tls:
            settings["tls"] = TlsSpec(**self.tls)
        return settings


def parse_conf(text: str, backend: str) -> Conf:
    """Parse `--rdzv-conf` for the backend "c10d", "static", "etcd", "redis" or a plug-in's.

    UsageError: one line that names the key, the range and the value; also if an unknown key seems
    to be one that secures the job.  Other unknown keys are warnings.
    """
    pairs = parse_pairs(text)
    warnings: list[str] = []
    settings: dict[str, Any] = {}
    if backend == "static":
        seconds = _seconds("timeout", pairs.get("timeout", _STATIC_TIMEOUT), 1)
        settings.update(join_timeout=seconds, read_timeout=seconds)
    elif "timeout" in pairs:
        _seconds("timeout", pairs["timeout"], 1)
        warnings.append("--rdzv-conf: timeout has no effect: use join_timeout")
    for key, value in pairs.items():
        if key in _OPTION_OF_PARAMETER:
            raise UsageError(f"--rdzv-conf: {key} is set by {_OPTION_OF_PARAMETER[key]}")
        if key in _FIELDS:
            settings[key] = _field_value(_FIELDS[key], value)
        elif key in WITHOUT_EFFECT:
            parse_number(f"--rdzv-conf: {key}", value, least=0 if key == "rank" else 1)
            warnings.append(f"--rdzv-conf: {key} has no effect: {WITHOUT_EFFECT[key]}")
    tls: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    if (entry := ENGINES.get(backend)) is not None:
        known = {*_KNOWN, *ENGINE, *entry.settings, *entry.conf_keys}
        used = {key: value for key, value in pairs.items() if key in known}
        meant = {entry.conf_keys[key]: used[key] for key in entry.conf_keys if key in used} | used
        tls, engine = _engine_tls(meant, entry), _engine(meant, entry)
        warnings += _unknown(pairs, known, backend)
    elif backend in ("c10d", "tcp", "static"):
        tls = _tls(pairs)
        if (store_type := pairs.get("store_type", "tcp")) != "tcp":
            reason = "; a file store is not supported" if store_type == "file" else ""
            problem = f"must be 'tcp'{reason}"
            raise invalid_value("--rdzv-conf: store_type", problem, store_type)
        warnings += _unknown(pairs, _KNOWN, backend)
    if backend in ("static", *ENGINES) and settings.pop("is_host", None) is not None:
        server = "the node of rank 0 serves" if backend == "static" else f"{backend} is"
        warnings.append(f"--rdzv-conf: is_host has no effect: {server} the store")
    files = pairs.get("token_file"), pairs.get("password_file")
    return Conf(settings, tls, engine, *files, pairs, tuple(warnings))


def _field_value(described: Field, text: str) -> object:
    option = described.option
    if isinstance(option, ConfKey) and option.least is not None:
        return _seconds(option.name, text, option.least)
    return parse_switch(described.label, text) if described.check is checked_bool else text


def _unknown(pairs: Mapping[str, str], known: Collection[str], backend: str) -> list[str]:
    """Return a warning for each unknown key.

    UsageError: a key seems to secure the job, which without it would be open, or another user's.
    """
    unknown = [key for key in pairs if key not in known]
    for key in unknown:
        if (meant := _security_key(key, known)) is not None:
            hint = f"; did you mean {meant}?" if meant in known else ""
            # Not the value, which may be the secret itself.
            problem = f"must have keys of the backend {backend!r}{hint}"
            raise invalid_value("--rdzv-conf", problem, key)
    return [
        f"--rdzv-conf: {key!r} is unknown and has no effect{did_you_mean(key, known)}"
        for key in unknown
    ]


def _security_key(key: str, known: Collection[str]) -> str | None:
    """Return which of `_SECURES` an unknown key means; empty: any of them; None: none of them."""
    meant = {_stem(name): own for name, own in _SECURES.items()} | _SECURES
    if (stem := _stem(key)) in meant:
        return meant[stem]
    # A short name is near too many words.
    near = closest(key.lower(), {*known, *(name for name in meant if len(name) > 3)})
    if near in meant:
        return meant[near]
    return "" if key.lower().startswith(_SECURE_PREFIXES) else None


def _stem(key: str) -> str:
    """Return a key without what is easily forgotten: `ca` of `tls_ca`, `TLS-CA` and `cafile`."""
    return re.sub("^(?:tls|ssl)_?|_?file$", "", key.lower().replace("-", "_"))


def _engine(pairs: Mapping[str, str], entry: EngineEntry) -> dict[str, Any]:
    names = pairs.keys() & _ENGINE_FIELDS.keys() & {*ENGINE, *entry.settings}
    return {name: _field_value(_ENGINE_FIELDS[name], pairs[name]) for name in names}


def _engine_tls(pairs: Mapping[str, str], entry: EngineEntry) -> dict[str, Any]:
    """Read the certificates; the key `protocol` of torchrun may require them."""
    tls = _tls(pairs)
    if "protocol" not in entry.conf_keys:
        return tls
    protocol = pairs.get("protocol", "https" if tls else "http").strip().lower()
    if protocol not in ("http", "https"):
        raise invalid_value("--rdzv-conf: protocol", "must be 'http' or 'https'", protocol)
    if protocol == "https" and not tls:
        name = entry.names[0]
        raise UsageError(
            f"--rdzv-conf: protocol=https needs tls_ca, which verifies {name}'s certificate"
        )
    return tls if protocol == "https" else {}


def parse_pairs(text: str) -> dict[str, str]:
    """Split `KEY=VALUE,KEY=VALUE`; the keys are not checked.  UsageError: a part is missing."""
    pairs: dict[str, str] = {}
    for part in _PART.findall(text) if text.strip() else []:
        key, equals, value = part.partition("=")
        value = value.strip()
        if value[:1] in _QUOTES and len(value) > 1 and value[-1] == value[0]:
            value = value[1:-1]
        if not key.strip() or not equals or not value or value[:1] in _QUOTES:
            raise invalid_value("--rdzv-conf", "must be KEY=VALUE,KEY=VALUE,...", text)
        pairs[key.strip()] = value
    return pairs


def _tls(pairs: Mapping[str, str]) -> dict[str, Any]:
    fields: dict[str, Any] = {key.removeprefix("tls_"): pairs[key] for key in TLS if key in pairs}
    if (text := fields.get("client_auth")) is not None:
        fields["client_auth"] = parse_switch("--rdzv-conf: tls_client_auth", text)
    return fields


def _seconds(key: str, text: str, least: int) -> float:
    return float(parse_number(f"--rdzv-conf: {key}", text, least=least, unit="whole seconds"))
