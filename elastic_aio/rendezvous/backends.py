"""Rendezvous backends by name: built-in ones, and plug-ins by entry point.

A plug-in is a callable with the arguments of `make_rendezvous` that returns a `Rendezvous`; its
settings are in `spec.rendezvous.conf`.  Its entry-point group is `elastic_aio.rendezvous`::

    [project.entry-points."elastic_aio.rendezvous"]
    by_mail = "my_package.mail:make_rendezvous"
"""

from __future__ import annotations

from typing import Any, Final

from elastic_aio.errors import SpecError
from elastic_aio.rendezvous.base import AgentPort, NodeInfo, Rendezvous
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.rendezvous import ENGINES

ENTRY_POINTS: Final = "elastic_aio.rendezvous"

_FIELD: Final = "rendezvous.backend"

_BUILT_IN: Final = ("c10d", "static", "tcp", *ENGINES)


def make_rendezvous(spec: LaunchSpec, node: NodeInfo, run_id: str, agent: AgentPort) -> Rendezvous:
    """Return the rendezvous of the backend that `spec` names, not yet open.

    Raises:
        SpecError: there is no such backend, it cannot be loaded, or it returns another thing.
    """
    name = spec.rendezvous.backend
    rendezvous = _factory(name)(spec, node, run_id, agent)
    if not isinstance(rendezvous, Rendezvous):
        kind = type(rendezvous).__name__
        raise SpecError(_FIELD, name, f"must name a plug-in that returns a Rendezvous, not {kind}")
    return rendezvous


def is_known_backend(name: str) -> bool:
    """Return whether there is a backend of this name, without loading it."""
    return name in _BUILT_IN or bool(_plug_ins().select(name=name))


def known_backends() -> tuple[str, ...]:
    """Return the names of all backends, sorted."""
    return tuple(sorted({*_BUILT_IN, *_plug_ins().names}))


def _plug_ins() -> Any:
    from importlib.metadata import entry_points  # 10 ms: imported for plug-ins only

    return entry_points(group=ENTRY_POINTS)


def _factory(name: str) -> Any:
    if name in _BUILT_IN:
        from elastic_aio.rendezvous.dynamic import DynamicRendezvous  # on first use

        return DynamicRendezvous
    for entry in _plug_ins().select(name=name):
        try:
            return entry.load()
        except Exception as error:
            problem = f"the plug-in cannot be loaded: {type(error).__name__}: {error}"
            raise SpecError(_FIELD, name, problem) from error
    raise SpecError(_FIELD, name, f"must be one of {', '.join(known_backends())}")
