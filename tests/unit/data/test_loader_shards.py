"""Shards of a loader: slices of the same batches, proportional to weights, which can change between batches."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.data.loader import Loader
from common.data.prepare import prepare_digits
from common.data.samples import Images
from configs.batch_plan import divide_batch
from tests.unit.data.conftest import list_labels, make_loader

RankLabels = list[list[list[int]]]
"""The labels of each batch of each rank."""


def join_shards(rank_labels: RankLabels) -> list[list[int]]:
    """Return the labels of each batch over all ranks."""
    return [list(itertools.chain(*shards)) for shards in zip(*rank_labels, strict=True)]


def test_ranks_load_slices_of_the_same_batches(images: Images) -> None:
    loaders = [make_loader(images, drop_last=False, shard=(rank, 4)) for rank in range(4)]
    rank_labels = [list_labels(loader) for loader in loaders]
    assert join_shards(rank_labels) == list_labels(make_loader(images, drop_last=False))


def test_the_shards_of_all_ranks_form_the_batch(cache: Path) -> None:
    images = Images(prepare_digits(cache), "train", limit=200)

    def load_shard(rank: int, ranks: int) -> list[tuple[Tensor, Tensor]]:
        cpu = torch.device("cpu")
        batches = Loader(images, 24, 3, cpu, torch.float32, block=3, shard=(rank, ranks))
        return [(inputs, labels) for inputs, labels in batches]

    batches = load_shard(0, 1)
    shards = [load_shard(rank, 4) for rank in range(4)]
    assert len(batches) == 8
    for step, (inputs, labels) in enumerate(batches):
        shards_of_step = [shard[step] for shard in shards]
        assert torch.equal(torch.cat([shard_inputs for shard_inputs, _ in shards_of_step]), inputs)
        assert torch.equal(torch.cat([shard_labels for _, shard_labels in shards_of_step]), labels)


@pytest.mark.parametrize("rank, last_size", [(0, 1), (1, 1), (2, 0), (3, 0)])
def test_a_partial_batch_is_divided_as_evenly_as_possible(cache: Path, rank: int, last_size: int) -> None:
    images = Images(prepare_digits(cache), "train", limit=64 + 2)
    loader = make_loader(images, drop_last=False, shard=(rank, 4))
    sizes = [(len(labels), loader.size) for _, labels in loader]
    assert sizes == [(16, 64), (last_size, 2)]


PLAN = {0: (32, 16, 16), 2: (64, 0, 0), 3: (1, 40, 23), 9: (0, 2, 62)}  # first batch, samples of each rank
PLANNED_SIZES = [*2 * [PLAN[0]], PLAN[2], *6 * [PLAN[3]], *6 * [PLAN[9]]]


def list_labels_of_plan(loader: Loader, rank: int) -> list[list[int]]:
    """Load an epoch and change the shards as PLAN says; return the labels of each batch."""
    loader.set_shards(rank, PLAN[0])
    batches = []
    for batch_count, (_, labels) in enumerate(loader, 1):
        batches.append(labels.tolist())
        if batch_count in PLAN:
            loader.set_shards(rank, PLAN[batch_count])
    return batches


@pytest.mark.parametrize("workers", [0, 1])
def test_shards_can_change_between_batches_without_changing_the_batches(workers: int, images: Images) -> None:
    rank_labels = []
    for rank in range(3):
        loader = make_loader(images, block=3, drop_last=False, shard=(rank, 3), workers=workers, weights=(1, 1, 1))
        rank_labels.append(list_labels_of_plan(loader, rank))
        assert loader.state_dict() == {"epoch": 1, "position": 0}
    assert join_shards(rank_labels) == list_labels(make_loader(images, block=3, drop_last=False))
    sizes = [tuple(map(len, shards)) for shards in zip(*rank_labels, strict=True)]
    assert sizes == [*PLANNED_SIZES, (0, 1, 39)], "the last, partial batch has 40 samples"


def test_shards_of_another_batch_size_are_refused(images: Images) -> None:
    loader = make_loader(images, shard=(0, 3), weights=(1, 1, 1))
    with pytest.raises(ValueError, match="do not add up"):
        loader.set_shards(0, (64, 1, 0))


DIVISIONS = [
    (24, (3, 1), (18, 6)),
    (24, (5, 2, 1), (15, 6, 3)),
    (10, (1, 1, 1), (4, 3, 3)),
    (2, (1, 1, 1), (1, 1, 0)),
    (7, (2, 0, 1), (5, 0, 2)),
    (1, (1, 3), (0, 1)),
    (0, (1, 3), (0, 0)),
]


@pytest.mark.parametrize("batch, weights, counts", DIVISIONS)
def test_a_batch_is_divided_in_proportion_to_the_weights(
    batch: int, weights: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    assert divide_batch(batch, weights) == counts
