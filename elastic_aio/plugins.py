"""What plug-ins build on: layouts of log files, and rendezvous backends.

An entry point of the group `elastic_aio.logs_specs` names a subclass of `LogLayout`, for
`--logs-specs`.  One of the group `elastic_aio.rendezvous` names a function that returns a
`Rendezvous`, for `RendezvousSpec.backend`; it is called with the `LaunchSpec`, the
`NodeInfo` of this node, the run id and the `AgentPort` to instruct.
"""

from elastic_aio.lazy import document_classes
from elastic_aio.outcome import JobOutcome
from elastic_aio.ranks import NodeRanks, WorkerRanks
from elastic_aio.rendezvous.base import (
    RENDEZVOUS_FAILED,
    AgentPort,
    ChangeAgreed,
    ChangePending,
    EndJob,
    Instruction,
    NodeDraining,
    NodeInfo,
    PeersFinished,
    Placement,
    Rendezvous,
    Report,
    RestartCause,
    RestartPending,
    RoundFailing,
    RoundStarted,
    RoundStopped,
    RoundSucceeded,
    StartRound,
    StopRound,
)
from elastic_aio.spec.logs import LogDestinations, LogLayout, LogLayoutContext

__all__ = [
    "RENDEZVOUS_FAILED",
    "AgentPort",
    "ChangeAgreed",
    "ChangePending",
    "EndJob",
    "Instruction",
    "JobOutcome",
    "LogDestinations",
    "LogLayout",
    "LogLayoutContext",
    "NodeDraining",
    "NodeInfo",
    "NodeRanks",
    "PeersFinished",
    "Placement",
    "Rendezvous",
    "Report",
    "RestartCause",
    "RestartPending",
    "RoundFailing",
    "RoundStarted",
    "RoundStopped",
    "RoundSucceeded",
    "StartRound",
    "StopRound",
    "WorkerRanks",
]

document_classes(globals())
