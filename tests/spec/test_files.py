"""Jobs that are described by files: `jobs.toml` and a Procfile."""

from __future__ import annotations

import io
import os
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic_aio.errors import SpecError
from elastic_aio.spec.fields import part_of, spec_fields
from elastic_aio.spec.files import spec_from_procfile, spec_from_toml, variables_of
from elastic_aio.spec.group import GroupSpec
from elastic_aio.spec.job import Command, LaunchSpec, Module, Script
from elastic_aio.spec.logs import LogSpec
from elastic_aio.spec.restart import Backoff, RestartPolicy, RestartWindow
from elastic_aio.spec.stop import StopPlan

JOBS = """
ends_with = "trainer"
[children.server]
command = ["python", "serve.py"]
restart = "always"
ready = { http = "http://127.0.0.1:8000/health", period = 1.0 }
[children.trainer]
script = "train.py"
nproc_per_node = 4
max_restarts = 3
after = ["server"]
[children.sidecar]
command = "uploader --to 'a b'"
essential = false
"""


def test_a_file_with_three_programs() -> None:
    group = spec_from_toml(JOBS, "/srv/job")
    assert isinstance(group, GroupSpec)
    assert group == GroupSpec(
        {
            "server": LaunchSpec(
                ["python", "serve.py"],
                restart="always",
                ready={"http": "http://127.0.0.1:8000/health", "period": 1.0},
                cwd="/srv/job",
            ),
            "trainer": LaunchSpec("train.py", nproc_per_node=4, max_restarts=3, cwd="/srv/job"),
            "sidecar": LaunchSpec(["uploader", "--to", "a b"], cwd="/srv/job"),
        },
        after={"trainer": ["server"]},
        essential=["server", "trainer"],
        ends_with="trainer",
    )


def leaf(text: str) -> LaunchSpec:
    spec = spec_from_toml(text)
    assert isinstance(spec, LaunchSpec)
    return spec


def test_a_file_of_one_job() -> None:
    assert leaf('module = "a.b"\nargs = ["x", 1]') == LaunchSpec(Module("a.b"), args=["x", 1])
    assert leaf('script = "a"').entrypoint == Script("a")
    assert leaf('command = "a b"').entrypoint == Command(("a", "b"))


def test_parts_are_tables() -> None:
    spec = leaf("""
        script = "x"
        max_restarts = 5
        stop = 3
        env = { NUMBER = 1, TEXT = "a" }
        [restart]
        scope = "worker"
        window = { count = 2, seconds = 60 }
        backoff = { initial = 1, cap = 5 }
        node_losses = { count = 1, backoff = { initial = 0.5 } }
        [liveness]
        heartbeat_timeout = 5
        [logs]
        tee = 3
    """)
    assert spec.restart.window == RestartWindow(2, 60)
    assert spec.restart.backoff == Backoff(initial=1, cap=5)
    assert spec.restart.node_losses is not None
    assert spec.restart.node_losses.backoff.initial == 0.5
    assert spec.stop == StopPlan.within(3)
    assert spec.env == {"NUMBER": "1", "TEXT": "a"}
    assert spec.liveness.heartbeat_timeout == 5
    assert (
        leaf('script = "x"\nmax_restarts = 1\n[restart]\nbackoff = false').restart.backoff is None
    )


def test_a_directory_is_relative_to_the_file() -> None:
    for cwd, found in {"sub": "/srv/sub", "/abs": "/abs"}.items():
        assert spec_from_toml(f'script = "x"\ncwd = "{cwd}"', "/srv").cwd == found  # type: ignore[union-attr]


def test_groups_of_groups_and_replicas() -> None:
    group = spec_from_toml(
        """
        strategy = "rest_for_one"
        [children.serving]
        replicas = 2
        script = "serve"
        [children.train]
        after = ["serving"]
        restart = "always"
        essential = ["a"]
        [children.train.after]
        [children.train.children.a]
        script = "a"
        [children.train.children.b]
        script = "b"
    """.replace('        after = ["serving"]\n', "")
    )
    assert isinstance(group, GroupSpec)
    assert group.children["serving"] == GroupSpec.replicas(LaunchSpec("serve"), 2)
    train = group.children["train"]
    assert isinstance(train, GroupSpec)
    assert (train.restart, train.essential) == ("always", ("a",))
    assert [path for path, _ in group.leaves()] == ["serving/0", "serving/1", "train/a", "train/b"]


