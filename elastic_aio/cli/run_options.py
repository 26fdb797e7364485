"""The options of `aio-elastic run`, with their help."""

from __future__ import annotations

from typing import Final

from elastic_aio.spec.fields import Option
from elastic_aio.spec.rendezvous import DEFAULT_PORT, ENGINE_ENTRIES, STATIC_PORT
from elastic_aio.spec.stop import DEFAULT_GRACE

_AT_ENGINES: Final = ", ".join(f"with {e.names[0]!r} localhost:{e.port}" for e in ENGINE_ENTRIES)

RENDEZVOUS_OPTIONS: Final = (
    Option("nnodes", "nodes of the job: N or MIN:MAX (default 1)", metavar="N"),
    Option(
        "standalone",
        "run on a single node without rendezvous (default); excludes --nnodes with a minimum"
        " above 1",
    ),
    Option(
        "rdzv-backend",
        "rendezvous of several nodes: 'c10d', 'static', 'etcd', 'redis' or a plug-in (default"
        " 'static' as in torchrun; 'c10d' in Python)",
        metavar="NAME",
    ),
    Option(
        "rdzv-endpoint",
        f"endpoint of the rendezvous store (default localhost:{DEFAULT_PORT}; with 'static'"
        f" MASTER_ADDR:MASTER_PORT; {_AT_ENGINES}); several, separated by commas, are tried in"
        " order",
        metavar="HOST:PORT",
    ),
    Option(
        "rdzv-id",
        "id of the run, the same on all nodes (default: a random id for one node, 'none' for"
        " several)",
        metavar="ID",
    ),
    Option(
        "rdzv-conf",
        "settings of the rendezvous, listed below (default: none)",
        metavar="KEY=VALUE,...",
    ),
    Option(
        "node-rank",
        "group rank of this node: fixed with 'static' (default: Slurm's, else 0), preferred with"
        " 'c10d' (default: Slurm's, else none)",
        metavar="N",
    ),
    Option(
        "master-addr",
        "host of the node with rank 0, for 'static'; with one node and --master-port, MASTER_ADDR"
        " of the workers (default 127.0.0.1)",
        metavar="ADDR",
    ),
    Option(
        "master-port",
        "TCP port of the workers' store (default: a free port per attempt); with 'static' the port"
        f" of the rendezvous store (default {STATIC_PORT})",
        metavar="PORT",
    ),
    Option(
        "local-addr",
        "address of this node for the other nodes (default: that of its connection to the store)",
        metavar="ADDR",
    ),
    Option(
        "exit-barrier-timeout",
        "seconds that a finished node waits for the other nodes (default: no limit)",
        metavar="SECONDS",
        is_own=True,
    ),
)
"""The number of nodes, and their rendezvous."""

RESTART_OPTIONS: Final = (
    Option(
        "max-restarts",
        "restarts of the group after failures: a number, or 'unlimited' (default 0)",
        metavar="N",
    ),
    Option(
        "healthy-after",
        "an attempt that ran for so long returns all restarts used so far (default: never)",
        metavar="SECONDS",
        has_variable=False,
        is_own=True,
    ),
    Option(
        "restart-delay",
        "seconds before each restart; with FIRST:LONGEST the time doubles from one restart to the"
        " next, and a random part of it is waited (default 0 before the first restart, then 1, 2,"
        " 4 and up to 60; so again after an attempt of a minute)",
        metavar="SECONDS",
        has_variable=False,
        is_own=True,
    ),
    Option(
        "restart-window",
        "at most N restarts within any SECONDS; a further failure ends the job (default: no limit)",
        metavar="N:SECONDS",
        has_variable=False,
        is_own=True,
    ),
    Option(
        "restart-on",
        "exit codes, or signals such as SIGKILL, that allow a restart, as in '1,75,SIGSEGV'"
        " (default: all)",
        metavar="CODES",
        has_variable=False,
        is_own=True,
    ),
    Option(
        "never-on",
        "exit codes, or signals, that end the job at once (default: none)",
        metavar="CODES",
        has_variable=False,
        is_own=True,
    ),
)
"""Which failures are followed by a restart, and when."""

RETENTION_OPTIONS: Final = (
    Option(
        "no-capture",
        "leave the workers' standard error alone where it is no terminal: it does not pass through"
        " the launcher, whose report of a failure then has none of its lines",
        has_variable=False,
        is_own=True,
    ),
    Option(
        "log-max-bytes",
        "disk space of each log file, as in '100M': the beginning of a longer one is freed"
        " (default: no limit)",
        metavar="SIZE",
        has_variable=False,
        is_own=True,
    ),
    Option(
        "log-keep-attempts",
        "attempts whose log directories are kept, the latest (default: all)",
        metavar="N",
        has_variable=False,
        is_own=True,
    ),
    Option(
        "log-keep-runs",
        "runs whose directories are kept in --log-dir, the latest that had this option (default:"
        " all)",
        metavar="N",
        has_variable=False,
        is_own=True,
    ),
)
"""What is kept of the output of the workers."""

