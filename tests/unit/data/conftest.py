"""A data set and loaders for the data tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.data.loader import Loader
from common.data.prepare import prepare_digits
from common.data.samples import Images


@pytest.fixture(scope="module")
def images(cache: Path) -> Images:
    """Return 1000 images of digits: 15 batches of 64, and 40 more."""
    return Images(prepare_digits(cache), "train", limit=1000)


def make_loader(images: Images, epoch: int = 0, position: int = 0, **settings: Any) -> Loader:
    """Return a loader of batches of 64 that starts at a position of an epoch."""
    keywords: dict[str, Any] = {"block": 4} | settings
    loader = Loader(images, 64, 0, torch.device("cpu"), torch.float32, **keywords)
    loader.load_state_dict({"epoch": epoch, "position": position})
    return loader


def list_labels(batches: Iterable[tuple[Any, Any]]) -> list[list[int]]:
    """Return the labels of each batch, such as those of a loader until the end of its epoch."""
    return [labels.tolist() for _, labels in batches]


def list_inputs(loader: Loader) -> list[Tensor]:
    """Return the inputs of each batch of the rest of the epoch."""
    return [inputs for inputs, _ in loader]
