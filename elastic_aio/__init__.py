"""An asyncio-native supervisor for groups of worker processes: torchrun's job without torch.

The public modules:

elastic_aio                  describe jobs, run them, and read their events and results
elastic_aio.events           every event
elastic_aio.control          see and control a job that runs in another process
elastic_aio.worker           inside a worker: `WorkerContext`, `record`; never loads asyncio
elastic_aio.multiprocessing  groups of processes without restarts, as in torch.multiprocessing
elastic_aio.sync             the same groups for programs without an event loop
elastic_aio.store            the key-value store with the protocol of torch's TCPStore
elastic_aio.testing          simulated jobs of many nodes, in virtual time
elastic_aio.plugins          what log layouts and rendezvous backends of others build on

Every other module is internal and may change in any release.

The names of this package are loaded when they are first used.  It shows those that most programs
need; `docs/reference/modules.md` has the others.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from elastic_aio._version import __version__ as __version__
from elastic_aio.lazy import lazy_exports

if sys.platform != "linux":
    raise ImportError(f"elastic_aio needs Linux 5.3 or newer (this is {sys.platform})")

if TYPE_CHECKING:
    from elastic_aio.agent.agent import Agent as Agent
    from elastic_aio.agent.event_log import EventListener as EventListener
    from elastic_aio.aio import EventReader as EventReader
    from elastic_aio.errors import AgentUnreachable as AgentUnreachable
    from elastic_aio.errors import ControlError as ControlError
    from elastic_aio.errors import ElasticAioError as ElasticAioError
    from elastic_aio.errors import HostError as HostError
    from elastic_aio.errors import InternalError as InternalError
    from elastic_aio.errors import JobEnded as JobEnded
    from elastic_aio.errors import JobFailed as JobFailed
    from elastic_aio.errors import JobNotFound as JobNotFound
    from elastic_aio.errors import JobPreempted as JobPreempted
    from elastic_aio.errors import JobStopped as JobStopped
    from elastic_aio.errors import RendezvousFailed as RendezvousFailed
    from elastic_aio.errors import SpawnError as SpawnError
    from elastic_aio.errors import SpecError as SpecError
    from elastic_aio.errors import StoreClosed as StoreClosed
    from elastic_aio.errors import StoreError as StoreError
    from elastic_aio.errors import StoreLost as StoreLost
    from elastic_aio.errors import StoreRefused as StoreRefused
    from elastic_aio.errors import StoreTimeout as StoreTimeout
    from elastic_aio.event_json import event_from_json as event_from_json
    from elastic_aio.event_json import event_to_json as event_to_json
    from elastic_aio.events import *  # noqa: F403
    from elastic_aio.http.server import StatusServer as StatusServer
    from elastic_aio.launcher import launch as launch
    from elastic_aio.launcher import run as run
    from elastic_aio.logs.console import ConsoleTarget as ConsoleTarget
    from elastic_aio.logs.console import TextOutput as TextOutput
    from elastic_aio.logs.lines import LogLine as LogLine
    from elastic_aio.logs.reader import LogReader as LogReader
    from elastic_aio.outcome import AttemptResult as AttemptResult
    from elastic_aio.outcome import EndCause as EndCause
    from elastic_aio.outcome import ExitStatus as ExitStatus
    from elastic_aio.outcome import Failure as Failure
    from elastic_aio.outcome import Goodput as Goodput
    from elastic_aio.outcome import JobState as JobState
    from elastic_aio.outcome import LaunchResult as LaunchResult
    from elastic_aio.outcome import ResourceUsage as ResourceUsage
    from elastic_aio.outcome import WorkerError as WorkerError
    from elastic_aio.outcome import WorkerResult as WorkerResult
    from elastic_aio.process.open_process import Process as Process
    from elastic_aio.process.open_process import open_process as open_process
    from elastic_aio.record import JobRecord as JobRecord
    from elastic_aio.record import recorded_runs as recorded_runs
    from elastic_aio.recorder import RunRecorder as RunRecorder
    from elastic_aio.rendezvous.event_stream import JobEvents as JobEvents
    from elastic_aio.rendezvous.event_stream import follow_job as follow_job
    from elastic_aio.report import format_failure as format_failure
    from elastic_aio.spec.group import AnySpec as AnySpec
    from elastic_aio.spec.group import GroupSpec as GroupSpec
    from elastic_aio.spec.group import Strategy as Strategy
    from elastic_aio.spec.job import Command as Command
    from elastic_aio.spec.job import Function as Function
    from elastic_aio.spec.job import LaunchSpec as LaunchSpec
    from elastic_aio.spec.job import Module as Module
    from elastic_aio.spec.job import NodeRange as NodeRange
    from elastic_aio.spec.job import NumaMode as NumaMode
    from elastic_aio.spec.job import Script as Script
    from elastic_aio.spec.job import StartMethod as StartMethod
    from elastic_aio.spec.limits import LimitSpec as LimitSpec
    from elastic_aio.spec.liveness import LivenessSpec as LivenessSpec
    from elastic_aio.spec.logs import LogSpec as LogSpec
    from elastic_aio.spec.logs import Std as Std
    from elastic_aio.spec.logs import StdMap as StdMap
    from elastic_aio.spec.probe import Exec as Exec
    from elastic_aio.spec.probe import Http as Http
    from elastic_aio.spec.probe import LogMatch as LogMatch
    from elastic_aio.spec.probe import Notify as Notify
    from elastic_aio.spec.probe import PolledProbe as PolledProbe
    from elastic_aio.spec.probe import Probe as Probe
    from elastic_aio.spec.probe import Tcp as Tcp
    from elastic_aio.spec.rendezvous import EngineSpec as EngineSpec
    from elastic_aio.spec.rendezvous import RendezvousSpec as RendezvousSpec
    from elastic_aio.spec.restart import Backoff as Backoff
    from elastic_aio.spec.restart import Decide as Decide
    from elastic_aio.spec.restart import NodeLosses as NodeLosses
    from elastic_aio.spec.restart import RestartAction as RestartAction
    from elastic_aio.spec.restart import RestartPolicy as RestartPolicy
    from elastic_aio.spec.restart import RestartScope as RestartScope
    from elastic_aio.spec.restart import RestartWhen as RestartWhen
    from elastic_aio.spec.restart import RestartWindow as RestartWindow
    from elastic_aio.spec.sockets import SocketSpec as SocketSpec
    from elastic_aio.spec.stop import PreemptionSpec as PreemptionSpec
    from elastic_aio.spec.stop import SignalSpec as SignalSpec
    from elastic_aio.spec.stop import StopPlan as StopPlan
    from elastic_aio.spec.stop import StopScope as StopScope
    from elastic_aio.spec.stop import StopStep as StopStep
    from elastic_aio.spec.tls import TlsSpec as TlsSpec
    from elastic_aio.stacks import StackDump as StackDump
    from elastic_aio.stacks import StackFrame as StackFrame
    from elastic_aio.stacks import ThreadStack as ThreadStack
    from elastic_aio.stacks import WorkerStacks as WorkerStacks
    from elastic_aio.status import JobStatus as JobStatus
    from elastic_aio.status import WorkerStatus as WorkerStatus
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "elastic_aio.agent.agent": "Agent",
            "elastic_aio.errors": """
                ElasticAioError HostError InternalError JobEnded JobFailed JobStopped
                RendezvousFailed SpawnError SpecError StoreError
            """,
            "elastic_aio.events": """
                AttemptFailed Event EventsMissed JobFinished JobStarted MembershipChanged Restarting
                RoundFormed StopRequested WorkerExited WorkerStarted
            """,
            "elastic_aio.launcher": "launch run",
            "elastic_aio.outcome": "AttemptResult ExitStatus Failure LaunchResult WorkerResult",
            "elastic_aio.process.open_process": "open_process",
            "elastic_aio.rendezvous.event_stream": "follow_job",
            "elastic_aio.spec.group": "GroupSpec",
            "elastic_aio.spec.job": "Command Function LaunchSpec Module Script",
            "elastic_aio.spec.liveness": "LivenessSpec",
            "elastic_aio.spec.logs": "LogSpec",
            "elastic_aio.spec.rendezvous": "RendezvousSpec",
            "elastic_aio.spec.restart": "RestartPolicy",
            "elastic_aio.spec.stop": "SignalSpec StopPlan",
            "elastic_aio.status": "JobStatus WorkerStatus",
        },
        {
            "elastic_aio.agent.event_log": "EventListener",
            "elastic_aio.aio": "EventReader",
            "elastic_aio.errors": """
                AgentUnreachable ControlError JobNotFound JobPreempted StoreClosed StoreLost
                StoreRefused StoreTimeout
            """,
            "elastic_aio.event_json": "event_from_json event_to_json",
            "elastic_aio.http.server": "StatusServer",
            "elastic_aio.logs.console": "ConsoleTarget TextOutput",
            "elastic_aio.logs.lines": "LogLine",
            "elastic_aio.logs.reader": "LogReader",
            "elastic_aio.outcome": "EndCause Goodput JobState ResourceUsage WorkerError",
            "elastic_aio.rendezvous.event_stream": "JobEvents",
            "elastic_aio.process.open_process": "Process",
            "elastic_aio.record": "JobRecord recorded_runs",
            "elastic_aio.recorder": "RunRecorder",
            "elastic_aio.report": "format_failure",
            "elastic_aio.spec.group": "AnySpec Strategy",
            "elastic_aio.spec.job": "NodeRange NumaMode StartMethod",
            "elastic_aio.spec.limits": "LimitSpec",
            "elastic_aio.spec.logs": "Std StdMap",
            "elastic_aio.spec.probe": "Exec Http LogMatch Notify PolledProbe Probe Tcp",
            "elastic_aio.spec.rendezvous": "EngineSpec",
            "elastic_aio.spec.restart": (
                "Backoff Decide NodeLosses RestartAction RestartScope RestartWhen RestartWindow"
            ),
            "elastic_aio.spec.sockets": "SocketSpec",
            "elastic_aio.spec.stop": "PreemptionSpec StopScope StopStep",
            "elastic_aio.spec.tls": "TlsSpec",
            "elastic_aio.stacks": "StackDump StackFrame ThreadStack WorkerStacks",
        },
        rest="elastic_aio.events",
    )
