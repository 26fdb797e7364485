"""Backends by name, plug-ins among them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from elastic_aio.errors import SpecError
from elastic_aio.rendezvous.base import NodeCard, Rendezvous
from elastic_aio.rendezvous.registry import is_known_backend, known_backends, make_rendezvous
from elastic_aio.rendezvousspec import RendezvousSpec
from elastic_aio.spec import LaunchSpec
from elastic_aio.torchrun import UsageError, parse_run

CARD = NodeCard(name="here", pid=1, nproc=2, role="default")

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
    """A listener that is never told anything."""

    def instructed(self, instruction: object) -> None:
        raise AssertionError(instruction)

    told = decide = reserve_master = instructed


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
    listener: Any = Silent()
    return make_rendezvous(spec, CARD, "run", listener)


@pytest.mark.usefixtures("_plug_in")
def test_a_plug_in_is_called_with_everything() -> None:
    """It gets the job, the node, the run and the listener, and what it makes is returned."""
    made: Any = make("mail")
    spec, card, run_id, listener = made.arguments
    assert spec.rendezvous.backend == "mail"
    assert (card, run_id) == (CARD, "run")
    assert isinstance(listener, Silent)


@pytest.mark.usefixtures("_plug_in")
@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("nothing", "must be a plug-in that makes a Rendezvous (and no str), not 'nothing'"),
        ("gone", "must be a plug-in that can be loaded (AttributeError: module 'by_mail_plug_in'"),
        ("missing", "must be a plug-in that can be loaded (ModuleNotFoundError: No module named"),
        ("post", "must be one of c10d, gone, mail, missing, nothing, refuse, static, tcp, not"),
    ],
)
def test_what_is_no_backend(backend: str, message: str) -> None:
    """One line with the reason."""
    with pytest.raises(SpecError) as caught:
        make(backend)
    assert str(caught.value).startswith(f"rendezvous.backend: {message}")


@pytest.mark.usefixtures("_plug_in")
def test_a_plug_in_that_fails_says_so_itself() -> None:
    """What it raises is not ours to hide."""
    with pytest.raises(OSError, match="no stamps"):
        make("refuse")


@pytest.mark.usefixtures("_plug_in")
def test_the_command_line_knows_plug_ins() -> None:
    """Their names are accepted, with settings of their own; others are refused with a list."""
    assert is_known_backend("mail")
    assert not is_known_backend("post")
    assert {"mail", "c10d", "static", "tcp"} <= set(known_backends())
    request = parse_run(["--nnodes=2", "--rdzv-backend=mail", "--rdzv-conf=box=7", "x"], {})
    assert request.spec.rendezvous.conf == {"box": "7"}
    with pytest.raises(UsageError, match=r"^--rdzv-backend: must be one of c10d, .*mail.*'post'"):
        parse_run(["--nnodes=2", "--rdzv-backend=post", "x"], {})


@pytest.mark.parametrize(
    ("backend", "module", "function"),
    [
        ("c10d", "dynamic", "make_dynamic"),
        ("tcp", "dynamic", "make_dynamic"),
        ("static", "static", "make_static"),
    ],
)
def test_our_own_are_imported_when_they_are_asked_for(
    backend: str, module: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each name has its module and its function there."""

    class Made(Rendezvous):
        async def open(self) -> None: ...

        def report(self, report: object) -> None: ...

        async def leave(self, why: str) -> None: ...

    home = ModuleType(module)
    setattr(home, function, lambda *arguments: Made())
    monkeypatch.setitem(sys.modules, f"elastic_aio.rendezvous.{module}", home)
    assert isinstance(make(backend), Made)