RUN_OPTIONS: Final = (
    *RENDEZVOUS_OPTIONS,
    Option(
        "nproc-per-node",
        "workers per node: a number, 'cpu' (one per usable CPU), 'gpu' or 'xpu' (one per visible"
        " device), the name of a private-use backend such as 'npu', or 'auto' (devices if there"
        " are any, else CPUs) (default 1)",
        metavar="N",
    ),
    *RESTART_OPTIONS,
    Option("monitor-interval", "no effect: workers are not polled", metavar="SECONDS"),
    Option("role", "name of the workers' role (default 'default')", metavar="NAME"),
    Option("module", "run a module, as `python -m` does (default: a script)", short="-m"),
    Option("no-python", "execute the program itself instead of a Python script"),
    Option(
        "log-dir",
        "directory for logs; '/dev/null' keeps none (default: a temporary directory when needed)",
        metavar="DIR",
    ),
    Option(
        "redirects",
        "streams written to log files: 0 none, 1 stdout, 2 stderr, 3 both; or per local rank as"
        " in '0-3:3,10:1' (default 0)",
        short="-r",
        metavar="STREAMS",
    ),
    Option(
        "tee",
        "streams written to log files and to the console; values as for --redirects (default 0)",
        short="-t",
        metavar="STREAMS",
    ),
    Option(
        "local-ranks-filter",
        "local ranks whose output reaches the console, as in '0,2' (default: all); without --tee"
        " or --redirects, the output of the others is dropped",
        metavar="RANKS",
    ),
    Option(
        "signals-to-handle",
        "signals that stop the job (default SIGTERM,SIGINT,SIGHUP,SIGQUIT);"
        " SIGUSR1 and SIGUSR2 are always forwarded to the workers",
        metavar="NAMES",
    ),
    Option(
        "signal-unhandled",
        "workers without a handler for a forwarded signal: 'skip' them, or 'kill' them by it"
        " (default 'skip')",
        metavar="WHAT",
        has_variable=False,
        is_own=True,
    ),
    Option(
        "shutdown-timeout",
        f"seconds from the first signal to SIGKILL (default {DEFAULT_GRACE:g})",
        metavar="SECONDS",
    ),
    Option(
        "stop-scope",
        "whom the signals of a stop reach first: 'leaders', the first process of each worker, and"
        " the others when it has ended; 'all', every process at once (default 'leaders')",
        metavar="SCOPE",
        is_own=True,
    ),
    Option(
        "linger",
        "seconds for which processes that workers leave behind may run after a success (default 0)",
        metavar="SECONDS",
        is_own=True,
    ),
    Option(
        "heartbeat-timeout",
        "fail the attempt when a worker has sent no message for so long (see"
        " ELASTIC_AIO_NOTIFY_FD in the guide of hangs) (default: no limit)",
        metavar="SECONDS",
        has_variable=False,
        is_own=True,
    ),
    Option(
        "ready-timeout",
        "fail the attempt when a worker has not sent READY=1 so long after its start (default: no"
        " limit)",
        metavar="SECONDS",
        has_variable=False,
        is_own=True,
    ),
    Option(
        "progress-timeout",
        "fail the attempt when a worker has sent the same PROGRESS, or none, for so long (default:"
        " no limit)",
        metavar="SECONDS",
        has_variable=False,
        is_own=True,
    ),
    Option(
        "exit-skew-timeout",
        "fail the attempt when a worker still runs so long after the first of its node, or all of"
        " another node, have exited with 0 (default: no limit)",
        metavar="SECONDS",
        has_variable=False,
        is_own=True,
    ),
    Option(
        "on-timeout",
        "after such a time: 'fail' (the attempt) or 'report' (and go on) (default 'fail')",
        metavar="ACTION",
        has_variable=False,
        is_own=True,
    ),
    Option(
        "idle-report",
        "report once that no worker has used CPU time or written for so long (default: never)",
        metavar="SECONDS",
        has_variable=False,
        is_own=True,
    ),
    Option(
        "stdin",
        "stdin of local rank 0: 'null' or 'rank0' (inherit); other workers have 'null'"
        " (default 'null')",
        metavar="SOURCE",
        has_variable=False,
        is_own=True,
    ),
    Option(
        "log-prefix",
        "template of the prefix of tee'd lines (default '[${role}${local_rank}]:')",
        metavar="TEMPLATE",
        has_variable=False,
        is_own=True,
    ),
    Option(
        "on-full",
        "when the disk of the log files is full: 'fail' (the worker's write fails) or 'console'"
        " (the console shows what the files do not take) (default 'fail')",
        metavar="ACTION",
        has_variable=False,
        is_own=True,
    ),
    *RETENTION_OPTIONS,
    *(
        Option(
            f"duplicate-{stream}-filters",
            f"texts, separated by commas (',,' is a comma): tee'd lines of {stream} that hold one"
            f" of them are also written to filtered_{stream}.log (default: none)",
            metavar="TEXTS",
        )
        for stream in ("stdout", "stderr")
    ),
    Option(
        "logs-specs",
        "name of the plug-in that lays out the logs (default 'default')",
        metavar="NAME",
        has_variable=False,
    ),
    Option("run-path", "run the script inside a function worker, with this launcher's Python"),
    Option(
        "start-method",
        "start of Python workers: 'spawn', 'fork' (only with --run-path) or 'forkserver'"
        " (default 'spawn', with --preload 'forkserver')",
        metavar="NAME",
    ),
    Option(
        "preload",
        "modules that the fork server imports once for the workers of all attempts, as in"
        " 'torch,numpy' (default: none)",
        metavar="MODULES",
        has_variable=False,
        is_own=True,
    ),
    Option(
        "numa-binding",
        "bind workers to CPUs near their devices: 'node', 'socket', 'exclusive' or 'core-complex';"
        " or 'cpu' divides the CPUs among the workers (default: not bound)",
        metavar="MODE",
        has_variable=False,
    ),
    Option(
        "virtual-local-rank",
        "each worker has LOCAL_RANK 0 and sees its own device only (default: all devices)",
    ),
    Option(
        "event-log-handler",
        "receiver of the events in torch's format: 'console' (lines of JSON on stderr), 'null' or a"
        " plug-in (default 'null')",
        metavar="NAME",
    ),
    Option(
        "events",
        "append every event to FILE as a line of JSON (default: none)",
        metavar="FILE",
        has_variable=False,
        is_own=True,
    ),
    Option(
        "http",
        "serve a page, /healthz, /readyz, /metrics, /status, /events and logs over HTTP, without a"
        " password; port 0 takes a free one; needs the extra http (default: none)",
        metavar="HOST:PORT",
        has_variable=False,
        is_own=True,
    ),
    Option(
        "no-control",
        "make no control socket: `aio-elastic ps`, `status`, `stop` and others do not see the job",
        has_variable=False,
        is_own=True,
    ),
    Option(
        "dry-run",
        "print what would be started on this node, and start nothing",
        has_variable=False,
        is_own=True,
    ),
    Option(
        "color",
        "colors by rank in the prefixes of tee'd lines, and in the launcher's own lines: 'always',"
        " 'never' or 'auto' (on a terminal, unless NO_COLOR is set) (default 'auto')",
        metavar="WHEN",
        has_variable=False,
        is_own=True,
    ),
    Option(
        "torchrun-defaults",
        "torchrun's defaults where others differ: no delay of restarts, an exit barrier of 300 s"
        " (on for aio-torchrun)",
        is_own=True,
    ),
    Option("quiet", "print errors and the failure report only", has_variable=False, is_own=True),
    Option(
        "verbose",
        "also print each worker's start and exit, rounds and nodes",
        has_variable=False,
        is_own=True,
    ),
    Option(
        "loop",
        "event loop of the launcher: 'asyncio', 'uvloop' or 'auto' (default 'auto', which takes"
        " asyncio)",
        metavar="NAME",
        has_variable=False,
        is_own=True,
    ),
)

