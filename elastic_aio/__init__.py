"""elastic_aio: an asyncio-native supervisor for groups of worker processes.

The public names load on first use, so that `from elastic_aio.worker import record`
inside a worker does not import asyncio.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from elastic_aio._version import __version__

if TYPE_CHECKING:
    from elastic_aio.agent.agent import Agent as Agent
    from elastic_aio.backoff import Backoff as Backoff
    from elastic_aio.backoff import RestartWindow as RestartWindow
    from elastic_aio.errors import ElasticAioError as ElasticAioError
    from elastic_aio.errors import InternalError as InternalError
    from elastic_aio.errors import JobEnded as JobEnded
    from elastic_aio.errors import JobFailed as JobFailed
    from elastic_aio.errors import JobStopped as JobStopped
    from elastic_aio.errors import RendezvousFailed as RendezvousFailed
    from elastic_aio.errors import SpawnError as SpawnError
    from elastic_aio.errors import SpecError as SpecError
    from elastic_aio.errors import StoreClosed as StoreClosed
    from elastic_aio.errors import StoreError as StoreError
    from elastic_aio.errors import StoreLost as StoreLost
    from elastic_aio.errors import StoreRefused as StoreRefused
    from elastic_aio.errors import StoreTimeout as StoreTimeout
    from elastic_aio.errors import SurroundingsError as SurroundingsError
    from elastic_aio.events import AttemptFailed as AttemptFailed
    from elastic_aio.events import ConsoleLost as ConsoleLost
    from elastic_aio.events import CoordinatorChanged as CoordinatorChanged
    from elastic_aio.events import Event as Event
    from elastic_aio.events import EventsMissed as EventsMissed
    from elastic_aio.events import GuardianReplaced as GuardianReplaced
    from elastic_aio.events import JobFinished as JobFinished
    from elastic_aio.events import JobStarted as JobStarted
    from elastic_aio.events import MembershipChanged as MembershipChanged
    from elastic_aio.events import NodeJoined as NodeJoined
    from elastic_aio.events import NodeLeft as NodeLeft
    from elastic_aio.events import NodeLost as NodeLost
    from elastic_aio.events import NodeRefused as NodeRefused
    from elastic_aio.events import Promoted as Promoted
    from elastic_aio.events import RendezvousStoreLost as RendezvousStoreLost
    from elastic_aio.events import RendezvousStoreRegained as RendezvousStoreRegained
    from elastic_aio.events import Restarting as Restarting
    from elastic_aio.events import RoundFormed as RoundFormed
    from elastic_aio.events import RoundForming as RoundForming
    from elastic_aio.events import SignalForwarded as SignalForwarded
    from elastic_aio.events import StandingBy as StandingBy
    from elastic_aio.events import StopEscalated as StopEscalated
    from elastic_aio.events import StopRequested as StopRequested
    from elastic_aio.events import WorkerAbandoned as WorkerAbandoned
    from elastic_aio.events import WorkerExited as WorkerExited
    from elastic_aio.events import WorkerStarted as WorkerStarted
    from elastic_aio.events import event_from_json as event_from_json
    from elastic_aio.events import event_to_json as event_to_json
    from elastic_aio.launcher import launch as launch
    from elastic_aio.launcher import run as run
    from elastic_aio.outcome import AttemptResult as AttemptResult
    from elastic_aio.outcome import ExitStatus as ExitStatus
    from elastic_aio.outcome import Failure as Failure
    from elastic_aio.outcome import JobState as JobState
    from elastic_aio.outcome import LaunchResult as LaunchResult
    from elastic_aio.outcome import ResourceUsage as ResourceUsage
    from elastic_aio.outcome import WorkerError as WorkerError
    from elastic_aio.outcome import WorkerResult as WorkerResult
    from elastic_aio.policy import Action as Action
    from elastic_aio.policy import RestartPolicy as RestartPolicy
    from elastic_aio.policy import SignalSpec as SignalSpec
    from elastic_aio.policy import StopPlan as StopPlan
    from elastic_aio.policy import StopStep as StopStep
    from elastic_aio.rendezvous.following import follow_job as follow_job
    from elastic_aio.rendezvousspec import RendezvousSpec as RendezvousSpec
    from elastic_aio.report import format_failure as format_failure
    from elastic_aio.spec import Command as Command
    from elastic_aio.spec import Function as Function
    from elastic_aio.spec import LaunchSpec as LaunchSpec
    from elastic_aio.spec import LogSpec as LogSpec
    from elastic_aio.spec import Module as Module
    from elastic_aio.spec import NodeRange as NodeRange
    from elastic_aio.spec import Script as Script
    from elastic_aio.std import Std as Std
    from elastic_aio.std import StdMap as StdMap

_HOMES = {
    "agent.agent": ["Agent"],
    "backoff": ["Backoff", "RestartWindow"],
    "errors": [
        "ElasticAioError",
        "InternalError",
        "JobEnded",
        "JobFailed",
        "JobStopped",
        "RendezvousFailed",
        "SpawnError",
        "SpecError",
        "StoreClosed",
        "StoreError",
        "StoreLost",
        "StoreRefused",
        "StoreTimeout",
        "SurroundingsError",
    ],
    "events": [
        "AttemptFailed",
        "ConsoleLost",
        "CoordinatorChanged",
        "Event",
        "EventsMissed",
        "GuardianReplaced",
        "JobFinished",
        "JobStarted",
        "MembershipChanged",
        "NodeJoined",
        "NodeLeft",
        "NodeLost",
        "NodeRefused",
        "Promoted",
        "RendezvousStoreLost",
        "RendezvousStoreRegained",
        "Restarting",
        "RoundFormed",
        "RoundForming",
        "SignalForwarded",
        "StandingBy",
        "StopEscalated",
        "StopRequested",
        "WorkerAbandoned",
        "WorkerExited",
        "WorkerStarted",
        "event_from_json",
        "event_to_json",
    ],
    "launcher": ["launch", "run"],
    "outcome": [
        "AttemptResult",
        "ExitStatus",
        "Failure",
        "JobState",
        "LaunchResult",
        "ResourceUsage",
        "WorkerError",
        "WorkerResult",
    ],
    "policy": ["Action", "RestartPolicy", "SignalSpec", "StopPlan", "StopStep"],
    "rendezvous.following": ["follow_job"],
    "rendezvousspec": ["RendezvousSpec"],
    "report": ["format_failure"],
    "spec": [
        "Command",
        "Function",
        "LaunchSpec",
        "LogSpec",
        "Module",
        "NodeRange",
        "Script",
    ],
    "std": ["Std", "StdMap"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
