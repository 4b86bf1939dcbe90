"""Interrupt a 64 MB message of a parameter server. Print the seconds until the other side detects it.

python -m tests.harness.ranks.param_server_interrupted_message SIDE FOLDER

SIDE is the side that detects it:

    server    the worker is killed while it sends a gradient
    worker    the server is suspended while it sends values
    sender    the server is suspended while it receives a gradient
    all       the server is suspended while all ranks fetch the parameters

The last three shut down their connections, as an elastic run does.
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
from tests.harness.ranks.interrupted_message import MESSAGE_BYTES, count_written_bytes, interrupt_message

TIMEOUT = datetime.timedelta(seconds=60)


def join(folder: Path, rank: int) -> ParameterServerRank:
    """Join as a worker; rank 0 is also the server."""
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
    network = nn.Linear(MESSAGE_BYTES // 8, 2, bias=False)
    make_optimizer = partial(torch.optim.SGD, lr=0.1)
    policy = StalenessPolicy("sync", 0, 2)
    worker = ParameterServerRank(network, Ranks(world), make_optimizer, servers=1, policy=policy)
    network.weight.grad = torch.ones_like(network.weight)
    worker.start_serving(0)
    return worker


def shut_down_after(interruption: threading.Thread, connections: group.Connections) -> None:
    """Shut down connections after the other side has been suspended and its bytes have arrived."""
    interruption.join()
    time.sleep(0.2)
    group.shut_down_connections(connections)


def run_other_side(side: str, folder: Path, pipe: int) -> None:
    """Send or receive the interrupted message. Report the bytes written before it through a pipe."""
    worker = join(folder, 1 if side == "server" else 0)
    if side == "server":
        worker.pull(0.1)
    os.write(pipe, str(count_written_bytes(os.getpid())).encode())
    if side == "server":
        worker.push()
    elif side == "all":
        worker.fetch_parameters()
    time.sleep(300)


def main(side: str, folder: Path) -> None:
    """Run the side that detects the interruption; the other side is forked."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        run_other_side(side, folder, write_end)
    worker = join(folder, 0 if side == "server" else 1)
    if side in ("server", "sender"):
        worker.pull(0.1)

    bytes_before = int(os.read(read_end, 20))
    writer = child
    if side == "sender":
        writer = os.getpid()
        bytes_before = count_written_bytes(writer)
    signal_number = signal.SIGKILL if side == "server" else signal.SIGSTOP
    arguments = (writer, child, signal_number, bytes_before)
    interruption = threading.Thread(target=interrupt_message, args=arguments)
    interruption.start()
    if side != "server":
        threading.Thread(target=shut_down_after, args=(interruption, group.list_connections())).start()

    start = time.monotonic()
    try:
        match side:
            case "worker":
                worker.pull(0.1)
            case "all":
                worker.fetch_parameters()
            case _:
                worker.push()
        print("message arrived", flush=True)
    except RuntimeError:
        worker.stop_serving(together=False)
        print(f"{time.monotonic() - start:.3f}", flush=True)
    os.kill(child, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
