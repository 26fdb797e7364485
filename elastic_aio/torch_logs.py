"""torch's `LogsSpecs`, of plug-ins and of callers, as a `LogLayout`.

The plug-ins of torchrun's entry point group derive from torch's class.  So torch can be imported
where they are used, and is found here through them only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final

from elastic_aio.spec.logs import LogDestinations, LogLayout, LogLayoutContext, LogSpec, StdMap

_API: Final = "torch.distributed.elastic.multiprocessing.api"


class TorchLogLayout(LogLayout):
    """The plan of a torch `LogsSpecs`, which makes its directories itself.

    torch plans all workers of an attempt at once; the plan is made for the first of them.
    """

    def __init__(self, specs: Any, variables: Mapping[str, str] = {}, **settings: Any) -> None:
        """Use a `LogsSpecs`, with the settings of a `LogSpec`.

        It gets `variables` beside the variables of each worker.
        """
        super().__init__(**settings)
        # A spec is frozen; this is not part of its value.
        object.__setattr__(self, "_planner", _Planner(specs, variables))

    _planner: _Planner

    @classmethod
    def of_plugin(cls, specs_class: Callable[..., Any], **settings: Any) -> TorchLogLayout:
        """Create the object of a plug-in with the settings of a `LogSpec`."""
        spec = LogSpec(**settings)
        std = import_module(_API).Std
        specs = specs_class(
            log_dir=spec.log_dir,
            redirects=_for_torch(spec.redirects, std),
            tee=_for_torch(spec.tee, std),
            local_ranks_filter=set(spec.local_ranks_filter) or None,
        )
        return cls(specs, **settings)

    def check_with(self, nproc: int) -> None:
        """Check the ranks as a `LogSpec` does, and note the number of workers."""
        super().check_with(nproc)
        self._planner.nproc = nproc

    def plan(self, worker: LogLayoutContext) -> LogDestinations:
        """Return where torch's plan puts the streams of a worker."""
        return destinations_of(self._planner.plan(worker), worker.local_rank)


class _Planner:
    """Calls `reify` once for each attempt."""

    def __init__(self, specs: Any, variables: Mapping[str, str]) -> None:
        self.nproc = 1
        self._specs = specs
        self._variables = variables
        self._attempt = -1
        self._destinations: Any = None

    def plan(self, worker: LogLayoutContext) -> Any:
        if worker.attempt != self._attempt:
            run = os.path.basename(os.path.dirname(os.path.dirname(worker.directory or "")))
            common = {
                "TORCHELASTIC_RUN_ID": run.rpartition("_")[0] or "none",
                "TORCHELASTIC_RESTART_COUNT": str(worker.attempt),
                "LOCAL_WORLD_SIZE": str(self.nproc),
                **self._variables,
            }
            envs: Mapping[int, dict[str, str]] = {
                rank: {**common, "LOCAL_RANK": str(rank)} for rank in range(self.nproc)
            }
            self._destinations = self._specs.reify(envs)
            self._attempt = worker.attempt
        return self._destinations


def destinations_of(dest: Any, rank: int, prefix: str | None = None) -> LogDestinations:
    """Return where a torch `LogsDest`, the result of `reify`, puts the streams of a worker.

    `rank` is the local rank of the worker; `prefix` None takes the prefix of the `LogSpec`.
    """
    paths = {"stdout": dest.stdouts.get(rank, ""), "stderr": dest.stderrs.get(rank, "")}
    tee = {"stdout": dest.tee_stdouts.get(rank), "stderr": dest.tee_stderrs.get(rank)}
    nowhere = (None, "", os.devnull)
    error_file = dest.error_files.get(rank, "")
    return LogDestinations(
        stdout=paths["stdout"] or None,
        stderr=paths["stderr"] or None,
        error_file="" if error_file == os.devnull else error_file,
        shown=frozenset(name for name in paths if paths[name] and tee[name] not in nowhere),
        prefix=prefix,
    )


def _for_torch(streams: StdMap, std: Callable[[int], Any]) -> Any:
    if not streams.by_rank:
        return std(int(streams.everyone))
    return {rank: std(int(mask)) for rank, mask in streams.by_rank}
