"""Steps of DDP and of local SGD on hosts that a cable joins, one way of exchanging after the other; srun starts it.

    srun --nodes=2 --ntasks-per-node=1 python -m tests.benchmarks.local_sgd_cable_ranks OUT_FILE

Rank 0 writes JSON: of each side the seconds of a step and the MB that its host sends in one.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from common.models.networks import build_network
from common.ranks import rendezvous
from common.ranks.rank_info import read_rank_info
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.system import network
from common.techniques.data_parallel import ddp
from common.techniques.local_sgd.worker import LocalWorker
from common.training.optimizers import build_optimizer
from configs.local_sgd import Config
from configs.shared import Launch, Optim
from experiments.local_sgd import create_exchange, exchange_differences
from tests.harness.parity.local_sgd_cases import wrap_with_torch

BATCH = 16
EVERY = 8
DELAY = 4
CHUNKS = 4
WARM_UP = 2
RANK = 2
OPTIM = Optim(lr=0.01)
FP32 = "DDP, float32"
BF16 = "DDP, bf16"
POWERSGD = "DDP, PowerSGD"
TORCH = f"torch's PostLocalSGD, H = {EVERY}"
LOCAL = f"local SGD, H = {EVERY}"
INT8 = f"{LOCAL}, int8"
DELAYED = f"{LOCAL}, delay={DELAY}"
REFILL_SECONDS = 0.1  # after which the bucket of the cable is full again
Step = Callable[[Tensor, Tensor], None]


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return build_network("convnet", (28, 28), 10)


def take_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def make_ddp(world: World, communication: str) -> Step:
    """A step of DDP as ddp_multinode takes it."""
    convnet = make_network()
    model = ddp.wrap_ddp(convnet, world.device, bucket_cap_mb=ddp.choose_bucket_mb(communication, 1, world.backend))
    ddp.register_comm_hook(model, communication, RANK)
    return partial(take_step, model, build_optimizer(convnet.parameters(), OPTIM))


def make_local(world: World, kind: str) -> Step:
    """A step of local SGD as the experiment takes it."""
    convnet = make_network()
    optimizer = build_optimizer(convnet.parameters(), OPTIM)
    cfg = Config(every=EVERY, delay=DELAY if kind == DELAYED else 0, communication="int8" if kind == INT8 else "none")
    worker = LocalWorker(convnet, optimizer, Ranks(world), create_exchange(cfg, convnet, world.size), cfg.momentum_of)
    steps = itertools.count(cfg.delay + 1)  # so that an exchange begins and ends within the same chunk

    def step(x: Tensor, y: Tensor) -> None:
        take_step(convnet, optimizer, x, y)
        exchange_differences(cfg, worker, next(steps), sys.maxsize)

    return step


def make_torch() -> Step:
    """A step of torch's own optimizer."""
    convnet = make_network()
    optimizer = build_optimizer(convnet.parameters(), OPTIM)
    return partial(take_step, *wrap_with_torch(convnet, optimizer, 0, EVERY))


def make_steps(world: World) -> dict[str, Step]:
    """A step of each side, by name."""
    return {
        FP32: make_ddp(world, "none"),
        BF16: make_ddp(world, "bf16"),
        POWERSGD: make_ddp(world, "powersgd"),
        TORCH: make_torch(),
        LOCAL: make_local(world, LOCAL),
        INT8: make_local(world, INT8),
        DELAYED: make_local(world, DELAYED),
    }


def measure(world: World) -> dict[str, dict[str, float]]:
    """Let the sides take turns; return the medians over chunks of one round of local SGD each."""
    generator = torch.Generator().manual_seed(world.rank)
    images = torch.randn(BATCH, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (BATCH,), generator=generator)
    steps = make_steps(world)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    megabytes: dict[str, list[float]] = {name: [] for name in steps}
    count_sent = partial(network.read_sent_bytes, os.environ["GLOO_SOCKET_IFNAME"])
    names = list(steps)
    for chunk in range(WARM_UP + CHUNKS):  # PowerSGD begins after ten steps
        first = chunk % len(names)
        for name in names[first:] + names[:first]:  # each chunk starts with another side
            dist.barrier()
            time.sleep(REFILL_SECONDS)
            sent_before = count_sent()
            start = time.perf_counter()
            for _ in range(EVERY):
                steps[name](images, labels)
            duration = time.perf_counter() - start
            if chunk >= WARM_UP:
                seconds[name].append(duration / EVERY)
                megabytes[name].append((count_sent() - sent_before) / EVERY / 1e6)
    return {name: {"seconds": median(seconds[name]), "megabytes": median(megabytes[name])} for name in steps}


def main(file: str) -> int:
    info = read_rank_info(os.environ)
    assert info is not None
    settings = Launch(device="cpu", threads=1, nodes=info.nodes, step_timeout=120)
    with rendezvous.join_world(info, settings) as world:
        medians = measure(world)
        if world.is_main:
            Path(file).write_text(json.dumps(medians))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
