"""A message of a parameter server breaks off in its middle; prints the seconds after which who receives it notices.

python -m tests.harness.half_served SIDE FOLDER

SIDE is who receives: the server, whose worker is killed while it sends a gradient of 64 MB, or the worker, which cuts
its connections while a server that stands still has sent a part of its values.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from common.distributed.elastic import group
from common.distributed.parameter_server.server import Policy
from common.distributed.parameter_server.worker import Worker
from common.distributed.rendezvous import World
from tests.harness.half_sent import SIZE, count_written

TIMEOUT = datetime.timedelta(seconds=60)


def join(folder: Path, rank: int) -> Worker:
    """Rank 0 is the server; both are workers."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    world = World(
        rank=rank,
        size=2,
        hosts=("a", "a"),
        device=torch.device("cpu"),
        backend="gloo",
        threads=1,
        timeout=TIMEOUT,
        coordinator="as in an elastic run",
    )
    network = nn.Linear(SIZE // 8, 2, bias=False)
    worker = Worker(network, world, partial(torch.optim.SGD, lr=0.1), servers=1, policy=Policy("sync", 0, 2))
    network.weight.grad = torch.ones_like(network.weight)
    worker.start_serving(0)
    return worker


def strike_when_half_is_sent(process: int, number: int, before: int) -> None:
    """Send a signal to a process once it has sent a part of a message since it had written `before` bytes."""
    while count_written(process) < before + SIZE // 4:
        time.sleep(0.0005)
    os.kill(process, number)


def main(side: str, folder: Path) -> None:
    """Be the one who receives; the other one is forked."""
    receives = 0 if side == "server" else 1
    reads, writes = os.pipe()
    other = os.fork()
    if other == 0:
        worker = join(folder, 1 - receives)
        if side == "server":
            worker.pull(0.1)
        os.write(writes, str(count_written(os.getpid())).encode())
        if side == "server":
            worker.push()
        time.sleep(300)
    worker = join(folder, receives)
    if side == "server":
        worker.pull(0.1)
    number = signal.SIGKILL if side == "server" else signal.SIGSTOP
    strike = threading.Thread(target=strike_when_half_is_sent, args=(other, number, int(os.read(reads, 20))))
    strike.start()
    connections = group.list_connections()
    begun = time.monotonic()
    if side == "worker":

        def cut() -> None:
            strike.join()
            time.sleep(0.2)
            group.cut_connections(connections)

        threading.Thread(target=cut).start()
    try:
        worker.push() if side == "server" else worker.pull(0.1)
        print("it came", flush=True)
    except RuntimeError:
        worker.stop_serving(together=False)
        print(f"{time.monotonic() - begun:.3f}", flush=True)
    os.kill(other, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
