"""What runs inside a worker; it never imports asyncio."""

from elastic_aio.worker.context import WorkerContext
from elastic_aio.worker.errorfile import record

__all__ = ["WorkerContext", "record"]
