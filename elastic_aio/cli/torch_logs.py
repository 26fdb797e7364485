"""Plug-ins of torchrun's entry point group for log layouts, as a `LogLayout`.

They derive from torch's `LogsSpecs`, so torch can be imported where they are used; here it
is found through them only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final

from elastic_aio.spec.logs import LogDestinations, LogLayout, LogLayoutContext, StdMap

_API: Final = "torch.distributed.elastic.multiprocessing.api"


class TorchLogLayout(LogLayout):
    """The plan of a torch `LogsSpecs`, which makes its directories itself.

    torch plans all workers of an attempt at once; the plan is made for the first of them.
    """

    def __init__(self, specs_class: Callable[..., Any], **settings: Any) -> None:
        """Create the plug-in's object with the settings of a `LogSpec`."""
        super().__init__(**settings)
        std = import_module(_API).Std
        specs = specs_class(
            log_dir=self.log_dir,
            redirects=_for_torch(self.redirects, std),
            tee=_for_torch(self.tee, std),
            local_ranks_filter=set(self.local_ranks_filter) or None,
        )
        # A spec is frozen; this is not part of its value.
        object.__setattr__(self, "_planner", _Planner(specs))

    _planner: _Planner

    def check_with(self, nproc: int) -> None:
        """Check the ranks as a `LogSpec` does, and note the number of workers."""
        super().check_with(nproc)
        self._planner.nproc = nproc

    def plan(self, worker: LogLayoutContext) -> LogDestinations:
        """Return where torch's plan puts the streams of one worker."""
        destinations = self._planner.plan(worker)
        rank = worker.local_rank
        shown = {
            name
            for name, tee in (
                ("stdout", destinations.tee_stdouts),
                ("stderr", destinations.tee_stderrs),
            )
            if tee.get(rank, os.devnull) != os.devnull
        }
        error_file = destinations.error_files.get(rank, "")
        return LogDestinations(
            stdout=destinations.stdouts.get(rank) or None,
            stderr=destinations.stderrs.get(rank) or None,
            error_file="" if error_file == os.devnull else error_file,
            shown=frozenset(shown),
        )


class _Planner:
    """Calls `reify` once for each attempt."""

    def __init__(self, specs: Any) -> None:
        self.nproc = 1
        self._specs = specs
        self._attempt = -1
        self._destinations: Any = None

    def plan(self, worker: LogLayoutContext) -> Any:
        if worker.attempt != self._attempt:
            run = os.path.basename(os.path.dirname(os.path.dirname(worker.directory or "")))
            common = {
                "TORCHELASTIC_RUN_ID": run.rpartition("_")[0] or "none",
                "TORCHELASTIC_RESTART_COUNT": str(worker.attempt),
                "LOCAL_WORLD_SIZE": str(self.nproc),
            }
            envs: Mapping[int, dict[str, str]] = {
                rank: {**common, "LOCAL_RANK": str(rank)} for rank in range(self.nproc)
            }
            self._destinations = self._specs.reify(envs)
            self._attempt = worker.attempt
        return self._destinations


def _for_torch(streams: StdMap, std: Callable[[int], Any]) -> Any:
    if not streams.by_rank:
        return std(int(streams.everyone))
    return {rank: std(int(mask)) for rank, mask in streams.by_rank}
