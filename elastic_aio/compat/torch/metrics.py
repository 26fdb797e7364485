"""torch.distributed.elastic.metrics: handlers of metrics, and the metrics of a job.

`metric_listener()` is a listener for `launch` and `Agent`.  `install` leaves torch's own module as
it is; metrics of a job go to the handlers of both.
"""

from __future__ import annotations

import functools
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, overload

from elastic_aio.events import Event
from elastic_aio.torch_events import TorchMetrics

__all__ = [
    "ConsoleMetricHandler",
    "MetricData",
    "MetricHandler",
    "MetricStream",
    "MetricsConfig",
    "NullMetricHandler",
    "configure",
    "getStream",
    "get_elapsed_time_ms",
    "initialize_metrics",
    "metric_listener",
    "prof",
    "profile",
    "publish_metric",
    "put_metric",
]

_TORCHS = "torch.distributed.elastic.metrics.api"

Profiled = TypeVar("Profiled", bound=Callable[..., Any])


class MetricData(NamedTuple):
    """A value of a metric, at a time in Unix seconds."""

    timestamp: float
    group_name: str
    name: str
    value: int


class MetricsConfig:
    """Parameters of a metrics handler; this library has none that reads them."""

    __slots__ = ("params",)

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params = {} if params is None else params


class MetricHandler(ABC):
    """Gets the values of metrics."""

    @abstractmethod
    def emit(self, metric_data: MetricData) -> None:
        """Take one value."""


class ConsoleMetricHandler(MetricHandler):
    """Prints values."""

    def emit(self, metric_data: MetricData) -> None:
        data = metric_data
        print(f"[{data.timestamp}][{data.group_name}]: {data.name}={data.value}")  # noqa: T201


class NullMetricHandler(MetricHandler):
    """Drops values."""

    def emit(self, metric_data: MetricData) -> None:
        pass


class MetricStream:
    """The metrics of a group."""

    def __init__(self, group_name: str, handler: MetricHandler) -> None:
        self.group_name = group_name
        self.handler = handler

    def add_value(self, metric_name: str, metric_value: int) -> None:
        """Send one value, with the present time."""
        self.handler.emit(MetricData(time.time(), self.group_name, metric_name, metric_value))


# By group; the key None stands for all other groups.
_handlers: dict[str | None, MetricHandler] = {None: NullMetricHandler()}


def configure(handler: MetricHandler, group: str | None = None) -> None:
    """Set the handler of a group; None sets the handler of all groups without one."""
    _handlers[group] = handler


def getStream(group: str) -> MetricStream:
    """Return the metrics of a group."""
    return MetricStream(group, _handlers.get(group, _handlers[None]))


def put_metric(metric_name: str, metric_value: int, metric_group: str = "torchelastic") -> None:
    """Send one value to the handler of its group."""
    getStream(metric_group).add_value(metric_name, metric_value)


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """Return the whole milliseconds since a time in Unix seconds."""
    return int((time.time() - start_time_in_seconds) * 1000)


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """Do nothing, as in torch."""


def _get_metric_name(fn: Callable[..., Any]) -> str:
    """Return `Class.method`, or the last part of the module and the function."""
    name = fn.__qualname__
    is_whole = "." in name or not fn.__module__
    return name if is_whole else f"{fn.__module__.rpartition('.')[2]}.{name}"


@overload
def prof(fn: Profiled, group: str = ...) -> Profiled: ...


@overload
def prof(fn: None = None, group: str = ...) -> Callable[[Profiled], Profiled]: ...


def prof(fn: Any = None, group: str = "torchelastic") -> Any:
    """Decorate a function: its metrics are `NAME.success`, `.failure` and `.duration.ms`."""
    if fn is None:
        return functools.partial(prof, group=group)

    @functools.wraps(fn)
    def measured(*args: Any, **kwargs: Any) -> Any:
        key, began = _get_metric_name(fn), time.time()
        try:
            result = fn(*args, **kwargs)
            put_metric(f"{key}.success", 1, group)
        except Exception:  # each error of the function counts, and is passed on
            put_metric(f"{key}.failure", 1, group)
            raise
        finally:
            put_metric(f"{key}.duration.ms", get_elapsed_time_ms(began), group)
        return result

    return measured


def profile(group: str = "torchelastic") -> Callable[[Profiled], Profiled]:
    """Decorate a function as `prof` does; deprecated."""
    warnings.warn("Deprecated, use `@prof` instead", FutureWarning, stacklevel=2)
    return prof(group=group)


def publish_metric(metric_group: str, metric_name: str, metric_value: int) -> None:
    """Send one value as `put_metric` does; deprecated."""
    warnings.warn(
        "Deprecated, use `put_metric(metric_group)(metric_name, metric_value)` instead",
        FutureWarning,
        stacklevel=2,
    )
    put_metric(metric_name, metric_value, metric_group)


def metric_listener(group: str = "torchelastic") -> Callable[[Event], None]:
    """Return a listener that sends the metrics of a job to the handler of a group.

    Also to torch's own handler, if the program has imported torch's module.
    """
    translate = TorchMetrics()

    def listen(event: Event) -> None:
        torchs = sys.modules.get(_TORCHS)
        for name, value in translate(event):
            put_metric(name, value, group)
            if torchs is not None:
                torchs.put_metric(name, value, group)

    return listen
