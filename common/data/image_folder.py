"""Conversion of an image folder to uint8 arrays.

The image folder has the layout of torchvision's ImageFolder: train/<class>/* and val/<class>/*.
"""

from __future__ import annotations

import collections
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np

from common.data.sources import CLASSES_FILE, SKIPPED_FILE, list_files, make_printable
from common.runs.folder import convert_disk_errors
from common.system import seeds
from common.system.errors import UserError
from common.system.text import format_count

MAX_FILES_IN_MESSAGE = 5
LabelledFile = tuple[str, int]  # path of a file relative to train or val, and its label
DecodedImage = tuple[np.ndarray | None, str]  # uint8 pixels [3, side, side] and "", or None and the error


def write_folder_as_arrays(
    root: Path, folder: Path, side: int, unreadable: str, seed: int, report: Callable[[int, int], None]
) -> str:
    """Convert the images in root/train/<class> and root/val/<class> to arrays in `folder`.

    Images become uint8 [N, 3, side, side], and labels become int32 [N]. The shorter edge of each image is resized to
    `side`, and the center is cropped. Samples are shuffled with the seed, so that the first samples cover all classes.
    `report(done, total)` is called after each file.

    Returns a notice about skipped files. Files without an image extension are always skipped. Files that cannot be
    decoded are skipped if `unreadable` is "skip", and raise UserError if `unreadable` is "refuse". If more than
    MAX_FILES_IN_MESSAGE files are skipped for the same reason, all skipped files are listed in SKIPPED_FILE.

    Raises UserError if train and val have different classes, if there is only one class, if a class has no images, or
    if the disk is full.
    """
    classes, train_samples, train_non_images = list_samples(root / "train")
    val_classes, val_samples, val_non_images = list_samples(root / "val")
    if classes != val_classes:
        differing = sorted(set(classes) ^ set(val_classes))
        names = ", ".join(differing[:MAX_FILES_IN_MESSAGE])
        problem = f"{root}/train and {root}/val must contain the same classes; only one of them contains: {names}"
        raise UserError(make_printable(problem))
    total = len(train_samples) + len(val_samples)
    check_disk_space(root, folder.parent, total, side)
    with convert_disk_errors(folder.parent):
        (folder / CLASSES_FILE).write_text(json.dumps(classes) + "\n")

    counter = itertools.count(1)
    broken: list[str] = []
    for part, array_part, samples in (("train", "train", train_samples), ("val", "test", val_samples)):
        # Write the samples of this part in random order.
        order = seeds.make_generator(seed, "imagefolder", part).permutation(len(samples))
        shuffled = [samples[index] for index in order]
        labels, problems = write_dataset_part(
            root / part, shuffled, folder, array_part, side, lambda: report(next(counter), total)
        )
        broken += [f"{part}/{problem}" for problem in problems]

        # Every class needs at least one image that can be decoded.
        empty = sorted(set(range(len(classes))) - set(labels))
        if empty and unreadable == "skip":
            class_folder = root / part / classes[empty[0]]
            raise UserError(make_printable(f"no image in {class_folder} can be read: {summarize_files(broken)}"))

    if broken and unreadable == "refuse":
        raise UserError(f"cannot read {summarize_files(broken)}; repair or remove them, or set data.unreadable=skip")
    non_images = [f"train/{name}" for name in train_non_images] + [f"val/{name}" for name in val_non_images]
    reasons = {"cannot be read": broken, "not in the folder of a class": [], "no image extension": []}
    for path in non_images:
        is_in_class = path.count("/") > 1
        reasons["no image extension" if is_in_class else "not in the folder of a class"].append(path)
    return record_skipped_files(folder, reasons)


def write_dataset_part(
    source: Path, samples: list[LabelledFile], folder: Path, array_part: str, side: int, report: Callable[[], None]
) -> tuple[list[int], list[str]]:
    """Write the images and labels of one part to `folder`, and call `report` after each file.

    Returns the labels of the written images, and a list of the files that cannot be decoded, each with the reason in
    parentheses. Raises UserError if the disk is full.
    """
    labels: list[int] = []
    problems: list[str] = []
    with convert_disk_errors(folder.parent), open(folder / f"{array_part}_images.npy", "wb") as file:
        write_npy_header(file, (len(samples), 3, side, side))
        for (name, label), (pixels, problem) in zip(samples, decode_images(source, samples, side), strict=True):
            report()
            if pixels is None:
                problems.append(f"{name} ({problem})")
                continue
            file.write(pixels.data)
            labels.append(label)
        file.seek(0)
        write_npy_header(file, (len(labels), 3, side, side))  # same size as the first header, but final sample count
        np.save(folder / f"{array_part}_labels.npy", np.asarray(labels, np.int32))
    return labels, problems