REFUSED: list[tuple[str, str]] = [
    ("a =", "the file: must be TOML: Invalid value (at end of document) (got 'a =')"),
    ("", "the file: must have one of script, module and command, or children (got [])"),
    ('scrpt = "x"', "scrpt: is no field; did you mean script? (got 'x')"),
    (
        'script = "x"\nends_with = "b"',
        "ends_with: is no field; did you mean a group, which has [children.NAME]? (got 'b')",
    ),
    (
        'script = "x"\nrestart_scope = "worker"',
        "restart_scope: is no field; did you mean restart = { scope = ... }? (got 'worker')",
    ),
    (
        'script = "x"\nshutdown_timeout = 3',
        "shutdown_timeout: is no field; did you mean stop = SECONDS? (got 3)",
    ),
    (
        'script = "x"\nstop = { within = 3 }',
        "stop.within: is no field; did you mean stop = SECONDS? (got 3)",
    ),
    (
        'script = "x"\nenvironment = {}',
        "environment: is no field; did you mean env? (got {})",
    ),
    (
        'script = "x"\nafter = ["b"]',
        "after: is no field; did you mean a group, which has [children.NAME]? (got ['b'])",
    ),
    ('script = "x"\nentrypoint = "y"', "entrypoint: is no field (got 'y')"),
    ("script = 5", "script: must be text (got 5)"),
    ("command = [5]", "command: must be a list of arguments, or a text (got [5])"),
    ("children = 1", "children: must be a table (got 1)"),
    ("[children]\na = 1", "children.a: must be a table (got 1)"),
    (
        '[children.a]\nscript = "x"\ncommand = "y"',
        "children.a: must have one of script, module and command, or children"
        " (got ['script', 'command'])",
    ),
    (
        '[children.a]\nscript = "x"\nnproc_per_node = 0',
        "children.a.nproc_per_node: must be a number from 1 to 65536, 'cpu', 'gpu', 'xpu' or"
        " 'auto' (got 0)",
    ),
    (
        '[children.a]\nscript = "x"\nrestart = { scop = "worker" }',
        "children.a.restart.scop: is no field; did you mean scope? (got 'worker')",
    ),
    (
        '[children.a]\nscript = "x"\nmax_restarts = 1\nrestart = { backoff = { initial = -1 } }',
        "children.a.restart.backoff.initial: must be a number of at least 0 (got -1)",
    ),
    (
        '[children.a]\nscript = "x"\nrestart = { backoff = { inital = 1 } }',
        "children.a.restart.backoff.inital: is no field; did you mean initial? (got 1)",
    ),
    (
        '[children.a]\nscript = "x"\nrestart = { window = { count = 1 } }',
        "children.a.restart.window: must be complete: Missing required argument 'seconds'"
        " (got 'a table')",
    ),
    ('[children.a]\nscript = "x"\nafter = ["b"]', "after['a']: must name a child (got 'b')"),
    (
        '[children.a]\nscript = "x"\nreplicas = 0',
        "children.a.replicas: must be a whole number of at least 1 (got 0)",
    ),
    (
        '[children.a]\nscript = "x"\nessential = 1',
        "children.a.essential: must be true or false (got 1)",
    ),
    (
        'essential = ["a"]\n[children.a]\nscript = "x"\nessential = false',
        "essential: must be given once, not for a too (got ['a'])",
    ),
    ("after = 3\n[children.a]\nscript = 'x'", "after: must be a table (got 3)"),
    ("after = ['a']\n[children.a]\nscript = 'x'", "after: must be a table (got ['a'])"),
    ('command = "a \'b"', 'command: must be a command line: No closing quotation (got "a \'b")'),
    ("[children.'']\nscript = 'x'", "children: must have names (got '')"),
    (
        "[children.a]\nscript = 'x'\nreplicas = 100000000",
        "children.a.replicas: must be at most 65536 (got 100000000)",
    ),
    (
        '[children.g.children.b]\nscript = "x"\nnnodes = 0',
        "children.g.children.b.nnodes: must be N or MIN:MAX with 1 <= MIN <= MAX (got 0)",
    ),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=lambda value: repr(value)[:40])
