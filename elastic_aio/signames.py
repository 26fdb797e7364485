"""Signal names and numbers, as plain data.

Pure modules may not import `signal`; a spec that names a signal means Linux's
number on x86 and arm, which is what Kubernetes, Slurm and torchrun users write.
"""

from __future__ import annotations

from elastic_aio.errors import SpecError

__all__ = ["SIGKILL", "SIGTERM", "signal_name", "signal_number"]

_IN_ORDER = """
HUP INT QUIT ILL TRAP ABRT BUS FPE KILL USR1 SEGV USR2 PIPE ALRM TERM STKFLT CHLD CONT
STOP TSTP TTIN TTOU URG XCPU XFSZ VTALRM PROF WINCH IO PWR SYS
"""
_NAMES = dict(enumerate(_IN_ORDER.split(), start=1))
_NUMBERS = {name: number for number, name in _NAMES.items()}
_SIGRTMIN, _SIGRTMAX = 34, 64

SIGKILL = _NUMBERS["KILL"]
SIGTERM = _NUMBERS["TERM"]


def signal_name(number: int) -> str:
    """Return the name of a signal, such as `SIGTERM` or `SIGRTMIN+2`."""
    if name := _NAMES.get(number):
        return f"SIG{name}"
    if _SIGRTMIN <= number <= _SIGRTMAX:
        return "SIGRTMIN" if number == _SIGRTMIN else f"SIGRTMIN+{number - _SIGRTMIN}"
    return f"signal {number}"


def signal_number(field: str, value: object) -> int:
    """Return the number of a signal given as a number or as a `SIG...` name.

    Raises:
        SpecError: naming `field`, when there is no such signal.
    """
    if isinstance(value, str) and value.startswith("SIG") and value[3:] in _NUMBERS:
        return _NUMBERS[value[3:]]
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if is_number and (value in _NAMES or _SIGRTMIN <= value <= _SIGRTMAX):  # type: ignore[operator]  # is_number
        return int(value)  # type: ignore[call-overload, no-any-return]  # is_number
    raise SpecError(field, value, "must be a signal number or a name such as 'SIGTERM'")
