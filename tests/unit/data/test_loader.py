"""Loader: order of samples, position in an epoch, partial batches, and normalized inputs."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from common.data import samples as data
from common.data.loader import Loader, draw_sample_order
from common.data.prepare import prepare_digits
from common.data.samples import Images
from tests.unit.data.conftest import list_labels, make_loader


def list_batches(loader: Loader) -> list[tuple[bytes, list[int]]]:
    """Return the bytes of the inputs and the labels of each batch of the rest of the epoch."""
    return [(inputs.numpy().tobytes(), labels.tolist()) for inputs, labels in loader]


def test_normalization_uses_the_statistics_of_the_digits(cache: Path) -> None:
    pixels = prepare_digits(cache).map_array("train_images")
    assert pixels.shape == (60_000, 28, 28)
    counts = np.zeros(256)
    for part in np.array_split(pixels, 60):
        counts += np.bincount(part.ravel(), minlength=256)
    brightness = np.arange(256) / 255
    mean = np.average(brightness, weights=counts)
    deviation = np.sqrt(np.average((brightness - mean) ** 2, weights=counts))
    assert (mean, deviation) == pytest.approx(data.STATISTICS["digits"], abs=1e-4)


def test_inputs_are_normalized_as_by_torchvision(images: Images) -> None:
    from PIL import Image
    from torchvision import transforms

    mean, std = data.STATISTICS["digits"]
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((mean,), (std,))])
    inputs = images.load_inputs(torch.arange(5), torch.device("cpu"), torch.float32)
    for image, normalized in zip(images.images, inputs, strict=False):
        expected = transform(Image.fromarray(image.numpy()))[0]
        assert torch.allclose(normalized, expected, atol=1e-6)


def test_the_order_depends_on_seed_and_epoch_only(images: Images) -> None:
    order = draw_sample_order(1000, 0, 0)
    assert sorted(order) == list(range(1000))
    assert np.array_equal(order, draw_sample_order(1000, 0, 0))
    assert not np.array_equal(order, draw_sample_order(1000, 0, 1))
    assert not np.array_equal(order, draw_sample_order(1000, 1, 0))
    assert list_batches(make_loader(images, block=1)) == list_batches(make_loader(images, block=7))


@pytest.mark.parametrize("epoch", [0, 1])
def test_batches_follow_the_order_of_their_epoch(images: Images, epoch: int) -> None:
    order = torch.from_numpy(draw_sample_order(1000, 0, epoch)[: 15 * 64])
    labels = list_labels(make_loader(images, epoch))
    assert list(itertools.chain(*labels)) == images.labels[order].tolist()


def test_a_resumed_loader_continues_at_its_position(images: Images) -> None:
    loader = make_loader(images)
    batches = list_batches(loader) + list_batches(loader)
    assert loader.state_dict() == {"epoch": 2, "position": 0}

    interrupted = make_loader(images)
    iterator = iter(interrupted)
    for _ in range(5):
        next(iterator)
    resumed = make_loader(images)
    resumed.load_state_dict(interrupted.state_dict())
    assert resumed.state_dict() == {"epoch": 0, "position": 5 * 64}
    assert list_batches(resumed) + list_batches(resumed) == batches[5:]


def test_a_loader_can_return_to_an_earlier_batch_within_an_epoch(images: Images) -> None:
    """For example, after a failed step that fewer ranks repeat."""
    all_labels = list_labels(make_loader(images))
    loader = make_loader(images)
    loaded_labels: list[list[int]] = []
    for _, labels in loader:
        loaded_labels.append(labels.tolist())
        if len(loaded_labels) == 6:
            loader.load_state_dict({"epoch": 0, "position": 5 * 64})
    assert loaded_labels == all_labels[:6] + all_labels[5:]


def test_workers_load_the_same_batches_from_any_position(images: Images) -> None:
    loader = make_loader(images, epoch=3, position=5 * 64)
    loader_with_workers = make_loader(images, epoch=3, position=5 * 64, workers=2)
    assert list_batches(loader_with_workers) == list_batches(loader)
    assert loader.state_dict() == {"epoch": 4, "position": 0}
    assert loader_with_workers.state_dict() == {"epoch": 4, "position": 0}


# ---- the partial last batch


def test_a_partial_batch_is_dropped_and_differs_between_epochs(images: Images) -> None:
    loader = make_loader(images)
    assert loader.steps == 15
    for labels in (list_labels(loader), list_labels(loader)):
        assert [len(batch) for batch in labels] == [64] * 15
    first_dropped = set(draw_sample_order(1000, 0, 0)[15 * 64 :])
    second_dropped = set(draw_sample_order(1000, 0, 1)[15 * 64 :])
    assert len(first_dropped) == 40
    assert first_dropped != second_dropped


def test_a_partial_batch_is_loaded_without_drop_last(images: Images) -> None:
    loader = make_loader(images, drop_last=False)
    assert loader.steps == 16
    labels = list_labels(loader)
    assert [len(batch) for batch in labels] == [64] * 15 + [40]
    assert sorted(itertools.chain(*labels)) == sorted(images.labels.tolist())

    resumed = make_loader(images, position=15 * 64, drop_last=False)
    assert list_labels(resumed) == labels[15:]
    assert resumed.state_dict() == {"epoch": 1, "position": 0}
