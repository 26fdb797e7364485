"""Values of a spec, each checked when it is made."""

# %%
from elastic_aio import Command, LaunchSpec, Module, Script

print(LaunchSpec("train.py").entrypoint == Script("train.py"))  # True
print(LaunchSpec(["./serve", "--port=80"]).entrypoint == Command(("./serve", "--port=80")))  # True
print(LaunchSpec(Module("package.train"), args=["--lr", "0.1"]).name)  # package.train

# %%
from elastic_aio import Function, LaunchSpec

spec = LaunchSpec(Function(print, name="show"), args=["hello"])
print(spec.name)  # show

# %%
from elastic_aio import LaunchSpec, SpecError

try:
    LaunchSpec("train.py", max_restarts=-1)
except SpecError as error:
    print(error)  # max_restarts: must be a whole number of at least 0 (got -1)

# %%
from elastic_aio import LaunchSpec, NodeRange

print(LaunchSpec("train.py", nnodes="2:4").nnodes == NodeRange(2, 4))  # True

# %%
from elastic_aio import AnySpec, GroupSpec, LaunchSpec, Strategy


def programs(spec: AnySpec) -> list[str]:
    """Return the paths of all programs of a job."""
    return [path for path, leaf in spec.leaves()] if isinstance(spec, GroupSpec) else [spec.name]


strategy: Strategy = "rest_for_one"
group = GroupSpec({"db": LaunchSpec(["db"]), "web": LaunchSpec(["web"])}, strategy=strategy)
print(programs(group))  # ['db', 'web']

# %%
from elastic_aio import EngineSpec, LaunchSpec, RendezvousSpec

engine = EngineSpec(user="trainer", password="secret-of-etcd", key_prefix="/jobs", retention=3600)
meeting = RendezvousSpec(backend="etcd", endpoint="etcd0,etcd1", engine=engine)
print(
    LaunchSpec("train.py", nnodes=2, run_id="r", rendezvous=meeting).rendezvous.endpoints
)  # ('etcd0:2379', 'etcd1:2379')

# %%
from elastic_aio import LogSpec, Std, StdMap

print(LogSpec(tee={0: Std.ALL}).tee == StdMap(Std.NONE, ((0, Std.ALL),)))  # True

# %%
from elastic_aio import StopPlan, StopScope, StopStep

scope: StopScope = "all"
plan = StopPlan([StopStep("SIGINT", 10), StopStep("SIGTERM", 10, scope)])
print(plan)  # SIGINT 10 s, SIGTERM to all 10 s, SIGKILL

# %%
from elastic_aio import (
    LaunchSpec,
    NodeLosses,
    RestartPolicy,
    RestartScope,
    RestartWhen,
    RestartWindow,
)

when: RestartWhen = "always"
scope_of_restart: RestartScope = "worker"
policy = RestartPolicy(when=when, scope=scope_of_restart, window=RestartWindow(3, 900))
print(policy.window)  # 3 within 900 s
print(RestartPolicy(node_losses=NodeLosses(count=2)).node_losses == NodeLosses(count=2))  # True

# %%
from elastic_aio import Decide, ExitStatus, Failure, RestartAction, RestartPolicy


def give_up_on_78(failure: Failure) -> RestartAction:
    is_final = failure.status == ExitStatus(code=78)
    return RestartAction.GIVE_UP if is_final else RestartAction.DEFAULT


decide: Decide = give_up_on_78
policy_with_a_function = RestartPolicy(decide=decide)

# %%
from elastic_aio import LaunchSpec, NumaMode, StartMethod

mode: NumaMode = "cpu"
method: StartMethod = "forkserver"
LaunchSpec("train.py", nproc_per_node=2, numa_binding=mode, start_method=method, preload=["json"])

# %%
from elastic_aio import LaunchSpec, PreemptionSpec, SignalSpec

LaunchSpec("train.py", preemption=PreemptionSpec(signal="USR1", deadline=80, forward="USR1"))
signals = SignalSpec(forward=["SIGUSR2"], unhandled="kill")
print(sorted(signals.forward))  # [12]

# %%
from elastic_aio import Exec, LaunchSpec, LogMatch, Notify, PolledProbe, Probe, Tcp

tcp = Tcp("127.0.0.1:8000", period=0.5, threshold=2)
command = Exec(["test", "-e", "/run/ready"])
probes: list[Probe] = [tcp, command, LogMatch("Uvicorn running on"), Notify()]
for probe in probes:
    spec_with_a_probe = LaunchSpec(["serve"], ready=probe)
    print(isinstance(probe, PolledProbe), probe == spec_with_a_probe.ready)

# %%
from elastic_aio import LaunchSpec, SocketSpec

sockets: list[SocketSpec | str] = [
    SocketSpec("tcp://127.0.0.1:8000", name="http"),
    "unix:///run/app.sock",
]
print([socket.name for socket in LaunchSpec(["serve"], sockets=sockets).sockets])  # ['http', '']
