"""torch.distributed.elastic.rendezvous.api: parameters, the interface of handlers, errors."""

from __future__ import annotations

import abc
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from elastic_aio.agent.preflight import free_port
from elastic_aio.outcome import EndCause, JobOutcome

__all__ = [
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousHandler",
    "RendezvousHandlerCreator",
    "RendezvousHandlerRegistry",
    "RendezvousInfo",
    "RendezvousParameters",
    "RendezvousStateError",
    "RendezvousStoreInfo",
    "RendezvousTimeoutError",
]

_YES = ("1", "true", "t", "yes", "y")
_NO = ("0", "false", "f", "no", "n")


class RendezvousError(Exception):
    """Base of the errors of a rendezvous."""


class RendezvousClosedError(RendezvousError):
    """The rendezvous is closed: its job has ended."""


class RendezvousTimeoutError(RendezvousError):
    """The rendezvous was not complete in time."""


class RendezvousConnectionError(RendezvousError):
    """The store of the rendezvous cannot be reached."""


class RendezvousStateError(RendezvousError):
    """The state of the rendezvous cannot be read."""


class RendezvousGracefulExitError(RendezvousError):
    """This node is not part of the rendezvous, and ends without a failure."""


_ERRORS = {
    EndCause.TOO_FEW_NODES: RendezvousTimeoutError,
    EndCause.NO_STORE: RendezvousConnectionError,
    EndCause.RUN_HAD_ENDED: RendezvousClosedError,
    EndCause.NODES_NOT_REPLACED: RendezvousTimeoutError,
    EndCause.OTHER_JOB: RendezvousClosedError,
}


def rendezvous_error(outcome: JobOutcome) -> RendezvousError:
    """Return the exception for the end of a job that a handler takes part in.

    A job that has ended, however it did, has a closed rendezvous.
    """
    if outcome.is_rendezvous:
        return error_of_cause(outcome.cause, outcome.why)
    return RendezvousClosedError(f"the rendezvous is closed: {outcome.why}")


def error_of_cause(cause: EndCause | None, why: str) -> RendezvousError:
    """Return the exception for a rendezvous that `cause` has ended."""
    return RendezvousError(why) if cause is None else _ERRORS[cause](why)


@dataclass
class RendezvousStoreInfo:
    """Where the workers of a round meet: MASTER_ADDR and MASTER_PORT."""

    MASTER_ADDR_KEY: ClassVar[str] = "MASTER_ADDR"
    MASTER_PORT_KEY: ClassVar[str] = "MASTER_PORT"
    master_addr: str
    """Address of the node with rank 0."""
    master_port: int
    """TCP port on it."""

    @staticmethod
    def build(
        rank: int, store: Any, local_addr: str | None, server_port: int | None = None
    ) -> RendezvousStoreInfo:
        """Publish address and port on rank 0, and return them on all nodes.

        By default these are the fully qualified name of the host and a free port.  The nodes of the
        round share `store`, a torch `Store`.
        """
        if rank == 0:
            port = server_port or free_port()
            store.set(RendezvousStoreInfo.MASTER_ADDR_KEY, local_addr or socket.getfqdn())
            store.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(port))
        return RendezvousStoreInfo(
            master_addr=store.get(RendezvousStoreInfo.MASTER_ADDR_KEY).decode(),
            master_port=int(store.get(RendezvousStoreInfo.MASTER_PORT_KEY)),
        )


@dataclass(frozen=True, eq=False)
class RendezvousInfo:
    """What a node gets when a round is complete."""

    store: Any
    """The torch `Store` of the agents."""
    rank: int
    """The rank of this node."""
    world_size: int
    """The number of nodes."""
    bootstrap_store_info: RendezvousStoreInfo | None
    """Where the workers meet."""


class RendezvousHandler(abc.ABC):
    """One node's part in a rendezvous; the interface is torch's, and blocking."""

    @abc.abstractmethod
    def get_backend(self) -> str:
        """Return the name of the backend."""

    @property
    def use_agent_store(self) -> bool:
        """Whether a store of an agent listens where the workers meet."""
        return False

    @abc.abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until a round with this node is complete, and return it.

        Raises:
            RendezvousClosedError: the job has ended.
            RendezvousConnectionError: the store cannot be reached.
            RendezvousTimeoutError: too few nodes came in time.
        """

    @abc.abstractmethod
    def is_closed(self) -> bool:
        """Return whether the job has ended."""

    @abc.abstractmethod
    def set_closed(self) -> None:
        """Let no further round begin."""

    @abc.abstractmethod
    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait for another round."""

    @abc.abstractmethod
    def get_run_id(self) -> str:
        """Return the id of the run."""

    @abc.abstractmethod
    def shutdown(self) -> bool:
        """Close the rendezvous, and return whether that succeeded."""


class RendezvousParameters:
    """The settings of a handler."""

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep and check the settings (see `LaunchConfig`); `kwargs` are the backend's own.

        Raises:
            ValueError: a setting cannot be accepted.
        """
        if not backend:
            raise ValueError("backend: must be a non-empty string (got '')")
        if min_nodes < 1:
            raise ValueError(f"min_nodes: must be at least 1 (got {min_nodes})")
        if max_nodes < min_nodes:
            problem = f"must be at least min_nodes, {min_nodes}"
            raise ValueError(f"max_nodes: {problem} (got {max_nodes})")
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.config = kwargs
        self.local_addr = local_addr

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a setting of the backend, or `default`."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """Return the value of a setting as a bool, or raise a ValueError."""
        value = self.get(key, default)
        if value is None or isinstance(value, bool):
            return value
        if (word := str(value).lower()) in (*_YES, *_NO):
            return word in _YES
        raise ValueError(f"{key}: must be a valid boolean value (got {value!r})")

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """Return the value of a setting as an int, or raise a ValueError."""
        value = self.get(key, default)
        if value is None:
            return None
        try:
            return int(value)
        except ValueError:
            raise ValueError(f"{key}: must be a valid integer value (got {value!r})") from None


RendezvousHandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]
"""A function that makes the handler of a backend."""


class RendezvousHandlerRegistry:
    """The handlers by the name of their backend."""

    def __init__(self) -> None:
        self._registry: dict[str, RendezvousHandlerCreator] = {}

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Add a backend, whose handlers `creator` makes.

        Raises:
            ValueError: the name is empty, or taken by another creator.
        """
        if not backend:
            raise ValueError("backend: must be a non-empty string (got '')")
        present = self._registry.setdefault(backend, creator)
        if present != creator:
            raise ValueError(f"backend: {backend!r} is already registered, with {present!r}")

    def known(self) -> list[str]:
        """Return the names of all backends, sorted."""
        return sorted(self._registry)

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """Return a new handler of the backend that `params` name.

        Raises:
            ValueError: the backend is not registered.
            RuntimeError: the creator made a handler of another backend.
        """
        creator = self._registry.get(params.backend)
        if creator is None:
            known = ", ".join(self.known())
            problem = f"is not registered; call `register` (registered: {known})"
            raise ValueError(f"rdzv_backend: {params.backend!r} {problem}")
        handler = creator(params)
        if handler.get_backend() != params.backend:
            problem = f"does not match the requested backend {params.backend!r}"
            raise RuntimeError(f"rdzv_backend: {handler.get_backend()!r} {problem}")
        return handler
