"""Mistakes about the batches of two real ranks, for tests/pitfalls/: an epoch of each, beside epochs of one process.

CACHE=FOLDER python -m tests.harness.batch_pitfalls epochs      prints what each rank found, as JSON
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from common.data.loader import Images, Loader
from common.data.prepare import prepare_digits
from common.models.networks import SimpleNN
from common.ranks.rendezvous import World
from common.techniques.data_parallel import ddp
from tests.harness.ddp_pitfalls import in_two

SAMPLES, BATCH = 128, 16
CPU = torch.device("cpu")


@dataclass
class Epoch:
    """The samples of this process in each step, and the weights after the last one."""

    seen: list[list[int]]
    weights: Tensor

    def beside(self, *alone: Epoch) -> dict[str, Any]:
        """This epoch, and how far its weights are from those of epochs of one process."""
        return {"seen": self.seen, "apart": [(self.weights - one.weights).abs().max().item() for one in alone]}


def epochs() -> Any:
    """What each of two ranks does in an epoch with each mistake and without, by name."""
    images = Images(prepare_digits(Path(os.environ["CACHE"])), "train", SAMPLES)
    everything = slice(0, SAMPLES)
    x, y = images.load_inputs(everything, CPU, torch.float64), images.load_targets(everything, CPU)
    tensors, numbers = TensorDataset(x, y), {sample.numpy().tobytes(): number for number, sample in enumerate(x)}

    def load(batch: int, **options: Any) -> Iterable[Any]:
        torch.manual_seed(0)  # as every rank does, for equal weights
        return DataLoader(tensors, batch, **options)

    def load_shard(rank: int, ranks: int) -> Iterable[Any]:
        return Loader(images, BATCH, 0, CPU, torch.float64, shard=(rank, ranks))

    def train(batches: Iterable[Any], wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> Epoch:
        torch.manual_seed(0)
        inner, seen = SimpleNN(16).double(), []
        model, optimizer = wrap(inner), torch.optim.SGD(inner.parameters(), lr=0.1)
        for own, labels in batches:
            seen.append([numbers[sample.numpy().tobytes()] for sample in own])
            optimizer.zero_grad()
            F.cross_entropy(model(own), labels).backward()
            optimizer.step()
        weights = torch.cat([parameter.detach().flatten() for parameter in inner.parameters()])
        return Epoch(seen, weights)

    def work(world: World) -> Any:
        def wrap(model: nn.Module) -> nn.Module:
            return ddp.wrap_ddp(model, world.device)

        sampler: Any = DistributedSampler(tensors, world.size, world.rank, shuffle=False)
        same = train(load(BATCH, shuffle=True), wrap).beside(train(load(BATCH, shuffle=True)))
        larger = train(load(BATCH, sampler=sampler), wrap).beside(train(load(2 * BATCH)), train(load(BATCH)))
        right = train(load_shard(world.rank, world.size), wrap).beside(train(load_shard(0, 1)))
        return {"no sampler": same, "batch per rank": larger, "right": right}

    return in_two(work)


if __name__ == "__main__":
    print(json.dumps({name: globals()[name]() for name in sys.argv[1:]}))
