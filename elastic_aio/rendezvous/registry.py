"""Backends by name: our own, and plug-ins of the entry-point group `elastic_aio.rendezvous`.

A plug-in is a callable with the arguments of `make_rendezvous` that returns a
`Rendezvous`; its settings are in `spec.rendezvous.conf`::

    [project.entry-points."elastic_aio.rendezvous"]
    by_mail = "my_package.mail:make_rendezvous"
"""

from __future__ import annotations

import importlib
from typing import Any, Final

from elastic_aio.errors import SpecError
from elastic_aio.rendezvous.base import Listener, NodeCard, Rendezvous
from elastic_aio.spec import LaunchSpec

__all__ = ["ENTRY_POINTS", "is_known_backend", "known_backends", "make_rendezvous"]

ENTRY_POINTS: Final = "elastic_aio.rendezvous"

_FIELD: Final = "rendezvous.backend"

_OUR_OWN: Final = {
    "c10d": ("dynamic", "make_dynamic"),
    "static": ("static", "make_static"),
    "tcp": ("dynamic", "make_dynamic"),
}
"""Module and function of each; imported when it is needed."""


def make_rendezvous(
    spec: LaunchSpec, card: NodeCard, run_id: str, listener: Listener
) -> Rendezvous:
    """Return this node's part in the rendezvous that `spec` asks for; it is not open yet.

    Args:
        spec: the job; `spec.rendezvous.backend` names the backend.
        card: who this node is.
        run_id: the run, the same on all nodes.
        listener: whom it instructs.

    Raises:
        SpecError: there is no such backend, or it cannot be loaded, or it makes
            something else.
    """
    name = spec.rendezvous.backend
    made = _maker(name)(spec, card, run_id, listener)
    if not isinstance(made, Rendezvous):
        kind = type(made).__name__
        raise SpecError(_FIELD, name, f"must be a plug-in that makes a Rendezvous (and no {kind})")
    return made


def is_known_backend(name: str) -> bool:
    """Tell whether there is a backend of that name; it is not loaded."""
    return name in _OUR_OWN or bool(_plug_ins().select(name=name))


def known_backends() -> tuple[str, ...]:
    """Return the names of all backends, sorted."""
    return tuple(sorted({*_OUR_OWN, *_plug_ins().names}))


def _plug_ins() -> Any:
    from importlib.metadata import entry_points  # 10 ms, for those who have plug-ins

    return entry_points(group=ENTRY_POINTS)


def _maker(name: str) -> Any:
    if name in _OUR_OWN:
        module, function = _OUR_OWN[name]
        return getattr(importlib.import_module(f"elastic_aio.rendezvous.{module}"), function)
    for entry in _plug_ins().select(name=name):
        try:
            return entry.load()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            accepted = f"must be a plug-in that can be loaded ({why})"
            raise SpecError(_FIELD, name, accepted) from error
    raise SpecError(_FIELD, name, f"must be one of {', '.join(known_backends())}")
