"""Parses the options that say where the output of workers goes, and what is kept: `LogSpec`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from elastic_aio.cli.options import (
    UsageError,
    invalid_value,
    parse_int,
    parse_number,
)
from elastic_aio.spec.logs import ENTRY_POINTS, LogSpec, StdMap

_PREFIX_VARIABLE: Final = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
_SIZE: Final = r"(?ai)(\d{1,15})([KMGT]?)"
_UNITS: Final = ("", "K", "M", "G", "T")


def parse_log_options(values: Mapping[str, str | None], env: Mapping[str, str]) -> LogSpec:
    """Return the logs that the options select, by their `dest`.

    Raises:
        UsageError: one line that names the option, the problem and the value.
        SpecError: likewise, with the name of the field.
    """
    # A plug-in may be older than these settings.
    others: dict[str, Any] = {} if values["on_full"] is None else {"on_full": values["on_full"]}
    for name in ("duplicate_stdout_filters", "duplicate_stderr_filters"):
        if texts := _filters(values[name] or ""):
            others[name] = texts
    if values["color"] is not None or values["logs_specs"] in (None, "default"):
        others["color"] = color_of(values, env)
    if values["no_capture"]:
        others["capture"] = False
    if (text := values["log_max_bytes"]) is not None:
        others["max_bytes"] = _size("--log-max-bytes", text)
    for name in ("keep_attempts", "keep_runs"):
        if (text := values[f"log_{name}"]) is not None:
            option = f"--log-{name.replace('_', '-')}"
            others[name] = parse_number(option, text, least=1)
    return _log_layout(values["logs_specs"])(
        log_dir=values["log_dir"] or None,
        redirects=StdMap.parse("logs.redirects", values["redirects"] or "0"),
        tee=StdMap.parse("logs.tee", values["tee"] or "0"),
        local_ranks_filter=_ranks(values["local_ranks_filter"] or ""),
        prefix=values["log_prefix"] or env.get(_PREFIX_VARIABLE) or None,
        **others,
    )


def _log_layout(name: str | None) -> Callable[..., LogSpec]:
    """Return the class that makes the job's `LogSpec`: the default, or a plug-in."""
    if name in (None, "default"):
        return LogSpec
    from importlib.metadata import entry_points

    found = [*entry_points(group=ENTRY_POINTS), *entry_points(group="torchrun.logs_specs")]
    for entry in found:
        if entry.name != name:
            continue
        try:
            layout: Callable[..., LogSpec] = entry.load()
        except Exception as error:
            raise UsageError(f"--logs-specs: {name} cannot be loaded: {error!r}") from error
        if entry.group == ENTRY_POINTS:
            return layout
        from elastic_aio.torch_logs import TorchLogLayout

        return partial(TorchLogLayout.of_plugin, layout)
    known = ", ".join(sorted({"default", *(entry.name for entry in found)}))
    raise invalid_value("--logs-specs", f"must be one of: {known}", name)


def _filters(text: str) -> list[str]:
    """Split a list at its commas; a doubled one belongs to the text."""
    # NUL cannot occur in an argument.
    texts = text.replace(",,", "\0").split(",") if text else []
    return [part.replace("\0", ",") for part in texts]


def _ranks(value: str) -> frozenset[int]:
    ranks = [parse_int(part.strip()) for part in value.split(",")] if value.strip() else []
    if None in ranks:
        raise invalid_value("--local-ranks-filter", "must be local ranks such as '0,2'", value)
    return frozenset(rank for rank in ranks if rank is not None)


def _size(option: str, text: str) -> int:
    """Return a number of bytes, with a unit of 1024 (`K`, `M`, `G`, `T`) or without."""
    if (found := re.fullmatch(_SIZE, text)) is None:
        raise invalid_value(option, "must be a size such as '100M' or '65536'", text)
    return int(found[1]) << (10 * _UNITS.index(found[2].upper()))


def color_of(values: Mapping[str, str | None], env: Mapping[str, str]) -> str:
    """Return `--color`; without it, NO_COLOR and a terminal without colors exclude them."""
    if (color := values["color"]) is None:
        return "never" if env.get("NO_COLOR") or env.get("TERM") == "dumb" else "auto"
    if color not in ("auto", "always", "never"):
        raise invalid_value("--color", "must be 'auto', 'always' or 'never'", color)
    return color
