"""What the blocks of the pages need to run: other hosts, files, jobs beside them, functions.

A block of Python without a setup is a program, one of a shell a script; both end with 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from docs.site.blocks import Block


@dataclass(frozen=True)
class Setup:
    """How a block is run; `before` and `after` are in its language."""

    before: str = ""
    after: str = ""
    replaced: Mapping[str, str] = field(default_factory=dict)
    """Texts of the block by what stands for them: names of hosts, ports, `...`."""
    files: Mapping[str, str] = field(default_factory=dict)
    code: int = 0
    is_dry: bool = False
    """Every `aio-elastic run` has `--dry-run`: hosts, devices or programs are not there."""
    worker: str | None = None
    """The block is what workers run, with these options of `aio-elastic run`."""
    beside: str = ""
    """A script of the shell that runs before, and leaves jobs running until `beside_end`."""
    beside_end: str = ""
    needs: str = ""
    """A command without which the test is skipped."""
    with_certificates: bool = False
    engine: str = ""
    """The engine whose endpoint stands for `$ENGINE`."""
    prints: tuple[str, ...] = ()
    """Texts among the output, in which `...` stands for any."""


WAIT = """\
import signal
import time

signal.signal(signal.SIGUSR1, lambda *args: None)
print("ready", flush=True)
time.sleep(600)
"""
JOB = """\
aio-elastic run --nproc-per-node 4 --rdzv-id my-run --shutdown-timeout 5 {options} wait.py & job=$!
until aio-elastic status my-run 2>/dev/null | grep -q running; do sleep 0.1; done
"""
JOB_END = "aio-elastic stop my-run >/dev/null 2>&1 || true; wait $job || true\n"
MY_RUN: dict[str, Any] = {
    "beside": JOB.format(options="--redirects 3"),
    "beside_end": JOB_END,
    "files": {"wait.py": WAIT},
}
NODES = """\
aio-elastic store --port $PORT & store=$!
until aio-elastic store ping localhost:$PORT; do :; done
for node in a b; do
  DRY= aio-elastic run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:$PORT \\
    --rdzv-id my-run short.py &
done
"""
SHORT = "import time\ntime.sleep(1)\n"
TWO_NODES: dict[str, Any] = {
    "beside": NODES,
    "beside_end": "kill $store; wait\n",
    "files": {"short.py": SHORT},
}
AT_ETCD: dict[str, Any] = {
    "beside": "for node in a b; do aio-elastic run --nnodes 2 --rdzv-backend etcd"
    " --rdzv-endpoint $ENGINE --rdzv-id my-run short.py & done; wait\n",
    "files": {"short.py": SHORT},
}
FAIL = """\
import os
import time

print("hello", flush=True)
if os.environ["RANK"] == "3":
    raise ValueError("no such data")
time.sleep(600)
"""
TRAINING = """\
first_step, steps = 0, 3


def train(step: int) -> None:
    pass


def save_checkpoint(step: int) -> None:
    pass


