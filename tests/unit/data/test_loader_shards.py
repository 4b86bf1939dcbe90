"""Shards of a loader: the parts of a batch that ranks train."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from common.data import loader, prepare


def test_the_shards_of_all_ranks_form_the_batch(cache: Path) -> None:
    images = loader.Images(prepare.prepare_digits(cache), "train", limit=200)

    def load_shard(rank: int, ranks: int) -> list[tuple[Tensor, Tensor]]:
        cpu = torch.device("cpu")
        batches = loader.Loader(images, 24, 3, cpu, torch.float32, block=3, shard=(rank, ranks))
        return [(inputs, labels) for inputs, labels in batches]

    batches = load_shard(0, 1)
    shards = [load_shard(rank, 4) for rank in range(4)]
    assert len(batches) == 8
    for step, (inputs, labels) in enumerate(batches):
        shards_of_step = [shard[step] for shard in shards]
        assert torch.equal(torch.cat([shard_inputs for shard_inputs, _ in shards_of_step]), inputs)
        assert torch.equal(torch.cat([shard_labels for _, shard_labels in shards_of_step]), labels)
