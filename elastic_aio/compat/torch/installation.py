"""Put this package's names in the place of torch's, for programs that import torch's.

`install()` does so in this process; `aio-elastic exec PROGRAM` in a program and everything that it
starts.  accelerate, Lightning, torchrun and programs of one's own then run their jobs here.

A name is replaced as soon as the module of torch that defines it has been executed, so a module
that imports it later gets ours.  In modules that were imported before, every reference to a
replaced object is replaced.  This module does not import torch.

What stays torch's: private names, the stores, torch.multiprocessing, the etcd backends, torch's own
rendezvous backends, and the modules of events and metrics, which get our jobs' events and metrics.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, Final

__all__ = ["install", "uninstall"]

_OURS: Final = "elastic_aio.compat.torch"
_ELASTIC: Final = "torch.distributed.elastic"
_CONFIG: Final = "LaunchConfig elastic_launch launch_agent"
_AGENT_VALUES: Final = "RunResult Worker WorkerGroup WorkerSpec WorkerState"

NAMES: Final[Mapping[str, tuple[str, str]]] = {
    "torch.distributed.run": (
        "launch",
        """
        config_from_args determine_local_world_size get_args_parser get_rdzv_endpoint get_use_env
        main parse_args parse_min_max_nnodes run
        """,
    ),
    "torch.distributed.launcher.api": ("launch", f"{_CONFIG} _get_entrypoint_name"),
    f"{_ELASTIC}.agent.server": ("agent", f"ElasticAgent SimpleElasticAgent {_AGENT_VALUES}"),
    f"{_ELASTIC}.agent.server.local_elastic_agent": ("agent", "LocalElasticAgent"),
    f"{_ELASTIC}.multiprocessing": ("multiprocessing", "start_processes"),
    f"{_ELASTIC}.multiprocessing.api": (
        "multiprocessing",
        """
        DefaultLogsSpecs LogsDest LogsSpecs MultiprocessContext PContext RunProcsResult
        SignalException Std SubprocessContext to_map
        """,
    ),
    f"{_ELASTIC}.multiprocessing.errors": ("errors", "ChildFailedError ProcessFailure record"),
    f"{_ELASTIC}.multiprocessing.errors.error_handler": ("errors", "ErrorHandler"),
    f"{_ELASTIC}.timer.api": (
        "timers",
        "RequestQueue TimerClient TimerRequest TimerServer configure expires",
    ),
    f"{_ELASTIC}.timer.file_based_local_timer": (
        "timers",
        "FileTimerClient FileTimerRequest FileTimerServer",
    ),
    f"{_ELASTIC}.timer.local_timer": ("timers", "LocalTimerClient LocalTimerServer"),
    f"{_ELASTIC}.rendezvous": ("rendezvous", "rendezvous_handler_registry"),
    f"{_ELASTIC}.rendezvous.api": (
        "rendezvous",
        """
        RendezvousClosedError RendezvousConnectionError RendezvousError
        RendezvousGracefulExitError RendezvousHandler RendezvousHandlerRegistry RendezvousInfo
        RendezvousParameters RendezvousStateError RendezvousStoreInfo RendezvousTimeoutError
        """,
    ),
    f"{_ELASTIC}.rendezvous.registry": ("rendezvous", "get_rendezvous_handler"),
}
"""By module of torch: the module of ours below `elastic_aio.compat.torch`, and the names.

