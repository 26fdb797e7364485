"""What a job leaves: its result, its failures, its report, its record."""

# %%
import asyncio
import sys

from elastic_aio import (
    AttemptResult,
    ExitStatus,
    Goodput,
    JobFailed,
    LaunchResult,
    LaunchSpec,
    ResourceUsage,
    WorkerResult,
    format_failure,
    launch,
)


def show(result: LaunchResult) -> None:
    attempt: AttemptResult = result.attempts[-1]
    worker: WorkerResult = attempt.workers[0]
    usage: ResourceUsage | None = worker.usage
    goodput: Goodput | None = result.goodput
    print(worker.status == ExitStatus(code=3), worker.status.shell_code)  # True 3
    print(usage is None or usage.max_rss_bytes > 0, goodput is not None)  # True True
    print("crash FAILED" in format_failure(result, "crash"))  # True


async def crash() -> None:
    try:
        await launch(LaunchSpec([sys.executable, "-c", "raise SystemExit(3)"]))
    except JobFailed as error:
        show(error.result)


asyncio.run(crash())

# %%
from elastic_aio import JobEnded, LaunchSpec, run

try:
    run(LaunchSpec(["false"], max_restarts=1))
except JobEnded as ended:
    print(ended.result.state, ended.result.restarts)  # failed 1

# %%
from elastic_aio import EndCause, JobFailed, LaunchSpec, RendezvousSpec, run

alone = RendezvousSpec(endpoint="127.0.0.1:29417", join_timeout=1, last_call_timeout=0)
try:
    run(LaunchSpec(["true"], nnodes=2, run_id="alone", rendezvous=alone))
except JobFailed as failed:
    print(failed.result.cause is EndCause.TOO_FEW_NODES, failed.result.exit_code)  # True 75

# %%
import sys

from elastic_aio import JobFailed, LaunchSpec, WorkerError, run

RECORDED = "from elastic_aio.worker import record; record(lambda: 1 / 0)()"
try:
    run(LaunchSpec([sys.executable, "-c", RECORDED]))
except JobFailed as failed:
    error: WorkerError | None = failed.failures[0].error
    print(error and error.message)  # ZeroDivisionError: division by zero

# %%
from elastic_aio import JobRecord, recorded_runs

runs: list[JobRecord] = recorded_runs()
for record in runs:
    print(record.run_id, record.phase, record.exit_code)
