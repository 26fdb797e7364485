"""Parses the options that say which failures are followed by a restart, and when."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from elastic_aio.cli.options import SECONDS_LIMIT, Values, fields_from
from elastic_aio.errors import SpecError
from elastic_aio.spec.checks import (
    invalid_value,
    parse_int,
    parse_number,
    parse_seconds,
    signal_number,
)
from elastic_aio.spec.restart import UNLIMITED, Backoff, RestartPolicy
from elastic_aio.spec.torchrun import TORCHRUN_DEFAULTS


def restart_fields(values: Values) -> dict[str, Any]:
    """Return the fields of the spec that say which failures are followed by a restart.

    Raises:
        UsageError, SpecError: one line that names the option or the field.
    """
    text, unit = values["max_restarts"] or "0", "'unlimited' or a whole number"
    is_unlimited = text == "unlimited"
    maximum = UNLIMITED if is_unlimited else parse_number("--max-restarts", text, unit=unit)
    for name in ("healthy_after", "restart_delay", "restart_window", "restart_on"):
        if values[name] is not None and not maximum and values["restart"] != "always":
            problem = "has no effect unless --max-restarts is at least 1"
            raise invalid_value(f"--{name.replace('_', '-')}", problem, values[name])
    # Of independent workers, the window limits the restarts of all.
    is_limited = values["restart"] != "always" and values["restart_scope"] in (None, "group")
    settings: dict[str, Any] = {}
    if values["torchrun_defaults"]:
        settings |= TORCHRUN_DEFAULTS["restart"]
    forms: dict[str, Callable[[str, str], Any]] = {
        "restart_delay": _backoff,
        "restart_window": partial(_window, maximum if is_limited else UNLIMITED),
        "restart_on": _codes,
        "never_on": _codes,
    }
    settings |= fields_from(values, RestartPolicy, forms)
    return {"max_restarts": maximum, "restart": RestartPolicy(**settings)}


def _backoff(option: str, text: str) -> Backoff:
    first, colon, longest = text.partition(":")
    initial = parse_seconds(option, first, limit=SECONDS_LIMIT)
    if not colon:
        return Backoff(initial=initial, factor=1.0, cap=initial, jitter=False)
    cap = parse_seconds(option, longest, limit=SECONDS_LIMIT)
    if cap < initial or not initial:
        problem = "must be SECONDS, or FIRST:LONGEST such as '1:60'"
        raise invalid_value(option, problem, text)
    return Backoff(initial=initial, cap=cap)


def _window(max_restarts: int, option: str, text: str) -> tuple[int, float]:
    count, colon, seconds = text.partition(":")
    number = parse_int(count)
    if not colon or not number:
        raise invalid_value(option, "must be N:SECONDS such as '3:900'", text)
    if number > max_restarts:
        problem = f"is never reached: --max-restarts is {max_restarts}"
        raise invalid_value(option, problem, text)
    return number, parse_seconds(option, seconds, is_positive=True, limit=SECONDS_LIMIT)


def _codes(option: str, text: str) -> list[int]:
    return [_code(option, part.strip()) for part in text.split(",")]


def _code(option: str, text: str) -> int:
    if (code := parse_int(text)) is None:
        try:
            return 128 + signal_number(option, text)
        except SpecError:
            pass
    if code is None or not 1 <= code <= 255:
        raise invalid_value(option, "must be exit codes from 1 to 255, or signal names", text)
    return code
