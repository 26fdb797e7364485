"""What each spec refuses: one line with the field, the problem and the value."""

from __future__ import annotations

from typing import Any, cast

import pytest

from elastic_aio.errors import SpecError
from elastic_aio.spec.fields import SpecValue
from elastic_aio.spec.job import Command, Function, LaunchSpec, Module, Script
from elastic_aio.spec.logs import LogSpec
from elastic_aio.spec.rendezvous import EngineSpec, RendezvousSpec
from elastic_aio.spec.restart import Backoff, NodeLosses, RestartPolicy
from elastic_aio.spec.stop import SignalSpec, StopPlan
from elastic_aio.spec.tls import TlsSpec

INF, NAN = float("inf"), float("nan")
WHOLE = "must be a whole number of at least"
POSITIVE = "must be a number above 0"
NUMBER = "must be a number of at least"
CODES = "must hold exit codes from 1 to 255"
PAIRS = "must be a list of pairs of a signal and a grace"
CAUGHT = "must be a signal that can be handled"
TEXT = "must be text without NUL"
DOTTED = "must be the dotted name of a module"
NPROC = "must be a number from 1 to 65536"
NNODES = "must be N or MIN:MAX with 1 <= MIN <= MAX"
WHERE = "must be HOST:PORT, [IPV6]:PORT or HOST"
PORT = "must have a port from 0 to 65535"
ADDRESS = "must be the name or address of a host, without a port"
ENTRYPOINT = "must be a script path, an argv list, a function, a Script, a Module or a Command"
EXHAUSTED = "cannot be exhausted, as"