USE_ENV: Final = Option(
    "use-env",
    "pass the local rank as LOCAL_RANK only, not as the argument --local-rank",
    has_variable=False,
)
"""The further option of `python -m elastic_aio.launch`."""

RUN_EPILOG: Final = (
    "Options have torchrun's names, with dashes or underscores. torchrun's options also have"
    " PET_* variables as defaults, such as PET_NPROC_PER_NODE=4. Keys of --rdzv-conf, times in"
    " whole seconds, with defaults:"
    " join_timeout (600), replace_timeout (join_timeout; 30 in Slurm and its like),"
    " last_call_timeout (30), scale_up_delay (last_call_timeout), scale_up (delay; or"
    " checkpoint), scale_up_limit (600), close_timeout (30), heartbeat_timeout (30),"
    " read_timeout (60; both 900 with 'static'), timeout (900; 'static' only),"
    " store_grace (leaves time for the stop plan; no limit with 'etcd' and 'redis'),"
    " any_program (false), keep_workers (true), overlap (false), reuse (false), is_host (detected),"
    " token_file (path of a file with the store's token; no token), tls_cert,"
    " tls_key and tls_ca (PEM files; no TLS), tls_client_auth (true), tls_server_name (host of the"
    " endpoint); with 'etcd' and 'redis': user, password_file, key_prefix (/rendezvous),"
    " retention (86400); with 'redis': sentinel (name of the master that the endpoints know)."
)
