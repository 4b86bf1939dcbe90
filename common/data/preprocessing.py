"""Description of the preprocessing of a data set, for programs that use a trained model without this project."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.data.prepare import PreparedDataset
from common.data.samples import get_pixel_statistics
from common.data.sources import TOKENIZER_FILE

AXES = {1: "[N, D]", 2: "[N, height, width]", 3: "[N, channel, height, width]"}
"""Axes of a batch, by the number of dimensions of one sample."""
CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def describe_preprocessing(prepared: PreparedDataset, shape: Sequence[int]) -> dict[str, Any]:
    """Return the preprocessing that turns samples of a data set into inputs of a model, as values for JSON.

    `shape` is the shape of one sample: [H, W], [3, H, W], [D] or, for float inputs, any shape. The mean and the
    standard deviation are lists with one number per channel. Raises UserError if the statistics are missing.
    """
    if prepared.name == "text":
        has_tokenizer = (prepared.path / TOKENIZER_FILE).is_file()
        tokens = "tokens of code/own/tokenizer.json" if has_tokenizer else "bytes of a UTF-8 text"
        meaning = f"input = {tokens}; outputs = logits of the next token at each position"
        axes: dict[str, Any] = {"input_shape": ["N", *shape], "input_axes": "[N, token]", "dtype": "int64"}
        return axes | {"value_range": [0, (prepared.vocabulary or 0) - 1], "formula": meaning}
    if not prepared.has_pixels:
        formula = {"scale": 1, "mean": [0.0], "std": [1.0], "formula": "input = value"}
        return {"input_shape": ["N", *shape], "input_axes": "[N, ...]", "value_range": None, **formula}
    mean, std = get_pixel_statistics(prepared)
    is_image = len(shape) > 1
    description: dict[str, Any] = {
        "input_shape": ["N", *shape],
        "input_axes": AXES[len(shape)],
        "image_size": list(shape[-2:]) if is_image else None,
        "channels": ("RGB" if len(shape) == 3 else "grayscale") if is_image else None,
        "value_range": [0, 255],
        "scale": 1 / 255,
        "mean": list_channel_values(mean),
        "std": list_channel_values(std),
        "formula": "input = (value * scale - mean) / std, for each channel",
    }
    if prepared.name == "imagefolder":
        description["resize"] = "resize the shorter edge to image_size, then crop the center"
    return description


def list_channel_values(values: float | Sequence[float]) -> list[float]:
    """Return a list with one number per channel, given a number or a sequence of numbers."""
    return [float(values)] if isinstance(values, int | float) else [float(value) for value in values]


def list_class_names(prepared: PreparedDataset, count: int) -> list[str]:
    """Return the names of the classes in the order of the model's outputs.

    A data set without class names has the labels as names: "0", "1", and so on.
    """
    if prepared.classes:
        return prepared.classes
    if prepared.description:
        return [str(name) for name in prepared.description["class_names"]]
    if prepared.name == "cifar10":
        return CIFAR10_CLASSES
    return [str(label) for label in range(count)]
