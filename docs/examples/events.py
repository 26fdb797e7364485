"""Each event, and what its sentence says."""

# %%
from elastic_aio import AttemptFailed, ExitStatus, Failure

print(
    AttemptFailed(
        attempt=1,
        root=Failure(
            rank=1,
            local_rank=1,
            pid=101,
            host="box",
            status=ExitStatus(code=7),
            time=1767323045.0,
            order=0,
            stderr_tail=("loading", "cannot load"),
            stderr_path="/logs/1/stderr.log",
            notes=("the disk of its log file is full: /logs (/logs/1/stderr.log)",),
        ),
        failures=(
            Failure(
                rank=1,
                local_rank=1,
                pid=101,
                host="box",
                status=ExitStatus(code=7),
                time=1767323045.0,
                order=0,
                stderr_tail=("loading", "cannot load"),
                stderr_path="/logs/1/stderr.log",
                notes=("the disk of its log file is full: /logs (/logs/1/stderr.log)",),
            ),
        ),
    ).sentence
)  # attempt 1 failed: rank 1 (pid 101): exit code 7: cannot load

# %%
from elastic_aio import ChildFinished, JobState

print(
    ChildFinished(child="a", state=JobState.FAILED, why="rule", exit_code=3).sentence
)  # a: failed (exit code 3): rule

# %%
from elastic_aio import ChildLaunched

print(
    ChildLaunched(child="a", generation=1, entrypoint="x.py", nproc_per_node=2).sentence
)  # a: start 1: 2 workers of x.py

# %%
from elastic_aio import ChildRemoved

print(ChildRemoved(child="a", name="b").sentence)  # a: b is removed

# %%
from elastic_aio import ChildRestarting

print(
    ChildRestarting(child="a", why="a request", delay=0.0, restarts=1).sentence
)  # a: restarting: a request

# %%
from elastic_aio import ConsoleLost

print(
    ConsoleLost(stream="stdout", why="broken pipe").sentence
)  # stdout accepts no more output (broken pipe); see the logs

# %%
from elastic_aio import ControlUnavailable

print(
    ControlUnavailable(why="permission denied").sentence
)  # no control socket for this job: permission denied

# %%
from elastic_aio import CoordinatorChanged

print(CoordinatorChanged(name="b", term=2).sentence)  # node b is the coordinator (term 2)

# %%
from elastic_aio import DeadlineMissed

print(
    DeadlineMissed(
        rank=1, local_rank=0, pid=7, deadline="ready", limit=5.0, age=5.1, why="not ready"
    ).sentence
)  # rank 1 (pid 7): not ready

# %%
from elastic_aio import EventsMissed

print(EventsMissed(count=3).sentence)  # 3 events missed

# %%
from elastic_aio import ForeignAnswer

why = "connected to nginx (pid 7), no process of this child"
print(
    ForeignAnswer(rank=1, local_rank=1, pid=101, why=why).sentence
)  # rank 1 (pid 101): its probe cannot ask it: connected to nginx (pid 7), no process of this child

# %%
from elastic_aio import GuardianLost

print(
    GuardianLost(why="no process left").sentence
)  # guardian process exited, the job is unguarded: no process left

# %%
from elastic_aio import GuardianRestarted

print(GuardianRestarted(pid=9).sentence)  # guardian process exited, restarted as pid 9

# %%
from elastic_aio import JobFinished, JobState

print(
    JobFinished(state=JobState.FAILED, why="rule", exit_code=1, duration=2.5, restarts=0).sentence
)  # job failed after 2.5 s: rule

# %%
from elastic_aio import JobStarted

print(
    JobStarted(
        run_id="r",
        node="box",
        entrypoint="x",
        nproc_per_node=1,
        nnodes="1",
        max_restarts=0,
        agent_pid=1,
    ).sentence
)  # run r: 1 worker of x on box, 0 restarts, logs kept only if it fails

# %%
from elastic_aio import LeftoversFound

print(
    LeftoversFound(pids=(7,), programs=("tar",), linger=0.0).sentence
)  # the workers have succeeded and left 1 process behind, it is stopped now: tar (7)

# %%
from elastic_aio import LogDiskFull

print(
    LogDiskFull(mount_point="/mnt", is_shown=True, why="input/output error").sentence
)  # writes to the log files fail (input/output error), the console shows the rest: /mnt