def test_a_mistake_is_one_line_with_its_table(text: str, message: str) -> None:
    with pytest.raises(SpecError) as raised:
        spec_from_toml(text)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = " + "9" * 5000, "must be TOML: Exceeds the limit"),
        ("x = " + "[" * 3000, "must have groups of at most 32 levels"),
        (f"[children.a{'.children.a' * 32}]\nscript = 'x'", "must have at most 32 levels"),
        (f"[children.a{'.children.a' * 900}]\nscript = 'x'", "must have groups of at most 32"),
    ],
    ids=["digits", "array", "groups", "many groups"],
)
def test_what_is_too_large_is_refused(text: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        spec_from_toml(text)


def test_a_directory_has_to_be_text() -> None:
    with pytest.raises(SpecError, match=r"^cwd: must be"):
        spec_from_toml("script = 'x'\ncwd = 3", "/srv")


def test_every_part_of_a_job_can_be_a_table() -> None:
    """An unknown key of each is refused by its name."""
    parts = [name for name, each in spec_fields(LaunchSpec).items() if part_of(each) is not None]
    assert len(parts) >= 6
    for name in parts:
        with pytest.raises(SpecError, match=rf"^{name}\.unheard: is no field"):
            spec_from_toml(f'script = "x"\n[{name}]\nunheard = 1')


PROCFILE = """
# the site
web: serve --port $PORT
worker-1: work; exit 3
"""


def test_a_procfile() -> None:
    group = spec_from_procfile(PROCFILE, "DEBUG=1", "/srv")
    web, worker = (group.children[name] for name in ("web", "worker-1"))
    assert web == LaunchSpec(
        ["/bin/sh", "-c", "serve --port $PORT"],
        env={"DEBUG": "1"},
        worker_env=[{"PORT": "5000", "PS": "web.1"}],
        cwd="/srv",
    )
    assert isinstance(worker, LaunchSpec)
    assert worker.worker_env[0]["PORT"] == "5100"
    assert group.ends_with == ("web", "worker-1")


def test_several_processes_of_a_type_have_the_next_ports() -> None:
    group = spec_from_procfile(PROCFILE, "PORT=8000", concurrency={"web": 3, "worker-1": 0})
    (web,) = group.children.values()
    assert isinstance(web, LaunchSpec)
    assert (web.nproc_per_node, web.restart) == (3, RestartPolicy(scope="worker"))
    assert [env["PORT"] for env in web.worker_env] == ["8000", "8001", "8002"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["web serve"], "line 1: must be NAME: COMMAND (got 'web serve')"),
        (["a: b\n\na: c"], "line 3: must be a name that no other line has (got 'a')"),
        ([""], "children: must name a child (got {})"),
        (["a: b", "PORT=x"], "PORT: must be a port (got 'x')"),
        (["a: b", "PORT=65536"], "PORT: must be a port (got '65536')"),
        (["a: b", "", "", {"a": 10**8}], "concurrency: must be at most 65536 (got 100000000)"),
        (["a: b\nc: d", "PORT=65500"], "PORT: must be a port (got '65600')"),
        (["a: b", "", "", {}, {"PORT": "tcp://x"}], "PORT: must be a port (got 'tcp://x')"),
        (["a: b", "x"], ".env, line 1: must be NAME=VALUE (got 'x')"),
        (
            ["a: b", "\n#\nA='1\n2'\nB='1' 2"],
            """.env, line 5: must be NAME=VALUE (got "B='1' 2")""",
        ),
        (["a: b", 'A="1\n2'], ".env, line 1: must be NAME=VALUE (got 'A=\"1')"),
        (
            ["web: b", "", "", {"wb": 2}],
            "concurrency: must name a process type; did you mean web? (got 'wb')",
        ),
    ],
)
def test_what_a_procfile_refuses(args: Any, message: str) -> None:
    with pytest.raises(SpecError) as raised:
        spec_from_procfile(*args)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("env", "inherited", "port"),
    [
        ("", {}, "5000"),
        ("", {"PORT": "3000"}, "3000"),
        ("", {"PORT": ""}, "5000"),
        ("PORT=8000", {"PORT": "3000"}, "8000"),
        ("PORT=", {"PORT": "3000"}, "3000"),
    ],
)
def test_the_first_port(env: str, inherited: dict[str, str], port: str) -> None:
    """The one of `.env`, of the shell or platform, or 5000."""
    group = spec_from_procfile("web: a\nworker: b", env, inherited=inherited)
    ports = [one.worker_env[0]["PORT"] for one in group.children.values()]  # type: ignore[union-attr]
    assert ports == [port, str(int(port) + 100)]


