"""The environment variables by which a worker knows its place.

The names are those of torch.distributed.elastic; writer and reader are both here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from elastic_aio.errors import SurroundingsError
from elastic_aio.ranks import Place

__all__ = ["ERROR_FILE", "WorkerContext"]

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

_OF_PLACE = {
    "RANK": "rank",
    "LOCAL_RANK": "local_rank",
    "ROLE_RANK": "role_rank",
    "GROUP_RANK": "group_rank",
    "WORLD_SIZE": "world_size",
    "LOCAL_WORLD_SIZE": "local_world_size",
    "ROLE_WORLD_SIZE": "role_world_size",
    "GROUP_WORLD_SIZE": "group_world_size",
}


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Where a worker stands and what it meets at.

    `restart_count` counts restarts after failures; `error_file` is the path for
    `record`, empty when nothing is kept; `use_agent_store` tells torch whether a
    store already listens at the master's address.
    """

    place: Place
    role: str
    run_id: str
    master_addr: str
    master_port: int
    restart_count: int = 0
    max_restarts: int = 0
    use_agent_store: bool = False
    error_file: str = ""

    def to_env(self) -> dict[str, str]:
        """Return the variables that tell a worker all this."""
        places = {name: str(getattr(self.place, of)) for name, of in _OF_PLACE.items()}
        return {
            **places,
            "ROLE_NAME": self.role,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(self.restart_count),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            "TORCHELASTIC_RUN_ID": self.run_id,
            # torch compares with exactly this spelling.
            "TORCHELASTIC_USE_AGENT_STORE": str(self.use_agent_store),
            ERROR_FILE: self.error_file,
        }

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> WorkerContext:
        """Read the variables of this process, or of `env`.

        Raises:
            SurroundingsError: a variable is missing or is not a number, so this
                process was not started by a launcher.
        """
        env = os.environ if env is None else env
        try:
            return cls(
                place=Place(**{of: int(env[name]) for name, of in _OF_PLACE.items()}),
                role=env["ROLE_NAME"],
                run_id=env["TORCHELASTIC_RUN_ID"],
                master_addr=env["MASTER_ADDR"],
                master_port=int(env["MASTER_PORT"]),
                restart_count=int(env["TORCHELASTIC_RESTART_COUNT"]),
                max_restarts=int(env["TORCHELASTIC_MAX_RESTARTS"]),
                use_agent_store=env["TORCHELASTIC_USE_AGENT_STORE"] == "True",
                error_file=env.get(ERROR_FILE, ""),
            )
        except KeyError as error:
            raise SurroundingsError(f"not inside a worker: {error.args[0]} is not set") from error
        except ValueError as error:
            raise SurroundingsError(f"not inside a worker: {error}") from error
