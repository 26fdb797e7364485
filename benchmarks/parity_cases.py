"""The cases of `benchmarks.parity`, as data, and the reasons why results differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

ANY: Final = "any value"
"""A side of a difference that is not predictable, or not worth repeating."""


@dataclass(frozen=True)
class Difference:
    """A declared difference: its reason, a key of `REASONS`, and both values."""

    reason: str
    theirs: Any = ANY
    ours: Any = ANY


@dataclass(frozen=True)
class Case:
    """A job to run by both launchers.

    Attributes:
        name: unique; the first word is the subject.
        words: the command line after the launcher; `{w}` is `benchmarks/workers/parity.py`,
            `{port}` a free port, `{dir}` the directory of this job, `{py}` an interpreter.
        differs: the declared differences, by the aspect.
        nodes: further options of each node, before `words`.
        env: variables of the launchers.
        steps: what happens meanwhile: `ready N` and `note TEXT` wait for notes of the workers,
            `listen` for a listener at `{port}`; `signal NODE NAME` sends a signal to a launcher,
            and `start NODE` starts one that has been held back.
        stdin: of the launchers.
        prefix: a command that runs the launcher.
        limit: seconds after the last step, after which a launcher counts as one that does not
            end.
        ignored: aspects that are not compared.
    """

    name: str
    words: str
    differs: Mapping[str, Difference] = field(default_factory=dict)
    nodes: tuple[str, ...] = ("",)
    env: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[str, ...] = ()
    stdin: bytes = b""
    prefix: str = ""
    limit: float = 300.0
    ignored: tuple[str, ...] = ()


REASONS: Final[Mapping[str, str]] = {
    "D9": "no worker outlives a launcher that is killed",
    "D10": "no signal orphans the workers",
    "D11": "what workers leave behind is stopped",
    "D12": "--shutdown-timeout holds after a failure too",
    "D15": "a broken error file is a failure without a message",
    "D17": "a function that calls exit() has ended",
    "D21": "lines stay whole",
    "D22": "a carriage return is part of its line",
    "D23": "bytes stay as they are",
    "D26": "no temporary files are left",
    "D27": "any rank may be named, and a rank that does not exist is an error",
    "D28": "only ${local_rank} is replaced",
    "D29": "--rdzv-id is honoured",
    "D33": "names of signals are checked at the start",
    "D42": "the exit code is that of the root cause, 128 + n for signal n",
    "D43": "standard input is /dev/null",
    "D30": "one budget and one count of restarts for all nodes",
    "D46": "a filter without log files works",
    "D47": "a mistake is one line and exit code 2",
    "D49": "a failure on one node ends the job on all nodes",
    "exit codes": "75, 126 and 127 have meanings of their own",
    "one node": "a job of one node has no rendezvous: its options and defaults do not matter",
    "empty": "an empty variable means the default",
    "fractions": "seconds may have fractions",
    "recorded": "a worker that recorded an error before the stop counts as exited with 1",
    "report name": "a report names the script, not the interpreter or a function of the launcher",
    "before": "found before anything starts: one line instead of a report",
}

_USAGE = {"code": Difference("D47", 1, 2)}


def _ends_with(ours: int, theirs: int = 1, reason: str = "D42") -> dict[str, Difference]:
    return {"code": Difference(reason, theirs, ours)}


_STATIC = "--nnodes 2 --master-addr 127.0.0.1 --master-port {port} "
_STATIC_NODES = ("--node-rank 0", "--node-rank 1")
_IN_ORDER = ("listen", "start 1")
"""Node 0 is there first: with elastic_aio the first to come has group rank 0."""
_DYNAMIC = (
    "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint localhost:{port} --rdzv-id job"
    " --rdzv-conf last_call_timeout=1 "
)
_RUN_ID = {"env": Difference("D29")}
_LAUNCHER_ERROR = {"TORCHELASTIC_ERROR_FILE": "{dir}/error.json"}

CASES: Final = (
    # How many workers, and how they are named.
    Case("nnodes 1", "--nnodes 1 {w} env"),
    Case("nnodes 1:1", "--nnodes 1:1 {w} env"),
    Case("nnodes 0", "--nnodes 0 {w}", _USAGE),
    Case("nnodes 2:1", "--nnodes 2:1 {w}", _USAGE),
    Case("nnodes 1:2:3", "--nnodes 1:2:3 {w}", _USAGE),
    Case("nproc 2", "--nproc-per-node 2 {w} env"),
    Case("nproc cpu, on one processor", "--nproc-per-node cpu {w} env", prefix="taskset -c 0"),
    Case("nproc auto, on one processor", "--nproc-per-node auto {w} env", prefix="taskset -c 0"),
    Case("nproc gpu, without one", "--nproc-per-node gpu {w}", _USAGE,
         env={"CUDA_VISIBLE_DEVICES": ""}),
    Case("nproc word", "--nproc-per-node many {w}", _USAGE),
    Case("nproc 0", "--nproc-per-node 0 {w}", _USAGE),
    Case("spelling with underscores", "--nproc_per_node 2 --max_restarts=1 {w} meet fail=1"),
    Case("spelling abbreviated", "--nproc 1 {w}",
         {"code": Difference("D47", 2, 0), "starts": Difference("D47", [], ["attempt 0: rank 0"])}),
    Case("variable PET_NPROC_PER_NODE", "{w}", env={"PET_NPROC_PER_NODE": "2"}),
    Case("variable overridden", "--nproc-per-node 1 {w}", env={"PET_NPROC_PER_NODE": "2"}),
    Case("variable of a flag", "bash -c 'echo W $RANK'", env={"PET_NO_PYTHON": "1"}),
    Case("variable of a flag, 0", "{w} out=x", env={"PET_NO_PYTHON": "0"}),
    Case("variable of a flag, a word", "{w}", _USAGE, env={"PET_STANDALONE": "foo"}),
    Case("variable without a number", "{w}", env={"PET_MAX_RESTARTS": "many"}),
    Case("variable empty", "{w}",
         {"code": Difference("empty", 2, 0),
          "starts": Difference("empty", [], ["attempt 0: rank 0"])},
         env={"PET_MAX_RESTARTS": ""}),
    # What the workers run.
    Case("program module", "-m platform"),
    Case("program no-python", "--no-python bash -c 'echo W $RANK of $WORLD_SIZE'"),
    Case("program module and no-python", "-m --no-python platform", _USAGE),
    Case("program run-path", "--run-path {w} out=x args a -m"),
    Case("program run-path, exit code 3", "--run-path {w} exit=3",
         {**_ends_with(3), "report": Difference("report name")}),
    Case("program run-path, an exception", "--run-path {w} raise=x",
         {"report": Difference("report name"), "tmp": Difference("D26", ours=["LOGS"])}),
    Case("program run-path, exit()", "--run-path {w} note=end exit",
         {"code": Difference("D17", "does not end", 0)}, steps=("note end",), limit=10),
    Case("program run-path by fork", "--run-path --start-method fork {w} out=x"),
    Case("program run-path by forkserver", "--run-path --start-method forkserver {w} out=x"),
    Case("program bad start method", "--run-path --start-method thread {w}"),
    Case("program missing script", "nowhere.py",
         {**_ends_with(127, reason="exit codes"), "report": Difference("before", ours=[])}),
    Case("program missing command", "--no-python ./nowhere", _ends_with(127, reason="exit codes")),
    Case("program missing", ""),
    Case("program arguments", "{w} args -m --nnodes 9 -- --help '' 'a b'"),
    Case("program local_rank", "--nproc-per-node 2 {w} args '${local_rank}' '$x' '${x}'"),
    Case("program local_rank without braces", "{w} args '$local_rank'",
         {"out": Difference("D28", ["", "W args ['0']"], ["", "W args ['$local_rank']"])}),
    Case("program two dollars", "{w} args '$$y'",
         {"out": Difference("D28", ["", "W args ['$y']"], ["", "W args ['$$y']"])}),
    Case("program PYTHON_EXEC", "{w} exit=4",
         {**_ends_with(4), "report": Difference("report name")},
         env={"PYTHON_EXEC": "/usr/bin/python3"}),
    # Variables of the workers.
    Case("env role", "--role trainer -t 1 --nproc-per-node 2 {w} env out=x"),
    Case("env threads are the user's", "--nproc-per-node 2 {w} env", env={"OMP_NUM_THREADS": "3"}),
    Case("env of nccl", "{w} env", env={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}),
    Case("env of the user", "{w} env", env={"USER_X": "1", "RANK": "9", "WORLD_SIZE": "9"}),
    Case("env of a store of the workers", "{w} env",
         env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
    Case("env run id", "--rdzv-id mine {w} env", _RUN_ID),
    Case("env run id, standalone", "--standalone --rdzv-id mine {w} env", _RUN_ID),
    Case("env standalone", "--standalone {w} env"),
    Case("env master port", "--master-port {port} --rdzv-id mine {w} env"),
    Case("env master address", "--master-addr 127.0.0.1 --master-port {port} {w} env",
         {"env": Difference("one node")}),
    Case("env local address", "--local-addr 127.0.0.1 {w} env"),
    Case("env c10d, one node",
         "--rdzv-backend c10d --rdzv-endpoint localhost:{port} --rdzv-id mine {w} env"),
    Case("env standard input", "{w} stdin",
         {"out": Difference("D43", ["", "W stdin 'text'"], ["", "W stdin ''"])}, stdin=b"text"),
    Case("env session", "{w} session"),
    # Ends, restarts, failures.
    Case("end with 0", "--nproc-per-node 2 {w}"),
    Case("end with 7", "--nproc-per-node 2 {w} meet 1:exit=7 hold", _ends_with(7)),
    Case("end by SIGSEGV", "--nproc-per-node 2 {w} meet 0:kill=SIGSEGV hold", _ends_with(139)),
    Case("end by SIGKILL", "{w} kill=SIGKILL", _ends_with(137)),
    Case("end by an exception", "{w} raise=x"),
    Case("end of one among many", "--nproc-per-node 4 -r 3 {w} meet 2:exit=3 hold", _ends_with(3)),
    Case("end of one that ends late", "--nproc-per-node 2 {w} 1:nap=0.5 1:exit=3", _ends_with(3)),
    Case("end with a daemon left behind", "{w} daemon=session",
         {"left": Difference("D11", ["sleep"], [])}),
    Case("end with a child left behind", "{w} daemon", {"left": Difference("D11", ["sleep"], [])}),
    Case("restarts suffice", "--max-restarts 2 --nproc-per-node 2 {w} meet 1:fail=2 env"),
    Case("restarts do not suffice", "--max-restarts 1 {w} fail=2", _ends_with(9)),
    Case("restarts of a missing command", "--max-restarts 1 --no-python ./nowhere",
         _ends_with(127, reason="exit codes")),
    Case("restarts below 0", "--max-restarts -1 {w}", _USAGE),
    Case("restarts without a number", "--max-restarts x {w}"),
    Case("restarts and their logs", "--max-restarts 1 --log-dir {dir}/logs -r 3 {w} out=x fail=1"),
    # Error files.
    Case("error recorded", "{w} 'error={\"message\": {\"message\": \"E: x\", \"extraInfo\":"
         " {\"py_callstack\": \"Trace\\nE: x\", \"timestamp\": \"1700000000\"}}}' exit=4",
         _ends_with(4), env=_LAUNCHER_ERROR),
    Case("error as text", "{w} 'error={\"message\": \"text\", \"timestamp\": 17}' exit=4",
         _ends_with(4), env=_LAUNCHER_ERROR),
    Case("error that is no JSON", "--max-restarts 1 {w} 'error={' fail=1",
         {"code": Difference("D15", 1, 0),
          "starts": Difference("D15", ["attempt 0: rank 0"],
                               ["attempt 0: rank 0", "attempt 1: rank 0"])}),
    Case("error not recorded", "{w} exit=5", _ends_with(5), env=_LAUNCHER_ERROR),
    Case("error of the earlier time", "--nproc-per-node 2 {w}"
         " '1:error={\"message\": \"early\", \"timestamp\": 1700000001}' meet 1:hold nap=0.5"
         " '0:error={\"message\": \"late\", \"timestamp\": 1700000009}' exit=2",
         {"report": Difference("recorded")}),
    # Logs and the console.
    Case("logs without redirection", "--log-dir {dir}/logs --rdzv-id mine --master-port {port} {w}"
         " out=x"),
    Case("logs redirected", "--nproc-per-node 2 --log-dir {dir}/logs -r 3 {w} out=x err=y"),
    Case("logs of some ranks", "--nproc-per-node 3 --log-dir {dir}/logs -r 0:1,1:2 {w} out=x"
         " err=y"),
    Case("logs tee", "--nproc-per-node 2 --log-dir {dir}/logs -t 3 {w} out=x err=y"),
    Case("logs tee of some ranks", "--nproc-per-node 3 --log-dir {dir}/logs -t 0:1,1:2 {w} out=x"
         " err=y"),
    Case("logs tee and redirected", "--log-dir {dir}/logs -t 1 -r 2 {w} out=x err=y"),
    Case("logs of rank 10", "--nproc-per-node 11 --log-dir {dir}/logs -r 10:1 --no-python"
         " bash -c 'echo W $RANK'",
         {"code": Difference("D27", 1, 0), "logs": Difference("D27", {}),
          "out": Difference("D27", [""], ["", *(f"W {rank}" for rank in range(10))])}),
    Case("logs bad mask", "-r 4 {w}", _USAGE),
    Case("logs bad map", "-t 0:3, {w}", _USAGE),
    Case("logs filter and tee", "--nproc-per-node 2 --log-dir {dir}/logs -t 3"
         " --local-ranks-filter 0 {w} out=x"),
    Case("logs filter alone", "--nproc-per-node 2 --local-ranks-filter 1 {w} out=x err=y"),
    Case("logs bad filter", "--local-ranks-filter a {w}", _USAGE),
    Case("logs filter of no rank", "--local-ranks-filter 7 {w} out=x",
         {"code": Difference("D27", 0, 2),
          "starts": Difference("D27", ["attempt 0: rank 0"], [])}),
    Case("logs into /dev/null", "--nproc-per-node 2 --log-dir /dev/null -t 3 -r 3 {w} env out=x"),
    Case("logs into a file", "--log-dir {dir}/stdin -r 3 {w}", _USAGE),
    Case("logs prefix", "--nproc-per-node 2 -t 1 {w} out=x",
         env={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE":
              "<${role_name}/${rank}/${local_rank}/${nope}/$$>"}),
    Case("logs prefix empty", "-t 1 {w} out=x",
         env={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": ""}),
    Case("logs of partial lines", "-t 1 {w} hex=5720 nap=0.3 hex=780a hex=5720 nap=0.3 hex=79",
         {"out": Difference("D21", ours=["", "[default0]:W x", "[default0]:W y"])}),
    Case("logs of carriage returns", "-t 1 {w} hex=5720310d5720320d0a",
         {"out": Difference("D22", ["", "[default0]:W 1", "[default0]:W 2"],
                            ["", "[default0]:W 2"])}),
    Case("logs of a split character", "-t 1 {w} hex=5720e2 nap=0.3 hex=82ac0a",
         {"out": Difference("D23", ours=["", "[default0]:W \N{EURO SIGN}"])}),
    Case("logs of invalid bytes", "-t 1 {w} hex=5720ff0a",
         {"out": Difference("D23", ours=["", "[default0]:W \\xff"])}),
    Case("logs of the last words", "-t 3 {w} out=x err=y kill=SIGKILL", _ends_with(137)),
    Case("logs specs", "--logs-specs default -t 1 {w} out=x"),
    Case("logs specs unknown", "--logs-specs unknown {w}", _USAGE),
    # Signals and stops.
    Case("signal SIGTERM", "--nproc-per-node 2 {w} hold=return", _ends_with(143),
         steps=("ready 2", "signal 0 SIGTERM")),
    Case("signal SIGINT", "--nproc-per-node 2 {w} hold=return", _ends_with(130),
         steps=("ready 2", "signal 0 SIGINT")),
    Case("signal SIGHUP", "--nproc-per-node 2 {w} hold=return", _ends_with(129),
         steps=("ready 2", "signal 0 SIGHUP")),
    Case("signal SIGQUIT", "--nproc-per-node 2 {w} hold=return", _ends_with(131),
         steps=("ready 2", "signal 0 SIGQUIT")),
    Case("signal SIGUSR1", "--nproc-per-node 2 {w} hold=ignore",
         {"code": Difference("D10", 138, "does not end"),
          "left": Difference("D10", ["worker", "worker"], []),
          "signals": Difference("D10", [], ["0 got SIGUSR1", "1 got SIGUSR1"])},
         steps=("ready 2", "signal 0 SIGUSR1"), limit=5),
    Case("signal SIGUSR1, listed", "--signals-to-handle SIGTERM,SIGUSR1 --shutdown-timeout 1"
         " {w} hold=ignore", _ends_with(143),
         steps=("ready 1", "signal 0 SIGUSR1", "note got SIGUSR1", "signal 0 SIGTERM")),
    Case("signal unlisted", "--signals-to-handle SIGINT {w} hold=return",
         {"left": Difference("D10", ["worker"], []),
          "signals": Difference("D10", [], ["0 got SIGTERM"])},
         steps=("ready 1", "signal 0 SIGTERM")),
    Case("signal unknown", "--signals-to-handle TERM {w}",
         {"code": Difference("D33", 0, 2), "starts": Difference("D33", ["attempt 0: rank 0"], [])}),
    Case("signal SIGKILL listed", "--signals-to-handle SIGKILL {w}",
         {"code": Difference("D33", 1, 2)}),
    Case("signal twice", "{w} hold=ignore",
         steps=("ready 1", "signal 0 SIGTERM", "note got SIGTERM", "signal 0 SIGTERM"), limit=10),
    Case("signal SIGKILL to the launcher", "{w} hold=return",
         {"left": Difference("D9", ["worker"], []),
          "signals": Difference("D9", [], ["0 got SIGTERM"])},
         steps=("ready 1", "signal 0 SIGKILL")),
    Case("signal while nodes are missing", _STATIC + "--node-rank 0 {w}",
         steps=("listen", "signal 0 SIGTERM")),
    Case("timeout of a stop", "--shutdown-timeout 1 {w} hold=ignore", _ends_with(143),
         steps=("ready 1", "signal 0 SIGTERM")),
    Case("timeout of a stop, by a variable", "{w} hold=ignore", _ends_with(143),
         env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}, steps=("ready 1", "signal 0 SIGTERM")),
    Case("timeout after a failure", "--shutdown-timeout 1 --nproc-per-node 2 {w} 1:hold=ignore"
         " nap=1 note=failing exit=3",
         {"code": Difference("D12", "does not end", 3), "report": Difference("D12", [])},
         steps=("ready 1", "note failing"), limit=15),
    Case("timeout below 0", "--shutdown-timeout -1 {w}", _USAGE),
    Case("timeout of a fraction", "--shutdown-timeout 1.5 {w}",
         {"code": Difference("fractions", 2, 0),
          "starts": Difference("fractions", [], ["attempt 0: rank 0"])}),
    # Other options.
    Case("option unknown", "--unknown {w}"),
    Case("option help", "--help", ignored=("out",)),
    Case("option monitor interval", "--monitor-interval 0.5 {w}"),
    Case("option monitor interval 0", "--monitor-interval 0 {w}", _USAGE),
    Case("option bad numa binding", "--numa-binding cell {w}"),
    Case("option event log", "--event-log-handler null {w} out=x"),
    Case("option unknown event log", "--event-log-handler unknown {w} out=x", _USAGE),
    Case("option duplicate filter", "-t 3 --log-dir {dir}/logs --nproc-per-node 2"
         " --duplicate-stdout-filters 'a,b,,c' {w} out=a out=b out=b,c out=x err=a"),
    Case("option duplicate filter and /dev/null", "--log-dir /dev/null"
         " --duplicate-stdout-filters a {w} out=a",
         {"code": Difference("D46", 1, 0), "out": Difference("D46", [""], ["", "W a"]),
          "starts": Difference("D46", [], ["attempt 0: rank 0"])}),
    Case("option virtual local rank", "--virtual-local-rank --nproc-per-node 2 {w} env",
         env={"CUDA_VISIBLE_DEVICES": "4,6"}),
    # Rendezvous.
    Case("rdzv backend unknown", "--rdzv-backend foo {w}", _USAGE),
    Case("rdzv endpoint with a bad port", "--rdzv-backend c10d --rdzv-endpoint localhost:99999 {w}",
         _USAGE),
    Case("rdzv endpoint with a bad host", "--rdzv-backend c10d --rdzv-endpoint 'a b:1' {w}",
         _USAGE),
    Case("rdzv endpoint without a port", "--rdzv-endpoint localhost {w}",
         {"code": Difference("one node", 1, 0),
          "starts": Difference("one node", [], ["attempt 0: rank 0"])}),
    Case("rdzv conf without a value", "--rdzv-conf foo {w}", _USAGE),
    Case("rdzv conf without a key", "--rdzv-conf =3 {w}", _USAGE),
    Case("rdzv conf unknown", "--rdzv-conf bogus=1 {w} out=x"),
    Case("rdzv conf with spaces", "--rdzv-conf ' read_timeout = 60 , x = a=b ' {w} out=x"),
    Case("rdzv conf of a parameter", "--rdzv-conf min_nodes=1 {w}", _USAGE),
    Case("rdzv etcd, one node", "--rdzv-backend etcd --rdzv-endpoint localhost:{port} {w}",
         {"code": Difference("one node", 1, 0),
          "starts": Difference("one node", [], ["attempt 0: rank 0"])}),
    # Several nodes on the loopback interface.
    Case("nodes static", _STATIC + "--nproc-per-node 2 {w} env", nodes=_STATIC_NODES),
    Case("nodes static, a failure", _STATIC + "{w} meet note=met 1:exit=5 hold",
         {"code": Difference("D49", ["does not end", 1], [5, 5]), "report": Difference("D49")},
         nodes=_STATIC_NODES, steps=("note met",), limit=15),
    Case("nodes static, one missing", _STATIC + "--node-rank 0 --rdzv-conf timeout=3 {w}",
         _ends_with(75, reason="exit codes")),
    Case("nodes dynamic", _DYNAMIC + "--nproc-per-node 2 {w} env", nodes=("", "")),
    Case("nodes dynamic, of unequal size", _DYNAMIC + "{w} env",
         nodes=("--nproc-per-node 1 --local-addr 127.0.0.1",
                "--nproc-per-node 2 --local-addr 127.0.0.2"), steps=_IN_ORDER),
    Case("nodes dynamic, identical workers", _DYNAMIC + "--nproc-per-node 2 {w} env",
         nodes=("", ""), env={"TORCH_ELASTIC_WORKER_IDENTICAL": "1"}),
    Case("nodes dynamic, two roles", _DYNAMIC + "{w} env",
         nodes=("--role a --local-addr 127.0.0.1",
                "--role b --nproc-per-node 2 --local-addr 127.0.0.2"), steps=_IN_ORDER),
    # No `meet`: torchrun's nodes count their restarts by themselves (D30).
    Case("nodes dynamic, a restart", _DYNAMIC + "--max-restarts 2 {w} 0:nap=8 1:fail=1 env",
         {"starts": Difference("D30", ours=[f"attempt {attempt}: rank {rank}"
                                            for attempt in (0, 1) for rank in (0, 1)]),
          "env": Difference("D30")},
         nodes=("", ""), steps=_IN_ORDER),
    Case("nodes dynamic, a failure", _DYNAMIC + "{w} meet note=met 1:exit=5 hold",
         {"code": Difference("D49", ["does not end", 1], [5, 5]), "report": Difference("D49")},
         nodes=("", ""), steps=(*_IN_ORDER, "note met"), limit=15),
    Case("nodes dynamic, too few", "--nnodes 2 --rdzv-backend c10d --rdzv-id job --rdzv-endpoint"
         " localhost:{port} --rdzv-conf join_timeout=3 {w}", _ends_with(75, reason="exit codes")),
    Case("nodes dynamic, the minimum", "--nnodes 1:2 --rdzv-backend c10d --rdzv-id job"
         " --rdzv-endpoint localhost:{port} --rdzv-conf last_call_timeout=1 {w} env"),
    Case("nodes dynamic, one ends late", _DYNAMIC + "{w} 1:nap=2", nodes=("", "")),
)  # fmt: skip
