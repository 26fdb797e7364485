"""What a worker calls; `aio-elastic run` runs each cell as a worker, with timers."""

# %%
from elastic_aio.worker import Timer, expires, heartbeat

timer: Timer = expires(60, "all_reduce")
with timer:  # SIGKILL if the block takes longer
    print(heartbeat("in the block"))  # True

# %%
from elastic_aio.worker import PendingChange, pending_change

change: PendingChange | None = pending_change()
print(change and change.time_left)  # None
