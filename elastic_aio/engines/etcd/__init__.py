"""The store of a job on etcd v3, through its JSON gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_aio.lazy import lazy_exports

if TYPE_CHECKING:
    from elastic_aio.engines.etcd.store import EtcdStore as EtcdStore
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__, {"elastic_aio.engines.etcd.store": "EtcdStore"}
    )
