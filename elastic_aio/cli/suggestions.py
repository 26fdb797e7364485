"""Variables and arguments that have no effect where they stand: warnings, not errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from elastic_aio.spec.fields import Option
from elastic_aio.text import closest

_PREFIX: Final = "PET_"

_LAUNCHER_ONLY: Final = frozenset(
    {"nnodes", "nproc-per-node", "max-restarts", "monitor-interval", "node-rank", "no-python"}
    | {"rdzv-backend", "rdzv-conf", "rdzv-endpoint", "rdzv-id", "run-path", "standalone"}
    | {"master-addr", "master-port", "redirects", "restart-delay", "restart-window"}
    | {"shutdown-timeout", "signals-to-handle", "tee"}
)
"""Options that scripts seldom have; `--log-dir` or `--role` may well be a script's own."""


def variable_warnings(env: Mapping[str, str], options: Sequence[Option]) -> list[str]:
    """Return a line for each PET_* variable that sets nothing and resembles one that does."""
    names = {option.variable: option for option in options}
    warnings = []
    for name in sorted(env):
        if not name.startswith(_PREFIX):
            continue
        if (option := names.get(name)) is not None:
            if not option.has_variable:
                warnings.append(f"{name} has no effect: use --{option.name}")
            continue
        known = (name for name, option in names.items() if option.has_variable)
        # Without the common beginning, which makes all of them alike.
        word = name.removeprefix(_PREFIX)
        if found := closest(word.upper(), (name.removeprefix(_PREFIX) for name in known)):
            warnings.append(f"{name} has no effect; did you mean {_PREFIX}{found}?")
    return warnings


def argument_warnings(script: str, args: Sequence[str], accepted: Sequence[Option]) -> list[str]:
    """Return a line if options of the launcher stand after the script, which gets them."""
    names = {option.name for option in accepted} & _LAUNCHER_ONLY
    found: list[str] = []
    for word in args:
        if word == "--":
            break
        option = word.partition("=")[0]
        if option[:2] == "--" and option[2:].replace("_", "-") in names and option not in found:
            found.append(option)
    if not found:
        return []
    stand = "stands" if len(found) == 1 else "stand"
    return [
        f"{', '.join(found)} {stand} after the script: an argument of {script}, not an option of"
        " the launcher (`--` before the script says that this is meant)"
    ]
