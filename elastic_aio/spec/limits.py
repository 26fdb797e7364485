"""What the workers of a job may use of the host, and as whom they run: `LimitSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from elastic_aio.errors import SpecError
from elastic_aio.spec import checks
from elastic_aio.spec.fields import Converted, SpecValue, field, spec_fields

_BYTES_MAX: Final = 1 << 62
_ID_MAX: Final = (1 << 32) - 2  # the last one means "unchanged" to setuid(2)


def _size(name: str, value: object) -> int:
    size = checks.parse_size(value) if isinstance(value, str) else value
    if not checks.is_integer(size) or not 0 < size <= _BYTES_MAX:
        raise SpecError(name, value, "must be a size such as '512M' or a number of bytes")
    return size


def _umask(name: str, value: object) -> int:
    return checks.checked_mode(name, value, "a mask such as '0027' or 0o027")


def _account(name: str, value: object) -> int | str:
    if isinstance(value, str):
        text = checks.checked_name(name, value)
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 11 else text
    if not checks.is_integer(value) or not 0 <= value <= _ID_MAX:
        raise SpecError(name, value, "must be a name or a number")
    return value


class LimitSpec(SpecValue, prefix="limits."):
    """Limits of all workers of a job on a host together, and settings of each of their processes.

    The first four need a cgroup (v2) that is delegated to the launcher: the workers get one of
    their own below it.  None: no limit, or as the launcher has it.
    """

    memory_max: Converted[int | None, int | str | None] = field(default=None, check=_size)
    """Bytes of memory, or a text such as "512M"; beyond it the kernel kills a worker."""
    memory_high: Converted[int | None, int | str | None] = field(default=None, check=_size)
    """Bytes of memory from which on the kernel slows the workers down and takes memory back."""
    cpu_max: float | None = field(default=None, check=checks.Seconds(at_least=0.01))
    """CPUs: 1.5 is one and a half."""
    pids_max: int | None = field(default=None, check=checks.Whole(at_least=1))
    """Processes and threads."""
    nice: int | None = field(default=None, check=checks.Whole(at_least=-20, at_most=19))
    """The nice value of each worker; lower ones than the launcher's need a privilege."""
    oom_score_adj: int | None = field(
        default=None, check=checks.Whole(at_least=-1000, at_most=1000)
    )
    """What the kernel adds to the score by which it chooses a process to kill for memory."""
    umask: Converted[int | None, int | str | None] = field(default=None, check=_umask)
    """The mask of the modes of new files; a text is octal."""
    user: int | str | None = field(default=None, check=_account)
    """Name or number of the user that the workers run as; needs a privilege."""
    group: int | str | None = field(default=None, check=_account)
    """Name or number of their group; None is the group of `user`."""

    @property
    def cgroup(self) -> Mapping[str, str]:
        """The files of a cgroup that have to be written, with their content."""
        files: dict[str, str] = {}
        for name in ("memory_max", "memory_high", "pids_max"):
            if (value := getattr(self, name)) is not None:
                files[name.replace("_", ".")] = str(value)
        if self.cpu_max is not None:
            files["cpu.max"] = f"{max(1000, round(self.cpu_max * _PERIOD_US))} {_PERIOD_US}"
        return files


_PERIOD_US: Final = 100_000
"""The period of the CPU limit, in microseconds: the default of the kernel."""


def checked_limits(name: str, value: object) -> LimitSpec:
    """Return limits that are given as a value or as a table of its fields, or raise SpecError."""
    if isinstance(value, Mapping):
        checks.check_keys(name, value, spec_fields(LimitSpec))
        return LimitSpec(**value)
    return checks.checked_part(name, value, LimitSpec, " or a table of its fields")
