"""What the sessions of the pages need: jobs that run, that fail, that were killed."""

from __future__ import annotations

from typing import Final

from tests.support.doc_setups import Setup

DIFFERS: Final = {
    "b5d4ea1d": "[0-9a-f]{8}",
    "node0:29400": r"127\.0\.0\.1:\d+",
    "4f7c1d20": "4f7c1d20",
    "9b1e77aa": "9b1e77aa",
    "python3 aio-elastic (pid": r".* \(pid",
}
"""Patterns of what another run prints in place of a text.  Other names of hosts, numbers, times and
columns differ too."""

_FAIL_ONCE = """\
import os
import time

if os.environ["RANK"] == "2" and os.environ["ELASTIC_AIO_ATTEMPT"] == "0":
    raise ValueError("no such data")
time.sleep(600)
"""
_RESTARTED = """\
until aio-elastic why {job} 2>/dev/null | grep -q "attempt 1 follows"; do sleep 0.05; done
until aio-elastic why {job} | grep -q "^phase *running"; do sleep 0.05; done
"""
_END = "kill $job 2>/dev/null; wait\n"
_TRAIN = """\
import os
import time

from elastic_aio.worker import progress


def wait_for_peer():
    while True:
        time.sleep(60)


progress("1/1000")
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("no such data")
wait_for_peer()
"""
_MY_RUN = (
    "aio-elastic run --rdzv-id my-run --nproc-per-node 2 --max-restarts 3 --log-dir logs"
    " --redirects 3 train.py >/dev/null 2>&1 & job=$!\n" + _RESTARTED.format(job="my-run")
)
_TREE = """\
sed -i "s/18081/$PORT/; s/18082/$PORT2/g" jobs.toml
sed -i "s/^command = .*$PORT2.*/command = \\"bash server.sh $PORT2\\"/" jobs.toml
aio-elastic up jobs.toml >/dev/null 2>&1 & job=$!
until aio-elastic status $job 2>/dev/null | grep -q "api.*running.*yes"; do sleep 0.05; done
"""
_TREE_FILES = {
    "jobs.toml": "@[children.mailer]",
    "server.sh": "test -e broken && exec sleep 600\nexec python -m http.server $1\n",
}
_KILLED = """\
kill -KILL $job
wait $job
until ! aio-elastic ps | grep -q running; do sleep 0.05; done
"""

SESSIONS: Final[dict[tuple[str, str], Setup]] = {
    ("control.md", "$ aio-elastic why"): Setup(
        files={"train.py": _FAIL_ONCE},
        beside="aio-elastic run --nproc-per-node=4 --max-restarts=3 --tee=3 --rdzv-id=4f7c1d20"
        " train.py >/dev/null 2>&1 & job=$!\n" + _RESTARTED.format(job="4f7c1d20"),
        replaced={"why": "why 4f7c1d20"},
        beside_end=_END,
    ),
    ("finished-runs.md", "$ aio-elastic ps -a"): Setup(
        files={
            "train.py": "raise ValueError(1)\n",
            "eval.py": "pass\n",
            "loop/train.py": "import time\ntime.sleep(600)\n",
        },
        beside="cd loop\n"
        "aio-elastic run --rdzv-id=9b1e77aa train.py >/dev/null 2>&1 & job=$!\n"
        "cd ..\n"
        "until ls $XDG_STATE_HOME/elastic_aio/runs/*/run.json; do sleep 0.05; done\n"
        f"{_KILLED}"
        "aio-elastic run --rdzv-id=4f7c1d20 eval.py 2>/dev/null\n"
        "aio-elastic run --rdzv-id=my-run --max-restarts=3 --restart-delay=0 train.py 2>&-\n",
    ),
    ("runbook.md", "$ aio-elastic ps -a"): Setup(
        files={**_TREE_FILES, "train.py": _TRAIN},
        # The record of a run is there when its line is.
        beside=f"{_MY_RUN}"
        "until grep -q 'WorkerStarted.*attempt.:1' logs/*/events.jsonl; do sleep 0.05; done\n"
        f"{_KILLED}{_TREE}",
        beside_end=_END,
    ),
    ("runbook.md", "$ aio-elastic status my-run"): Setup(
        files={"train.py": _TRAIN}, beside=_MY_RUN, beside_end=_END
    ),
    ("runbook.md", "$ aio-elastic why my-run"): Setup(
        files={"train.py": _TRAIN}, beside=_MY_RUN, beside_end=_END
    ),
    ("runbook.md", "$ aio-elastic status shop"): Setup(
        files=_TREE_FILES,
        beside=f"{_TREE}touch broken\n"
        "aio-elastic restart $job api >/dev/null 2>&1 &\n"
        'until aio-elastic status $job | grep -q "api.*connection refused"; do sleep 0.05; done\n',
        beside_end=_END,
    ),
    ("runbook.md", "--rdzv-conf join_timeout=3"): Setup(
        replaced={"node0:29400": "127.0.0.1:$PORT", "node0": "127.0.0.1:$PORT"}
    ),
    ("runbook.md", "nosuch.py"): Setup(),
    ("runbook.md", "$ aio-elastic stop shop"): Setup(
        files=_TREE_FILES, beside=_TREE, beside_end=_END
    ),
}
"""By the end of the page's path, and a text of the block."""
