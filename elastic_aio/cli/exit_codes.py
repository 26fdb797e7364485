"""The exit codes of a job on the command line: what each means, and which section treats it.

`python -m docs.site.reference` writes the table of `aio-elastic run` of the page from it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from elastic_aio.outcome import PREEMPTED_CODE, EndCause
from elastic_aio.rendezvous.base import NODES_NOT_REPLACED, RENDEZVOUS_FAILED


class ExitCode(NamedTuple):
    """A row: a code, what it means, and a page and section of `aio-elastic help`."""

    code: int | str
    meaning: str
    guide: str
    causes: tuple[EndCause, ...] = ()
    """Ends that a program can tell apart, and that have this code."""


_CODES: Final = "runbook an-exit-code"
_NODES: Final = "runbook nodes-do-not-come-together"
EXIT_CODES: Final = (
    ExitCode(0, "every worker exited with 0", "stopping what-a-success-leaves-behind"),
    ExitCode(
        "1 to 255, of the root cause",
        "the job failed and no restart was left",
        "failures known-causes",
    ),
    ExitCode(
        "128 + n",
        "signal n killed the root cause, or signal n stopped the job",
        "failures crashes",
    ),
    ExitCode(
        130,
        "so too if `KeyboardInterrupt` ended the root cause, a script or a function, or Ctrl-C the"
        " job",
        "stopping signals",
    ),
    ExitCode(
        PREEMPTED_CODE,
        "the job was preempted, after a notice to its workers (`ERESTART` of errno(3))",
        "stopping a-preemption",
    ),
    ExitCode(126, "a worker cannot be executed; no restart", _CODES),
    ExitCode(
        127,
        "the command or the script of a worker does not exist, under `--run-path` too; no restart",
        _CODES,
    ),
    ExitCode(
        RENDEZVOUS_FAILED,
        "the nodes of the job did not come together (`EX_TEMPFAIL`: try again later), or a port of"
        " `--rdzv-endpoint` is in use",
        _NODES,
        (EndCause.TOO_FEW_NODES,),
    ),
    ExitCode(
        NODES_NOT_REPLACED,
        "nodes were lost or stopped, and too few were left for `replace_timeout`"
        " (`EX_UNAVAILABLE`)",
        "restarts lost-nodes",
        (EndCause.NODES_NOT_REPLACED,),
    ),
    ExitCode(
        RENDEZVOUS_FAILED,
        "the store requires another token than this node has, it or this node refuses the other's"
        " certificate, or it was lost for `read_timeout`",
        "many-nodes when-the-store-is-lost",
        (EndCause.NO_STORE,),
    ),
    ExitCode(
        RENDEZVOUS_FAILED,
        "the job runs another program or as another user, its rank is held, or it has ended while"
        " the node was away",
        "many-nodes the-end-of-a-run",
        (EndCause.RUN_HAD_ENDED, EndCause.OTHER_JOB),
    ),
    ExitCode(
        2,
        "an option, a variable or a setting is invalid; no worker with it was started",
        "command-line aio-elastic-help",
    ),
    ExitCode(2, "the token file cannot be read, is empty, or is too short", "security what-to-set"),
    ExitCode(
        1,
        "this host lacks something: processes, file descriptors, room for logs, the port of the"
        " workers' store",
        "sizing where-one-job-stops",
    ),
    ExitCode(
        1,
        "a worker was in an uninterruptible system call for too long"
        " (`TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT`); no restart",
        "runbook a-job-makes-no-progress",
    ),
    ExitCode(
        255,
        "the exit status of the root cause was lost, because another part of the program reaped the"
        " process",
        "embed several-jobs-threads-loops",
    ),
)
"""In the order of the page."""


def guide_of_end(code: int, cause: EndCause | None = None) -> str:
    """Return the page and section about the end of a job in which no worker failed."""
    by_cause = [each.guide for each in EXIT_CODES if cause in each.causes]
    by_code = [each.guide for each in EXIT_CODES if each.code == code]
    return [*by_cause, *by_code, "failures"][0]
