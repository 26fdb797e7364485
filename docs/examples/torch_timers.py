"""Torch's timers, whose names other modules of torch have too."""

# %%
from elastic_aio.compat.torch.timers import TimerClient, configure, expires


class Printing(TimerClient):
    """Torch's clients send these to a server, which kills a process that is late."""

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        print("acquired", scope_id)  # acquired load

    def release(self, scope_id: str) -> None:
        print("released", scope_id)  # released load


configure(Printing())
with expires(after=60, scope="load"):
    pass