# %%
from elastic_aio import LogsNotRemoved

print(
    LogsNotRemoved(why="stale file handle").sentence
)  # logs of old runs are not removed: stale file handle

# %%
from elastic_aio import MembershipChanged

print(
    MembershipChanged(attempt=2, why="c was lost", round=3, nodes=1).sentence
)  # membership changed, attempt 2 has 1 node: c was lost

# %%
from elastic_aio import MembershipPending

print(
    MembershipPending(round=3, why="d joined", time_left=29.6).sentence
)  # the membership is about to change in 30 s, unless others join: d joined

# %%
from elastic_aio import NodeExcluded

print(
    NodeExcluded(name="e", member="e_1", why="rank 3: ECC").sentence
)  # node e is excluded: rank 3: ECC

# %%
from elastic_aio import NodeJoined

print(
    NodeJoined(name="a", member="", address="b", nproc=1, role="r", differs=("x is 1",)).sentence
)  # node a joined with 1 worker (b); x is 1

# %%
from elastic_aio import NodeLeft

print(NodeLeft(name="a", member="a_1", why="it is done").sentence)  # node a left: it is done

# %%
from elastic_aio import NodeLost

print(
    NodeLost(name="a", member="a_1", why="silent for 5 s").sentence
)  # node a is lost: silent for 5 s

# %%
from elastic_aio import NodeRefused

print(
    NodeRefused(name="e", member="e_1", why="another role").sentence
)  # node e was refused: another role

# %%
from elastic_aio import NodeStandby

print(NodeStandby(round=1, maximum=4).sentence)  # on standby: the job has its maximum of 4 nodes

# %%
from elastic_aio import OutputLost

print(
    OutputLost(rank=3, local_rank=1, stream="stderr", path="/x", why="it grows", lost=0).sentence
)  # stderr of rank 3: it grows (/x)

# %%
from elastic_aio import PreemptionNotice

print(
    PreemptionNotice(why="SIGUSR1 was received", time_left=90.0).sentence
)  # preemption: the workers are stopped in 90 s: SIGUSR1 was received

# %%
from elastic_aio import ReadinessChanged

print(ReadinessChanged(child="a/b", is_ready=True).sentence)  # a/b: ready

# %%
from elastic_aio import ReloadFailed

print(
    ReloadFailed(child="a/1", why="exit code 1", replaced=1).sentence
)  # a/1: the reload has failed, after 1 worker: exit code 1; the old worker is kept

# %%
from elastic_aio import ReloadFinished

print(ReloadFinished(child="a", replaced=4).sentence)  # a: reloaded, 4 workers replaced

# %%
from elastic_aio import RendezvousStoreAwaited

print(
    RendezvousStoreAwaited(why="a:1: connection refused", time_left=55.2).sentence
)  # waiting for the rendezvous store, 55 s left: a:1: connection refused

# %%
from elastic_aio import RendezvousStoreLost

print(
    RendezvousStoreLost(endpoint="a:1", why="connection reset").sentence
)  # rendezvous store at a:1 lost: connection reset

# %%
from elastic_aio import RendezvousStoreRecovered

print(
    RendezvousStoreRecovered(endpoint="b:1", is_host=True).sentence
)  # rendezvous store recovered at b:1, served by this node

# %%
from elastic_aio import Restarting

print(
    Restarting(attempt=1, why="restart 1 of 2 (max restarts)", delay=0, restarts=1).sentence
)  # restarting as attempt 1: restart 1 of 2 (max restarts)

# %%
from elastic_aio import RoundFormed

print(
    RoundFormed(
        round=1,
        group_rank=0,
        group_world_size=2,
        world_size=8,
        master_addr="10.0.0.1",
        master_port=7,
    ).sentence
)  # round 1: group rank 0 of 2, 8 workers in all, master at 10.0.0.1:7

# %%
from elastic_aio import RoundForming

print(
    RoundForming(round=0, joined=0, minimum=1, maximum=2).sentence
)  # waiting for nodes: 0 nodes present, minimum 1, maximum 2

# %%
from elastic_aio import RoundWaiting

