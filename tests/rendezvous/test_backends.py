"""Backends by name, with plug-ins."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from elastic_aio.cli.run_options import parse_run
from elastic_aio.errors import SpecError
from elastic_aio.rendezvous.backends import is_known_backend, known_backends, make_rendezvous
from elastic_aio.rendezvous.base import NodeInfo, Rendezvous
from elastic_aio.spec.checks import UsageError
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.rendezvous import RendezvousSpec

CARD = NodeInfo(name="here", pid=1, nproc=2, role="default")

PLUG_IN = '''
from elastic_aio.rendezvous.base import Rendezvous

class ByMail(Rendezvous):
    """Meets by mail."""

    def __init__(self, *arguments):
        self.arguments = arguments

    async def open(self):
        pass

    def report(self, report):
        pass

    async def leave(self, why):
        pass

def nothing(spec, card, run_id, listener):
    return "nothing"

def refuse(spec, card, run_id, listener):
    raise OSError("no stamps")
'''

ENTRY_POINTS = """
[elastic_aio.rendezvous]
mail = by_mail_plug_in:ByMail
nothing = by_mail_plug_in:nothing
refuse = by_mail_plug_in:refuse
gone = by_mail_plug_in:Gone
missing = no_such_module_here:Anything
"""


class Silent:
    """An agent that gets no instructions."""

    def on_instruction(self, instruction: object) -> None:
        raise AssertionError(instruction)

    published = decide = reserve_master_port = on_instruction


@pytest.fixture
def _plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed distribution with plug-ins."""
    (tmp_path / "by_mail_plug_in.py").write_text(PLUG_IN)
    info = tmp_path / "by_mail-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: by-mail\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("by_mail_plug_in", None)


def make(backend: str) -> Rendezvous:
    spec = LaunchSpec("x", nnodes=2, rendezvous=RendezvousSpec(backend=backend, node_rank=0))
    agent: Any = Silent()
    return make_rendezvous(spec, CARD, "run", agent)


@pytest.mark.usefixtures("_plug_in")
def test_a_plug_in_gets_all_arguments() -> None:
    made: Any = make("mail")
    spec, node, run_id, agent = made.arguments
    assert spec.rendezvous.backend == "mail"
    assert (node, run_id) == (CARD, "run")
    assert isinstance(agent, Silent)


@pytest.mark.usefixtures("_plug_in")
@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("nothing", "must name a plug-in that returns a Rendezvous, not str (got 'nothing')"),
        ("gone", "the plug-in cannot be loaded: AttributeError: module 'by_mail_plug_in'"),
        ("missing", "the plug-in cannot be loaded: ModuleNotFoundError: No module named"),
        (
            "post",
            "must be one of c10d, etcd, etcd-v2, gone, mail, missing, nothing, redis, refuse,"
            " static, tcp, valkey",
        ),
    ],
)
def test_invalid_backends(backend: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        make(backend)
    assert str(caught.value).startswith(f"rendezvous.backend: {message}")


@pytest.mark.usefixtures("_plug_in")
def test_errors_of_a_plug_in_are_raised() -> None:
    with pytest.raises(OSError, match="no stamps"):
        make("refuse")


@pytest.mark.usefixtures("_plug_in")
def test_the_command_line_accepts_plug_ins() -> None:
    assert is_known_backend("mail")
    assert not is_known_backend("post")
    assert {"mail", "c10d", "static", "tcp"} <= set(known_backends())
    request = parse_run(["--nnodes=2", "--rdzv-backend=mail", "--rdzv-conf=box=7", "x"], {})
    assert request.spec.rendezvous.conf == {"box": "7"}
    with pytest.raises(UsageError, match=r"^--rdzv-backend: must be one of: c10d, .*mail.*'post'"):
        parse_run(["--nnodes=2", "--rdzv-backend=post", "x"], {})


@pytest.mark.parametrize("backend", ["c10d", "tcp", "static"])
def test_built_in_backends_are_imported_on_first_use(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:

    class Made(Rendezvous):
        async def open(self) -> None: ...

        def report(self, report: object) -> None: ...

        async def leave(self, why: str) -> None: ...

    home: Any = ModuleType("dynamic")
    home.DynamicRendezvous = lambda *arguments: Made()
    monkeypatch.setitem(sys.modules, "elastic_aio.rendezvous.dynamic", home)
    assert isinstance(make(backend), Made)
