"""Augmentation: changes depend on the position of an image and on the epoch only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from common.data.loader import draw_sample_order
from common.data.samples import Images
from tests.unit.data.conftest import list_inputs, make_loader


def load_pixels(images: Images, augment: str, epoch: int, **settings: Any) -> Tensor:
    """Return the inputs of an epoch, in the order of the loader."""
    return torch.cat(list_inputs(make_loader(images, epoch, drop_last=False, augment=augment, **settings)))


@pytest.fixture(scope="module")
def augmented(images: Images) -> Tensor:
    """Return the augmented inputs of epoch 2, in the order of the loader."""
    return load_pixels(images, "crop_flip", epoch=2)


def test_augmentation_does_not_use_the_random_generator_of_torch(images: Images) -> None:
    state = torch.get_rng_state()
    load_pixels(images, "crop_flip", epoch=2)
    assert torch.equal(state, torch.get_rng_state())


def test_changes_do_not_depend_on_blocks_and_workers(images: Images, augmented: Tensor) -> None:
    assert torch.equal(augmented, load_pixels(images, "crop_flip", epoch=2, block=1))
    assert torch.equal(augmented, load_pixels(images, "crop_flip", epoch=2, workers=2))


def test_changes_do_not_depend_on_shards_and_the_first_position(images: Images, augmented: Tensor) -> None:
    shards = []
    for rank in range(2):
        loader = make_loader(images, 2, 7 * 64, drop_last=False, augment="crop_flip", shard=(rank, 2))
        shards.append(list_inputs(loader))
    batches = [torch.cat(batch_shards) for batch_shards in zip(*shards, strict=True)]
    assert torch.equal(torch.cat(batches), augmented[7 * 64 :])


def test_few_images_are_unchanged(images: Images, augmented: Tensor) -> None:
    original = load_pixels(images, "none", epoch=2)
    unchanged = (augmented.flatten(1) == original.flatten(1)).all(1)
    assert unchanged.double().mean() < 0.1


def test_an_image_changes_in_another_way_in_another_epoch(images: Images, augmented: Tensor) -> None:
    next_epoch = load_pixels(images, "crop_flip", epoch=3)
    row = draw_sample_order(1000, 0, 2).argsort()[5]
    next_row = draw_sample_order(1000, 0, 3).argsort()[5]
    assert not torch.equal(next_epoch[next_row], augmented[row])


def test_a_changed_image_has_the_pixels_of_the_original_and_background(images: Images, augmented: Tensor) -> None:
    original = load_pixels(images, "none", epoch=2)
    row = draw_sample_order(1000, 0, 2).argsort()[5]
    background = original.min()[None]
    assert torch.isin(augmented[row], torch.cat([original[row].flatten(), background])).all()