def test_a_line_of_a_procfile_ends_with_a_newline() -> None:
    """Other separators of Unicode are text of the command."""
    group = spec_from_procfile("a: b \x85 c\u2028d\x0ce\r\nf: g\r\n")
    commands = [one.entrypoint.argv[2] for one in group.children.values()]  # type: ignore[union-attr]
    assert commands == ["b \x85 c\u2028d\x0ce", "g"]


@pytest.mark.parametrize("where", ["", "[children.a]\n"])
def test_logs_of_a_file_are_joined(where: str) -> None:
    """Of a job and of a child, unless the file says `split`."""
    for text, streams in ("tee = 3", "joined"), ('streams = "split"', "split"):
        spec = spec_from_toml(f'{where}command = "x"\nlogs = {{ {text} }}\n')
        leaf = spec.children["a"] if isinstance(spec, GroupSpec) else spec
        assert leaf.logs.streams == streams
        assert leaf.logs != LogSpec()  # as which it would be that of the group


VARIABLES = [
    ("A=1 2\n#B=1\n\nexport C = x\n", {"A": "1 2", "C": "x"}),
    ("A=x # note\nB=\"x\" # note\nC='x' # note", {"A": "x", "B": "x", "C": "x"}),
    ("A=a#b\nB=\"a # b\"\nC='a # b'#note", {"A": "a#b", "B": "a # b", "C": "a # b"}),
    (
        "A=\nB= y\nC= # note\nD=#x\nE=\"\"\nF=''",
        {"A": "", "B": "y", "C": "", "D": "#x", "E": "", "F": ""},
    ),
    ("A=\"one\ntwo\"\nB='one\n\ntwo'\nC=x", {"A": "one\ntwo", "B": "one\n\ntwo", "C": "x"}),
    (
        r'A="a\n\"b\" \x"' "\n" r"B='$x\n \' \\'" "\n" r"C=\n",
        {"A": 'a\n"b" \\x', "B": "$x\\n ' \\", "C": "\\n"},
    ),
    (
        "A=1\nA=${A}2\nB=\"${A}${NO}\"\nC='${NO:-a b}'\nD=$A",
        {"A": "12", "B": "12", "C": "a b", "D": "$A"},
    ),
    ("A=x\x85y\u2028z\r\nB=1\r\n", {"A": "x\x85y\u2028z", "B": "1"}),
    ("A.b-c=1\n'D e'=2\nexport=3", {"A.b-c": "1", "D e": "2", "export": "3"}),
    ("A=${SHELL_HAS} ${A:-x}", {"A": "it x"}),
]


@pytest.mark.parametrize(("text", "variables"), VARIABLES)
def test_a_file_of_variables(text: str, variables: dict[str, str]) -> None:
    """Quotes, notes, escapes, values of several lines, and references."""
    assert variables_of(text, {"SHELL_HAS": "it"}) == variables


PARTS = [*"AB=# \t'\"\\\n\r", "\\n", "\\'", "export ", "a b", "${A}", "${HOME}", "${B:-d}", "\x85"]


@given(st.lists(st.sampled_from(PARTS), max_size=16).map("".join))
@example("A=x # note\nB='1\n2'\n")
def test_a_file_of_variables_is_read_as_by_python_dotenv(text: str) -> None:
    """Or it is refused, where python-dotenv leaves out a line."""
    parser, main = pytest.importorskip("dotenv.parser"), pytest.importorskip("dotenv.main")
    bindings = [*parser.parse_stream(io.StringIO(text, newline=""))]
    if any(one.error or (one.key and one.value is None) for one in bindings):
        with pytest.raises(SpecError):
            variables_of(text, {})
    elif "export #" not in text.replace("\t", " "):  # which it takes for a note
        pairs = [(one.key, one.value) for one in bindings if one.key]
        assert variables_of(text, os.environ) == main.resolve_variables(pairs, override=True)
