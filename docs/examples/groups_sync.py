"""Groups of processes for programs without an event loop."""

# %%
from elastic_aio.sync import (
    SyncGroupContext,
    SyncProcessContext,
    spawn,
    start_context,
    start_processes,
)


def square(index: int, number: int) -> None:
    print(index, number**2)  # 0 49


if __name__ == "__main__":
    spawn(square, args=(7,))
    started: SyncProcessContext | None = start_context(square, args=(8,), join=False)
    while started is not None and not started.join():
        pass
    group: SyncGroupContext
    with start_processes("upper", str.upper, {0: ("left",)}, {0: {}}) as group:
        print(group.wait() is not None)  # True
