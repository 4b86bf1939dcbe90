"""A data set of one's own: the arrays that a function of the user's file returns, checked and stored."""

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

KNOWN = ", ".join(DATA_SETS)
USAGE = "function(root) returns train images, train labels, test images, test labels as NumPy arrays"
NAMES = ("train images", "train labels", "test images", "test labels")
SHAPES = "[N, H, W], [N, 3, H, W] or, for vectors, [N, D]"
MOST_CLASSES = 10_000
SOURCE = "source.py"  # the user's file, beside the arrays that it gave
STATISTICS = "statistics.json"  # mean and standard deviation of the training images there, of each colour or of all
KEPT = Path("own", "data.py")  # the user's file in the source of a run


def write_arrays(value: str, root: Path, files: Sequence[Path]) -> str:
    """Write the arrays that `FILE.py:function` returns for data.root into four files of a folder, as NAMES orders them.

    The user's file and the statistics of the training images lie beside them then. Returns no notice. Raises UserError,
    naming file and line, for an error of the function and for arrays that cannot be trained on.
    """
    folder = files[0].parent
    function = load_function("data.name", value, KNOWN)
    with locate_errors("data.name", value, function, USAGE):
        arrays = check_arrays(function(root))
    mean, std = compute_statistics(arrays[0])
    with disk_errors(folder.parent):
        for file, array in zip(files, arrays, strict=True):
            np.save(file, np.ascontiguousarray(array))
        shutil.copyfile(value.rpartition(":")[0], folder / SOURCE)
        (folder / STATISTICS).write_text(json.dumps({"mean": mean, "std": std}) + "\n")
    return ""


def check_arrays(found: Any) -> list[np.ndarray]:
    """Return four arrays, labels as int32. Raises ValueError or TypeError for anything that cannot be trained on."""
    if not isinstance(found, tuple | list) or len(found) != len(NAMES):
        raise TypeError(f"it returned {describe_type(found)}")
    for name, array in zip(NAMES, found, strict=True):
        if not isinstance(array, np.ndarray):
            raise TypeError(f"the {name} are {describe_type(array)}")
        if 0 in array.shape:
            raise ValueError(f"the {name} are empty: their shape is {list(array.shape)}")
    train, train_labels, test, test_labels = found
    check_learnable("train", train, train_labels)
    check_learnable("test", test, test_labels)
    if train.shape[1:] != test.shape[1:]:
        shapes = f"{list(train.shape[1:])}, of a test image {list(test.shape[1:])}"
        raise ValueError(f"the shape of a train image is {shapes}; both parts need the same")
    if test_labels.max() > train_labels.max():
        both = f"the test labels go up to {test_labels.max()}, the train labels to {train_labels.max()}"
        raise ValueError(f"{both}; every class of the test needs training samples")
    return [train, train_labels.astype(np.int32), test, test_labels.astype(np.int32)]


def check_learnable(part: str, images: np.ndarray, labels: np.ndarray) -> None:
    """Raise ValueError unless images and labels are such that a network can learn from them."""
    if images.dtype != np.uint8:
        raise ValueError(f"the {part} images have dtype {images.dtype}; return uint8, from 0 to 255")
    if images.ndim not in (2, 3) and not (images.ndim == 4 and images.shape[1] == 3):
        last = "; .transpose(0, 3, 1, 2) puts colours first" if images.ndim == 4 and images.shape[3] == 3 else ""
        raise ValueError(f"the {part} images have shape {list(images.shape)}; return {SHAPES}{last}")
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        what = f"have dtype {labels.dtype} and shape {list(labels.shape)}"
        raise ValueError(f"the {part} labels {what}; return whole numbers, one for each image")
    if len(images) != len(labels):
        raise ValueError(f"there are {len(images)} {part} images and {len(labels)} {part} labels; return one for each")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= MOST_CLASSES:
        raise ValueError(f"the {part} labels go from {low} to {high}; return 0 to classes - 1, below {MOST_CLASSES}")


def describe_type(value: Any) -> str:
    """Return what a value is, as in `a tuple of 2`."""
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a value of type {type(value).__name__}"


def compute_statistics(images: np.ndarray) -> tuple[Any, Any]:
    """Return mean and standard deviation of images uint8, scaled to [0, 1]: of each colour where there are colours.

    They are the same for any order of the images: computed from how often each of the 256 values occurs.
    """
    if images.ndim == 4:
        colours = [compute_statistics(images[:, colour]) for colour in range(images.shape[1])]
        return [mean for mean, _ in colours], [std for _, std in colours]
    counts = np.zeros(256, np.int64)
    for image in images:  # one by one: bincount needs eight bytes for each pixel
        counts += np.bincount(image.ravel(), minlength=256)
    values, weights = np.arange(256) / 255, counts / counts.sum()
    mean = float(values @ weights)
    return mean, float(np.sqrt((values - mean) ** 2 @ weights)) or 1.0
