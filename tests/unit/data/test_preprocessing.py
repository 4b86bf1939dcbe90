"""The preprocessing in model.json describes what the loader does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from common.data import preprocessing, sources
from common.data.prepare import PreparedDataset
from common.data.samples import Images

CPU = torch.device("cpu")


def prepare(folder: Path, shape: tuple[int, ...], statistics: dict[str, object]) -> PreparedDataset:
    """Write a data set of six random samples of a shape."""
    draw = np.random.default_rng(0)
    for part in ("train", "test"):
        np.save(folder / f"{part}_images.npy", draw.integers(0, 256, (6, *shape), dtype=np.uint8))
        np.save(folder / f"{part}_labels.npy", np.arange(6, dtype=np.int32) % 3)
    (folder / sources.STATISTICS_FILE).write_text(json.dumps(statistics))
    return PreparedDataset("custom", folder, {})


DESCRIPTIONS = [
    ((4, 5), {"mean": 0.2, "std": 0.3}, "grayscale", "[N, height, width]"),
    ((3, 4, 5), {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}, "RGB", "[N, channel, height, width]"),
    ((7,), {"mean": 0.2, "std": 0.3}, None, "[N, D]"),
]


@pytest.mark.parametrize("shape, statistics, channels, axes", DESCRIPTIONS)
def test_the_description_gives_the_inputs_of_the_loader(
    shape: tuple[int, ...], statistics: dict[str, object], channels: str | None, axes: str, tmp_path: Path
) -> None:
    prepared = prepare(tmp_path, shape, statistics)
    images = Images(prepared, "test")
    description = preprocessing.describe_preprocessing(prepared, list(images.shape))
    mean = torch.tensor(description["mean"])
    std = torch.tensor(description["std"])
    if len(shape) == 3:
        mean = mean.view(3, 1, 1)
        std = std.view(3, 1, 1)
    inputs = (images.images * description["scale"] - mean) / std
    assert torch.allclose(inputs, images.load_inputs(slice(None), CPU, torch.float32), atol=1e-5)
    assert description["input_shape"] == ["N", *shape]
    assert description["input_axes"] == axes
    assert description["channels"] == channels
    assert description["image_size"] == (None if channels is None else [4, 5])
    assert json.loads(json.dumps(description)) == description


def test_an_image_folder_describes_how_images_are_resized(tmp_path: Path) -> None:
    prepared = PreparedDataset("imagefolder", tmp_path, {})
    description = preprocessing.describe_preprocessing(prepared, [3, 8, 8])
    assert description["resize"] == "resize the shorter edge to image_size, then crop the center"
    assert len(description["mean"]) == 3


def test_class_names_are_in_the_order_of_the_outputs(tmp_path: Path) -> None:
    assert preprocessing.list_class_names(PreparedDataset("digits", tmp_path, {}), 3) == ["0", "1", "2"]
    cifar = preprocessing.list_class_names(PreparedDataset("cifar10", tmp_path, {}), 10)
    assert cifar[0] == "airplane"
    assert len(cifar) == 10
    (tmp_path / sources.CLASSES_FILE).write_text('["cat", "dog"]')
    assert preprocessing.list_class_names(PreparedDataset("imagefolder", tmp_path, {}), 2) == ["cat", "dog"]
