"""The messages between an agent and a rendezvous, for backends of plug-ins."""

# %%
from elastic_aio.plugins import (
    RENDEZVOUS_FAILED,
    ChangeAgreed,
    ChangePending,
    Instruction,
    NodeDraining,
    PeersFinished,
    Report,
    RestartCause,
    RestartPending,
    StopRound,
)


def order(round: int, has_failed: bool) -> list[Instruction]:
    """Return what a rendezvous tells an agent before another round."""
    if not has_failed:
        return [ChangePending(round, "node b joins", time_left=30.0, number=1)]
    cause = RestartCause(attempt=1, why="rank 2 failed", restarts=1)
    return [RestartPending(cause), StopRound(round, cause.why)]


def answer(report: Report) -> str:
    """Return what a rendezvous does about a report of an agent."""
    match report:
        case NodeDraining():
            return f"form a round without it: {report.why}"
        case ChangeAgreed():
            return f"stop round {report.round}"
    return "go on"


print(
    [type(instruction).__name__ for instruction in order(0, has_failed=True)]
)  # ['RestartPending', 'StopRound']
print(answer(NodeDraining("stopped by SIGTERM")))  # form a round without it: stopped by SIGTERM
print(PeersFinished(0, workers=4, ago=1.5).workers, RENDEZVOUS_FAILED)  # 4 75

# %%
from elastic_aio.plugins import NodeRanks, WorkerRanks

node = NodeRanks(
    group_rank=1,
    group_world_size=2,
    first_rank=4,
    world_size=8,
    first_role_rank=4,
    role_world_size=8,
)
ranks = WorkerRanks(
    rank=node.first_rank + 1,
    local_rank=1,
    role_rank=5,
    group_rank=node.group_rank,
    world_size=node.world_size,
    local_world_size=4,
    role_world_size=8,
    group_world_size=2,
)
print(ranks.rank)  # 5
