"""`--rdzv-conf KEY=VALUE,...`: every key of torchrun's, and some of our own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from elastic_aio.options.grammar import UsageError, whole

__all__ = ["Conf", "parse_conf"]

_LEAST_SECONDS: Final = {
    "join_timeout": 1,
    "last_call_timeout": 0,
    "close_timeout": 0,
    "heartbeat_timeout": 2,
    "read_timeout": 1,
    "store_grace": 0,
}
"""Keys that are times, with the least that they can be."""

_STATIC_TIMEOUT: Final = 900
"""Seconds; what torchrun gives its static backend."""

_SWITCHES: Final = ("is_host", "keeps_workers")
_YES: Final = frozenset({"1", "true", "t", "yes", "y"})
_NO: Final = frozenset({"0", "false", "f", "no", "n"})

_OPTION_OF_PARAMETER: Final = {
    "backend": "--rdzv-backend",
    "endpoint": "--rdzv-endpoint",
    "run_id": "--rdzv-id",
    "min_nodes": "--nnodes",
    "max_nodes": "--nnodes",
    "local_addr": "--local-addr",
}

_REPLACED: Final = {
    "keep_alive_interval": "heartbeat_timeout says after how long a silent node is lost",
    "keep_alive_max_attempt": "heartbeat_timeout says after how long a silent node is lost",
    "rank": "--node-rank says it",
}
"""torchrun's keys that have no effect here, and what has."""

_TAKEN: Final = frozenset({*_LEAST_SECONDS, *_SWITCHES, *_REPLACED})
_TAKEN_ELSEWHERE: Final = frozenset({"store_type", "timeout", "token_file"})


class Conf(Struct, frozen=True):
    """What `--rdzv-conf` says.

    Attributes:
        settings: fields of `RendezvousSpec`.
        token_file: path of the token's file, which has not been read.
        given: everything as it was given.
        notices: what is to be told to the user.
    """

    settings: Mapping[str, Any]
    token_file: str | None
    given: Mapping[str, str]
    notices: tuple[str, ...]


def parse_conf(text: str, backend: str) -> Conf:
    """Read `--rdzv-conf` for a rendezvous of a kind, "c10d", "static" or a plug-in's.

    Raises:
        UsageError: it cannot be accepted; the line names the key, the value and the range.
    """
    given = _pairs(text)
    notices: list[str] = []
    settings: dict[str, Any] = {}
    if backend == "static":
        seconds = _seconds("timeout", given.get("timeout", str(_STATIC_TIMEOUT)), 1)
        settings.update(join_timeout=seconds, read_timeout=seconds)
    elif "timeout" in given:
        _seconds("timeout", given["timeout"], 1)
        notices.append("--rdzv-conf: timeout has no effect: join_timeout is what is meant")
    for key, value in given.items():
        if key in _OPTION_OF_PARAMETER:
            raise UsageError(f"--rdzv-conf: {key} is set by {_OPTION_OF_PARAMETER[key]}")
        if key in _LEAST_SECONDS:
            settings[key] = _seconds(key, value, _LEAST_SECONDS[key])
        elif key in _SWITCHES:
            settings[key] = _switch(key, value)
        elif key in _REPLACED:
            _check_count(key, value)
            notices.append(f"--rdzv-conf: {key} has no effect: {_REPLACED[key]}")
    if backend in ("c10d", "tcp", "static"):
        _check_store_type(given.get("store_type", "tcp"))
        notices += [
            f"--rdzv-conf: {key!r} is not known and has no effect"
            for key in given
            if key not in _TAKEN | _TAKEN_ELSEWHERE
        ]
    if backend == "static" and settings.pop("is_host", None) is not None:
        notices.append("--rdzv-conf: is_host has no effect: the node of rank 0 serves the store")
    return Conf(settings, given.get("token_file"), given, tuple(notices))


def _pairs(text: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in text.split(",") if text.strip() else []:
        key, equals, value = part.partition("=")
        if not key.strip() or not equals or not value.strip():
            raise UsageError(f"--rdzv-conf: must be KEY=VALUE,KEY=VALUE,..., not {text!r}")
        pairs[key.strip()] = value.strip()
    return pairs


def _seconds(key: str, text: str, least: int) -> float:
    seconds = whole(text)
    if seconds is None or seconds < least:
        accepted = f"must be whole seconds from {least} to 999999999"
        raise UsageError(f"--rdzv-conf: {key} {accepted}, not {text!r}")
    return float(seconds)


def _check_count(key: str, text: str) -> None:
    least = 0 if key == "rank" else 1
    number = whole(text)
    if number is None or number < least:
        accepted = f"must be a whole number from {least} to 999999999"
        raise UsageError(f"--rdzv-conf: {key} {accepted}, not {text!r}")


def _switch(key: str, text: str) -> bool:
    if text.lower() not in _YES | _NO:
        raise UsageError(f"--rdzv-conf: {key} must be true or false, not {text!r}")
    return text.lower() in _YES


def _check_store_type(text: str) -> None:
    if text != "tcp":
        why = " (a store in a file is not supported)" if text == "file" else ""
        raise UsageError(f"--rdzv-conf: store_type must be 'tcp'{why}, not {text!r}")
