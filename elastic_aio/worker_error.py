"""The error that a worker records, which needs the standard library only, as its workers do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerError:
    """The `message` and `traceback` that a worker recorded before it exited (`error.json`)."""

    message: str
    traceback: str | None
    timestamp: float
    """Unix seconds."""
    path: str
    """The error file; empty for a function, whose error comes back with its result."""
    pid: int | None = None
    """The process that wrote the file; None if the file does not say, as torch's."""
