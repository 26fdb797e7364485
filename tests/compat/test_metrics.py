"""torch's metrics over elastic_aio."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from elastic_aio import JobFailed, LaunchSpec, run
from elastic_aio.compat.torch.metrics import (
    ConsoleMetricHandler,
    MetricData,
    MetricHandler,
    MetricsConfig,
    NullMetricHandler,
    configure,
    get_elapsed_time_ms,
    getStream,
    initialize_metrics,
    metric_listener,
    prof,
    profile,
    publish_metric,
    put_metric,
)
from tests.support.children import restart_count_exits


class ListHandler(MetricHandler):
    def __init__(self) -> None:
        self.values: list[MetricData] = []

    def emit(self, metric_data: MetricData) -> None:
        self.values.append(metric_data)

    def by_name(self) -> dict[str, int]:
        return {data.name: data.value for data in self.values}


@pytest.fixture(name="handler")
def _handler() -> Iterator[ListHandler]:
    handler = ListHandler()
    configure(handler, "torchelastic")
    yield handler
    for group in (None, "torchelastic", "other"):
        configure(NullMetricHandler(), group)


def test_groups_have_handlers(handler: ListHandler, capsys: pytest.CaptureFixture[str]) -> None:
    put_metric("a", 1)
    put_metric("b", 2, "another")
    configure(ConsoleMetricHandler())
    put_metric("c", 3, "another")
    getStream("torchelastic").add_value("d", 4)
    assert handler.by_name() == {"a": 1, "d": 4}
    assert capsys.readouterr().out.endswith("][another]: c=3\n")
    with pytest.warns(FutureWarning, match="put_metric"):
        publish_metric("torchelastic", "e", 5)
    assert handler.values[-1][1:] == ("torchelastic", "e", 5)
    assert MetricsConfig().params == {}
    initialize_metrics(MetricsConfig({"a": "b"}))
    assert get_elapsed_time_ms(0) > 0


@prof
def succeed(text: str) -> str:
    return text


class Owner:
    @prof(group="other")
    def fail(self) -> None:
        raise ValueError


def test_functions_are_measured(handler: ListHandler) -> None:
    assert succeed("x") == "x"
    assert handler.values[0].name == "test_metrics.succeed.success"
    assert handler.values[1].name == "test_metrics.succeed.duration.ms"
    configure(handler, "other")
    with pytest.raises(ValueError):  # noqa: PT011  # raised above
        Owner().fail()
    names = [data.name for data in handler.values[2:]]
    assert names == ["Owner.fail.failure", "Owner.fail.duration.ms"]
    with pytest.warns(FutureWarning, match="@prof"):
        profile("other")(succeed)


def test_a_job_that_succeeds_after_a_restart(
    handler: ListHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its metrics reach torch's own module too, which `install` leaves alone."""
    theirs: dict[str, int] = {}
    put = SimpleNamespace(put_metric=lambda name, value, group: theirs.update({name: value}))
    monkeypatch.setitem(sys.modules, "torch.distributed.elastic.metrics.api", put)
    spec = LaunchSpec(restart_count_exits(1, 0), max_restarts=3, role="r")
    run(spec, listeners=[metric_listener()])
    names = [data.name.removeprefix("workers.r.") for data in handler.values]
    assert names[:4] == ["remaining_restarts", "healthy", "remaining_restarts", "failed"]
    assert [data.value for data in handler.values if "remaining" in data.name] == [3, 3, 2]
    assert handler.by_name() == {
        "workers.r.remaining_restarts": 2,
        "workers.r.healthy": 1,
        "workers.r.failed": 1,
        "workers.r.succeeded": 1,
        "workers.r.flakiness": 25,
        "workers.r.run_total": 1,
        "workers.r.run_success_with_retries": 1,
        "workers.r.run_success_no_retries": 0,
        "workers.r.run_failed_with_retries": 0,
        "workers.r.run_failed_no_retries": 0,
    }
    assert theirs == handler.by_name()


def test_a_job_that_fails(handler: ListHandler) -> None:
    with pytest.raises(JobFailed):
        run(LaunchSpec(["false"]), listeners=[metric_listener()])
    values = handler.by_name()
    assert values["workers.default.flakiness"] == 100
    assert values["workers.default.run_failed_no_retries"] == 1
    assert "workers.default.succeeded" not in values
