"""Torch's names: one small program of each module."""

# %%
from elastic_aio.compat.torch.agent import LocalElasticAgent, RunResult, WorkerSpec
from elastic_aio.compat.torch.multiprocessing import DefaultLogsSpecs
from elastic_aio.compat.torch.rendezvous import RendezvousParameters, get_rendezvous_handler


def square() -> int:
    return 7**2


if __name__ == "__main__":
    parameters = RendezvousParameters(
        "static", "127.0.0.1:29431", "squares", 1, 1, rank=0, timeout=60
    )
    handler = get_rendezvous_handler(parameters)
    spec = WorkerSpec(
        role="trainer", local_world_size=2, rdzv_handler=handler, entrypoint=square, max_restarts=0
    )
    result: RunResult = LocalElasticAgent(spec, logs_specs=DefaultLogsSpecs()).run()
    print(result.return_values)  # {0: 49, 1: 49}

# %%
from elastic_aio.compat.torch.events import Event, EventSource, record

record(Event("saved", EventSource.WORKER, metadata={"step": 100}), destination="null")

# %%
from elastic_aio.compat.torch.metrics import MetricData, MetricHandler, configure, put_metric


class Printed(MetricHandler):
    def emit(self, metric_data: MetricData) -> None:
        print(metric_data.name, metric_data.value)  # saved 1


configure(Printed())
put_metric("saved", 1)

# %%
from elastic_aio.compat.torch.installation import install, uninstall

# Until `uninstall`, `import torch.distributed.run` imports that of elastic_aio.
install()
uninstall()
