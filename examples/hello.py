"""Print this worker's place; rank 2 crashes on the first attempt.

Run it with:  aio-elastic run --nproc-per-node 4 --max-restarts 1 examples/hello.py
"""

import os
import sys

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

print(f"hello from rank {rank} of {world}, attempt {attempt}, pid {os.getpid()}")
if rank == min(2, world - 1) and attempt == 0:
    sys.exit("rank 2 crashes once, to show a restart")
