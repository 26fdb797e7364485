"""Parses the options that say which failures are followed by a restart, and when."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from elastic_aio.cli.options import (
    invalid_value,
    parse_int,
    parse_number,
    parse_seconds,
)
from elastic_aio.errors import SpecError
from elastic_aio.spec.checks import signal_number
from elastic_aio.spec.restart import UNLIMITED, Backoff, RestartPolicy

_LIMIT: Final = 1e9
"""Seconds."""


def parse_max_restarts(text: str | None) -> int:
    """Return the number of restarts.

    Raises:
        UsageError: it is none.
    """
    if text == "unlimited":
        return UNLIMITED
    return parse_number("--max-restarts", text or "0", unit="'unlimited' or a whole number")


def parse_restart_options(values: Mapping[str, str | None], max_restarts: int) -> RestartPolicy:
    """Return the policy of the options, by their `dest`.

    Raises:
        UsageError: one line that names the option, the problem and the value.
        SpecError: likewise, with the name of the field.
    """
    for name in ("healthy_after", "restart_delay", "restart_window", "restart_on"):
        if values[name] is not None and not max_restarts:
            problem = "has no effect unless --max-restarts is at least 1"
            raise invalid_value(_option(name), problem, values[name])
    settings: dict[str, Any] = {}
    if values["torchrun_defaults"]:
        from elastic_aio.spec.torchrun import TORCHRUN_DEFAULTS

        settings |= TORCHRUN_DEFAULTS["restart"]
    if (text := values["healthy_after"]) is not None:
        seconds = parse_seconds("--healthy-after", text, is_positive=True, limit=_LIMIT)
        settings["healthy_after"] = seconds
    if (text := values["restart_delay"]) is not None:
        settings["backoff"] = _backoff(text)
    return RestartPolicy(
        **settings,
        window=_window(values["restart_window"], max_restarts),
        restart_on=_codes("restart_on", values["restart_on"]),
        never_on=_codes("never_on", values["never_on"]) or (),
    )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _backoff(text: str) -> Backoff:
    option = "--restart-delay"
    first, colon, longest = text.partition(":")
    initial = parse_seconds(option, first, limit=_LIMIT)
    if not colon:
        return Backoff(initial=initial, factor=1.0, cap=initial, jitter=False)
    cap = parse_seconds(option, longest, limit=_LIMIT)
    if cap < initial or not initial:
        problem = "must be SECONDS, or FIRST:LONGEST such as '1:60'"
        raise invalid_value(option, problem, text)
    return Backoff(initial=initial, cap=cap)


def _window(text: str | None, max_restarts: int) -> tuple[int, float] | None:
    if text is None:
        return None
    option = "--restart-window"
    count, colon, seconds = text.partition(":")
    number = parse_int(count)
    if not colon or not number:
        raise invalid_value(option, "must be N:SECONDS such as '3:900'", text)
    if number > max_restarts:
        problem = f"is never reached: --max-restarts is {max_restarts}"
        raise invalid_value(option, problem, text)
    return number, parse_seconds(option, seconds, is_positive=True, limit=_LIMIT)


def _codes(name: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    return [_code(_option(name), part.strip()) for part in text.split(",")]


def _code(option: str, text: str) -> int:
    if (code := parse_int(text)) is None:
        try:
            return 128 + signal_number(option, text)
        except SpecError:
            pass
    if code is None or not 1 <= code <= 255:
        raise invalid_value(option, "must be exit codes from 1 to 255, or signal names", text)
    return code
