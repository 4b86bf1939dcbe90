"""A message of 64 MB of a parameter server breaks off in its middle; prints the seconds until the other side notices.

python -m tests.harness.param_server_half_served SIDE FOLDER

SIDE is who has to notice: server, whose worker is killed while it sends a gradient; worker, whose server stands still
while it sends values; sender, whose server does while it receives a gradient, and all, where it does while all ranks
get the parameters. These three cut their connections, as an elastic run does.
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

from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.techniques.elastic import group
from common.techniques.parameter_server.server import StalenessPolicy
from common.techniques.parameter_server.worker import ParameterServerRank
from tests.harness.half_sent import SIZE, count_written

TIMEOUT = datetime.timedelta(seconds=60)


def join(folder: Path, rank: int) -> ParameterServerRank:
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
    worker = ParameterServerRank(
        network, Ranks(world), partial(torch.optim.SGD, lr=0.1), servers=1, policy=StalenessPolicy("sync", 0, 2)
    )
    network.weight.grad = torch.ones_like(network.weight)
    worker.start_serving(0)
    return worker


def strike_when_half_is_sent(writer: int, other: int, number: int, before: int) -> None:
    """Send a signal to a process once `writer` has written a part of a message, and `before` bytes before it."""
    while count_written(writer) < before + SIZE // 4:
        time.sleep(0.0005)
    os.kill(other, number)


def cut_after(strike: threading.Thread, connections: group.Connections) -> None:
    """Cut connections once the other side stands still and what it has sent has come."""
    strike.join()
    time.sleep(0.2)
    group.shut_down_connections(connections)


def be_the_other(side: str, folder: Path, told: int) -> None:
    """Send what breaks off, or receive it; tell what has been written before."""
    worker = join(folder, 1 if side == "server" else 0)
    if side == "server":
        worker.pull(0.1)
    os.write(told, str(count_written(os.getpid())).encode())
    if side == "server":
        worker.push()
    elif side == "all":
        worker.fetch_parameters()
    time.sleep(300)


def main(side: str, folder: Path) -> None:
    """Be the one who has to notice; the other one is forked."""
    reads, writes = os.pipe()
    other = os.fork()
    if other == 0:
        be_the_other(side, folder, writes)
    worker = join(folder, 0 if side == "server" else 1)
    if side in ("server", "sender"):
        worker.pull(0.1)
    before, writer = int(os.read(reads, 20)), other
    if side == "sender":
        before, writer = count_written(os.getpid()), os.getpid()
    number = signal.SIGKILL if side == "server" else signal.SIGSTOP
    strike = threading.Thread(target=strike_when_half_is_sent, args=(writer, other, number, before))
    strike.start()
    if side != "server":
        threading.Thread(target=cut_after, args=(strike, group.list_connections())).start()
    begun = time.monotonic()
    try:
        {"worker": lambda: worker.pull(0.1), "all": worker.fetch_parameters}.get(side, worker.push)()
        print("it came", flush=True)
    except RuntimeError:
        worker.stop_serving(together=False)
        print(f"{time.monotonic() - begun:.3f}", flush=True)
    os.kill(other, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
