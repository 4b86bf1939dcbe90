"""Custom data sets: validation and storage of the arrays that a user's function returns."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.config.custom_function import convert_errors_of_user_file, load_function
from common.runs.folder import convert_disk_errors
from configs.shared import DATA_SETS

SET_NAMES = ", ".join(DATA_SETS)
USAGE = "function(root) must return train images, train labels, test images and test labels as NumPy arrays"
ARRAY_NAMES = ("train images", "train labels", "test images", "test labels")
SHAPES = "[N, H, W], [N, 3, H, W] or, for vectors, [N, D]"
MAX_CLASSES = 10_000
SOURCE_FILE = "source.py"  # copy of the user's file, stored next to the arrays
STATISTICS_FILE = "statistics.json"  # mean and standard deviation of the training pixels, per channel for color images
RUN_SOURCE_FILE = Path("own", "data.py")  # copy of the user's file in the source folder of a run


def write_custom_arrays(function_name: str, root: Path, files: Sequence[Path]) -> str:
    """Call the user's function and write the four arrays that it returns to `files`.

    `function_name` is `FILE.py:function`. The function is called with `root` (data.root). The arrays are written in the
    order of ARRAY_NAMES. The user's file and the statistics of the training images are stored in the same folder as the
    arrays. Returns an empty string, because a custom data set has no notice for the user. Raises UserError, with file
    and line, if the function fails or if the arrays are unsuitable for training.
    """
    folder = files[0].parent
    function = load_function("data.name", function_name, SET_NAMES)
    with convert_errors_of_user_file("data.name", function_name, function, USAGE):
        arrays = check_arrays(function(root))
    mean, std = compute_pixel_statistics(arrays[0])
    with convert_disk_errors(folder.parent):
        for file, array in zip(files, arrays, strict=True):
            np.save(file, np.ascontiguousarray(array))
        shutil.copyfile(function_name.rpartition(":")[0], folder / SOURCE_FILE)
        statistics = {"mean": mean, "std": std}
        (folder / STATISTICS_FILE).write_text(json.dumps(statistics) + "\n")
    return ""


def check_arrays(arrays: Any) -> list[np.ndarray]:
    """Check the four arrays of a custom data set, convert the labels to int32, and return the arrays.

    Raises ValueError or TypeError if the arrays are unsuitable for training.
    """
    if not isinstance(arrays, tuple | list) or len(arrays) != len(ARRAY_NAMES):
        raise TypeError(f"the function returned {describe_type(arrays)}")
    for name, array in zip(ARRAY_NAMES, arrays, strict=True):
        if not isinstance(array, np.ndarray):
            raise TypeError(f"the {name} are {describe_type(array)}")
        if 0 in array.shape:
            raise ValueError(f"the {name} are empty: their shape is {list(array.shape)}")
    train, train_labels, test, test_labels = arrays
    check_images_and_labels("train", train, train_labels)
    check_images_and_labels("test", test, test_labels)
    if train.shape[1:] != test.shape[1:]:
        shapes = f"{list(train.shape[1:])}, but each test image has shape {list(test.shape[1:])}"
        raise ValueError(f"each train image has shape {shapes}; the shapes must be equal")
    if test_labels.max() > train_labels.max():
        maxima = f"the largest test label is {test_labels.max()}, but the largest train label is {train_labels.max()}"
        raise ValueError(f"{maxima}; every class of the test set must have training samples")
    return [train, train_labels.astype(np.int32), test, test_labels.astype(np.int32)]


def check_images_and_labels(part: str, images: np.ndarray, labels: np.ndarray) -> None:
    """Raise ValueError if the images or labels of a part have an invalid type, shape or value."""
    if images.dtype != np.uint8:
        raise ValueError(f"the {part} images have dtype {images.dtype}; return uint8 values from 0 to 255")
    is_color = images.ndim == 4 and images.shape[1] == 3
    if images.ndim not in (2, 3) and not is_color:
        has_colors_last = images.ndim == 4 and images.shape[3] == 3
        hint = "; .transpose(0, 3, 1, 2) moves the colors to the second axis" if has_colors_last else ""
        raise ValueError(f"the {part} images have shape {list(images.shape)}; return {SHAPES}{hint}")
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        problem = f"the {part} labels have dtype {labels.dtype} and shape {list(labels.shape)}"
        raise ValueError(f"{problem}; return one integer for each image")
    if len(images) != len(labels):
        counts = f"there are {len(images)} {part} images but {len(labels)} {part} labels"
        raise ValueError(f"{counts}; return one label for each image")
    low = int(labels.min())
    high = int(labels.max())
    if low < 0 or high >= MAX_CLASSES:
        problem = f"the {part} labels range from {low} to {high}"
        raise ValueError(f"{problem}; return labels from 0 to classes - 1, for at most {MAX_CLASSES} classes")


def describe_type(value: Any) -> str:
    """Describe the type of a value in words, such as "a tuple of length 2"."""
    if value is None:
        return "None"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"a value of type {type(value).__name__}"


def compute_pixel_statistics(images: np.ndarray) -> tuple[Any, Any]:
    """Return the mean and the standard deviation of the pixels of uint8 images, scaled to [0, 1].

    The mean and the standard deviation are single numbers, or for color images lists with one number per channel. Both
    values are computed from a histogram of the 256 pixel values, so they do not depend on the order of the images.
    """
    if images.ndim == 4:
        channels = [compute_pixel_statistics(images[:, channel]) for channel in range(images.shape[1])]
        return [mean for mean, _ in channels], [std for _, std in channels]
    counts = np.zeros(256, np.int64)
    for image in images:  # one image at a time, because bincount needs eight bytes per pixel
        counts += np.bincount(image.ravel(), minlength=256)
    values = np.arange(256) / 255
    weights = counts / counts.sum()
    mean = float(values @ weights)
    std = float(np.sqrt((values - mean) ** 2 @ weights))
    return mean, std or 1.0
