"""The base of plug-ins: layouts of log files, and rendezvous backends.

An entry point of the group `elastic_aio.logs_specs` names a subclass of `LogLayout`, for
`--logs-specs`.  An entry point of the group `elastic_aio.rendezvous` names a function that returns
a `Rendezvous`, for `RendezvousSpec.backend`; it is called with the `LaunchSpec`, the `NodeInfo` of
this node, the run id and the `AgentPort` to instruct.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_aio.lazy import lazy_exports

if TYPE_CHECKING:
    from elastic_aio.outcome import JobOutcome as JobOutcome
    from elastic_aio.ranks import NodeRanks as NodeRanks
    from elastic_aio.ranks import WorkerRanks as WorkerRanks
    from elastic_aio.rendezvous.base import RENDEZVOUS_FAILED as RENDEZVOUS_FAILED
    from elastic_aio.rendezvous.base import AgentPort as AgentPort
    from elastic_aio.rendezvous.base import ChangeAgreed as ChangeAgreed
    from elastic_aio.rendezvous.base import ChangePending as ChangePending
    from elastic_aio.rendezvous.base import EndJob as EndJob
    from elastic_aio.rendezvous.base import Instruction as Instruction
    from elastic_aio.rendezvous.base import NodeDraining as NodeDraining
    from elastic_aio.rendezvous.base import NodeInfo as NodeInfo
    from elastic_aio.rendezvous.base import PeersFinished as PeersFinished
    from elastic_aio.rendezvous.base import Placement as Placement
    from elastic_aio.rendezvous.base import Rendezvous as Rendezvous
    from elastic_aio.rendezvous.base import Report as Report
    from elastic_aio.rendezvous.base import RestartCause as RestartCause
    from elastic_aio.rendezvous.base import RestartPending as RestartPending
    from elastic_aio.rendezvous.base import RoundFailing as RoundFailing
    from elastic_aio.rendezvous.base import RoundStarted as RoundStarted
    from elastic_aio.rendezvous.base import RoundStopped as RoundStopped
    from elastic_aio.rendezvous.base import RoundSucceeded as RoundSucceeded
    from elastic_aio.rendezvous.base import StartRound as StartRound
    from elastic_aio.rendezvous.base import StopRound as StopRound
    from elastic_aio.spec.logs import LogDestinations as LogDestinations
    from elastic_aio.spec.logs import LogLayout as LogLayout
    from elastic_aio.spec.logs import LogLayoutContext as LogLayoutContext
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "elastic_aio.outcome": "JobOutcome",
            "elastic_aio.ranks": "NodeRanks WorkerRanks",
            "elastic_aio.rendezvous.base": """
                RENDEZVOUS_FAILED AgentPort ChangeAgreed ChangePending EndJob Instruction
                NodeDraining NodeInfo PeersFinished Placement Rendezvous Report RestartCause
                RestartPending RoundFailing RoundStarted RoundStopped RoundSucceeded StartRound
                StopRound
            """,
            "elastic_aio.spec.logs": "LogDestinations LogLayout LogLayoutContext",
        },
    )
