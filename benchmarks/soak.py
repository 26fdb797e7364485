"""`python -m benchmarks.soak`: kill, stop and freeze nodes at random for many minutes.

Agents run on this machine as processes of their own, with real workers, and meet at two
endpoints.  After each blow the group must form again, of all nodes that are there, with
one set of workers and no other process left.  The first time that it does not ends the
soak with code 1; what the agents have written is kept then.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from benchmarks.herd import Herd, Round, Violation
from benchmarks.measure import elastic_aio

__all__ = ["main"]

# Longer than the heartbeat_timeout, and much shorter.
_SHORT_FREEZE_S = 0.4
_PAUSE_S = 1.0
# Between blows that come together.
_TOGETHER_S = 0.5


class Soak:
    """Blows at random, and how long the group took to form again after each."""

    def __init__(self, herd: Herd, nodes: int, seed: int, bound: float) -> None:
        """Prepare.

        Args:
            herd: the nodes.
            nodes: how many there are when all are well.
            seed: of the choices.
            bound: seconds within which the group must have formed again.
        """
        self._herd = herd
        self._nodes = nodes
        self._random = random.Random(seed)
        self._bound = bound
        self.blows: dict[str, int] = defaultdict(int)
        self.times: dict[str, list[float]] = defaultdict(list)
        self._kinds: dict[str, Callable[[], bool]] = {
            "kill an agent": lambda: self._take(self._herd.kill),
            "kill the store's host": self._kill_host,
            "stop an agent": lambda: self._take(self._herd.leave),
            "start an agent": self._start,
            "kill a worker": self._kill_worker,
            "freeze an agent shortly": self._freeze_shortly,
            "freeze an agent for long": self._freeze_long,
        }
        self._weights = [3, 2, 2, 8, 3, 2, 1]

    def run(self, minutes: float) -> None:
        """Go on for so long.

        Raises:
            Violation: something was seen that must never be.
        """
        end = time.monotonic() + 60 * minutes
        for _ in range(self._nodes):
            self._herd.start()
        self._settle("start all", time.monotonic_ns())
        said = time.monotonic()
        while time.monotonic() < end:
            self._strike()
            if time.monotonic() > said + 60:
                said = time.monotonic()
                print(f"{sum(self.blows.values())} blows", file=sys.stderr, flush=True)

    def _strike(self) -> None:
        """Strike once or a few times, and wait until the group has formed again."""
        at, names = 0, []
        for number in range(self._random.choice([1, 1, 1, 2, 3])):
            if number:
                time.sleep(self._random.uniform(0, _TOGETHER_S))
            name = self._random.choices([*self._kinds], self._weights)[0]
            began = time.monotonic_ns()
            if self._kinds[name]():
                self.blows[name] += 1
                at = began
                names.append(name)
        if names:
            self._settle(names[0] if len(names) == 1 else "several together", at)
        time.sleep(self._random.uniform(0, _PAUSE_S))

    def _settle(self, what: str, at: int) -> Round:
        try:
            formed = self._herd.settle(self._bound)
        except Violation as error:
            raise Violation(f"after `{what}`: {error}") from None
        if formed.at > at:
            self.times[what].append((formed.at - at) / 1e9)
        return formed

    def _take(self, blow: Callable[[str], None]) -> bool:
        if len(self._herd.awake) < 2:
            return False
        blow(self._random.choice(self._herd.awake))
        return True

    def _kill_host(self) -> bool:
        host = self._herd.host()
        if host is None or len(self._herd.awake) < 2:
            return False
        self._herd.kill(host)
        return True

    def _start(self) -> bool:
        if len(self._herd.agents) >= self._nodes:
            return False
        self._herd.start()
        return True

    def _kill_worker(self) -> bool:
        self._herd.kill_worker(self._random.choice)
        return True

    def _freeze_shortly(self) -> bool:
        name = self._random.choice(self._herd.awake)
        self._herd.freeze(name)
        time.sleep(_SHORT_FREEZE_S)
        self._herd.thaw(name)
        return True

    def _freeze_long(self) -> bool:
        """Freeze a node until the others have formed a group without it."""
        if len(self._herd.awake) < 2:
            return False
        name = self._random.choice(self._herd.awake)
        began = time.monotonic_ns()
        self._herd.freeze(name)
        self._settle("an agent is frozen", began)
        self._herd.thaw(name)
        return True


def main() -> int:
    """Soak; return 1 when something was seen that must never be."""
    arguments = _parser().parse_args()
    folder = Path(tempfile.mkdtemp(prefix="elastic_aio-soak-"))
    herd = Herd(elastic_aio(), folder, arguments.nodes, arguments.nproc)
    soak = Soak(herd, arguments.nodes, arguments.seed, arguments.bound)
    wrong = ""
    try:
        soak.run(arguments.minutes)
    except Violation as error:
        wrong = str(error)
    finally:
        hung, orphans = herd.finish()
    _print(soak, herd, hung, orphans)
    if wrong or hung or orphans:
        print(f"{wrong}\nwhat was written is in {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


def _print(soak: Soak, herd: Herd, hung: list[str], orphans: list[int]) -> None:
    print(f"rounds seen formed: {len(herd.rounds)}; hung agents: {hung}; orphans: {orphans}")
    for name, count in sorted(soak.blows.items()):
        print(f"  {name}: {count}")
    print("seconds until the group had formed again:  times    p50    p99    max")
    everything = [one for some in soak.times.values() for one in some]
    for name, some in [*sorted(soak.times.items()), ("all", everything)]:
        if some:
            p99 = sorted(some)[min(int(len(some) * 0.99), len(some) - 1)]
            middle = statistics.median(some)
            print(f"  {name:40} {len(some):5} {middle:6.2f} {p99:6.2f} {max(some):6.2f}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30, metavar="M")
    parser.add_argument("--nodes", type=int, default=4, metavar="N")
    parser.add_argument("--nproc", type=int, default=2, metavar="N", help="workers of each node")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--bound", type=float, default=20, metavar="S", help="seconds to form again at most"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
