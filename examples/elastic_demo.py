"""Grow and shrink a training job on this machine, lose nodes of it, and look at its loss.

Needs torch.  Every node is an `aio-elastic run` of its own, with one worker; they meet
at one of two ports.  One node leaves, one is killed, and then the one that serves the
others: the job goes on, and its loss is that of a run without any of this.

Run it with:
    python examples/elastic_demo.py
"""

import asyncio
import signal
import socket
import sys
import tempfile
from pathlib import Path

TRAINING = Path(__file__).with_name("train_elastic.py")
STEPS = ["--steps", "300", "--step-time", "0.05"]


class Demo:
    """The nodes of one job, and what their workers print."""

    def __init__(self, endpoint: str, checkpoint: Path) -> None:
        self.options = [
            *("--nnodes", "1:3", "--max-restarts", "10", "--rdzv-id", "demo"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint),
            *("--rdzv-conf", "last_call_timeout=1"),
        ]
        self.training = [str(TRAINING), "--checkpoint", str(checkpoint), *STEPS]
        self.nodes: dict[str, asyncio.subprocess.Process] = {}
        self.lines: asyncio.Queue[str] = asyncio.Queue()
        self.reading: set[asyncio.Task[None]] = set()

    async def start(self, name: str) -> None:
        """Start a node, as one would on a machine of its own."""
        print(f"start node {name}", flush=True)
        node = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "elastic_aio", "run", *self.options, *self.training),
            stdout=asyncio.subprocess.PIPE,
        )
        self.nodes[name] = node
        reading = asyncio.create_task(self.read(name, node))
        self.reading.add(reading)

    async def read(self, name: str, node: asyncio.subprocess.Process) -> None:
        """Pass on what a node prints."""
        assert node.stdout is not None
        async for line in node.stdout:
            text = line.decode().rstrip()
            print(f"  {name}: {text}", flush=True)
            self.lines.put_nowait(text)
        print(f"  {name} has ended with {await node.wait()}", flush=True)

    def end(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a node's agent."""
        print(f"{number.name} to node {name}", flush=True)
        self.nodes[name].send_signal(number)

    async def wait_for(self, start: str) -> str:
        """Wait for a line that begins so."""
        async with asyncio.timeout(120):
            while not (line := await self.lines.get()).startswith(start):
                pass
        return line

    async def close(self) -> None:
        """Stop the nodes that are left, if something went wrong."""
        for node in self.nodes.values():
            if node.returncode is None:
                node.terminate()
        await asyncio.gather(*self.reading)


async def main() -> None:
    """Let nodes come and go, and compare the loss."""
    endpoint = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    with tempfile.TemporaryDirectory() as folder:
        expected = await loss_alone(Path(folder) / "alone.pt")
        demo = Demo(endpoint, Path(folder) / "train.pt")
        try:
            loss = await play(demo)
        finally:
            await demo.close()
    print(f"loss {loss!r}; without any change of nodes {expected!r}")
    if abs(loss - expected) > 1e-9:
        raise SystemExit("the loss is another one")
    print("the loss is the same")


async def play(demo: Demo) -> float:
    """Let nodes come and go until the training ends; return its loss."""
    await demo.start("a")  # the first one serves the others
    await demo.wait_for("world size 1,")
    await demo.start("b")
    await demo.wait_for("world size 2,")
    await demo.start("c")
    await demo.wait_for("world size 3,")
    demo.end("c", signal.SIGTERM)  # a node leaves
    await demo.wait_for("world size 2,")
    await demo.start("d")
    await demo.wait_for("world size 3,")
    demo.end("b", signal.SIGKILL)  # a machine is lost
    await demo.wait_for("world size 2,")
    demo.end("a", signal.SIGKILL)  # and now the one that serves the others
    await demo.wait_for("world size 1,")
    loss = float((await demo.wait_for("final loss")).split()[-1])
    if code := await demo.nodes["d"].wait():
        raise SystemExit(f"node d has ended with {code}")
    return loss


async def loss_alone(checkpoint: Path) -> float:
    """Train in this way without any launcher; return the loss."""
    command = [sys.executable, str(TRAINING), "--checkpoint", str(checkpoint), *STEPS[:2]]
    alone = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await alone.communicate()
    return float(out.split()[-1])


def free_ports(count: int) -> list[int]:
    """Return free TCP ports of this machine."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


if __name__ == "__main__":
    asyncio.run(main())
