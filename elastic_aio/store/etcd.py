"""The former home of `elastic_aio.engines.etcd.EtcdStore`, loaded by name on first use."""

from elastic_aio.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__, {"elastic_aio.engines.etcd.store": "EtcdStore"}
)
