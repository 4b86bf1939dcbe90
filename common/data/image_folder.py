"""An image folder (torchvision's ImageFolder layout: train/<class>/*, val/<class>/*) as uint8 arrays."""

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

from common.core import seeds
from common.core.errors import UserError
from common.core.text import format_count
from common.data.sources import list_files, make_printable
from common.runs.folder import disk_errors

CLASSES_FILE = "classes.json"  # the names of the classes, in the order of the labels
SKIPPED_FILE = "left_out.txt"
MAX_FILES_IN_MESSAGE = 5
LabelledFile = tuple[str, int]  # a file's path in train or val, and its label
DecodedImage = tuple[np.ndarray | None, str]  # pixels uint8 [3, side, side], or None and the reason


def write_folder_as_arrays(
    root: Path, folder: Path, side: int, unreadable: str, seed: int, report: Callable[[int, int], None]
) -> str:
    """Write root/train/<class>/* and root/val/<class>/* as arrays into `folder`.

    Images uint8 [N, 3, side, side] and labels int32 [N]: the shorter edge is resized to `side`, then the centre is
    cropped. Samples are shuffled by the seed, so that the first ones cover all classes. Returns a notice about skipped
    files: those without an image's extension and, with `unreadable` = skip, those that cannot be decoded. More than
    MAX_FILES_IN_MESSAGE files are listed in SKIPPED_FILE. `report(done, total)` is called after each file.

    Raises UserError for unequal classes, a single class, a class without images, a full disk, and, with `unreadable` =
    refuse, for files that cannot be decoded.
    """
    classes, train_samples, train_non_images = list_samples(root / "train")
    val_classes, val_samples, val_non_images = list_samples(root / "val")
    if classes != val_classes:
        differing = sorted(set(classes) ^ set(val_classes))
        names = ", ".join(differing[:MAX_FILES_IN_MESSAGE])
        raise UserError(make_printable(f"{root}/train and val have different classes: {names}"))
    total = len(train_samples) + len(val_samples)
    check_disk_space(root, folder.parent, total, side)
    with disk_errors(folder.parent):
        (folder / CLASSES_FILE).write_text(json.dumps(classes) + "\n")

    counter = itertools.count(1)
    broken: list[str] = []
    for part, array_part, samples in (("train", "train", train_samples), ("val", "test", val_samples)):
        order = seeds.make_generator(seed, "imagefolder", part).permutation(len(samples))
        shuffled = [samples[index] for index in order]
        labels, problems = write_part(
            root / part, shuffled, folder, array_part, side, lambda: report(next(counter), total)
        )
        broken += [f"{part}/{problem}" for problem in problems]
        empty = sorted(set(range(len(classes))) - set(labels))
        if empty and unreadable == "skip":
            class_folder = root / part / classes[empty[0]]
            raise UserError(make_printable(f"no image of {class_folder} can be read: {summarize_files(broken)}"))

    if broken and unreadable == "refuse":
        raise UserError(f"{summarize_files(broken)} cannot be read; repair or remove them, or set data.unreadable=skip")
    non_images = [f"train/{name}" for name in train_non_images] + [f"val/{name}" for name in val_non_images]
    return record_skipped_files(folder, {"cannot be read": broken, "no image extension": non_images})


def write_part(
    source: Path, samples: list[LabelledFile], folder: Path, array_part: str, side: int, report: Callable[[], None]
) -> tuple[list[int], list[str]]:
    """Write the images and labels of one part into `folder`; call `report` after each file.

    Returns the labels of the written images, and the other files with the reason in parentheses. Raises UserError for
    a full disk.
    """
    labels: list[int] = []
    problems: list[str] = []
    with disk_errors(folder.parent), open(folder / f"{array_part}_images.npy", "wb") as file:
        write_npy_header(file, (len(samples), 3, side, side))
        for (name, label), (pixels, problem) in zip(samples, decode_images(source, samples, side), strict=True):
            report()
            if pixels is None:
                problems.append(f"{name} ({problem})")
                continue
            file.write(pixels.data)
            labels.append(label)
        file.seek(0)
        write_npy_header(file, (len(labels), 3, side, side))  # as many bytes as the first header
        np.save(folder / f"{array_part}_labels.npy", np.asarray(labels, np.int32))
    return labels, problems