Two packages name what their modules define: the registry is replaced after torch has registered its
own backends, and the base class of agents after torch has derived its own from it.
"""


class _Installation:
    """The replaced names; the process has one instance."""

    def __init__(self) -> None:
        self.is_active = False
        self.has_control = False
        self.is_used = False
        self._finder = _Finder(self)
        self._originals: dict[tuple[str, str], Any] = {}
        self._references: list[tuple[ModuleType, str, Any, Any]] = []

    def begin(self) -> None:
        self.is_active = True
        sys.meta_path.insert(0, self._finder)
        for name in NAMES:
            if (module := sys.modules.get(name)) is not None:
                self.replace_names(module, [*sys.modules.values()])

    def end(self) -> None:
        self.is_active = False
        sys.meta_path.remove(self._finder)
        for module, name, ours, original in self._references:
            if vars(module).get(name) is ours:
                setattr(module, name, original)
        self._references.clear()
        # Imports of torch's own modules from each other.
        originals = {id(_ours_of(*key)): original for key, original in self._originals.items()}
        for module in _modules_of_torch():
            for name, value in [*vars(module).items()]:
                if id(value) in originals:
                    setattr(module, name, originals[id(value)])
        self._originals.clear()

    def replace_names(self, module: ModuleType, others: Iterable[ModuleType]) -> None:
        """Replace the names of a module of torch, and the references to them in others."""
        replaced: dict[int, Any] = {}
        for name in NAMES[module.__name__][1].split():
            if name in vars(module):
                original, ours = vars(module)[name], _ours_of(module.__name__, name)
                self._originals[module.__name__, name] = original
                replaced[id(original)] = ours
        for other in {id(other): other for other in (module, *others)}.values():
            names = getattr(other, "__dict__", None)
            if not isinstance(names, dict) or str(names.get("__name__")).startswith("elastic_aio"):
                continue
            for name, value in [*names.items()]:
                if (ours := replaced.get(id(value))) is not None:
                    self._references.append((other, name, ours, value))
                    names[name] = ours


def _ours_of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"{_OURS}.{NAMES[module][0]}"), name)


def _modules_of_torch() -> list[ModuleType]:
    return [
        module
        for name, module in [*sys.modules.items()]
        if name == "torch" or name.startswith("torch.distributed")
    ]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a module of torch as the other finders do, and watches its execution."""

    def __init__(self, installation: _Installation) -> None:
        self._installation = installation

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in NAMES:
            return None
        for finder in sys.meta_path:
            if finder is not self and (find := getattr(finder, "find_spec", None)) is not None:
                spec: importlib.machinery.ModuleSpec | None = find(fullname, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        spec.loader = _Loader(spec.loader, self._installation)
                    return spec
        return None


class _Loader(importlib.abc.Loader):
    """Executes a module with the loader that belongs to it, then replaces its names."""

    def __init__(self, loader: Any, installation: _Installation) -> None:
        self._loader = loader
        self._installation = installation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # `get_code` for runpy, `get_source` for tracebacks

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if self._installation.is_active:
            self._installation.replace_names(module, _modules_of_torch())


_installation = _Installation()


def has_control() -> bool:
    """Whether jobs have a control socket: `install` was called so."""
    return _installation.has_control


def note_use() -> None:
    """Remember that something was launched here in place of torch's launcher."""
    _installation.is_used = True


def report_unused(program: str) -> None:
    """Say in one line on stderr that nothing was launched here, at the end of a program."""
    if not _installation.is_used:
        _write_error(
            f"aio-elastic exec: {program} has launched nothing by torch's launcher in its own"
            " process: nothing was replaced there\n"
        )


def install(*, is_quiet: bool = False, control: bool = False) -> None:
    """Put this package's names in the place of torch's in this process.  Idempotent.

    Call it before the modules that use them are imported, where that is possible: classes that were
    derived from torch's before stay as they are.

    Args:
        is_quiet: do not say so in one line on stderr.
        control: let other processes of this user see and control the jobs (`aio-elastic ps`,
            `status`, `stop` and others).
    """
    if _installation.is_active:
        return
    _installation.has_control = control
    _installation.begin()
    if not is_quiet:
        _write_error("elastic_aio: replaces torch's launcher in this process\n")


def _write_error(line: str) -> None:
    try:
        os.write(2, os.fsencode(line))
    except OSError:
        pass  # closed, full or broken


def uninstall() -> None:
    """Put torch's names back.  Idempotent.

    Modules outside of torch that were imported since `install` keep what they have imported.
    """
    if _installation.is_active:
        _installation.end()
