"""Mistakes with the batches of two ranks: an epoch of each, compared with one process. CACHE names the data folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from common.data.loader import Loader
from common.data.prepare import prepare_digits
from common.data.samples import Images
from common.models.networks import SimpleNN
from common.ranks.rendezvous import World
from common.techniques.data_parallel import ddp
from tests.harness.pitfalls.outcomes import collect_from_ranks

SAMPLES = 128
BATCH = 16
CPU = torch.device("cpu")


@dataclass
class Epoch:
    """The samples of this rank in each step, and the weights after the last step."""

    samples: list[list[int]]
    weights: Tensor

    def compare(self, *references: Epoch) -> dict[str, Any]:
        """Return the samples, and the largest difference from the weights of each reference."""
        differences = [self.weights - reference.weights for reference in references]
        return {"samples": self.samples, "distances": [difference.abs().max().item() for difference in differences]}


def train_epochs() -> Any:
    """Train an epoch with each mistake and without one on two ranks; return the comparisons of each rank."""
    images = Images(prepare_digits(Path(os.environ["CACHE"])), "train", SAMPLES)
    x = images.load_inputs(slice(0, SAMPLES), CPU, torch.float64)
    y = images.load_targets(slice(0, SAMPLES), CPU)
    dataset = TensorDataset(x, y)
    sample_numbers = {sample.numpy().tobytes(): number for number, sample in enumerate(x)}

    def load_all(batch: int, **options: Any) -> Iterable[Any]:
        torch.manual_seed(0)  # scripts use one seed on all ranks, for equal weights
        return DataLoader(dataset, batch, **options)

    def load_shard(rank: int, ranks: int) -> Iterable[Any]:
        return Loader(images, BATCH, 0, CPU, torch.float64, shard=(rank, ranks))

    def train(batches: Iterable[Any], wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> Epoch:
        torch.manual_seed(0)
        inner = SimpleNN(16).double()
        model = wrap(inner)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        samples = []
        for inputs, labels in batches:
            samples.append([sample_numbers[sample.numpy().tobytes()] for sample in inputs])
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        weights = torch.cat([parameter.detach().flatten() for parameter in inner.parameters()])
        return Epoch(samples, weights)

    def train_all(world: World) -> Any:
        def wrap(model: nn.Module) -> nn.Module:
            return ddp.wrap_ddp(model, world.device)

        without_sampler = train(load_all(BATCH, shuffle=True), wrap)
        sampler: Any = DistributedSampler(dataset, world.size, world.rank, shuffle=False)
        batch_per_rank = train(load_all(BATCH, sampler=sampler), wrap)
        sharded = train(load_shard(world.rank, world.size), wrap)
        return {
            "no sampler": without_sampler.compare(train(load_all(BATCH, shuffle=True))),
            "batch per rank": batch_per_rank.compare(train(load_all(2 * BATCH)), train(load_all(BATCH))),
            "correct": sharded.compare(train(load_shard(0, 1))),
        }

    return collect_from_ranks(2, train_all)
