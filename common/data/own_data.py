"""Custom data sets: validation and storage of the four arrays or two map-style data sets of a user's function."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.config.custom_function import (
    convert_errors_of_user_file,
    load_function,
    locate_function_file,
    replace_file_with_run_copy,
)
from common.config.lookup import import_object
from common.data import prepare, sources
from common.runs.folder import convert_disk_errors
from configs.data_rules import DATA_SETS
from configs.shared import Data

SET_NAMES = ", ".join(DATA_SETS)
USAGE = (
    "function(root) must return train inputs, train targets, test inputs and test targets as NumPy arrays, or two "
    "map-style data sets, for training and test"
)
ARRAY_NAMES = ("train inputs", "train targets", "test inputs", "test targets")
SHAPES = "[N, H, W], [N, 3, H, W] or, for vectors, [N, D]; float32 arrays may have any shape"
MAX_CLASSES = 10_000


def prepare_custom_dataset(data: Data, code: Path | None) -> prepare.PreparedDataset:
    """Find or prepare the custom data set that `FILE.py:function` returns (see sources.py).

    Raises UserError if the function cannot be loaded, fails, or returns unsuitable arrays.
    """
    function = replace_file_with_run_copy(data.name, code and code / sources.RUN_SOURCE_FILE)
    file = Path(locate_function_file("data.name", function, SET_NAMES))
    root = Path(data.root)
    with convert_errors_of_user_file("data.name", function):
        state = f"{prepare.hash_file(file)} {function.rpartition(':')[2]} {root.resolve()}"

    def write_arrays(folder: Path) -> str:
        files = [folder / f"{part}.npy" for part in prepare.PARTS]
        return str(sources.call_in_subprocess(write_custom_data, function, root, files, limit=prepare.READ_TIMEOUT))

    prepared = prepare.find_or_prepare_dataset(Path(data.cache), "own", state, write_arrays)
    return dataclasses.replace(prepared, name=data.name)


def write_custom_data(function_name: str, root: Path, files: Sequence[Path]) -> str:
    """Call the user's function and write the four arrays that it returns to `files`.

    `function_name` is `FILE.py:function`. The function is called with `root` (data.root). The arrays are written in the
    order of ARRAY_NAMES. If the function returns map-style data sets, only their description is written. The user's
    file, `root` and the statistics of uint8 inputs are stored in the same folder. Returns an empty string, because a
    custom data set has no notice for the user. Raises UserError, with file and line, if the function fails or if the
    data is unsuitable for training.
    """
    folder = files[0].parent
    function = load_function("data.name", function_name, SET_NAMES)
    with convert_errors_of_user_file("data.name", function_name, function, USAGE):
        data = function(root)
        if isinstance(data, tuple | list) and len(data) == 2:
            describe_datasets = import_object("common.data.map_style:describe_datasets")
            description = describe_datasets(data, function_name.rpartition(":")[2])
            contents = {
                folder / f"{sources.DESCRIPTION}.npy": np.frombuffer(json.dumps(description).encode(), np.uint8)
            }
        else:
            contents = dict(zip(files, check_arrays(data), strict=True))
    with convert_disk_errors(folder.parent):
        for file, array in contents.items():
            np.save(file, np.ascontiguousarray(array))
        shutil.copyfile(function_name.rpartition(":")[0], folder / sources.SOURCE_FILE)
        (folder / sources.ROOT_FILE).write_text(json.dumps({"root": str(root.resolve())}) + "\n")
        inputs = contents.get(files[0])
        if inputs is not None and inputs.dtype == np.uint8:
            mean, std = compute_pixel_statistics(inputs)
            (folder / sources.STATISTICS_FILE).write_text(json.dumps({"mean": mean, "std": std}) + "\n")
    return ""


def check_arrays(arrays: Any) -> list[np.ndarray]:
    """Check the four arrays of a custom data set, and return them with the types in which they are stored.

    Inputs are stored as uint8 or float32, class labels as int32, and other targets as int64 or float32. Raises
    ValueError or TypeError if the arrays are unsuitable for training.
    """
    if not isinstance(arrays, tuple | list) or len(arrays) != len(ARRAY_NAMES):
        raise TypeError(f"the function returned {describe_type(arrays)}")
    for name, array in zip(ARRAY_NAMES, arrays, strict=True):
        if not isinstance(array, np.ndarray):
            raise TypeError(f"the {name} are {describe_type(array)}")
        if 0 in array.shape:
            raise ValueError(f"the {name} are empty: their shape is {list(array.shape)}")
    checked = []
    for part, inputs, targets in (("train", *arrays[:2]), ("test", *arrays[2:])):
        if len(inputs) != len(targets):
            counts = f"there are {len(inputs)} {part} inputs but {len(targets)} {part} targets"
            raise ValueError(f"{counts}; return one target for each input")
        checked += [check_inputs(part, inputs), check_targets(part, targets)]
    train, train_targets, test, test_targets = checked
    for name, train_array, test_array in (("input", train, test), ("target", train_targets, test_targets)):
        if train_array.shape[1:] != test_array.shape[1:]:
            shapes = f"{list(train_array.shape[1:])}, but each test {name} has shape {list(test_array.shape[1:])}"
            raise ValueError(f"each train {name} has shape {shapes}; the shapes must be equal")
        if train_array.dtype != test_array.dtype:
            types = f"the train {name}s are stored as {train_array.dtype}, but the test {name}s as {test_array.dtype}"
            raise ValueError(f"{types}; return the same kind of numbers")
    if train_targets.dtype.kind == "i" and test_targets.max() > train_targets.max():
        maxima = f"the largest test label is {test_targets.max()}, but the largest train label is {train_targets.max()}"
        raise ValueError(f"{maxima}; every class of the test set must have training samples")
    return checked


def check_inputs(part: str, inputs: np.ndarray) -> np.ndarray:
    """Return the inputs of a part as uint8 or float32. Raises ValueError for another type, shape or value."""
    if inputs.dtype.kind == "f":
        return convert_to_float32(f"{part} inputs", inputs)
    if inputs.dtype != np.uint8:
        problem = f"the {part} inputs have dtype {inputs.dtype}"
        remedy = "return pixels as uint8 values from 0 to 255, and all other numbers as float32"
        raise ValueError(f"{problem}; {remedy} (the network can convert token numbers with x.long())")
    is_color = inputs.ndim == 4 and inputs.shape[1] == 3
    if inputs.ndim not in (2, 3) and not is_color:
        has_colors_last = inputs.ndim == 4 and inputs.shape[3] == 3
        hint = "; .transpose(0, 3, 1, 2) moves the colors to the second axis" if has_colors_last else ""
        raise ValueError(f"the {part} inputs have dtype uint8 and shape {list(inputs.shape)}; return {SHAPES}{hint}")
    return inputs


def check_targets(part: str, targets: np.ndarray) -> np.ndarray:
    """Return the targets of a part: class labels [N] as int32, other targets [N, ...] as int64 or float32.

    Raises ValueError for another type or value.
    """
    if targets.dtype.kind == "f":
        return convert_to_float32(f"{part} targets", targets)
    if targets.dtype.kind not in "iu":
        problem = f"the {part} targets have dtype {targets.dtype}"
        raise ValueError(f"{problem}; return integers (class labels) or floats (for a regression)")
    low = int(targets.min())
    high = int(targets.max())
    if low < 0 or high >= MAX_CLASSES:
        problem = f"the {part} labels range from {low} to {high}"
        limits = f"return labels from 0 to classes - 1, for at most {MAX_CLASSES} classes"
        raise ValueError(f"{problem}; {limits}, or floats for a regression")
    return targets.astype(np.int32 if targets.ndim == 1 else np.int64)


def convert_to_float32(name: str, array: np.ndarray) -> np.ndarray:
    """Return an array as float32. Raises ValueError if it contains NaN or infinity."""
    converted = array.astype(np.float32, copy=False)
    for number, sample in enumerate(converted):  # one sample at a time, because isfinite allocates memory
        if not np.isfinite(sample).all():
            raise ValueError(f"the {name} contain NaN or infinity, first in sample {number}; remove such samples")
    return converted


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
