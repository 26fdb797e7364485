"""The lower bound for starting N processes: `spawn_loop.py N PROGRAM`.

Prints the nanoseconds from the first start to the last exit.
"""

import os
import sys
import time


def main() -> None:
    """Start N processes, wait for all of them, print how long it took."""
    count, program = int(sys.argv[1]), sys.argv[2]
    began = time.monotonic_ns()
    pids = [os.posix_spawn(program, [program], os.environ, setsid=True) for _ in range(count)]
    for pid in pids:
        os.waitpid(pid, 0)
    print(time.monotonic_ns() - began)


if __name__ == "__main__":
    main()