ONE: dict[type[SpecValue], dict[str, list[tuple[Any, str]]]] = {
    LaunchSpec: {
        "entrypoint": [
            ("", "must be a path (got '')"),
            ("a\0b", "must be a path (got 'a\\x00b')"),
            (5, f"{ENTRYPOINT} (got 5)"),
            (None, f"{ENTRYPOINT} (got None)"),
            (b"x.py", f"{ENTRYPOINT} (got b'x.py')"),
            ([], "must start with a program (got [])"),
            ([""], "must start with a program (got [''])"),
            (["a", None], "must be text, a path or a number (got None)"),
            (["a", True], "must be text, a path or a number (got True)"),
            (["a", "\0"], f"{TEXT} (got '\\x00')"),
            (Module("a-b"), f"{DOTTED} (got 'a-b')"),
            (Module("a..b"), f"{DOTTED} (got 'a..b')"),
            (Module(""), f"{DOTTED} (got '')"),
            (Script(""), "must be a path (got '')"),
            (Command(()), "must start with a program (got [])"),
            (Function(cast("Any", 5)), "must be callable (got 5)"),
        ],
        "start_method": [("thread", "must be 'spawn', 'fork' or 'forkserver' (got 'thread')")],
        "preload": [(["json", "os"], "needs start method 'forkserver' (got 'json,os')")],
        "args": [
            ("abc", "must be a list (got 'abc')"),
            (5, "must be a list (got 5)"),
            ([object], "must be text, a path or a number (got"),
        ],
        "nproc_per_node": [(0, NPROC), (-2, NPROC), (True, NPROC), ("TPU v5", NPROC), (1.5, NPROC)],
        "nnodes": [
            (0, f"{NNODES} (got 0)"),
            ("2:1", f"{NNODES} (got '2:1')"),
            (True, "must be N or MIN:MAX"),
            ((True, 2), "must be N or MIN:MAX"),
        ],
        "max_restarts": [
            (-1, f"{WHOLE} 0 (got -1)"),
            (True, f"{WHOLE} 0 (got True)"),
            ("3", f"{WHOLE} 0 (got '3')"),
        ],
        "env": [
            ([("A", "b")], "must be a mapping of names to texts"),
            ({"A=": "b"}, "must hold names without '=' or NUL (got 'A=')"),
            ({"": "b"}, "must hold names without '=' or NUL (got '')"),
            ({1: "b"}, f"{TEXT} (got 1)"),
        ],
        "cwd": [("", "must be a path (got '')"), (5, "must be a path (got 5)")],
        "role": [(None, f"{TEXT} (got None)")],
        "logs": [({}, "must be a LogSpec (got {})")],
        "restart": [(3, "must be a RestartPolicy (got 3)")],
        "stop": [(3, "must be a StopPlan, such as StopPlan.within(10) (got 3)")],
        "rendezvous": [("c10d", "must be a RendezvousSpec (got 'c10d')")],
        "run_id": [
            ("", "must not be empty (got '')"),
            (5, f"{TEXT} (got 5)"),
            ("\ud800", r"must be text in UTF-8 (got '\ud800')"),
        ],
        "stdin": [("all", "must be 'auto', 'null' or 'rank0' (got 'all')")],
        "python": [("", "must be a path (got '')")],
        "event_history": [(0, f"{WHOLE} 1 (got 0)")],
    },
    LogSpec: {
        "log_dir": [("", "must be a path (got '')"), ("\ud800", r"must be a path (got '\ud800')")],
        "redirects": [("x", "must be a mask 0-3")],
        "tee": [(9, "must be a mask 0-3")],
        "local_ranks_filter": [("0", "must be a list (got '0')"), ([-1], f"{WHOLE} 0 (got -1)")],
        "prefix": [("a\nb", "must be a single line (got 'a\\nb')"), (5, f"{TEXT} (got 5)")],
        "on_full": [("drop", "must be 'fail' or 'console' (got 'drop')")],
    },
    RestartPolicy: {
        "window": [
            (3, "must be a pair (got 3)"),
            ((0, 5), f"{WHOLE} 1 (got 0)"),
            ((1.5, 5), f"{WHOLE} 1 (got 1.5)"),
            ((1, 0), f"{POSITIVE} (got 0)"),
        ],
        "restart_on": [
            (3, "must be a list (got 3)"),
            ([0], CODES),
            ([256], CODES),
            ([], "must name an exit code"),
        ],
        "never_on": [(["1"], CODES), ([True], CODES)],
        "backoff": [(5, "must be a Backoff (got 5)")],
        "healthy_after": [(0, f"{POSITIVE} (got 0)")],
        "decide": [(5, "must be callable (got 5)")],
        "exclude_for": [(0, f"{POSITIVE} (got 0)")],
        "max_attempts_without_progress": [(0, f"{WHOLE} 1 (got 0)")],
        "node_losses": [
            (5, "must be a NodeLosses, or None for no limit"),
            (NodeLosses(count=999_999_999), f"{EXHAUSTED} its delays take"),
        ],
    },
    StopPlan: {
        "steps": [
            ("SIGTERM", "must be a list (got 'SIGTERM')"),
            (5, "must be a list (got 5)"),
            (["SIGTERM"], f"{PAIRS} (got ['SIG"),
            (("SIGTERM", 3), f"{PAIRS} (got ('SIG"),
            ([("SIGTERM",)], f"{PAIRS} (got [('SI"),
            ([("SIGTERM", 1, 2)], "target must be one of leaders, all (got 2)"),
            ([("SIGTERM", 1, "al")], "target must be one of leaders, all (got 'al')"),
            ([("TERMS", 1)], "must be a signal number or a name such as 'SIGTERM'"),
            ([(0, 1)], "must be a signal number"),
            ([("SIGTERM", -1)], f"grace {NUMBER} 0 (got -1)"),
            ([("SIGTERM", "5")], f"grace {NUMBER} 0 (got '5')"),
            ([("SIGTERM", NAN)], f"grace {NUMBER} 0 (got nan)"),
            ([("SIGTERM", INF)], f"grace {NUMBER} 0 (got inf)"),
            ([("SIGTERM", True)], f"grace {NUMBER} 0 (got True)"),
            ([("SIGKILL", 1), ("SIGTERM", 1)], "no step may follow SIGKILL"),
        ],
        "reap_timeout": [(0, POSITIVE), (-1, POSITIVE), (NAN, POSITIVE), ("1", POSITIVE)],
    },
    SignalSpec: {
        "stop": [
            ("SIGTERM", "must be a list (got 'SIGTERM')"),
            (["SIGKILL"], CAUGHT),
            (["SIGSTOP"], CAUGHT),
        ],
        "forward": [
            (["SIGSEGV"], CAUGHT),
            (["SIGCHLD"], CAUGHT),
            (["SIGTSTP"], CAUGHT),
            (["USR3"], "must be a signal number or a name"),
            ([32], "must be a signal number or a name"),
        ],
        "unhandled": [("end", "must be 'skip' or 'kill' (got 'end')")],
    },
    RendezvousSpec: {
        "health_check": [
            (" ", "must be a command of the shell (got ' ')"),
            (["true"], f"{TEXT} (got ['true'])"),
        ],
        "health_check_timeout": [(0, f"{POSITIVE} (got 0)")],
        "engine": [("etcd", "must be a EngineSpec (got 'etcd')")],
        "backend": [
            ("", "must not be empty (got '')"),
            (" ", "must not be empty (got ' ')"),
            (None, f"{TEXT} (got None)"),
        ],
        "endpoint": [
            (None, f"{TEXT} (got None)"),
            ("", WHERE),
            ("a:1,", WHERE),
            (":80", WHERE),
            ("::1", WHERE),
            ("[::1", WHERE),
            ("0.0.0.0:80", "must be the address of one host"),
            ("[::]:80", "must be the address of one host"),
            ("[]:1", WHERE),
            ("[localhost]:1", WHERE),
            ("two words:1", WHERE),
            ("http://host:1", "must be HOST:PORT, "),
            ("user@host:1", WHERE),
            ("host\n:1", WHERE),
            ("a:b:1", PORT),
            ("a:", PORT),
            ("a:x", PORT),
            ("a:-1", PORT),
            ("a:65536", PORT),
            ("a:\u0663", PORT),
            ("a:1,b:65536", f"{PORT} (got 'b:65536')"),
        ],
        "is_host": [(1, "must be a bool (got 1)")],
        "node_rank": [(-1, f"{WHOLE} 0 (got -1)"), ("0", f"{WHOLE} 0"), (True, f"{WHOLE} 0")],
        "local_addr": [
            ("", ADDRESS),
            ("host:80", ADDRESS),
            ("[::1]", ADDRESS),
            ("a b", ADDRESS),
            (5, f"{TEXT} (got 5)"),
        ],
        "join_timeout": [(0, f"{POSITIVE} (got 0)"), (INF, POSITIVE)],
        "read_timeout": [(-1, f"{POSITIVE} (got -1)"), ("60", f"{POSITIVE} (got '60')")],
        "last_call_timeout": [(-1, f"{NUMBER} 0")],
        "scale_up": [("never", "must be 'delay' or 'checkpoint' (got 'never')")],
        "scale_up_limit": [(0, f"{POSITIVE} (got 0)")],
        "scale_up_delay": [(-1, f"{NUMBER} 0")],
        "close_timeout": [(NAN, f"{NUMBER} 0")],
        "exit_barrier_timeout": [(-0.1, "must be a number of at")],
        "heartbeat_timeout": [(1.9, f"{NUMBER} 2"), (True, f"{NUMBER} 2")],
        "store_grace": [(-1, f"{NUMBER} 0 (got -1)")],
        "keep_workers": [(None, "must be a bool (got None)")],
        "token": [
            ("15 characters..", "must have at least 16 characters"),
            (b"secret", "must be text or None (got 'bytes')"),
            ("\ud800" * 16, "must be text or None (got 'str')"),
        ],
        "conf": [
            ([("a", "b")], "must be a mapping of names to texts"),
            ({1: "b"}, f"{TEXT} (got 1)"),
        ],
    },
    EngineSpec: {
        "key_prefix": [(5, f"{TEXT} (got 5)")],
        "retention": [(59, f"{NUMBER} 60")],
        "user": [(5, f"{TEXT} (got 5)"), ("\udcff", "must be text in UTF-8 (got '1 characters')")],
    },
    TlsSpec: {"ca": [("", "must be a path (got '')"), (3, "must be a path (got 3)")]},
}
"""Values of single arguments, and how the problem with each begins."""

