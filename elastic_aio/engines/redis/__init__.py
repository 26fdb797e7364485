"""The store of a job on Redis or Valkey."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_aio.lazy import lazy_exports

if TYPE_CHECKING:
    from elastic_aio.engines.redis.store import RedisStore as RedisStore
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__, {"elastic_aio.engines.redis.store": "RedisStore"}
    )