"""
CHILDREN = """\
import sys
from elastic_aio import Agent, GroupSpec, LaunchSpec
sleeper = LaunchSpec([sys.executable, "-c", "import time; time.sleep(4)"])
new_spec = LaunchSpec([sys.executable, "-c", "print('new', flush=True)"])
spec = GroupSpec(
    {"server": sleeper, "serving": GroupSpec.replicas(sleeper, 2)}, essential=["serving"]
)
"""
PLUGIN = """\
[elastic_aio.logs_specs]
flat = flat:Flat
[elastic_aio.rendezvous]
alone = alone:Alone
"""

SETUPS: dict[tuple[str, str], Setup] = {
    ("README.md", "LaunchSpec(\n"): Setup(prints=("succeeded, restarts: 0",)),
    ("README.md", "async with Agent(spec)"): Setup(
        before="import sys\n"
        "from elastic_aio import Agent, LaunchSpec, Restarting, WorkerExited\n"
        'spec = LaunchSpec([sys.executable, "-c", "pass"], nproc_per_node=2)\n',
        prints=("rank 0: exit code 0", "rank 1: exit code 0"),
    ),
    ("README.md", "--rdzv-endpoint node0,node1"): Setup(
        before="run() {\n",
        after="}\nfor node in a b c d; do run & done; wait\n",
        replaced={"node0,node1": "127.0.0.1:$PORT"},
    ),
    ("comparison.md", "benchmarks.supervisors"): Setup(
        replaced={"supervisors\n": "supervisors --only exit-code --peer elastic_aio\n"},
        prints=("| a worker exits with 7 | exit code 7 |",),
    ),
    ("control.md", "aio-elastic ps  "): Setup(
        replaced={
            "aio-elastic logs -f 3 ": "aio-elastic logs -f 3 & #",
            "aio-elastic events -f ": "aio-elastic events -f & #",
            "aio-elastic serve ": "aio-elastic serve --http 127.0.0.1:$PORT & serve=$! #",
            "aio-elastic top ": "aio-elastic top & #",
            # Outside of a terminal they want the job by its name.
            "signal USR1 ": "signal my-run USR1 ",
            "aio-elastic restart ": "aio-elastic restart my-run ",
            "aio-elastic reload ": "aio-elastic reload my-run ",
            "aio-elastic scale ": "aio-elastic scale my-run ",
            "aio-elastic preempt ": "aio-elastic preempt --deadline 60 my-run ",
            "aio-elastic stop\n": "aio-elastic stop my-run\n",
            # 2: it is over before.
            "aio-elastic wait ": "code=0; aio-elastic wait my-run || code=$?\n"
            "test $code = 85 -o $code = 2 #",
        },
        after="kill $serve; wait\n",
        **{**MY_RUN, "beside": JOB.format(options="--redirects 3 --restart-scope worker")},
        prints=("my-run...running...", "ready"),
    ),
    ("control.md", "list_jobs()"): Setup(**MY_RUN, prints=("... my-run", "running")),
    ("control.md", "socat -"): Setup(
        needs="socat",
        **MY_RUN,
        replaced={
            # The tests have a directory of sockets of their own.
            "XDG_RUNTIME_DIR/elastic_aio": "ELASTIC_AIO_CONTROL_DIR",
            "PID-NAME.sock": '"$(ls "$ELASTIC_AIO_CONTROL_DIR" | grep sock$)"',
        },
    ),
    ("embed.md", "import uvicorn"): Setup(needs="uvicorn"),
    ("embed.md", "sys.exit(3)"): Setup(prints=("3 rank ... exit code 3",)),
    ("embed.md", "asyncio.timeout(1)"): Setup(prints=("stopped after one second",)),
    ("embed.md", 'agent.stop(reason="enough")'): Setup(prints=("... was stopped: enough",)),
    ("events.md", "FAIL_ONCE"): Setup(
        prints=(
            "rank ...: exit code 1",
            "root cause: rank ...",
            "restarting in 0.0 s: ...",
            "succeeded",
        ),
    ),
    ("events.md", "follow_job("): Setup(
        replaced={"node0:29400,node1:29400": "127.0.0.1:$PORT"},
        **TWO_NODES,
        prints=("0 ...", "...JobFinished(..."),
    ),
    ("events.md", "--json --after 41"): Setup(
        replaced={"node0,node1": "127.0.0.1:$PORT", "--after 41": "--after 1"},
        **TWO_NODES,
        prints=('{"schema":1,"event":"JobFinished"...',),
    ),
    ("events.md", "curl -N"): Setup(
        needs="curl",
        beside="aio-elastic run --http 127.0.0.1:$PORT short.py &\n"
        "until curl -s 127.0.0.1:$PORT/healthz >/dev/null; do sleep 0.1; done\n",
        beside_end="wait\n",
        files={"short.py": SHORT},
        replaced={"9000": "$PORT", "ID: 41": "ID: 0"},
        prints=('data: {"schema":1,"event":"JobFinished"...',),
    ),
    ("events.md", "StatusServer"): Setup(prints=("state at ...127.0.0.1:...",)),
    ("events.md", "lifespan"): Setup(
        after="import asyncio\n\nfrom elastic_aio import JobStopped\n\n\n"
        "async def check() -> None:\n    async with lifespan(app):\n        pass\n"
        "    try:\n        await agent.wait()\n    except JobStopped:\n"
        "        print('the job ended with the app')\n\n\nasyncio.run(check())\n",
        prints=("the job ended with the app",),
    ),
    ("events.md", "aio-elastic serve --http"): Setup(
        needs="curl",
        **MY_RUN,
        replaced={
            "aio-elastic serve --http localhost:9000 ": "aio-elastic serve"
            " --http localhost:$PORT & serve=$!\n"
            "until curl -s localhost:$PORT/jobs >/dev/null; do sleep 0.1; done #",
            "localhost:9000": "localhost:$PORT",
        },
        after="kill $serve; wait $serve\n",
        prints=("...my-run...", "# EOF"),
    ),
    ("finished-runs.md", "aio-elastic ps -a  "): Setup(
        beside="aio-elastic run --nproc-per-node 4 --rdzv-id my-run --tee 3 fail.py"
        " || test $? = 1\n",
        files={"fail.py": FAIL},
        prints=("my-run...failed...", "...ValueError: no such data", '{"schema":1,...'),
    ),
    ("finished-runs.md", "RunRecorder"): Setup(prints=("succeeded",)),
    ("first-job.md", ".venv/bin/aio-elastic run"): Setup(
        replaced={".venv/bin/": ""},
        prints=(
            "...4 workers of ...hello.py...",
            "[default...]:hello from rank ...",
            "...rank 2 ... exit code 1...",
            "...attempt 1...",
            "...finished: 4 workers, ... s, 1 restart",
        ),
    ),
    ("first-job.md", 'os.environ["RANK"]'): Setup(
        worker="--nproc-per-node 2 --tee 3", prints=("[default0]:0 2", "[default1]:1 2")
    ),
    ("first-job.md", "WorkerContext"): Setup(
        worker="--tee 3", prints=("[default0]:rank 0 of 1, restart 0",)
    ),
    ("worker-environment.md", "WorkerContext"): Setup(worker="--tee 3", prints=("...:0 0 1",)),
    ("functions.md", "--preload torch"): Setup(is_dry=True),
    ("functions.md", "ProcessRaisedException"): Setup(prints=("process 1 raised an exception",)),
    ("hangs.md", "aio-elastic status my-run"): Setup(**MY_RUN),
    ("hangs.md", "echo READY=1"): Setup(
        worker="--no-python --verbose", prints=("...rank 0...ready...",)
    ),
    ("hangs.md", "from elastic_aio.worker import phase"): Setup(
        worker="--verbose", prints=("...rank 0...ready...",)
    ),
    ("many-nodes.md", "# 2 to 4 nodes"): Setup(
        is_dry=True,
        **TWO_NODES,
        replaced={"events --rdzv-endpoint node0,node1": "events --rdzv-endpoint 127.0.0.1:$PORT"},
    ),
    ("many-nodes.md", "--max-restarts 1 examples/hello.py &"): Setup(
        replaced={"29400": "$PORT"}, prints=("...attempt 1...",)
    ),
    ("many-nodes.md", "saved_for = None"): Setup(before=TRAINING, worker=""),
    ("many-nodes.md", "if step % 1000 == 0"): Setup(before=TRAINING, worker=""),
    ("many-nodes.md", "gpu_has_errors()"): Setup(
        before="def gpu_has_errors() -> bool:\n    return True\n\n\n",
        worker="",
        code=1,
        prints=("...the only node of the job is excluded...",),
    ),
    ("many-nodes.md", "--health-check ./check_gpus.sh"): Setup(
        is_dry=True, replaced={" ... ": " --rdzv-backend c10d --rdzv-endpoint node0 "}
    ),
    ("many-nodes.md", "aio-elastic store --host '*'"): Setup(
        is_dry=True,
        replaced={
            "--port 29400 ": "--port $PORT & store=$!\n"
            "until aio-elastic store ping localhost:$PORT; do :; done #",
            "jobs --rdzv-endpoint store0": "jobs --rdzv-endpoint localhost:$PORT",
        },
        after="kill $store; wait $store\n",
    ),
    ("many-nodes.md", "token_file=/run/my-run.token"): Setup(
        is_dry=True,
        files={"my-run.token": "0123456789abcdef\n"},
        replaced={"/run/my-run.token": "my-run.token"},
    ),
    ("many-nodes.md", "tls_cert=/etc/job/node.pem"): Setup(
        is_dry=True,
        with_certificates=True,
        replaced={"/etc/job/": "", "aio-elastic events": ": events"},
    ),
    ("many-nodes.md", "srun --nodes"): Setup(
        is_dry=True,
        replaced={"srun --nodes 4 --ntasks-per-node 1 ": "", "gpu": "1"},
    ),
    ("migrate-from-torchrun.md", "# before"): Setup(replaced={"\ntorchrun": "\n: torchrun"}),
    ("migrate-from-torchrun.md", "exec accelerate launch"): Setup(
        prints=("accelerate launch train.py", "torchrun --nproc-per-node 4 train.py")
    ),
    ("command-line.md", "exec accelerate launch"): Setup(prints=("accelerate launch train.py",)),
    ("plugins.md", "class Flat"): Setup(
        after="from elastic_aio import LaunchSpec, run\n\n"
        'run(LaunchSpec(["echo", "x"], logs=Flat(log_dir="logs")))\n'
        "from pathlib import Path\n\n"
        'print(*(path.name for path in Path("logs").rglob("rank0.*")))\n',
        prints=("...rank0.out...",),
    ),
    ("plugins.md", "--logs-specs flat"): Setup(
        files={
            "flat.py": "@class Flat",
            "p-1.dist-info/entry_points.txt": PLUGIN,
            "p-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: p\nVersion: 1\n",
        },
        after="find logs -name rank1.out | grep rank1\n",
    ),
    ("plugins.md", "--rdzv-backend alone"): Setup(
        files={
            "alone.py": "@class Alone",
            "p-1.dist-info/entry_points.txt": PLUGIN,
            "p-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: p\nVersion: 1\n",
        },
        prints=("...finished: 2 workers...",),
    ),
    ("processes.md", "StopPlan.within(5)) as process"): Setup(prints=("b'hello\\n'", "...0...")),
    ("processes.md", "as server:\n    ..."): Setup(
        before="from subprocess import PIPE\nfrom elastic_aio import StopPlan, open_process\n"
        'argv = ["cat"]\n'
    ),
    ("processes.md", "start_blocking_portal"): Setup(
        before="import anyio\nimport anyio.from_thread\nfrom subprocess import PIPE\n"
        'from elastic_aio import open_process\nargv = ["cat"]\n'
    ),
    ("restarts.md", "async def decide"): Setup(prints=("0 ...",)),
    ("servers.md", "--ready-timeout 60"): Setup(is_dry=True),
    ("servers.md", "alive={"): Setup(before="from elastic_aio import LaunchSpec\n"),
    ("servers.md", "sockets=["): Setup(before="from elastic_aio import LaunchSpec\n"),
    ("servers.md", "--socket http="): Setup(is_dry=True),
    ("services.md", "aio-elastic up --reload-on-hup"): Setup(
        files={"jobs.toml": "@[children.mailer]"},
        replaced={
            "aio-elastic up --reload-on-hup jobs.toml ": "sed -i s/18081/$PORT/ jobs.toml; "
            "sed -i s/18082/$PORT2/g jobs.toml\n"
            "aio-elastic up --reload-on-hup jobs.toml & job=$!\n"
            'until aio-elastic status shop 2>/dev/null | grep -q "api.*yes"; do sleep 0.1; done #',
            "aio-elastic logs -f ": "aio-elastic logs -f & #",
            "kill -HUP PID ": "kill -HUP $job #",
        },
        after="aio-elastic stop shop; wait || true\n",
        prints=("api ...running...yes...",),
    ),
    ("simulation.md", 'never_on=[3])\nspec = LaunchSpec("train.py", nnodes=2'): Setup(
        prints=("... s, all 100 restarts are used up...",)
    ),
    ("simulation.md", "range(20)"): Setup(),
    ("stopping.md", "--preempt-signal USR1"): Setup(
        **{**MY_RUN, "beside_end": "wait $job || test $? = 85"}, after="aio-elastic stop my-run\n"
    ),
    ("stopping.md", "change.is_preemption"): Setup(before=TRAINING, worker=""),
    ("stopping.md", 'reason="maintenance"'): Setup(prints=("143 ...maintenance...",)),
    (
        "store.md",
        "--rdzv-backend etcd --rdzv-endpoint etcd0,etcd1,etcd2 --rdzv-id my-run train",
    ): Setup(is_dry=True),
    ("store.md", "etcd0,etcd1,etcd2 --rdzv-id my-run\n"): Setup(
        engine="etcd",
        replaced={"etcd0,etcd1,etcd2": "$ENGINE"},
        prints=("... job succeeded after ...",),
        **AT_ETCD,
    ),
    ("store.md", "gc --rdzv-backend etcd"): Setup(
        engine="etcd",
        replaced={"etcd0,etcd1,etcd2": "$ENGINE"},
        prints=("my-run ...",),
        **AT_ETCD,
    ),
    ("store.md", "pip install 'elastic_aio[redis]'"): Setup(
        is_dry=True, replaced={"pip install": ": pip install"}
    ),
    ("store.md", "async with StoreServer"): Setup(prints=("set members/me b'here'",)),
    ("store.md", "# serves until SIGTERM"): Setup(
        replaced={
            "29400 ": "$PORT & store=$!\n"
            "until aio-elastic store ping localhost:$PORT; do :; done #",
            "29400": "$PORT",
        },
        after="kill $store; wait $store\n",
    ),
    ("store.md", "--tls-cert store.pem"): Setup(
        with_certificates=True,
        replaced={
            "store --host '*'": "store --host '*' --port $PORT",
            "--tls-ca ca.pem\naio": "--tls-ca ca.pem & store=$!\nsleep 0.1\naio",
            "ping store.example:29400": "ping localhost:$PORT",
        },
        after="kill $store; wait $store\n",
    ),
    ("store.md", "StoreServer(tls="): Setup(with_certificates=True),
    ("store.md", "async with MemoryStore"): Setup(prints=("b'hello'",)),
    ("train.md", "--healthy-after 3600"): Setup(is_dry=True, replaced={" gpu ": " 1 "}),
    ("trees.md", "--restart-scope worker"): Setup(files={"serve.py": "print('served')\n"}),
    ("trees.md", "agent.restart(child="): Setup(
        before=CHILDREN, replaced={'"serving/1"': '"serving/1"', "6)": "3)"}
    ),
    ("command-line.md", "source <(aio-elastic completion bash)"): Setup(
        replaced={
            "source <(aio-elastic completion zsh)": "aio-elastic completion zsh >/dev/null",
            "fish | source": "fish >/dev/null",
        },
    ),
    ("records.md", "jq -r"): Setup(
        needs="jq",
        beside="aio-elastic run --rdzv-id my-run --no-python false || test $? = 1\n",
        replaced={"~/.local/state": "$XDG_STATE_HOME"},
        prints=("my-run\t1\t...",),
    ),
}
"""By the end of the page's path, and a text of the block."""


def setup_of(block: Block) -> Setup:
    """Return the setup of a block; AssertionError if several fit."""
    found = [
        setup
        for (page, part), setup in SETUPS.items()
        if block.page.endswith(page) and part in block.text
    ]
    assert len(found) <= 1, block.name
    return found[0] if found else Setup()