def record_skipped_files(folder: Path, reasons: dict[str, list[str]]) -> str:
    """Return a notice about skipped files by reason, and list them in SKIPPED_FILE if they are many.

    Raises UserError for a full disk.
    """
    lines = []
    notes = []
    for reason, files in reasons.items():
        lines += [f"{file}: {reason}\n" for file in sorted(files)]
        if files:
            notes.append(f"skipped, {reason}: {summarize_files(files)}")
    if any(len(files) > MAX_FILES_IN_MESSAGE for files in reasons.values()):
        with disk_errors(folder.parent):
            (folder / SKIPPED_FILE).write_bytes(os.fsencode("".join(lines)))
    return "; ".join(notes)


def list_samples(folder: Path) -> tuple[list[str], list[LabelledFile], list[str]]:
    """Return the classes (the sub-folders, sorted), the samples, and all files without an image's extension.

    Raises UserError if there are fewer than two classes, or a class has no image.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS

    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if not classes:
        raise UserError(f"{folder} contains no folders; it needs one folder of images for each class")
    if len(classes) == 1:
        remedy = "training needs two or more; set data.root to a folder with train/<class>/* for each"
        raise UserError(make_printable(f"{folder} contains one class, {classes[0]}; {remedy}"))
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
        raise UserError(make_printable(f"{folder / classes[empty[0]]} contains no image ({extensions}); remove it"))
    return classes, samples, non_images


def check_disk_space(root: Path, cache: Path, count: int, side: int) -> None:
    """Raise UserError unless the disk has space for `count` images of `side` x `side` pixels."""
    needed = count * 3 * side * side
    free = shutil.disk_usage(cache).free
    if needed > free:
        raise UserError(
            f"the {count} images of {root} take {needed / 1e6:,.0f} MB in {cache} with data.image_size={side}, and "
            f"{free / 1e6:,.0f} MB are free; lower data.image_size, free space, or set data.cache to a larger disk"
        )


def write_npy_header(file: BinaryIO, shape: tuple[int, ...]) -> None:
    """Write the header of a uint8 .npy file; numpy pads it, so a later N takes the same number of bytes."""
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})


def decode_images(folder: Path, samples: list[LabelledFile], side: int) -> Iterator[DecodedImage]:
    """Decode images on all cores; yield them in the order of the samples."""
    import torch
    from PIL import Image
    from torchvision.datasets.folder import default_loader
    from torchvision.transforms import v2

    Image.init()  # loads all formats: doing so in several threads at the same time may miss one
    torch.set_num_threads(1)  # the cores work on different images
    transform = v2.Compose([v2.PILToTensor(), v2.Resize(side, antialias=True), v2.CenterCrop(side)])

    def decode_image(path: Path) -> DecodedImage:
        try:
            if not path.is_file():  # a broken link, or a pipe, which would block on opening
                raise OSError("no file")
            return transform(default_loader(path)).contiguous().numpy(), ""
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 (Pillow raises many kinds for unreadable files)
            return None, describe_error(error, path)

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
    """Return the number of files and the names of the first ones."""
    names = ", ".join(sorted(files)[:MAX_FILES_IN_MESSAGE])
    hidden = len(files) - MAX_FILES_IN_MESSAGE
    suffix = f" and {hidden} more" if hidden > 0 else ""
    return make_printable(f"{format_count(len(files), 'file')}: {names}{suffix}")


def describe_error(error: Exception, path: Path) -> str:
    """Return the first line of an error without the path, which the message names already."""
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "not an image, or truncated"
    message = str(error).replace(repr(str(path)), "it")
    lines = message.strip().splitlines()
    return lines[0] if lines else type(error).__name__
