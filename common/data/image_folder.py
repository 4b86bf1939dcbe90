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
from common.data.sources import list_files, to_printable
from common.runs.folder import disk_errors

CLASSES = "classes.json"  # the names of the classes, in the order of the labels
LEFT_OUT = "left_out.txt"
SHOWN = 5  # files that a message names
Sample = tuple[str, int]  # a file's path in train or val, and its label


def write_folder_as_arrays(
    root: Path, beside: Path, side: int, unreadable: str, seed: int, report: Callable[[int, int], None]
) -> str:
    """Write root/train/<class>/* and root/val/<class>/* as arrays into the folder `beside`.

    Images uint8 [N, 3, side, side] and labels int32 [N]: the shorter edge is resized to `side`, then the centre is
    cropped. Samples are shuffled by the seed, so that the first ones cover all classes. Returns a notice about the
    files left out: those without an image's extension and, with `unreadable` = skip, those that cannot be decoded.
    More than SHOWN files are listed in LEFT_OUT. `report(done, total)` is called after each file.

    Raises UserError for unequal classes, a single class, a class without images, a full disk, and, with `unreadable` =
    refuse, for files that cannot be decoded.
    """
    parts = [list_samples(root / name) for name in ("train", "val")]
    classes = parts[0][0]
    if classes != parts[1][0]:
        differing = sorted(set(classes) ^ set(parts[1][0]))
        raise UserError(to_printable(f"{root}/train and val have different classes: {', '.join(differing[:SHOWN])}"))
    total = sum(len(samples) for _, samples, _ in parts)
    check_disk_space(root, beside.parent, total, side)
    done = itertools.count(1)
    with disk_errors(beside.parent):
        (beside / CLASSES).write_text(json.dumps(classes) + "\n")
    broken: list[str] = []
    for part, to, (_, samples, _) in zip(("train", "val"), ("train", "test"), parts, strict=True):
        drawn = [samples[n] for n in seeds.make_generator(seed, "imagefolder", part).permutation(len(samples))]
        labels: list[int] = []
        with disk_errors(beside.parent), open(beside / f"{to}_images.npy", "wb") as file:
            write_npy_header(file, (len(drawn), 3, side, side))
            for (name, label), (pixels, problem) in zip(drawn, decode_images(root / part, drawn, side), strict=True):
                report(next(done), total)
                if pixels is None:
                    broken.append(f"{part}/{name} ({problem})")
                else:
                    file.write(pixels.data)
                    labels.append(label)
            file.seek(0)
            write_npy_header(file, (len(labels), 3, side, side))  # as many bytes as before
            np.save(beside / f"{to}_labels.npy", np.asarray(labels, np.int32))
        left = sorted(set(range(len(classes))) - set(labels))
        if left and unreadable == "skip":
            raise UserError(
                to_printable(f"no image of {root / part / classes[left[0]]} can be read: {summarize_files(broken)}")
            )
    if broken and unreadable == "refuse":
        raise UserError(f"{summarize_files(broken)} cannot be read; mend or remove them, or set data.unreadable=skip")
    others = [f"{part}/{name}" for part, (_, _, names) in zip(("train", "val"), parts, strict=True) for name in names]
    return record_left_out(beside, {"cannot be read": broken, "no images by their names": others})


def record_left_out(beside: Path, reasons: dict[str, list[str]]) -> str:
    """Return a notice about files left out, by reason; list them in LEFT_OUT where there are more than SHOWN.

    Raises UserError for a full disk.
    """
    notes = [(files, why) for why, files in reasons.items() if files]
    if any(len(files) > SHOWN for files, _ in notes):
        lines = [f"{file}: {why}\n" for files, why in notes for file in sorted(files)]
        with disk_errors(beside.parent):
            (beside / LEFT_OUT).write_bytes(os.fsencode("".join(lines)))
    return "; ".join(f"left out, {why}: {summarize_files(files)}" for files, why in notes)


def list_samples(folder: Path) -> tuple[list[str], list[Sample], list[str]]:
    """Return the classes (the sub-folders, sorted), the samples, and all files without an image's extension.

    Raises UserError if there are fewer than two classes, or one without an image.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS

    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if not classes:
        raise UserError(f"{folder} holds no folders, one for each class, with images in them")
    if len(classes) == 1:
        told = "a network tells two or more apart; set data.root to a folder with train/<class>/* for each"
        raise UserError(to_printable(f"{folder} holds one class, {classes[0]}; {told}"))
    numbers = {name: number for number, name in enumerate(classes)}
    samples, others = [], []
    for name in list_files(folder):
        label, within, _ = name.partition("/")
        if within and name.lower().endswith(IMG_EXTENSIONS):
            samples.append((name, numbers[label]))
        else:
            others.append(name)
    empty = sorted(set(range(len(classes))) - {number for _, number in samples})
    if empty:
        raise UserError(
            to_printable(f"{folder / classes[empty[0]]} holds no image ({', '.join(IMG_EXTENSIONS)}); remove it")
        )
    return classes, samples, others


def check_disk_space(root: Path, cache: Path, count: int, side: int) -> None:
    """Raise UserError unless the disk has space for `count` images of `side` x `side` pixels."""
    needed, free = count * 3 * side * side, shutil.disk_usage(cache).free
    if needed > free:
        raise UserError(
            f"the {count} images of {root} take {needed / 1e6:,.0f} MB in {cache} with data.image_size={side}, and "
            f"{free / 1e6:,.0f} MB are free; lower data.image_size, free space, or set data.cache to a larger disk"
        )


def write_npy_header(file: BinaryIO, shape: tuple[int, ...]) -> None:
    """Write the header of a uint8 .npy file; numpy pads it, so that a later N takes the same number of bytes."""
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})


def decode_images(folder: Path, samples: list[Sample], side: int) -> Iterator[tuple[np.ndarray | None, str]]:
    """Yield each sample's pixels uint8 [3, side, side] in order, or None and the reason; decodes on all cores."""
    import torch
    from PIL import Image
    from torchvision.datasets.folder import default_loader
    from torchvision.transforms import v2

    Image.init()  # all formats: several threads that look for one at the same time may miss it
    torch.set_num_threads(1)  # the cores work on different images
    decode = v2.Compose([v2.PILToTensor(), v2.Resize(side, antialias=True), v2.CenterCrop(side)])

    def decode_image(path: Path) -> tuple[np.ndarray | None, str]:
        try:
            if not path.is_file():  # a broken link, or a pipe, whose opening would block
                raise OSError("no file")
            return decode(default_loader(path)).contiguous().numpy(), ""
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 (Pillow raises many kinds for what it cannot read)
            return None, describe_error(error, path)

    cores = len(os.sched_getaffinity(0))
    waiting: collections.deque[Future[tuple[np.ndarray | None, str]]] = collections.deque()
    with ThreadPoolExecutor(cores) as pool:
        for name, _ in samples:
            waiting.append(pool.submit(decode_image, folder / name))
            if len(waiting) > 4 * cores:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def summarize_files(files: list[str]) -> str:
    """Return the number of files and the names of the first ones."""
    more = f" and {len(files) - SHOWN} more" if len(files) > SHOWN else ""
    return to_printable(f"{format_count(len(files), 'file')}: {', '.join(sorted(files)[:SHOWN])}{more}")


def describe_error(error: Exception, path: Path) -> str:
    """Return the first line of an error, without the path, which the message names anyway."""
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "no image, or cut off"
    words = str(error).replace(repr(str(path)), "it")
    return (words.strip().splitlines() or [type(error).__name__])[0]
