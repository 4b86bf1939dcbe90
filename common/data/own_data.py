"""A custom data set: the arrays that a function of the user's file returns, checked and stored."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.core.own_function import load_function, locate_errors
from common.runs.folder import disk_errors
from configs.shared import DATA_SETS

SET_NAMES = ", ".join(DATA_SETS)
USAGE = "function(root) returns train images, train labels, test images, test labels as NumPy arrays"
ARRAY_NAMES = ("train images", "train labels", "test images", "test labels")
SHAPES = "[N, H, W], [N, 3, H, W] or, for vectors, [N, D]"
MAX_CLASSES = 10_000
SOURCE_FILE = "source.py"  # copy of the user's file, next to its arrays
STATISTICS_FILE = "statistics.json"  # mean and standard deviation of the training images, of each colour or of all
RUN_SOURCE_FILE = Path("own", "data.py")  # copy of the user's file in the source of a run


def write_arrays(function_name: str, root: Path, files: Sequence[Path]) -> str:
    """Write the four arrays that `FILE.py:function` returns for data.root to `files`, in the order of ARRAY_NAMES.

    The user's file and the statistics of the training images are stored next to them. Returns an empty notice. Raises
    UserError, with file and line, for an error in the function and for arrays that a network cannot be trained on.
    """
    folder = files[0].parent
    function = load_function("data.name", function_name, SET_NAMES)
    with locate_errors("data.name", function_name, function, USAGE):
        arrays = check_arrays(function(root))
    mean, std = compute_statistics(arrays[0])
    with disk_errors(folder.parent):
        for file, array in zip(files, arrays, strict=True):
            np.save(file, np.ascontiguousarray(array))
        shutil.copyfile(function_name.rpartition(":")[0], folder / SOURCE_FILE)
        statistics = {"mean": mean, "std": std}
        (folder / STATISTICS_FILE).write_text(json.dumps(statistics) + "\n")
    return ""


def check_arrays(arrays: Any) -> list[np.ndarray]:
    """Return the four arrays, labels as int32.

    Raises ValueError or TypeError for anything that a network cannot be trained on.
    """
    if not isinstance(arrays, tuple | list) or len(arrays) != len(ARRAY_NAMES):
        raise TypeError(f"it returned {describe_type(arrays)}")
    for name, array in zip(ARRAY_NAMES, arrays, strict=True):
        if not isinstance(array, np.ndarray):
            raise TypeError(f"the {name} are {describe_type(array)}")
        if 0 in array.shape:
            raise ValueError(f"the {name} are empty: their shape is {list(array.shape)}")
    train, train_labels, test, test_labels = arrays
    check_part("train", train, train_labels)
    check_part("test", test, test_labels)
    if train.shape[1:] != test.shape[1:]:
        shapes = f"{list(train.shape[1:])}, of a test image {list(test.shape[1:])}"
        raise ValueError(f"the shape of a train image is {shapes}; both parts need the same")
    if test_labels.max() > train_labels.max():
        maxima = f"the test labels go up to {test_labels.max()}, the train labels to {train_labels.max()}"
        raise ValueError(f"{maxima}; every class of the test set needs training samples")
    return [train, train_labels.astype(np.int32), test, test_labels.astype(np.int32)]


def check_part(part: str, images: np.ndarray, labels: np.ndarray) -> None:
    """Raise ValueError unless images and labels have valid types, shapes and values."""
    if images.dtype != np.uint8:
        raise ValueError(f"the {part} images have dtype {images.dtype}; return uint8, from 0 to 255")
    is_colour = images.ndim == 4 and images.shape[1] == 3
    if images.ndim not in (2, 3) and not is_colour:
        has_colours_last = images.ndim == 4 and images.shape[3] == 3
        hint = "; .transpose(0, 3, 1, 2) puts colours first" if has_colours_last else ""
        raise ValueError(f"the {part} images have shape {list(images.shape)}; return {SHAPES}{hint}")
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        problem = f"the {part} labels have dtype {labels.dtype} and shape {list(labels.shape)}"
        raise ValueError(f"{problem}; return one integer for each image")
    if len(images) != len(labels):
        raise ValueError(f"there are {len(images)} {part} images and {len(labels)} {part} labels; return one for each")
    low = int(labels.min())
    high = int(labels.max())
    if low < 0 or high >= MAX_CLASSES:
        raise ValueError(f"the {part} labels go from {low} to {high}; return 0 to classes - 1, below {MAX_CLASSES}")


def describe_type(value: Any) -> str:
    """Return the type of a value in words, as in `a tuple of 2`."""
    if value is None:
        return "None"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a value of type {type(value).__name__}"


def compute_statistics(images: np.ndarray) -> tuple[Any, Any]:
    """Return mean and standard deviation of uint8 images, scaled to [0, 1]: of each colour for colour images.

    They are computed from the histogram of the 256 pixel values, so they do not depend on the order of the images.
    """
    if images.ndim == 4:
        colours = [compute_statistics(images[:, colour]) for colour in range(images.shape[1])]
        return [mean for mean, _ in colours], [std for _, std in colours]
    counts = np.zeros(256, np.int64)
    for image in images:  # one by one: bincount needs eight bytes for each pixel
        counts += np.bincount(image.ravel(), minlength=256)
    values = np.arange(256) / 255
    weights = counts / counts.sum()
    mean = float(values @ weights)
    std = float(np.sqrt((values - mean) ** 2 @ weights))
    return mean, std or 1.0