def record_skipped_files(folder: Path, reasons: dict[str, list[str]]) -> str:
    """Return a notice about skipped files, and write SKIPPED_FILE if the notice cannot name all skipped files.

    `reasons` contains a list of the skipped files for each reason. Raises UserError if the disk is full.
    """
    lines = []
    notes = []
    for reason, files in reasons.items():
        lines += [f"{file}: {reason}\n" for file in sorted(files)]
        if files:
            notes.append(f"skipped ({reason}): {summarize_files(files)}")
    if any(len(files) > MAX_FILES_IN_MESSAGE for files in reasons.values()):
        with convert_disk_errors(folder.parent):
            (folder / SKIPPED_FILE).write_bytes(os.fsencode("".join(lines)))
    return "; ".join(notes)


def list_samples(folder: Path) -> tuple[list[str], list[LabelledFile], list[str]]:
    """Return the classes, the samples, and the other files, which have no image extension or are in no class folder.

    The classes are the sorted names of the subfolders of `folder`. Raises UserError if there are fewer than two
    classes, or if a class has no image.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS

    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if not classes:
        raise UserError(f"{folder} contains no folders; it must contain one folder of images for each class")
    if len(classes) == 1:
        remedy = "training requires at least two; set data.root to a folder with train/<class>/* for each class"
        raise UserError(make_printable(f"{folder} contains only one class ({classes[0]}); {remedy}"))
    labels = {name: label for label, name in enumerate(classes)}
    samples = []
    non_images = []
    for path in list_files(folder):
        class_name, _, file = path.partition("/")
        if file and path.lower().endswith(IMG_EXTENSIONS):
            samples.append((path, labels[class_name]))
        else:
            non_images.append(path)
    empty = sorted(set(labels.values()) - {label for _, label in samples})
    if empty:
        extensions = ", ".join(IMG_EXTENSIONS)
        problem = f"{folder / classes[empty[0]]} contains no image ({extensions})"
        raise UserError(make_printable(f"{problem}; add images or remove this folder"))
    return classes, samples, non_images


def check_disk_space(root: Path, cache: Path, count: int, side: int) -> None:
    """Raise UserError if the disk does not have enough space for `count` images of `side` x `side` pixels."""
    needed = count * 3 * side * side
    free = shutil.disk_usage(cache).free
    if needed > free:
        raise UserError(
            f"the {count} images in {root} need {needed / 1e6:,.0f} MB in {cache} with data.image_size={side}, but "
            f"{free / 1e6:,.0f} MB are free; lower data.image_size, free some space, or set data.cache to a larger disk"
        )


def write_npy_header(file: BinaryIO, shape: tuple[int, ...]) -> None:
    """Write the header of a .npy file with uint8 data.

    NumPy pads the header, so the header can be overwritten with the final number of samples later.
    """
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})


def decode_images(folder: Path, samples: list[LabelledFile], side: int) -> Iterator[DecodedImage]:
    """Decode images on all CPU cores, and yield them in the order of the samples."""
    import torch
    from PIL import Image
    from torchvision.datasets.folder import default_loader
    from torchvision.transforms import v2

    Image.init()  # registers all image formats; if several threads do this at the same time, a format may be missing
    torch.set_num_threads(1)  # each core decodes a different image
    transform = v2.Compose([v2.PILToTensor(), v2.Resize(side, antialias=True), v2.CenterCrop(side)])

    def decode_image(path: Path) -> DecodedImage:
        """Return the pixels of an image, or a description of the error."""
        try:
            if not path.is_file():  # a broken link, or a pipe, which would block when opened
                raise OSError("not a regular file")
            with Image.open(path) as image:
                if image.mode == "F" or image.mode.startswith("I"):  # the conversion to RGB would clip the values
                    raise ValueError(f"pixels of the type {image.mode} have more than 8 bits; convert the image")
            return transform(default_loader(path)).contiguous().numpy(), ""
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 (Pillow raises many types of exceptions for unreadable files)
            return None, describe_decoding_error(error, path)

    # Decode at most 4 * cores images ahead, so that the decoded images do not fill the memory.
    cores = len(os.sched_getaffinity(0))
    pending: collections.deque[Future[DecodedImage]] = collections.deque()
    with ThreadPoolExecutor(cores) as pool:
        for name, _ in samples:
            pending.append(pool.submit(decode_image, folder / name))
            if len(pending) > 4 * cores:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def summarize_files(files: list[str]) -> str:
    """Return the number of files and the names of the first few files as text."""
    names = ", ".join(sorted(files)[:MAX_FILES_IN_MESSAGE])
    hidden = len(files) - MAX_FILES_IN_MESSAGE
    suffix = f" and {hidden} more" if hidden > 0 else ""
    return make_printable(f"{format_count(len(files), 'file')}: {names}{suffix}")


def describe_decoding_error(error: Exception, path: Path) -> str:
    """Return the first line of the message of a decoding error, without the path of the image."""
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "not an image, or truncated"
    message = str(error).replace(repr(str(path)), "it")
    lines = message.strip().splitlines()
    return lines[0] if lines else type(error).__name__