print(
    RoundWaiting(
        phase="stopping", what="b: not stopped its workers", waited=9, time_left=61
    ).sentence
)  # stopping: b: not stopped its workers (waited 9 s, 61 s left)

# %%
from elastic_aio import Scaled

print(Scaled(child="a", former=1, number=3).sentence)  # a: scaled from 1 to 3 workers

# %%
from elastic_aio import SignalForwarded

print(SignalForwarded(signal=10, pids=(5, 6)).sentence)  # SIGUSR1 forwarded to 2 workers

# %%
from elastic_aio import StacksDumped

print(
    StacksDumped(why="no heartbeat", summary="rank 0 waits in barrier", path="/logs/s").sentence
)  # stacks (no heartbeat): rank 0 waits in barrier (/logs/s)

# %%
from elastic_aio import StandbyPromoted

print(StandbyPromoted(round=2, group_rank=3).sentence)  # promoted from standby to group rank 3

# %%
from elastic_aio import StopEscalated

print(
    StopEscalated(signal=9, pids=()).sentence
)  # processes may not have stopped in time, sending SIGKILL

# %%
from elastic_aio import StopRequested

print(
    StopRequested(reason="b is leaving", plan="SIGTERM 25 s, SIGKILL", is_ordered=True).sentence
)  # stopping the workers (SIGTERM 25 s, SIGKILL): b is leaving

# %%
from elastic_aio import TimerExpired

print(
    TimerExpired(rank=-1, local_rank=-1, pid=7, scope="s", age=1.5, limit=1.0, signal=0).sentence
)  # timer 's' of process 7 expired after 1.5 s (limit 1 s)

# %%
from elastic_aio import TimerRejected

print(
    TimerRejected(why="a line of more than 4096 bytes").sentence
)  # the pipe of the timers got a line of more than 4096 bytes

# %%
from elastic_aio import MessageDropped

print(
    MessageDropped(pid=7, program="redis-server").sentence
)  # a message of redis-server (7) is dropped: it is no worker (notify access: main)

# %%
from elastic_aio import WorkerAbandoned

print(
    WorkerAbandoned(pid=5, state="D in nfs_wait, of user alice", program="python a.py").sentence
)  # process 5 (python a.py) did not exit after SIGKILL (state D in nfs_wait, of user alice), left behind

# %%
from elastic_aio import ExitStatus, WorkerExited

print(
    WorkerExited(
        rank=1, local_rank=1, pid=7, status=ExitStatus(signal=15), duration=2, is_victim=True
    ).sentence
)  # rank 1 (pid 7): killed by SIGTERM, stopped by the supervisor, after 2 s

# %%
from elastic_aio import WorkerReady

print(
    WorkerReady(rank=1, local_rank=0, pid=7, duration=2.5).sentence
)  # rank 1 (pid 7) is ready after 2.5 s

# %%
from elastic_aio import WorkerActivity, WorkersIdle

print(
    WorkersIdle(
        seconds=60.0,
        workers=(
            WorkerActivity(rank=0, local_rank=0, pid=7, state="S", syscall="futex"),
            WorkerActivity(rank=1, local_rank=1, pid=8, state="D", wchan="nfs_wait"),
            WorkerActivity(rank=2, local_rank=2, pid=9),
        ),
    ).sentence
)  # no worker has used CPU time or written anything for 60 s: rank 0 futex, rank 1 nfs_wait, rank 2 unknown

# %%
from elastic_aio import WorkerStarted

print(WorkerStarted(rank=1, local_rank=1, pid=7).sentence)  # rank 1 started (pid 7)

# %%
from elastic_aio import WorkerStoreRefused

print(
    WorkerStoreRefused(peer="a:1", why="sent a request that is refused: the store is full").sentence
)  # the store of the workers closed the connection of a:1: it sent a request that is refused: the store is full

# %%
from elastic_aio import WorkersUnfinished

print(
    WorkersUnfinished(seconds=60.2, finished=1, running=(1,)).sentence
)  # 1 of 2 workers have finished, the first 60 s ago; still running: rank 1

# %%
from elastic_aio import LostJobFound

print(
    LostJobFound(lost_run_id="old", pids=(8, 9), since=-90.0).sentence
)  # 2 processes of run old, whose launcher was killed, still run on this host (pid 8, 9; for 1 m 30 s); aio-elastic gc --host ends them