SEVERAL: list[tuple[type[SpecValue], dict[str, Any], str]] = [
    (
        LaunchSpec,
        {"preload": ["a-b"], "start_method": "forkserver"},
        f"preload: {DOTTED} (got 'a-b')",
    ),
    (
        LaunchSpec,
        {"preload": "json", "start_method": "forkserver"},
        "preload: must be a list (got 'json')",
    ),
    (LaunchSpec, {"entrypoint": len, "args": "ab"}, "args: must be a list (got 'ab')"),
    (LaunchSpec, {"env": {"A": 1}}, f"env['A']: {TEXT} (got 1)"),
    (LaunchSpec, {"env": {"A": "\0"}}, f"env['A']: {TEXT} (got '\\x00')"),
    (RestartPolicy, {"restart_on": [3], "never_on": [3, 4]}, "never_on: must not hold codes of"),
    (RestartPolicy, {"backoff": Backoff(initial=-1)}, f"backoff.initial: {NUMBER} 0"),
    (RestartPolicy, {"backoff": Backoff(factor=0.5)}, f"backoff.factor: {NUMBER} 1"),
    (RestartPolicy, {"backoff": Backoff(at_once=-1)}, f"backoff.at_once: {WHOLE} 0 (got -1)"),
    (RestartPolicy, {"backoff": Backoff(cap=0.5)}, "backoff.cap: must be at least initial=1"),
    (RestartPolicy, {"backoff": Backoff(cap=INF)}, f"backoff.cap: {NUMBER} 0 (got inf)"),
    (
        RestartPolicy,
        {"node_losses": NodeLosses(count=-1)},
        f"node_losses.count: {WHOLE} 0 (got -1)",
    ),
    (
        RestartPolicy,
        {"node_losses": NodeLosses(seconds=0)},
        f"node_losses.seconds: {POSITIVE} (got 0)",
    ),
    (
        RestartPolicy,
        {"node_losses": NodeLosses(backoff=Backoff(factor=0.5))},
        f"node_losses.backoff.factor: {NUMBER} 1",
    ),
    (
        RestartPolicy,
        {"window": (3, 6), "backoff": Backoff(jitter=False)},
        f"window: {EXHAUSTED} 3 delays of the back-off take 7 s",
    ),
    (
        SignalSpec,
        {"stop": ["SIGTERM"], "forward": ["SIGTERM"]},
        "forward: must not hold signals of signals.stop: SIGTERM (got ['SIGTERM'])",
    ),
    (RendezvousSpec, {"conf": {"a": 1}}, f"conf['a']: {TEXT} (got 1)"),
    (EngineSpec, {"user": "a", "password": 5}, f"password: {TEXT} (got 5)"),
    (EngineSpec, {"password": "secret"}, "user: is needed with engine.password (got None)"),
    (TlsSpec, {"cert": "/c"}, "key: is needed with a certificate (got None)"),
    (TlsSpec, {"key": "/k"}, "cert: is needed with a private key (got None)"),
    (TlsSpec, {"ca": "/a", "client_auth": "no"}, "client_auth: must be True, False or None"),
    (TlsSpec, {"cert": "/c", "key": "/k", "client_auth": True}, "ca: is needed to verify the"),
    (TlsSpec, {"ca": "/a", "server_name": ""}, "server_name: must not be empty (got '')"),
    (TlsSpec, {"ca": "/a", "server_name": 3}, "server_name: must be text"),
]
"""Arguments that do not fit together, and problems of a part of one, with the name of the field."""

CASES = SEVERAL + [
    (owner, {name: value}, f"{name}: {problem}")
    for owner, arguments in ONE.items()
    for name, cases in arguments.items()
    for value, problem in cases
]


@pytest.mark.parametrize(("owner", "arguments", "message"), CASES)
def test_an_argument_is_refused_in_one_line(
    owner: Any, arguments: dict[str, Any], message: str
) -> None:
    """The field with the name of its class in a spec, the problem and the value."""
    required = {"entrypoint": "x.py"} if owner is LaunchSpec else {}
    with pytest.raises(SpecError) as caught:
        owner(**required | arguments)
    text, expected = str(caught.value), f"{owner.__spec_prefix__}{message}"
    assert text == expected if expected.endswith(")") else text.startswith(expected)
    assert "\n" not in text
    assert isinstance(caught.value, ValueError)
